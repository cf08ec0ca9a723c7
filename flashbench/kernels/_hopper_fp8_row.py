"""What flash-v3-fp8 is as an implementation: refusals, configuration, the call; flash-fp8 runs it, too."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flashbench import hopper_configs
from flashbench.hopper_configs import Tiles
from flashbench.kernels import Call, Target, _hopper_row, _triton, unsupported_features
from flashbench.problem import DTYPES, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

TAKEN = {"fp8", "bshd"}
"""Features (``unsupported_features``) that the fp8 kernels take."""

NAME = "flash-v3-fp8"
"""Also the row of iomodel.MODELS."""


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """Return the call that computes o in q's dtype, of 16 or 32 bits; the inputs are not rounded yet.

    Raises UnavailableError where Triton is missing or was imported as an interpreter.
    """
    return prepare_tiles(problem, inputs, {})


def prepare_tiles(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
    """As prepare, with the tiles of config (as ``on_card`` gives them) where it has any."""
    both = prepare_lse(problem, inputs, config)
    return lambda: both()[0]


def prepare_lse(
    problem: Problem, inputs: Inputs, config: Mapping[str, Any]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """As prepare_tiles, of a call that returns (o, lse)."""
    import torch

    q = inputs.q
    flash, fp8 = (_triton.load(q.device.type, module) for module in ("_flash_v3_fp8", "_fp8"))
    x = flash.operands(
        q, inputs.k, inputs.v,
        dtype=getattr(torch, DTYPES[problem.dtype].torch_name),
        causal=problem.causal,
        share=problem.fp8_scale or fp8.DEFAULT_SHARE,
        hadamard=problem.hadamard,
        tiles=hopper_configs.given(config, tiles_of(problem)),
    )  # fmt: skip

    def call() -> tuple[Tensor, Tensor]:
        o, lse = flash.flash_attention(
            x, causal=problem.causal, softmax_scale=problem.softmax_scale, out_dtype=q.dtype
        )
        return o, lse

    return call


def why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
    """Why the kernel refuses the problem, one sentence, or None."""
    p = problem
    if p.dtype_bytes != 1:
        return f"it takes fp8 only, not {p.dtype}"
    if pass_ != "fwd":
        return "attention in fp8 has no backward"
    if reason := unsupported_features(p, TAKEN) or _hopper_row.why_other(target):
        return reason
    return hopper_configs.why_not_fp8(p.head_dim, p.head_dim_v)


def prepared_bytes(problem: Problem, pass_: str, target: Target) -> int:
    """q, k and v in fp8, and as much again: the inputs that they are rounded from have 16 bits."""
    keys = problem.num_kv_heads * problem.seqlen_k * (problem.head_dim + problem.head_dim_v)
    return 2 * problem.batch * (problem.num_heads * problem.seqlen_q * problem.head_dim + keys)


def on_card(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """Tiles, warps and stages: ``fwd_block_q``, …"""
    return hopper_configs.described(tiles_of(problem))


def exponentials_within(problem: Problem, target: Target) -> float:
    """As ``Implementation.exponentials_within``."""
    return hopper_configs.EMULATED_WITHIN[1] if tiles_of(problem).emulated else 0.0


def tiles_of(problem: Problem) -> Tiles:
    """The configuration for the problem."""
    p = problem
    return hopper_configs.choose_fp8(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
