"""A crash in C while somebody else's code is imported: the process is gone, and another one says why."""

from __future__ import annotations

import faulthandler
import os
import re
import select
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

_DONE = b"\0"
_FATAL = re.compile(r"Fatal Python error: ([^\n]+)")
_FRAME = re.compile(r'File "([^"]*)", line (\d+)')
_LOOK_S = 0.05
"""How often it is seen, once a dump has begun, whether its process has ended; a fork may have the pipe."""


@contextmanager
def told(where: str) -> Iterator[None]:
    """Inside, a crash (a segmentation fault, an abort) is one line on stderr, which begins with ``where``.

    A fork waits for the dump meanwhile. Nothing is done where threads make that unsafe or crashes are told by
    somebody else, as in a worker.
    """
    if not hasattr(os, "fork") or faulthandler.is_enabled() or threading.active_count() > 1:
        yield
        return
    read, write = os.pipe()
    mine = os.fstat(write).st_ino
    owner = os.getpid()
    watcher = os.fork()
    if not watcher:
        _watch(read, write, where, owner)
    os.close(read)
    faulthandler.enable(write, all_threads=False)
    try:
        yield
    finally:
        if os.getpid() == owner:
            faulthandler.disable()
            with suppress(OSError):  # what was imported may have closed it
                if os.fstat(write).st_ino == mine:
                    os.write(write, _DONE)
                    os.close(write)
            with suppress(ChildProcessError):
                os.waitpid(watcher, 0)


def _watch(read: int, write: int, where: str, owner: int) -> NoReturn:
    try:
        os.close(write)
        dump, ended = b"", False
        while True:
            if select.select([read], [], [], _LOOK_S if dump else None)[0]:
                piece = os.read(read, 2**16)
                dump += piece
                if not piece or dump.endswith(_DONE):
                    break
            elif ended:  # with all that it wrote read since
                break
            else:
                ended = os.getppid() != owner
        if line := line_of(dump.decode(errors="replace")):
            os.write(2, f"error: {where}: {line}\n".encode(errors="backslashreplace"))
    finally:
        os._exit(0)


def line_of(dump: str) -> str:
    """What faulthandler's dump says, in one line; empty where it is none."""
    fatal, frame = _FATAL.search(dump), _FRAME.search(dump)
    place = f" ({Path(frame[1]).name}:{frame[2]})" if frame else ""
    return f"importing it ended the process: {fatal[1]}{place}" if fatal else ""
