"""Handlers of signals that are set for a while, and signals that wait for a while."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

Handler = Callable[[int, FrameType | None], Any]

STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")
"""What asks a process to end: Ctrl-C, a batch system, a terminal that goes away."""


class Interrupted(KeyboardInterrupt):
    """What a handler raises. Not the class itself: where that comes through a text that is compiled and run,
    as a dataclass's methods are, Python remembers it and ends as if nobody had caught it.
    """


@contextmanager
def handling(handle: Handler, *names: str) -> Iterator[None]:
    """Inside, the signals of those names that there are and that are not ignored; in the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    numbers = [getattr(signal, name) for name in names if hasattr(signal, name)]
    before = {number: signal.getsignal(number) for number in numbers}
    taken = {number: old for number, old in before.items() if old is not signal.SIG_IGN}
    try:
        for number in taken:
            signal.signal(number, handle)
        yield
    finally:
        for number, old in taken.items():
            # None stands for a handler that was not set from Python
            signal.signal(number, signal.SIG_DFL if old is None else old)


@contextmanager
def postponed() -> Iterator[None]:
    """Inside, a signal of STOPPING waits for the end, where the first is delivered: for what an exception in
    the middle would break, as a library's import, which may swallow it and go on with half of what it needs.
    """
    came: list[int] = []
    try:
        with handling(lambda number, _: came.append(number), *STOPPING):
            yield
    finally:
        if came:
            signal.raise_signal(came[0])
