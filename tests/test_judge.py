"""One run against another: verdicts, their directions, and how often chance makes one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import synthetic
from judging import cell

from flashbench import judge
from flashbench.judge import MEASURES, Rules, Side, native
from flashbench.record import Record, Samples

TIME = MEASURES["time_s"]


def side(*runs: list[Record], name: str = "side", **header: object) -> Side:
    return Side(
        name=name, runs=tuple(native.run_of(synthetic.run_file(run, **header)) for run in runs)
    )  # fmt: skip


def verdict(base: float, new: float, rules: Rules | None = None, spread: float = 0.004) -> judge.Judged:
    one, other = side([cell(base, spread=spread)]), side([cell(new, spread=spread)])
    (found,) = judge.compare(one, other, TIME, rules or Rules()).cells
    return found


@pytest.mark.parametrize(
    ("base", "new", "rules", "wanted", "fails"),
    [
        (253.09e-6, 259.20e-6, Rules(), "undecided", False),  # 2.4 %: runs differ by as much
        (371.40e-6, 374.37e-6, Rules(), "same", False),  # 0.8 %
        (1e-3, 1.056e-3, Rules(fail=0.10), "slower", False),  # sure, and below the threshold
        (2e-6, 5e-6, Rules(), "same", False),  # three microseconds
        (2e-3, 2.5e-3, Rules(fail=0.10), "slower", True),
        (10e-3, 5e-3, Rules(), "faster", False),
        (1e-3, 1e-3, Rules(), "same", False),
    ],
)
def test_verdicts_on_time(base: float, new: float, rules: Rules, wanted: str, fails: bool) -> None:
    found = verdict(base, new, rules)
    assert (found.verdict, found.fails) == (wanted, fails)
    assert "95 % between" in found.reason
    assert ("check that it still does the same work" in found.reason) == (wanted == "faster")


def test_wide_samples_are_undecided_and_not_the_same() -> None:
    found = verdict(1e-3, 1.02e-3, spread=0.9)
    assert (found.verdict, found.fails) == ("undecided", False)
    assert "more samples" in found.reason


@pytest.mark.parametrize(
    ("metric", "base", "new", "wanted"),
    [
        ("flops_per_s", 1e-3, 0.83e-3, "faster"),  # 500 to 600: more is better
        ("flops_per_s", 0.83e-3, 1e-3, "slower"),
        ("peak_extra_bytes", 1.0, 1.2, "slower"),
        ("peak_extra_bytes", 1.2, 1.0, "faster"),
    ],
)
def test_each_metric_has_its_direction(metric: str, base: float, new: float, wanted: str) -> None:
    def made(factor: float) -> Record:
        row = cell(factor if metric == "flops_per_s" else 1e-3)
        memory = replace(row.memory, peak_extra_bytes=int(factor * 10**9)) if row.memory else None
        return replace(row, memory=memory)

    (found,) = judge.compare(side([made(base)]), side([made(new)]), MEASURES[metric], Rules()).cells
    assert found.verdict == wanted


def test_a_rate_that_falls_by_a_sixth_and_a_fifth_more_bytes_fail() -> None:
    """500 to 600 TFLOP/s passes, 600 to 500 fails; DRAM bytes are worse by the share that is more."""

    def judged(metric: str, base: Record, new: Record) -> judge.Judged:
        (found,) = judge.compare(side([base]), side([new]), MEASURES[metric], Rules()).cells
        return found

    def counted(count: int) -> Record:
        return replace(cell(1e-3), counters={"total": {"dram_read_bytes": count, "dram_write_bytes": 0}})

    up, down = (judged("flops_per_s", cell(a), cell(b)) for a, b in ((1.2e-3, 1e-3), (1e-3, 1.2e-3)))
    assert (up.verdict, up.fails) == ("faster", False)
    assert (down.verdict, down.fails, down.change) == ("slower", True, pytest.approx(1 / 6, abs=1e-3))
    more = judged("counted_dram_read_bytes", counted(10**9), counted(12 * 10**8))
    assert (more.verdict, more.fails, more.change) == ("slower", True, pytest.approx(0.2))


def test_missing_new_and_failed_cells_are_named() -> None:
    failed = replace(cell(1e-3, 4096), status="oom", reason="no room", samples=None)
    base = side([cell(1e-3, 1024), cell(1e-3, 2048), cell(1e-3, 4096)])
    new = side([cell(1e-3, 1024), failed, cell(1e-3, 8192)])
    cells = judge.compare(base, new, TIME, Rules()).cells
    found = {one.cell.split(" n")[1].split()[0]: one for one in cells}
    assert {n: c.verdict for n, c in found.items()} == {
        "1024": "same", "2048": "missing", "4096": "failed", "8192": "new"
    }  # fmt: skip
    assert "oom: no room" in found["4096"].reason


def test_several_runs_tell_how_far_runs_differ() -> None:
    """The same 4 %: sure where runs agree, undecided where they differ as much among themselves."""
    steady = side(*[[cell(t)] for t in (1.0e-3, 1.001e-3, 0.999e-3)])
    slower = side(*[[cell(t)] for t in (1.04e-3, 1.041e-3, 1.039e-3)])
    (found,) = judge.compare(steady, slower, TIME, Rules()).cells
    assert found.verdict == "slower"
    loose = side(*[[cell(t)] for t in (0.93e-3, 1.0e-3, 1.07e-3)])
    (found,) = judge.compare(loose, slower, TIME, Rules()).cells
    assert found.verdict == "undecided"


@pytest.mark.parametrize("bad", [0.0, -1e-3, float("nan"), float("inf")])
@pytest.mark.parametrize("broken", ["base", "new", "both"])
def test_a_time_that_is_none_is_named_and_not_divided_by(bad: float, broken: str) -> None:
    samples = Samples(samples_s=(bad,) * 5, cache="cold", method="events")
    wrong = replace(cell(1e-3), samples=samples)
    base = side([wrong if broken != "new" else cell(1e-3)])
    new = side([wrong if broken != "base" else cell(1e-3)])
    comparison = judge.compare(base, new, TIME, Rules())
    (found,) = comparison.cells
    assert (found.verdict, found.ratio, comparison.groups) == ("incomparable", None, ())
    assert "zero, negative or no number on the" in found.reason


def test_suspect_times_are_kept_out_unless_allowed() -> None:
    doubtful = replace(cell(1e-3), flags=("suspect",))
    comparison = judge.compare(side([cell(1e-3)]), side([doubtful]), TIME, Rules())
    assert (comparison.cells[0].verdict, comparison.groups) == ("incomparable", ())
    assert "suspect on the new side" in comparison.cells[0].reason
    allowed = Rules(allowed=frozenset({"suspect"}))
    assert judge.compare(side([cell(1e-3)]), side([doubtful]), TIME, allowed).cells[0].verdict == "same"


def test_a_cell_that_was_timed_another_way_is_incomparable_by_itself() -> None:
    graph = Samples(samples_s=(1e-3,) * 5, cache="cold", method="graph")
    base = side([cell(1e-3), replace(cell(1e-3, 2048), samples=graph)])
    new = side([replace(cell(1e-3), samples=graph), cell(1e-3, 2048)])
    assert judge.unlike(base, new) == {}  # both sides use both
    found = judge.compare(base, new, TIME, Rules()).cells
    assert [one.verdict for one in found] == ["incomparable"] * 2
    assert {one.reason for one in found} == {
        "method is events on the base side and graph on the new one",
        "method is graph on the base side and events on the new one",
    }
    allowed = Rules(allowed=frozenset({"method"}))
    assert [one.verdict for one in judge.compare(base, new, TIME, allowed).cells] == ["same"] * 2


def made(**numbers: float) -> Side:
    """A side with one kernel's exact numbers."""
    cell = judge.Measured(samples=lambda name: [numbers[name]] if name in numbers else [])
    return Side(name="side", runs=(judge.Run(path=Path("x"), kind="static", cells={"kernel": cell}),))


