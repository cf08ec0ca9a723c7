"""Bases that row sums guard, in 16 bits: the lines of PTX of a tile's exponentials, run in numpy.

One warp: 16 rows of 128 columns, at once and in two parts, against fp64. Whatever the scores are, P is
finite, P and the row sums are those of the base that is told, and a base changes where it must.
"""

from __future__ import annotations

import numpy as np
import ptx_lines as ptx
import pytest
import torch

pytest.importorskip("triton")
from flashbench.kernels import _hopper_guard16 as guard

LANES = np.arange(32)
SHIFT, NEAR, LIMIT = guard.SHIFT, guard.NEAR, guard.LIMIT
UNIT = np.float32(0.37)
DTYPES = {"f16": torch.float16, "bf16": torch.bfloat16}
STEP = {"f16": 2.0**-11, "bf16": 2.0**-8}
"""What rounding may change, relative."""
LEAST = {"f16": 2.0**-25, "bf16": 0.0}
"""The same, of numbers that have fewer digits."""
FLUSHED = 2.0**-126
"""What fp32's powers of two have no number for."""
FORMS = [("f16", 1), ("f16", 2), ("bf16", 1), ("bf16", 2)]


def by_thread(p: np.ndarray) -> np.ndarray:
    """(rows, 4) sums of the columns that each thread of four has."""
    return p.reshape(16, -1, 4, 2).sum((1, 3))


