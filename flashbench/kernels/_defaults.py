"""The configuration that each bundled kernel is launched with where nobody gives another, as numbers.

    found(name, problem, pass_, target) -> {"dq": {"block_q": 64, "block_k": 64, "num_warps": 4, …}, …}

For a card that need not be here, and the same whether or not Triton interprets in this process: nothing is
imported from it. The exact gate writes these down (``gating``), so that no table changes unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, fields, replace
from typing import Any

from flashbench import decode_configs, hopper_configs
from flashbench.decode_configs import DecodeConfig, Shape
from flashbench.flash_configs import FP8_CAPABILITY, Config, math_of
from flashbench.hopper_configs import BackwardTiles, Tiles
from flashbench.kernels import Target, _hopper_fp8_row, _hopper_row, get, unsupported_features
from flashbench.problem import Problem

Found = dict[str, dict[str, int]]
"""By kernel, each number by name."""

HOPPER = "hopper_kernels"
"""1 where Hopper's kernels run, of an implementation that has the choice."""
_CONFIGS = (Config, Tiles, BackwardTiles, DecodeConfig)
FIELDS = tuple(dict.fromkeys((*(field.name for one in _CONFIGS for field in fields(one)), HOPPER)))
"""Every number that a configuration may have."""

PAGES = (16, 256)
"""Of a cache in small pages and in large ones."""


def found(name: str, problem: Problem, pass_: str, target: Target) -> Found:
    """Of each kernel of the pass; empty where the implementation has none for the problem there."""
    return _FINDERS[name](name, problem, pass_, target)


def _portable(name: str, problem: Problem, pass_: str, target: Target) -> Found:
    return {} if unsupported_features(problem, ()) else _described(name, problem, pass_, target)


def _portable_fp8(name: str, problem: Problem, pass_: str, target: Target) -> Found:
    takes = problem.dtype_bytes == 1 and pass_ == "fwd" and (target.capability or (0, 0)) >= FP8_CAPABILITY
    return _described(name, problem, pass_, target) if takes else {}


def _hopper(name: str, problem: Problem, pass_: str, target: Target) -> Found:
    if _hopper_row.why_unsupported(problem, "fwd", target):
        return {}
    numbers = _described(name, problem, pass_, target)
    if "fwd" in numbers:
        numbers["fwd"] |= _numbers(_hopper_row.choose(problem))
    if "bwd" in numbers:
        p = problem
        numbers["bwd"] |= _numbers(
            hopper_configs.choose_backward(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
        )
    return numbers


def _hopper_fp8(name: str, problem: Problem, pass_: str, target: Target) -> Found:
    if _hopper_fp8_row.why_unsupported(problem, pass_, target):
        return {}
    own = _numbers(_hopper_fp8_row.tiles_of(problem))
    return {"fwd": _described(name, problem, pass_, target)["fwd"] | own}


def _choice(name: str, problem: Problem, pass_: str, target: Target) -> Found:
    """Of what runs one of two implementations: which; the rest is said of those."""
    if (problem.dtype_bytes == 1) != name.endswith("fp8"):
        return {}
    return {"choice": {HOPPER: int(get(name).runs(problem, target) is not None)}}


def _decode(name: str, problem: Problem, pass_: str, target: Target) -> Found:
    """Over each kind of cache; how one query of each sequence has its keys split on a card like an H100."""
    if pass_ != "fwd" or problem.dtype_bytes == 1:
        return {}
    one = replace(problem, seqlen_q=1, causal=False)
    numbers = _described(name, one, pass_, replace(target, num_sms=hopper_configs.PROGRAMS))
    whole = Shape(math_of(one.dtype), one.head_dim, one.head_dim_v, one.dtype_bytes)
    caches = {"fwd": whole, **{f"fwd-pages-of-{size}": replace(whole, page_size=size) for size in PAGES}}
    if whole.math == "half" and (target.capability or (0, 0)) >= FP8_CAPABILITY:
        caches["fwd-fp8-cache"] = replace(whole, kv_bytes=1)
    limits = target.capability, target.smem_per_block_bytes
    for kernel, shape in caches.items():
        numbers[kernel] = numbers.get(kernel, {}) | _numbers(decode_configs.choose(shape, *limits))
    return numbers


def _described(name: str, problem: Problem, pass_: str, target: Target) -> Found:
    """The numbers of ``Implementation.on_card`` by kernel: ``dq_block_q`` is dq's block_q."""
    by_kernel: Found = {}
    for key, value in get(name).on_card(problem, pass_, target).items():
        kernel, _, field = key.partition("_")
        if field in FIELDS:
            by_kernel.setdefault(kernel, {})[field] = int(value)
    return by_kernel


def _numbers(config: Any) -> dict[str, int]:
    return {field: int(value) for field, value in asdict(config).items()}


_FINDERS: Mapping[str, Callable[[str, Problem, str, Target], Found]] = {
    "flash": _choice,
    "flash-decode": _decode,
    "flash-fp8": _choice,
    "flash-v1": _portable,
    "flash-v2": _portable,
    "flash-v2-atomic": _portable,
    "flash-v2-fp8": _portable_fp8,
    "flash-v3": _hopper,
    "flash-v3-fp8": _hopper_fp8,
}
NAMES = tuple(_FINDERS)
"""Every bundled implementation: a new one needs its row, which a test asks for."""
