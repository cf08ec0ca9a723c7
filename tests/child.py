"""A command in a process of its own, with what that process alone used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace

_CODE = """
import sys
from flashbench.cli import main
try:
    main()
finally:
    sys.stdout.flush()
    sys.stderr.write(open("/proc/self/status").read())
"""


@dataclass(frozen=True)
class Usage:
    """What a process used.

    processor_s: of a command that is one thread and waits for nothing, its wall time on an idle core,
    which other test processes on the same cores do not stretch. peak_bytes: of resident memory; the
    kernel's ru_maxrss would count the test process that the child was forked from.
    """

    processor_s: float
    peak_bytes: int


def run(arguments: list[str], **options: object) -> tuple[bytes, Usage]:
    """(stdout, usage) of ``flashbench arguments``; the exit code must be 0.

    Modules are compiled once, as where flashbench is installed: PYTHONDONTWRITEBYTECODE of the surroundings
    would have each process do so again, which takes half of what start-up does.
    """
    surroundings = {name: text for name, text in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        command = [sys.executable, "-c", _CODE, *arguments]
        child = subprocess.Popen(command, stdout=stdout, stderr=stderr, env=surroundings, **options)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)  # reaped here, not by Popen
        stdout.seek(0)
        stderr.seek(0)
        said = stderr.read().decode()
        assert child.returncode == 0, said
        peak = re.search(r"VmHWM:\s+(\d+) kB", said)
        assert peak, said
        return stdout.read(), Usage(usage.ru_utime + usage.ru_stime, int(peak[1]) * 1024)


_WORK = """
import argparse, asyncio, difflib, http.client, inspect, json, unittest.mock, xml.dom.minidom
sum(i * i for i in range(10**6))
"""
_USUAL_S = 0.11


def pace() -> float:
    """How many times slower than usual a process is just now, at least 1: on a shared or slow host.

    Of one that imports from the standard library and computes a little; usual is what it takes where a
    process of flashbench's takes the limits of the tests.
    """
    child = subprocess.Popen([sys.executable, "-I", "-B", "-c", _WORK])
    _, status, usage = os.wait4(child.pid, 0)  # exact, where os.times counts in hundredths of a second
    child.returncode = os.waitstatus_to_exitcode(status)
    assert child.returncode == 0
    return max(1.0, (usage.ru_utime + usage.ru_stime) / _USUAL_S)


def quickest(arguments: list[str], limit_s: float, runs: int, **options: object) -> tuple[bytes, Usage]:
    """Of that many runs at most the first within limit_s of processor time at the usual pace, else the last.

    Processor time is stretched too by a neighbour that uses up caches and memory, for a while.
    """
    for _ in range(runs):
        before = pace()
        out, usage = run(arguments, **options)
        usage = replace(usage, processor_s=usage.processor_s / ((before + pace()) / 2))
        if usage.processor_s < limit_s:
            break
    return out, usage
