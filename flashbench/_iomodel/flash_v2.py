"""FlashAttention-2: Q outside, K/V streamed; O and the fp32 lse leave the chip once.

The backward comes in two forms: two kernels without atomics (``backward``, what the bundled
kernel does) and one kernel with K/V outside that adds dQ atomically (``atomic_backward``, what
the published code does). The forward may pack the query heads of a group into a tile, split K/V
over thread blocks with a merge (flash-decoding), and read a paged cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flashbench._iomodel import splits
from flashbench._iomodel.flash_v1 import gradients, sum_groups
from flashbench._iomodel.tensors import FP32, INT32, Sizes, sizes
from flashbench._iomodel.types import Step, Tiles, Work
from flashbench._iomodel.variant import AUTO, DEFAULT, Variant
from flashbench._iomodel.visits import packed_visits, page_entries, visits
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

ASSUMPTIONS = "every tile of K and V comes from L2 once per query tile and query head; loads are masked"


def forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """Each query tile reads Q once and the K/V tiles that it may see; O and lse are written once.

    Packed, a tile holds the query heads of a group, so that they share what K/V it reads. Split, each
    of S thread blocks reads Q and its share of K/V and writes O and lse in fp32, which a second kernel
    merges. Paged, each K/V tile reads the block table's entries of its pages.
    Source: FlashAttention-2 (arXiv:2307.08691), Algorithm 1; flash-attention 2 and 3 (splits, packing).
    """
    p, s, tile = problem, sizes(problem), tiles["fwd"]
    is_packed = bool(variant.pack_gqa) and p.group > 1
    look = packed_visits if is_packed else visits
    seen = look(p, tile.block_q, tile.block_k, variant)
    heads = p.batch * (p.num_kv_heads if is_packed else p.num_heads)
    rows = p.seqlen_q * (p.group if is_packed else 1)
    row_tiles = -(-rows // tile.block_q)
    streamed = heads * seen.key_rows * p.dtype_bytes
    pairs = heads * seen.tiles * tile.block_q * tile.block_k
    count = max(1, variant.num_splits)
    read = {"q": count * s.q, "k": streamed * p.head_dim, "v": streamed * p.head_dim_v}
    if variant.page_size:
        entries = page_entries(p, tile.block_q, tile.block_k, variant.page_size, is_packed)
        read["block_table"] = heads * variant.thin(entries) * INT32
    if variant.blocks is not None:
        read["block_lists"] = heads * variant.blocks.entries(p.seqlen_q, tile.block_q) * INT32
    kept = s.o + s.lse
    partial = {"o_part": count * s.o // p.dtype_bytes * FP32, "lse_part": count * s.lse} if count > 1 else {}
    step = Step(
        name="forward",
        read=read,
        write=partial or {"o": s.o, "lse": s.lse},
        flops=2 * pairs * (p.head_dim + p.head_dim_v),
        exps=pairs,
        ctas=count * heads * row_tiles,
    )
    merge = (Step(name="merge", read=partial, write={"o": s.o, "lse": s.lse}),) if partial else ()
    extra = kept + sum(partial.values())
    return Work(steps=(step, *merge), extra_bytes=extra, saved_bytes=kept, held_bytes=kept)


def settle(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant, device: Device | None) -> Variant:
    """Heads are packed only if asked; splits left open are those of flash-attention 2 on the device."""
    if variant.num_splits != AUTO or "fwd" not in tiles:
        return variant
    count = splits.flash_attention_2(splits.load(problem, tiles["fwd"], variant), splits.sms(device))
    return replace(variant, num_splits=count)


def backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """delta, then one kernel for dK, dV (K/V outside) and one for dQ (Q outside); no atomics.

    S and dP are computed twice. The dK, dV kernel loops over the query heads of its K/V head, so
    K and V are read, and dK and dV written, once per K/V head.
    """
    p, s = problem, sizes(problem)
    heads, e, d, dv = p.batch * p.num_heads, p.dtype_bytes, p.head_dim, p.head_dim_v
    kv_heads = p.batch * p.num_kv_heads
    outer, inner = tiles["dkdv"], tiles["dq"]
    seen_k = visits(p, outer.block_q, outer.block_k, variant)
    seen_q = visits(p, inner.block_q, inner.block_k, variant)
    rows = heads * seen_k.query_rows
    pairs_k = heads * seen_k.tiles * outer.block_q * outer.block_k
    pairs_q = heads * seen_q.tiles * inner.block_q * inner.block_k
    streamed = heads * seen_q.key_rows * e
    lists_k, lists_q = {}, {}
    if variant.blocks is not None:
        entries = variant.blocks.transposed.entries(p.seqlen_k, outer.block_k)
        lists_k = {"block_lists": kv_heads * entries * INT32}
        lists_q = {"block_lists": heads * variant.blocks.entries(p.seqlen_q, inner.block_q) * INT32}
    steps = (
        delta(s),
        Step(
            name="dkdv",
            read={"k": s.k, "v": s.v, "q": rows * d * e, "do": rows * dv * e, "lse": rows * FP32,
                  "delta": rows * FP32, **lists_k},
            write={"dk": s.k, "dv": s.v}, flops=4 * pairs_k * (d + dv), exps=pairs_k,
            ctas=kv_heads * -(-p.seqlen_k // outer.block_k),
        ),
        Step(
            name="dq",
            read={"q": s.q, "do": s.o, "lse": s.lse, "delta": s.lse, "k": streamed * d, "v": streamed * dv,
                  **lists_q},
            write={"dq": s.q}, flops=2 * pairs_q * (2 * d + dv), exps=pairs_q,
            ctas=heads * -(-p.seqlen_q // inner.block_q),
        ),
    )  # fmt: skip
    return Work(steps=steps, extra_bytes=s.q + s.k + s.v + s.lse)


def atomic_backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """delta and a zeroed fp32 dQ, one kernel with K/V outside that adds to it atomically, a conversion.

    dK, dV are written per query head and summed over a group. Source: FlashAttention-2
    (arXiv:2307.08691), Algorithm 2, and the published code (not its deterministic mode).
    """
    p, s, tile = problem, sizes(problem), tiles["bwd"]
    heads, e, d, dv = p.batch * p.num_heads, p.dtype_bytes, p.head_dim, p.head_dim_v
    seen = visits(p, tile.block_q, tile.block_k, variant)
    rows = heads * seen.query_rows
    pairs = heads * seen.tiles * tile.block_q * tile.block_k
    dq_acc = heads * p.seqlen_q * d * FP32
    dk, dv_name = ("dk", "dv") if p.group == 1 else ("dk_heads", "dv_heads")
    lists = {}
    if variant.blocks is not None:
        entries = variant.blocks.transposed.entries(p.seqlen_k, tile.block_k)
        lists = {"block_lists": heads * entries * INT32}
    steps = (
        delta(s, dq_acc),
        Step(
            name="backward",
            read={"k": s.k_heads, "v": s.v_heads, "q": rows * d * e, "do": rows * dv * e, "lse": rows * FP32,
                  "delta": rows * FP32, **lists},
            write={dk: s.k_heads, dv_name: s.v_heads}, atomic={"dq_acc": rows * d * FP32},
            flops=2 * pairs * (3 * d + 2 * dv), exps=pairs, ctas=heads * -(-p.seqlen_k // tile.block_k),
        ),
        Step(name="convert dq", read={"dq_acc": dq_acc}, write={"dq": s.q}),
        *sum_groups(p, s),
    )  # fmt: skip
    return Work(steps=steps, extra_bytes=gradients(p, s) + s.lse + dq_acc)


def delta(s: Sizes, dq_acc: int = 0) -> Step:
    """delta = rowsum(o·do) in fp32, and the zeroed accumulator of dq where there is one."""
    zeroed = {"dq_acc": dq_acc} if dq_acc else {}
    return Step(name="delta", read={"o": s.o, "do": s.o}, write={"delta": s.lse, **zeroed})


def sram_tiles(problem: Problem, kernel: str, elements: int) -> Tiles:
    """The tile whose resident tensors fill M elements; what streams by takes one row and no room.

    Forward: Q and O stay, block_q = ⌊M/(d + dv)⌋ (⌊M/2d⌋). dK, dV: K, V, dK, dV stay, block_k =
    ⌊M/2(d + dv)⌋. dQ: Q, dO, dQ stay, block_q = ⌊M/(2d + dv)⌋. At least 1; cut to the lengths.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    if kernel in ("dkdv", "bwd"):
        return Tiles(1, max(1, min(elements // (2 * (d + dv)), problem.seqlen_k)))
    resident = d + dv if kernel == "fwd" else 2 * d + dv
    return Tiles(max(1, min(elements // resident, problem.seqlen_q)), 1)


def footprint(problem: Problem, kernel: str, tiles: Tiles) -> int:
    """Elements of the tiles in fast memory and registers; a streamed tile of one row takes no room."""
    d, dv = problem.head_dim, problem.head_dim_v
    rows_q, rows_k = (block if block > 1 else 0 for block in (tiles.block_q, tiles.block_k))
    if kernel in ("dkdv", "bwd"):
        return max(tiles.block_k, 1) * 2 * (d + dv) + rows_q * (d + dv)
    return tiles.block_q * (d + dv if kernel == "fwd" else 2 * d + dv) + rows_k * (d + dv)


def shipped_tiles(problem: Problem, kernel: str, device: Device | None) -> Tiles:
    """The published code's tiles by head dim and card (none: A100 or H100 class).

    The two kernels of ``backward`` take 64×128 (dkdv) and 128×64 (dq) up to head_dim 128, 64×64
    above. Source: flash-attention 2, flash_fwd_launch_template.h and flash_bwd_launch_template.h.
    """
    d = max(problem.head_dim, problem.head_dim_v)
    small = device is not None and device.smem_per_block_bytes < 144 * 1024
    if kernel == "fwd":
        return _shipped_forward(problem, d, small, device)
    if d > 128:
        return Tiles(64, 64)
    if kernel == "dkdv":
        return Tiles(64, 128)
    if kernel == "dq":
        return Tiles(128, 64)
    if d <= 32 or (d <= 64 and not small):
        return Tiles(128, 128)
    return Tiles(64, 64) if d > 96 and small else Tiles(64, 128)


def _shipped_forward(problem: Problem, d: int, small: bool, device: Device | None) -> Tiles:
    dropout = problem.dropout_p > 0
    if d <= 64:
        return Tiles(128, 64 if dropout else 128)
    if d <= 96:
        return Tiles(128, 64)
    if d <= 128:
        if small:
            return Tiles(64, 64) if problem.causal and not dropout else Tiles(128, 32)
        return Tiles(128, 32 if dropout else 64)
    a100 = device is not None and device.capability == (8, 0)
    return Tiles(128, 64) if d <= 192 or a100 else Tiles(64, 64)
