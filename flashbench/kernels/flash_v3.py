"""flash-v3: FlashAttention-3 in Gluon, Triton's lower-level language, for Hopper (sm_90) alone.

The backward takes dq of head dims up to 128 from flash-v2's kernels where that is to be deterministic; the
row says so. There is no interpreted form: what the kernels move is told by the IO model alone.
"""

from __future__ import annotations

from flashbench.kernels import Implementation
from flashbench.kernels import _hopper_row as row
from flashbench.kernels._kernels_of import precompile

IMPLEMENTATIONS = (
    Implementation(
        name=row.NAME,
        summary="FlashAttention-3 in Gluon, Triton's lower-level language, for sm_90 (bundled)",
        prepare=row.prepare,
        prepare_tiles=row.prepare_tiles,
        prepare_lse=row.prepare_lse,
        io_model=row.IO_MODEL,
        why_unavailable=row.why_unavailable,
        why_unsupported=row.why_unsupported,
        describe=row.on_card,
        precompile=precompile,
        on_card=row.on_card,
        exponentials_within=row.exponentials_within,
        deterministic=False,
    ),
)
