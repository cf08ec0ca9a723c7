"""The bundled Triton kernel of the implementation ``flash-fp8``, load by load: forward only.

Beside ``flash``: q, k and v take one byte an element and o two (16 bits); every tile of queries reads its
scale and, with each K/V tile, that tile's two; V lies by columns, whose keys are padded to a multiple of
16, and the padding is loaded as well. Held to the kernel, traced in Triton's interpreter, by
tests/test_fp8_trace.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashbench._iomodel import flash, flash_v2
from flashbench._iomodel.tensors import FP32, sizes
from flashbench._iomodel.types import Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench._iomodel.visits import visits
from flashbench.errors import SpecError
from flashbench.problem import Problem

HALF = 2
"""Bytes of an element of o."""

ALIGNMENT = 16
"""Keys of V's columns are padded to a multiple of this (kernels/_fp8.py)."""


def forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """What flash's forward moves, V's padding and the scales."""
    p, s, tile = problem, sizes(problem), tiles["fwd"]
    work = flash.forward(p, tiles, variant)
    (step,) = work.steps
    heads, seen = p.batch * p.num_heads, visits(p, tile.block_q, tile.block_k)
    read = {
        "q": step.read["q"],
        "k": step.read["k"],
        "v": heads * padded_rows(p, tile, ALIGNMENT) * p.head_dim_v,
        "q_scale": step.ctas * FP32,
        "k_scale": heads * seen.tiles * FP32,
        "v_scale": heads * seen.tiles * FP32,
    }
    o = HALF * s.o
    step = step._replace(read=read, write={"o": o, "lse": s.lse})
    kept = o + s.lse
    return work._replace(steps=(step,), extra_bytes=kept, saved_bytes=kept, held_bytes=kept)


def padded_rows(p: Problem, tile: Tiles, alignment: int) -> int:
    """Rows of V streamed per query head: the last K/V tile, if ragged, with its padding."""
    seen = visits(p, tile.block_q, tile.block_k)
    missing = -p.seqlen_k % tile.block_k
    if not missing:
        return seen.key_rows
    visits_of_last = (tile.block_k * seen.tiles - seen.key_rows) // missing
    return seen.key_rows + visits_of_last * (-p.seqlen_k % alignment)


def backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """Raises SpecError: there is none."""
    raise SpecError("model 'flash-fp8' has no backward; accepted: fwd")


def refuses(problem: Problem) -> str | None:
    """Why the kernel does not run the problem, or None."""
    if problem.dtype_bytes != 1:
        return f"the bundled fp8 kernel does not take {problem.dtype}"
    return flash.refuses_plain(problem)


shipped_tiles, footprint = flash.shipped_tiles, flash_v2.footprint
