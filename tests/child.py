"""A command in a process of its own, with what that process alone used."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass

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
    """(stdout, usage) of ``flashbench arguments``; the exit code must be 0."""
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        command = [sys.executable, "-c", _CODE, *arguments]
        child = subprocess.Popen(command, stdout=stdout, stderr=stderr, **options)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)  # reaped here, not by Popen
        stdout.seek(0)
        stderr.seek(0)
        said = stderr.read().decode()
        assert child.returncode == 0, said
        peak = re.search(r"VmHWM:\s+(\d+) kB", said)
        assert peak, said
        return stdout.read(), Usage(usage.ru_utime + usage.ru_stime, int(peak[1]) * 1024)


def quickest(arguments: list[str], limit_s: float, runs: int, **options: object) -> tuple[bytes, Usage]:
    """Of that many runs at most the first within limit_s of processor time, else the last.

    Processor time is stretched too by a neighbour that uses up caches and memory, for a while.
    """
    for _ in range(runs):
        out, usage = run(arguments, **options)
        if usage.processor_s < limit_s:
            break
    return out, usage