class Tile:
    """What the lines make of scores (rows, columns) and of bases (rows,) so far."""

    def __init__(self, s, top=None, half="f16", parts=1, unit=UNIT, first=False) -> None:
        self.half, columns = half, np.shape(s)[1]
        n = columns // 2
        row = LANES // 4 + 8 * (np.arange(n)[:, None] % 4 // 2)
        column = 8 * (np.arange(n)[:, None] // 4) + 2 * (LANES % 4) + np.arange(n)[:, None] % 2
        s = np.asarray(s, np.float32)
        top = np.full(16, -np.inf, np.float32) if top is None else np.asarray(top, np.float32)
        given = {f"${n + i}": ptx.of_floats(s[row[i], column[i]]) for i in range(n)}
        given[f"${2 * n}"] = ptx.of_floats(np.full(32, unit))
        for r in (0, 1):
            given[f"${3 * n + 2 * r}"] = ptx.of_floats(top[row[2 * r]])
        given[f"${4 * n}"] = ptx.of_floats(np.full(32, float(first)))
        found = ptx.run(guard.guarded_asm(columns, half, parts, False), given)
        if not first:  # the form of tiles that never are the first
            del given[f"${4 * n}"]
            hot = ptx.run(guard.guarded_asm(columns, half, parts, True), given)
            outs = [2 * j for j in range(n // 2)] + [
                4 * place + 2 * r + 1 for place in range(3) for r in (0, 1)
            ]
            assert all(np.array_equal(found[f"${i}"], hot[f"${i}"]) for i in outs)
        self.p = np.full((16, columns), np.nan)
        for j in range(n // 2):
            words = torch.tensor(found[f"${2 * j}"].view(np.int16).reshape(32, 2))
            two = words.view(DTYPES[half]).double().numpy()
            for c in (0, 1):
                self.p[row[2 * j], column[2 * j + c]] = two[:, c]
        self.sums, tops, self.alpha = (
            ptx.by_row(*(found[f"${4 * place + 2 * r + 1}"] for r in (0, 1))) for place in range(3)
        )
        assert all(np.array_equal(tops[:, :1], tops[:, [i]], equal_nan=True) for i in range(4))
        self.top, self.old, self.parts = tops[:, 0], top.astype(np.float64), parts
        with np.errstate(invalid="ignore", over="ignore"):  # of a score that is not finite
            self.exact = np.exp2(s.astype(np.float64) * np.float64(unit) - self.top[:, None])
        self.changed = ~((self.top == top) | (np.isnan(self.top) & np.isnan(top)))

    def holds(self, rows=slice(None)) -> None:
        """P is 2**(s * unit - base), rounded, of two parts perhaps twice; sums are of it before."""
        p, exact = self.p[rows], self.exact[rows]
        assert exact.max(initial=0) <= LIMIT * (1 + 1e-6)
        rounded = self.parts * (STEP[self.half] * exact + LEAST[self.half])
        assert (abs(p - exact) <= rounded + 1e-5 * exact + FLUSHED).all()
        want = by_thread(self.exact)[rows]
        assert (abs(self.sums[rows] - want) <= 1e-5 * want + 32 * FLUSHED).all()
        with np.errstate(invalid="ignore", over="ignore"):
            factor = np.where(self.changed & (self.old > -np.inf), np.exp2(self.old - self.top), 1)
        assert np.allclose(self.alpha[rows], factor[rows, None], rtol=1e-5, atol=1e-37)


def scores(seed: int, spread: float = 3.0, columns: int = 128) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (16, columns))


def highest(s: np.ndarray, unit: np.float32 = UNIT) -> np.ndarray:
    return s.astype(np.float32).max(1).astype(np.float64) * unit


@pytest.mark.parametrize("columns", [64, 128, 256])
@pytest.mark.parametrize(("half", "parts"), FORMS)
def test_the_first_tile_has_each_rows_maximum_for_base(half: str, parts: int, columns: int) -> None:
    s = scores(0, 8, columns)
    s[5, 40:] = -np.inf
    s[6] = -np.inf
    s[7, 1:] = -np.inf
    tile = Tile(s, half=half, parts=parts, first=True)
    there = np.arange(16) != 6
    base = (tile.top + SHIFT)[there]
    if parts == 1:
        assert np.allclose(base, highest(s)[there], rtol=1e-6)
        assert tile.p.max() <= 2**SHIFT, "it is rounded up"
        assert (tile.alpha == 1).all()
    else:  # the other part keeps it while its sums are small
        assert (base >= highest(s[:, : columns // 2])[there] - 1e-5).all()
        assert (base <= highest(s)[there] + 1e-5).all()
    assert tile.top[6] == guard.LEAST
    tile.holds()
    assert not tile.p[6].any()
    assert not tile.sums[6].any()
    assert np.allclose(tile.p[7, 0], 2**SHIFT)


@pytest.mark.parametrize(("half", "parts"), FORMS)
def test_a_tile_like_those_before_keeps_every_base(half: str, parts: int) -> None:
    before = Tile(scores(1), first=True, half=half, parts=parts)
    tile = Tile(scores(2), before.top, half=half, parts=parts)
    assert not tile.changed.any()
    assert (tile.alpha == 1).all()
    tile.holds()


@pytest.mark.parametrize("column", [0, 13, 63, 64, 126])
@pytest.mark.parametrize("by", [6.0, 7.5, 17.0, 300.0, 1e5])
@pytest.mark.parametrize(("half", "parts"), FORMS)
def test_a_row_that_jumps_past_the_limit_gets_its_maximum_for_base_and_no_other_row_does(
    half: str, parts: int, by: float, column: int
) -> None:
    """In either part, and with what was computed of a part before by the new base too."""
    s = scores(3, 0.2)
    before = Tile(scores(4, 0.2), first=True)
    s[9, column] = (before.top[9] + SHIFT + by) / UNIT
    tile = Tile(s, before.top, half=half, parts=parts)
    jumped = by > 7  # one P of a thread passes 2**15
    assert tile.changed[9] == jumped
    if jumped:
        assert tile.top[9] + SHIFT == pytest.approx(before.top[9] + SHIFT + by, rel=1e-6)
        assert tile.p[9, column] == pytest.approx(2**SHIFT, rel=0.01 * max(1, by / 1e4))
    assert not tile.changed[np.arange(16) != 9].any()
    tile.holds()


@pytest.mark.parametrize(("half", "parts"), FORMS)
def test_rows_of_a_warp_that_looks_keep_a_base_that_they_outgrew_by_little(half: str, parts: int) -> None:
    top = np.zeros(16)
    s = np.full((16, 128), (SHIFT + NEAR - 0.01) / UNIT)
    s[1:4] = (SHIFT + NEAR + 0.01) / UNIT
    s[0, 5] = 40 / UNIT
    tile = Tile(s, top, half=half, parts=parts)
    assert tile.changed.nonzero()[0].tolist() == [0, 1, 2, 3][: None if parts == 1 else 4]
    tile.holds()
    assert (tile.sums <= LIMIT).all()


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(("half", "parts"), FORMS)
def test_whatever_the_scores_are_o_is_that_of_fp64(half: str, parts: int, seed: int) -> None:
    """A walk of tiles whose rows drift, jump, sink and hide keys, summed as the kernel does."""
    random = np.random.default_rng(seed)
    drift = random.normal(0, (0, 2, 40, 400)[seed % 4], (12, 16, 1)).cumsum(0)
    top, total, acc, every, values = None, np.zeros((16, 4)), np.zeros(16), [], []
    for n in range(12):
        s = drift[n] + random.normal(0, random.choice([0, 0.3, 3, 12]), (16, 128))
        s[random.random((16, 128)) < random.choice([0, 0.5, 0.99])] = -np.inf
        s[random.random(16) < 0.2] = -np.inf
        s[3] = -np.inf
        if n < 5:
            s[4] = -np.inf
        s, v = s.astype(np.float32), random.normal(0, 1, 128)
        tile = Tile(s, top, half, parts, first=n == 0)
        tile.holds()
        total = tile.alpha * total + tile.sums
        acc = tile.alpha[:, 0] * acc + tile.p @ v
        top = tile.top
        every.append(s.astype(np.float64) * UNIT)
        values.append(v)
    x = np.concatenate(every, 1)
    there = np.isfinite(x.max(1))
    assert not there[3]
    assert there.sum() == 15
    assert not total[3].any()
    assert not acc[3]
    x = x[there] - x[there].max(1, keepdims=True)
    weights = np.exp2(x) / np.exp2(x).sum(1, keepdims=True)
    assert np.allclose((acc / total.sum(1).clip(1e-300))[there], weights @ np.concatenate(values),
                       atol=4 * parts * STEP[half])  # fmt: skip
    assert (total.sum(1)[there] >= 2.0 ** (SHIFT - 0.1)).all()


@pytest.mark.parametrize(("half", "parts"), FORMS)
def test_a_row_without_a_base_gets_one_with_its_first_key_and_not_before(half: str, parts: int) -> None:
    s = scores(5)
    s[3:6] = -np.inf
    before = Tile(s, first=True, half=half, parts=parts)
    assert (before.top[3:6] == guard.LEAST).all()
    s = scores(6)
    s[4] = -np.inf
    s[5, :127] = -np.inf
    tile = Tile(s, before.top, half=half, parts=parts)
    assert tile.top[4] == guard.LEAST
    assert tile.changed[[3, 5]].all()
    assert not tile.changed[[0, 1, 2, 6]].any()
    assert np.isfinite(tile.alpha[3:6]).all()
    tile.holds()
    assert not tile.p[4].any()
    assert tile.p[5, 127] == pytest.approx(2**SHIFT, rel=1e-2)
    alone = Tile(np.full((16, 128), -np.inf), np.full(16, guard.LEAST), half=half, parts=parts)
    assert not alone.changed.any(), "no warp looks for a base where there is none"
    assert not alone.p.any()


@pytest.mark.parametrize("size", [1e4, 3e6, 6e7])
@pytest.mark.parametrize(("half", "parts"), FORMS)
def test_scores_so_large_that_a_base_has_no_digits_behind_the_point_pass_nothing(
    half: str, parts: int, size: float
) -> None:
    """fp32's steps are up to 16 there: by a base a step below its maximum a row's P would be infinite."""
    s = scores(7) * size
    tile = Tile(s, half=half, parts=parts, first=True)
    assert (tile.p <= (2**SHIFT if parts == 1 else LIMIT)).all()
    assert (tile.sums <= LIMIT).all()
    assert (tile.p[np.arange(16), s.argmax(1)] > 0).all()
    assert (tile.p.max(1) == tile.p[np.arange(16), s.argmax(1)]).all()


@pytest.mark.parametrize("seen", [1, 9, 64, 65, 128])
@pytest.mark.parametrize(("half", "parts"), FORMS)
def test_a_nan_is_in_its_rows_p_and_sums_and_in_no_other_rows(half: str, parts: int, seen: int) -> None:
    s = scores(8)
    s[2, seen - 1] = np.nan
    others = np.arange(16) != 2
    before = Tile(scores(9), first=True, half=half, parts=parts).top
    for tile in (Tile(s, half=half, parts=parts, first=True), Tile(s, before, half=half, parts=parts)):
        assert np.isnan(tile.sums[2].sum())
        assert np.isnan(tile.p[2, seen - 1])
        tile.holds(others)
        assert parts == 2 or np.isnan(tile.p[2]).all()
        Tile(scores(10), tile.top, half=half, parts=parts).holds(others)


@pytest.mark.parametrize("column", [9, 100])
@pytest.mark.parametrize(("half", "parts"), FORMS)
def test_an_infinite_score_makes_its_row_nan(half: str, parts: int, column: int) -> None:
    s = scores(11)
    s[2, column] = np.inf
    before = Tile(scores(12), first=True, half=half, parts=parts).top
    for tile in (Tile(s, half=half, parts=parts, first=True), Tile(s, before, half=half, parts=parts)):
        assert tile.top[2] == np.inf
        assert np.isnan(tile.p[2, column])
        assert np.isnan(tile.sums[2].sum())
        tile.holds(np.arange(16) != 2)


def test_a_product_beyond_fp32_has_a_base_of_infinity_which_tells_it_from_a_row_without_keys() -> None:
    s = scores(13)
    s[2] = 1e10
    tile = Tile(s, unit=np.float32(1e30), first=True)
    assert tile.top[2] == np.inf
    assert not tile.sums[2].any()


@pytest.mark.parametrize("half", list(DTYPES))
def test_small_keys_that_are_many_do_not_vanish(half: str) -> None:
    """Of 2**-20 of the largest key each: where P was 1 at the maximum, fp16 had four digits of them left."""
    s = np.full((16, 128), -20.3 / UNIT)
    s[:, 0] = 0
    tile = Tile(s, half=half, first=True)
    want = np.exp2(s[:, 1:].astype(np.float32).astype(np.float64) * UNIT + SHIFT)
    assert (abs(tile.p[:, 1:] - want) <= STEP[half] * want * 1.01).all()
