"""Roles of a kernel that run one at a time, in an order that is chosen: ``hopper_threads`` without chance.

Which role goes on, at each barrier, load and store, is the first of an order that can: so one is as far ahead
of the others, or behind them, as barriers let it be. TMA is a role, too: last, its loads arrive when nothing
else can happen. A wait that nothing can end is told at once, with who waits.
"""

from __future__ import annotations

import random
import threading
from collections.abc import Callable, Sequence

TMA = -1


class Turns:
    """order: roles by number and TMA, whoever can go on first; or a seed, by which one of those is drawn."""

    def __init__(self, order: Sequence[int] | int, roles: int) -> None:
        self.random = random.Random(order if isinstance(order, int) else 0)
        self.order = None if isinstance(order, int) else order
        self.changed = threading.Condition()
        self.can: dict[int, Callable[[], bool]] = {role: lambda: True for role in range(roles)}
        self.flying: list[Callable[[], None]] = []
        self.turn: int | None = None
        self.stuck = ""

    def start(self) -> None:
        with self.changed:
            self._next()

    def switch(self, role: int, can: Callable[[], bool] = lambda: True) -> None:
        """Let others go on; come back in turn, once ``can`` holds."""
        with self.changed:
            self.can[role] = can
            self._next()
        self.enter(role)

    def enter(self, role: int) -> None:
        with self.changed:
            self.changed.wait_for(lambda: self.turn == role or self.stuck)
            if self.stuck:
                raise RuntimeError(self.stuck)

    def leave(self, role: int, broken: bool) -> None:
        with self.changed:
            del self.can[role]
            if broken:
                self.stuck = self.stuck or f"role {role} ended in an error"
                self.changed.notify_all()
            else:
                self._next()

    def _next(self) -> None:
        while not self.stuck:
            able = [role for role, can in self.can.items() if can()] + [TMA] * bool(self.flying)
            if not able:
                self.stuck = f"roles {sorted(self.can)} wait for each other" if self.can else ""
                self.turn = None
                break
            chosen = min(able, key=self.order.index) if self.order else self.random.choice(able)
            if chosen != TMA:
                self.turn = chosen
                break
            self.flying.pop(self.random.randrange(len(self.flying)))()
        self.changed.notify_all()
