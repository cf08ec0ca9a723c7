"""flash-v2: FlashAttention-2 in portable Triton, both passes, for any GPU that Triton serves; flash.

flash runs flash-v3 on the cards and problems that it takes, and flash-v2 else; its row names which, and why
not flash-v3 on a card that has it. On a machine without a GPU flash-v2's kernels run in Triton's interpreter:
checked, never timed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashbench.hopper_configs import CAPABILITY
from flashbench.kernels import Call, Candidate, Implementation, Target, _hopper_row, _triton
from flashbench.kernels._kernels_of import Kernels, precompile
from flashbench.problem import ALIGNMENTS, Cell, Problem

if TYPE_CHECKING:
    from flashbench.kernels._inputs import Inputs

TAKEN = {
    "window", "top-left", "softcap", "alibi", "bias", "sinks", "dropout", "block-mask", "varlen", "bshd",
    "deterministic",
}  # fmt: skip
"""Features (``unsupported_features``) that the kernels take."""

KERNELS = Kernels(
    name="flash-v2",
    module="_flash_v2",
    fwd={"fwd": "fwd"},
    bwd={"delta": "delta", "dkdv": "dkdv", "dq": "dq"},
    taken=TAKEN,
)


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """As ``Kernels.prepare``, with all that the problem asks."""
    return prepare_tiles(problem, inputs, {})


def prepare_tiles(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
    """As ``Kernels.prepare_tiles``, likewise."""
    options = {
        "window": problem.window,
        "top_left": problem.alignment != ALIGNMENTS[0],
        "softcap": problem.softcap,
        "alibi_slopes": inputs.alibi_slopes,
        "bias": inputs.bias,
        "sinks": inputs.sinks,
        "dropout_p": problem.dropout_p,
        "seed": inputs.seed,
        "block_mask": inputs.block_mask,
        "cu_seqlens_q": inputs.cu_seqlens_q,
        "cu_seqlens_k": inputs.cu_seqlens_k,
        "max_seqlen_q": problem.seqlen_q,
        "max_seqlen_k": problem.seqlen_k,
    }
    return KERNELS.call(problem, inputs, config, options)


_V2 = Implementation(
    name=KERNELS.name,
    summary="FlashAttention-2 in portable Triton (bundled): Q outer, recomputing backward, no atomics",
    prepare=prepare,
    io_model="flash",
    why_unavailable=_triton.why_unavailable,
    why_unsupported=KERNELS.why_unsupported,
    describe=KERNELS.describe,
    interpreted=_triton.interpreted,
    precompile=precompile,
    prepare_tiles=prepare_tiles,
    on_card=KERNELS.on_card,
    candidates=KERNELS.candidates,
)


def _why_not_v3(problem: Problem, target: Target) -> str | None:
    """Why flash runs flash-v2 there: one sentence, or None where it runs flash-v3, whatever the pass."""
    return _hopper_row.why_unsupported(problem, "fwd", target)


def _prepare_best(problem: Problem, inputs: Inputs) -> Call:
    """As prepare, of flash-v3 where it takes the problem."""
    call = prepare(problem, inputs)
    if _why_not_v3(problem, _card_of(inputs)) is None:
        call = _hopper_row.prepare(problem, inputs)
        setattr(call, _RAN, _hopper_row.BACKWARD.name)
    return call


_RAN = "ran"
"""Attribute of a call: the implementation whose kernels it runs."""


def _card_of(inputs: Inputs) -> Target:
    import torch

    device = inputs.q.device
    if device.type != "cuda":
        return Target()
    return Target(device=str(device), capability=torch.cuda.get_device_capability(device))


def _describe_best(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """As describe, of the kernels that run, with ``kernels``: which, and on sm_90 why not flash-v3."""
    reason = _why_not_v3(problem, target)
    if reason is None:
        return {**_hopper_row.on_card(problem, pass_, target), "kernels": _hopper_row.BACKWARD.name}
    there = target.capability == CAPABILITY
    return {
        **KERNELS.describe(problem, pass_, target),
        **({"kernels": f"{KERNELS.name}: {reason}"} if there else {}),
    }


def _precompile_best(cells: Sequence[Cell], target: Target) -> None:
    """As precompile, of the kernels that run."""
    names = (
        KERNELS.name if _why_not_v3(cell.problem, target) else _hopper_row.BACKWARD.name for cell in cells
    )
    precompile([replace(cell, implementation=name) for cell, name in zip(cells, names, strict=True)], target)


def _candidates_best(problem: Problem, pass_: str, target: Target) -> list[Candidate]:
    """As ``Kernels.candidates``; flash-v3 has none: its table was measured as a whole."""
    return KERNELS.candidates(problem, pass_, target) if _why_not_v3(problem, target) else []


def _model_of(problem: Problem, pass_: str, target: Target) -> str | None:
    return None if _why_not_v3(problem, target) else _hopper_row.IO_MODEL


IMPLEMENTATIONS = (
    replace(
        _V2,
        name="flash",
        summary="the best of the bundled kernels for the card: flash-v3 on sm_90 where it takes the problem",
        prepare=_prepare_best,
        backend=lambda call: getattr(call, _RAN, _V2.name),
        describe=_describe_best,
        precompile=_precompile_best,
        candidates=_candidates_best,
        io_model_of=_model_of,
    ),
    _V2,
)
