"""What a command is started with, set right before anything else: streams, a terminal's size, a folder."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Sequence
from contextlib import suppress

from flashbench import console
from flashbench.errors import UsageError

FULL = frozenset((errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF))
"""What a stream answers that takes no more, as its disk is full or nothing is behind it."""


def settle() -> None:
    """Streams that can be used, and sizes that are numbers.

    In place of a stdout that was closed there is one that takes nothing, so that a result is an error as on a
    full disk; of a stderr that takes nothing one that drops all, as notes are not worth a sweep. Files that
    are opened later get no stream's number, which what others print would go into.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            _open_lowest(os.O_WRONLY if number == 2 else os.O_RDONLY)
    if sys.stdin is None:
        sys.stdin = open(_open_lowest(os.O_RDONLY), encoding="utf-8")  # noqa: SIM115
    if sys.stdout is None:
        sys.stdout = open(_open_lowest(os.O_RDONLY), "w", encoding="utf-8")  # noqa: SIM115
    if sys.stderr is None:
        sys.stderr = open(_open_lowest(os.O_WRONLY), "w", encoding="utf-8")  # noqa: SIM115
    with suppress(OSError, ValueError, AttributeError):
        if not console.takes(sys.stderr.fileno()):
            console.give_up(sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        console.tolerate(stream)
    for name in ("COLUMNS", "LINES"):
        if not console.is_size(os.environ.get(name, "1")):
            del os.environ[name]  # libraries take "²" for a number, and 0 for a width
    if int(os.environ.get("COLUMNS", console.LEAST)) < console.LEAST:
        os.environ["COLUMNS"] = str(console.LEAST)


def _open_lowest(how: int) -> int:
    """Nothing, at the lowest number that is free; children have it too."""
    number = os.open(os.devnull, how)
    os.set_inheritable(number, True)
    return number


def check_folder(arguments: Sequence[str]) -> None:
    """Refuse to work in a folder that was deleted, which torch's libraries end the process for.

    ``doctor`` goes on, and tells of it; what only explains needs no folder.
    """
    if not arguments or arguments[0] == "doctor" or {"-h", "--help", "-V", "--version"} & {*arguments}:
        return
    if reason := gone():
        raise UsageError(f"the working directory {reason}; accepted: one that exists (cd to it)")


def gone() -> str | None:
    """What became of the working directory, or None where it is there."""
    try:
        os.getcwd()
    except OSError as error:
        return f"is gone ({error.strerror})"
    return None


def why_unwritable(error: OSError) -> str:
    """Why stdout takes nothing."""
    return "stdout is closed" if error.errno == errno.EBADF else error.strerror or str(error)
