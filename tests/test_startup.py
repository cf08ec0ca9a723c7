"""Start-up is quick: what a shell user notices."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def seconds(arguments: list[str]) -> float:
    """Least processor time of five runs of a command, each in a process of its own.

    The command is one thread that waits for nothing, so on an idle core this is its wall time; other
    test processes on the same cores do not add to it.
    """
    times = []
    for _ in range(5):
        child = subprocess.Popen(
            [sys.executable, "-m", "flashbench", *arguments],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        _, status, usage = os.wait4(child.pid, 0)
        assert status == 0
        times.append(usage.ru_utime + usage.ru_stime)
    return min(times)


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [(["--help"], 0.25), (["io-model", "--sram", "192KB"], 0.5)],
    ids=["help", "io-model"],
)
def test_starts_within_its_limit(arguments: list[str], limit_s: float) -> None:
    assert seconds(arguments) < limit_s
