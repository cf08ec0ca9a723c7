"""A command in a process of its own, with what that process alone used."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
import tempfile


def run(arguments: list[str], **options: object) -> tuple[bytes, resource.struct_rusage]:
    """(stdout, resource usage) of ``flashbench arguments``; the exit code must be 0.

    ru_utime + ru_stime is processor seconds: of a command that is one thread and waits for nothing, its
    wall time on an idle core, which other test processes on the same cores do not stretch. ru_maxrss is KiB.
    """
    with tempfile.TemporaryFile() as stdout, tempfile.TemporaryFile() as stderr:
        command = [sys.executable, "-m", "flashbench", *arguments]
        child = subprocess.Popen(command, stdout=stdout, stderr=stderr, **options)
        _, status, usage = os.wait4(child.pid, 0)
        child.returncode = os.waitstatus_to_exitcode(status)  # reaped here, not by Popen
        stdout.seek(0)
        stderr.seek(0)
        assert child.returncode == 0, stderr.read().decode()
        return stdout.read(), usage
