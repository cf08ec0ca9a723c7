"""The bundled Gluon kernel of the implementation ``flash-v3-fp8``, box by box: forward only.

Beside ``flash-v3-gluon``: q, k and v take one byte an element and o two (16 bits); each warpgroup reads the
scale of its tile of queries and, with each K/V tile, that tile's two; V lies by columns, whose keys are
padded to a multiple of 32, and the padding is loaded as well. Where V is without its mean (tiles with
``promote``), each warpgroup reads that with each tile of queries, in 16 bits and as many columns as a box
has. Held to a walk over the kernel's own schedule and boxes by tests/test_flash_v3_fp8_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashbench import hopper_configs
from flashbench._iomodel import flash, flash_v2, flash_v3_gluon
from flashbench._iomodel.flash_fp8 import HALF, padded_rows
from flashbench._iomodel.tensors import FP32, sizes
from flashbench._iomodel.types import Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench.errors import SpecError
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

GROUP = 32
"""Keys of V's columns are padded to a multiple of this (kernels/_fp8.py)."""

ASSUMPTIONS = flash_v3_gluon.ASSUMPTIONS


def forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """What flash-v3's forward moves, V's padding, the scales and V's mean."""
    p, s, tile = problem, sizes(problem), tiles["fwd"]
    work = flash_v3_gluon.forward(p, tiles, variant)
    (step,) = work.steps
    heads, warpgroups = p.batch * p.num_heads, tile.block_q // hopper_configs.ROWS
    tiles_q = heads * -(-p.seqlen_q // tile.block_q)
    blind = max(0, p.seqlen_q - p.seqlen_k) // tile.block_q if p.causal else 0
    visited = step.exps // (tile.block_q * tile.block_k)
    first = min(p.seqlen_k + -p.seqlen_k % GROUP, tile.block_k)
    scales = FP32 * warpgroups
    read = {
        **step.read,
        "v": heads * (padded_rows(p, tile, GROUP) + blind * first) * p.head_dim_v,
        "q_scale": scales * tiles_q,
        "k_scale": scales * visited,
        "v_scale": scales * visited,
    }
    d, dv = (hopper_configs.width(dim, dim) for dim in (p.head_dim, p.head_dim_v))
    if hopper_configs.choose_fp8(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k).promote:
        read["v_mean"] = HALF * warpgroups * tiles_q * dv
    boxes = {"q": tiles_q * tile.block_q * d, "k": visited * tile.block_k * d,
             "v": visited * tile.block_k * dv}  # fmt: skip
    o = HALF * s.o
    step = step._replace(
        read=read, write={"o": o, "lse": s.lse}, flops=2 * step.exps * (d + dv), moved={**step.moved, **boxes}
    )
    kept = o + s.lse
    return work._replace(steps=(step,), extra_bytes=kept, saved_bytes=kept, held_bytes=kept)


def backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """Raises SpecError: there is none."""
    raise SpecError("model 'flash-v3-fp8' has no backward; accepted: fwd")


def refuses(problem: Problem) -> str | None:
    """Why the kernel does not run the problem, or None."""
    p = problem
    if p.dtype_bytes != 1:
        return f"the bundled fp8 kernel does not take {p.dtype}"
    if reason := hopper_configs.why_not_fp8(p.head_dim, p.head_dim_v):
        return f"the bundled Gluon kernel of fp8: {reason}"
    return flash.refuses_plain(p)


def shipped_tiles(problem: Problem, kernel: str, device: Device | None) -> Tiles | None:
    """The tile that the kernel ships with."""
    p = problem
    tiles = hopper_configs.choose_fp8(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
    return Tiles(tiles.block_q, tiles.block_k)


footprint = flash_v2.footprint
