"""How sure a ratio is: known shifts under known noise, in numbers large enough to see a wrong interval."""

from __future__ import annotations

import math
from dataclasses import replace

import judging
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench import judge
from flashbench.judge import Spread, bootstrap, groups, spread, student
from flashbench.judge.statistics import interval, together
from flashbench.judge.verdicts import Rules, weigh

WARN, FAIL, RATE = 0.02, 0.05, Rules().rate
STEADY = {"normal": judging.normal, "skewed": judging.skewed}
UNSTEADY = {"bimodal": judging.bimodal, "drifting": judging.drifting, "wandering": judging.wandering}


def at_least(share: float, wanted: float, trials: int) -> bool:
    """False where a share that low comes up less than once in a thousand if the truth is ``wanted``."""
    return share >= wanted - 3.1 * math.sqrt(wanted * (1 - wanted) / trials)


def verdicts(found: list[list[judge.Ratio]]) -> list[str]:
    """Verdicts as a comparison gives them, those that chance alone may give taken back."""
    named = []
    for row in found:
        stands = judge.false_discoveries([ratio.p for ratio in row], RATE)
        for ratio, stand in zip(row, stands, strict=True):
            verdict = weigh(ratio, False, WARN, FAIL)[0]
            named.append("undecided" if verdict in ("slower", "faster") and not stand else verdict)
    return named


def covered(noise: judging.Noise, runs: int, trials: int, shift: float) -> None:
    found = judging.ratios(noise, trials=trials, runs=runs, shift=shift)
    assert at_least(judging.coverage(found, shift), 0.94, trials)


@pytest.mark.parametrize("runs", [1, 3])
@pytest.mark.parametrize("noise", STEADY.values(), ids=STEADY)
def test_the_interval_covers_a_known_shift(noise: judging.Noise, runs: int) -> None:
    covered(noise, runs, 200, 1.03)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 2, 3, 5])
@pytest.mark.parametrize("shift", [1.0, 1.03])
@pytest.mark.parametrize("noise", STEADY.values(), ids=STEADY)
def test_the_interval_covers_known_shifts_in_many_trials(
    noise: judging.Noise, shift: float, runs: int
) -> None:
    covered(noise, runs, 1000, shift)


def held(noise: judging.Noise, runs: int, trials: int, shift: float) -> None:
    """Covered, or undecided; and false alarms in one of a hundred at most."""
    found = judging.ratios(noise, trials=trials, runs=runs, shift=shift)
    named = verdicts(found)
    every = [row[0] for row in found]
    right = [
        ratio.low <= shift <= ratio.high or verdict == "undecided"
        for ratio, verdict in zip(every, named, strict=True)
    ]
    assert at_least(sum(right) / trials, 0.94, trials)
    if shift == 1:
        assert at_least(1 - named.count("slower") / trials, 0.99, trials)
        assert at_least(1 - named.count("faster") / trials, 0.99, trials)


@pytest.mark.parametrize("noise", UNSTEADY.values(), ids=UNSTEADY)
def test_unsteady_samples_are_covered_or_undecided(noise: judging.Noise) -> None:
    held(noise, 1, 200, 1.0)


@pytest.mark.slow
@pytest.mark.parametrize("runs", [1, 2, 3, 5])
@pytest.mark.parametrize("shift", [1.0, 1.04])
@pytest.mark.parametrize("noise", UNSTEADY.values(), ids=UNSTEADY)
def test_unsteady_samples_are_covered_or_undecided_in_many_trials(
    noise: judging.Noise, shift: float, runs: int
) -> None:
    held(noise, runs, 1000, shift)


def power(trials: int, runs: int, common: float) -> None:
    """Cells slowed by 3 % among as many that were not: most are found, few of what is found is chance."""
    half = 10
    rows = judging.halves(trials=trials, runs=runs, half=half, shift=1.03, between=0.004, common=common)
    found = false = 0
    for row in rows:
        named = verdicts([row])
        found += named[:half].count("slower")
        false += named[half:].count("slower") + named[half:].count("faster")
    assert found / (trials * half) >= 0.95
    assert false <= RATE * found + 2


