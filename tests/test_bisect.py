"""``flashbench bisect``: the exit codes that ``git bisect run`` wants, by a real bisection too."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import processes
import pytest
from gates import ROOT
from judging import cell, written

from flashbench import cli, judge
from flashbench.errors import UsageError

GOOD, BAD, SKIP, ABORT = 0, 1, 125, 128


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHBENCH_NOISE", str(tmp_path / "noise"))


def bisect(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main(["bisect", *argv])
    return int(stop.value.code or 0)


def test_good_bad_and_what_cannot_be_told(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    base = written(tmp_path / "base.jsonl", [cell(1e-3)])
    same = written(tmp_path / "same.jsonl", [cell(1.001e-3)])
    worse = written(tmp_path / "worse.jsonl", [cell(1.2e-3)])
    other = written(tmp_path / "other.jsonl", [cell(1e-3)], device_name="another card")
    failed = written(tmp_path / "failed.jsonl", [cell(1e-3, 8192)])
    (tmp_path / "text.jsonl").write_text("no results")

    def tried(*command: str) -> int:
        return bisect("--base", base, "--", *command)

    assert tried("cp", same, "{out}/results.jsonl") == GOOD
    assert tried("cp", worse, "{out}/results.jsonl") == BAD
    assert bisect("--base", base, "--fail", "30%", "--", "cp", worse, "{out}/results.jsonl") == GOOD
    assert bisect("--base", base, "--runs", "3", "--", "cp", worse, "{out}/results.jsonl") == BAD
    for command in (
        ("cp", other, "{out}/r.jsonl"), ("cp", failed, "{out}/r.jsonl"), ("false", "{out}"),
        ("true", "{out}"),
        ("cp", str(tmp_path / "text.jsonl"), "{out}/r.jsonl"), (str(tmp_path / "nothing"), "{out}"),
    ):  # fmt: skip
        assert tried(*command) == SKIP, command
    assert "ended with exit code 1; this commit is skipped" in capfd.readouterr().err


def test_a_wrong_command_line_ends_the_search(tmp_path: Path) -> None:
    base = written(tmp_path / "base.jsonl", [cell(1e-3)])
    for argv in (
        ["--base", base, "--", "true"], ["--", "true", "{out}"], ["--bse", base, "--", "true", "{out}"],
        ["--base", "nowhere.jsonl", "--", "true", "{out}"], ["--base", base],
        ["--baseline", "nowhere", "--", "true", "{out}"],
        ["--base", base, "--baseline", "x", "--", "true", "{out}"],
        ["--base", base, "--metric", "nope", "--", "true", "{out}"],
    ):  # fmt: skip
        assert bisect(*argv) == ABORT, argv


def test_git_finds_the_commit(tmp_path: Path) -> None:
    """Eight commits, the sixth slower, the fourth broken."""
    repository = tmp_path / "repository"
    repository.mkdir()

    def git(*argv: str) -> str:
        named = ("-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false")
        done = subprocess.run(
            ["git", *named, *argv], cwd=repository, capture_output=True, text=True, check=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "FLASHBENCH_NOISE": str(tmp_path / "noise")},
        )  # fmt: skip
        return done.stdout

    base = written(tmp_path / "base.jsonl", [cell(1e-3)])
    git("init", "-q")
    commits = []
    for number in range(8):
        path = repository / "results.jsonl"
        path.unlink(missing_ok=True)
        written(path, [cell(1e-3 * (1.1 if number >= 5 else 1.0) + number * 1e-9)])
        if number == 3:
            path.write_text("broken")
        git("add", ".")
        git("commit", "-q", "-m", str(number))
        commits.append(git("rev-parse", "HEAD").strip())
    git("bisect", "start", commits[-1], commits[0])
    command = [sys.executable, "-m", "flashbench", "bisect", "--base", base, "--"]
    out = git("bisect", "run", *command, "cp", "results.jsonl", "{out}/results.jsonl")
    assert f"{commits[5]} is the first bad commit" in out


def test_without_a_temporary_folder_no_commit_is_blamed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    base = written(tmp_path / "base.jsonl", [cell(1e-3)])
    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert bisect("--base", base, "--", "cp", base, "{out}/r.jsonl") == ABORT
    assert capsys.readouterr().err == (
        "error: no temporary folder can be written: No usable temporary directory found in ['/tmp']\n"
        "hint: export TMPDIR=DIR, a folder that can be written\n"
    )
    with pytest.raises(SystemExit) as stop:
        cli.main(["ring", "--device", "cpu", "--seqlens", "64"])
    assert stop.value.code == 3
    assert "no temporary folder can be written" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ZeroDivisionError(), SKIP), (OSError("a socket's"), SKIP), (SystemExit(7), ABORT),
        (SystemExit("bye"), ABORT), (UsageError("x"), ABORT), (KeyboardInterrupt(), 130),
        (RuntimeError("can't start new thread"), ABORT),
    ],
)  # fmt: skip
@pytest.mark.parametrize("flags", [[], ["--debug"]])
def test_a_crash_of_any_part_is_no_verdict(
    error: BaseException, code: int, flags: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crash(*_: object) -> None:
        raise error

    monkeypatch.setattr(judge, "load_side", crash)
    base = written(tmp_path / "base.jsonl", [cell(1e-3)])
    found = bisect(*flags, "--base", base, "--", "true", "{out}")
    assert found == (SKIP if flags and isinstance(error, RuntimeError) else code)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_what_the_command_started_ends_with_it(name: str, tmp_path: Path) -> None:
    base, there = written(tmp_path / "base.jsonl", [cell(1e-3)]), tmp_path / "there"
    tag, environment = processes.tagged()
    script = f"sleep 777 & setsid sleep 778 & touch {there}; sleep 779; true {{out}}"
    command = [sys.executable, "-m", "flashbench", "bisect", "--base", base, "--", "sh", "-c", script]
    child = subprocess.Popen(command, env=environment, preexec_fn=processes.in_the_foreground)
    try:
        while not there.exists():
            assert child.poll() is None
            time.sleep(0.02)
        child.send_signal(signal.Signals[name])
        assert child.wait(240) == 130
        assert processes.left(tag) == []
    finally:
        child.kill()
        _end_all(tag)


def _end_all(tag: str) -> None:
    """End what a failure left."""
    for pid, _ in processes._with(tag):
        os.kill(pid, signal.SIGKILL)


@pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for processes in /proc")
def test_of_a_command_that_ended_nothing_disturbs_the_next(tmp_path: Path) -> None:
    same = written(tmp_path / "same.jsonl", [cell(1e-3)])
    tag, environment = processes.tagged()
    script = f"sleep 777 & cp {same} {{out}}/r.jsonl"
    command = [sys.executable, "-m", "flashbench", "bisect", "--base", same, "--", "sh", "-c", script]
    assert subprocess.run(command, env=environment, check=False).returncode == GOOD
    try:
        assert processes.left(tag) == []
    finally:
        _end_all(tag)
