"""Swapped sides have the swapped verdict: made-up sides at random, and pairs of runs of a card.

What a reader of one order would pass, a reader of the other must pass; only slower and faster, and missing
and new, change places.
"""

from __future__ import annotations

from collections import Counter
from itertools import combinations
from pathlib import Path

from hypothesis import example, given, settings
from hypothesis import strategies as st

from flashbench import judge
from flashbench.judge import MEASURES, Measured, Rules, Run, Side

NOISE = Path(__file__).parents[1] / "reports/h200-sxm/noise"
OTHER = {"slower": "faster", "faster": "slower", "missing": "new", "new": "missing"}


def side(runs: list[list[float]], measure: str) -> Side:
    """A side of runs of one cell."""
    made = []
    for number, samples in enumerate(runs):
        cell = Measured(samples=lambda name, values=samples: values if name == measure else ())
        made.append(Run(path=Path(str(number)), kind="made up", cells={"cell": cell}))
    return Side(name="side", runs=tuple(made))


def verdicts(base: Side, new: Side, measure: str, rules: Rules) -> dict[str, str]:
    return {one.cell: one.verdict for one in judge.compare(base, new, MEASURES[measure], rules).cells}


def swapped(base: Side, new: Side, measure: str, rules: Rules) -> dict[str, tuple[str, str]]:
    """Cells whose verdict is not that of swapped sides: the verdict, and that of the sides as they were."""
    one, other = verdicts(base, new, measure, rules), verdicts(new, base, measure, rules)
    return {key: (one[key], other[key]) for key in one if OTHER.get(one[key], one[key]) != other[key]}


@st.composite
def times(draw: st.DrawFn) -> tuple[list[list[float]], list[list[float]]]:
    """Two sides of one to three runs, some of whose medians lie near a floor of five microseconds apart."""
    level = draw(st.floats(min_value=20e-6, max_value=300e-6))
    apart = draw(st.floats(min_value=-8e-6, max_value=8e-6))
    scatter = draw(st.floats(min_value=0.0, max_value=0.05))

    def runs(middle: float) -> list[list[float]]:
        shifts = draw(st.lists(st.floats(min_value=-0.02, max_value=0.02), min_size=1, max_size=3))
        steps = [(index * 7 % 21 - 10) / 10 for index in range(21)]
        return [[middle * (1 + shift) * (1 + scatter * step) for step in steps] for shift in shifts]

    return runs(level), runs(max(level + apart, 1e-6))


FLAT = [[98e-6] * 21], [[99.5e-6] * 21]
"""1.5 microseconds apart; of the interval one end is beyond the floor of five, and the other is not."""


@settings(max_examples=200, deadline=None)
@given(times(), st.sampled_from(["time_s", "flops_per_s"]), st.sampled_from([0.003, 0.0127, 0.03]))
@example(FLAT, "time_s", 0.0127)
def test_swapped_sides_have_the_swapped_verdict(
    sides: tuple[list[list[float]], list[list[float]]], measure: str, noise: float
) -> None:
    base, new = (side(runs, measure) for runs in sides)
    assert not swapped(base, new, measure, Rules(noise=noise))


@given(
    st.integers(min_value=0, max_value=300), st.integers(min_value=0, max_value=300),
    st.sampled_from([0.0, 0.02, 0.039, 0.1, 0.5]),
    st.sampled_from(["registers_per_thread", "occupancy_percent"]),
)  # fmt: skip
@example(100, 104, 0.039, "registers_per_thread")
def test_swapped_exact_numbers_too(before: int, after: int, warn: float, measure: str) -> None:
    base, new = side([[float(before)]], measure), side([[float(after)]], measure)
    assert not swapped(base, new, measure, Rules(warn=warn, fail=0.6))


def test_swapped_runs_of_a_card_too() -> None:
    """Pairs of committed runs, equal ones and slowed ones."""
    runs = [
        NOISE / "20261129-121240/007-same",
        *(NOISE / "20261129-122448" / name for name in ("000-same", "001-slower-2", "004-slower-2")),
        NOISE / "20261129-122833/000-same",
    ]
    sides = [judge.load_side(str(path), "side") for path in runs]
    found, seen = {}, Counter[str]()
    for one, other in combinations(sides, 2):
        found |= swapped(one, other, "time_s", Rules())
        seen.update(verdicts(one, other, "time_s", Rules()).values())
    assert not found
    assert {"same", "undecided"} <= set(seen)
