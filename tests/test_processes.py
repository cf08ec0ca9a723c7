"""The watch over processes that may hang."""

from __future__ import annotations

import os
import queue
import sys
from typing import Any

import processes
import pytest

STEPS = "import time\nfor n in range(6):\n    time.sleep(0.1)\n    print(n, flush=True)\n"
SILENT_S = 0.3
"""Less than the steps take together."""


def watched(code: str, patient: int, patch: pytest.MonkeyPatch) -> tuple[int | None, list[str]]:
    """How it ended and what it said. The first lines are waited for, however slow the machine is."""
    asked: list[Any] = []

    class Lines(queue.SimpleQueue):  # type: ignore[type-arg]
        def get(self, block: bool = True, timeout: float | None = None) -> Any:
            asked.append(timeout)
            return super().get(block, timeout if len(asked) > patient else None)

    patch.setattr(queue, "SimpleQueue", Lines)
    ended, said = processes.watched([sys.executable, "-c", code], os.environ, SILENT_S)
    assert set(asked) == {SILENT_S}, "not each line is given that time"
    return ended, said.split()


def test_a_process_that_gets_on_may_take_longer_than_one_step(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(f"{STEPS}raise SystemExit(3)", 7, monkeypatch) == (3, [*"012345"])


def test_a_process_that_goes_silent_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    assert watched(f"{STEPS}time.sleep(600)", 6, monkeypatch) == (None, [*"012345"])
