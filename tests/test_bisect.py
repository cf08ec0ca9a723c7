"""``flashbench bisect``: the exit codes that ``git bisect run`` wants, by a real bisection too."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from gates import ROOT
from judging import cell, written

from flashbench import cli

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
