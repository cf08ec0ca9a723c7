"""What the literature sets beside exact attention: small, correct, and each marked ``exact: no``.

Every one has a model of its own (docs/alternatives.md) and is checked against its own fp64 form, since exact
attention's bound says nothing of it; how far it is from exact attention stands in its row. Longformer and
block-sparse run the bundled kernels on a problem with a window or a block mask; the others are operators of
torch, and move more than the fused kernels of their models. Forward only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call, Implementation, Target, get, unsupported_features
from flashbench.problem import Cell, Problem
from flashbench.record import Accuracy

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

WINDOW = 512
"""Keys beside the query's own that Longformer's window shows: its model's default."""

BLOCKS = "butterfly"
"""The block mask of block-sparse, as flash-attention's and Pixelated Butterfly's papers use it."""

KERNEL = "flash"
"""The implementation that computes windows and block masks."""


def _refuses(model: str) -> Callable[[Problem, str, Target], str | None]:
    """Why it does not take a problem: another pass, an option, or what its model does not cover."""

    def why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
        from flashbench._iomodel import alternatives

        if pass_ != "fwd":
            return "only its forward is here"
        if problem.features:
            return unsupported_features(problem, ())
        if model.startswith("mamba") and not problem.causal:
            return "a scan sees earlier positions only: causal"
        method = alternatives.find(model).method
        if model == "reformer" and problem.seqlen_k % method.chunk:  # type: ignore[attr-defined]
            return f"its chunks are whole: seqlen_k in multiples of {method.chunk}"  # type: ignore[attr-defined]
        if problem.seqlen_q != problem.seqlen_k:
            return "it mixes one sequence: seqlen_q is seqlen_k"
        return method.refuses(problem)

    return why_unsupported


def _precision(problem: Problem) -> AbstractContextManager[object]:
    from flashbench.kernels._precision import precision

    return precision(problem)


def _own(name: str, model: str, summary: str, prepared: Callable[[Problem], int]) -> Implementation:
    """The row of a method of ``_alternatives.METHODS``."""

    def prepare(problem: Problem, inputs: Inputs) -> Call:
        from flashbench.kernels._alternatives import METHODS

        return METHODS[name].prepare(problem, inputs)

    def check(problem: Problem, inputs: Inputs, o: Tensor, gradients: object = None) -> Accuracy:
        from flashbench.kernels._alternatives import check

        return check(name, problem, inputs, o)

    return Implementation(
        name=name, summary=summary, prepare=prepare, io_model=model, own_check=check, context=_precision,
        why_unsupported=_refuses(model), prepared_bytes=lambda problem, pass_, target: prepared(problem),
    )  # fmt: skip


def windowed(problem: Problem) -> Problem:
    """The exact attention that Longformer is: half of the window on either side, all before if causal."""
    sides = (WINDOW, 0) if problem.causal else (WINDOW // 2, WINDOW - WINDOW // 2)
    return replace(problem, window=sides)


def block_sparse(problem: Problem) -> Problem:
    """The exact attention that block-sparse is."""
    return replace(problem, block_mask=BLOCKS)


def _restricted(name: str, summary: str, of: Callable[[Problem], Problem]) -> Implementation:
    """A row that runs KERNEL on a problem with fewer pairs, and is held to the exact attention of these."""

    def inputs_of(problem: Problem, inputs: Inputs) -> Inputs:
        from flashbench.kernels._inputs import block_mask

        return replace(inputs, block_mask=block_mask(of(problem), str(inputs.q.device)))

    def prepare(problem: Problem, inputs: Inputs) -> Call:
        return get(KERNEL).prepare(of(problem), inputs_of(problem, inputs))

    def check(problem: Problem, inputs: Inputs, o: Tensor, gradients: object = None) -> Accuracy:
        from flashbench.kernels._alternatives import compared

        return compared(of(problem), inputs_of(problem, inputs), o)

    def describe(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
        return get(KERNEL).describe(of(problem), pass_, target)

    def why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
        return _refuses(name)(problem, pass_, target) or get(KERNEL).why_unsupported(
            of(problem), pass_, target
        )

    def precompile(cells: Sequence[Cell], target: Target) -> None:
        get(KERNEL).precompile([replace(cell, problem=of(cell.problem)) for cell in cells], target)

    return Implementation(
        name=name, summary=summary, prepare=prepare, io_model=name, own_check=check, describe=describe,
        why_unavailable=lambda target: get(KERNEL).why_unavailable(target), why_unsupported=why_unsupported,
        interpreted=lambda target: get(KERNEL).interpreted(target), precompile=precompile,
        backend=lambda call: get(KERNEL).backend(call),
    )  # fmt: skip


def _scan_inputs(p: Problem) -> int:
    """Δ and the gate of every channel, B and C of 16 states, in the problem's dtype."""
    return p.batch * p.seqlen_k * (2 * p.num_heads * p.head_dim_v + 2 * 16) * p.dtype_bytes


IMPLEMENTATIONS = (
    _own(
        "linformer", "linformer",
        "not exact: K and V projected to 256 rows by random matrices, then attention",
        lambda p: 2 * min(256, p.seqlen_k) * p.seqlen_k * p.dtype_bytes,
    ),
    _own(
        "reformer", "reformer",
        "not exact: queries are the keys, hashed and sorted; chunks of 64 attend two, in 4 rounds",
        lambda p: 0,
    ),
    _restricted(
        "longformer", f"not exact: a sliding window of {WINDOW} keys, through the bundled kernel", windowed
    ),
    _restricted(
        "block-sparse", f"not exact: the block mask {BLOCKS}, through the bundled kernel", block_sparse
    ),
    _own(
        "linear-attention", "linear-attention",
        "not exact: elu(x) + 1 in place of the softmax, in chunks of 64",
        lambda p: 0,
    ),
    _own(
        "mamba", "mamba:expand=1", "no attention: a selective scan with 16 states, v its channels",
        _scan_inputs,
    ),
)  # fmt: skip
