"""Memory that a cell left behind is told from memory that a thread is about to let go of."""

from __future__ import annotations

import threading

import pytest

from flashbench._runner import leftover
from flashbench.kernels import Target

CPU = Target()


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Its last number is what is held."""
    found = [leftover.WORTH]
    monkeypatch.setattr(leftover, "held_bytes", lambda target: found[-1])
    return found


def test_what_goes_within_a_moment_was_not_left(held: list[int]) -> None:
    threading.Timer(0.2, held.append, (10,)).start()
    assert leftover.beyond(0, CPU) == 0


def test_what_stays_is_told(held: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leftover, "PATIENCE_S", 0.1)
    assert leftover.beyond(0, CPU) == leftover.WORTH
    assert leftover.beyond(1, CPU) == 0
    assert leftover.beyond(None, CPU) == 0
