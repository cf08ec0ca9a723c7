"""Packing, splits, pages, sparsity, packed batches, flash-v3 and flash-v4: closed form = walk.

The walks are loops over thread blocks and tiles that know none of the formulas.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilewalk import Walk, blocks, holds_a_pair, problems, sees, spans, walk_v2_atomic, walk_v2_backward

from flashbench import devices, iomodel
from flashbench._iomodel import splits
from flashbench.errors import SpecError, UnknownName
from flashbench.iomodel import BlockMask, Variant, estimate
from flashbench.problem import Problem, packed

counts = st.integers(1, 5)
pages = st.integers(0, 9)


def walk_forward(p: Problem, tile: tuple[int, int], variant: Variant, walk: Walk | None = None) -> Walk:
    """A forward thread block by thread block: packed rows are (query, head of the group)."""
    walk = walk or Walk(p)
    group = p.group if variant.pack_gqa else 1
    stack = [(i, h) for i in range(p.seqlen_q) for h in range(group)]
    count = variant.num_splits
    for _ in range(p.batch * p.num_heads // group):
        for rows in spans(len(stack), tile[0]):
            queries = {stack[r][0] for r in rows}
            needed = [
                columns
                for columns in spans(p.seqlen_k, tile[1])
                if any(holds_a_pair(p, range(i, i + 1), columns, variant.blocks) for i in queries)
            ]
            share = -(-len(needed) // count)
            for index in range(count):
                walk.load(rows, "q")
                for columns in needed[index * share : (index + 1) * share]:
                    walk.load(columns, "k", "v")
                    walk.multiply(*tile, 1, 1)
                    if variant.page_size:
                        walk.read["block_table"] += 4 * len({j // variant.page_size for j in columns})
                walk.store(rows, *(("o_part", "lse_part") if count > 1 else ("o", "lse")))
            if variant.blocks is not None:
                kept = variant.blocks.rows[rows.start // variant.blocks.block_q]
                walk.read["block_lists"] += 4 * (1 + sum(kept))
            if count > 1:
                for _ in range(count):
                    walk.load(rows, "o_part", "lse_part")
                walk.store(rows, "o", "lse")
    return walk


def name(tile: tuple[int, int], kernel: str = "fwd") -> dict[str, int]:
    return {f"{kernel}_block_q": tile[0], f"{kernel}_block_k": tile[1]}


@settings(max_examples=600, deadline=None)
@given(problems(), st.tuples(blocks, blocks), st.booleans(), counts, pages)
def test_forward_equals_the_walk(
    p: Problem, tile: tuple[int, int], pack: bool, num_splits: int, page_size: int
) -> None:
    variant = Variant(pack_gqa=pack, num_splits=num_splits, page_size=page_size)
    walk = walk_forward(p, tile, variant)
    for model in ("flash-v2", "flash-v2-atomic", "flash-v3", "flash-v4"):
        if iomodel.find(model).refuses(p) is None:
            assert walk.same_as(estimate(model, p, "fwd", tiles=name(tile), variant=variant))


def walk_reducing(p: Problem, tile: tuple[int, int], *, pair: bool) -> Walk:
    """flash-v3's backward; in pairs, each of two thread blocks loads half of everything twice."""
    walk, shared = Walk(p), p.group > 1
    everything_q, everything_k = range(p.seqlen_q), range(p.seqlen_k)
    if shared:
        for _ in range(p.batch * p.num_kv_heads):
            walk.store(everything_k, "dk_acc", "dv_acc")
            walk.load(everything_k, "dk_acc", "dv_acc")
            walk.store(everything_k, "dk", "dv")
    for _ in walk.heads:
        walk.load(everything_q, "o", "do", "lse", "dq_acc")
        walk.store(everything_q, "delta", "lse_log2", "dq_acc", "dq")
        for columns in spans(p.seqlen_k, tile[1]):
            walk.load(columns, "k", "v", *(["k"] if pair else []))
            for rows in spans(p.seqlen_q, tile[0]):
                if holds_a_pair(p, rows, columns):
                    for _ in range(2 if pair else 1):
                        walk.load(rows, "q", "do", "lse_log2", "delta")
                    walk.multiply(*tile, 3, 2)
                    walk.atomic["dq_acc"] += len(rows) * walk.width("dq_acc")
            if shared:
                for tensor in ("dk_acc", "dv_acc"):
                    walk.atomic[tensor] += len(columns) * walk.width(tensor)
            else:
                walk.store(columns, "dk", "dv")
    return walk


