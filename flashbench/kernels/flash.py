"""flash, flash-v2: FlashAttention-2 in portable Triton, both passes, for any GPU that Triton serves.

On a machine without a GPU the same kernels run in Triton's interpreter: checked, never timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashbench.flash_configs import (
    KERNELS,
    MAX_HEAD_DIM,
    Config,
    choose,
    math_of,
    shared_bytes,
    with_bias,
)
from flashbench.kernels import Call, Implementation, Target, _triton, unsupported_features
from flashbench.problem import ALIGNMENTS, Cell, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

_FIELDS = ("block_q", "block_k", "num_warps", "num_stages")
_KERNELS = {"fwd": ("fwd",), "bwd": ("delta", "dkdv", "dq"), "fwd+bwd": KERNELS}

TAKEN = {
    "window", "top-left", "softcap", "alibi", "bias", "sinks", "dropout", "varlen", "bshd", "deterministic",
}  # fmt: skip
"""Features (``unsupported_features``) that the kernels take."""


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """Return the call that computes o; inputs as from ``make_inputs``, any strides.

    Raises UnavailableError where Triton is missing or was imported in the other mode.
    """
    return prepare_tiles(problem, inputs, {})


def prepare_tiles(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
    """As prepare, with the tiles of config (as ``describe`` gives them) for the kernels that it names."""
    q, k, v = inputs.q, inputs.k, inputs.v
    module = _triton.load(q.device.type)
    options = {
        "causal": problem.causal,
        "window": problem.window,
        "top_left": problem.alignment != ALIGNMENTS[0],
        "softmax_scale": problem.softmax_scale,
        "softcap": problem.softcap,
        "alibi_slopes": inputs.alibi_slopes,
        "bias": inputs.bias,
        "sinks": inputs.sinks,
        "dropout_p": problem.dropout_p,
        "seed": inputs.seed,
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": inputs.cu_seqlens_k,
        "max_seqlen_q": problem.seqlen_q,
        "max_seqlen_k": problem.seqlen_k,
        "tf32": problem.dtype == "tf32",
        "configs": tuple(
            (kernel, Config(*(config[f"{kernel}_{field}"] for field in _FIELDS)))
            for kernel in KERNELS
            if f"{kernel}_block_q" in config
        ),
    }

    def call() -> Tensor:
        output: Tensor = module.flash_attention(q, k, v, **options)
        return output

    return call


def why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
    """Why the kernels refuse the problem, one sentence, or None."""
    if reason := unsupported_features(problem, TAKEN):
        return reason
    widest = max(problem.head_dim, problem.head_dim_v)
    if widest > MAX_HEAD_DIM:
        return f"head_dim {widest} is larger than {MAX_HEAD_DIM}"
    if _triton.interpreted(target):
        if problem.dtype == "tf32":
            return "TF32 products exist on NVIDIA GPUs only; fp32 runs here"
        return None
    if target.capability is not None and target.capability < (8, 0) and problem.dtype in ("bf16", "tf32"):
        return f"{problem.dtype} needs sm80, this is sm{target.capability[0]}{target.capability[1]}"
    limit = target.smem_per_block_bytes
    for kernel, config in _configs(problem, pass_, target).items():
        shape = math_of(problem.dtype), problem.head_dim, problem.head_dim_v
        need = shared_bytes(kernel, config, *shape, target.capability)
        if limit is not None and need > limit:
            return f"{kernel} kernel needs {need} B of shared memory per block, limit {limit} B"
    return None


def describe(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """Tile rows, warps and stages of each kernel of the pass: ``fwd_block_q``, ``dkdv_num_warps``, …"""
    return _named(_configs(problem, pass_, target))


def on_card(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """As describe, for a card that need not be here, in whichever mode Triton is in this process."""
    return _named(_chosen(problem, pass_, target.capability, target.smem_per_block_bytes))


def _named(configs: Mapping[str, Config]) -> Mapping[str, Any]:
    return {
        f"{kernel}_{field}": getattr(config, field) for kernel, config in configs.items() for field in _FIELDS
    }


def precompile(cells: Sequence[Cell], target: Target) -> None:
    """Compile in parallel what the cells need, into Triton's cache; nothing in the interpreter."""
    if _triton.interpreted(target) or _triton.why_unavailable(target) is not None:
        return
    from flashbench.kernels import _compile

    _compile.precompile(cells, target)


def _configs(problem: Problem, pass_: str, target: Target) -> dict[str, Config]:
    capability, limit = target.capability, target.smem_per_block_bytes
    if _triton.interpreted(target):
        capability = limit = None
    return _chosen(problem, pass_, capability, limit)


def _chosen(
    problem: Problem, pass_: str, capability: tuple[int, int] | None, limit: int | None
) -> dict[str, Config]:
    shape = math_of(problem.dtype), problem.head_dim, problem.head_dim_v
    found = {kernel: choose(kernel, *shape, capability, limit) for kernel in _KERNELS[pass_]}
    if problem.bias and 1 not in problem.bias_shape[2:]:
        found = {kernel: c if kernel == "delta" else with_bias(c) for kernel, c in found.items()}
    return found


_V2 = Implementation(
    name="flash-v2",
    summary="FlashAttention-2 in portable Triton (bundled): Q outer, recomputing backward, no atomics",
    prepare=prepare,
    io_model="flash",
    why_unavailable=_triton.why_unavailable,
    why_unsupported=why_unsupported,
    describe=describe,
    interpreted=_triton.interpreted,
    precompile=precompile,
    prepare_tiles=prepare_tiles,
    on_card=on_card,
)

IMPLEMENTATIONS = (
    replace(
        _V2,
        name="flash",
        summary="the best of the bundled kernels for the card; the row names which: today flash-v2 on all",
        backend=lambda call: _V2.name,
    ),
    _V2,
)
