"""Ops in a row and what is alive between them: the traffic and the peak memory of an eager program."""

from __future__ import annotations

from collections.abc import Mapping

from flashbench._iomodel.types import NO_BYTES, Step


class Ledger:
    """Steps as they are added, and the most bytes alive at once beyond what was alive before them.

    peak: with everything that was there before kept. joined: with what ``release`` gave back counted
    as free, as a backward frees what its forward had saved.
    """

    def __init__(self) -> None:
        self.steps: list[Step] = []
        self.alive: dict[str, int] = {}
        self.peak = self.joined = 0
        self._now = self._released = 0

    def op(
        self,
        name: str,
        read: Mapping[str, int],
        write: Mapping[str, int],
        flops: int = 0,
        exps: int = 0,
    ) -> None:
        """An op that allocates what it writes, unless that is alive already, and writes each once."""
        self.steps.append(Step(name, read, write, NO_BYTES, flops, exps))
        alive, now = self.alive, self._now
        for tensor, size in write.items():
            if tensor not in alive:
                alive[tensor] = size
                now += size
        self._now = now
        if now > self.peak:
            self.peak = now
        if now - self._released > self.joined:
            self.joined = now - self._released

    def free(self, *tensors: str) -> None:
        """Tensors that nothing refers to any more; unknown ones were never allocated here."""
        for tensor in tensors:
            self._now -= self.alive.pop(tensor, 0)

    def release(self, size: int) -> None:
        """Bytes, alive before the first op, that are free from here on."""
        self._released += size
