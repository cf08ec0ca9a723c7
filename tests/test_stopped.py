"""A run that is killed, stopped, hung up or out of disk loses no row that it finished, and resumes."""

from __future__ import annotations

import json
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import faults
import processes
import pytest
from tiers import tiers

from flashbench import runfile

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for children in /proc")

CELLS = 24
PATIENCE_S = 240.0
"""What a line of a run may take: nothing is measured by it, and what hangs takes longer."""


def command(out: Path, *more: str, impls: str = "naive,sdpa,held") -> list[str]:
    """A sweep of CELLS cells in groups of three that takes under a second and no torch, unless it is held."""
    return [
        sys.executable, faults.__file__, "--quick", "run", "--device", "cpu", "--impls", impls, "--seqlens",
        "8,16,24,32", "--head-dims", "8", "--dtypes", "fp32", "--causal", "no", "--passes", "fwd,bwd",
        "--out", str(out), "--verbose", *more,
    ]  # fmt: skip


class Run:
    """A run that was started. held: as faults.HELD and faults.ENDING, the files by the variables' names."""

    def __init__(self, argv: list[str], **held: Path) -> None:
        self.tag, surroundings = processes.tagged()
        surroundings |= {variable: str(path) for variable, path in held.items()}
        self.process = subprocess.Popen(
            argv, env=surroundings, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
            preexec_fn=processes.in_the_foreground,
        )  # fmt: skip
        self._lines = processes.lines_of(self.process.stderr)

    def until(self, wanted: str) -> None:
        """Read its stderr up to the first line with that in it."""
        while wanted not in (line := self._lines.get(timeout=PATIENCE_S) or ""):
            assert line, f"it ended without {wanted!r}"

    def end(self) -> str:
        """The rest of its stderr, once it is over and nothing of it is left."""
        said = "".join(iter(lambda: self._lines.get(timeout=PATIENCE_S) or "", ""))
        self.process.wait(PATIENCE_S)
        assert processes.left(self.tag) == []
        return said


@pytest.fixture
def out() -> Iterator[Path]:
    """A folder that does not outlive the test: thousands of runs would be kept."""
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder) / "out"


@pytest.fixture
def held(tmp_path: Path) -> Path:
    """A file that a run waits for, until it is taken away."""
    path = tmp_path / "held"
    path.touch()
    return path


def resumed(out: Path) -> runfile.RunFile:
    """The file once the run was resumed to its end, in order and whole."""
    run = Run(command(out, "--resume"))
    said = run.end()
    assert run.process.returncode == 0, said
    found = runfile.load(out / "results.jsonl")
    assert not found.notes
    assert len(found.records) == CELLS
    assert {record.cell.key for record in found.records} == set(found.header["cells"])
    assert {record.status for record in found.records} == {"ok"}
    verdict = runfile.verify(out / "results.jsonl")
    assert (verdict.damage, verdict.missing, verdict.torn) == ([], 0, False)
    assert [path.name for path in out.iterdir()] == ["results.jsonl"]
    return found


@pytest.mark.parametrize("seed", tiers(range(2), range(2, 200)))
def test_a_kill_at_any_moment_loses_no_finished_row_and_the_run_resumes(
    seed: int, out: Path, held: Path
) -> None:
    """Of the worker in odd ones, which the run survives; of the run in even ones, before it ends."""
    chance = random.Random(seed)
    run = Run(command(out), **{faults.ENDING: held})
    if chance.random() < 0.8:  # among the rows; else while it starts or at the very beginning
        run.until("[1/")
        time.sleep(chance.uniform(0.0, 0.15))
    else:
        time.sleep(chance.uniform(0.0, 0.6))
    if seed % 2:
        if found := processes.workers(run.tag):  # the process that measures, or its guard
            with suppress(ProcessLookupError):  # it ended meanwhile
                os.kill(chance.choice(found), signal.SIGKILL)
    else:
        run.process.kill()
    held.unlink()
    said = run.end()
    assert run.process.returncode == (0 if seed % 2 else -signal.SIGKILL), said
    path = out / "results.jsonl"
    before = {record.cell.key: record for record in runfile.load(path).records} if path.exists() else {}
    told = re.findall(r"\[\d+/\d+\] (.*): ok", said)
    assert set(told) <= before.keys()
    assert len(before) == CELLS or not seed % 2
    (out / ".flashbench.lock").unlink(missing_ok=True)  # of the killed one; it holds nothing
    after = {record.cell.key: record for record in resumed(out).records}
    assert all(after[key] == record for key, record in before.items())


