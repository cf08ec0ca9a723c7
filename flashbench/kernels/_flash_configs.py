"""Tile sizes, warps and stages of the flash kernels: one table, and the choice from it.

Plain Python, so that a refusal and the IO model's tile sizes are to be had without torch or Triton.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

KERNELS = ("fwd", "dkdv", "dq", "delta")
MAX_HEAD_DIM = 256
SECTION_BYTES = 16 * 2**20
"""Of the L2 cache (50 MB on an H100), what the heads in flight may stream; twice that is in use."""


@dataclass(frozen=True)
class Config:
    """One kernel's launch configuration: rows of Q and of K/V per tile, warps, pipeline stages."""

    block_q: int
    block_k: int
    num_warps: int
    num_stages: int


@dataclass(frozen=True)
class Row:
    """A table row: the configs to try in order for head dims (the larger one) up to max_dim."""

    kernel: str
    family: str
    dtype_bytes: int
    max_dim: int
    configs: tuple[Config, ...]


_C = Config
TABLE = (
    # family sm90: H100 SXM, Triton 3.6
    Row("fwd", "sm90", 2, 64, (_C(128, 64, 4, 3),)),
    Row("fwd", "sm90", 2, 128, (_C(128, 128, 8, 2),)),
    Row("fwd", "sm90", 2, 256, (_C(128, 64, 8, 2),)),
    Row("dkdv", "sm90", 2, 64, (_C(64, 128, 8, 2),)),
    Row("dkdv", "sm90", 2, 128, (_C(64, 128, 8, 2),)),
    Row("dkdv", "sm90", 2, 256, (_C(64, 64, 8, 1),)),
    Row("dq", "sm90", 2, 64, (_C(128, 64, 8, 2),)),
    Row("dq", "sm90", 2, 128, (_C(128, 64, 8, 2),)),
    Row("dq", "sm90", 2, 256, (_C(64, 64, 8, 1),)),
    # any other card: the first that fits its shared memory
    Row("fwd", "any", 2, 64, (_C(128, 64, 4, 3), _C(64, 64, 4, 2), _C(64, 32, 4, 1))),
    Row("fwd", "any", 2, 128, (_C(128, 64, 8, 2), _C(64, 32, 4, 2), _C(64, 32, 4, 1))),
    Row("fwd", "any", 2, 256, (_C(64, 64, 4, 2), _C(64, 32, 4, 2), _C(32, 32, 4, 1))),
    Row("dkdv", "any", 2, 64, (_C(64, 64, 4, 2), _C(32, 64, 4, 1))),
    Row("dkdv", "any", 2, 128, (_C(64, 64, 4, 2), _C(32, 64, 4, 1), _C(32, 32, 4, 1))),
    Row("dkdv", "any", 2, 256, (_C(32, 64, 8, 1), _C(32, 32, 4, 1))),
    Row("dq", "any", 2, 64, (_C(64, 64, 4, 2), _C(64, 32, 4, 1))),
    Row("dq", "any", 2, 128, (_C(64, 64, 4, 2), _C(64, 32, 4, 1), _C(32, 32, 4, 1))),
    Row("dq", "any", 2, 256, (_C(64, 32, 8, 1), _C(32, 32, 4, 1))),
    Row("fwd", "any", 4, 64, (_C(64, 32, 4, 2), _C(32, 32, 4, 1))),
    Row("fwd", "any", 4, 128, (_C(64, 32, 8, 1), _C(32, 32, 4, 1))),
    Row("fwd", "any", 4, 256, (_C(32, 32, 8, 1), _C(16, 16, 4, 1))),
    Row("dkdv", "any", 4, 64, (_C(32, 32, 4, 1),)),
    Row("dkdv", "any", 4, 128, (_C(32, 32, 8, 1), _C(16, 16, 4, 1))),
    Row("dkdv", "any", 4, 256, (_C(16, 16, 8, 1),)),
    Row("dq", "any", 4, 64, (_C(32, 32, 4, 1),)),
    Row("dq", "any", 4, 128, (_C(32, 32, 8, 1), _C(16, 16, 4, 1))),
    Row("dq", "any", 4, 256, (_C(16, 16, 8, 1),)),
)
DELTA = Config(64, 64, 4, 1)
INTERPRETED = Config(64, 64, 4, 1)


def widest(dtype_bytes: int) -> int:
    """How wide a piece of a head dim may be.

    fp32 is multiplied without tensor cores, with a whole row of a piece in registers; and the sum of
    a row is the more exact for being a sum of sums.
    """
    return 32 if dtype_bytes == 4 else MAX_HEAD_DIM


def split(dim: int, widest: int) -> tuple[tuple[int, int], ...]:
    """A head dim as (first column, width) of pieces, each a power of two from 16 to widest.

    96 → 64 + 32, 192 → 128 + 64, 40 → 32 + 16: less waste than padding to the next power of two.
    """
    low = max(16, 1 << (dim.bit_length() - 1))
    rest = max(16, 1 << (dim - low - 1).bit_length()) if low < dim else 0
    parts = (low, rest) if 0 < rest < low else (low + rest,)
    pieces = []
    start = 0
    for part in parts:
        for _ in range(0, part, widest):
            width = min(part, widest)
            if start < dim:
                pieces.append((start, width))
            start += width
    return tuple(pieces)


@cache
def choose(
    kernel: str,
    dtype_bytes: int,
    head_dim: int,
    head_dim_v: int,
    capability: tuple[int, int] | None,
    limit: int | None,
) -> Config:
    """The kernel's configuration; capability None is the interpreter, limit None is no limit.

    Where no row fits the limit (bytes of shared memory per block) the smallest is returned;
    ``shared_bytes`` then says by how much it is too large.
    """
    if kernel == "delta":
        return DELTA
    if capability is None:
        return INTERPRETED
    configs = [
        config
        for family in (f"sm{capability[0]}{capability[1]}", "any")
        for row in TABLE
        if (row.kernel, row.family, row.dtype_bytes) == (kernel, family, dtype_bytes)
        if row.max_dim >= max(head_dim, head_dim_v)
        for config in row.configs
    ]
    for config in configs:
        if limit is None or shared_bytes(kernel, config, dtype_bytes, head_dim, head_dim_v) <= limit:
            return config
    return min(configs, key=lambda c: shared_bytes(kernel, c, dtype_bytes, head_dim, head_dim_v))


def shared_bytes(kernel: str, config: Config, dtype_bytes: int, head_dim: int, head_dim_v: int) -> int:
    """Shared memory per block that the compiled kernel asks for at most.

    Resident tiles once, streamed tiles once per stage; tested against the compiler's own figure.
    """
    width, width_v = (
        sum(cols for _, cols in split(dim, widest(dtype_bytes))) for dim in (head_dim, head_dim_v)
    )
    stages = max(1, config.num_stages)
    q, k = config.block_q, config.block_k
    if kernel == "fwd":
        return (q * width + stages * k * (width + width_v)) * dtype_bytes
    if kernel == "dq":
        return (q * (width + width_v) + stages * k * (width + width_v)) * dtype_bytes
    if kernel == "dkdv":
        return (k * (width + width_v) + stages * q * (width + width_v)) * dtype_bytes
    return 0


def section(streamed_bytes: int, heads: int) -> int:
    """How many heads a causal launch interleaves: as many as stream what stays in L2 together.

    streamed_bytes: what every block of one head reads (K and V, or Q and dO).
    """
    return max(1, min(heads, SECTION_BYTES // max(1, streamed_bytes)))
