"""The parent's end of all ranks: start them, hand each cell to all, see one die, leave nothing of them."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashbench import userdata
from flashbench.isolation import death
from flashbench.isolation.limit import Limit
from flashbench.isolation.worker import Worker
from flashbench.problem import Cell

COMMAND: Sequence[str] = (sys.executable, "-m", "flashbench.ring.rank")
START_S = 180.0
"""Until all ranks have imported torch and found each other."""
LOOK_S = 0.02
AFTERMATH_S, AFTERMATH_LOOKS = 0.5, 5
"""After the first trouble: so long, and so many looks at each rank should this process be held up meanwhile,
until others' is known, so that who died is told and not who noticed."""


class RankLost(Exception):
    """A rank died or fell silent: the group is gone. str: which, and how."""


class CellFailed(Exception):
    """A rank raised: the group is gone, and another may take the next cell."""


class Group:
    """So many rank processes that have joined; all are gone when it is left."""

    def __init__(self, ranks: int, device_type: str, *, seed: int, limit_s: float) -> None:
        self.limit_s = limit_s
        self._folder = userdata.temporary("flashbench-ring-")
        self._workers: list[Worker] = []
        try:
            for rank in range(ranks):
                self._workers.append(_started(rank, ranks))
                self._workers[rank].send({
                    "rank": rank, "ranks": ranks, "device": device_type, "seed": seed,
                    "store": str(Path(self._folder.name) / "store"), "limit_s": limit_s + START_S,
                })  # fmt: skip
            self._hear(START_S)
        except BaseException:
            self.close()
            raise

    def run(self, cell: Cell, *, timed: bool) -> list[dict[str, Any]]:
        """What each rank says of the cell, by rank. Raises RankLost, CellFailed."""
        for worker in self._workers:
            worker.send({"cell": cell.to_json(), "timed": timed})
        return [reply["row"] for reply in self._hear(self.limit_s)]

    def _hear(self, limit_s: float) -> list[Any]:
        """The next message of every rank."""
        replies: dict[int, Any] = {}
        died: dict[int, str] = {}
        limit, looks = Limit(limit_s), 0
        while len(replies) + len(died) < len(self._workers) and (limit.left_s() > 0 or looks > 0):
            looks -= 1
            for rank, worker in enumerate(self._workers):
                if rank in replies or rank in died:
                    continue
                before = len(died) + sum("raised" in reply for reply in replies.values())
                try:
                    replies[rank] = worker.receive(LOOK_S)
                except death.Silent:
                    continue
                except death.Ended as ended:
                    died[rank] = str(ended)
                if not before and (rank in died or "raised" in replies[rank]):
                    limit.shorten(AFTERMATH_S)
                    looks = AFTERMATH_LOOKS
        return self._judged(replies, died, limit_s)

    def _judged(self, replies: dict[int, Any], died: dict[int, str], limit_s: float) -> list[Any]:
        count = len(self._workers)
        raised = {rank: reply["raised"] for rank, reply in replies.items() if "raised" in reply}
        silent = [rank for rank in range(count) if rank not in replies and rank not in died]
        if not (died or raised or silent):
            return [replies[rank] for rank in range(count)]
        self.close()
        if died:
            rank, how = next(iter(died.items()))
            raise RankLost(f"rank {rank} of {count}: {how}")
        if raised:
            rank, why = next(iter(raised.items()))
            raise CellFailed(f"rank {rank} of {count}: {why}")
        which = ", ".join(map(str, silent))
        raise RankLost(f"rank {which} of {count}: no answer in {limit_s:g} s (--cell-timeout)")

    def close(self) -> None:
        """End every rank and what it started."""
        for worker in self._workers:
            worker.ask()
        for worker in self._workers:
            worker.kill()
        with suppress(OSError):
            self._folder.cleanup()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _started(rank: int, ranks: int) -> Worker:
    """The process of a rank. Raises RankLost where the machine has no process or thread left for one."""
    try:
        return Worker(COMMAND)
    except (death.Ended, OSError) as error:
        raise RankLost(f"rank {rank} of {ranks} did not start: {error}") from None
