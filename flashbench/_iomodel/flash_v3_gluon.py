"""The bundled Gluon kernel of the implementation ``flash-v3``, box by box; its backward is flash's.

TMA moves boxes: 64 rows of Q or O, a K/V tile, by the columns of a piece of the head dim. Of a box that
hangs over the tensor's edge only what is inside is moved: the rest of shared memory is filled with zeros
that nobody fetched (CUDA C++ Programming Guide, tensor memory access). A tile of queries that sees no key
loads its first K/V tile all the same. Held to a walk over the kernel's own schedule and descriptors by
tests/test_flash_v3_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashbench import hopper_configs
from flashbench._iomodel import flash, flash_v2
from flashbench._iomodel.tensors import INT32
from flashbench._iomodel.types import Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench._iomodel.visits import visits
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

ASSUMPTIONS = (
    "boxes of TMA, of which what lies outside the tensor is not moved; a schedule for 132 SMs, read once per"
    " warpgroup and producer; products on whole tiles and padded head dims; backward as flash"
)


def forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """What flash-v2's forward moves, a K/V tile for each tile of queries without keys, and the schedule."""
    p, tile = problem, tiles["fwd"]
    work = flash_v2.forward(p, tiles, variant)
    (step,) = work.steps
    heads, e = p.batch * p.num_heads, p.dtype_bytes
    blind = max(0, p.seqlen_q - p.seqlen_k) // tile.block_q if p.causal else 0
    rows = heads * (visits(p, tile.block_q, tile.block_k).key_rows + blind * min(p.seqlen_k, tile.block_k))
    pairs = step.exps + heads * blind * tile.block_q * tile.block_k
    d, dv = (sum(hopper_configs.pieces(dim)) for dim in (p.head_dim, p.head_dim_v))
    read = {**step.read, "k": rows * p.head_dim * e, "v": rows * p.head_dim_v * e}
    read["schedule"] = INT32 * _entries(step.ctas, tile.block_q // hopper_configs.ROWS)
    programs = min(hopper_configs.PROGRAMS, step.ctas)
    step = step._replace(read=read, flops=2 * pairs * (d + dv), exps=pairs, ctas=programs)
    return work._replace(steps=(step,))


def _entries(tiles: int, warpgroups: int) -> int:
    """Entries of the schedule that are read: a program's count, its tiles and, by warpgroups, one ahead."""
    programs = min(hopper_configs.PROGRAMS, tiles)
    return warpgroups * (tiles + 2 * programs) + tiles + programs


def refuses(problem: Problem) -> str | None:
    """Why the kernels do not run the problem, or None."""
    if problem.dtype_bytes != 2:
        return f"the bundled Gluon kernel takes fp16 and bf16, not {problem.dtype}"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return "the bundled Gluon kernel takes head dims that are multiples of 8"
    return flash.refuses_plain(problem)


def shipped_tiles(problem: Problem, kernel: str, device: Device | None) -> Tiles:
    """The tile that the kernel ships with."""
    if kernel != "fwd":
        return flash.shipped_tiles(problem, kernel, device)
    p = problem
    tiles = hopper_configs.choose(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
    return Tiles(tiles.block_q, tiles.block_k)


backward, footprint = flash.backward, flash.footprint
