"""Packed sequences and K/V caches over grids as the flash-attn package's tests have them, by its error rule.

On a GPU at the package's sizes, each three values of different columns together in some row; on small sizes
through the interpreter each two. A test compiles few configurations: lengths and splits are of run time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise, product
from random import Random
from typing import Any

import pytest
import torch
from drop_in import DEVICE, assert_as_good, covered, normal, of_plain, plain, runs
from torch import Tensor

import flashbench
from flashbench import flash_attn

HEADS = {"mha": (6, 6), "gqa": (6, 2), "mqa": (6, 1)}
DIMS = (59, 64, 128, 256)
DTYPES = torch.float16, torch.bfloat16
MASKS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "local": {"window_size": (37, 19)},
}  # fmt: skip
SCORES: dict[str, dict[str, Any]] = {
    "none": {}, "slopes": {"alibi_slopes": 1}, "own slopes": {"alibi_slopes": 2},
    "softcap": {"softcap": 15.0},
}  # fmt: skip
"""Slopes: of all sequences, or of each."""
OPTIONS = {**SCORES, "dropout": {"dropout_p": 0.17}, "deterministic": {"deterministic": True}}
SMALL_DIMS = dict(zip(DIMS, (11, 16, 20, 24), strict=True))
SMALL_MASKS: dict[str, dict[str, Any]] = {**MASKS, "local": {"window_size": (5, 3)}}


def options_of(
    mask: str, option: str, masks: dict[str, dict[str, Any]], heads: int, sequences: int
) -> dict[str, Any]:
    found = {**masks[mask], **OPTIONS[option]}
    if "alibi_slopes" in found:
        shape = (sequences, heads)[2 - found["alibi_slopes"] :]
        found["alibi_slopes"] = normal(*shape, seed=9).abs() * 0.3
    return found


def of_one(options: dict[str, Any], sequence: int) -> dict[str, Any]:
    """What holds for one of the sequences alone."""
    slopes = options.get("alibi_slopes")
    own = slopes is not None and slopes.ndim == 2
    return {**options, "alibi_slopes": slopes[sequence]} if own else options


def named(row: tuple[Any, ...]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in row)


# Packed sequences

COLUMNS = list(HEADS), list(MASKS), list(OPTIONS), DIMS, DTYPES, ("rows", "pages")
PACKED, PACKED_SMALL = covered(3, *COLUMNS), covered(2, *COLUMNS)
"""(heads, mask, option, head_dim, dtype, how K and V lie)."""

LONGEST = [(1, 147), (113, 203), (256, 512), (512, 256), (1023, 1024)]
"""(seqlen_q, seqlen_k) at most, as the package has them."""


def random_lengths(rows: int, keys: int, sequences: int, seed: int) -> list[tuple[int, int]]:
    """The longest, one without queries, one without keys, an empty one, and others between."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [
        tuple(int(torch.randint(1, most + 1, (), generator=generator)) for most in (rows, keys))
        for _ in range(sequences)
    ]
    made = [(rows, keys), (0, drawn[0][1]), (drawn[1][0], 0), (0, 0), *drawn[2:]]
    order = torch.randperm(len(made), generator=generator).tolist()
    return [made[index] for index in order]