@pytest.mark.parametrize(
    ("measure", "base", "new", "wanted"),
    [
        ("spill_stored_bytes_per_thread", 0, 8, ("slower", True)),  # nothing to divide by, and a regression
        ("spill_stored_bytes_per_thread", 8, 0, ("faster", False)),
        ("spill_stored_bytes_per_thread", 0, 0, ("same", False)),
        ("registers_per_thread", 168, 169, ("slower", True)),  # 0.6 %
        ("occupancy_percent", 50.0, 25.0, ("slower", True)),
        ("block_k", 128, 64, ("slower", True)),
        ("block_k", 64, 128, ("slower", True)),  # neither is better: a change is to be looked at
        ("ldg_instructions", 96, 97, ("slower", True)),
        ("traced_read_bytes", 2**30, 2**30 + 2, ("slower", True)),
        ("traced_read_bytes", 2**30, 2**30 - 2, ("faster", False)),
    ],
)
def test_exact_numbers_count_to_the_last_unit(
    measure: str, base: float, new: float, wanted: tuple[str, bool]
) -> None:
    (found,) = judge.compare(
        made(**{measure: base}), made(**{measure: new}), MEASURES[measure], Rules()
    ).cells
    assert (found.verdict, found.fails) == wanted
    assert f"{new:.15g}" in found.reason or wanted[0] == "same"


