"""flash-v3-fp8: FlashAttention-3's forward in 8-bit floats, in Gluon for Hopper (sm_90) alone.

As of flash-fp8, prepare rotates and rounds q, k and v and lays V out, and the call is the kernel. There is
no backward, and no interpreted form.
"""

from __future__ import annotations

from flashbench.kernels import Implementation, _hopper_row
from flashbench.kernels import _hopper_fp8_row as row
from flashbench.kernels._kernels_of import precompile

IMPLEMENTATIONS = (
    Implementation(
        name=row.NAME,
        summary="FlashAttention-3's forward in fp8 in Gluon, for sm_90 (bundled): a scale per tile",
        prepare=row.prepare,
        prepare_tiles=row.prepare_tiles,
        prepare_lse=row.prepare_lse,
        io_model=row.NAME,
        why_unavailable=_hopper_row.why_unavailable,
        why_unsupported=row.why_unsupported,
        describe=row.on_card,
        precompile=precompile,
        prepared_bytes=row.prepared_bytes,
        on_card=row.on_card,
        exponentials_within=row.exponentials_within,
    ),
)