def packed_case(row: tuple[Any, ...], lengths: Sequence[tuple[int, int]], *, small: bool = False) -> None:
    """One call and its gradients, beside those of each sequence alone by torch, exact and in the dtype."""
    kind, mask, option, dim, dtype, lie = row
    heads, masks = HEADS[kind], SMALL_MASKS if small else MASKS
    options = options_of(mask, option, masks, heads[0], len(lengths))
    dim = SMALL_DIMS[dim] if small else dim
    ends = [[0, *accumulate(side)] for side in zip(*lengths, strict=True)]
    totals = ends[0][-1], ends[1][-1], ends[1][-1]
    inputs = [
        normal(total, count, dim, seed=seed, dtype=dtype).requires_grad_()
        for seed, (total, count) in enumerate(zip(totals, (heads[0], *heads[1:], heads[1]), strict=True))
    ]
    starts = [torch.tensor(side, dtype=torch.int32, device=DEVICE) for side in ends]
    longest = [max(side) for side in zip(*lengths, strict=True)]
    given, table = inputs, None
    if lie == "pages":
        kept, table = in_pages(inputs[1:], ends[1], 4 if small else 16)
        given = [inputs[0], *kept]
    torch.manual_seed(7)
    o, lse, told = flash_attn.flash_attn_varlen_func(
        *given, *starts, *longest, block_table=table, return_attn_probs=True, **options
    )
    do = normal(totals[0], heads[0], dim, seed=3, dtype=dtype)
    found = o, *torch.autograd.grad(o, inputs, do)
    kept = dropped(len(lengths), heads[0], longest, options)
    sides = [packed_plain(inputs, ends, do, {**of_plain(options), "dtype": to}, kept)
             for to in (torch.float64, dtype)]  # fmt: skip
    assert_as_good(found, sides[0][:4], sides[1][:4], str((row, lengths)))
    assert torch.allclose(lse.double(), sides[0][4], atol=1e-3)
    assert (told is None) == (kept is None)
    if told is not None:
        for number, p in enumerate(sides[0][5]):
            mine, shown = told[number, :, : p.shape[1], : p.shape[2]], p > 1e-6
            assert torch.allclose(mine.abs().double(), p, atol=1e-3)
            assert torch.equal(mine[shown] > 0, kept[number, :, : p.shape[1], : p.shape[2]][shown])
            assert not told[number, :, p.shape[1] :].any()
            assert not told[number, :, :, p.shape[2] :].any()


