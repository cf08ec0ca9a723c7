"""Being stopped from outside: SIGTERM ends work as Ctrl-C does, so that what is done is told and kept."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, SIGTERM raises KeyboardInterrupt in the main thread; elsewhere nothing changes."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        # None stands for a handler that was not set from Python
        signal.signal(signal.SIGTERM, signal.SIG_DFL if before is None else before)


def _interrupt(*_: Any) -> None:
    raise KeyboardInterrupt