@pytest.mark.parametrize("name", tiers(["SIGINT"], ["SIGTERM", "SIGHUP"]))
def test_the_first_signal_finishes_what_is_measured_and_tells_how_to_go_on(
    name: str, out: Path, held: Path
) -> None:
    run = Run(command(out), **{faults.HELD: held})
    run.until("[6/")  # the first problem's, both passes
    run.process.send_signal(getattr(signal, name))
    run.until(f"warning: {name}: stopping after the cells that are being measured")
    held.unlink()
    said = run.end()
    assert run.process.returncode == 130, said
    assert "measures the rest" in said
    done = len(runfile.load(out / "results.jsonl").records)
    assert done in (6, 9)  # whole groups: the next one may have begun
    resumed(out)


@pytest.mark.parametrize("name", tiers(["SIGTERM"], ["SIGINT"]))
def test_the_second_signal_stops_at_once(name: str, out: Path) -> None:
    run = Run(command(out, impls="naive,right,hang"))
    deadline = time.monotonic() + 120
    while not processes.workers(run.tag):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    time.sleep(0.5)
    run.process.send_signal(getattr(signal, name))
    run.until("once more stops at once")
    run.process.send_signal(getattr(signal, name))
    said = run.end()  # nothing else ends it: the cell may take 300 s, and would have a row
    assert run.process.returncode == 130, said
    assert "holds 0 of 24 cells" in said
    assert "Traceback" not in said


def test_a_hangup_that_is_ignored_changes_nothing(out: Path, held: Path) -> None:
    run = Run(["nohup", *command(out)], **{faults.HELD: held})
    run.until("[2/")
    run.process.send_signal(signal.SIGHUP)
    held.unlink()
    said = run.end()
    assert run.process.returncode == 0, said
    assert len(runfile.load(out / "results.jsonl").records) == CELLS


def test_a_terminal_that_goes_away_loses_nothing(out: Path, held: Path) -> None:
    import pty

    tag, surroundings = processes.tagged()
    surroundings[faults.HELD] = str(held)
    pid, terminal = pty.fork()
    if not pid:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # else that of a suite under nohup is inherited
        os.execve(sys.executable, command(out), surroundings)
    said = b""
    while b"[2/" not in said:
        said += os.read(terminal, 4096)
    os.close(terminal)  # the shell's session ends: SIGHUP, and every write fails
    held.unlink()
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 130
    assert processes.left(tag) == []
    resumed(out)


def test_two_runs_into_one_folder_are_refused_and_the_first_is_left_alone(out: Path) -> None:
    path = out / "results.jsonl"
    first = Run(command(out, impls="naive,right,hang"))
    deadline = time.monotonic() + 120
    while not path.exists():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    before = path.read_bytes()
    second = Run(command(out, "--resume"))
    said = second.end()
    assert second.process.returncode == 2
    assert f"is being written by another run (process {first.process.pid} on " in said
    assert "Traceback" not in said
    assert path.read_bytes() == before
    first.process.kill()
    first.end()
    third = Run(command(out, "--resume"))
    assert third.end()
    assert third.process.returncode == 0  # a lock ends with its process


def test_a_file_that_may_not_grow_stops_the_run_with_all_rows_readable(out: Path) -> None:
    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (9000, resource.RLIM_INFINITY))

    tag, surroundings = processes.tagged()
    done = subprocess.run(
        command(out), env=surroundings, capture_output=True, text=True, preexec_fn=limit, check=False
    )
    assert done.returncode == 2, done.stderr
    assert "results.jsonl cannot be written: File too large" in done.stderr
    assert "Traceback" not in done.stderr
    assert processes.left(tag) == []
    found = runfile.load(out / "results.jsonl")
    assert not found.notes
    assert 0 < len(found.records) < CELLS
    resumed(out)