def test_three_runs_find_three_percent() -> None:
    power(8, 3, common=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("common", [0.0, 0.5])
def test_three_runs_find_three_percent_in_many_trials(common: float) -> None:
    power(60, 3, common)


@pytest.mark.slow
@pytest.mark.parametrize("common", [0.0, 0.5, 1.0])
def test_cells_of_one_run_are_not_many_witnesses(common: float) -> None:
    """Whatever cells share, intervals cover and false verdicts stay rare over the cells of a comparison."""
    found = judging.ratios(judging.normal, trials=150, runs=2, cells=20, common=common)
    assert at_least(judging.coverage(found, 1.0), 0.94, 150)  # at worst all cells of a trial are one
    wrong = [set(verdicts([row])) & {"slower", "faster"} for row in found]
    assert at_least(1 - sum(map(bool, wrong)) / 150, 1 - RATE, 150)


SHIFTING = {
    "2v1": ((2, 1), 0.015, 1.0, 0), "2v1, far": ((2, 1), 0.03, 1.0, 0), "2v2": ((2, 2), 0.015, 1.0, 0),
    "2v2, far": ((2, 2), 0.03, 1.0, 0), "2v1, most": ((2, 1), 0.015, 0.9, 0),
    "3v1": ((3, 1), 0.01, 1.0, 0), "3v1, half": ((3, 1), 0.01, 0.5, 0), "3v3": ((3, 3), 0.01, 1.0, 0),
    "3v3, half": ((3, 3), 0.01, 0.5, 0), "noisy cells": ((2, 2), 0.003, 0.0, 3),
    "noisy cells, 3v1": ((3, 1), 0.003, 0.0, 3),
}  # fmt: skip
"""By name: runs a side, spread between runs, share of it that is of all cells of a run, noisy cells."""


def shifting(name: str, trials: int) -> None:
    """Runs that shift as a whole, and nothing changed: verdicts, summary and intervals are held to it."""
    counts, between, common, noisy = SHIFTING[name]
    found = judging.compared(counts, between=between, common=common, noisy=noisy, trials=trials)
    ratios = [cell.ratio for one in found for cell in one.cells if cell.ratio]
    assert at_least(sum(ratio.low <= 1 <= ratio.high for ratio in ratios) / len(ratios), 0.94, trials)
    wrong = sum(one.count("slower") + one.count("faster") > 0 for one in found)
    assert at_least(1 - wrong / trials, 1 - RATE, trials)
    summed = [one.groups[0] for one in found]
    assert at_least(sum(one.ratio.low <= 1 <= one.ratio.high for one in summed) / trials, 0.94, trials)
    alarms = [one for one in summed if one.verdict in ("slower", "faster")]
    assert at_least(1 - len(alarms) / trials, 1 - RATE, trials)


@pytest.mark.parametrize("name", ["2v1", "2v1, far", "noisy cells"])
def test_runs_that_shift_as_a_whole_give_no_verdicts(name: str) -> None:
    shifting(name, 200)


@pytest.mark.slow
@pytest.mark.parametrize("name", SHIFTING)
def test_runs_that_shift_as_a_whole_give_no_verdicts_in_many_trials(name: str) -> None:
    shifting(name, 2000)


@pytest.mark.parametrize("common", [0.0, 0.5, 1.0])
def test_three_runs_a_side_find_three_percent_whatever_cells_share(common: float) -> None:
    found = judging.compared((3, 3), between=0.004, common=common, shift=1.03, trials=100)
    assert at_least(sum(one.count("slower") for one in found) / 1600, 0.95, 100)
    assert sum(one.groups[0].verdict == "slower" for one in found) >= 90


def test_a_few_samples_at_the_other_sides_level_are_said() -> None:
    """Base has two samples where new has nearly all: a run may stay at either level."""
    random = np.random.default_rng(1)
    low, high = (list(level * (1 + random.normal(0, 0.002, 60))) for level in (1.0, 1.04))
    base, new = judge.medians([low[:58] + high[:2]]), judge.medians([high])
    noise = Spread(0.005, math.inf)
    forth, back = judge.ratio_of(base, new, noise), judge.ratio_of(new, base, noise)
    assert "some of the base side's samples are 4." in forth.trouble
    assert "at the new side's level" in forth.trouble
    assert "some of the new side's samples" in back.trouble
    assert weigh(forth, False, WARN, FAIL)[0] == weigh(back, False, WARN, FAIL)[0] == "undecided"
    steady = judge.ratio_of(judge.medians([low]), new, noise)
    assert weigh(steady, False, WARN, FAIL)[0] == "slower"
    away = judge.medians([low[:58] + [1 / one for one in high[:2]]])  # as far off, the other way
    assert judge.ratio_of(away, new, noise).trouble == ""


@pytest.mark.slow
def test_levels_that_a_run_hardly_shows_give_few_verdicts() -> None:
    found = judging.ratios(judging.bimodal, trials=300, cells=16, between=0.006, count=60, seed=5)
    named = [set(verdicts([row])) & {"slower", "faster"} for row in found]
    assert at_least(1 - sum(map(bool, named)) / 300, 0.98, 300)
    every = [name for row in found for name in verdicts([row])]
    assert every.count("slower") + every.count("faster") <= 0.0025 * len(every)


def test_the_summary_says_what_it_may_be_sure_of() -> None:
    """An interval that holds no 1 may be chance one time in twenty; the verdict is one time in a hundred."""
    ratio = interval(0.03, Spread(0.0135, math.inf))
    assert (ratio.low > 1, 0.01 < ratio.p < 0.05) == (True, True)
    verdict, reason, _ = weigh(ratio, False, WARN, FAIL)
    assert (verdict, "chance alone may do that" in reason) == ("undecided", True)
    assert weigh(ratio, False, WARN, FAIL, rate=0.05)[0] == "slower"


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(1e-5, 1e-3), min_size=4, max_size=40),
    st.lists(st.floats(1e-5, 1e-3), min_size=4, max_size=40),
    st.floats(0.001, 0.05),
    st.booleans(),
)
def test_swapping_the_sides_turns_the_verdict_round(
    one: list[float], other: list[float], noise: float, higher: bool
) -> None:
    given_noise = Spread(noise, math.inf)
    base, new = judge.medians([one]), judge.medians([other])
    forth, back = judge.ratio_of(base, new, given_noise), judge.ratio_of(new, base, given_noise)
    assert forth.value * back.value == pytest.approx(1)
    assert forth.low * back.high == pytest.approx(1)
    assert (forth.error, forth.p) == (pytest.approx(back.error), pytest.approx(back.p))
    turned = {"slower": "faster", "faster": "slower", "same": "same", "undecided": "undecided"}
    assert weigh(back, higher, WARN, FAIL)[0] == turned[weigh(forth, higher, WARN, FAIL)[0]]


