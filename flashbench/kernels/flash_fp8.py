"""flash-v2-fp8: FlashAttention-2's forward in 8-bit floats, in portable Triton; flash-fp8.

flash-fp8 runs flash-v3-fp8 on the cards and problems that it takes, and flash-v2-fp8 else; its row names
which, and why not flash-v3-fp8 on a card that has it.

prepare rotates and rounds q, k and v, which a model would do as it writes them, and is not timed; the call is
the kernel. It has no backward, as nobody trains through an attention in fp8 (FlashAttention-3 neither).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashbench.flash_configs import FP8_CAPABILITY, Config, choose, shared_bytes
from flashbench.kernels import (
    Call,
    Candidate,
    Implementation,
    Target,
    _hopper_fp8_row,
    _triton,
    unsupported_features,
)
from flashbench.kernels._best import Best
from flashbench.kernels._kernels_of import TILE, precompile, tried, why_unfit
from flashbench.problem import DTYPES, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """Return the call that computes o in q's dtype, of 16 or 32 bits; the inputs are not rounded yet.

    Raises UnavailableError where Triton is missing or was imported in the other mode.
    """
    return prepare_tiles(problem, inputs, {})


def prepare_tiles(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
    """As prepare, with the tiles of config (as ``describe`` gives them) where it has any."""
    both = _both(problem, inputs, config)
    return lambda: both()[0]


def prepare_lse(
    problem: Problem, inputs: Inputs, config: Mapping[str, Any]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """As prepare_tiles, of a call that returns (o, lse)."""
    return _both(problem, inputs, config)


def _both(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Callable[[], tuple[Tensor, Tensor]]:
    import torch

    q, k, v = inputs.q, inputs.k, inputs.v
    _triton.load(q.device.type)
    from flashbench.kernels import _flash_fp8 as flash
    from flashbench.kernels import _fp8

    x = flash.operands(
        q, k, v,
        dtype=getattr(torch, DTYPES[problem.dtype].torch_name),
        share=problem.fp8_scale or _fp8.DEFAULT_SHARE,
        hadamard=problem.hadamard,
        config=Config(*(config[f"fwd_{field}"] for field in TILE)) if config else None,
    )  # fmt: skip

    def call() -> tuple[Tensor, Tensor]:
        o, lse = flash.flash_attention(
            x, causal=problem.causal, softmax_scale=problem.softmax_scale, out_dtype=q.dtype
        )
        assert isinstance(o, torch.Tensor)
        return o, lse

    return call


def why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
    """Why the kernel refuses the problem, one sentence, or None."""
    if problem.dtype_bytes != 1:
        return f"it takes fp8 only, not {problem.dtype}"
    if pass_ != "fwd":
        return "attention in fp8 has no backward"
    if reason := unsupported_features(problem, _hopper_fp8_row.TAKEN) or why_unfit(problem, target):
        return reason
    if _triton.interpreted(target) or target.capability is None:
        return None
    if target.capability < FP8_CAPABILITY:
        return f"fp8 products need sm89, this is sm{target.capability[0]}{target.capability[1]}"
    shape = "fp8", problem.head_dim, problem.head_dim_v
    need = shared_bytes("fwd", _config(problem, target), *shape, target.capability)
    limit = target.smem_per_block_bytes
    if limit is not None and need > limit:
        return f"fwd kernel needs {need} B of shared memory per block, limit {limit} B"
    return None


def describe(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """Tile rows, warps and stages of the kernel: ``fwd_block_q``, …"""
    if _triton.interpreted(target):
        target = Target()
    return on_card(problem, pass_, target)


def on_card(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """As describe, for a card that need not be here, in whichever mode Triton is in this process."""
    config = _config(problem, target)
    return {f"fwd_{field}": getattr(config, field) for field in TILE}


def candidates(problem: Problem, pass_: str, target: Target) -> Sequence[Candidate]:
    """As ``Implementation.candidates``."""
    return tried("fwd", "fwd", _config(problem, target), problem, target)


def _config(problem: Problem, target: Target) -> Config:
    shape = "fp8", problem.head_dim, problem.head_dim_v
    return choose("fwd", *shape, target.capability, target.smem_per_block_bytes)


_V2 = Implementation(
    name="flash-v2-fp8",
    summary="FlashAttention-2 in Triton in fp8 (bundled): a scale per tile, forward only",
    prepare=prepare,
    io_model="flash-fp8",
    why_unavailable=_triton.why_unavailable,
    why_unsupported=why_unsupported,
    describe=describe,
    interpreted=_triton.interpreted,
    precompile=precompile,
    prepared_bytes=_hopper_fp8_row.prepared_bytes,
    prepare_tiles=prepare_tiles,
    prepare_lse=prepare_lse,
    on_card=on_card,
    candidates=candidates,
)


IMPLEMENTATIONS = (
    Best(_V2, _hopper_fp8_row).implementation(
        name="flash-fp8",
        summary="the best of the bundled fp8 kernels for the card: flash-v3-fp8 on sm_90 where it takes them",
    ),
    _V2,
)