def mounted(how: str, out: Path, *, then: str = "") -> subprocess.CompletedProcess[str]:
    """The run in a namespace of its own, in which its folder is a file system of that kind."""
    if (
        shutil.which("unshare") is None
        or subprocess.run(
            ["unshare", "-rm", "mount", "-t", "tmpfs", "none", "/mnt"], capture_output=True, check=False
        ).returncode
    ):
        pytest.skip("this system lets nobody mount a tmpfs of his own")
    out.mkdir(parents=True)
    line = f'mount -t tmpfs -o {how} none "$0" && cd / && "$@"; code=$?; {then or "true"}; exit $code'
    return subprocess.run(
        ["unshare", "-rm", "bash", "-c", line, str(out), *command(out)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_a_full_disk_stops_the_run_with_all_rows_readable(out: Path, tmp_path: Path) -> None:
    kept = tmp_path / "kept.jsonl"
    done = mounted("size=12k", out, then=f'cp "$0"/results.jsonl {kept}')
    assert done.returncode == 2, done.stderr
    assert "results.jsonl cannot be written: No space left on device" in done.stderr
    assert "Traceback" not in done.stderr
    found = runfile.load(kept)
    told = re.findall(r"\[\d+/\d+\] (.*): ok", done.stderr)
    assert [record.cell.key for record in found.records] == told
    assert 0 < len(told) < CELLS
    assert not found.notes
    assert runfile.verify(kept).ok


def test_a_folder_that_cannot_be_written_is_one_line(out: Path) -> None:
    done = mounted("ro", out)
    assert done.returncode == 2, done.stderr
    assert "Read-only file system" in done.stderr
    assert len(done.stderr.splitlines()) <= 2


ROWS = {
    "ring": "ring --seqlens 64-4096+64 --head-dims 16 --heads 2 --passes fwd --impls ring --out {out}",
    "block": "block --model tiny --impls naive,sdpa --seqlens 16-2048+16 --dtype fp32 --out {out}/{name}",
    "check": "check --numerics --seqlens 16-2048+16 --dtypes fp32 --impls naive --out {out}/{name}",
}
"""Commands whose rows are of no sweep, each of many."""


@pytest.mark.parametrize("rows", [0, 1])
@pytest.mark.parametrize(("command", "name"), tiers([("ring", "SIGTERM")], [
    ("ring", "SIGINT"), ("block", "SIGTERM"), ("check", "SIGINT"),
]))  # fmt: skip
def test_a_command_that_is_stopped_shows_its_rows_and_how_many_they_are(
    command: str, name: str, rows: int, out: Path
) -> None:
    """Those of its file; a Ctrl-C goes to all processes of a terminal."""
    out.mkdir()
    path = out / "results.jsonl"
    tag, surroundings = processes.tagged()
    process = subprocess.Popen(
        [sys.executable, "-m", "flashbench", *ROWS[command].format(out=out, name=path.name).split(),
         "--device", "cpu", "--json", "-q"],
        env=surroundings, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        preexec_fn=processes.in_the_foreground, start_new_session=True,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while not path.exists() or path.read_bytes().count(b"\n") < 1 + rows:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    (os.killpg if name == "SIGINT" else os.kill)(process.pid, getattr(signal, name))
    shown, said = process.communicate(timeout=120)
    assert process.returncode == 130, said
    found, verdict = runfile.load(path), runfile.verify(path)
    kept = found.ring or found.blocks or found.numerics
    assert len(json.loads(shown)) == len(kept) >= rows
    planned = len(kept) + verdict.missing
    assert said == f"warning: interrupted; {len(kept)} of {planned} rows were measured\n"
    assert 64 <= planned > len(kept)
    assert (verdict.damage, runfile.rowless(path)) == ([], not kept)
    assert processes.left(tag) == []


WAITING = """
import sys, threading, time
def wait():
    print("waiting", file=sys.stderr, flush=True)
    sys.stdin.read()
"""
STAGES = {
    "imports": ("typer", "wait()", 130),
    "torch": ("torch", "wait()", 130),
    "threads": (
        "sitecustomize",
        "threading.Thread(target=lambda: (threading.main_thread().join(), time.sleep(0.3), wait())).start()",
        130,
    ),
    "freeing": ("sitecustomize", "import atexit; atexit.register(wait)", 0),
}
"""What is held up, from which module and by what, and how a command ends that is told to stop there: while it
is imported, while torch is, while the interpreter waits for threads, and after everything is done. Each waits
for its stdin to be closed."""


@pytest.mark.parametrize("name", tiers(["SIGTERM"], ["SIGINT", "SIGHUP"]))
@pytest.mark.parametrize("stage", STAGES)
def test_a_signal_before_and_after_the_command_is_an_interruption(
    stage: str, name: str, tmp_path: Path
) -> None:
    module, body, code = STAGES[stage]
    (tmp_path / f"{module}.py").write_text(f"{WAITING}{body}\n")
    paths = (str(tmp_path), str(Path(runfile.__file__).parents[1]))
    line = ["run", "--out", str(tmp_path / "out")] if stage == "torch" else ["list", "presets", "--csv"]
    process = subprocess.Popen(
        [sys.executable, "-m", "flashbench", *line], env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
        preexec_fn=processes.in_the_foreground,
    )  # fmt: skip
    assert process.stderr is not None
    assert process.stderr.readline() == "waiting\n"
    process.send_signal(getattr(signal, name))
    if stage in ("imports", "threads"):  # at once: it has not been let go on
        process.wait(240)
    said = process.communicate(timeout=240)[1]
    assert (process.returncode, said) == (code, "")


def test_an_interruption_in_code_that_was_compiled_meanwhile_is_forgotten_once_it_is_caught() -> None:
    """As in a dataclass's methods: Python would end by SIGINT, whatever the exit code."""
    lines = """
import os, signal, sys
from flashbench._cli.interrupt import terminable
try:
    with terminable():
        exec("os.kill(os.getpid(), signal.SIGTERM)\\nwhile True: pass")
except KeyboardInterrupt:
    sys.exit(130)
"""
    assert subprocess.run([sys.executable, "-c", lines], check=False).returncode == 130