def test_exact_numbers_take_thresholds_too() -> None:
    base, new = made(registers_per_thread=100), made(registers_per_thread=104)
    measure = MEASURES["registers_per_thread"]
    for rules, wanted in (
        (Rules(warn=0.05, fail=0.05), ("same", False)),
        (Rules(warn=0.02, fail=0.05), ("slower", False)),
        (Rules(fail=0.03, warn=0.0), ("slower", True)),
    ):
        (found,) = judge.compare(base, new, measure, rules).cells
        assert (found.verdict, found.fails) == wanted


@pytest.mark.parametrize(
    ("measure", "rules", "wanted"),
    [
        ("time_s", Rules(), (0.02, 0.05, 5e-6)),
        ("time_s", Rules(fail=0.01), (0.01, 0.01, 5e-6)),
        ("time_s", Rules(fail=0.0), (0.0, 0.0, 5e-6)),
        ("time_s", Rules(warn=0.08), (0.08, 0.08, 5e-6)),
        ("time_s", Rules(warn=0.01, fail=0.2, floor=0.0), (0.01, 0.2, 0.0)),
        ("peak_extra_bytes", Rules(), (0.02, 0.05, 2**20)),
        ("registers_per_thread", Rules(fail=0.1), (0.0, 0.1, 0.0)),  # still tells of one register
    ],
)
def test_thresholds_that_are_not_given_follow_the_others(
    measure: str, rules: Rules, wanted: tuple[float, float, float]
) -> None:
    assert rules.of(MEASURES[measure]) == wanted


def test_instruction_classes_are_those_of_the_static_profile() -> None:
    from flashbench._profilers import sass
    from flashbench.judge import measures

    assert tuple(sass.CLASSES) == measures.INSTRUCTIONS


def test_a_profile_says_how_far_single_runs_differ() -> None:
    """The same 4 %, one run a side: sure on a device that repeats to 0.3 %, undecided on one of 3 %."""
    base, new = side([cell(1e-3, spread=0.001)]), side([cell(1.04e-3, spread=0.001)])
    key = base.keys[0]
    for deviation, wanted in ((0.003, "slower"), (0.03, "undecided")):
        seen = judge.Repeats(cells={key: judge.Spread(deviation, 9.0)})
        (found,) = judge.compare(base, new, TIME, Rules(profile=seen)).cells
        assert found.verdict == wanted


def test_groups_have_their_own_mean() -> None:
    base = side([cell(1e-3), cell(1e-3, 2048), cell(1e-3, pass_="bwd"), cell(1e-3, 2048, pass_="bwd")])
    new = side([cell(1.1e-3), cell(1.1e-3, 2048), cell(1e-3, pass_="bwd"), cell(1e-3, 2048, pass_="bwd")])
    groups = judge.compare(base, new, TIME, Rules(), by=("pass",)).groups
    assert {one.name: (one.cells, round(one.ratio.value, 4)) for one in groups} == {
        "all": (4, 1.0488), "bwd": (2, 1.0), "fwd": (2, 1.1)
    }  # fmt: skip
    assert all(one.ratio.low < one.ratio.value < one.ratio.high for one in groups)
