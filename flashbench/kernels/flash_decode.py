"""flash-decode: split-KV attention (Flash-Decoding) in portable Triton, for few queries over many keys.

On a machine without a GPU the same kernels run in Triton's interpreter: checked, never timed. Paged and
fp8 caches are ``_flash_decode``'s and the command ``decode``'s; here K and V are as in Problem.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from flashbench import decode_configs
from flashbench.decode_configs import DecodeConfig, Shape, math_of
from flashbench.kernels import Call, Candidate, Implementation, Target, _triton, unsupported_features
from flashbench.kernels._kernels_of import why_unfit
from flashbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

_FIELDS = {"fwd_block_k": "block_k", "fwd_num_warps": "num_warps", "fwd_num_stages": "num_stages"}
"""Of describe, and of DecodeConfig."""

_ALSO = {"fwd_resident": "resident", "fwd_ahead": "ahead"}
"""The same, of what only a configuration that was tuned says."""

TAKEN = {"bshd", "deterministic"}
"""Features (``unsupported_features``) that the kernels take."""


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """Return the call that computes o; inputs as from ``make_inputs``, any strides with a unit last one.

    Raises UnavailableError where Triton is missing or was imported in the other mode.
    """
    return prepare_tiles(problem, inputs, {})


def prepare_tiles(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
    """As prepare, with the tiles of config as ``describe`` gives them; the lengths are made here, once."""
    call: Call = _call(problem, inputs, config, return_lse=False)
    return call


def prepare_lse(
    problem: Problem, inputs: Inputs, config: Mapping[str, Any]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """As prepare_tiles, of a call that returns (o, lse)."""
    call: Callable[[], tuple[Tensor, Tensor]] = _call(problem, inputs, config, return_lse=True)
    return call


def _call(
    problem: Problem, inputs: Inputs, config: Mapping[str, Any], *, return_lse: bool
) -> Callable[[], Any]:
    q, k, v = inputs.q, inputs.k, inputs.v
    module = _triton.load(q.device.type, "_flash_decode")
    cache = module.Cache(k=k, v=v, seqused_k=module.Cache(k=k, v=v).lengths())
    tiles = {field: config[name] for name, field in {**_FIELDS, **_ALSO}.items() if name in config}
    how = module.Call(
        causal=problem.causal,
        scale=problem.softmax_scale,
        tf32=problem.dtype == "tf32",
        split_keys=config.get("split_block_k"),
        config=DecodeConfig(**tiles) if tiles else None,
    )
    return partial(module.run, q, cache, how, return_lse=return_lse)


def why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
    """Why the kernels refuse the problem, one sentence, or None."""
    if pass_ != "fwd":
        return "decoding has no backward"
    if reason := unsupported_features(problem, TAKEN) or why_unfit(problem, target):
        return reason
    if _triton.interpreted(target):
        return None
    shape = _shape(problem)
    need = decode_configs.shared_bytes(_config(shape, target), shape)
    if target.smem_per_block_bytes is not None and need > target.smem_per_block_bytes:
        return f"it needs {need} B of shared memory per block, limit {target.smem_per_block_bytes} B"
    return None


def describe(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """Tile rows, warps and stages, and as ``split_block_k`` the keys of a split."""
    interpreted = _triton.interpreted(target)
    return on_card(problem, pass_, Target() if interpreted else target)


def on_card(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """As describe, for a card that need not be here, in whichever mode Triton is in this process."""
    config = _config(_shape(problem), target)
    tiles = {name: getattr(config, field) for name, field in _FIELDS.items()}
    return tiles | _split(problem, config, target)


def follows(problem: Problem, config: Mapping[str, Any], target: Target) -> Mapping[str, Any]:
    """As ``Implementation.follows``: the query tile, and the keys of a split."""
    fields = {field: config[name] for name, field in {**_FIELDS, **_ALSO}.items() if name in config}
    return _split(problem, DecodeConfig(**fields), target)


def candidates(problem: Problem, pass_: str, target: Target) -> Sequence[Candidate]:
    """As ``Implementation.candidates``, of a contiguous cache in q's dtype."""
    return tried(_shape(problem), target)


def tried(shape: Shape, target: Target) -> list[Candidate]:
    """The candidates of the kernel over any cache."""
    own = _config(shape, target)
    return [
        Candidate(
            kernel="fwd",
            compiled="decode",
            config=replace(config, resident=own.resident),  # which decides on splits, not on code
            tiles={name: getattr(config, field) for name, field in {**_FIELDS, **_ALSO}.items()},
            shared_bytes=decode_configs.shared_bytes(config, shape),
        )
        for config in decode_configs.candidates(own, shape)
    ]


def _split(problem: Problem, config: DecodeConfig, target: Target) -> dict[str, Any]:
    block_q = decode_configs.block_q(problem.group * problem.seqlen_q, math_of(problem.dtype))
    heads = problem.batch * problem.num_kv_heads
    tiles = heads * -(-problem.group * problem.seqlen_q // block_q)
    slots = decode_configs.slots(config, target.num_sms or 0)
    keys = decode_configs.keys_per_split(problem.seqlen_k, tiles, config.block_k, slots)
    return {"fwd_block_q": block_q, "split_block_q": block_q, "split_block_k": keys}


def _shape(problem: Problem) -> Shape:
    return Shape(math_of(problem.dtype), problem.head_dim, problem.head_dim_v, problem.dtype_bytes)


def _config(shape: Shape, target: Target) -> DecodeConfig:
    return decode_configs.choose(shape, target.capability, target.smem_per_block_bytes)


IMPLEMENTATIONS = (
    Implementation(
        name="flash-decode",
        summary="Flash-Decoding in Triton (bundled): split keys, packed heads, forward only",
        prepare=prepare,
        io_model="flash-decode",
        why_unavailable=_triton.why_unavailable,
        why_unsupported=why_unsupported,
        describe=describe,
        interpreted=_triton.interpreted,
        prepare_tiles=prepare_tiles,
        prepare_lse=prepare_lse,
        on_card=on_card,
        candidates=candidates,
        follows=follows,
    ),
)
