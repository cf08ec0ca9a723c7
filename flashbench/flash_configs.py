"""Tile sizes, warps and stages of the flash kernels: one table, and the choice from it.

Plain Python, so that a refusal and the IO model's tile sizes are to be had without torch or Triton.
"""

from __future__ import annotations

import math as numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from flashbench.problem import Problem

MAX_HEAD_DIM = 256
FP8_CAPABILITY = (8, 9)
"""The first compute capability that multiplies and converts fp8."""
STATISTICS_BYTES = 1024
BARRIER_BYTES = 320

SUMMED_ROWS = 1024
"""Rows of delta that the kernels of dsinks, and of a bias that all keys share, sum at a time."""

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
    """A table row: the configs to try in order for head dims (the larger one) up to max_dim.

    math: ``half`` (fp16 and bf16), ``fp8``, ``tf32``, or ``ieee`` (fp32 without tensor cores).
    """

    kernel: str
    family: str
    math: str
    max_dim: int
    configs: tuple[Config, ...]


_C = Config
TABLE = (
    # up to 128 timed on an H100 SXM with Triton 3.6 (reports/h100-sxm/tuning); above, checked on it but
    # chosen by the compiled code alone: the largest tiles that spill no registers
    Row("fwd", "sm90", "half", 64, (_C(128, 64, 8, 3),)),
    Row("fwd", "sm90", "half", 128, (_C(128, 128, 8, 3),)),
    Row("fwd", "sm90", "half", 256, (_C(128, 64, 8, 2),)),
    Row("dq", "sm90", "half", 64, (_C(128, 64, 8, 3),)),
    Row("dq", "sm90", "half", 128, (_C(64, 64, 4, 2),)),
    Row("dq", "sm90", "half", 256, (_C(64, 64, 8, 2),)),
    Row("dkdv", "sm90", "half", 64, (_C(64, 64, 4, 3),)),
    Row("dkdv", "sm90", "half", 128, (_C(32, 64, 4, 3),)),
    Row("dkdv", "sm90", "half", 192, (_C(32, 64, 8, 2),)),
    Row("dkdv", "sm90", "half", 256, (_C(16, 64, 8, 2),)),
    # fp8 is chosen by the compiled code alone: the product of a tile stands beside the sum of all
    Row("fwd", "sm90", "fp8", 128, (_C(128, 128, 8, 3),)),
    Row("fwd", "sm90", "fp8", 192, (_C(128, 64, 8, 2),)),
    Row("fwd", "sm90", "fp8", 256, (_C(64, 128, 8, 2),)),
    # any other card: the first that fits its shared memory
    Row("fwd", "any", "half", 64, (_C(128, 64, 4, 3), _C(64, 64, 4, 2), _C(64, 32, 4, 1))),
    Row("fwd", "any", "half", 128, (_C(128, 64, 8, 2), _C(64, 32, 4, 2), _C(64, 32, 4, 1))),
    Row("fwd", "any", "half", 256, (_C(64, 64, 8, 2), _C(64, 32, 4, 1), _C(32, 16, 4, 1))),
    Row("dq", "any", "half", 64, (_C(64, 64, 4, 2), _C(64, 32, 4, 1))),
    Row("dq", "any", "half", 128, (_C(64, 64, 4, 2), _C(64, 32, 4, 1), _C(32, 32, 4, 1))),
    Row("dq", "any", "half", 256, (_C(64, 32, 8, 1), _C(32, 32, 8, 1), _C(16, 16, 4, 1))),
    Row("dkdv", "any", "half", 64, (_C(64, 64, 4, 2), _C(32, 64, 4, 1))),
    Row("dkdv", "any", "half", 128, (_C(32, 64, 4, 2), _C(32, 64, 4, 1), _C(32, 32, 4, 1))),
    Row("dkdv", "any", "half", 256, (_C(16, 64, 8, 2), _C(16, 32, 4, 1), _C(16, 16, 4, 1))),
    Row("delta", "any", "half", 256, (_C(64, 64, 4, 1), _C(32, 32, 4, 1))),
    Row("fwd", "any", "fp8", 128, (_C(128, 64, 8, 2), _C(64, 32, 4, 1))),
    Row("fwd", "any", "fp8", 256, (_C(64, 64, 8, 2), _C(64, 32, 4, 1))),
    Row("fwd", "any", "ieee", 64, (_C(64, 32, 4, 1), _C(32, 32, 4, 1))),
    Row("fwd", "any", "ieee", 256, (_C(32, 32, 4, 1), _C(16, 16, 4, 1))),
    Row("dq", "any", "ieee", 128, (_C(32, 32, 4, 1), _C(16, 16, 4, 1))),
    Row("dq", "any", "ieee", 256, (_C(16, 16, 4, 1),)),
    Row("dkdv", "any", "ieee", 64, (_C(32, 32, 8, 1), _C(16, 16, 4, 1))),
    Row("dkdv", "any", "ieee", 128, (_C(16, 32, 4, 1), _C(16, 16, 4, 1))),
    Row("dkdv", "any", "ieee", 256, (_C(16, 16, 4, 1),)),
    Row("delta", "any", "ieee", 256, (_C(16, 16, 4, 1),)),
    Row("fwd", "any", "tf32", 128, (_C(64, 32, 4, 1), _C(16, 16, 4, 1))),
    Row("fwd", "any", "tf32", 256, (_C(64, 32, 8, 1), _C(16, 16, 4, 1))),
    Row("dq", "any", "tf32", 128, (_C(64, 32, 4, 1), _C(16, 16, 4, 1))),
    Row("dq", "any", "tf32", 256, (_C(64, 16, 8, 1), _C(16, 16, 4, 1))),
    Row("dkdv", "any", "tf32", 64, (_C(32, 64, 4, 1), _C(16, 16, 4, 1))),
    Row("dkdv", "any", "tf32", 128, (_C(32, 64, 8, 1), _C(16, 16, 4, 1))),
    Row("dkdv", "any", "tf32", 256, (_C(16, 64, 8, 1), _C(16, 16, 4, 1))),
    Row("delta", "any", "tf32", 256, (_C(16, 16, 4, 1),)),
    # K/V outside (flash-v1, flash-v2-atomic): chosen by the compiled code alone, the longest K/V tiles, as
    # they decide how often Q goes by, that spill little
    Row("v1_fwd", "sm90", "half", 64, (_C(64, 128, 8, 1),)),
    Row("v1_fwd", "any", "half", 256, (_C(32, 128, 8, 1), _C(32, 64, 8, 1), _C(32, 32, 8, 1))),
    Row("v1_bwd", "sm90", "half", 128, (_C(16, 128, 8, 1),)),
    Row("v1_bwd", "any", "half", 64, (_C(32, 128, 8, 1), _C(32, 64, 8, 1))),
    Row("v1_bwd", "any", "half", 128, (_C(32, 64, 8, 1), _C(16, 32, 8, 1))),
    Row("v1_bwd", "any", "half", 256, (_C(16, 32, 8, 1), _C(16, 16, 8, 1))),
    Row("atomic", "sm90", "half", 64, (_C(64, 128, 8, 2),)),
    Row("atomic", "sm90", "half", 128, (_C(32, 128, 8, 2),)),
    Row("atomic", "any", "half", 64, (_C(64, 128, 8, 2), _C(32, 64, 8, 1))),
    Row("atomic", "any", "half", 128, (_C(32, 64, 8, 2), _C(32, 32, 8, 1))),
    Row("atomic", "any", "half", 256, (_C(32, 32, 8, 1), _C(16, 16, 8, 1))),
    Row("v1_fwd", "any", "ieee", 128, (_C(32, 64, 8, 1), _C(16, 16, 4, 1))),
    Row("v1_fwd", "any", "ieee", 256, (_C(16, 32, 8, 1), _C(16, 16, 4, 1))),
    Row("v1_bwd", "any", "ieee", 64, (_C(32, 32, 8, 1), _C(16, 16, 4, 1))),
    Row("v1_bwd", "any", "ieee", 128, (_C(16, 32, 8, 1), _C(16, 16, 4, 1))),
    Row("v1_bwd", "any", "ieee", 256, (_C(16, 16, 8, 1),)),
    Row("atomic", "any", "ieee", 128, (_C(32, 32, 8, 1), _C(16, 16, 4, 1))),
    Row("atomic", "any", "ieee", 256, (_C(16, 16, 8, 1),)),
    Row("v1_fwd", "any", "tf32", 128, (_C(32, 64, 4, 1), _C(16, 16, 4, 1))),
    Row("v1_fwd", "any", "tf32", 256, (_C(16, 64, 8, 1), _C(16, 16, 4, 1))),
    Row("v1_bwd", "any", "tf32", 128, (_C(16, 64, 8, 1), _C(16, 16, 4, 1))),
    Row("v1_bwd", "any", "tf32", 256, (_C(16, 16, 4, 1),)),
    Row("atomic", "any", "tf32", 128, (_C(16, 64, 8, 1), _C(16, 16, 4, 1))),
    Row("atomic", "any", "tf32", 256, (_C(16, 16, 4, 1),)),
)
INTERPRETED = Config(64, 64, 4, 1)

