"""What implementations print goes to stderr: stdout is for results, which programs read."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress

_LOCK = threading.Lock()
_OPEN: list[ExitStack] = []
"""One for each block that is open; whoever comes last undoes what the first did."""


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Inside, stdout is stderr for all of this process, for code in C, too. Threads may be in it at once."""
    with _LOCK:
        undo = _OPEN[0] if _OPEN else ExitStack()
        if not _OPEN:
            undo.enter_context(_descriptor())
            undo.enter_context(redirect_stdout(sys.stderr))
        _OPEN.append(undo)
    try:
        yield
    finally:
        with _LOCK:
            _OPEN.pop()
            if not _OPEN:
                undo.close()


@contextmanager
def _descriptor() -> Iterator[None]:
    """Inside, file descriptor 1 is what 2 is; as it is where one of them is closed."""
    _flush()
    try:
        kept = os.dup(1)
    except OSError:
        yield
        return
    try:
        with suppress(OSError):
            os.dup2(2, 1)
        yield
    finally:
        _flush()
        os.dup2(kept, 1)
        os.close(kept)


def _flush() -> None:
    """What Python and C hold back of what was printed."""
    for stream in (sys.stdout, sys.__stdout__):
        with suppress(AttributeError, OSError, ValueError):  # none, a broken pipe, or closed
            stream.flush()  # type: ignore[union-attr]
    with suppress(AttributeError, OSError, TypeError):  # no C library of that kind
        ctypes.CDLL(None).fflush(None)
