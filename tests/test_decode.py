"""Flash-Decoding against fp64: lengths, heads, dims, dtypes, pages, fp8, append, splits; and the merge."""

from __future__ import annotations

import importlib.util
import math
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from decoding import DEVICE, bound, decode, exact, lengths, make, normal, paged

from flashbench import decode_configs
from flashbench.decode_configs import DecodeConfig
from flashbench.kernels import merge

AHEAD = DecodeConfig(16, 4, 1)
"""Tiles of 16 keys, so that a short cache has several."""
SMALL = replace(AHEAD, ahead=False)


def both(q, cache, **options):
    return decode.flash_decode(q, cache, return_lse=True, **{"config": SMALL, **options})


def assert_right(q, cache, whole=None, *, causal=True, **options) -> None:
    """o and lse of the cache are those of fp64 over ``whole``, the same cache contiguous."""
    o, lse = both(q, cache, causal=causal, **options)
    ref, ref_lse = exact(q, whole or cache, causal)
    products = torch.float16 if cache.k.dtype == decode.FP8 else q.dtype
    assert o.dtype == q.dtype
    assert float((o.double() - ref).abs().max()) <= bound(products, ref) + bound(q.dtype, ref)
    assert torch.equal(lse == -math.inf, ref_lse == -math.inf)
    assert torch.allclose(lse.double(), ref_lse, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("causal", [True, False])
def test_lengths_from_none_to_many_tiles(dtype: torch.dtype, causal: bool) -> None:
    q, cache = make(lengths(0, 1, 2, 45), dtype=dtype, seqlen_q=3)
    assert_right(q, cache, causal=causal, num_splits=2)


SHAPES = {
    "mha": {"heads": (3, 3)},
    "mqa": {"heads": (5, 1)},
    "gqa and wide values": {"heads": (6, 2), "dims": (24, 40)},
    "head dims in pieces": {"heads": (2, 1), "dims": (96, 80)},
    "odd head dims": {"heads": (2, 2), "dims": (1, 3)},
    "the widest": {"heads": (1, 1), "dims": (256, 256)},
    "several query tiles": {"heads": (4, 1), "seqlen_q": 33},
    "more queries than keys": {"heads": (2, 1), "seqlen_q": 60},
}


@pytest.mark.parametrize("name", SHAPES)
def test_shapes(name: str) -> None:
    for dtype in (torch.float16, torch.float32):
        q, cache = make(lengths(41, 17), dtype=dtype, **SHAPES[name])
        assert_right(q, cache, num_splits=3)


@pytest.mark.parametrize("page_size", [1, 3, 16, 32, 48])
@pytest.mark.parametrize("config", [SMALL, AHEAD], ids=["in step", "ahead"])
def test_pages_are_contiguous_keys_whatever_lies_between(page_size: int, config: DecodeConfig) -> None:
    q, cache = make(lengths(0, 1, 33, 70), seqlen_q=2)
    pages = paged(cache, page_size)
    for splits in (1, 3):
        plain, in_pages = (both(q, one, num_splits=splits, config=config) for one in (cache, pages))
        assert all(torch.equal(a, b) for a, b in zip(plain, in_pages, strict=True))
    assert_right(q, pages, cache, config=config)


def test_any_number_of_splits_gives_the_same_within_rounding() -> None:
    q, cache = make(lengths(130, 3, 0), dtype=torch.float32, seqlen_q=2)
    o, lse = both(q, cache, num_splits=1)
    for splits in (2, 7, 9, decode_configs.MAX_SPLITS):
        more, more_lse = both(q, cache, num_splits=splits)
        assert torch.allclose(more, o, rtol=0, atol=1e-6)
        assert torch.allclose(more_lse, lse, rtol=0, atol=1e-6)


def test_lengths_beyond_what_was_announced_are_still_seen() -> None:
    q, cache = make(lengths(90, 20))
    for splits in (1, 2):
        assert_right(q, replace(cache, max_seqlen_k=40), num_splits=splits)


@pytest.mark.parametrize("page_size", [0, 5])
def test_a_length_beyond_the_capacity_is_the_capacity(page_size: int) -> None:
    q, whole = make(lengths(20, 20))
    cache = paged(whole, page_size) if page_size else whole
    for splits in (1, 2):
        assert_right(q, replace(cache, seqused_k=lengths(23, 99)), whole, num_splits=splits)


@pytest.mark.parametrize("page_size", [0, 5])
def test_strides_of_every_kind(page_size: int) -> None:
    q, cache = make(lengths(30, 9), heads=(4, 2), seqlen_q=2)
    whole = cache
    q = q.transpose(1, 2).contiguous().transpose(1, 2)
    if page_size:
        cache = paged(cache, page_size)
    wide = torch.cat([cache.k, cache.v, cache.k], -1)
    cache = replace(cache, k=wide[..., :16], v=wide[..., 16:32])
    if not page_size:  # (batch, seqlen, heads, dim) in memory
        cache = replace(cache, k=cache.k.transpose(1, 2).contiguous().transpose(1, 2))
    for splits in (1, 2):
        assert_right(q, cache, whole, num_splits=splits)
        assert decode.flash_decode(q, cache, num_splits=splits).stride() == q.stride()  # laid out as q


def test_one_cache_row_expanded_over_batch_and_heads() -> None:
    k, v = (normal(1, 1, 40, 16, seed=seed).expand(3, 2, -1, -1) for seed in (1, 2))
    q = normal(3, 4, 1, 16)
    cache = decode.Cache(k=k, v=v)
    assert_right(q, cache, replace(cache, seqused_k=lengths(40, 40, 40)))


@pytest.mark.parametrize("page_size", [0, 4, 16])
@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_an_fp8_cache_is_what_its_numbers_say(page_size: int, per_head: bool, dtype: torch.dtype) -> None:
    q, cache = make(lengths(37, 2), heads=(4, 2), dtype=dtype)
    q = q.half().to(dtype)  # products are in fp16
    scales = [torch.tensor(x, device=DEVICE) for x in ([0.5, 3.0], [0.25, 1.7])]
    k_descale, v_descale = scales if per_head else [x[:1] for x in scales]
    cache = replace(
        cache, k=cache.k.to(decode.FP8), v=cache.v.to(decode.FP8), k_descale=k_descale, v_descale=v_descale
    )
    used = paged(cache, page_size) if page_size else cache
    assert_right(q, used, cache, num_splits=2)
    far = q * 2.0**-20 if dtype != torch.float16 else q  # below what fp16 holds
    assert_right(far, used, cache, num_splits=2)


@pytest.mark.parametrize("page_size", [0, 4, 16])
@pytest.mark.parametrize("fp8", [False, True])
def test_appended_keys_are_those_that_decoding_sees(page_size: int, fp8: bool) -> None:
    used, new = lengths(0, 7, 30), 5
    q, full = make(used + new, seqlen_q=new, dims=(24, 8), capacity=36)
    scales = {"k_descale": torch.tensor([0.5, 2.0], device=DEVICE),
              "v_descale": torch.tensor([0.25, 1.0], device=DEVICE)} if fp8 else {}  # fmt: skip
    before = replace(full, seqused_k=used, k=full.k.clone(), v=full.v.clone(), **scales)
    fresh = [
        torch.stack([x[b, :, n : n + new] for b, n in enumerate(used.tolist())]) for x in (full.k, full.v)
    ]
    if fp8:
        before = replace(before, k=before.k.to(decode.FP8), v=before.v.to(decode.FP8))
    for x in (before.k, before.v):
        for b, n in enumerate(used.tolist()):
            x[b, :, n:] = float("nan")
    cache = replace(before, seqused_k=used + new)
    if page_size:
        cache = paged(replace(before, seqused_k=used + new), page_size)
    decode.append(replace(cache, seqused_k=used), *fresh)
    decode.append(before, *fresh)
    assert_right(q, cache, replace(before, seqused_k=used + new))
    if not fp8:
        assert torch.equal(before.k.nan_to_num(9.0), full.k.nan_to_num(9.0))
        assert torch.equal(before.v.nan_to_num(9.0), full.v.nan_to_num(9.0))
    else:
        written = before.v[1, 1, 7 : 7 + new].float()  # scale 1: one rounding to e4m3
        assert torch.equal(written, fresh[1][1, 1].to(decode.FP8).float())


def test_what_is_appended_to_an_fp8_cache_is_rounded_as_torch_rounds() -> None:
    """Also to the next power of two, and a NaN to a NaN: a number in its place would hide it."""
    rows = normal(1, 2, 60, 64, dtype=torch.float32)
    rows[0, 0, 3, 5] = math.nan
    empty = torch.zeros(1, 2, 60, 64, device=DEVICE).to(decode.FP8)
    scale = torch.tensor([0.25, 2.0], device=DEVICE)
    cache = decode.Cache(
        k=empty, v=empty.clone(), seqused_k=lengths(0), k_descale=scale, v_descale=scale
    )  # fmt: skip
    decode.append(cache, rows, rows)
    wanted = (rows / scale[:, None, None]).to(decode.FP8).float()
    for x in (cache.k, cache.v):
        torch.testing.assert_close(x.float(), wanted, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("splits", [1, 3])
def test_a_nan_is_in_o_and_in_lse(splits: int) -> None:
    q, cache = make(lengths(70, 70))
    cache.k[0, 0, 40, 3] = math.nan
    o, lse = both(q, cache, num_splits=splits)
    for x in (o.isnan().all(-1), lse.isnan()):
        assert x.squeeze(-1).tolist() == [[True, True, False, False], [False] * 4]


def test_an_fp8_cache_saturates() -> None:
    cache = decode.Cache(
        k=torch.zeros(1, 1, 2, 16, device=DEVICE).to(decode.FP8),
        v=torch.zeros(1, 1, 2, 16, device=DEVICE).to(decode.FP8), seqused_k=lengths(0),
    )  # fmt: skip
    big = torch.full((1, 1, 2, 16), 1e4, device=DEVICE)
    decode.append(cache, big, -big)
    assert set(cache.k.float().flatten().tolist()) == {448.0}
    assert set(cache.v.float().flatten().tolist()) == {-448.0}


@pytest.mark.parametrize("page_size", [0, 4])
def test_what_does_not_fit_is_dropped_and_nothing_else_is_touched(page_size: int) -> None:
    q, cache = make(lengths(8, 3), capacity=8)
    cache = paged(replace(cache, seqused_k=lengths(8, 8)), page_size) if page_size else cache
    cache = replace(cache, seqused_k=lengths(7, 3))
    before = cache.k.clone(), cache.v.clone()
    decode.append(cache, *(torch.full((2, 2, 4, 16), 5.0, dtype=q.dtype, device=DEVICE) for _ in range(2)))
    for x, old in zip((cache.k, cache.v), before, strict=True):
        changed = (x != old) & ~(x.isnan() & old.isnan())
        assert int((x == 5.0).sum()) == int(changed.sum()) == 2 * 16 * (1 + 4)


@pytest.mark.usefixtures("poisoned")
def test_every_output_is_written_and_nothing_unwritten_is_read() -> None:
    q, cache = make(lengths(0, 5, 70), heads=(4, 1), seqlen_q=7, dims=(24, 40))
    for splits in (1, 3, 20):
        assert_right(q, cache, num_splits=splits)
        assert_right(q, paged(cache, 6), cache, num_splits=splits)


def test_canaries_around_the_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    made, edge, real = [], 64, torch.Tensor.new_empty

    def guarded(self, *shape, **options):
        whole = real(self, math.prod(shape) + 2 * edge, **options).fill_(7.0)
        made.append(whole)
        return whole[edge:-edge].view(shape)

    monkeypatch.setattr(torch.Tensor, "new_empty", guarded)
    q, cache = make(lengths(0, 3, 50), heads=(6, 2), seqlen_q=3, dims=(40, 24))
    both(q, cache, num_splits=3)
    assert len(made) >= 4
    for whole in made:
        assert set(whole[:edge].tolist()) == set(whole[-edge:].tolist()) == {7.0}


def test_a_softmax_scale_of_ones_own() -> None:
    q, cache = make(lengths(20))
    o = decode.flash_decode(q, cache, softmax_scale=0.5, config=SMALL)
    assert torch.allclose(o, decode.flash_decode(q * 2, cache, config=SMALL), atol=1e-3)


BAD = {
    "divisible": lambda q, c: (q[:, :3], c),
    "last stride of q": lambda q, c: (q.transpose(2, 3).contiguous().transpose(2, 3), c),
    "last stride of k": lambda q, c: (q, replace(c, k=c.k.transpose(2, 3).contiguous().transpose(2, 3))),
    "one dtype": lambda q, c: (q, replace(c, k=c.k.float())),
    "of its dtype or e4m3": lambda q, c: (q.float(), c),
    "seqused_k must be contiguous int32": lambda q, c: (q, replace(c, seqused_k=c.seqused_k.long())),
    "block_table must be": lambda q, c: (q, replace(c, block_table=c.seqused_k)),
    "descales must be": lambda q, c: (q, replace(c, k_descale=torch.ones(3, device=DEVICE))),
    "head dims": lambda q, c: (q, replace(c, v=c.v.repeat(1, 1, 1, 20))),
}


@pytest.mark.parametrize("text", BAD)
def test_what_does_not_fit_is_said(text: str) -> None:
    q, cache = BAD[text](*make(lengths(20, 4), seqlen_q=2))
    with pytest.raises(ValueError, match=text):
        decode.flash_decode(q, cache)


def test_options_out_of_range_are_said() -> None:
    q, cache = make(lengths(20))
    for options, text in (({"num_splits": 300}, "num_splits 300"), ({"softmax_scale": 0.0}, "softmax_scale")):
        with pytest.raises(ValueError, match=text):
            decode.flash_decode(q, cache, **options)
    with pytest.raises(ValueError, match="needs the length"):
        decode.append(replace(cache, seqused_k=None), cache.k, cache.v)
    with pytest.raises(ValueError, match="new k and v must be"):
        decode.append(cache, cache.k[..., :8], cache.v)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.integers(0, 2**31), st.booleans())
def test_merging_the_parts_of_any_split_is_attention_over_all(
    sizes: list[int], seed: int, large: bool
) -> None:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(2, 3, sum(sizes), generator=generator, dtype=torch.double) * (300 if large else 1)
    values = torch.randn(2, sum(sizes), 4, generator=generator, dtype=torch.double)
    parts = [
        (
            s.softmax(-1) @ v if s.shape[-1] else torch.full((2, 3, 4), math.nan, dtype=torch.double),
            s.logsumexp(-1) if s.shape[-1] else torch.full((2, 3), -math.inf, dtype=torch.double),
        )
        for s, v in zip(scores.split(sizes, -1), values.split(sizes, 1), strict=True)
    ]
    o, lse = merge(*zip(*parts, strict=True))
    if sum(sizes):
        assert torch.allclose(o, scores.softmax(-1) @ values, rtol=0, atol=1e-12)
        assert torch.allclose(lse, scores.logsumexp(-1), rtol=1e-14, atol=1e-12)
    else:
        assert torch.equal(o, torch.zeros_like(o))
        assert bool((lse == -math.inf).all())


def test_merging_what_the_kernel_gives_for_parts_of_a_cache() -> None:
    q, cache = make(lengths(60, 60), dtype=torch.float32)
    bounds = [0, 7, 7, 40, 60]
    parts = [
        both(q, decode.Cache(k=cache.k[:, :, a:b], v=cache.v[:, :, a:b]))
        for a, b in pairwise(bounds) if a < b
    ]  # fmt: skip
    o, lse = merge(*zip(*parts, strict=True))
    ref, ref_lse = exact(q, cache)
    assert float((o - ref).abs().max()) < 1e-6
    assert float((lse - ref_lse).abs().max()) < 1e-5


def test_a_merge_keeps_dtypes_and_refuses_other_shapes() -> None:
    o, lse = torch.ones(2, 3, 4, dtype=torch.bfloat16), torch.zeros(2, 3)
    merged, merged_lse = merge([o, o], [lse, lse])
    assert (merged.dtype, merged_lse.dtype) == (torch.bfloat16, torch.float32)
    for outputs, lses in (([], []), ([o], [lse, lse]), ([o, o[:1]], [lse, lse]), ([o], [lse[:1]])):
        with pytest.raises(ValueError, match="every part has o"):
            merge(outputs, lses)


def test_a_split_is_whole_tiles_and_all_splits_cover_the_keys() -> None:
    for keys in (0, 1, 64, 1000, 131072):
        for tiles, slots, splits in ((8, 264, 0), (128, 264, 0), (3, 16, 7), (1, 1, 256)):
            share = decode_configs.keys_per_split(keys, tiles, 64, slots, splits)
            assert share % 64 == 0 < share
            count = -(-max(1, keys) // share)
            assert count <= (splits or decode_configs.MAX_SPLITS)
            assert splits or count == 1 or share >= decode_configs.MIN_SPLIT_KEYS


def test_the_heuristic_fills_the_card_once() -> None:
    def count(keys: int, tiles: int) -> int:
        return -(-keys // decode_configs.keys_per_split(keys, tiles, 64, 264))

    assert 8 * count(131072, 8) in range(256, 265)
    assert count(131072, 128) == 2
    assert count(512, 8) == 2
    assert count(131072, 264) == 1
    assert count(100, 1) == 1
