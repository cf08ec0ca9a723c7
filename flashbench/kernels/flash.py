"""flash-v2: FlashAttention-2 in portable Triton, both passes, for any GPU that Triton serves; flash.

flash runs flash-v3 on the cards and problems that it takes, and flash-v2 else; its row names which, and why
not flash-v3 on a card that has it. On a machine without a GPU flash-v2's kernels run in Triton's interpreter:
checked, never timed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call, Implementation, _hopper_row, _triton
from flashbench.kernels._best import Best
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


IMPLEMENTATIONS = (
    Best(_V2, _hopper_row).implementation(
        name="flash",
        summary="the best of the bundled kernels for the card: flash-v3 on sm_90 where it takes the problem",
        deterministic=False,
    ),
    _V2,
)
