"""What a file of one's own does to the process that imports it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from flashbench.kernels import _own_crash
from flashbench.kernels._own_import import imported

posix = pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
F = "\n\ndef f(q, k, v, causal=False, scale=None):\n    return v\n"
LIST = (
    "run",
    "--dry-run",
    "--device",
    "cpu",
    "--impls",
    "none",
    "--seqlens",
    "16",
    "--impl",
    "own.py:f",
    "-q",
)


def said(code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Of a command that imports the file and runs nothing."""
    (folder / "own.py").write_text(code + F)
    command = [sys.executable, "-m", "flashbench", *LIST]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False, timeout=240)


@posix
@pytest.mark.parametrize(
    ("code", "number", "words"),
    [
        ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)", 11, "Segmentation fault (own.py:2)"),
        ("import os\nos.abort()", 6, "Aborted (own.py:2)"),
    ],
)
def test_a_crash_is_one_line(code: str, number: int, words: str, tmp_path: Path) -> None:
    found = said(code, tmp_path)
    assert found.returncode == -number
    assert found.stderr == f"error: --impl 'own.py:f': importing it ended the process: {words}\n"


HELD_UP = """
import os, subprocess, sys, time
from flashbench.kernels import _own_crash
read, write = os.pipe()
owner, quiet = os.getpid(), subprocess.DEVNULL
if not os.fork():
    _own_crash._watch(read, write, "--impl 'own.py:f'", owner)
other = subprocess.Popen(["sleep", "600"], pass_fds=[write], stdin=quiet, stdout=quiet, stderr=quiet)
print(other.pid, flush=True)
os.write(write, b"Fatal Python error: Segmentation")
time.sleep(0.8)
os.write(write, b' fault\\n\\n  File "own.py", line 2 in f\\n')
os._exit(11)
"""


@posix
def test_a_crash_that_is_held_up_while_it_is_dumped_is_told_whole() -> None:
    """Also where another process has the pipe of the dump."""
    found = subprocess.run(
        [sys.executable, "-c", HELD_UP], capture_output=True, text=True, check=False, timeout=240
    )
    os.kill(int(found.stdout), signal.SIGKILL)
    assert found.returncode == 11
    words = "importing it ended the process: Segmentation fault (own.py:2)"
    assert found.stderr == f"error: --impl 'own.py:f': {words}\n"


@posix
def test_a_fork_that_comes_back_ends(tmp_path: Path) -> None:
    good, forked = (said(code, tmp_path) for code in ("", "import os\nos.fork()\n"))
    assert good.returncode == forked.returncode == 0
    assert len(forked.stdout.splitlines()) == len(good.stdout.splitlines())
    assert "own.py:f" in good.stdout


@pytest.mark.parametrize(
    ("code", "line"),
    [
        (
            "import threading\n\ndef g():\n    raise ValueError('x')\n\n"
            "one = threading.Thread(target=g)\none.start()\none.join()\n",
            "warning: a thread raised ValueError: x (own.py:4)\n",
        ),
        (
            "import atexit\n\n@atexit.register\ndef g():\n    raise ValueError('x')\n",
            "ValueError: x (own.py:5)\n",
        ),
    ],
)
def test_what_raises_where_nobody_catches_it_is_one_line(code: str, line: str, tmp_path: Path) -> None:
    found = said(code, tmp_path)
    assert (found.returncode, found.stderr.count("\n")) == (0, 1)
    assert found.stderr.startswith("warning: ")
    assert found.stderr.endswith(line)


def test_the_working_directory_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "below").mkdir()
    (tmp_path / "moves.py").write_text("import os\nos.chdir('below')" + F)
    monkeypatch.chdir(tmp_path)
    assert imported("moves.py:f", "--impl").__name__ == "f"
    assert Path.cwd() == tmp_path


def test_what_is_no_dump_is_no_line() -> None:
    assert _own_crash.line_of("") == _own_crash.line_of("\0") == ""
