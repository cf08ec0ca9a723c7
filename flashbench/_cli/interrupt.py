"""Being stopped from outside, so that what is done is told and kept: Ctrl-C, SIGTERM, a hangup."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

import typer

from flashbench import console
from flashbench.errors import EXIT_INTERRUPTED, FlashbenchError
from flashbench.signals import STOPPING, Interrupted, handling

if TYPE_CHECKING:
    from flashbench.record import Record

_URGENT = ("SIGINT", "SIGTERM")
"""What stops at once when it comes after another."""

FIRST = "stopping after the cells that are being measured; once more stops at once"
"""What the first one is answered."""


class Stop:
    """Whether somebody asked for a stop, and by which signal."""

    def __init__(self) -> None:
        self.by: str | None = None

    def __call__(self) -> bool:
        """True once a stop was asked for."""
        return self.by is not None


@contextmanager
def stoppable(told: str, *, quiet: bool = False) -> Iterator[Stop]:
    """Inside, the first Ctrl-C, SIGTERM or hangup asks for a stop; a Ctrl-C or SIGTERM after it interrupts.

    An interrupt raises Interrupted in the main thread. told: what the first one is answered. A hangup
    that the user has ignored (nohup) stays so.
    """
    stop = Stop()

    def handle(number: int, _: FrameType | None) -> None:
        name = signal.Signals(number).name
        if name == "SIGHUP":
            _leave_terminal()
        if stop() and name in _URGENT:
            raise Interrupted
        first, stop.by = not stop(), stop.by or name  # before it is told: the next one may come meanwhile
        if first and not quiet:
            _say(f"{name}: {told}")

    with handling(handle, *STOPPING):
        yield stop


@contextmanager
def terminable() -> Iterator[None]:
    """Inside, Ctrl-C, SIGTERM and a hangup raise Interrupted in the main thread."""

    def handle(number: int, _: FrameType | None) -> None:
        if signal.Signals(number).name == "SIGHUP":
            _leave_terminal()
        raise Interrupted

    with handling(handle, *STOPPING):
        yield


@contextmanager
def interruptible() -> Iterator[Stop]:
    """As ``terminable``; an interrupt ends what is inside, and what is given knows of it, so that what was
    done until then can be shown and ``interrupted`` raised.
    """
    stop = Stop()
    try:
        with terminable():
            yield stop
    except KeyboardInterrupt:
        stop.by = "interrupt"


def interrupted(said: str) -> typer.Exit:
    """How a command ends that was, once it is told what there is of it."""
    console.warn(f"interrupted; {said}")
    return typer.Exit(EXIT_INTERRUPTED)


def kept(results: Path) -> tuple[Record, ...]:
    """The rows that a run which was stopped left in its file; where it cannot be read, that is told."""
    from flashbench import runfile

    try:
        return runfile.load(results, damaged=True).records
    except FlashbenchError as error:
        console.warn(str(error))
        return ()


def _say(text: str) -> None:
    """A warning by one system call: the signal may have come in the middle of another line's writing."""
    with suppress(OSError, ValueError, AttributeError):
        os.write(sys.stderr.fileno(), f"\nwarning: {text}\n".encode(errors="backslashreplace"))


def _leave_terminal() -> None:
    """Point streams nowhere whose terminal has gone, where every write is an error from now on."""
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError, ValueError, AttributeError):
            if not stream.isatty() and not console.takes(stream.fileno()):
                console.give_up(stream)
