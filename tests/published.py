"""Published measurements of attention, each with its configuration and source.

Plain data, read by the tests and by ``tools/time_model.py``. A series is a row of a table: one
implementation, head dim and mask over SEQLENS; None where the paper shows out of memory.
Throughput is in TFLOP/s in the papers' count (4·N²·d·H forward, causal half of it, backward 2.5
times as much), converted to seconds with that same count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from flashbench.problem import Problem

SEQLENS = (512, 1024, 2048, 4096, 8192, 16384)
TOKENS = 16384
HIDDEN = 2048

FA2 = "benchmark figures of the flash-attention 2 repository (setup: arXiv:2307.08691, section 4.1)"
FA1 = "FlashAttention, arXiv:2205.14135, tables 18 to 20: no mask, no dropout, A100-40GB"
FA3 = "FlashAttention-3, arXiv:2407.08608, figures 5 and 6 (setup: section 4.1)"


@dataclass(frozen=True, kw_only=True)
class Series:
    """One published row, fp16.

    In TFLOP/s: batch·seqlen = 16k tokens, num_heads·head_dim = 2048; in ms: batch 16, 8 heads.
    family: whose constants it is held against. model: the model that counts its traffic. device: id
    of the card. values: one per SEQLENS, in unit. tiles: those of the code at the time of
    publication, where they differ from today's.
    """

    family: str
    model: str
    device: str
    pass_: str
    head_dim: int
    causal: bool
    values: tuple[float | None, ...]
    source: str
    unit: str = "TFLOP/s"
    tiles: Mapping[str, int] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """Stable text for one row."""
        mask = "causal" if self.causal else "full"
        return f"{self.family} {self.device} {self.pass_} d{self.head_dim} {mask}"

    def cells(self) -> Iterator[tuple[Problem, float]]:
        """(problem, seconds) of every published number."""
        for seqlen, value in zip(SEQLENS, self.values, strict=True):
            if value is not None:
                problem = self.problem(seqlen)
                yield problem, value / 1e3 if self.unit == "ms" else self.paper_flops(problem) / value / 1e12

    def problem(self, seqlen: int) -> Problem:
        """The row's problem at that length."""
        batch, heads = (16, 8) if self.unit == "ms" else (TOKENS // seqlen, HIDDEN // self.head_dim)
        return Problem(
            batch=batch, num_heads=heads, num_kv_heads=heads, seqlen_q=seqlen, seqlen_k=seqlen,
            head_dim=self.head_dim, head_dim_v=self.head_dim, dtype="fp16", causal=self.causal,
        )  # fmt: skip

    def paper_flops(self, problem: Problem) -> float:
        """FLOPs as the papers count them."""
        pairs = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
        forward = 4 * pairs * self.head_dim / (2 if self.causal else 1)
        return forward * {"fwd": 1.0, "bwd": 2.5, "fwd+bwd": 3.5}[self.pass_]


def _tiles(forward: tuple[int, int] | None = None, backward: tuple[int, int] | None = None) -> dict[str, int]:
    tiles = {}
    for kernel, tile in (("fwd", forward), ("bwd", backward)):
        if tile is not None:
            tiles |= {f"{kernel}_block_q": tile[0], f"{kernel}_block_k": tile[1]}
    return tiles


def _rows(
    family: str,
    model: str,
    place: tuple[str, str, str],
    table: str,
    tiles: Mapping[tuple[int, bool], Mapping[str, int]] | None = None,
) -> list[Series]:
    """Series of one implementation from lines "head_dim full|causal numbers"; place: device, pass, source."""
    device, pass_, source = place
    rows = []
    unit = "ms" if source == FA1 else "TFLOP/s"
    for line in filter(None, map(str.strip, table.splitlines())):
        head_dim, mask, *numbers = line.split()
        causal = mask == "causal"
        rows.append(Series(
            family=family, model=model, device=device, pass_=pass_, head_dim=int(head_dim), causal=causal,
            values=tuple(None if number == "OOM" else float(number) for number in numbers), source=source,
            unit=unit,            tiles=(tiles or {}).get((int(head_dim), causal), {}),
        ))  # fmt: skip
    return rows


# Tiles of hopper/flash_fwd_launch_template.h in FlashAttention-3's first release (2024-07-11) and of
# hopper/flash_bwd_launch_template.h when its backward came (2024-08-01).
_FA3_TILES = {
    (64, False): _tiles((192, 128), (128, 128)),
    (64, True): _tiles((192, 128), (128, 128)),
    (128, False): _tiles((128, 176), (64, 128)),
    (128, True): _tiles((128, 128), (64, 128)),
}

SERIES: tuple[Series, ...] = (
    *_rows("fa2", "flash-v2-atomic", ("a100-sxm-80gb", "fwd+bwd", FA2), """
        64 full 132 153 162 171 175 176
        128 full 150 172 187 196 201 203
        64 causal 88 119 140 156 165 171
        128 causal 99 133 155 173 182 189"""),
    *_rows("fa2", "flash-v2-atomic", ("h100-sxm", "fwd+bwd", FA2), """
        64 full 215 254 274 288 294 296
        128 full 248 294 320 326 335 338
        64 causal 141 192 232 257 273 284
        128 causal 163 221 265 294 308 328"""),
    *_rows("fa2", "flash-v2-atomic", ("h100-sxm", "fwd", FA3), """
        64 full 282 306 318 321 322 324
        64 causal 180 229 262 284 295 299
        128 full 309 350 362 368 370 370
        128 causal 191 260 298 319 333 335"""),
    *_rows("fa2", "flash-v2-atomic", ("h100-sxm", "bwd", FA3), """
        64 full 198 238 264 279 287 291
        128 full 214 260 291 310 318 322"""),
    *_rows("fa3", "flash-v3", ("h100-sxm", "fwd", FA3), """
        64 full 333 392 460 476 496 497
        64 causal 197 265 371 420 460 473
        128 full 467 565 625 638 646 648
        128 causal 292 423 521 579 602 616""", _FA3_TILES),
    *_rows("fa3", "flash-v3", ("h100-sxm", "bwd", FA3), """
        64 full 272 363 422 453 472 474
        128 full 316 424 501 542 559 561""", _FA3_TILES),
    *_rows("cudnn", "flash-v3", ("h100-sxm", "fwd", FA3), """
        64 full 335 373 395 408 412 413
        64 causal 225 288 334 363 379 388
        128 full 497 574 617 609 600 595
        128 causal 315 410 484 518 529 539""", _FA3_TILES),
    *_rows("cudnn", "flash-v3", ("h100-sxm", "bwd", FA3), """
        64 full 266 348 395 417 432 433
        128 full 305 408 465 499 518 516""", _FA3_TILES),
    *_rows("triton", "flash-v2", ("h100-sxm", "fwd", FA3), """
        64 full 340 382 396 400 401 403
        64 causal 152 291 342 363 376 363
        128 full 323 372 389 389 392 395
        128 causal 146 273 323 353 369 378"""),
    *_rows("eager", "standard-added", ("h100-sxm", "fwd", FA3), """
        64 full 52 63 67 72 73 OOM
        64 causal 16 18 18 18 18 OOM
        128 full 74 100 119 133 139 OOM
        128 causal 26 31 34 35 35 OOM"""),
    *_rows("eager", "standard-added", ("h100-sxm", "bwd", FA3), """
        64 full 68 76 88 92 95 OOM
        128 full 104 131 159 174 181 OOM"""),
    *_rows("eager", "standard-added", ("a100-sxm-80gb", "fwd+bwd", FA2), """
        64 full 36 40 43 45 46 OOM
        128 full 53 67 76 79 86 OOM
        64 causal 15 16 17 18 18 OOM
        128 causal 23 28 32 32 34 OOM"""),
    *_rows("eager", "standard-added", ("h100-sxm", "fwd+bwd", FA2), """
        64 full 62 72 81 86 87 OOM
        128 full 93 120 145 160 167 OOM
        64 causal 26 29 31 32 32 OOM
        128 causal 40 50 57 61 63 OOM"""),
    *_rows("fa1", "flash-v1-cuda", ("a100-sxm-80gb", "fwd+bwd", FA2), """
        64 full 91 92 104 108 110 110
        128 full 76 72 76 80 82 83"""),
    *_rows("eager", "standard-added", ("a100-sxm-40gb", "fwd", FA1), """
        64 full .43 1.27 4.32 16.47 67.77 OOM"""),
    *_rows("eager", "standard-added", ("a100-sxm-40gb", "bwd", FA1), """
        64 full .78 2.44 8.82 33.87 OOM OOM"""),
    *_rows("eager", "standard-added", ("a100-sxm-40gb", "fwd+bwd", FA1), """
        64 full 1.18 3.67 13.22 50.44 OOM OOM"""),
    *_rows("fa1", "flash-v1-cuda", ("a100-sxm-40gb", "fwd", FA1), """
        64 full .18 .68 2.40 8.42 33.54 134.03"""),
    *_rows("fa1", "flash-v1-cuda", ("a100-sxm-40gb", "bwd", FA1), """
        64 full .52 1.62 5.45 21.57 84.75 336.00"""),
)  # fmt: skip
"""Every published row of time."""

MASKED_MS = {"fwd": (16.47, 27.45), "bwd": (33.87, 79.87)}
"""FlashAttention, arXiv:2205.14135, PyTorch at N = 4096 without a mask (tables 18, 19) and with one (12, 13).

Batch 16, 8 heads, d = 64, fp16, A100-40GB, ms.
"""

MEMORY_MIB = {
    "standard": {128: 36, 256: 104, 512: 336, 1024: 1184, 2048: 4416, 4096: 17024},
    "flash-v1-cuda": {128: 22, 256: 44, 512: 104, 1024: 209, 2048: 418, 4096: 836, 8192: 1672, 16384: 3344,
                      32768: 6688},
}  # fmt: skip
"""FlashAttention, arXiv:2205.14135, table 21: peak MiB of forward and backward.

Batch 16, 8 heads, d = 64, fp16. The row for 64k is not legible in the source and left out.
"""

FIGURE_2_GB = {"standard": (40.3, 35.3), "flash-v1": (4.4, 4.4)}
"""FlashAttention, figure 2 left: HBM reads and writes in GB as arXiv v2 and as the NeurIPS text print them.

Batch 64, 16 heads, N = 1024, d = 64, fp16, A100, forward and backward.
"""
