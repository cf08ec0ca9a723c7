"""The bundled Triton kernels of the implementation ``flash-decode``, load by load: keys split, heads packed.

Every query tile (rows of all heads of a group) reads Q once per split and the keys that it may see, and
leaves O and LSE of each split in fp32; a second kernel reads those that a row has and merges them. With
one split O and LSE are written at once. Of a packed batch every sequence has a cache of its own length. Each
thread block also reads its sequence's length, and of a
paged cache the page of each tile, or where a page is smaller than a tile (or cuts it) of each row. Held to
the kernels themselves, traced in Triton's interpreter, by tests/test_decode_model.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashbench import decode_configs, flash_configs
from flashbench._iomodel import sectors
from flashbench._iomodel.tensors import FP32, INT32, sizes
from flashbench._iomodel.types import Step, Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench.errors import SpecError
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

ASSUMPTIONS = (
    "the bundled kernels' own loads and stores; masked lanes move nothing; products on whole tiles and"
    " padded head dims; tile split_block_k is the keys of a split"
)


def forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """The split kernel and, with several splits, the merge.

    Source: Dao, Haziza, Massa, Sizov 2023, "Flash-Decoding for long-context inference".
    """
    p, s, tile, share = problem, sizes(problem), tiles["fwd"], tiles["split"].block_k
    count = max(1, -(-(variant.announced or p.seqlen_k) // share))
    ends = _ends(p, tile.block_q)
    programs = sum(heads for heads, _, _ in ends)
    blocks = sum(heads * -(-end // tile.block_k) for heads, _, end in ends)
    keys = sum(heads * end for heads, _, end in ends)
    running = sum(heads * _parts(end, share, count) for heads, _, end in ends)
    rows = sum(heads * used * _parts(end, share, count) for heads, used, end in ends)
    kv_bytes = variant.cache_bytes or p.dtype_bytes
    read = {
        "q": rows * p.head_dim * p.dtype_bytes,
        "k": keys * p.head_dim * kv_bytes,
        "v": keys * p.head_dim_v * kv_bytes,
        "seqused_k": programs * count * INT32,
    }
    if variant.page_size:
        read["block_table"] = (keys if variant.page_size % tile.block_k else blocks) * INT32
    if variant.cache_bytes == 1:
        read |= {"k_descale": running * FP32, "v_descale": running * FP32}
    partial = {"o_part": rows * p.head_dim_v * FP32, "lse_part": rows * FP32}
    whole = {"o": s.o, "lse": s.lse}
    d, dv = (_padded(dim, p, variant) for dim in (p.head_dim, p.head_dim_v))
    pairs = blocks * tile.block_q * tile.block_k
    step = Step(
        name="decode", read=read, write=partial if count > 1 else whole, flops=2 * pairs * (d + dv),
        exps=pairs, ctas=programs * count,
        moved=_moved(p, tile, running, read, "lse_part" if count > 1 else "lse"),
    )  # fmt: skip
    if variant.page_size:
        pages = sum(heads * _table_sectors(end, share, count, variant.page_size) for heads, _, end in ends)
        step = step._replace(moved={**step.moved, "block_table": sectors.alone(pages)})
    kept = s.o + s.lse
    if count == 1:
        return Work(steps=(step,), extra_bytes=kept, held_bytes=kept)
    workspace = count * (s.o // p.dtype_bytes * FP32 + s.lse)
    return Work(steps=(step, _merge(p, share, count, whole)), extra_bytes=kept + workspace, held_bytes=kept)


def backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """There is none. Raises SpecError."""
    raise SpecError("model 'flash-decode' has no backward; accepted: pass fwd")


def _visible(p: Problem, query: int) -> int:
    """How many keys a query sees."""
    return max(0, min(p.seqlen_k, query + 1 + p.seqlen_k - p.seqlen_q)) if p.causal else p.seqlen_k


def _ends(p: Problem, block_q: int) -> list[tuple[int, int, int]]:
    """(K/V heads, rows, keys that the last row sees) of each query tile, heads of a group packed; the heads
    of all sequences of one length together.
    """
    packed = p.group * p.seqlen_q
    stops = [min(first + block_q, packed) for first in range(0, packed, block_q)]
    return [
        (part.batch * p.num_kv_heads, (stop - 1) % block_q + 1, _visible(part, (stop - 1) // p.group))
        for part in p.parts()
        for stop in stops
    ]


def _parts(keys: int, share: int, count: int) -> int:
    """Splits that hold some of the first keys; a single one is always written, the last takes the rest."""
    return 1 if count == 1 else min(count, -(-keys // share))


def _moved(p: Problem, tile: Tiles, running: int, read: Mapping[str, int], lse: str) -> dict[str, int]:
    """What crosses of the numbers that a thread block reads or writes by itself: a sector for each.

    A page table is read key by key, but each sector of it comes from L2 once, and the L1 has it then. Rows of
    all heads of a group lie side by side where one tile holds them.
    """
    single = ("seqused_k", "k_descale", "v_descale")
    moved = {name: sectors.alone(read[name] // INT32) for name in single if name in read}
    if p.group * p.seqlen_q <= tile.block_q:
        moved[lse] = sectors.vectors(running, p.group * p.seqlen_q, tile.block_q)
    return moved


def _table_sectors(end: int, share: int, count: int, page_size: int) -> int:
    """Sectors of a page table that the splits of the first keys look into."""
    per_sector = sectors.SECTOR // INT32
    firsts = [split * share for split in range(_parts(end, share, count))]
    stops = [*firsts[1:], end][: len(firsts)]  # without keys there are no splits
    spans = [(first // page_size, (stop - 1) // page_size) for first, stop in zip(firsts, stops, strict=True)]
    return sum(last // per_sector - first // per_sector + 1 for first, last in spans if last >= first)


def _merge(p: Problem, share: int, count: int, write: Mapping[str, int]) -> Step:
    """The kernel that merges; LSEs of a row's parts lie a whole split apart, each in a sector of its own.

    Lengths of neighbouring rows are one sector, which the L1 may have.
    """
    read = _merged(p, share, count)
    moved = {name: sectors.alone(read[name] // FP32) for name in ("lse_part", "seqused_k")}
    moved["lse"] = sectors.alone(write["lse"] // FP32)
    return Step(
        name="merge", read=read, write=write, moved=moved, nearby=moved["seqused_k"] - sectors.alone(p.batch)
    )


def _merged(p: Problem, share: int, count: int) -> dict[str, int]:
    """What the merge reads: each row's parts; their LSEs and the length once per piece of columns."""
    parts = p.num_heads * sum(
        part.batch * _parts(_visible(part, i), share, count) for part in p.parts() for i in range(p.seqlen_q)
    )
    pieces = -(-p.head_dim_v // decode_configs.merge_columns(p.head_dim_v))
    rows = p.batch * p.num_heads * p.seqlen_q
    return {
        "o_part": parts * p.head_dim_v * FP32,
        "lse_part": pieces * parts * FP32,
        "seqused_k": pieces * rows * INT32,
    }


def _padded(dim: int, p: Problem, variant: Variant) -> int:
    """Columns of all pieces of a head dim; an fp8 cache is multiplied in fp16."""
    math = "half" if variant.cache_bytes == 1 else flash_configs.math_of(p.dtype)
    return sum(width for _, width in flash_configs.split(dim, flash_configs.widest(math)))


def shipped_tiles(problem: Problem, kernel: str, device: Device | None) -> Tiles:
    """The tile that the kernel ships with for the card; for ``split`` the keys of a split."""
    p = problem
    shape = decode_configs.Shape(flash_configs.math_of(p.dtype), p.head_dim, p.head_dim_v, p.dtype_bytes)
    capability = device.capability if device else None
    config = decode_configs.choose(shape, capability, device.smem_per_block_bytes if device else None)
    block_q = decode_configs.block_q(p.group * p.seqlen_q, shape.math)
    if kernel == "fwd":
        return Tiles(block_q, config.block_k)
    slots = decode_configs.slots(config, device.num_sms if device and device.capability else 0)
    row_tiles = p.batch * p.num_kv_heads * -(-p.group * p.seqlen_q // block_q)
    return Tiles(block_q, decode_configs.keys_per_split(p.seqlen_k, row_tiles, config.block_k, slots))


def footprint(problem: Problem, kernel: str, tiles: Tiles) -> int:
    """Elements of a query tile and of a K/V tile; a split is no tile of its own."""
    if kernel != "fwd":
        return 0
    return (tiles.block_q + tiles.block_k) * (problem.head_dim + problem.head_dim_v)


def refuses(problem: Problem) -> str | None:
    """Why the kernels do not run the problem, or None."""
    if max(problem.head_dim, problem.head_dim_v) > flash_configs.MAX_HEAD_DIM:
        return f"the bundled kernels take head dims up to {flash_configs.MAX_HEAD_DIM}"
    if problem.dtype_bytes == 1:
        return f"the bundled decode kernels do not take {problem.dtype}"
    if len({queries for queries, _ in problem.lengths}) > 1:
        return "the bundled decode kernels take as many queries of every sequence"
    if missing := problem.features - {"bshd", "deterministic", "varlen"}:
        return f"the bundled decode kernels do not take {', '.join(sorted(missing))}"
    return None
