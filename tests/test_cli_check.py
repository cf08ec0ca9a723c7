"""``flashbench check`` compares every cell, shows what is wrong; having checked nothing is no success."""

from __future__ import annotations

import csv
import io
import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from tiers import tiers

from flashbench import runfile, runner, sweep
from flashbench._cli import check, worst
from flashbench.cli import main
from flashbench.record import Accuracy, Record

TINY = [
    "--device",
    "cpu",
    "--impls",
    "naive,sdpa",
    "--seqlens",
    "7,9",
    "--head-dims",
    "16",
    "--dtypes",
    "fp32",
]


def run(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["check", *argv])
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


def compared(**errors: float) -> Accuracy:
    return Accuracy(max_abs_error=errors, budget=dict.fromkeys(errors, 1e-3), query_rows=1, key_rows=1)


def outcomes(monkeypatch: pytest.MonkeyPatch, *wanted: dict[str, Any]) -> None:
    def fake(cells: Any, target: Any, options: Any, on_record: Callable[[Record], None], *_: Any) -> None:
        assert options.time is False
        for index, cell in enumerate(cells):
            on_record(Record(cell=cell, **wanted[index % len(wanted)]))

    monkeypatch.setattr(runner, "run_cells", fake)


RIGHT = {"status": "checked", "reason": "not timed", "accuracy": compared(o=5e-4)}
WRONG = {"status": "wrong", "reason": "o is off by 2", "accuracy": compared(o=2.0)}


