"""flash-v1: FlashAttention-1's loop order in portable Triton, forward and backward.

K/V outside, Q inside, so that Q, O and the row statistics travel once per K/V tile: what FlashAttention-2
did away with, here to be seen, traced and counted. One thread block per head; slow by nature.
"""

from __future__ import annotations

from flashbench.kernels import Implementation, _triton
from flashbench.kernels._kernels_of import Kernels, precompile

KERNELS = Kernels(
    name="flash-v1",
    module="_flash_v1",
    fwd={"fwd": "v1_fwd"},
    bwd={"bwd": "v1_bwd"},
    taken={"bshd", "deterministic"},
)


IMPLEMENTATIONS = (
    Implementation(
        name=KERNELS.name,
        summary="FlashAttention-1 in Triton (bundled): K/V outer, O through memory once per K/V tile",
        prepare=KERNELS.prepare,
        io_model=f"{KERNELS.name}-triton",
        why_unavailable=_triton.why_unavailable,
        why_unsupported=KERNELS.why_unsupported,
        describe=KERNELS.describe,
        interpreted=_triton.interpreted,
        precompile=precompile,
        prepare_tiles=KERNELS.prepare_tiles,
        prepare_lse=KERNELS.prepare_lse,
        on_card=KERNELS.on_card,
        candidates=KERNELS.candidates,
    ),
)
