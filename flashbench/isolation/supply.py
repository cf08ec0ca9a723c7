"""The one worker of a bench: started when it is first needed, replaced when it is lost."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

from flashbench.isolation import death, worker

log = logging.getLogger("flashbench")

START_S = 300.0
"""A worker is given this time to import torch and open the device."""
STARTS = 2
"""One that does not start is tried so often in a row."""


class Supply:
    """Gives out a worker that has had its first message (setup) and is ready.

    starting_s: what starting took so far. surroundings: environment variables that a worker has beside ours.
    """

    def __init__(
        self, setup: Callable[[], Mapping[str, Any]], command: Sequence[str] | None = None,
        surroundings: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.starting_s = 0.0
        self._setup = setup
        self._command = command or worker.COMMAND
        self._surroundings = surroundings or {}
        self._worker: worker.Worker | None = None
        self._pid = self._thread = 0

    def get(self) -> worker.Worker:
        """The worker. Raises death.Ended where none starts."""
        start = time.monotonic()
        for left in reversed(range(STARTS)):
            if self._worker is not None:
                break
            try:
                self._start()
            except (death.Ended, death.Silent, OSError) as error:
                self.drop()
                if not left:
                    said = str(error) or f"it was not ready after {START_S:.0f} s"
                    raise death.Ended(said=said) from None
        self.starting_s += time.monotonic() - start
        assert self._worker is not None
        return self._worker

    def _start(self) -> None:
        self._worker = worker.Worker(self._command, self._surroundings)
        self._worker.send(self._setup())
        message = self.heard(START_S)
        if any(type(message.get(name)) is not int for name in ("pid", "thread")):
            raise death.Ended(said=str(message.get("raised", "it did not say that it was ready")))
        self._pid, self._thread = message["pid"], message["thread"]

    def heard(self, limit_s: float) -> Mapping[str, Any]:
        """The worker's next message that is no warning; those are logged. Raises as Worker.receive."""
        assert self._worker is not None
        while True:
            message = self._worker.receive(limit_s)
            if "warning" not in message:
                return message
            log.warning("%s", message["warning"])

    def ask(self, message: Mapping[str, Any], limit_s: float) -> Any:
        """What the worker answers to something beside the cells; None, with a warning, where it is lost."""
        try:
            self.get().send(message)
            answer = self.heard(limit_s)
            if "done" in answer:
                return answer["done"]
            reason = str(answer.get("raised", "no answer"))
        except death.Ended as error:
            reason = str(error)
        except death.Silent:
            reason = f"it took over {limit_s:.0f} s"
        self.drop()
        log.warning("%s: %s", message["do"], reason)
        return None

    def where(self) -> str:
        """Where in Python the worker is, as " (file:line in function)", or nothing."""
        return self._worker.where(self._pid, self._thread) if self._worker else ""

    def drop(self) -> None:
        """End the worker, if there is one; the next ``get`` starts another."""
        if self._worker is not None:
            with suppress(OSError):
                self._worker.kill()
        self._worker = None
