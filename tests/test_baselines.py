"""``flashbench baseline`` and ``compare --baseline``: what is kept, what fits, what is refused."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from judging import cell, run, written

from flashbench import cli
from flashbench.errors import EXIT_GATE, EXIT_UNDECIDED, EXIT_UNREADABLE, EXIT_USAGE


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHBENCH_NOISE", str(tmp_path / "noise"))
    monkeypatch.setenv("FLASHBENCH_BASELINES", str(tmp_path / "store"))


def baseline(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["baseline", *argv])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


def test_every_option_of_every_subcommand_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("save", "list", "show", "promote"):
        code, out, _ = baseline(capsys, name, "--help")
        assert (code, "--store" in out, "--quiet" in out) == (0, True, True)
    code, _, err = baseline(capsys)
    assert (code, "missing command" in err) == (EXIT_USAGE, True)


def test_what_is_saved_is_found_by_device_and_environment(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same environment first, else the latest of the device, and the versions are told; no other card."""
    for number, (time_s, torch) in enumerate([(1e-3, "2.10"), (2e-3, "2.11")]):
        base = written(tmp_path / f"b{number}.jsonl", [cell(time_s)], torch=torch)
        assert baseline(capsys, "save", base, "-q")[0] == 0
    for torch, code in (("2.10", EXIT_GATE), ("2.11", 0), ("2.12", 0)):
        new = written(tmp_path / f"n{torch}.jsonl", [cell(2e-3)], torch=torch)
        found, _, err = run(capsys, new, "--baseline", "main")
        assert (found, "torch: 2.11 on the base side, 2.12" in err) == (code, torch == "2.12")
    other = written(tmp_path / "o.jsonl", [cell(2e-3)], torch="2.11", device_name="NVIDIA H200")
    code, _, err = run(capsys, other, "--baseline", "main")
    assert (code, "holds nothing of NVIDIA H200 (torch 2.11)" in err) == (EXIT_UNDECIDED, True)
    folder = next((tmp_path / "store").glob("main/*/torch-2.10"))
    assert run(capsys, str(tmp_path / "n2.10.jsonl"), "--baseline", str(folder))[0] == EXIT_GATE


def test_several_runs_are_kept_as_they_are_and_listed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    paths = [
        written(tmp_path / f"{n}.jsonl", [cell((1 + (n - 1) / 1e6) * 1e-3), cell(2e-3, 2048)])
        for n in range(3)
    ]
    code, _, err = baseline(capsys, "save", str(tmp_path / "*.jsonl"), "--name", "pr-7", "--commit", "abc")
    assert (code, "3 runs" in err) == (0, True)
    (row,) = json.loads(baseline(capsys, "list", "--json")[1])
    assert (row["name"], row["commit"], row["runs"]) == ("pr-7", "abc", 3)
    kept = sorted(Path(row["folder"]).glob("*.jsonl"))
    assert [path.read_text() for path in kept] == [Path(path).read_text() for path in paths]
    rows = json.loads(baseline(capsys, "show", "pr-7", "--json")[1])
    assert [row["value"] for row in rows if row["metric"] == "time_s"] == [1e-3, 2e-3]
    assert baseline(capsys, "save", paths[0], "--name", "pr-7")[0] == 0
    assert [path.name for path in Path(row["folder"]).glob("*.jsonl")] == ["results.jsonl"]


