"""Packed sequences and K/V caches over grids as the flash-attn package's tests have them, by its error rule.

On a GPU at the package's sizes; the same calls on small ones through the interpreter. A test compiles one
configuration: heads, masks and dims in full, dtype and options in turn, lengths and splits at run time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, combinations, pairwise, product
from typing import Any

import pytest
import torch
from drop_in import DEVICE, assert_as_good, normal, of_plain, plain, runs
from torch import Tensor

import flashbench
from flashbench import flash_attn

HEADS = {"mha": (6, 6), "gqa": (6, 2), "mqa": (6, 1)}
DIMS = (59, 64, 128, 256)
DTYPES = torch.float16, torch.bfloat16
MASKS: dict[str, dict[str, Any]] = {
    "full": {}, "causal": {"causal": True}, "local": {"window_size": (37, 19)},
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {}, "slopes": {"alibi_slopes": None}, "softcap": {"softcap": 15.0},
    "dropout": {"dropout_p": 0.17}, "deterministic": {"deterministic": True},
}  # fmt: skip
SMALL_DIMS = dict(zip(DIMS, (11, 16, 20, 24), strict=True))
SMALL_MASKS: dict[str, dict[str, Any]] = {**MASKS, "local": {"window_size": (5, 3)}}


def options_of(mask: str, option: str, masks: dict[str, dict[str, Any]], heads: int) -> dict[str, Any]:
    found = {**masks[mask], **OPTIONS[option]}
    if "alibi_slopes" in found:
        found["alibi_slopes"] = normal(heads, seed=9).abs() * 0.3
    return found


def named(row: tuple[Any, ...]) -> str:
    return "-".join(str(value).removeprefix("torch.") for value in row)


# Packed sequences

PACKED = [
    (dim, kind, mask, list(OPTIONS)[number % 5], DTYPES[number % 2])
    for number, (dim, kind, mask) in enumerate(product(DIMS, HEADS, MASKS))
]
"""(head_dim, heads, mask, option, dtype): the first three in full, the others in turn."""

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
    dim, kind, mask, option, dtype = row
    heads, masks = HEADS[kind], SMALL_MASKS if small else MASKS
    options, dim = options_of(mask, option, masks, heads[0]), SMALL_DIMS[dim] if small else dim
    ends = [[0, *accumulate(side)] for side in zip(*lengths, strict=True)]
    totals = ends[0][-1], ends[1][-1], ends[1][-1]
    inputs = [
        normal(total, count, dim, seed=seed, dtype=dtype).requires_grad_()
        for seed, (total, count) in enumerate(zip(totals, (heads[0], *heads[1:], heads[1]), strict=True))
    ]
    starts = [torch.tensor(side, dtype=torch.int32, device=DEVICE) for side in ends]
    longest = [max(side) for side in zip(*lengths, strict=True)]
    torch.manual_seed(7)
    o = flash_attn.flash_attn_varlen_func(*inputs, *starts, *longest, **options)
    do = normal(totals[0], heads[0], dim, seed=3, dtype=dtype)
    found = o, *torch.autograd.grad(o, inputs, do)
    kept = dropped(len(lengths), heads[0], longest, options)
    sides = [packed_plain(inputs, ends, do, {**of_plain(options), "dtype": to}, kept)
             for to in (torch.float64, dtype)]  # fmt: skip
    assert_as_good(found, sides[0], sides[1], str((row, lengths)))


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
) -> tuple[Tensor, ...]:
    """(o, dq, dk, dv) of each sequence by itself, one after the other."""
    outputs = []
    spans = zip(*([slice(*pair) for pair in pairwise(side)] for side in ends), strict=True)
    for number, (rows, keys) in enumerate(spans):
        one = inputs[0][None, rows], inputs[1][None, keys], inputs[2][None, keys]
        drops = {}
        if kept is not None:
            sizes = rows.stop - rows.start, keys.stop - keys.start
            drops = {"kept": kept[number, None, :, : sizes[0], : sizes[1]]}
        outputs.append(plain(*one, **options, **drops)[0][0])
    o = torch.cat(outputs)
    return o, *torch.autograd.grad(o, inputs, do.to(o.dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("row", PACKED, ids=named)
def test_packed_sequences_as_the_package_has_them(row: tuple[Any, ...]) -> None:
    for number, (rows, keys) in enumerate(LONGEST):
        packed_case(row, random_lengths(rows, keys, 6, seed=number))


@runs
@pytest.mark.skipif(DEVICE != "cpu", reason="a GPU has the real sizes")
@pytest.mark.parametrize(
    "row",
    [pytest.param(row, marks=[] if number % 8 == 0 else pytest.mark.slow, id=named(row))
     for number, row in enumerate(PACKED)],
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
SPLIT = ("full", "none"), ("causal", "none")
WHOLE = ("local", "none"), ("causal", "slopes"), ("full", "softcap")
"""What flash-decode does not do; it takes a contiguous cache."""
CACHED = [
    (kind, heads, mask, option, DIMS[number % 4], DTYPES[number // 4 % 2])
    for number, (kind, heads, (mask, option)) in enumerate(
        (kind, heads, one)
        for kind, heads in product(KINDS, HEADS)
        for one in (*SPLIT, *(WHOLE if kind == "contiguous" else ()))
    )
]
"""(kind, heads, mask, option, head_dim, dtype)."""


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


def laid(kind: str, sizes: Sizes, whole: tuple[Tensor, Tensor], used: Sequence[int], room: int) -> Kept:
    """The first ``used`` rows of each sequence in a cache of a kind; everything else is NaN.

    room: rows of each that the call may write to behind them; table entries past those name no page.
    """
    batch, capacity = whole[0].shape[:2]
    shown = [x.clone() for x in whole]
    for x in shown:
        for sequence, length in enumerate(used):
            x[sequence, length:] = math.nan
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
    for sequence, length in enumerate(used):
        table[sequence, -(-(length + room) // size) :] = -1
    return Kept(held[0], held[1], {"block_table": table.int()})


def cached_cases(row: tuple[Any, ...], sizes: Sizes, inputs: list[Tensor]) -> None:
    """All cases; those without splits of the kernels that have none."""
    for case in sizes.cases:
        if case[2] <= 1 or row[2:4] in SPLIT:
            cached_case(row, sizes, inputs, case)


def cached_inputs(row: tuple[Any, ...], sizes: Sizes) -> list[Tensor]:
    """As many queries of each sequence as the cache has room for, and all the K and V that it may hold."""
    _, heads, _, _, dim, dtype = row
    shape = len(sizes.lengths), sizes.capacity
    return [
        normal(*shape, count, sizes.dims[dim], seed=seed, dtype=dtype)
        for seed, count in enumerate((HEADS[heads][0], HEADS[heads][1], HEADS[heads][1]))
    ]


def cached_case(row: tuple[Any, ...], sizes: Sizes, inputs: list[Tensor], case: tuple[int, int, int]) -> None:
    """One call: o and lse beside torch's of each sequence alone, and what the cache then is, to the bit."""
    kind, _, mask, option, _, dtype = row
    (queries, new, splits), used, batch = case, list(sizes.lengths), len(sizes.lengths)
    q, *whole = inputs[0][:batch, :queries], *(x[:batch] for x in inputs[1:])
    options = options_of(mask, option, sizes.masks, q.shape[2])
    kept = laid(kind, sizes, (whole[0], whole[1]), used, new)
    fresh = (
        [torch.stack([x[b, n : n + new] for b, n in enumerate(used)]) for x in whole] if new else [None] * 2
    )
    wanted = [x.clone() for x in (kept.k, kept.v)]
    for one, x in zip(wanted, fresh, strict=True):
        for b, t in product(range(batch), range(new)):
            one[kept.row(one, b, used[b] + t)] = x[b, t]
    o, lse = flash_attn.flash_attn_with_kvcache(
        q, kept.k, kept.v, *fresh, cache_seqlens=torch.tensor(used, dtype=torch.int32, device=DEVICE),
        num_splits=splits, return_softmax_lse=True, **options, **kept.more,
    )  # fmt: skip
    for mine, theirs in zip((kept.k, kept.v), wanted, strict=True):
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16)), (row, case)
    sides = [cached_plain(q, whole, [n + new for n in used], {**options, "dtype": to})
             for to in (torch.float64, dtype)]  # fmt: skip
    none = sides[0][1].isneginf()
    assert torch.equal(lse.isneginf(), none)
    found, *by_torch = ((o, lse.masked_fill(none, 0.0)) for o, lse in ((o, lse), *sides))
    assert_as_good(found, by_torch[0], by_torch[1], str((row, case)))


def cached_plain(
    q: Tensor, whole: list[Tensor], held: list[int], options: dict[str, Any]
) -> tuple[Tensor, Tensor]:
    """(o, lse) of each sequence by itself."""
    found = [
        plain(q[b, None], whole[0][b, None, :n], whole[1][b, None, :n], **options)[:2]
        for b, n in enumerate(held)
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
    [pytest.param(row, marks=[] if number in (7, 18, 26, 32) else pytest.mark.slow, id=named(row))
     for number, row in enumerate(CACHED)],
)  # fmt: skip
def test_a_cache_in_small(row: tuple[Any, ...]) -> None:
    cached_cases(row, SMALL, cached_inputs(row, SMALL))


@pytest.mark.parametrize(
    "grid", [PACKED, [row for row in CACHED if row[2:4] in SPLIT]], ids=["packed", "cached"]
)
def test_a_grid_has_every_pair_of_values(grid: list[tuple[Any, ...]]) -> None:
    for columns in combinations(zip(*grid, strict=True), 2):
        assert set(zip(*columns, strict=True)) == set(product(*columns))
