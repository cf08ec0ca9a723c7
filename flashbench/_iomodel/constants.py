"""What the code of each implementation family reaches, by kernel and generation: every fitted number.

A family has the same few constants for all shapes, masks and lengths; none belongs to one row or one
length. Where a source is a published table, they are the least-squares fit in log time over that table
(``tools/time_model.py --fit`` repeats it), rounded. docs/time-model.md says what remains between them
and the tables, and how well constants that have seen no causal row predict the causal rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

LAUNCH_S = 4e-6
"""GPU time of one more kernel: 3 to 5 µs [from experience, not fitted]."""

REFERENCE_MATMUL = 0.807
"""Share of the data sheet's peak that a large product reaches on random data: 798 of 989 TFLOP/s, H100.

The families' shares are of data sheets. Where a card's own ceiling was measured, its peak counts as
measured / REFERENCE_MATMUL, so that a card as good as the reference is predicted the same."""

REFERENCE_MEMORY = 0.9
"""The same for memory: a copy on an H100 SXM reaches 3.0 of 3.35 TB/s."""


class Rates(NamedTuple):
    """What one kernel reaches.

    mma: share of the dense peak that its matrix products alone would take. softmax: time per score
    that they do not hide, in exponentials of the MUFU (which stand for the maxima, sums, scales and
    conversions as well). fixed_clocks: prologue and epilogue of a thread block, or of each tile that a
    persistent program takes. resident: thread
    blocks per SM. smem_bytes: read from shared memory per FLOP and byte of an element. mufu: share of
    the exponentials that the MUFU computes; the rest are polynomials on the FMA units.
    """

    mma: float
    softmax: float
    fixed_clocks: float
    resident: int
    smem_bytes: float
    mufu: float = 1.0


Pace = tuple[tuple[float, float], ...]
"""(longest row, requested bytes per clock and SM), ascending, of a library's kernels for one op."""


class Family(NamedTuple):
    """One implementation family. rates: by (kernel, generation): "fwd", "bwd", "apart" for a backward of two
    kernels, or "sums" for fp8's forward whose bases row sums guard.

    stream: share of the memory bandwidth that kernels without products reach, by (kernel, generation).
    gemm: share of the peak that library products reach. calibrated: whether a published table was fitted.
    fills: thread blocks are split until they fill the card, so that none waits. mask: of the bandwidth of
    other ops, what an op that applies a mask reaches, where it has no pace. paces: by (op, generation), of
    kernels that instructions hold below the bandwidth, so that they go with SMs and clock: by row length.
    """

    name: str
    source: str
    rates: Mapping[tuple[str, str], Rates]
    stream: Mapping[tuple[str, str], float]
    gemm: float = 0.6
    calibrated: bool = True
    fills: bool = False
    mask: float = 1.0
    paces: Mapping[tuple[str, str], Pace] = {}


def _smem(rows: int, operands: float) -> float:
    """Shared-memory bytes per FLOP and element byte: operands read per product, for so many rows each.

    A product of m x n x k reads its right operand once per ``rows`` rows: n·k·m/rows elements of 2·m·n·k
    FLOPs. operands: 1 for that, more for the left one and for what the softmax writes. Source: the
    cycles of FlashAttention-4 (arXiv:2603.05451), which 128 rows with 1.5 (fwd) and 2.6 (bwd) give.
    """
    return operands / (2 * rows)


_FWD, _BWD = 1.5, 2.6
_MMA_SYNC, _WGMMA, _TCGEN05 = 32, 64, 128

LIKE = {"sm70": "sm80", "sm75": "sm80", "sm86": "geforce", "sm89": "geforce", "sm120": "geforce",
        "sm100": "sm90", "sm103": "sm100"}  # fmt: skip
"""Which generation's constants stand in where a family has none of the card's own; else sm80's."""

_FLASH_STREAM = {("fwd", "sm80"): 0.9, ("bwd", "sm80"): 0.9}
_EAGER_STREAM = {("fwd", "sm90"): 0.67, ("bwd", "sm90"): 0.89, ("fwd", "sm80"): 0.7, ("bwd", "sm80"): 0.77}
_FA2_FIGURE = "benchmark figures of flash-attention 2 (A100-80, H100) and of arXiv:2407.08608 (H100)"

_ELEMENTWISE: Pace = ((float("inf"), 5.8),)
"""torch's elementwise kernel without vector loads: 350 G elements of two bytes a second on an H100 SXM."""