def test_chance_is_held_to_its_rate() -> None:
    """Of many cells without a change few stand, of cells with one nearly all."""
    random = np.random.default_rng(3)
    none = [student.two_sided(float(z), math.inf) for z in random.normal(0, 1, 300)]
    assert sum(judge.false_discoveries(none, 0.05)) <= 3
    real = [1e-9] * 20
    assert judge.false_discoveries(real + none, 0.05)[:20] == [True] * 20
    assert judge.false_discoveries([], 0.05) == []


def test_the_false_discovery_rate_is_held() -> None:
    """The share of wrong verdicts among all that stand, on average over many families: at most the rate."""
    random = np.random.default_rng(5)
    shares = []
    for _ in range(400):
        z = np.concatenate([random.normal(0, 1, 80), random.normal(4, 1, 20)])
        stand = judge.false_discoveries([student.two_sided(float(one), math.inf) for one in z], 0.05)
        shares.append(sum(stand[:80]) / max(sum(stand), 1))
    assert sum(shares) / len(shares) <= 0.05
    assert sum(shares) > 0


@pytest.mark.parametrize(
    ("df", "wanted"),
    [
        (1, 12.7062),
        (2, 4.30265),
        (3, 3.18245),
        (4, 2.77645),
        (10, 2.22814),
        (30, 2.04227),
        (math.inf, 1.95996),
    ],
)
def test_students_t_is_that_of_the_tables(df: float, wanted: float) -> None:
    assert student.quantile(0.95, df) == pytest.approx(wanted, rel=1e-5)
    assert student.two_sided(-wanted, df) == pytest.approx(0.05, rel=1e-4)


def test_the_interval_is_that_of_a_nested_bootstrap() -> None:
    """Resampling runs, then samples: its error is the closed form, but for the (n-1)/n of n runs."""
    random = np.random.default_rng(2)
    runs = [list(level * judging.normal(random, 60)) for level in np.exp(random.normal(0, 0.02, 6))]
    side = judge.medians(runs)
    values = np.array(runs)
    drawn = [
        np.mean([np.log(np.median(random.choice(values[at], 60))) for at in random.integers(0, 6, 6)])
        for _ in range(2000)
    ]
    between = np.var(side.logs, ddof=1)
    assert np.var(drawn) == pytest.approx(between * 5 / 6 / 6 + side.within / 6, rel=0.1)
    seen = judge.repeats({"cell": [side.logs]})
    assert seen.cells["cell"] == Spread(pytest.approx(math.sqrt(between)), 5.0)
    ratio = judge.ratio_of(side, side, seen.cells["cell"])
    assert ratio.error == pytest.approx(math.sqrt(2 * between / 6))
    assert math.log(ratio.high) == pytest.approx(2.570582 * ratio.error, rel=1e-5)  # t of 5 degrees