_TALL = {"block_q": (64, 128), "block_k": (32, 64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3, 4)}
_LONG = {"block_q": (16, 32, 64), "block_k": (64, 128), "num_warps": (4, 8), "num_stages": (1, 2, 3, 4)}
_SMALL = {"block_q": (16, 32, 64), "block_k": (16, 32, 64), "num_warps": (4, 8), "num_stages": (1, 2)}
SPACES: Mapping[str, Mapping[str, Sequence[int]]] = {
    "fwd": _TALL, "dq": _TALL, "dkdv": _LONG, "v1_fwd": _LONG, "v1_bwd": _LONG, "atomic": _LONG,
}  # fmt: skip
"""What ``flashbench tune`` tries in the place of the table, by kernel; fp32 and tf32 have _SMALL in all."""


def math_of(dtype: str) -> str:
    """The table's word for a dtype name."""
    return {"fp32": "ieee", "tf32": "tf32", "fp8": "fp8", "fp8-e5m2": "fp8"}.get(dtype, "half")


def register_limit(
    kernel: str, config: Config, math: str, dim: int, capability: tuple[int, int] | None
) -> int | None:
    """The most registers that the compiler may give a thread, None where it is to choose; dim: the larger.

    Of dq at head dims up to 64 two programs share an H100's SM with 128 registers a thread; left alone the
    compiler takes 123 to 154 by mask. Under a mask that costs a few spills (tests/test_flash_aot.py).
    """
    if (kernel, math, capability) != ("dq", "half", (9, 0)) or dim > 64:
        return None
    return 128 if config.num_warps == 8 and config.block_q * config.block_k <= 128 * 64 else None


