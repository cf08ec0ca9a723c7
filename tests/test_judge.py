"""One run against another: verdicts, their directions, and how often chance makes one."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import synthetic
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench import cli, judge, runfile
from flashbench.errors import EXIT_GATE, EXIT_UNDECIDED, EXIT_USAGE
from flashbench.judge import Rules, Side
from flashbench.metrics import METRICS
from flashbench.record import Record, Samples

METRIC = {metric.name: metric for metric in METRICS}


def cell(time_s: float, seqlen: int = 1024, spread: float = 0.004, **changes: object) -> Record:
    """A row whose samples lie evenly around time_s."""
    row = synthetic.record("flash", seqlen, **changes)
    steps = [time_s * (1 + spread * (index - 10) / 10) for index in range(21)]
    return replace(row, samples=Samples(samples_s=tuple(steps), cache="cold", method="events"))


def side(*runs: list[Record], **header: object) -> Side:
    files = tuple(synthetic.run_file(run, **header) for run in runs)
    records: dict[str, list[Record]] = {}
    for file in files:
        for record in file.records:
            records.setdefault(record.cell.key, []).append(record)
    return Side(name="side", files=files, records={key: tuple(rows) for key, rows in records.items()})


def verdict(base: float, new: float, rules: Rules | None = None, spread: float = 0.004) -> judge.Judged:
    one, other = side([cell(base, spread=spread)]), side([cell(new, spread=spread)])
    (found,) = judge.compare(one, other, METRIC["time_s"], rules or Rules()).cells
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

    (found,) = judge.compare(side([made(base)]), side([made(new)]), METRIC[metric], Rules()).cells
    assert found.verdict == wanted


def test_missing_new_and_failed_cells_are_named() -> None:
    failed = replace(cell(1e-3, 4096), status="oom", reason="no room", samples=None)
    base = side([cell(1e-3, 1024), cell(1e-3, 2048), cell(1e-3, 4096)])
    new = side([cell(1e-3, 1024), failed, cell(1e-3, 8192)])
    found = {
        c.cell.split(" n")[1].split()[0]: c for c in judge.compare(base, new, METRIC["time_s"], Rules()).cells
    }
    assert {n: c.verdict for n, c in found.items()} == {
        "1024": "same", "2048": "missing", "4096": "missing", "8192": "new"
    }  # fmt: skip
    assert "oom: no room" in found["4096"].reason


def test_several_runs_tell_how_far_runs_differ() -> None:
    """The same 4 %: sure where runs agree, undecided where they differ by as much among themselves."""
    steady = side(*[[cell(t)] for t in (1.0e-3, 1.001e-3, 0.999e-3)])
    slower = side(*[[cell(t)] for t in (1.04e-3, 1.041e-3, 1.039e-3)])
    (found,) = judge.compare(steady, slower, METRIC["time_s"], Rules()).cells
    assert found.verdict == "slower"
    loose = side(*[[cell(t)] for t in (0.93e-3, 1.0e-3, 1.07e-3)])
    (found,) = judge.compare(loose, slower, METRIC["time_s"], Rules()).cells
    assert found.verdict == "undecided"


@settings(max_examples=50, deadline=None)
@given(st.floats(1e-5, 1e-1), st.floats(0.5, 2.0), st.floats(0.0, 0.2))
def test_swapping_the_sides_turns_the_verdict_round(base: float, factor: float, spread: float) -> None:
    one, other = [[base * (1 + spread * i / 20) for i in range(21)]], [[base * factor] * 5]
    forth, back = judge.ratio_of(one, other, 0.01), judge.ratio_of(other, one, 0.01)
    assert forth.value * back.value == pytest.approx(1)
    assert forth.error == pytest.approx(back.error, rel=0.2)
    assert forth.p == pytest.approx(back.p, abs=0.05)


@pytest.mark.parametrize("skewed", [False, True])
def test_the_interval_covers_a_known_shift(skewed: bool) -> None:
    """Runs that differ by the noise that is assumed, samples with normal or skewed noise: 94 % or more."""
    random = np.random.default_rng(7)
    noise, shift, inside, trials = 0.01, 1.03, 0, 400
    for _ in range(trials):
        sides = []
        for middle in (1.0, shift):
            run = middle * math.exp(random.normal(0, noise))
            grain = (
                random.exponential(0.02, 40) - 0.02 * math.log(2) if skewed else random.normal(0, 0.02, 40)
            )
            sides.append([list(run * (1 + grain))])
        found = judge.ratio_of(*sides, noise)
        inside += found.low <= shift <= found.high
    assert inside >= 0.94 * trials - 3 * math.sqrt(trials * 0.94 * 0.06) / 2


def test_chance_is_held_to_its_rate() -> None:
    """Of many cells without a change few stand, of cells with one nearly all."""
    random = np.random.default_rng(3)
    none = [0.5 * math.erfc(abs(z) / math.sqrt(2)) for z in random.normal(0, 1, 300)]
    assert sum(judge.false_discoveries(none, 0.05)) <= 3
    real = [1e-9] * 20
    assert judge.false_discoveries(real + none, 0.05)[:20] == [True] * 20
    assert judge.false_discoveries([], 0.05) == []


def written(path: Path, records: list[Record], **environment: object) -> str:
    head = runfile.header(argv=[], options={}, cells=[r.cell for r in records],
                          environment={"device_name": synthetic.H100, **environment})  # fmt: skip
    with runfile.create(path, head) as writer:
        for record in records:
            writer.append(record)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["compare", *argv])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


def test_the_command_and_its_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = written(tmp_path / "base.jsonl", [cell(1e-3), cell(2e-3, 2048), cell(3e-3, 4096)])
    same = written(
        tmp_path / "same.jsonl", [cell(1.001e-3), cell(2e-3, 2048), cell(3e-3, 4096), cell(1e-3, 8192)]
    )
    worse = written(tmp_path / "worse.jsonl", [cell(1.2e-3), cell(1.5e-3, 2048), cell(3e-3, 4096)])
    fewer = written(tmp_path / "fewer.jsonl", [cell(1e-3)])
    code, _, err = run(capsys, base, same)
    assert (code, "1 new" in err) == (0, True)
    code, out, err = run(capsys, base, worse)
    assert (code, out.index("slower") < out.index("faster")) == (EXIT_GATE, True)
    assert "1 of 3 cells are worse by more than 5%" in err
    code, _, err = run(capsys, base, fewer)
    assert (code, "2 cells are missing" in err) == (EXIT_UNDECIDED, True)
    assert run(capsys, base, fewer, "--allow", "missing")[0] == 0
    code, out, _ = run(capsys, base, worse, "--json")
    assert [row["verdict"] for row in json.loads(out)] == ["slower", "faster", "same"]
    code, out, _ = run(capsys, base, worse, "--markdown", "-q")
    assert "| slower (fails) | `flash fwd" in out
    several = [f"{base},{same}", str(tmp_path / "wor*.jsonl")]
    assert run(capsys, *several, "--fail", "30%", "--warn", "25%", "--allow", "missing")[0] == 0


def test_unlike_runs_are_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = written(tmp_path / "a.jsonl", [cell(1e-3)], power_limit_w=700)
    hot = Samples(samples_s=(1e-3,) * 5, cache="hot", method="events")
    other = written(
        tmp_path / "b.jsonl", [replace(cell(1e-3), samples=hot)], device_name="NVIDIA H200", power_limit_w=600
    )
    code, out, err = run(capsys, base, other)
    assert (code, out) == (EXIT_UNDECIDED, "")
    for text in (
        "device is NVIDIA H100",
        "NVIDIA H200",
        "cache is cold",
        "power_limit is 700 W",
        "--allow device",
    ):
        assert text in err
    assert run(capsys, base, other, "--allow", "device,cache,power_limit")[0] == 0
    nothing = written(tmp_path / "c.jsonl", [cell(1e-3, 8192)], power_limit_w=700)
    code, _, err = run(capsys, base, nothing)
    assert (code, "no cell in common" in err) == (EXIT_UNDECIDED, True)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--metric", "nope"], "metric 'nope' is not known"),
        (["--metric", "flops"], "neither more nor less"),
        (["--fail", "1%"], "--fail '1%' is below --warn"),
        (["--warn", "x"], "--warn 'x'"),
        (["--noise", "200%"], "--noise '200%'"),
        (["--floor", "-1"], "--floor '-1'"),
        (["--allow", "all"], "--allow 'all'"),
        (["--fail-on", "faster"], "--fail-on 'faster'"),
        (["--json", "--markdown"], "--markdown excludes"),
    ],
)
def test_bad_options_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: list[str], says: str
) -> None:
    path = written(tmp_path / "a.jsonl", [cell(1e-3)])
    code, out, err = run(capsys, path, path, *more)
    assert (code, out) == (EXIT_USAGE, "")
    assert says in err.splitlines()[0]


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "nowhere.jsonl", "nowhere.jsonl")
    assert (code, "nowhere.jsonl" in err) == (EXIT_USAGE, True)
