"""torch's FlexAttention, compiled in prepare: masks as block masks, the rest as a change of scores.

Signatures: torch.nn.attention.flex_attention of torch 2.10 to 2.13.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call, Implementation, Target
from flashbench.kernels._peer import Peer
from flashbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

MODULE = "torch.nn.attention.flex_attention"


def make(module: ModuleType, problem: Problem, inputs: Inputs) -> Call:
    """The compiled call: compiling happens in its first run. Rows without keys are 0."""
    p, device = problem, inputs.q.device
    options: dict[str, Any] = {"scale": p.softmax_scale, "enable_gqa": p.group > 1}
    if p.masked:
        options["block_mask"] = module.create_block_mask(
            partial(_inside, *p.band), None, None, p.seqlen_q, p.seqlen_k, device=device
        )
    if changes := _changes(p, inputs):
        options["score_mod"] = changes
    function = compiled(module.flex_attention)
    return lambda: function(inputs.q, inputs.k, inputs.v, **options)  # type: ignore[no-any-return]


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function as torch compiles it, for these shapes alone."""
    import torch

    return torch.compile(function, dynamic=False)  # type: ignore[no-any-return]


def _inside(low: int, high: int, batch: Any, head: Any, row: Any, column: Any) -> Any:
    return (column - row <= high) & (column - row >= low)


def _changes(p: Problem, inputs: Inputs) -> Callable[..., Tensor] | None:
    """What the problem does to a score, in its order, as a score_mod; None where it does nothing."""
    slopes, bias, cap, diagonal = inputs.alibi_slopes, inputs.bias, p.softcap, p.diagonal
    if slopes is None and bias is None and not cap:
        return None
    import torch

    full = None if bias is None else [size > 1 for size in bias.shape]

    def change(score: Tensor, batch: Tensor, head: Tensor, row: Tensor, column: Tensor) -> Tensor:
        if cap:
            score = cap * torch.tanh(score / cap)
        if slopes is not None:
            score = score - slopes[head] * (row + diagonal - column).abs()
        if bias is not None and full is not None:
            at = (batch, head, row, column)
            score = score + bias[tuple(i if whole else i * 0 for i, whole in zip(at, full, strict=True))]
        return score

    return change


class _Flex(Peer):
    """A peer that torch brings, on a CPU too."""

    def why_unavailable(self, target: Target) -> str | None:
        """None: the oldest torch that flashbench takes has it."""
        return None

    def refuses(self, problem: Problem, pass_: str, target: Target) -> str | None:
        """Beside what any peer refuses: torch has no backward of it on a CPU."""
        if target.type == "cpu" and pass_ != "fwd":
            return "torch's FlexAttention has no backward on a CPU"
        if problem.dtype == "tf32" and target.type != "cuda":
            return "TF32 products exist on NVIDIA GPUs only; fp32 runs here"
        if not (problem.seqlen_q and problem.seqlen_k):
            return "torch's FlexAttention takes no empty sequence"
        return super().refuses(problem, pass_, target)


PEER = _Flex(
    name="flex",
    package="torch",
    module=MODULE,
    summary="torch's FlexAttention, compiled before it is timed",
    make=make,
    takes=frozenset({"bshd", "top-left", "window", "softcap", "alibi", "bias"}),
)


def _context(problem: Problem) -> Any:
    from flashbench.kernels._precision import precision

    return precision(problem)


def _row() -> Implementation:
    from dataclasses import replace

    return replace(PEER.row(), context=_context)


IMPLEMENTATIONS = (_row(),)
