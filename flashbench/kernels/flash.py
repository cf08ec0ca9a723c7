"""flash-v2: FlashAttention-2 in portable Triton, both passes, for any GPU that Triton serves; flash.

flash runs flash-v3 on the cards and problems that it takes, and flash-v2 else; its row names which, and why
not flash-v3 on a card that has it. On a machine without a GPU flash-v2's kernels run in Triton's interpreter:
checked, never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashbench.hopper_configs import CAPABILITY
from flashbench.kernels import Call, Candidate, Implementation, Target, _hopper_row, _triton
from flashbench.kernels._kernels_of import Kernels, precompile
from flashbench.problem import ALIGNMENTS, Problem

if TYPE_CHECKING:
    from torch import Tensor

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
    call: Call = KERNELS.call(problem, inputs, config, _options(problem, inputs))
    return call


def prepare_lse(
    problem: Problem, inputs: Inputs, config: Mapping[str, Any]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """As prepare_tiles, of a call that returns (o, lse)."""
    options = {**_options(problem, inputs), "return_lse": True}
    call: Callable[[], tuple[Tensor, Tensor]] = KERNELS.call(problem, inputs, config, options)
    return call


def _options(problem: Problem, inputs: Inputs) -> dict[str, Any]:
    """What the problem asks, as arguments of ``flash_attention``."""
    return {
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
    prepare_lse=prepare_lse,
    on_card=KERNELS.on_card,
    candidates=KERNELS.candidates,
)


_RAN = "ran"
"""Attribute of a call: the implementation whose kernels it runs."""


def _why_not_v3(problem: Problem, target: Target) -> str | None:
    """Why flash runs flash-v2 there: one sentence, or None where it runs flash-v3, whatever the pass."""
    return _hopper_row.why_unsupported(problem, "fwd", target)


def _runs(problem: Problem, target: Target) -> str | None:
    return None if _why_not_v3(problem, target) else _hopper_row.NAME


def _prepare_best(problem: Problem, inputs: Inputs) -> Call:
    return _prepare_tiles_best(problem, inputs, {})


def _prepare_tiles_best(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
    v3 = _takes_v3(problem, inputs, config)
    call = (_hopper_row.prepare_tiles if v3 else prepare_tiles)(problem, inputs, config)
    setattr(call, _RAN, _hopper_row.NAME if v3 else KERNELS.name)
    return call


def _prepare_lse_best(
    problem: Problem, inputs: Inputs, config: Mapping[str, Any]
) -> Callable[[], tuple[Tensor, Tensor]]:
    v3 = _takes_v3(problem, inputs, config)
    return (_hopper_row.prepare_lse if v3 else prepare_lse)(problem, inputs, config)


def _takes_v3(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> bool:
    """Whether flash-v3 runs on the inputs' card, or that of a rehearsal; not with tiles of flash-v2."""
    device = inputs.q.device
    capability, _ = _triton.load(device.type, "_call").card(device)
    here = Target(device="cpu" if capability is None else "cuda", capability=capability)
    return _why_not_v3(problem, here) is None and _hopper_row.has(config)


def _describe_best(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """As describe, of the kernels that run, with ``kernels``: which, and on sm_90 why not flash-v3."""
    return _on_card_best(problem, pass_, Target() if _triton.interpreted(target) else target)


def _on_card_best(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """The same for a card that need not be here."""
    reason = _why_not_v3(problem, target)
    if reason is None:
        return {**_hopper_row.on_card(problem, pass_, target), "kernels": _hopper_row.NAME}
    there = target.capability == CAPABILITY
    return {
        **KERNELS.on_card(problem, pass_, target),
        **({"kernels": f"{KERNELS.name}: {reason}"} if there else {}),
    }


def _candidates_best(problem: Problem, pass_: str, target: Target) -> list[Candidate]:
    """As ``Kernels.candidates``; flash-v3 has none: its table was measured as a whole."""
    return KERNELS.candidates(problem, pass_, target) if _why_not_v3(problem, target) else []


IMPLEMENTATIONS = (
    replace(
        _V2,
        name="flash",
        summary="the best of the bundled kernels for the card: flash-v3 on sm_90 where it takes the problem",
        prepare=_prepare_best,
        prepare_tiles=_prepare_tiles_best,
        prepare_lse=_prepare_lse_best,
        backend=lambda call: getattr(call, _RAN, _V2.name),
        describe=_describe_best,
        on_card=_on_card_best,
        candidates=_candidates_best,
        deterministic=False,
        runs=_runs,
    ),
    _V2,
)
