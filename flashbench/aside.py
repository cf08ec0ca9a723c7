"""What somebody else's code prints goes to stderr: stdout is for results, which programs read."""

from __future__ import annotations

import errno
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from typing import Any

_LOCK = threading.RLock()  # a signal may fork while its thread has it
_BLOCKS: list[int] = []
"""The thread of each block that is open."""
_UNDO = ExitStack()
"""Takes back what the first block did, once the last one is left."""


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Inside, stdout is stderr for all of this process, for code in C and programs that are started, too.

    Threads may be in it at once, and blocks in one another; a fork has the blocks of its own thread alone.
    Who closes sys.stdout there closes nothing. Where stderr is closed, what is printed is dropped.
    """
    mine = threading.get_ident()
    with _LOCK:
        if not _BLOCKS:
            _UNDO.enter_context(_descriptor())
            _UNDO.enter_context(redirect_stdout(unclosed(sys.stderr)))
        _BLOCKS.append(mine)
    try:
        yield
    finally:
        with _LOCK:
            _BLOCKS.remove(mine)
            if not _BLOCKS:
                _UNDO.close()


def unclosed(stream: Any) -> Any:
    """The stream, which is not its user's to close; None where there is none."""
    return stream if stream is None else _Unclosed(stream)


class _Unclosed:
    def __init__(self, stream: Any) -> None:
        self._stream = stream

    def close(self) -> None:
        """Nothing."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def copy_of(number: int) -> int | None:
    """Another number for an open file, no stream's; None where that one is closed."""
    low = []
    try:
        while (copy := os.dup(number)) <= 2:  # a stream that is closed leaves its number to the next file
            low.append(copy)
    except OSError as error:
        if error.errno != errno.EBADF:
            raise
        return None
    finally:
        for one in low:
            os.close(one)
    return copy


@contextmanager
def _descriptor() -> Iterator[None]:
    """Inside, file descriptor 1 is what 2 is, or takes and drops all; afterwards what it was, or closed."""
    _flush()
    kept = copy_of(1)
    try:
        try:
            os.dup2(2, 1)
        except OSError:
            _drop(1)
        yield
    finally:
        _flush()
        if kept is not None:
            os.dup2(kept, 1)
            os.close(kept)
        else:
            with suppress(OSError):  # closed meanwhile
                os.close(1)


def _drop(number: int) -> None:
    """What is written there is lost from now on."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    if nowhere == number:
        os.set_inheritable(nowhere, True)
    else:
        os.dup2(nowhere, number)
        os.close(nowhere)


def _flush() -> None:
    """What Python and C hold back of what was printed.

    Of C's streams stdout alone: to flush all waits for whoever reads one of them.
    """
    import ctypes  # every command imports this module, few print aside

    for stream in (sys.stdout, sys.__stdout__):
        with suppress(AttributeError, OSError, ValueError):  # none, a broken pipe, or closed
            stream.flush()  # type: ignore[union-attr]
    for name in ("stdout", "__stdoutp"):  # as Linux and as macOS call it
        with suppress(AttributeError, OSError, TypeError, ValueError):  # no C library of that kind
            library = ctypes.CDLL(None)
            library.fflush(ctypes.c_void_p.in_dll(library, name))


def _forked() -> None:
    """In the fork of a thread: others' blocks are left there, as nobody else would."""
    try:
        own = _BLOCKS.count(threading.get_ident())
        alone = len(_BLOCKS) > own == 0
        _BLOCKS[:] = [threading.get_ident()] * own
        if alone:
            _UNDO.close()
    finally:
        _LOCK.release()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_LOCK.acquire, after_in_parent=_LOCK.release, after_in_child=_forked)