def widest(math: str) -> int:
    """How wide a piece of a head dim may be.

    fp32 is multiplied without tensor cores, with a whole row of a piece in registers; and the sum of
    a row is the more exact for being a sum of sums.
    """
    return MAX_HEAD_DIM if math in ("half", "fp8") else 32


def split(dim: int, widest: int) -> tuple[tuple[int, int], ...]:
    """A head dim as (first column, width) of pieces, each a power of two from 32 to widest.

    96 → 64 + 32, 192 → 128 + 64: less waste than padding to the next power of two. Narrower pieces are
    left out because TF32 gradients came out wrong on an H100 (Triton 3.6) where two warp groups shared
    a piece of 16 columns.
    """
    low = max(32, 1 << (dim.bit_length() - 1))
    rest = max(32, 1 << (dim - low - 1).bit_length()) if low < dim else 0
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
    math: str,
    head_dim: int,
    head_dim_v: int,
    capability: tuple[int, int] | None,
    limit: int | None,
) -> Config:
    """The kernel's configuration; capability None is the interpreter, limit None is no limit.

    Where no row fits the limit (bytes of shared memory per block) the smallest is returned;
    ``shared_bytes`` then says by how much it is too large.
    """
    if capability is None:
        return INTERPRETED
    configs = [
        config
        for family in (f"sm{capability[0]}{capability[1]}", "any")
        for row in TABLE
        if (row.kernel, row.family, row.math) == (kernel, family, math)
        if row.max_dim >= max(head_dim, head_dim_v)
        for config in row.configs
    ]
    needs = [shared_bytes(kernel, config, math, head_dim, head_dim_v, capability) for config in configs]
    for config, need in zip(configs, needs, strict=True):
        if limit is None or need <= limit:
            return config
    return configs[needs.index(min(needs))]


def chosen(problem: Problem, kernel: str, capability: tuple[int, int] | None, limit: int | None) -> Config:
    """What the kernel is launched with for the problem: ``choose``, with room for its options."""
    shape = math_of(problem.dtype), problem.head_dim, problem.head_dim_v
    config = choose(kernel, *shape, capability, limit)
    biased = bool(problem.bias) and 1 not in problem.bias_shape[2:]
    return with_options(kernel, config, biased=biased, capped=problem.softcap > 0)


