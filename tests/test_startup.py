"""Start-up is quick: what a shell user notices."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest


def seconds(arguments: list[str]) -> float:
    """Best of five wall times of a command, in a process of its own."""
    best = float("inf")
    for _ in range(5):
        start = time.perf_counter()
        subprocess.run([sys.executable, "-m", "flashbench", *arguments], check=True, capture_output=True)
        best = min(best, time.perf_counter() - start)
    return best


@pytest.mark.parametrize(
    ("arguments", "limit_s"),
    [
        (["--help"], 0.25),
        (["io-model", "--sram", "192KB"], 0.5),
        (["kv-cache", "--model", "llama-3-70b"], 0.5),
    ],
)
def test_starts_within_its_limit(arguments: list[str], limit_s: float) -> None:
    # a busy runner slows the interpreter itself: the limits are for one that starts a bare python in 20 ms
    start = time.perf_counter()
    subprocess.run([sys.executable, "-I", "-S", "-c", "pass"], check=True)
    busy = max(1.0, (time.perf_counter() - start) / 0.02)
    assert seconds(arguments) < limit_s * busy
