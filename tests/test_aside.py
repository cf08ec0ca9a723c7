"""Inside the block stdout is stderr, for everybody; afterwards it is what it was, whatever happened."""

from __future__ import annotations

import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from flashbench.aside import stdout_to_stderr

ROOT = Path(__file__).resolve().parents[1]
SAY = """
import ctypes, os, sys, threading
from flashbench.aside import stdout_to_stderr

def say(what):
    print(what, "by Python")
    if sys.__stdout__ is not None:
        sys.__stdout__.write(f"{what} by its first stdout\\n")
    try:
        os.write(1, f"{what} by the system\\n".encode())
    except OSError:
        pass
    ctypes.CDLL(None).puts(f"{what} by C".encode())
    os.system(f"echo {what} by a program 2>/dev/null")
"""
WAYS = {"Python", "its first stdout", "the system", "C", "a program"}


def started(program: str, streams: str = "") -> tuple[set[str], set[str]]:
    """What a program leaves on stdout and on stderr, in whatever order."""
    line = ["sh", "-c", f'exec "$0" -c "$1" {streams}', sys.executable, SAY + program]
    done = subprocess.run(line, capture_output=True, text=True, timeout=240, check=True, cwd=ROOT)
    return set(done.stdout.splitlines()), set(done.stderr.splitlines())


def said(what: str) -> set[str]:
    return {f"{what} by {way}" for way in WAYS}


def test_stdout_comes_back_after_the_last_of_several_threads(capfd: pytest.CaptureFixture[str]) -> None:
    first, second = stdout_to_stderr(), stdout_to_stderr()
    with suppress(KeyError), stdout_to_stderr():
        print("aside 1")
        raise KeyError
    print("here 1")
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    print("aside 2")
    second.__exit__(None, None, None)
    print("here 2")
    assert capfd.readouterr() == ("here 1\nhere 2\n", "aside 1\naside 2\n")


NESTED = """
say("before")
with stdout_to_stderr():
    say("outer")
    with stdout_to_stderr():
        say("inner")
    say("again")
say("after")
"""


def test_whoever_prints_and_however_blocks_are_nested() -> None:
    out, err = started(NESTED)
    assert out == said("before") | said("after")
    assert err == said("outer") | said("inner") | said("again")


def test_a_closed_stderr_takes_nothing_to_stdout() -> None:
    for streams in ("2>&-", "<&- 2>&-"):
        assert started(NESTED, streams) == (said("before") | said("after"), set())


def test_a_closed_stdout_is_closed_again_and_no_file_takes_its_number_meanwhile() -> None:
    program = """
with stdout_to_stderr():
    assert os.open("/dev/null", os.O_WRONLY) != 1
    assert os.get_inheritable(1)
    say("inside")
try:
    os.fstat(1)
except OSError:
    print("closed", file=sys.stderr)
"""
    inside = said("inside") - {"inside by its first stdout"}
    for streams in (">&-", ">&- <&-"):
        assert started(program, streams) == (set(), inside | {"closed"})
    for streams in (">&- 2>&-", ">&- 2>&- <&-"):
        assert started(program, streams) == (set(), set())


def test_what_is_closed_inside_is_open_again() -> None:
    for close in ("sys.stdout.close()", "os.close(1)"):
        out, err = started(f"with stdout_to_stderr():\n    {close}\nsay('after')\nsys.stderr.write('too')\n")
        assert (out, err) == (said("after"), {"too"})


FORKED = """
def child(what):
    pid = os.fork()
    if not pid:
        say(what)
        sys.stdout.flush()
        sys.__stdout__.flush()
        ctypes.CDLL(None).fflush(None)
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0

entered, left = threading.Event(), threading.Event()

def other():
    with stdout_to_stderr():
        entered.set()
        left.wait()

with stdout_to_stderr():
    child("mine")
thread = threading.Thread(target=other)
thread.start()
entered.wait()
child("beside")
with stdout_to_stderr():
    child("both")
left.set()
thread.join()
say("after")
"""


@pytest.mark.skipif(not hasattr(__import__("os"), "fork"), reason="this system has no fork")
def test_a_fork_has_the_blocks_of_its_own_thread_alone() -> None:
    out, err = started(FORKED)
    assert out == said("beside") | said("after")
    assert err == said("mine") | said("both")


def test_a_fork_finds_the_lock_free() -> None:
    """While other threads enter and leave, of which none is in the fork."""
    program = """
def enter():
    while not stop.is_set():
        with stdout_to_stderr():
            pass

stop = threading.Event()
threads = [threading.Thread(target=enter) for _ in range(3)]
for thread in threads:
    thread.start()
for _ in range(50):
    pid = os.fork()
    if not pid:
        with stdout_to_stderr():
            os.write(1, b"aside\\n")
        os.write(1, b"here\\n")
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
stop.set()
"""
    assert started(program) == ({"here"}, {"aside"})


def test_nobody_waits_for_a_thread_that_reads() -> None:
    """C's stdin is locked meanwhile, and to flush all of C's streams takes every lock."""
    program = """
import time
os.dup2(os.pipe()[0], 0)
library = ctypes.CDLL(None)
stdin = ctypes.c_void_p.in_dll(library, "stdin")
threading.Thread(target=lambda: library.getc(stdin), daemon=True).start()
time.sleep(0.2)
with stdout_to_stderr():
    library.puts(b"aside")
os.write(1, b"here")
os._exit(0)
"""
    assert started(program) == ({"here"}, {"aside"})