def in_pages(packed: list[Tensor], ends: list[int], size: int) -> tuple[list[Tensor], Tensor]:
    """Rows of sequences in pages out of order, NaN where none are, and the table, -1 for no page."""
    counts = [-(-(end - start) // size) for start, end in pairwise(ends)]
    numbers = Random(3).sample(range(sum(counts) + 2), sum(counts))
    table = torch.full((len(counts), max(counts) + 1), -1, dtype=torch.int32)
    at = list[int]()
    for sequence, (count, (start, end)) in enumerate(zip(counts, pairwise(ends), strict=True)):
        mine, numbers = numbers[:count], numbers[count:]
        table[sequence, :count] = torch.tensor(mine, dtype=torch.int32)
        at += [mine[key // size] * size + key % size for key in range(end - start)]
    found = []
    for x in packed:
        pages = torch.full(((sum(counts) + 2) * size, *x.shape[1:]), math.nan, dtype=x.dtype, device=DEVICE)
        pages = pages.index_put((torch.tensor(at, dtype=torch.int64, device=DEVICE),), x)
        found.append(pages.unflatten(0, (-1, size)))
    return found, table.to(DEVICE)


def dropped(sequences: int, heads: int, longest: list[int], options: dict[str, Any]) -> Tensor | None:
    """What dropout kept, from the seed that the call drew; of the share that was asked for."""
    if not (share := options.get("dropout_p")):
        return None
    torch.manual_seed(7)
    seed = int(torch.empty((), dtype=torch.int64).random_(2**63 - 1))
    kept = flashbench.dropout_mask(sequences, heads, *longest, share, seed=seed, device=DEVICE)
    off = 4 * math.sqrt(share * (1 - share) / kept.numel())
    assert abs(float((~kept).double().mean()) - share) < off
    return kept


def packed_plain(
    inputs: list[Tensor], ends: list[list[int]], do: Tensor, options: dict[str, Any], kept: Tensor | None
) -> tuple[Any, ...]:
    """(o, dq, dk, dv, lse, each one's probabilities) of each sequence by itself, one after the other."""
    outputs, sums, shares = [], [], []
    spans = zip(*([slice(*pair) for pair in pairwise(side)] for side in ends), strict=True)
    for number, (rows, keys) in enumerate(spans):
        one = inputs[0][None, rows], inputs[1][None, keys], inputs[2][None, keys]
        drops = {}
        if kept is not None:
            sizes = rows.stop - rows.start, keys.stop - keys.start
            drops = {"kept": kept[number, None, :, : sizes[0], : sizes[1]]}
        o, lse, p = plain(*one, **of_one(options, number), **drops)
        outputs.append(o[0])
        sums.append(lse[0].detach())
        shares.append(p[0].detach())
    o = torch.cat(outputs)
    return o, *torch.autograd.grad(o, inputs, do.to(o.dtype)), torch.cat(sums, 1), shares


@pytest.mark.gpu
@pytest.mark.parametrize("row", PACKED, ids=named)
def test_packed_sequences_as_the_package_has_them(row: tuple[Any, ...]) -> None:
    for number, (rows, keys) in enumerate(LONGEST):
        packed_case(row, random_lengths(rows, keys, 6, seed=number))


@runs
@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has the real sizes")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if number in (1, 13, 17, 19, 23) else pytest.mark.slow, id=named(row))
     for number, row in enumerate(PACKED_SMALL)],
)  # fmt: skip
def test_packed_sequences_in_small(row: tuple[Any, ...]) -> None:
    packed_case(row, random_lengths(9, 13, 5, seed=1), small=True)


# K/V caches


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a cache. lengths: of sequences before the new keys; cases: (queries, new keys, splits) of the calls;
    pages: of the two paged kinds."""

    capacity: int
    lengths: tuple[int, ...]
    cases: tuple[tuple[int, int, int], ...]
    pages: dict[str, int]
    dims: dict[int, int] = field(default_factory=lambda: {dim: dim for dim in DIMS})
    masks: dict[str, dict[str, Any]] = field(default_factory=lambda: MASKS)


REAL = Sizes(
    capacity=1024, lengths=(0, 1, 16, 511, 777, 980), cases=tuple(product((1, 37, 1024), (0, 37), (0, 1, 5))),
    pages={"pages of 16": 16, "pages of 256": 256},
)  # fmt: skip
OTHERS = replace(REAL, lengths=(64, 255, 256, 257), cases=((37, 37, 0),))
SMALL = Sizes(
    capacity=96, lengths=(0, 5, 70), cases=((1, 0, 5), (3, 3, 0), (3, 3, 5), (96, 3, 1)),
    pages={"pages of 16": 16, "pages of 256": 32}, dims=SMALL_DIMS, masks=SMALL_MASKS,
)  # fmt: skip

KINDS = "contiguous", "entries", *REAL.pages
ROTARY: dict[str, tuple[float, bool]] = {
    "unturned": (0.0, True), "half": (0.5, True), "whole": (1.0, True), "half by halves": (0.5, False),
    "whole by halves": (1.0, False),
}  # fmt: skip
"""The share of the columns that is turned, and whether its pairs are neighbours."""
COLUMNS_OF_CACHES = KINDS, list(HEADS), list(MASKS), list(SCORES), DIMS, DTYPES, list(ROTARY), ("", "padded")
CACHED, CACHED_SMALL = covered(3, *COLUMNS_OF_CACHES), covered(2, *COLUMNS_OF_CACHES)
"""(kind, heads, mask, option, head_dim, dtype, rotary, whether what is left of the keys is padding)."""


def splits_taken(row: tuple[Any, ...]) -> bool:
    """Whether flash-decode runs it, which has splits."""
    return row[2] != "local" and row[3] == "none"


@dataclass(frozen=True, eq=False)
class Kept:
    """A cache of a kind as the call is given it, and how its rows are found again."""

    k: Tensor
    v: Tensor
    more: dict[str, Tensor]

    def row(self, x: Tensor, sequence: int, key: int) -> tuple[int, int]:
        """Where a key of a sequence is in k or v."""
        if "block_table" in self.more:
            size = x.shape[1]
            return int(self.more["block_table"][sequence, key // size]), key % size
        at = self.more.get("cache_batch_idx")
        return (sequence if at is None else int(at[sequence])), key


def laid(
    kind: str, sizes: Sizes, whole: tuple[Tensor, Tensor], used: Sequence[tuple[int, int]], room: int
) -> Kept:
    """The rows from one to another of each sequence in a cache of a kind; everything else is NaN.

    room: rows of each that the call may write to behind them; table entries past those name no page.
    """
    batch, capacity = whole[0].shape[:2]
    shown = [torch.full_like(x, math.nan) for x in whole]
    for one, x in zip(shown, whole, strict=True):
        for sequence, (first, end) in enumerate(used):
            one[sequence, first:end] = x[sequence, first:end]
    generator = torch.Generator().manual_seed(5)
    if kind == "contiguous":
        return Kept(shown[0], shown[1], {})
    if kind == "entries":
        at = torch.randperm(batch + 2, generator=generator)[:batch].to(DEVICE)
        held = [torch.full((batch + 2, *x.shape[1:]), math.nan, dtype=x.dtype, device=DEVICE) for x in shown]
        for one, x in zip(held, shown, strict=True):
            one[at] = x
        return Kept(held[0], held[1], {"cache_batch_idx": at.int()})
    size = sizes.pages[kind]
    per, spare = capacity // size, 3
    table = (
        torch.randperm(batch * per + spare, generator=generator)[: batch * per].view(batch, per).to(DEVICE)
    )
    held = [
        torch.full((batch * per + spare, size, *x.shape[2:]), math.nan, dtype=x.dtype, device=DEVICE)
        for x in shown
    ]
    for one, x in zip(held, shown, strict=True):
        one[table.flatten()] = x.unflatten(1, (per, size)).flatten(0, 1)
    for sequence, (_, end) in enumerate(used):
        table[sequence, -(-(end + room) // size) :] = -1
    return Kept(held[0], held[1], {"block_table": table.int()})


def cached_cases(row: tuple[Any, ...], sizes: Sizes, inputs: list[Tensor]) -> None:
    """All cases; those without splits of the kernels that have none."""
    for case in sizes.cases:
        if case[2] <= 1 or splits_taken(row):
            cached_case(row, sizes, inputs, case)


def cached_inputs(row: tuple[Any, ...], sizes: Sizes) -> list[Tensor]:
    """As many queries of each sequence as the cache has room for, and all the K and V that it may hold."""
    heads, (dim, dtype) = row[1], row[4:6]
    shape = len(sizes.lengths), sizes.capacity
    return [
        normal(*shape, count, sizes.dims[dim], seed=seed, dtype=dtype)
        for seed, count in enumerate((HEADS[heads][0], HEADS[heads][1], HEADS[heads][1]))
    ]


def cached_case(row: tuple[Any, ...], sizes: Sizes, inputs: list[Tensor], case: tuple[int, int, int]) -> None:
    """One call: o and lse beside torch's of each sequence alone, and what the cache then is: to the bit, of
    turned keys to a rounding."""
    kind, _, mask, option, _, dtype, rotary, padded = row
    (queries, new, splits), used, batch = case, list(sizes.lengths), len(sizes.lengths)
    q, *whole = inputs[0][:batch, :queries], *(x[:batch].clone() for x in inputs[1:])
    options = options_of(mask, option, sizes.masks, q.shape[2], batch)
    before = [Random(n).randint(0, n) if padded else 0 for n in used]
    held = list(zip(before, used, strict=True))
    kept = laid(kind, sizes, (whole[0], whole[1]), held, new)
    fresh = (
        [torch.stack([x[b, n : n + new] for b, n in enumerate(used)]) for x in whole] if new else [None] * 2
    )
    more, given_q = dict[str, Any](kept.more), q
    if padded:
        more["cache_leftpad"] = torch.tensor(before, dtype=torch.int32, device=DEVICE)
    if new and ROTARY[rotary][0]:
        angles, interleaved = angles_of(rotary, 2 * sizes.capacity, q), ROTARY[rotary][1]
        more |= {"rotary_cos": angles[0], "rotary_sin": angles[1], "rotary_interleaved": interleaved}
        in_order = bool(sizes.masks[mask])
        q = torch.stack([turned(q[b], angles, n, interleaved, in_order) for b, n in enumerate(used)])
        for b, n in enumerate(used):
            whole[0][b, n : n + new] = turned(fresh[0][b], angles, n, interleaved, True)
    wanted = [x.clone() for x in (kept.k, kept.v)]
    for one, x in zip(wanted, whole, strict=True):
        for b, t in product(range(batch), range(new)):
            one[kept.row(one, b, used[b] + t)] = x[b, used[b] + t]
    o, lse = flash_attn.flash_attn_with_kvcache(
        given_q, kept.k, kept.v, *fresh, cache_seqlens=torch.tensor(used, dtype=torch.int32, device=DEVICE),
        num_splits=splits, return_softmax_lse=True, **options, **more,
    )  # fmt: skip
    for mine, theirs in zip((kept.k, kept.v), wanted, strict=True):
        if mine is kept.k and "rotary_cos" in more:
            eps = torch.finfo(dtype).eps
            assert torch.allclose(mine.float(), theirs.float(), rtol=eps, atol=eps / 64, equal_nan=True)
        else:
            assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16)), (row, case)
    spans = [(first, n + new) for first, n in held]
    sides = [cached_plain(q, whole, spans, {**options, "dtype": to}) for to in (torch.float64, dtype)]
    none = sides[0][1].isneginf()
    assert torch.equal(lse.isneginf(), none)
    found, *by_torch = ((o, lse.masked_fill(none, 0.0)) for o, lse in ((o, lse), *sides))
    assert_as_good(found, by_torch[0], by_torch[1], str((row, case)))


def angles_of(rotary: str, rows: int, q: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin of as many columns as are turned in pairs, in q's dtype."""
    pairs = int(ROTARY[rotary][0] * q.shape[3]) // 2
    angles = normal(rows, pairs, seed=11) * 3
    return angles.cos().to(q.dtype), angles.sin().to(q.dtype)


def turned(x: Tensor, angles: tuple[Tensor, Tensor], first: int, interleaved: bool, in_order: bool) -> Tensor:
    """Rows of one sequence times cos + i sin in fp64, pairs of columns as complex numbers, in its dtype."""
    at = first + torch.arange(len(x), device=x.device) * in_order
    cos, sin = (side[at].double()[:, None] for side in angles)
    columns = 2 * cos.shape[2]
    part = x[..., :columns].double()
    pairs = part.unflatten(-1, (-1, 2)) if interleaved else part.unflatten(-1, (2, -1)).mT
    product = torch.view_as_real(torch.view_as_complex(pairs.contiguous()) * torch.complex(cos, sin))
    product = product if interleaved else product.mT
    return torch.cat((product.flatten(-2).to(x.dtype), x[..., columns:]), -1)


def cached_plain(
    q: Tensor, whole: list[Tensor], held: list[tuple[int, int]], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(o, lse) of each sequence by itself."""
    found = [
        plain(q[b, None], whole[0][b, None, first:end], whole[1][b, None, first:end], **of_one(options, b))[
            :2
        ]
        for b, (first, end) in enumerate(held)
    ]
    o, lse = (torch.cat(one) for one in zip(*found, strict=True))
    return o, lse


@pytest.mark.gpu
@pytest.mark.parametrize("row", CACHED, ids=named)
def test_a_cache_as_the_package_has_it(row: tuple[Any, ...]) -> None:
    inputs = cached_inputs(row, REAL)
    for sizes in (REAL, OTHERS):
        cached_cases(row, sizes, inputs)


@runs
@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has the real sizes")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if number in (0, 4, 9, 14, 20, 25) else pytest.mark.slow, id=named(row))
     for number, row in enumerate(CACHED_SMALL)],
)  # fmt: skip
def test_a_cache_in_small(row: tuple[Any, ...]) -> None:
    cached_cases(row, SMALL, cached_inputs(row, SMALL))


@pytest.mark.parametrize(
    ("grid", "strength"), [(PACKED, 3), (PACKED_SMALL, 2), (CACHED, 3), (CACHED_SMALL, 2)],
    ids=["packed", "packed, small", "cached", "cached, small"],
)  # fmt: skip
def test_a_grid_has_every_pair_or_three_of_values(grid: list[tuple[Any, ...]], strength: int) -> None:
    for columns in combinations(zip(*grid, strict=True), strength):
        assert set(zip(*columns, strict=True)) == set(product(*map(set, columns)))
