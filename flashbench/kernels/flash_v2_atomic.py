"""flash-v2-atomic: FlashAttention-2 in portable Triton with the backward of its paper, one kernel.

The forward is flash-v2's. The backward multiplies five times a tile, not seven, and adds dQ atomically, in
no fixed order: dq differs in its last bits from run to run.
"""

from __future__ import annotations

from flashbench.kernels import Implementation, Target, _triton
from flashbench.kernels._kernels_of import Kernels, precompile
from flashbench.problem import Problem

KERNELS = Kernels(
    name="flash-v2-atomic",
    module="_flash_v2_atomic",
    fwd={"fwd": "fwd"},
    bwd={"delta": "delta", "bwd": "atomic"},
    taken={"bshd"},
)


def why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
    """Why the kernels refuse the problem, one sentence, or None."""
    if problem.dtype == "tf32" and pass_ != "fwd":
        return "one kernel cannot correct its row sums first, which gradients in tf32 need; flash-v2 does"
    return KERNELS.why_unsupported(problem, pass_, target)


IMPLEMENTATIONS = (
    Implementation(
        name=KERNELS.name,
        summary="flash-v2 with a backward of one kernel (bundled): dQ by atomic additions, not deterministic",
        prepare=KERNELS.prepare,
        io_model=f"{KERNELS.name}-triton",
        why_unavailable=_triton.why_unavailable,
        why_unsupported=why_unsupported,
        describe=KERNELS.describe,
        interpreted=_triton.interpreted,
        precompile=precompile,
        prepare_tiles=KERNELS.prepare_tiles,
        prepare_lse=KERNELS.prepare_lse,
        on_card=KERNELS.on_card,
        candidates=KERNELS.candidates,
        deterministic=False,
    ),
)