@pytest.mark.parametrize("count", [20, 40, 100])
@pytest.mark.parametrize("noise", STEADY.values(), ids=STEADY)
def test_steady_samples_pass_for_steady(noise: judging.Noise, count: int) -> None:
    random = np.random.default_rng(9)
    found = [bootstrap.shape(list(noise(random, count))) for _ in range(200)]
    assert sum(map(bool, found)) <= (0.15 if count == 20 else 0.05) * 200


def test_drift_and_two_levels_are_told_with_their_size() -> None:
    random = np.random.default_rng(4)
    ramp = (1 + 0.05 * np.linspace(0, 1, 60)) * (1 + random.normal(0, 0.002, 60))
    found = bootstrap.shape(list(ramp))
    assert found is not None
    assert (found.name, found.size) == ("drift", pytest.approx(0.75 * math.log(1.05), abs=0.006))
    levels = np.where(np.arange(60) % 2 == 0, 1.0, 1.06) + random.normal(0, 0.003, 60)
    found = bootstrap.shape(list(levels))
    assert found is not None
    assert (found.name, found.size) == ("two levels", pytest.approx(math.log(1.06), abs=0.003))
    assert bootstrap.shape([1.0, 1.001, 1.002]) is None
    few = bootstrap.shape([1.0, 1.0, 1.1])
    assert few == bootstrap.Shape("few", pytest.approx(math.log(1.1)))
    assert bootstrap.shape([1.0] * 40) is None


def test_runs_that_drift_alike_are_compared_as_they_are() -> None:
    """A chip that slows over every run moves both sides; one that drifts alone widens the interval."""
    random = np.random.default_rng(6)

    def run(slope: float) -> judge.Medians:
        steps = 1 + slope * np.linspace(0, 1, 60)
        return judge.medians([list(steps * (1 + random.normal(0, 0.001, 60)))])

    noise = Spread(0.005, math.inf)
    alike = judge.ratio_of(run(0.06), run(0.06), noise)
    assert (alike.trouble, alike.high < 1.02) == ("", True)
    apart = judge.ratio_of(run(0.0), run(0.06), noise)
    assert "drift apart by 4." in apart.trouble
    assert apart.extra == pytest.approx(0.75 * math.log(1.06), abs=0.004)


def test_parts_of_an_error_have_their_own_degrees() -> None:
    """Alone each keeps its own; together the shared one, with few, has the weight of a larger."""
    own, shared = Spread(0.01, 30.0), Spread(0.01, 2.0)
    assert together(own, judge.spread.NONE) == own
    assert together(Spread(0.0, 5.0), shared) == shared
    both = together(own, shared)
    assert both.deviation == pytest.approx(0.01 * math.sqrt(2))
    assert both.df < 0.7 * (0.5**2 / 2 + 0.5**2 / 30) ** -1  # Welch and Satterthwaite's
    assert both.df > shared.df
    known = together(Spread(0.01, 10.0), Spread(0.01, math.inf))
    assert known.df == pytest.approx(40.0)
    assert together(Spread(0.01, math.inf), Spread(0.01, math.inf)).df == math.inf


@pytest.mark.parametrize(
    ("df", "tenth"), [(1, 0.01579), (2, 0.21072), (4, 1.06362), (10, 4.86518), (30, 20.59923)]
)
def test_the_least_variance_is_that_of_the_tables(df: float, tenth: float) -> None:
    assert student.least_variance(0.1, df) * df == pytest.approx(tenth, rel=1e-3)