@settings(max_examples=400, deadline=None)
@given(problems(dtypes="fp16 bf16 fp8"), st.tuples(blocks, blocks))
def test_backward_of_flash_v3_and_v4_equals_the_walk(p: Problem, tile: tuple[int, int]) -> None:
    tiles = name(tile, "bwd")
    assert walk_reducing(p, tile, pair=False).same_as(estimate("flash-v3", p, "bwd", tiles=tiles))
    windowed = p.window[0] >= 0 or (p.window[1] > 0 and not p.causal)
    assert walk_reducing(p, tile, pair=not windowed).same_as(estimate("flash-v4", p, "bwd", tiles=tiles))


@st.composite
def sparse(draw: st.DrawFn) -> tuple[Problem, tuple[int, int], BlockMask]:
    p, tile = draw(problems()), (draw(st.integers(1, 4)), draw(st.integers(1, 4)))
    block = (tile[0] * draw(st.integers(1, 3)), tile[1] * draw(st.integers(1, 3)))
    shape = (-(-p.seqlen_q // block[0]), -(-p.seqlen_k // block[1]))
    rows = draw(st.lists(st.lists(st.booleans(), min_size=shape[1], max_size=shape[1]),
                         min_size=shape[0], max_size=shape[0]))  # fmt: skip
    return p, tile, BlockMask.of(*block, rows)


@settings(max_examples=500, deadline=None)
@given(sparse(), counts)
def test_a_mask_of_blocks_equals_the_walk(
    case: tuple[Problem, tuple[int, int], BlockMask], count: int
) -> None:
    p, tile, mask = case
    variant = Variant(blocks=mask, num_splits=count)
    row = estimate("flash-v2", p, "fwd", tiles=name(tile), variant=variant)
    assert walk_forward(p, tile, variant).same_as(row)
    heads = p.batch * p.num_heads
    pairs = [(i, j) for i in range(p.seqlen_q) for j in range(p.seqlen_k) if sees(p, i, j, mask)]
    assert row.flops == 2 * heads * len(pairs) * (p.head_dim + p.head_dim_v)
    assert row.compulsory.read["q"] == heads * len({i for i, _ in pairs}) * p.head_dim * p.dtype_bytes
    keys = len({j for _, j in pairs})
    assert row.compulsory.read["v"] == p.batch * p.num_kv_heads * keys * p.head_dim_v * p.dtype_bytes
    assert row.compulsory.read_bytes <= row.requested.read_bytes


@settings(max_examples=300, deadline=None)
@given(sparse())
def test_the_backward_with_a_mask_of_blocks_equals_the_walk(
    case: tuple[Problem, tuple[int, int], BlockMask],
) -> None:
    p, tile, mask = case
    variant = Variant(blocks=mask)
    tiles = {"block_q": tile[0], "block_k": tile[1]}
    columns = [1 + sum(row[t.start // mask.block_k] for row in mask.rows) for t in spans(p.seqlen_k, tile[1])]
    rows = [1 + sum(mask.rows[t.start // mask.block_q]) for t in spans(p.seqlen_q, tile[0])]
    heads, kv_heads = p.batch * p.num_heads, p.batch * p.num_kv_heads
    walk = walk_v2_backward(p, tile, tile, mask)
    walk.read["block_lists"] += 4 * (kv_heads * sum(columns) + heads * sum(rows))
    assert walk.same_as(estimate("flash-v2", p, "bwd", tiles=tiles, variant=variant))
    walk = walk_v2_atomic(p, *tile, mask)
    walk.read["block_lists"] += 4 * heads * sum(columns)
    assert walk.same_as(estimate("flash-v2-atomic", p, "bwd", tiles=tiles, variant=variant))


@settings(max_examples=300, deadline=None)
@given(
    problems(dtypes="fp16 fp32"),
    st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=4),
    st.tuples(blocks, blocks),
    st.booleans(),
)
def test_a_packed_batch_is_the_sum_of_its_sequences(
    p: Problem, lengths: list[tuple[int, int]], tile: tuple[int, int], pack: bool
) -> None:
    p = packed(p, lengths)
    variant = Variant(pack_gqa=pack)
    row = estimate("flash-v2", p, "fwd", tiles=name(tile), variant=variant)
    walk = Walk(p)
    for q, k in lengths:
        one = replace(p, batch=1, seqlen_q=q, seqlen_k=k, lengths=())
        walk_forward(one, tile, variant, walk)
    stacked = p.seqlen_q * (p.group if pack else 1)
    grid = len(lengths) * p.num_heads // (p.group if pack else 1) * len(spans(stacked, tile[0]))
    walk.read["cu_seqlens"] += grid * 4 * 4
    assert walk.same_as(row)
    assert row.steps[0].ctas == grid
    alone = [replace(p, batch=1, seqlen_q=q, seqlen_k=k, lengths=()) for q, k in lengths]
    assert row.flops == sum(iomodel.flops(one, "fwd") for one in alone)
    assert row.compulsory.total_bytes == sum(iomodel.compulsory(one, "fwd").total_bytes for one in alone)
    assert row.saved_bytes == sum(estimate("flash-v2", one, "fwd").saved_bytes for one in alone)
    padded = estimate("standard", p, "fwd")
    dense = estimate("standard", replace(p, lengths=(), causal=False, window=(-1, -1)), "fwd")
    assert padded.done_flops == dense.done_flops
    assert padded.compulsory == row.compulsory


@settings(max_examples=200, deadline=None)
@given(problems())
def test_rows_and_keys_that_nobody_sees(p: Problem) -> None:
    pairs = [(i, j) for i in range(p.seqlen_q) for j in range(p.seqlen_k) if sees(p, i, j)]
    assert p.visible_pairs == p.batch * p.num_heads * len(pairs)
    assert p.rows_without_keys == p.seqlen_q - len({i for i, _ in pairs})
    assert p.keys_without_queries == p.seqlen_k - len({j for _, j in pairs})


@pytest.mark.parametrize(
    ("window", "sums"),
    [((4, -1), [1, 2, 3, 4, 5, 5, 5, 5, 5, 5]), ((3, -1), [1, 2, 3, 4, 4, 4, 4, 4, 4, 4]),
     ((10, -1), list(range(1, 11))), ((9, -1), list(range(1, 11)))],
)  # fmt: skip
def test_a_window_counts_the_keys_beside_the_querys_own(window: tuple[int, int], sums: list[int]) -> None:
    """left = 4 shows up to 5 keys, 4 tokens are left = 3; a window of N - 1 or more is plain causal."""
    p = Problem(batch=1, num_heads=1, num_kv_heads=1, seqlen_q=10, seqlen_k=10, head_dim=8, head_dim_v=8,
                dtype="bf16", causal=True, window=window)  # fmt: skip
    assert [sum(sees(p, i, j) for j in range(10)) for i in range(10)] == sums
    assert p.visible_pairs == sum(sums)
    assert iomodel.flops(p, "fwd") == 2 * sum(sums) * 16
    if window[0] >= 9:
        plain = replace(p, window=(-1, -1))
        assert estimate("flash-v2", p, "fwd").requested == estimate("flash-v2", plain, "fwd").requested


LLAMA_DECODE = Problem(batch=16, num_heads=32, num_kv_heads=8, seqlen_q=1, seqlen_k=8192, head_dim=128,
                       head_dim_v=128, dtype="bf16", causal=True)  # fmt: skip


def test_decode_of_a_llama_3_8b_layer() -> None:
    """B=16, N=8192, packed, 8 splits: K and V once, the partial results beside them."""
    variant = Variant(pack_gqa=True, num_splits=8)
    moved = estimate("flash-v2", LLAMA_DECODE, "fwd", variant=variant, tiles=name((64, 128))).requested
    assert moved.read["k"] + moved.read["v"] == 536_870_912
    assert (moved.read_bytes, moved.write_bytes) == (540_033_024, 2_246_656)
    unpacked = estimate("flash-v2", LLAMA_DECODE, "fwd", tiles=name((64, 128))).requested
    assert unpacked.read["k"] == 4 * moved.read["k"]


def test_a_decode_step_moves_k_and_v_per_kv_head() -> None:
    p = replace(LLAMA_DECODE, batch=1, num_heads=64, seqlen_k=2048)
    least = iomodel.compulsory(p, "fwd")
    assert least.read["k"] + least.read["v"] == 8_388_608
    assert least.read["q"] + least.write["o"] == 32_768
    assert round(8_421_376 / 15.552e-6 / 1e9, 1) == 541.5
    more_heads = iomodel.compulsory(replace(p, num_heads=128), "fwd")
    assert more_heads.read["k"] == least.read["k"]
    assert more_heads.read["q"] == 2 * least.read["q"]


def test_a_block_table_is_read_by_every_thread_block_that_walks_the_sequence() -> None:
    p = replace(LLAMA_DECODE, batch=3)
    row = estimate("flash-v2", p, "fwd", tiles=name((64, 128)), variant=Variant(pack_gqa=True, page_size=16))
    assert row.requested.read["block_table"] == 3 * 8 * 4 * (8192 // 16)
    assert row.compulsory.read["block_table"] == 3 * 4 * (8192 // 16)
    assert row.requested.read["block_table"] / (row.requested.read["k"] + row.requested.read["v"]) < 0.0005


def test_flash_v3_chooses_packing_and_splits_as_published() -> None:
    h100 = devices.find("h100-sxm")
    decode = estimate("flash-v3", LLAMA_DECODE, "fwd", device=h100, variant=Variant(num_splits=0)).variant
    assert decode == Variant(pack_gqa=True, num_splits=1)  # 128 thread blocks fill 132 SMs
    one = estimate(
        "flash-v3", replace(LLAMA_DECODE, batch=1), "fwd", device=h100, variant=Variant(num_splits=0)
    )
    assert one.variant.num_splits == 15  # 120 of 132 SMs; 16 would give 128, within 85 % of the best
    long = replace(LLAMA_DECODE, seqlen_q=8192, batch=1)
    assert estimate("flash-v3", long, "fwd").variant.pack_gqa is False
    assert estimate("flash-v3", replace(long, seqlen_q=16), "fwd").variant.pack_gqa is True
    assert estimate("flash-v4", long, "fwd").variant.pack_gqa is True
    assert estimate("flash-v2", LLAMA_DECODE, "fwd").variant.pack_gqa is None
    with pytest.raises(SpecError, match="auto"):
        estimate("flash-v3", LLAMA_DECODE, "fwd", variant=Variant(num_splits=0))


def test_the_split_heuristics() -> None:
    few = splits.Load(tiles=8, tiles_per_head=1, key_tiles=64, kv_bytes=4 * 2**20, masked=False)
    efficiency = {count: 8 * count / 132 / -(-8 * count // 132) for count in range(1, 65)}
    expected = min(c for c, x in efficiency.items() if x >= 0.85 * max(efficiency.values()))
    assert splits.flash_attention_3(few, 132) == expected
    assert splits.flash_attention_3(few._replace(key_tiles=4), 132) == 1
    assert splits.flash_attention_3(few._replace(tiles=106), 132) == 1
    huge = splits.Load(tiles=512, tiles_per_head=512, key_tiles=4096, kv_bytes=128 * 2**20, masked=False)
    assert splits.flash_attention_3(huge, 132) == 3  # larger than L2, every SM has two query tiles
    assert splits.flash_attention_3(huge._replace(masked=True), 132) == 1
    assert splits.flash_attention_4(few, 148) == 18
    assert splits.flash_attention_2(few._replace(tiles=300), 132) == 1


def test_published_tiles_of_flash_v3_and_v4() -> None:
    def tile(model: str, pass_: str = "fwd", **changes: object) -> tuple[int, ...]:
        values = {"num_heads": 8, "seqlen_q": 8192, "causal": False, **changes}
        values.setdefault("head_dim_v", values.get("head_dim", 128))
        return tuple(estimate(model, replace(LLAMA_DECODE, **values), pass_).tiles.values())  # type: ignore[arg-type]

    assert tile("flash-v3") == (128, 176)
    assert tile("flash-v3", causal=True) == tile("flash-v3", window=(512, 512)) == (128, 128)
    assert tile("flash-v3", head_dim=64) == (192, 192)
    assert tile("flash-v3", head_dim=64, causal=True) == (192, 128)
    assert tile("flash-v3", head_dim=192, head_dim_v=128) == (128, 128)
    assert tile("flash-v3", head_dim=256) == (128, 80)
    assert tile("flash-v3", dtype="fp8") == (128, 224)
    assert tile("flash-v3", "bwd") == (80, 128)
    assert tile("flash-v3", "bwd", causal=True) == (64, 128)
    assert tile("flash-v4") == (256, 128)
    assert tile("flash-v4", seqlen_q=1) == (128, 128)
    assert tile("flash-v4", "bwd") == (128, 256)


def test_256_rows_per_thread_block_halve_what_128_request() -> None:
    p = replace(
        LLAMA_DECODE, batch=4, num_heads=16, num_kv_heads=16, seqlen_q=4096, seqlen_k=4096, causal=False
    )
    v4, v2 = (estimate(m, p, "fwd", tiles=name(t)).requested for m, t in
              (("flash-v4", (256, 128)), ("flash-v2", (128, 128))))  # fmt: skip
    assert v2.read["k"] == 2 * v4.read["k"]
    alone = estimate("flash-v3", p, "bwd", tiles=name((128, 128), "bwd")).requested
    pair = estimate("flash-v4", p, "bwd").requested
    assert alone.atomic["dq_acc"] == 2 * pair.atomic["dq_acc"]
    assert alone.read["q"] == pair.read["q"]


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([0.01, 0.25, 0.5, 1.0]))
def test_a_density_is_a_share_of_the_visible_tiles(p: Problem, density: float) -> None:
    tiles = {"block_q": 2, "block_k": 3}
    thin, full = (
        estimate("flash-v2", p, "fwd", tiles=tiles, variant=Variant(density=s)) for s in (density, 1.0)
    )
    heads = p.batch * p.num_heads * p.head_dim * p.dtype_bytes
    assert thin.requested.read["k"] // heads == -(
        -full.requested.read["k"] // heads * round(100 * density) // 100
    )
    assert thin.requested.read["q"] == full.requested.read["q"]
    assert thin.flops <= full.flops


def test_what_a_model_does_not_have_is_refused() -> None:
    with pytest.raises(SpecError, match="'standard' has no num_splits"):
        estimate("standard", LLAMA_DECODE, "fwd", variant=Variant(num_splits=2))
    with pytest.raises(SpecError, match="'flash-v1' has no page_size"):
        estimate("flash-v1", LLAMA_DECODE, "fwd", variant=Variant(page_size=16))
    with pytest.raises(SpecError, match="no dropout"):
        estimate("flash-v3", replace(LLAMA_DECODE, dropout_p=0.1), "fwd")
    with pytest.raises(SpecError, match="16-bit"):
        estimate("flash-v4", replace(LLAMA_DECODE, dtype="fp32"), "fwd")
    for bad in ({"num_splits": 257}, {"page_size": -1}, {"density": 0.0}, {"density": 1.5}):
        with pytest.raises(SpecError, match=next(iter(bad))):
            Variant(**bad)  # type: ignore[arg-type]
    mask = BlockMask.of(128, 128, [[1]])
    with pytest.raises(SpecError, match="1x64"):
        estimate("flash-v2", LLAMA_DECODE, "fwd", variant=Variant(blocks=mask), tiles=name((64, 64)))
    with pytest.raises(SpecError, match="do not divide"):
        estimate("flash-v2", replace(LLAMA_DECODE, seqlen_k=1), "fwd", variant=Variant(blocks=mask),
                 tiles=name((64, 48)))  # fmt: skip


def test_problems_out_of_range_are_refused() -> None:
    for changes, said in (
        ({"window": (-2, 0)}, "window"),
        ({"dropout_p": 1.0}, "dropout_p"),
        ({"lengths": ((1, 2),)}, "does not agree"),
        ({"lengths": ((-1, 2),) * 16}, "0 queries"),
    ):
        with pytest.raises(SpecError, match=said):
            replace(LLAMA_DECODE, **changes)
    with pytest.raises(UnknownName, match="top-left"):
        replace(LLAMA_DECODE, alignment="topleft")
    with pytest.raises(SpecError, match="empty"):
        packed(LLAMA_DECODE, [])


@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
@pytest.mark.parametrize(
    "model", ["flash-v1", "flash-v1-cuda", "flash-v2", "flash-v2-atomic", "flash-v3", "flash-v4"]
)
def test_an_empty_sequence_adds_its_lengths_alone(model: str, pass_: str) -> None:
    def moved(*lengths: tuple[int, int]) -> dict[str, dict[str, int]]:
        p = packed(replace(LLAMA_DECODE, causal=False), lengths)
        row = estimate(model, p, pass_).requested
        kinds = {"read": row.read, "write": row.write, "atomic": row.atomic}
        return {kind: {k: v for k, v in of.items() if k != "cu_seqlens"} for kind, of in kinds.items()}

    assert moved((70, 50), (0, 0), (9, 90)) == moved((70, 50), (9, 90))


def test_queries_without_keys_have_an_o_and_keys_without_queries_gradients() -> None:
    p = packed(replace(LLAMA_DECODE, causal=False), [(5, 7), (3, 0), (0, 4)])
    row, heads = 2 * p.head_dim, (p.num_heads, p.num_kv_heads)
    assert estimate("flash-v2", p, "fwd").requested.write["o"] == heads[0] * 8 * row
    written = estimate("flash-v2", p, "bwd").requested.write
    assert (written["dq"], written["dk"]) == (heads[0] * 8 * row, heads[1] * 11 * row)
    padded = replace(p, lengths=(), seqlen_q=5, seqlen_k=7)
    read = estimate("standard", padded, "fwd").requested.read
    assert {k: v for k, v in estimate("standard", p, "fwd").requested.read.items() if k in "qkv"} == {
        k: v for k, v in read.items() if k in "qkv"
    }


@pytest.mark.parametrize("shape", [{"seqlen_q": 0}, {"seqlen_k": 0}])
def test_without_queries_or_without_keys_published_algorithms_are_not_counted(shape: dict[str, int]) -> None:
    with pytest.raises(SpecError, match="queries without keys is not known"):
        estimate("flash-v1-cuda", packed(replace(LLAMA_DECODE, causal=False), [(3, 0), (4, 4)]), "fwd")
    with pytest.raises(SpecError, match="it has no queries or no keys"):
        estimate("flash-v2", replace(LLAMA_DECODE, **shape), "fwd")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"softcap": 30.0}, "softcap"),
        ({"sinks": True, "bias": "1hqk"}, "bias, sinks"),
        ({"alibi": True}, "alibi"),
    ],
)
def test_what_a_model_does_not_count_is_refused_by_name(change: dict, named: str) -> None:
    with pytest.raises(SpecError, match=f"it does not count {named}$"):
        estimate("standard", replace(LLAMA_DECODE, **change), "fwd")


def test_the_key_tells_problems_apart_and_defaults_keep_theirs() -> None:
    assert LLAMA_DECODE.key == "b16 h32/8 n1x8192 d128 bf16 causal"
    others = [replace(LLAMA_DECODE, window=(128, 0)), replace(LLAMA_DECODE, alignment="top-left"),
              replace(LLAMA_DECODE, dropout_p=0.1), packed(LLAMA_DECODE, [(1, 5), (1, 7)])]  # fmt: skip
    assert len({p.key for p in (LLAMA_DECODE, *others)}) == 5
    assert replace(LLAMA_DECODE, window=[128, 0]) == others[0]  # type: ignore[arg-type]
