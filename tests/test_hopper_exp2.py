"""The softmax of flash-v3 with other instructions: its lines of PTX, run in numpy, against fp64."""

from __future__ import annotations

import numpy as np
import ptx_lines as ptx
import pytest

pytest.importorskip("triton")
from flashbench.hopper_configs import EMULATED_WITHIN
from flashbench.kernels import _hopper_exp2 as fast

RNG = np.random.default_rng(0)


def pair(x: np.ndarray, cubic: bool) -> np.ndarray:
    """2**x on the multiply-add units, given what the kernel gives: (x + 15) / 32 in one multiply-add."""
    x = np.resize(x.astype(np.float32), (2, -(-x.size // 2)))
    constant = {"f": 1 / 32, "b": 15 / 32}
    known = {name: ptx.of_floats(np.full(x.shape[1], value)) for name, value in constant.items()}
    last = ["and.b32 e, y, 0x7C007C00;", "mul.rn.f16x2 w, q, e;"] if cubic else ["mul.rn.f16x2 w, q, y;"]
    known |= {"s0": ptx.of_floats(x[0]), "s1": ptx.of_floats(x[1])}
    found = ptx.run([*fast._pair("s0", "s1", "f", "b", cubic), *last], known)["w"]
    return ptx.halves(found).T.astype(np.float64)


@pytest.mark.parametrize(
    ("cubic", "rms", "most"), [(True, 3.5e-4, EMULATED_WITHIN[2]), (False, 2.3e-3, EMULATED_WITHIN[1])]
)
def test_powers_of_two_are_those_of_fp64_over_the_range(cubic: bool, rms: float, most: float) -> None:
    x = RNG.uniform(-14, 15.9, 200_000)
    error = pair(x, cubic) / np.exp2(np.resize(x, (2, x.size // 2)).astype(np.float32).astype(float)) - 1
    assert np.sqrt((error**2).mean()) < rms
    assert abs(error).max() < most
    assert abs(error.mean()) < rms / 5, "no bias that a row's sum and its products would not share"


@pytest.mark.parametrize("cubic", [True, False])
def test_what_is_too_small_is_nothing_and_what_is_nearly_so_is_small(cubic: bool) -> None:
    nothing = np.array([-15.0, -15.5, -47.0, -48.5, -130.0, -1e4, -1e30, -np.inf])
    assert not pair(nothing, cubic).any()
    small = pair(RNG.uniform(-15, -14, 10_000), cubic)
    assert ((small >= 0) & (small < 2.0**-13.9)).all()


@pytest.mark.parametrize("share", range(1, 5))
def test_parts_join_to_p_and_sums_are_of_its_rows(share: int) -> None:
    """Of 128 columns: a thread's 32 pairs, alternately of its two rows."""
    lanes, n, unit, base = 32, 32, 0.18, np.float32(3.5)
    highest = (fast.SHIFT.value + fast.LAZY.value - base) / unit
    s = np.minimum(RNG.normal(0, 20, (2 * n, lanes)), highest).astype(np.float32)
    s[5:9] = -np.inf
    registers = {f"${3 * n + i}": ptx.of_floats(s[i]) for i in range(2 * n)}
    for k, value in enumerate((unit, base, np.float32(unit) / 32, base / 32 + 15 / 32)):
        registers |= {f"${(5 + k) * n + i}": ptx.of_floats(np.full(lanes, value)) for i in range(n)}
    found = ptx.run(fast.half_asm(128, share), registers)
    operands = {f"${n + i}": found[f"${i}"] for i in range(2 * n)}
    words = ptx.run(fast.joined_asm(128, share), operands)
    p = np.stack([ptx.halves(words[f"${i}"]) for i in range(n)])  # pair, lane, column
    want = np.exp2(np.stack((s[:n], s[n:]), -1).astype(np.float64) * np.float32(unit) + base)
    p = p.astype(np.float64)
    seen = want > 2.0**-14
    assert abs(p[seen] / want[seen] - 1).max() < 1.3e-3
    assert (p[~seen] < 2.0**-13.9).all()
    for row in (0, 1):
        total = ptx.floats(found[f"${2 * n + row}"])
        assert np.allclose(total, p[row::2].sum((0, 2)), rtol=2e-3)


def scores(kind: str) -> np.ndarray:
    s = RNG.normal(0, 3, (64, 32)).astype(np.float32)
    first_row, lane = np.arange(64)[:, None] % 4 < 2, np.arange(32) == 7
    return {
        "mixed": s,
        "negative": -abs(s),
        "one row negative": np.where(first_row, -abs(s), s),
        "one lane": np.where(lane, -abs(s), s),
        "masked": np.full_like(s, -np.inf),
        "partly": np.where(s < 2, -np.inf, s),
        "zeros": s * 0,
        "minus zero": np.where(s > 0, np.float32(-0.0), s),
    }[kind]


KINDS = ("mixed", "negative", "one row negative", "masked", "partly", "zeros", "one lane", "minus zero")


@pytest.mark.parametrize("kind", KINDS)
def test_maxima_by_three_are_those_of_the_rows(kind: str) -> None:
    s = scores(kind)
    found = ptx.run(fast.max_asm(128), {f"${64 + i}": ptx.of_floats(s[i]) for i in range(64)})
    rows = np.arange(64) % 4 // 2
    for row, element in ((0, 0), (1, 2)):
        assert np.array_equal(ptx.floats(found[f"${element}"]), s[rows == row].max(0))


def test_a_nan_of_a_product_goes_into_the_maximum() -> None:
    s = scores("mixed")
    s[4, 3] = np.nan
    found = ptx.run(fast.max_asm(128), {f"${64 + i}": ptx.of_floats(s[i]) for i in range(64)})
    assert np.isnan(ptx.floats(found["$0"])[3])
    assert not np.isnan(ptx.floats(found["$2"])).any()