def test_spreads_are_drawn_together_as_far_as_cells_agree() -> None:
    random = np.random.default_rng(8)
    alike = judge.repeats({str(n): [random.normal(0, 0.01, 3), random.normal(0, 0.01, 3)] for n in range(40)})
    assert alike.correlation < 0.3
    found = judge.steadied(alike, [*map(str, range(40)), "never repeated"], 0.05)
    assert all(0.005 < one.own.deviation < 0.02 and one.own.df > 8 for one in found.values())
    assert found["never repeated"].own.deviation == pytest.approx(0.01, rel=0.25)
    assert found["0"].shared.deviation < 0.004
    shared = [random.normal(0, 0.01, 3), random.normal(0, 0.01, 3)]
    one = judge.repeats({str(n): shared for n in range(40)})
    assert one.correlation > 0.9
    copies = judge.steadied(one, ["0"], 0.05)["0"]  # forty copies are one witness
    assert (copies.own.deviation, copies.shared.df) == (pytest.approx(0.0, abs=1e-12), 4.0)
    assert copies.shared.deviation == pytest.approx(one.cells["0"].deviation)
    few = judge.repeats({"0": [[0.0, 0.01]]})
    assert judge.steadied(few, ["0", "1"], 0.05) == {
        "0": judge.Parts(Spread(pytest.approx(0.01 / math.sqrt(2)), 1.0)),
        "1": judge.Parts(Spread(0.05, math.inf)),
    }  # fmt: skip


def test_spreads_of_two_sources_are_pooled() -> None:
    one = judge.Repeats(cells={"a": Spread(0.01, 4.0)}, correlation=0.2)
    other = judge.Repeats(cells={"a": Spread(0.02, 4.0), "b": Spread(0.03, 2.0)}, correlation=0.6)
    both = one.joined(other)
    assert both.cells["a"] == Spread(pytest.approx(math.sqrt((0.01**2 + 0.02**2) / 2)), 8.0)
    assert (both.cells["b"], both.correlation) == (Spread(pytest.approx(0.03), 2.0), 0.6)


def test_parts_of_two_sources_are_pooled() -> None:
    """Runs of both sides and a profile: shared and own spreads add up as estimates of the same."""
    random = np.random.default_rng(2)
    levels = random.normal(0, 0.01, 5)
    profile = judge.repeats({str(n): [levels + random.normal(0, 0.002, 5)] for n in range(12)})
    assert profile.shared is not None
    assert profile.shared == Spread(pytest.approx(levels.std(ddof=1), rel=0.2), 4.0)
    few = judge.repeats({"0": [[0.0, 0.01]]})
    both = few.joined(profile)
    assert (both.shared is not None and both.shared.df, both.own["0"].df, both.own["1"].df) == (5.0, 5.0, 4.0)
    assert judge.Repeats().joined(profile).shared == profile.shared
    older = judge.Repeats(cells=profile.cells, correlation=profile.correlation)  # whose parts were not kept
    parts = [judge.steadied(one, ["0"], 0.05)["0"] for one in (profile, older)]
    assert parts[1].shared.deviation == pytest.approx(parts[0].shared.deviation, rel=0.2)
    assert parts[1].own.deviation == pytest.approx(parts[0].own.deviation, rel=0.5)


@pytest.mark.parametrize("x", [0.5, 1.0, 2.5, 7.0, 30.0])
def test_polygamma_are_the_derivatives_of_log_gamma(x: float) -> None:
    step = 1e-4
    slope = (math.lgamma(x + step) - math.lgamma(x - step)) / (2 * step)
    assert spread._digamma(x) == pytest.approx(slope, rel=1e-6, abs=1e-6)
    curve = (spread._digamma(x + step) - spread._digamma(x - step)) / (2 * step)
    assert spread._trigamma(x) == pytest.approx(curve, rel=1e-6)
    assert spread._inverse_trigamma(spread._trigamma(x)) == pytest.approx(x, rel=1e-6)


def test_the_summary_does_not_average_what_a_run_shares() -> None:
    """Twenty cells of runs that differ as a whole: the interval of their mean is as wide as those."""
    pairs = {}
    for index in range(20):
        sides = [
            judge.medians([[math.exp(one) * (1 + index)] for one in shared])
            for shared in ((0.0, 0.01, -0.01), (0.005, 0.015, -0.005))
        ]
        pairs[str(index)] = tuple(sides)
    cells = [judge.Judged(cell=key, verdict="same", reason="", groups={"pass": "fwd"}) for key in pairs]
    (mean,) = groups.means(cells, pairs, judge.Repeats(), 0.01, ("pass",))
    assert (mean.name, mean.cells) == ("all", 20)
    assert mean.ratio.value == pytest.approx(math.exp(0.005))
    assert mean.ratio.error == pytest.approx(0.01 * math.sqrt(2 / 3))
    one_run = {key: tuple(replace(side, logs=side.logs[:1], errors=(0.0,), shapes=(None,)) for side in pair)
               for key, pair in pairs.items()}  # fmt: skip
    (mean,) = groups.means(cells, one_run, judge.Repeats(), 0.01, ("pass",))
    assert mean.ratio.error == pytest.approx(0.01 * math.sqrt(2))
