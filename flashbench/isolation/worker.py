"""The parent's end of a worker: start it, talk to it, see it die, leave nothing of it."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import IO, Any

from flashbench import environment
from flashbench.isolation import death, lifeline, wire
from flashbench.isolation.limit import Limit

COMMAND: Sequence[str] = (sys.executable, "-m", "flashbench.isolation.child")
"""Starts a worker."""

TAIL = 2**16
"""Bytes of what it prints that are kept."""
LOOK_EVERY_S = 0.5
"""A worker whose forks keep its pipe open is seen to be gone after this time."""
DUMP_S = 2.0
"""What a hung worker is given to say where it hangs; it does so at once where it gets a processor."""
REST_S = 1.0
"""What is given to the last that it wrote; a stray fork may keep its pipes open."""
PIECE_S = 0.01
"""These two are waited for in pieces: one is all that counts of a time in which this process is held up."""


class Worker:
    """A worker process. Everything that it started ends with ``kill``, which may be called at any time.

    Raises OSError or death.Ended where the machine has no process or no thread left for one.
    """

    def __init__(
        self, command: Sequence[str] = COMMAND, surroundings: Mapping[str, str] | None = None
    ) -> None:
        self._kills = death.oom_kills()
        self._mark = uuid.uuid4().hex
        self._token = wire.token()
        variables = {**(surroundings or {}), lifeline.MARK: self._mark}
        # a session of its own: Ctrl-C and a hangup of the terminal are the parent's to judge
        self._process = subprocess.Popen(
            [*command], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
            stderr=subprocess.PIPE, env=environment.for_child(**variables), start_new_session=True,
        )  # fmt: skip
        self._inbox: queue.Queue[bytes | None] = queue.Queue()
        self._output = bytearray()
        self._gone = False
        self._readers = [
            threading.Thread(target=read, args=(stream,), daemon=True)
            for read, stream in zip((self._hear, self._overhear), self._streams(), strict=True)
        ]
        try:
            for reader in self._readers:
                reader.start()
        except RuntimeError as error:  # the user's processes are all there, or no memory for a stack
            self.kill()
            raise death.Ended(said=f"no thread is left to listen to it: {error}") from None
        self._tell(self._token + b"\n")

    @property
    def pid(self) -> int:
        """Of what was started (lifeline.py), which leads a group of the same number."""
        return self._process.pid

    def send(self, message: Mapping[str, Any]) -> None:
        """Tell the worker; whether it still lives shows in ``receive``."""
        self._tell(wire.line(message))

    def _tell(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The next message. Raises death.Ended for a worker that is gone, death.Silent after limit_s."""
        limit = Limit(limit_s)
        while True:
            left = limit.left_s()
            try:
                line = self._inbox.get(timeout=max(0.0, min(left, LOOK_EVERY_S)))
            except queue.Empty:
                if self._process.poll() is not None and self._inbox.empty():
                    self._rest(self._readers[0])  # what it said last may not have been read yet
                    if self._inbox.empty():
                        raise self._ended() from None
                if left <= 0:
                    raise death.Silent from None
                continue
            if line is None:
                raise self._ended()
            try:
                return wire.message(line, self._token)
            except wire.Noise as noise:
                self.kill()
                raise death.Ended(said=f"it wrote to the pipe of its process's messages: {noise}") from None

    def where(self, pid: int, thread: int) -> str:
        """Where in Python it hangs, as " (file:line in function)", or nothing.

        pid: of the process itself. thread: the one that measures; where that lets no signal in, another one
        writes the dump.
        """
        if not hasattr(signal, "SIGUSR1"):
            return ""
        with suppress(OSError):
            os.kill(pid, signal.SIGUSR1)
        for _ in range(round(DUMP_S / PIECE_S)):
            if found := death.place(self._of_this_turn(), thread):
                return found
            time.sleep(PIECE_S)
        return ""

    def ask(self) -> None:
        """Have it begin to end, so that several do so at once; ``kill`` waits."""
        if not self._gone and self._process.poll() is None:
            lifeline.ask(self.pid)

    def kill(self) -> None:
        """End it now, and all that it started."""
        if self._gone:
            return
        self._gone = True
        code = self._process.returncode
        if code is None:  # before it is waited for: until then the number is its own
            lifeline.end(self.pid)
            self._process.kill()
            code = self._process.wait()
        elif code < 0 or not lifeline.GUARDS:
            with suppress(AttributeError, OSError):
                os.killpg(self.pid, signal.SIGKILL)
        if code < 0:  # the guard may not have come to it
            lifeline.end_marked(self._mark)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        for reader, stream in zip(self._readers, self._streams(), strict=True):
            self._rest(reader)
            if not reader.is_alive():  # else a stray fork keeps it open
                stream.close()

    def _rest(self, reader: threading.Thread) -> None:
        """Give it time to read what its pipe still holds."""
        for _ in range(round(REST_S / PIECE_S)):
            if reader.is_alive():  # else it is done, or was never started
                reader.join(PIECE_S)

    def _streams(self) -> tuple[IO[bytes], IO[bytes]]:
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        return self._process.stdout, self._process.stderr

    def _ended(self) -> death.Ended:
        try:
            code = self._process.wait(5.0)
        except subprocess.TimeoutExpired:
            code = None
        self.kill()
        killed = death.oom_kills() > self._kills
        output = self._of_this_turn()
        if code is None:
            return death.Ended(said="its process closed its pipe and lived on", output=output)
        return death.Ended(code=code, output=output, oom_killed=killed)

    def _of_this_turn(self) -> str:
        """What was printed since the last cell's turn began, as far as it is kept."""
        return bytes(self._output).rpartition(lifeline.turn_of(self._mark))[2].decode(errors="replace")

    def _hear(self, stream: IO[bytes]) -> None:
        with suppress(OSError, ValueError):
            while line := stream.readline(wire.LONGEST):
                if not line.endswith(b"\n") and len(line) < wire.LONGEST:
                    break  # it ended in the middle: how it did says more
                self._inbox.put(line)
                if not line.startswith(self._token):
                    break  # the worker is of no more use, however much more it writes
        self._inbox.put(None)

    def _overhear(self, stream: IO[bytes]) -> None:
        with suppress(OSError, ValueError):
            while chunk := os.read(stream.fileno(), TAIL):
                self._output += chunk
                del self._output[:-TAIL]
