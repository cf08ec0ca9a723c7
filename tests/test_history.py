"""``flashbench history`` and its change points: found where they are, and not where they are not."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from judging import cell, written

from flashbench import cli
from flashbench._cli.history import sparkline
from flashbench.errors import EXIT_UNDECIDED, EXIT_USAGE
from flashbench.judge.changepoints import change_points, exact_changes, noise_of, partition, penalty_of


def found(logs: np.ndarray, assumed: float = 0.01) -> list[int]:
    return change_points(list(logs), noise_of(list(logs), assumed))


def history(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["history", *argv])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


@pytest.mark.parametrize("count", [4, 10, 30, 100])
def test_noise_alone_is_seldom_a_change(count: int) -> None:
    random = np.random.default_rng(7)
    for deviation in (0.003, 0.01):
        false = sum(bool(found(random.normal(0, deviation, count))) for _ in range(400))
        assert false <= 0.03 * 400, f"{false} of 400 series of {count} at {deviation}"


def test_a_step_is_found_where_it_is() -> None:
    random = np.random.default_rng(8)
    hits = 0
    for _ in range(200):
        logs = random.normal(0, 0.01, 40)
        logs[25:] += math.log(1.05)
        hits += any(abs(index - 25) <= 1 for index in found(logs))
    assert hits >= 0.98 * 200


def test_two_steps_are_two_and_one_odd_run_is_none() -> None:
    logs = np.tile([0.001, -0.001, 0.0], 10)
    logs[10:20] += 0.1
    assert found(logs, 0.002) == [10, 20]
    odd = np.tile([0.001, -0.001, 0.0], 10)
    odd[12] += 0.04
    assert found(odd) == []


def test_levels_are_the_best_of_all_cuts() -> None:
    """Against every way to cut a short series."""
    from itertools import combinations, pairwise

    random = np.random.default_rng(9)
    for _ in range(30):
        logs = random.normal(0, 1, 9) + np.repeat(random.normal(0, 3, 3), 3)

        def cost(cuts: tuple[int, ...], logs: np.ndarray = logs) -> float:
            edges = [0, *cuts, 9]
            parts = [logs[a:b] for a, b in pairwise(edges)]
            if min(map(len, parts)) < 2:
                return math.inf
            return sum(float(((part - part.mean()) ** 2).sum()) for part in parts) + penalty_of(9) * len(cuts)

        every = [cuts for size in range(4) for cuts in combinations(range(1, 9), size)]
        assert partition(logs) == list(min(every, key=cost))


def test_what_is_exact_changes_with_every_difference() -> None:
    assert exact_changes([3, 3, 4, 3, 3]) == [2, 3]
    assert exact_changes([0.0]) == []


def test_the_command_names_the_commit_and_what_else_changed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for number in range(12):
        slow = 1.08 if number >= 7 else 1.0
        jitter = 1 + 0.002 * math.sin(5 * number)
        written(
            tmp_path / f"{number:02}.jsonl", [cell(1e-3 * slow * jitter), cell(2e-3 * jitter, 2048)],
            git_commit=f"{number:040x}"[::-1], torch="2.11" if number >= 7 else "2.10",
        )  # fmt: skip
    code, out, _ = history(capsys, str(tmp_path), "--json")
    first, second = json.loads(out)
    assert (code, len(first["values"]), second["changes"]) == (0, 12, [])
    (change,) = first["changes"]
    assert (change["point"], change["versions"]) == (f"{7:040x}"[::-1][:12], ["torch: 2.10, 2.11 now"])
    assert change["worse"] == pytest.approx(0.08, abs=0.005)
    code, out, _ = history(capsys, str(tmp_path), "-q", "--cells", "*n1024*")
    assert "8.0% worse at 7000" in out
    assert "n2048" not in out
    assert json.loads(history(capsys, str(tmp_path), "--json", "--warn", "20%")[1])[0]["changes"] == []
    (rate, *_) = json.loads(history(capsys, str(tmp_path), "--json", "--metric", "flops_per_s")[1])
    assert rate["changes"][0]["worse"] > 0


def test_kept_baselines_are_points(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(3):
        path = written(tmp_path / f"{number}.jsonl", [cell((1 + number) * 1e-3)])
        with pytest.raises(SystemExit):
            cli.main(["baseline", "save", path, "--name", f"r{number}", "--commit", f"c{number}",
                      "--store", str(tmp_path / "store")])  # fmt: skip
    rows = json.loads(history(capsys, str(tmp_path / "store"), "--json")[1])
    assert (rows[0]["points"], rows[0]["values"]) == (["c0", "c1", "c2"], [1e-3, 2e-3, 3e-3])


@pytest.mark.parametrize("form", [[], ["--json"], ["--csv"]], ids=str)
def test_what_no_file_has_is_said_in_one_line(
    form: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for number in range(2):
        written(tmp_path / f"{number}.jsonl", [cell(1e-3)])
    page = tmp_path / "page.html"
    for asked, code, said in (
        (["--metric", "j_per_tflop"], EXIT_UNDECIDED,
         "--metric 'j_per_tflop': no cell of the files has a value of it; they have time_s, "),
        (["--metric", "time_s,j_per_tflop"], EXIT_UNDECIDED, "--metric 'j_per_tflop': no cell"),
        (["--cells", "*n99*"], EXIT_USAGE, "--cells '*n99*': matches no cell; accepted: a pattern"),
    ):  # fmt: skip
        found, out, err = history(capsys, str(tmp_path), "-q", *asked, *form, "--html", str(page))
        assert (found, out, page.exists()) == (code, "", False)
        assert err.startswith(f"error: {said}")
        assert err.count("\n") <= 2


def test_runs_without_any_number_are_said_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for number in range(2):
        written(
            tmp_path / f"{number}.jsonl",
            [replace(cell(1e-3), status="failed", reason="no luck", samples=None)],
        )
    code, out, err = history(capsys, str(tmp_path), "-q")
    assert (code, out) == (EXIT_UNDECIDED, "")
    assert err == "error: RUNS: nothing to draw; they have no cell that was measured\n"


def test_one_run_is_no_history(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [cell(1e-3)])
    code, _, err = history(capsys, path)
    assert (code, "one run is no history" in err) == (EXIT_USAGE, True)


def test_a_sparkline_spans_its_values() -> None:
    assert sparkline([1, 2, None, 8]) == "▁▂ █"
    assert sparkline([3, 3]) == "▁▁"
