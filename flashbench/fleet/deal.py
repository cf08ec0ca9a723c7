"""Which group of cells is measured next, by whom, and beside whom."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence

from flashbench import plan, runner
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.runner import RunOptions

LOOK_EVERY_S = 0.2
"""A card that waits for work looks so often whether it should stop."""

Group = Sequence[Cell]


def expected(cells: Sequence[Cell], target: Target, options: RunOptions) -> dict[Cell, float]:
    """The time that the plan expects of each cell, seconds."""
    planned = plan.plan(cells, target, timed=options.time, energy=options.energy, load=options.load)
    return {one.cell: one.expected_s for one in planned}


def longest_first(cells: Sequence[Cell], target: Target, options: RunOptions) -> list[Group]:
    """The groups of the cells, by the time that is expected of them; as they came where it is equal."""
    expected_s = expected(cells, target, options)
    return sorted(runner.groups(cells), key=lambda group: -sum(expected_s[cell] for cell in group))


class Deal:
    """Groups in order, for so many cards, each in a thread of its own.

    Nobody gets one before all have gathered or left: until then some of them compile. Nobody goes home before
    all is done: a card may be lost, and its group is somebody else's then.
    """

    def __init__(self, groups: Iterable[Group], cards: int) -> None:
        self._left = deque(groups)
        self._cards = cards
        self._here = 0
        self._at_work = 0
        self._change = threading.Condition()

    def gather(self, stop: Callable[[], bool]) -> None:
        """Wait until every other card is here too."""
        with self._change:
            self._here += 1
            self._change.notify_all()
            while self._here < self._cards and not stop():
                self._change.wait(LOOK_EVERY_S)

    def take(self, stop: Callable[[], bool]) -> Group | None:
        """The next group; None once there will be none, or stop says so."""
        with self._change:
            while not stop():
                if self._left:
                    self._at_work += 1
                    return self._left.popleft()
                if not self._at_work:
                    break
                self._change.wait(LOOK_EVERY_S)
            return None

    def done(self, rest: Group = ()) -> None:
        """What was taken is measured. rest: what of it is not, and is the next that somebody gets."""
        with self._change:
            self._at_work -= 1
            if rest:
                self._left.appendleft(rest)
            self._change.notify_all()

    def leave(self) -> None:
        """A card that did not ``gather`` will not."""
        with self._change:
            self._cards -= 1
            self._change.notify_all()

    @property
    def left(self) -> list[Group]:
        """What nobody took."""
        return list(self._left)


class Neighbours:
    """Who is at work on the same host at the same time. Safe in threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._seen: dict[tuple[str, str], set[str]] = {}

    def begin(self, host: str, name: str) -> None:
        """The card of that name begins a group."""
        with self._lock:
            here = {other: seen for other, seen in self._seen.items() if other[0] == host}
            for seen in here.values():
                seen.add(name)
            self._seen[host, name] = {other for _, other in here}

    def of(self, host: str, name: str) -> list[str]:
        """The others that were at work at some time since it began its group."""
        with self._lock:
            return sorted(self._seen[host, name])

    def end(self, host: str, name: str) -> None:
        """The card is idle."""
        with self._lock:
            self._seen.pop((host, name), None)