def test_promoting_replaces_the_same_key_and_leaves_others(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for name, time_s, device in (("main", 1e-3, "A"), ("main", 1e-3, "B"), ("pr", 2e-3, "A")):
        path = written(tmp_path / f"{name}{device}.jsonl", [cell(time_s)], device_name=device)
        assert baseline(capsys, "save", path, "--name", name, "-q")[0] == 0
    assert baseline(capsys, "promote", "pr")[0] == 0
    rows = json.loads(baseline(capsys, "show", "main", "--json", "-q")[1])
    assert {row["device"]: row["value"] for row in rows} == {"A": 2e-3, "B": 1e-3}
    assert baseline(capsys, "show", "pr", "-q")[0] == 0


STOPPED = """
import os, signal, statistics, sys
from pathlib import Path
from flashbench import baselines
from flashbench.judge import load_side

def stopping(one):
    def step(*args, **more):
        if next(steps, None) is None:
            os.kill(os.getpid(), number)
        return one(*args, **more)
    return step

root, old, new = Path(sys.argv[1]), load_side(sys.argv[2], "OLD"), load_side(sys.argv[3], "NEW")
number = getattr(signal, sys.argv[4])
signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
for count in range(30):
    baselines.save(old, root, "main", "old")
    if not (child := os.fork()):
        steps = iter(range(count))
        os.replace, os.unlink = stopping(os.replace), stopping(os.unlink)
        try:
            baselines.save(new, root, "main", "new")
        finally:
            os._exit(1 if sys.exc_info()[0] else 0)
    ended = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    [one] = baselines.entries(root)
    [cell] = one.side().runs[0].cells.values()
    baselines.save(new, root, "main", "new")
    left = sorted(path.name for path in root.rglob("*") if path.is_file())
    print(one.commit, statistics.median(cell.samples("time_s")), *left)
    if ended == 0:
        break
"""


@pytest.mark.parametrize("by", ["SIGTERM", "SIGKILL"])
def test_a_save_that_is_stopped_anywhere_leaves_the_old_or_the_new(tmp_path: Path, by: str) -> None:
    """And the next one leaves nothing else."""
    runs = [written(tmp_path / f"{n}.jsonl", [cell(n * 1e-3)]) for n in (1, 2)]
    command = [sys.executable, "-c", STOPPED, str(tmp_path / "store"), *runs, by]
    out = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    rows = [line.split() for line in out.splitlines()]
    found = [row[0] for row in rows]
    assert found == sorted(found, reverse=True)  # the old one to a point, the new one from there on
    assert set(found) == {"old", "new"}
    assert 5 < len(found) < 30
    for commit, time_s, *left in rows:
        assert float(time_s) == pytest.approx({"old": 1e-3, "new": 2e-3}[commit], rel=1e-3)
        assert left == ["baseline.json", "results.jsonl"]


def test_a_damaged_baseline_is_unreadable(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    new = written(tmp_path / "n.jsonl", [cell(1e-3)])
    assert baseline(capsys, "save", new)[0] == 0
    about = next((tmp_path / "store").rglob("baseline.json"))
    results = about.with_name("results.jsonl")
    text = results.read_text()
    results.write_text(text.replace("0.001", "0.002"))
    for argv in (("show", "main"), ("promote", "main", "other")):
        code, _, err = baseline(capsys, *argv)
        assert (code, "is not what was saved" in err) == (EXIT_UNREADABLE, True)
    assert run(capsys, new, "--baseline", "main")[0] == EXIT_UNREADABLE
    results.unlink()
    assert run(capsys, new, "--baseline", "main")[0] == EXIT_UNREADABLE
    for bad in ("[", "{}", '{"type":"baseline","schema":9}', about.read_text().replace("results", "../x")):
        about.write_text(bad)
        assert baseline(capsys, "list")[0] == EXIT_UNREADABLE


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["save", "RUN", "--name", "../x"], "name '../x'"),
        (["save", "RUN,OTHER"], "runs of one device and environment"),
        (["save", "nowhere.jsonl"], "nowhere.jsonl"),
        (["show", "nope"], "baseline 'nope' is not in"),
        (["promote", "nope"], "accepted: main"),
        (["promote", "main", "a/b"], "name 'a/b'"),
        (["save", "RUN", "--store", "/proc/none"], "accepted: a store that can be written"),
    ],
)
def test_bad_input_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, argv: list[str], says: str
) -> None:
    one = written(tmp_path / "n.jsonl", [cell(1e-3)])
    other = written(tmp_path / "o.jsonl", [cell(1e-3)], device_name="another")
    baseline(capsys, "save", one)
    code, out, err = baseline(capsys, *(word.replace("RUN", one).replace("OTHER", other) for word in argv))
    assert (code, out, says in err.splitlines()[0]) == (EXIT_USAGE, "", True), err


def test_a_comparison_has_one_base_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = written(tmp_path / "n.jsonl", [cell(1e-3)])
    for argv, says in (
        ([one], "NEW is missing"), ([one, one, "--store", "x"], "--store is of --baseline"),
        ([one, one, "--baseline", "main"], "is the base side"), ([one, "--baseline", "main"], "is not in"),
    ):  # fmt: skip
        code, _, err = run(capsys, *argv)
        assert (code, says in err.splitlines()[0]) == (EXIT_USAGE, True), err
