"""The worker: the process that owns the device and measures what it is told to.

    python -m flashbench.isolation.child

Messages come on stdin and go to what stdout was when it started (``protocol.py``). What implementations
print, on stdout too, goes to stderr, of which the parent keeps the end.
"""

from __future__ import annotations

import faulthandler
import json
import logging
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from flashbench import kernels, profilers, units
from flashbench.isolation import lifeline, protocol, wire
from flashbench.problem import Cell
from flashbench.record import Record
from flashbench.record_json import record_to_json
from flashbench.runner import Session, precompile, unworried, what

TELL_EVERY_S = 1.0
"""A turn of the same cell is told again after this time."""


class Channel:
    """The two pipes to the parent. A copy of this process that an implementation forks has no say in them."""

    def __init__(self) -> None:
        self._owner = os.getpid()
        self._turn = lifeline.turn_of(os.environ.get(lifeline.MARK, ""))
        self._out = os.dup(1)
        os.dup2(2, 1)
        self._inbox: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        threading.Thread(target=self._listen, daemon=True).start()
        self._token = self._inbox.get().strip()
        if hasattr(os, "register_at_fork"):
            os.register_at_fork(after_in_child=self._forked)

    def send(self, **message: Any) -> None:
        """Tell the parent."""
        self.end_copy()
        data = wire.line(message, self._token)
        while data:
            data = data[os.write(self._out, data) :]

    def turn(self) -> None:
        """Tell on stderr that what follows there is of another cell (lifeline.turn_of)."""
        with suppress(AttributeError, OSError, ValueError):  # an implementation may have closed it
            sys.stderr.flush()
        with suppress(OSError):
            os.write(2, self._turn)

    def end_copy(self) -> None:
        """Ends this process if it is a fork that came back into the sweep."""
        if os.getpid() != self._owner:
            os._exit(0)

    def receive(self) -> Any:
        """The next message of the parent."""
        return json.loads(self._inbox.get())

    def _listen(self) -> None:
        with os.fdopen(0, "rb", closefd=False) as stdin:
            for line in stdin:
                self._inbox.put(line)
        lifeline.end_group()

    def _forked(self) -> None:
        os.close(self._out)
        lifeline.die_with(self._owner)


class _Warnings(logging.Handler):
    def __init__(self, channel: Channel) -> None:
        super().__init__(logging.WARNING)
        self._channel = channel

    def emit(self, record: logging.LogRecord) -> None:
        self._channel.send(warning=record.getMessage())


def session(*arguments: Any, **options: Any) -> Session:
    """What measures, with torch imported: that belongs to the start, and to what is resident at the start."""
    import torch  # noqa: F401

    return Session(*arguments, **options)


def main(make: Callable[..., Any] = session) -> None:
    """Serve the parent until it closes the pipe; make: what measures, as ``session``."""
    lifeline.guarded()
    faulthandler.enable(all_threads=False)
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1)  # the parent asks so where it hangs
    channel = Channel()
    logger = logging.getLogger("flashbench")
    logger.handlers, logger.propagate = [_Warnings(channel)], False
    try:
        with unworried():
            serving = _session(channel, channel.receive(), make)
            channel.send(ready=True, pid=os.getpid(), thread=threading.get_ident())
            while True:
                _serve(serving, channel, channel.receive())
    except BaseException as error:  # SystemExit too: an implementation may call sys.exit
        channel.send(raised=what(error))
        os._exit(1)


def _session(channel: Channel, setup: protocol.Message, make: Callable[..., Any]) -> Any:
    target = protocol.target_from_json(setup["target"])
    for name in setup["implementations"]:
        kernels.get(name).why_unavailable(target)  # before torch is imported, as Triton is settled then
    told: list[Any] = [None, 0.0]

    def at(cell: Cell) -> None:
        channel.end_copy()
        now = time.monotonic()
        if told[0] is not cell:
            channel.turn()
        if told[0] is not cell or now - told[1] > TELL_EVERY_S:
            told[:] = cell, now
            channel.send(at=cell.to_json())

    return make(
        target,
        protocol.options_from_json(setup["options"], target),
        elapsed_s=setup["elapsed_s"],
        at=at,
        times=protocol.times_from_json(setup["times"]),
    )


def _serve(session: Any, channel: Channel, message: protocol.Message) -> None:
    """Do what the message asks; ends this process where it is of no more use."""
    if message["do"] == "overheads":
        found = profilers.measure_overheads(session.target.device, cupti=message["cupti"])
        channel.send(done=dict(found))
        return
    cells = [Cell.from_json(one) for one in message["cells"]]
    if message["do"] == "precompile":
        precompile(cells, session.target, session.options.tuned)
        channel.send(done=True)
    else:
        _measure(session, channel, cells, message["alone"])


def _measure(session: Any, channel: Channel, cells: list[Cell], alone: str | None) -> None:
    if left := session.left_behind(before=cells[0].problem):
        channel.send(left=left, done=False)
        os._exit(0)
    held: list[Record] = []
    for record in session.records(cells, lambda _: None, alone):
        if record.reason is not None and record.reason == session.lost:
            continue  # it did not start, and has a new process to start in
        if held or record.status == "oom":
            held.append(record)  # until it is known what it left
        else:
            channel.send(record=record_to_json(record))
    left = session.left_behind() if held and session.lost is None else 0
    for record in held:
        row = record_to_json(record)
        if left and record.status == "oom":
            row["reason"] += f"; {units.format_bytes(left)} stayed allocated, and its process was replaced"
        channel.send(record=row)
    if session.lost is not None:
        channel.send(lost=session.lost)
    elif left:
        channel.send(left=left, done=True)
    else:
        channel.send(done=True)
        return
    os._exit(0)


if __name__ == "__main__":
    main()
