"""Bases that row sums guard: the lines of PTX of a tile's exponentials, run in numpy, against fp64.

One warp: 16 rows of 128 columns. Whatever the scores are, no P is larger than fp8 holds, P and the row sums
are those of the base that is told, and a base changes where it must, not elsewhere.
"""

from __future__ import annotations

import fp8
import numpy as np
import ptx_lines as ptx
import pytest
import torch

pytest.importorskip("triton")
from flashbench.hopper_configs import EMULATED_WITHIN
from flashbench.kernels import _fp8
from flashbench.kernels import _hopper_guard as guard

COLUMNS = 128
N = COLUMNS // 2
LANES = np.arange(32)
ROW = LANES // 4 + 8 * (np.arange(N)[:, None] % 4 // 2)
"""Row of each element of each lane, (elements, lanes)."""
COLUMN = 8 * (np.arange(N)[:, None] // 4) + 2 * (LANES % 4) + np.arange(N)[:, None] % 2
SHIFT, NEAR, GROWN = guard._SHIFT, guard.NEAR, guard.GROWN
FORMATS = {False: torch.float8_e4m3fn, True: torch.float8_e5m2}


def by_thread(p: np.ndarray) -> np.ndarray:
    """(rows, 4) sums of the columns that each thread of four has."""
    return p.reshape(16, COLUMNS // 8, 4, 2).sum((1, 3))


class Tile:
    """What the lines make of scores (rows, columns), of bases (rows,) and sums (rows, 4) so far."""

    def __init__(self, s, top=None, total=None, factor=0.5, share=3, e5m2=False, first=False) -> None:
        top = np.full(16, -np.inf) if top is None else top
        total = np.zeros((16, 4)) if total is None else total
        s, top, total = (np.asarray(x, np.float32) for x in (s, top, total))
        given = {f"${N + i}": ptx.of_floats(s[ROW[i], COLUMN[i]]) for i in range(N)}
        given[f"${2 * N}"] = ptx.of_floats(np.full(32, factor))
        for r in (0, 1):
            given[f"${3 * N + 2 * r}"] = ptx.of_floats(top[ROW[2 * r]])
            given[f"${4 * N + 2 * r}"] = ptx.of_floats(total[ROW[2 * r], LANES % 4])
        given[f"${5 * N}"] = ptx.of_floats(np.full(32, float(first)))
        found = ptx.run(guard.guarded_asm(COLUMNS, share, e5m2), given)
        self.p = np.full((16, COLUMNS), np.nan)
        for group in range(COLUMNS // 16):
            for r in (0, 1):
                word = found[f"${guard._place(group, 0, r, 0)}"]
                four = torch.tensor(word.view(np.uint8).reshape(32, 4)).view(FORMATS[e5m2]).float().numpy()
                for half in (0, 1):
                    for c in (0, 1):
                        i = guard._place(group, half, r, c)
                        self.p[ROW[i], COLUMN[i]] = four[:, 2 * half + c]
        self.sums, tops, self.alpha = (
            ptx.by_row(*(found[f"${guard._place(group, half, r, 1)}"] for r in (0, 1)))
            for group, half in ((0, 0), (0, 1), (1, 0))
        )
        assert all(np.array_equal(tops[:, :1], tops[:, [n]], equal_nan=True) for n in range(4))
        self.top = tops[:, 0]
        with np.errstate(invalid="ignore"):  # of an infinite score
            self.exact = np.exp2(s.astype(np.float64) * factor - self._base()[:, None] + SHIFT)
        self.e5m2 = e5m2
        self.changed = ~((self.top == top) | (np.isnan(self.top) & np.isnan(top)))
        self.old = top.astype(np.float64)

    def _base(self) -> np.ndarray:
        return np.where(self.top == -np.inf, SHIFT, self.top)  # a row of which no key was seen: P = 0

    def holds(self, rows=slice(None)) -> None:
        """P is 2**(score - base + SHIFT), rounded, nowhere too large; sums are of it before it is rounded."""
        limit = torch.finfo(FORMATS[self.e5m2]).max
        p, exact = self.p[rows], self.exact[rows]
        assert exact.max(initial=0) <= limit
        step, least = (2.0**-3, 2.0**-13.9) if self.e5m2 else (2.0**-4, 2.0**-9)  # or what is not emulated
        within = step * exact + EMULATED_WITHIN[1] * 1.1 * exact + least
        assert (abs(p - exact) <= within).all()
        sums, want = self.sums[rows], by_thread(self.exact)[rows]
        assert (abs(sums - want) <= 6e-3 * want + 2.0**-11).all()
        factor = np.where(self.changed & (self.old > -np.inf), np.exp2(self.old - self._base()), 1)
        assert np.allclose(self.alpha[rows], factor[rows, None], rtol=1e-6)


def scores(seed: int, spread: float = 2.0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, spread, (16, COLUMNS))


def settled(s: np.ndarray, factor: float = 0.5) -> dict[str, np.ndarray]:
    """Bases and sums after a tile of such scores."""
    one = Tile(s, first=True, factor=factor)
    return {"top": one.top, "total": one.sums}


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("share", [0, 3, 4])
def test_the_first_tile_has_each_rows_maximum_for_base(share: int, e5m2: bool) -> None:
    s = scores(0, 8)
    s[5, 40:] = -np.inf
    s[6] = -np.inf
    s[7, 1:] = -np.inf
    tile = Tile(s, first=True, share=share, e5m2=e5m2)
    assert tile.top[6] == -np.inf
    lifted = (s.max(1) * 0.5 - tile.top)[np.arange(16) != 6]
    assert (abs(lifted - lifted.round()) < 1e-5).all()
    assert ((lifted > -0.5) & (lifted < guard.LIFT + 0.5)).all()
    tile.holds()
    assert not tile.p[6].any()
    assert not tile.sums[6].any()
    assert np.array_equal(tile.p[7, :2], [2 ** (SHIFT + guard.LIFT), 0])


@pytest.mark.parametrize(("keys", "lift"), [(1, 4), (2, 3), (4, 2), (8, 1), (16, 0), (32, 0)])
def test_the_fewer_keys_are_near_a_maximum_the_further_below_it_is_the_base(keys: int, lift: int) -> None:
    """Of thousands of keys 2**-14 of one each, half of a row may come: 2**-11 would not be told from 0."""
    s = np.full((16, COLUMNS), -28.0)
    s[:, 8 * np.arange(keys // 2) if keys > 1 else [0]] = 0
    s[:, 8 * np.arange(keys // 2) + 1] = 0
    tile = Tile(s, first=True)
    assert np.array_equal(tile.top, np.full(16, -lift))
    tile.holds()
    assert (tile.p[:, 0] == 2 ** (SHIFT + lift)).all()
    if keys == 1:
        assert (tile.p[:, 64:] > 0).all()


@pytest.mark.parametrize("e5m2", [False, True])
@pytest.mark.parametrize("share", [0, 3, 4])
def test_a_tile_like_those_before_keeps_every_base(share: int, e5m2: bool) -> None:
    tile = Tile(scores(1), **settled(scores(2)), share=share, e5m2=e5m2)
    assert not tile.changed.any()
    tile.holds()
    assert (tile.alpha == 1).all()


@pytest.mark.parametrize("column", [0, 8, 13, 126])
@pytest.mark.parametrize("by", [5.0, 17.0, 40.0, 300.0])
def test_a_row_that_jumps_gets_its_maximum_and_rows_that_do_not_keep_their_base(
    by: float, column: int
) -> None:
    """Whether its key is of MUFU's exponentials or of the multiply-add units'."""
    s = scores(3)
    before = settled(scores(4))
    s[9, column] = (before["top"][9] + by) / 0.5
    tile = Tile(s, **before)
    assert tile.changed[9]
    lift = guard.LIFT if by > 6 else (before["top"][9] + by - tile.top[9]).round()
    assert abs(tile.top[9] + lift - before["top"][9] - by) < 1e-4
    near = s.max(1) * 0.5 - before["top"] <= NEAR
    assert not tile.changed[near].any()
    tile.holds()
    assert tile.p[9, column] == pytest.approx(2 ** (SHIFT + lift))


@pytest.mark.parametrize("seed", range(6))
def test_no_p_is_cut_off_whatever_the_scores_are(seed: int) -> None:
    """A walk of tiles whose rows drift, jump, sink and hide keys, by bases and sums of those before."""
    random = np.random.default_rng(seed)
    e5m2 = seed % 3 == 2
    drift = random.normal(0, (0, 1, 6)[seed % 3], (15, 16, 1)).cumsum(0)
    top = total = None
    for n in range(15):
        s = drift[n] + random.normal(0, random.choice([0, 0.3, 3, 12]), (16, COLUMNS))
        s[random.random((16, COLUMNS)) < random.choice([0, 0.5, 0.99])] = -np.inf
        s[random.random(16) < 0.1] = -np.inf
        tile = Tile(s, top, total, share=seed % 5, e5m2=e5m2, first=n == 0)
        tile.holds()
        total = tile.alpha * (0 if total is None else total) + tile.sums
        top = tile.top
        assert np.isfinite(total).all()


def test_thousands_of_keys_that_weigh_as_much_as_one_far_above_them_do_not_vanish() -> None:
    """In the arithmetic as a whole, where that one key comes first and is the base of all others."""
    q, k, v = fp8.hard("early key", queries=128, keys=8192, heads=1)
    x = [_fp8.quantise(one, fp8.E4M3, "block", 128) for one in (q, k)]
    own = _fp8.quantise_values(v, fp8.E4M3, "block", 128)
    ref, _ = fp8.exact(*(_fp8.dequantise(one, torch.float64) for one in (*x, own)))
    off = [
        float((fp8.guarded(*x, own, causal=False, scale=128**-0.5, lift=lift)[0] - ref).norm() / ref.norm())
        for lift in (0, int(guard.LIFT))
    ]
    assert off[1] < 3e-3
    assert off[0] > 10 * off[1]


def test_a_row_without_a_base_gets_one_with_its_first_key_and_not_before() -> None:
    s = scores(5)
    before = settled(scores(6))
    before["top"][3], before["total"][3] = -np.inf, 0
    before["top"][4], before["total"][4] = -np.inf, 0
    s[4] = -np.inf
    tile = Tile(s, **before)
    lift = np.float32(s[3].max()) * np.float32(0.5) - tile.top[3]
    assert lift == pytest.approx(lift.round(), abs=1e-5)
    assert 0 <= lift.round() <= guard.LIFT
    assert tile.top[4] == -np.inf
    assert (tile.alpha[3:5] == 1).all()
    tile.holds()
    assert not tile.p[4].any()


def test_a_row_of_few_keys_whose_tile_has_far_more_is_based_on_its_maximum() -> None:
    """Else the largest of its P would be rounded by the chance of an old base."""
    before = settled(scores(7, 0.1))
    before["total"][:] = 2**SHIFT  # of one key a thread
    s = np.full((16, COLUMNS), 2.0 * before["top"][:, None] + 2.0)  # each 2**1 of the base
    tile = Tile(s, **before)
    assert tile.changed.all()
    assert (tile.p == 2**SHIFT).all()
    alike = Tile(s, before["top"], np.full((16, 4), 32 * 2 ** (SHIFT + 1)))
    assert alike.changed.all(), "32 times 2**4 is beyond e4m3"
    near = Tile(s - 1.5, before["top"], np.full((16, 4), 32 * 2.0**SHIFT))
    assert not near.changed.any()
    near.holds()


@pytest.mark.parametrize("share", [0, 3, 4])
def test_a_nan_of_a_row_is_its_sums_and_no_other_rows(share: int) -> None:
    """As q's, of a row's tile, or k's: all columns that a row sees."""
    for seen in (1, 9, COLUMNS):
        s = scores(8)
        s[2, :seen] = np.nan
        s[2, seen:] = -np.inf
        for tile in (Tile(s, first=True, share=share), Tile(s, **settled(scores(9)), share=share)):
            assert np.isnan(tile.sums[2].sum())
            assert np.isnan(tile.p[2, :2]).all()
            others = np.arange(16) != 2
            tile.holds(others)
            later = Tile(scores(10), tile.top, tile.sums, share=share)
            assert np.isnan(later.alpha[2]).all(), "what was summed so far is multiplied by it"
            later.holds(others)


def test_an_infinite_score_makes_its_row_nan() -> None:
    s = scores(11)
    s[2, 9] = np.inf
    tile = Tile(s, **settled(scores(12)))
    assert tile.top[2] == np.inf
    assert np.isnan(tile.p[2]).any() or tile.sums[2].sum() == 0  # finish() takes a base of +inf for a NaN
    tile.holds(np.arange(16) != 2)
