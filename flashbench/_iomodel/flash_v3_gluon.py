"""The bundled Gluon kernels of the implementation ``flash-v3``, box by box.

TMA moves boxes: 64 rows of Q or O, a K/V tile, by the columns of a piece of the head dim. Of a box that
hangs over the tensor's edge only what is inside is moved: the rest of shared memory is filled with zeros
that nobody fetched (CUDA C++ Programming Guide, tensor memory access). A tile of queries that sees no key
loads its first K/V tile all the same. The backward's dQ is added to an fp32 accumulator, tile by tile and
in whole tiles, as are its rows' lse and delta; of head dims over 128 it has a kernel of its own. flash-v2's
kernels do what ``hopper_configs.why_portable`` names, and dQ of other head dims where it is to be
deterministic. Held to walks over the kernels' own schedules and descriptors
by tests/test_flash_v3_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashbench import hopper_configs
from flashbench._iomodel import flash, flash_v2, sectors
from flashbench._iomodel.tensors import FP32, INT32, sizes
from flashbench._iomodel.types import Step, Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench._iomodel.visits import visits
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

ASSUMPTIONS = (
    "boxes of TMA, of which what lies outside the tensor is not moved; a schedule for 132 SMs, read once per"
    " warpgroup and producer; products on whole tiles and padded head dims; the backward of head dims over"
    " 128 in two kernels"
)


ENTRY = 8
"""Bytes of an entry of the forward's schedule."""


def forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """What flash-v2's forward moves, a K/V tile for each tile of queries without keys, and the schedule.

    Counters see boxes whole, with the zeros for what lies outside the tensor, and of the schedule each entry
    once, a sector for each, as the L1 has it for the others that read it.
    """
    p, tile = problem, tiles["fwd"]
    work = flash_v2.forward(p, tiles, variant)
    (step,) = work.steps
    heads, e = p.batch * p.num_heads, p.dtype_bytes
    blind = max(0, p.seqlen_q - p.seqlen_k) // tile.block_q if p.causal else 0
    rows = heads * (visits(p, tile.block_q, tile.block_k).key_rows + blind * min(p.seqlen_k, tile.block_k))
    pairs = step.exps + heads * blind * tile.block_q * tile.block_k
    d, dv = (sum(hopper_configs.pieces(dim)) for dim in (p.head_dim, p.head_dim_v))
    read = {**step.read, "k": rows * p.head_dim * e, "v": rows * p.head_dim_v * e}
    read["schedule"] = ENTRY * _entries(step.ctas, tile.block_q // hopper_configs.ROWS)
    programs = min(hopper_configs.PROGRAMS, step.ctas)
    boxes = step.ctas * tile.block_q, pairs // tile.block_q
    moved = {"q": boxes[0] * d * e, "k": boxes[1] * d * e, "v": boxes[1] * dv * e,
             "schedule": sectors.alone(step.ctas + 2 * programs),
             "lse": sectors.vectors(heads, p.seqlen_q, hopper_configs.ROWS)}  # fmt: skip
    step = step._replace(read=read, flops=2 * pairs * (d + dv), exps=pairs, ctas=programs, moved=moved)
    return work._replace(steps=(step,))


def _entries(tiles: int, warpgroups: int) -> int:
    """Entries of the schedule that are read: a program's count, its tiles and, by warpgroups, one ahead."""
    programs = min(hopper_configs.PROGRAMS, tiles)
    return warpgroups * (tiles + 2 * programs) + tiles + programs


def backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """Rows' lse and delta prepared, dK and dV with dQ's additions, dQ converted; or flash's kernels.

    A program reads Q, dO and two fp32 numbers per row of each tile of queries that its keys see, for all
    query heads of the group, so K and V are read, and dK and dV written, once per K/V head.
    """
    p, s = problem, sizes(problem)
    if hopper_configs.why_portable(p.head_dim, p.head_dim_v):
        return flash.backward(p, tiles, variant)
    if hopper_configs.wide(p.head_dim, p.head_dim_v):
        return _wide(p, tiles)
    rows = 2 * FP32 * p.batch * p.num_heads * _padded(p, tiles["bwd"].block_q)
    dq_acc = 0 if p.deterministic else rows // 2 * hopper_configs.width(p.head_dim, p.head_dim_v)
    prepared = {"lse_2": rows // 2, "delta": rows // 2, **({"dq_acc": dq_acc} if dq_acc else {})}
    prepare = Step(name="prepare", read={"o": s.o, "do": s.o, "lse": s.lse}, write=prepared)
    steps = [prepare, _gradients(p, tiles["bwd"])]
    gradients = s.q + s.k + s.v
    if dq_acc:
        steps.append(Step(name="convert", read={"dq_acc": dq_acc}, write={"dq": s.q}))
        return Work(steps=tuple(steps), extra_bytes=gradients + rows + dq_acc)
    steps += [step for step in flash.backward(p, {**tiles, "dkdv": tiles["dq"]}, variant).steps
              if step.name != "dkdv"]  # fmt: skip
    return Work(steps=tuple(steps), extra_bytes=gradients + rows + s.lse)


def _gradients(p: Problem, tile: Tiles) -> Step:
    """The kernel of dK and dV, which adds dQ to its accumulator unless that is to be deterministic."""
    s, heads, e = sizes(p), p.batch * p.num_heads, p.dtype_bytes
    width = hopper_configs.width(p.head_dim, p.head_dim_v)
    seen = visits(p, tile.block_q, tile.block_k)
    visited = heads * seen.tiles * tile.block_q
    key_tiles = p.batch * p.num_kv_heads * -(-p.seqlen_k // tile.block_k)
    programs = min(hopper_configs.PROGRAMS, key_tiles)
    streamed, pairs = heads * seen.query_rows * e, visited * tile.block_k
    return Step(
        name="backward",
        read={"k": s.k, "v": s.v, "q": streamed * p.head_dim, "do": streamed * p.head_dim_v,
              "lse_2": visited * FP32, "delta": visited * FP32,
              "schedule": INT32 * (WARPGROUPS + 1) * (programs + key_tiles)},
        write={"dk": s.k, "dv": s.v},
        atomic={} if p.deterministic else {"dq_acc": visited * width * FP32},
        flops=2 * pairs * width * (4 if p.deterministic else 5),
        exps=pairs,
        ctas=programs,
    )  # fmt: skip


def _wide(p: Problem, tiles: Mapping[str, Tiles]) -> Work:
    """Of head dims over 128: rows' lse and delta prepared, a kernel of dK and dV, one of dQ."""
    s, heads, e = sizes(p), p.batch * p.num_heads, p.dtype_bytes
    of_keys, of_queries = tiles["dkdv"], tiles["dq"]
    columns = sum(hopper_configs.pieces(p.head_dim)), sum(hopper_configs.pieces(p.head_dim_v))
    rows = FP32 * heads * _padded(p, of_keys.block_q)
    prepared = {"lse_2": rows, "delta": rows}
    prepare = Step(name="prepare", read={"o": s.o, "do": s.o, "lse": s.lse}, write=prepared)
    dkdv = _gradients(p, of_keys)._replace(name="dkdv", atomic={})
    dkdv = dkdv._replace(flops=4 * dkdv.exps * sum(columns))
    seen = visits(p, of_queries.block_q, of_queries.block_k)
    blind = max(0, p.seqlen_q - p.seqlen_k) // of_queries.block_q if p.causal else 0
    keys = heads * (seen.key_rows + blind * min(p.seqlen_k, of_queries.block_k)) * e
    pairs = heads * (seen.tiles + blind) * of_queries.block_q * of_queries.block_k
    count = heads * -(-p.seqlen_q // of_queries.block_q)
    programs = min(hopper_configs.PROGRAMS, count)
    dq = Step(
        name="dq",
        read={"q": s.q, "do": s.o, "k": keys * p.head_dim, "v": keys * p.head_dim_v, **prepared,
              "schedule": INT32 * (WARPGROUPS + 1) * (programs + count)},
        write={"dq": s.q},
        flops=2 * pairs * (2 * columns[0] + columns[1]),
        exps=pairs,
        ctas=programs,
    )  # fmt: skip
    return Work(steps=(prepare, dkdv, dq), extra_bytes=s.q + s.k + s.v + 2 * rows)


WARPGROUPS = 2
"""Of the backward's kernel, beside the warp that loads."""


def _padded(p: Problem, block: int) -> int:
    return -(-p.seqlen_q // block) * block


def refuses(problem: Problem) -> str | None:
    """Why the kernels do not run the problem, or None."""
    if problem.dtype_bytes != 2:
        return f"the bundled Gluon kernel takes fp16 and bf16, not {problem.dtype}"
    if problem.head_dim % 8 or problem.head_dim_v % 8:
        return "the bundled Gluon kernel takes head dims that are multiples of 8"
    return flash.refuses_plain(problem)


def shipped_tiles(problem: Problem, kernel: str, device: Device | None) -> Tiles | None:
    """The tile that the kernel ships with; None of a kernel that the problem is computed without."""
    p = problem
    if kernel == "fwd":
        tiles = hopper_configs.choose(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k, fp16=p.dtype == "fp16")
        return Tiles(tiles.block_q, tiles.block_k)
    portable = hopper_configs.why_portable(p.head_dim, p.head_dim_v) is not None
    wide = hopper_configs.wide(p.head_dim, p.head_dim_v)
    if kernel == "bwd":
        if portable or wide:
            return None
        own = hopper_configs.choose_backward(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
        return Tiles(own.block_q, hopper_configs.KEYS)
    if wide and not portable:
        return Tiles(*hopper_configs.WIDE[kernel]) if kernel in hopper_configs.WIDE else None
    runs = portable or (p.deterministic and kernel != "dkdv")
    return flash.shipped_tiles(p, kernel, device) if runs else None


footprint = flash.footprint