def with_options(kernel: str, config: Config, *, biased: bool, capped: bool) -> Config:
    """The configuration with room for what a bias of a number per pair and a softcap hold beside the scores.

    capped: a forward on 128 keys spills 70 instructions on sm_90 (3.6, d = 128); on 64 it spills none.
    """
    if biased and kernel != "delta":
        config = with_bias(config)
    if capped and kernel == "fwd":
        config = replace(config, block_k=min(64, config.block_k))
    return config


def with_bias(config: Config) -> Config:
    """The configuration where a bias of a number per pair streams along with the keys, in their room."""
    return replace(config, block_k=max(16, config.block_k // 2), num_stages=min(2, config.num_stages))


def shared_bytes(
    kernel: str,
    config: Config,
    math: str,
    head_dim: int,
    head_dim_v: int,
    capability: tuple[int, int] | None = None,
) -> int:
    """Shared memory per block that the compiled kernel asks for at most.

    Resident tiles once, streamed tiles once per stage, row statistics, and room for P where a warp
    does not hold whole rows of it; from sm_100 to sm_103, whose tensor cores take their operands from
    shared memory, for P and dS in any case and for barriers. Tested against the compiler's own figure.
    """
    element = {"half": 2, "fp8": 1}.get(math, 4)
    width, width_v = (sum(cols for _, cols in split(dim, widest(math))) for dim in (head_dim, head_dim_v))
    q, k = config.block_q, config.block_k
    both = (width + width_v) * element
    backward = k * both + k * width * element  # K in two layouts, to be multiplied from both sides
    resident = {
        "fwd": q * width * element,
        "dq": q * both,
        "dkdv": k * both,
        "delta": 2 * q * width_v * element,
        "v1_fwd": k * both,
        "v1_bwd": backward,
        "atomic": backward,
    }
    streamed = {
        "fwd": k * both, "dq": k * both, "dkdv": q * both, "delta": 0,
        "v1_fwd": q * width * element, "v1_bwd": q * both, "atomic": q * both,
    }  # fmt: skip
    held = math == "half" and 16 * config.num_warps <= (k if kernel == "dkdv" else q)
    if kernel in ("v1_bwd", "atomic"):
        staged = 2 * q * k * element  # P, and dS to be turned
    else:
        staged = 0 if held or kernel == "delta" else q * k * element
    scratch = STATISTICS_BYTES + staged
    if capability is not None and capability[0] == 10:
        operands = 0 if kernel in ("fwd", "v1_fwd", "delta") else 2 * max(q, 64) * max(k, 64) * element
        scratch += BARRIER_BYTES + operands
    # O and dQ on their way between memory and a product, as fp32
    turned = {"v1_fwd": q * width_v * 4, "v1_bwd": q * width * 4}.get(kernel, 0)
    return resident[kernel] + max(config.num_stages * streamed[kernel] + scratch, turned)


def candidates(kernel: str, own: Config, math: str) -> list[Config]:
    """What the kernel may be tried with: own, then its space, the nearest to own first; empty without one."""
    if kernel not in SPACES:
        return []
    return near(own, SPACES[kernel] if math in ("half", "fp8") else _SMALL)


_Any = TypeVar("_Any", bound=Any)


def near(own: _Any, space: Mapping[str, Sequence[Any]]) -> list[_Any]:
    """own and every other configuration of the space (values of its fields), the nearest to own first.

    Near: in doublings of a number, each field's summed up; a switch counts as one.
    """

    def distance(config: _Any) -> float:
        return sum(
            abs(numbers.log2(value / getattr(own, name)))
            if value and getattr(own, name)
            else value != getattr(own, name)
            for name, value in ((name, getattr(config, name)) for name in space)
        )

    every = [replace(own, **dict(zip(space, values, strict=True))) for values in product(*space.values())]
    return list(dict.fromkeys([own, *sorted(every, key=distance)]))


def section(streamed_bytes: int, heads: int) -> int:
    """How many heads a causal launch interleaves: as many as stream what stays in L2 together.

    streamed_bytes: what every block of one head reads (K and V, or Q and dO).
    """
    return max(1, min(heads, SECTION_BYTES // max(1, streamed_bytes)))