_MASK: Pace = ((float("inf"), 6.7),)
"""The same kernel where a broadcast mask keeps masked_fill from loading vectors: scores and mask."""

_SOFTMAX: Pace = ((1024, 8.9), (2048, 6.5), (4096, 4.9), (8192, 4.0), (float("inf"), 8.0))
"""torch 2.11's softmax on an H100: a warp per row up to 2048, a row in registers of a thread block up to
8192, then in shared memory. Means of masked and unmasked scores, of which the masked take a fifth longer."""

FAMILIES: dict[str, Family] = {
    row.name: row
    for row in (
        Family(
            "fa2",
            f"{_FA2_FIGURE}; forward on an A100: 191 and 222 TFLOP/s at d = 64 and 128;"
            " GeForce: assumed, with fp32 accumulation at half rate the products hide the rest",
            {
                ("fwd", "sm80"): Rates(0.78, 0.62, 3200, 2, _smem(_MMA_SYNC, _FWD)),
                ("bwd", "sm80"): Rates(0.72, 1.8, 6800, 1, _smem(_MMA_SYNC, _BWD)),
                ("fwd", "sm90"): Rates(0.44, 0.62, 3200, 2, _smem(_MMA_SYNC, _FWD)),
                ("bwd", "sm90"): Rates(0.39, 1.8, 6800, 1, _smem(_MMA_SYNC, _BWD)),
                ("fwd", "geforce"): Rates(0.95, 0.62, 3200, 2, _smem(_MMA_SYNC, _FWD)),
                ("bwd", "geforce"): Rates(0.85, 1.8, 6800, 1, _smem(_MMA_SYNC, _BWD)),
            },
            _FLASH_STREAM,
            paces={("copy do", "sm90"): _ELEMENTWISE, ("copy o", "sm90"): _ELEMENTWISE},
        ),
        Family(
            "fa3",
            "FlashAttention-3, arXiv:2407.08608, figures 5 and 6 (H100 SXM5, 1830 MHz)",
            {
                ("fwd", "sm90"): Rates(1.0, 0.86, 4500, 1, _smem(_WGMMA, 1.25)),
                ("bwd", "sm90"): Rates(0.73, 1.39, 6600, 1, _smem(_WGMMA, _BWD)),
            },
            _FLASH_STREAM,
        ),
        Family(
            "fa4",
            "FlashAttention-4, arXiv:2603.05451: 1613 TFLOP/s at most, one number; 10 to 25 % of the"
            " exponentials as polynomials",
            {
                ("fwd", "sm100"): Rates(0.72, 0.0, 4500, 1, _smem(_TCGEN05, _FWD), 0.8),
                ("bwd", "sm100"): Rates(0.55, 0.0, 6600, 1, _smem(_TCGEN05, 2.1), 0.8),
            },
            _FLASH_STREAM,
            calibrated=False,
        ),
        Family(
            "cudnn",
            "cuDNN 9.1 in FlashAttention-3, arXiv:2407.08608, figures 5 and 6; tiles unknown, FA3's taken",
            {
                ("fwd", "sm90"): Rates(1.0, 1.27, 1200, 1, _smem(_WGMMA, 1.25)),
                ("bwd", "sm90"): Rates(0.68, 1.59, 5400, 1, _smem(_WGMMA, _BWD)),
            },
            _FLASH_STREAM,
        ),
        Family(
            "bundled",
            "flashbench's own Triton kernels on an H100 SXM, reports/h100-sxm/results.jsonl; else as triton",
            {
                ("fwd", "sm80"): Rates(0.78, 0.62, 3200, 2, _smem(_MMA_SYNC, _FWD)),
                ("bwd", "sm80"): Rates(0.72, 1.8, 6800, 1, _smem(_MMA_SYNC, _BWD)),
                ("fwd", "sm90"): Rates(0.58, 0.6, 3600, 2, _smem(_WGMMA, _FWD)),
                ("bwd", "sm90"): Rates(0.55, 0.2, 4000, 2, _smem(_WGMMA, _BWD)),
                ("fwd", "geforce"): Rates(0.95, 0.62, 3200, 2, _smem(_MMA_SYNC, _FWD)),
                ("bwd", "geforce"): Rates(0.85, 1.8, 6800, 1, _smem(_MMA_SYNC, _BWD)),
            },
            _FLASH_STREAM,
        ),
        Family(
            "gluon",
            "flashbench's own Gluon kernels, today's tiles: forward on an H200 under sustained load,"
            " reports/h200-sxm/tuning/flash-v3-guarded.json; backward on an H100 SXM, reports/h100-sxm:"
            " counters/sweep and sweep-128 (one call at 1980 MHz), tuning/flash-v3-backward*.json (the same"
            " load)",
            {
                ("fwd", "sm90"): Rates(0.9, 0.43, 5000, 1, _smem(_WGMMA, 1.25)),
                ("bwd", "sm90"): Rates(0.68, 0.4, 7700, 1, _smem(_WGMMA, _BWD)),
                ("apart", "sm90"): Rates(0.84, 0.4, 9600, 1, _smem(_WGMMA, _BWD)),
            },
            _FLASH_STREAM,
        ),
        Family(
            "gluon-fp8",
            "flash-v3-fp8, today's tiles under load: with row maxima on an H100 SXM, reports/h100-sxm/tuning:"
            " flash-v3-fp8.json (d = 64) and flash-v3-exps-fp8.json (128); guarded by row sums on an H200,"
            " reports/h200-sxm/tuning: flash-v3-fp8-guarded.json (128, from 4k on), the load sustained",
            {
                ("fwd", "sm90"): Rates(1.0, 1.46, 3150, 1, _smem(_WGMMA, 1.25)),
                ("sums", "sm90"): Rates(1.0, 1.01, 5050, 1, _smem(_WGMMA, 1.25)),
            },
            _FLASH_STREAM,
        ),
        Family(
            "triton",
            "Triton in FlashAttention-3, arXiv:2407.08608, figure 5, rows without a mask; its backward is not"
            " published: FA2's",
            {
                ("fwd", "sm80"): Rates(0.78, 0.62, 3200, 2, _smem(_MMA_SYNC, _FWD)),
                ("bwd", "sm80"): Rates(0.72, 1.8, 6800, 1, _smem(_MMA_SYNC, _BWD)),
                ("fwd", "sm90"): Rates(0.42, 0.0, 1800, 2, _smem(_WGMMA, _FWD)),
                ("bwd", "sm90"): Rates(0.39, 1.8, 6800, 1, _smem(_WGMMA, _BWD)),
                ("fwd", "geforce"): Rates(0.95, 0.62, 3200, 2, _smem(_MMA_SYNC, _FWD)),
                ("bwd", "geforce"): Rates(0.85, 1.8, 6800, 1, _smem(_MMA_SYNC, _BWD)),
            },
            _FLASH_STREAM,
        ),
        Family(
            "fa1",
            "FlashAttention-1 in the figures of flash-attention 2 (A100-80): 110 and 83 TFLOP/s",
            {
                ("fwd", "sm80"): Rates(0.32, 0.0, 2100, 2, _smem(_MMA_SYNC, _FWD)),
                ("bwd", "sm80"): Rates(0.32, 0.0, 7300, 1, _smem(_MMA_SYNC, _BWD)),
            },
            _FLASH_STREAM,
            fills=True,
        ),
        Family(
            "eager",
            "PyTorch in FlashAttention-3, arXiv:2407.08608, figures 5 and 6 (H100) and in the figures of"
            " flash-attention 2 (A100-80); FlashAttention, arXiv:2205.14135, tables 18 to 20 (A100-40)",
            {},
            _EAGER_STREAM,
            mask=0.46,
        ),
        Family(
            "naive",
            "H100 SXM: reports/h100-sxm, softmax kernel by kernel, masked_fill, whose broadcast mask keeps it"
            " from loading vectors, and the forward's share by the sweep; else as eager",
            {},
            {**_EAGER_STREAM, ("fwd", "sm90"): 0.82},
            mask=0.525,
            paces={
                ("softmax", "sm90"): _SOFTMAX,
                ("mask", "sm90"): _MASK,
                ("mask backward: fill", "sm90"): _MASK,
            },
        ),
    )
}
"""Every family by name."""

OF_MODEL = {
    "standard": "naive", "standard-added": "eager", "flash-v1": "fa1", "flash-v1-cuda": "fa1",
    "flash-v1-triton": "fa1", "flash-v2": "triton", "flash": "bundled", "sdpa-flash": "fa2",
    "sdpa-cudnn": "cudnn", "flash-v2-atomic": "fa2", "flash-v3": "fa3", "flash-v4": "fa4",
    "flash-decode": "bundled", "flash-v3-gluon": "gluon", "flash-v3-fp8": "gluon-fp8",
}  # fmt: skip
"""Whose constants a model takes unless told otherwise; else triton's, as the bundled kernels."""