def test_a_real_check_of_what_torch_brings(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([*TINY, "--passes", "fwd"], capsys)
    assert code == 0, out + err
    assert "error/budget" in out
    assert "16 cells: 16 checked" in err


def test_the_bundled_kernel_is_checked_by_default_through_the_interpreter() -> None:
    argv = "check --seqlens 7 --head-dims 16 --dtypes bf16 --passes fwd --device cpu --json"
    done = subprocess.run(
        [sys.executable, "-m", "flashbench", *argv.split()], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout)
    assert {row["implementation"] for row in rows} == {"flash"}
    assert {row["status"] for row in rows} == {"checked"}
    assert {row["num_kv_heads"] for row in rows} == {1, 2}
    assert {row["causal"] for row in rows} == {True, False}
    assert all(0 <= row["max_abs_error_o"] <= row["budget_o"] for row in rows)


def test_a_wrong_cell_is_shown_and_exits_5(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, RIGHT, RIGHT, RIGHT, WRONG)
    code, out, err = run(TINY, capsys)
    assert code == 5
    assert "o is off by 2" in out
    assert "error: 8 of 32 cells are wrong or failed" in err
    assert "2e+03" in out


@pytest.mark.parametrize(
    ("status", "expected"), [("unavailable", 3), ("unsupported", 6), ("skipped", 6), ("oom", 6)]
)
def test_having_checked_nothing_is_no_success(
    status: str, expected: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, {"status": status, "reason": "the reason"})
    code, _, err = run(TINY, capsys)
    assert code == expected
    assert "error: none of the 32 cells was checked: the reason" in err


def test_json_and_csv_have_a_row_per_cell(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    outcomes(monkeypatch, RIGHT, {"status": "unsupported", "reason": "no"})
    code, out, _ = run([*TINY, "--json", "--quiet"], capsys)
    rows = json.loads(out)
    assert code == 0
    assert len(rows) == 32
    assert rows[0]["max_error_ratio"] == 0.5
    assert rows[1]["max_abs_error_o"] is None
    _, out, _ = run([*TINY, "--csv", "--quiet"], capsys)
    assert [row["status"] for row in csv.DictReader(io.StringIO(out))] == ["checked", "unsupported"] * 16


def test_the_worst_cell_is_found_and_nan_is_the_worst_of_all() -> None:
    cells = sweep.sweep_of(sweep.defaults("cpu")).cells()[:3]
    errors = (1e-4, math.nan, 1e-2)
    records = [
        Record(cell=cell, status="wrong", reason="x", accuracy=compared(o=error, dq=1e-4))
        for cell, error in zip(cells, errors, strict=True)
    ]
    same = [Record(cell=cells[0], status="wrong", reason="x", accuracy=record.accuracy) for record in records]
    rows = worst.by_tensor(map(check.compared, same), check.TENSORS)
    by_tensor = {row["tensor"]: row for row in rows}
    assert by_tensor["o"]["cells"] == 3
    assert by_tensor["o"]["max_error_ratio"] == "nan"
    assert by_tensor["dq"]["max_error_ratio"] == "0.1"


@pytest.mark.parametrize("device_type", ["cuda", "cpu"])
def test_the_default_grid_covers_what_breaks_kernels(device_type: str) -> None:
    grid = sweep.parse(check.GRIDS[device_type], str, ("flash",))
    cells = sweep.sweep_of(grid).cells()
    problems = {cell.problem for cell in cells}
    assert {p.causal for p in problems} == {True, False}
    assert {p.group > 1 for p in problems} == {True, False}
    assert {p.dtype for p in problems} == {"fp16", "bf16", "fp32"}
    assert {cell.pass_ for cell in cells} == {"fwd", "bwd"}
    assert any(p.seqlen_q == 1 for p in problems)
    assert any(p.head_dim & (p.head_dim - 1) for p in problems), "a head dim that is no power of two"


def test_heads_alone_are_as_many_kv_heads() -> None:
    request = check.resolve({"heads": "5", "device": "cpu", "impls": "naive"})
    assert {cell.problem.num_kv_heads for cell in request.cells} == {5}


def test_out_keeps_each_cell_as_run_does_and_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, _, err = run([*TINY, "--passes", "fwd", "--out", str(out)], capsys)
    assert code == 0, err
    assert f"results: {out / 'results.jsonl'}" in err
    found = runfile.load(out / "results.jsonl")
    assert [record.cell.key for record in found.records] == found.header["cells"]
    assert len(found.records) == 16
    assert {record.status for record in found.records} == {"checked"}
    assert all(record.accuracy is not None for record in found.records)
    assert found.header["options"]["seqlens"] == "7,9"
    assert found.header["options"]["kv_heads"] == "1,2"

    before = (out / "results.jsonl").read_bytes()
    code, _, err = run([*TINY, "--out", str(out)], capsys)
    assert code == 2
    assert "accepted: a folder without results" in err
    assert "hint: name another folder" in err
    with pytest.raises(SystemExit) as stop:
        main(["run", "--device", "cpu", "--resume", "--out", str(out)])
    assert stop.value.code == 2
    assert "holds a check: nothing in it was timed" in capsys.readouterr().err
    assert (out / "results.jsonl").read_bytes() == before

    with pytest.raises(SystemExit) as stop:
        main(["report", str(out / "results.jsonl")])
    assert not stop.value.code
    assert (out / "report.html").stat().st_size > 10_000


def test_a_time_budget_leaves_the_rest_skipped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    code, _, err = run([*TINY, "--time-budget", "0.000001s", "--out", str(out)], capsys)
    assert code == 6
    assert "time budget of" in err
    records = runfile.load(out / "results.jsonl").records
    assert {record.status for record in records} == {"skipped"}
    assert not any(runfile.is_final(record) for record in records)


def test_ctrl_c_shows_what_was_checked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    stopped_after: list[Any] = [RIGHT, WRONG]

    def fake(cells: Any, target: Any, options: Any, on_record: Any, *_: Any) -> None:
        for cell, wanted in zip(cells, stopped_after, strict=False):
            on_record(Record(cell=cell, **wanted))
        raise KeyboardInterrupt

    monkeypatch.setattr(runner, "run_cells", fake)
    code, out, err = run(TINY, capsys)
    assert code == 130
    assert "error/budget" in out
    assert "o is off by 2" in out
    assert "warning: interrupted; 2 of 32 cells were checked, 1 are wrong or failed" in err
    code, out, _ = run([*TINY, "--json"], capsys)
    assert (code, [row["status"] for row in json.loads(out)]) == (130, ["checked", "wrong"])
    stopped_after.clear()
    code, out, err = run(TINY, capsys)
    assert (code, out) == (130, "")
    assert "interrupted; 0 of 32 cells" in err


@pytest.mark.parametrize(
    ("command", "number"),
    tiers(
        [("check", signal.SIGINT), ("run", signal.SIGTERM)],
        [("check", signal.SIGTERM), ("run", signal.SIGINT)],
    ),
)
def test_a_process_that_is_really_stopped_tells_and_keeps_what_it_did(
    command: str, number: signal.Signals, tmp_path: Path
) -> None:
    results = tmp_path / "out" / "results.jsonl"
    argv = [
        sys.executable, "-m", "flashbench", command, "--device", "cpu", "--impls", "naive",
        "--seqlens", "500-600+1", "--dtypes", "fp32", "--out", str(tmp_path / "out"),
    ]  # fmt: skip
    wide = {**os.environ, "COLUMNS": "300"}
    process = subprocess.Popen(
        argv,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=wide,
    )
    deadline = time.monotonic() + 240
    while not results.exists() or results.read_bytes().count(b"\n") < 4:
        assert time.monotonic() < deadline, "nothing was checked"
        assert process.poll() is None, "it was over before it could be stopped"
        time.sleep(0.01)
    process.send_signal(number)
    out, err = process.communicate(timeout=240)
    assert process.returncode == 130, err
    assert "Traceback" not in err
    found = runfile.load(results)
    assert not found.notes
    assert 3 <= len(found.records) < len(found.header["cells"])
    if command == "check":
        assert f"interrupted; {len(found.records)} of {len(found.header['cells'])} cells were checked" in err
        assert "error/budget" in out
    else:
        assert f"holds {len(found.records)} of" in err


def test_no_rows_are_a_shape_like_any_other(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--device", "cpu", "--impls", "naive", "--head-dims", "8", "--dtypes", "fp32"]
    for lengths in (["--seqlens", "0,3", "--seqlens-k", "0,2"], ["--varlen", "0,0"], ["--varlen", "0,3x0,2"]):
        code, _, error = run([*argv, *lengths], capsys)
        assert code == 0, error
