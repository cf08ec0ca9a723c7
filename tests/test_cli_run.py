"""``flashbench run``: layers of options, files kept whole, a result on stdout, honest exit codes."""

from __future__ import annotations

import csv
import io
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from flashbench import runfile, runner
from flashbench._cli import options
from flashbench._cli.run import folder_of, resolve
from flashbench._profilers import rounds
from flashbench.cli import main
from flashbench.errors import FlashbenchError, UsageError
from flashbench.record import Record, Samples

TINY = [
    "--device", "cpu", "--seqlens", "8,16", "--head-dims", "8", "--dtypes", "fp32", "--impls", "naive,sdpa",
    "--causal", "no", "--passes", "fwd,bwd", "--heads", "2", "--in-process",
]  # fmt: skip
RESULTS = Path("out/results.jsonl")


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def run(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``flashbench run``, in this process."""
    with pytest.raises(SystemExit) as stop:
        main(["run", *argv])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def outcomes(monkeypatch: pytest.MonkeyPatch, *wanted: dict[str, Any] | BaseException) -> list[Any]:
    """Replace the measuring by given outcomes, one per cell in turn; returns the calls seen."""
    seen: list[Any] = []

    def fake(
        cells: Any, target: Any, options: Any, on_record: Callable[[Record], None], *_: Any
    ) -> dict[str, float]:
        seen.append((cells, options))
        for index, cell in enumerate(cells):
            outcome = wanted[index % len(wanted)]
            if isinstance(outcome, BaseException):
                raise outcome
            on_record(Record(cell=cell, device_type="cpu", **outcome))
        return {"wall_s": 1.0, "precompile_s": 0.0}

    monkeypatch.setattr(runner, "run_cells", fake)
    return seen


OK = {"status": "ok", "samples": Samples(samples_s=(1e-3, 2e-3), cache="hot", method="wall")}
OOM = {"status": "oom", "reason": "out of memory"}


def test_a_real_run_leaves_results_and_a_report(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([*TINY, "--no-in-process", "--out", "out"], capsys)
    assert code == 0, err
    found = runfile.load(RESULTS)
    assert [record.cell.key for record in found.records] == found.header["cells"]
    assert {record.status for record in found.records} == {"ok"}
    assert found.header["argv"][0] == "flashbench"
    assert Path("out/report.html").stat().st_size > 10_000
    assert "naive" in out
    assert "FLOP/s" in out
    assert "report: out/report.html" in err
    assert "8 cells: 8 ok" in err
    assert "say nothing about a GPU" in err


def test_json_is_the_whole_table_and_strict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK, OOM)
    code, out, _ = run([*TINY, "--out", "out", "--json"], capsys)

    def refuse(constant: str) -> None:
        raise AssertionError(constant)

    rows = json.loads(out, parse_constant=refuse)
    assert code == 0
    assert [row["status"] for row in rows] == ["ok", "oom"] * 4
    assert rows[0]["time_s"] == 0.0015
    assert rows[1]["time_s"] is None
    assert rows[1]["reason"] == "out of memory"


def test_csv_has_units_in_its_names_only(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK, OOM)
    _, out, _ = run([*TINY, "--out", "out", "--csv"], capsys)
    rows = list(csv.DictReader(io.StringIO(out)))
    assert float(rows[0]["time_s"]) == 0.0015
    assert rows[1]["time_s"] == ""


def test_quiet_says_nothing(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes(monkeypatch, OK)
    assert run([*TINY, "--out", "out", "--quiet"], capsys) == (0, "", "")
    assert RESULTS.exists()


def test_verbose_has_a_line_per_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK, OOM)
    _, _, err = run([*TINY, "--out", "out", "--verbose"], capsys)
    assert "note: [1/8] naive fwd b1 h2 n8 d8 fp32 full: ok, 1.50 ms" in err
    assert "note: [2/8] sdpa fwd b1 h2 n8 d8 fp32 full: oom, out of memory" in err


@pytest.mark.parametrize("status", ["wrong", "failed"])
def test_wrong_or_failed_rows_are_kept_and_warned_of(
    status: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK, {"status": status, "reason": "o is off by 1"})
    code, out, err = run([*TINY, "--out", "out"], capsys)
    assert code == 0
    assert "warning: 4 of 8 cells are wrong or failed, first: sdpa fwd" in err
    assert status in out
    assert len(runfile.load(RESULTS).records) == 8
    assert Path("out/report.html").exists()


@pytest.mark.parametrize(("status", "wanted"), [("wrong", 5), ("failed", 5), ("oom", 0), ("timeout", 0)])
def test_strict_makes_wrong_and_failed_rows_a_failure(
    status: str, wanted: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK, {"status": status, "reason": "o is off by 1"})
    code, _, err = run([*TINY, "--out", "out", "--strict"], capsys)
    assert code == wanted
    assert ("error: 4 of 8 cells are wrong or failed, first: sdpa fwd" in err) == bool(wanted)
    assert len(runfile.load(RESULTS).records) == 8
    assert Path("out/report.html").exists()


@pytest.mark.parametrize("status", ["oom", "skipped", "unsupported", "timeout"])
def test_rows_that_could_not_run_do_not_fail_the_sweep(
    status: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, {"status": status, "reason": "the reason"})
    code, out, err = run([*TINY, "--out", "out"], capsys)
    assert code == 0
    assert status in out
    assert f"naive: 4 {status}: the reason" in err


def test_nothing_that_can_run_here_exits_3(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, {"status": "unavailable", "reason": "needs a GPU"})
    code, _, err = run([*TINY, "--out", "out"], capsys)
    assert code == 3
    assert "none of the 8 cells can run here: needs a GPU" in err


def test_ctrl_c_keeps_what_was_measured_and_says_how_to_go_on(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK, OK, OK, KeyboardInterrupt())
    code, out, err = run([*TINY, "--out", "out"], capsys)
    assert (code, out) == (130, "")
    assert "holds 3 of 8 cells" in err
    assert "'flashbench run --resume --out out' measures the rest" in err
    assert len(runfile.load(RESULTS).records) == 3

    seen = outcomes(monkeypatch, OK)
    code, _, err = run(["--device", "cpu", "--in-process", "--resume", "--out", "out"], capsys)
    assert code == 0, err
    assert [len(cells) for cells, _ in seen] == [5]
    assert [r.cell.key for r in runfile.load(RESULTS).records] == runfile.load(RESULTS).header["cells"]


def test_resume_takes_the_options_of_the_run_and_the_line_wins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK)
    run([*TINY, "--out", "out", "--seed", "7", "--batch", "3"], capsys)
    request = resolve({"resume": True, "out": "out", "seqlens": "32", "tokens": "64", "device": "cpu"}, None)
    assert {cell.problem.seqlen_q for cell in request.cells} == {32}
    assert {cell.problem.head_dim for cell in request.cells} == {8}
    assert {cell.problem.batch for cell in request.cells} == {2}
    assert request.values["seed"] == 7


def test_energy_is_kept_for_the_resumed_run(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK)
    run([*TINY, "--out", "out", "--no-energy"], capsys)
    assert json.loads(RESULTS.read_text().splitlines()[0])["options"]["energy"] is False
    assert not resolve({"resume": True, "out": "out", "device": "cpu"}, None).flag("energy")
    head, *rows = RESULTS.read_text().splitlines(keepends=True)
    with_energy = {**json.loads(head), "options": {**json.loads(head)["options"], "energy": True}}
    RESULTS.write_text(json.dumps(with_energy) + "\n" + "".join(rows))
    with pytest.raises(UsageError, match="--energy"):  # the file asks for it; a CPU has none
        resolve({"resume": True, "out": "out", "device": "cpu"}, None)
    assert not resolve({"resume": True, "out": "out", "device": "cpu", "energy": False}, None).flag("energy")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"timing": "clock"}, "--timing 'clock'"),
        ({"timing": "graph"}, "--timing 'graph': a CPU has neither; accepted on a CPU: auto, events"),
        ({"timing": "cupti"}, "--timing 'cupti': a CPU has neither; accepted on a CPU: auto, events"),
        ({"load": "heavy"}, "--load 'heavy'"),
        ({"cycles": True}, "--cycles: a CPU's clock is not read; accepted with a GPU"),
    ],
)
def test_ways_to_time_that_are_not_here_are_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(FlashbenchError) as refused:
        resolve({"device": "cpu", **options}, None)
    assert str(refused.value).startswith(said)


def test_a_run_says_how_it_timed_and_on_request_where_its_time_went(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "LEAD_S", 0.0)
    one = [*TINY, "--passes", "fwd", "--seqlens", "8"]  # the later of two counts
    code, out, err = run([*one, "--out", "out", "--timings", "--load", "sustained"], capsys)
    assert code == 0, err
    assert "wall time went to" in out
    found = runfile.load(RESULTS)
    assert (found.header["options"]["timing"], found.header["options"]["load"]) == ("auto", "sustained")
    assert found.header["overheads"] == {}
    assert [record.samples and record.samples.load for record in found.records] == ["sustained"] * 2
    assert found.timings[0]["wall_s"] > 0


@pytest.mark.parametrize("name", runfile.AFTERWARDS)
def test_what_rows_are_given_afterwards_is_kept_for_the_resumed_run_and_not_left_out(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK)
    again = {"resume": True, "out": "out", "device": "cpu"}
    run([*TINY, "--out", "out"], capsys)
    assert not resolve(again, None).flag(name)
    assert run([*TINY, "--out", "out", "--resume", f"--{name}"], capsys)[0] == 0  # from now on
    assert resolve(again, None).flag(name)
    before = RESULTS.read_bytes()
    code, out, err = run([*TINY, "--out", "out", "--resume", f"--no-{name}"], capsys)
    assert (code, out) == (2, "")
    assert f"was measured with --{name}; now it is --no-{name}" in err
    assert RESULTS.read_bytes() == before


def test_resume_under_other_conditions_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK)
    run([*TINY, "--out", "out", "--seed", "7"], capsys)
    before = RESULTS.read_bytes()
    code, out, err = run([*TINY, "--out", "out", "--seed", "8", "--resume"], capsys)
    assert (code, out) == (2, "")
    assert "seed" in err
    assert RESULTS.read_bytes() == before


def test_resume_with_nothing_there_begins(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK)
    assert run([*TINY, "--out", "out", "--resume"], capsys)[0] == 0
    assert len(runfile.load(RESULTS).records) == 8


def test_results_are_not_overwritten(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK)
    run([*TINY, "--out", "out"], capsys)
    before = RESULTS.read_bytes()
    code, _, err = run([*TINY, "--out", "out"], capsys)
    assert code == 2
    assert "hint: pass --resume to complete it, or name another folder" in err
    assert RESULTS.read_bytes() == before


def test_without_out_every_run_has_a_folder_of_its_own(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, OK)
    for _ in range(3):
        assert run(TINY, capsys)[0] == 0
    assert len(list(Path("flashbench-out").glob("*-cpu*/results.jsonl"))) == 3
    _, _, err = run(["--resume"], capsys)
    assert "hint: the latest here is --out flashbench-out/" in err
    there = [*Path("flashbench-out").glob("*/results.jsonl")]
    gone = Path("flashbench-out/gone/results.jsonl")  # between the listing of the folder and a look at it
    monkeypatch.setattr(Path, "glob", lambda *_: iter([gone, *there]))
    _, _, err = run(["--resume"], capsys)
    assert "hint: the latest here is --out flashbench-out/" in err


def test_a_folder_that_another_run_has_just_made_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Both begin in one second, and each before the other has written anything."""

    stopped = SimpleNamespace(now=lambda: datetime(2026, 1, 1))
    monkeypatch.setattr("flashbench._cli.run.datetime", stopped)
    with folder_of(None, "cpu") as one, folder_of(None, "cpu") as two:
        assert one.is_dir()
        assert two.is_dir()
        assert (one.name, two.name) == ("20260101-000000-cpu", "20260101-000000-cpu-2")
        (two / "results.jsonl").touch()
    assert not one.exists()
    assert two.exists()


def test_dry_run_runs_nothing_and_names_what_each_cell_needs(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = outcomes(monkeypatch, OK)
    code, out, err = run([*TINY, "--dry-run", "--out", "out"], capsys)
    assert code == 0
    assert out.count("b1 h2 n8 d8 fp32 full") == 4
    assert "8 cells" in err
    code, out, _ = run([*TINY, "--dry-run", "--json"], capsys)
    rows = json.loads(out)
    assert [row["implementation"] for row in rows] == ["naive", "sdpa"] * 4
    assert all(row["needs_bytes"] > 0 and row["expected_s"] > 0 for row in rows)
    assert all(row["seqlen_q"] in (8, 16) for row in rows)
    assert not seen
    assert not list(Path().iterdir())


def test_config_and_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("x.toml").write_text(
        "seqlens = [8]\nhead-dims = 8\ndtypes = 'fp32'\nimpls = ['naive']\ncausal = false\ntokens = 64\n"
        "device = 'cpu'\ndry_run = true\njson = true\n"
    )
    _, out, _ = run(["--config", "x.toml"], capsys)
    assert [(r["seqlen_q"], r["batch"]) for r in json.loads(out)] == [(8, 8), (8, 8)]
    _, out, _ = run(["--config", "x.toml", "--seqlens", "16", "--batch", "5", "--passes", "fwd"], capsys)
    assert [(r["seqlen_q"], r["batch"]) for r in json.loads(out)] == [(16, 5)]
    _, out, _ = run(["--config", "x.toml", "--csv"], capsys)
    assert out.startswith("implementation,")
    _, out, _ = run(["--config", "x.toml", "--no-json"], capsys)
    assert "naive" in out
    assert not out.startswith("[")


def test_some_options_on_a_cpu_leave_the_others_at_the_cpu_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(options, "settle", lambda *_: None)  # it would make this process an interpreter
    request = resolve({"seqlens": "16", "device": "cpu"}, None)
    assert {cell.implementation for cell in request.cells} == {"naive", "sdpa", "flash"}
    assert {cell.problem.batch for cell in request.cells} == {1}


def test_a_reader_that_goes_away_is_no_crash() -> None:
    argv = "run --dry-run --csv --device cpu --impls naive --seqlens 1-600+1"  # more than a pipe holds
    line = f"{sys.executable} -m flashbench {argv} | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "error" not in done.stderr
    assert done.stdout.splitlines()[1:] == ["141"]
