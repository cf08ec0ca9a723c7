"""A named barrier of a block (PTX's bar), for ``hopper_threads``: it counts threads, and nothing else."""

from __future__ import annotations

import threading


class Named:
    """A phase ends when as many threads have arrived as every arrival says.

    Hardware would take a role's second arrival for another's; here it is an error, as one too many is.
    """

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.phase = self.of = 0
        self.arrived: dict[int, int] = {}

    def arrive(self, role: int, threads: int, of: int) -> int:
        """Arrive with so many threads, all of the role's; the phase that ends once ``of`` have."""
        with self.condition:
            assert role not in self.arrived, "a role arrives again before the others have"
            assert not self.arrived or self.of == of, f"a barrier of {self.of} threads and of {of}"
            self.of, self.arrived[role], phase = of, threads, self.phase
            there = sum(self.arrived.values())
            assert there <= of, f"{there} threads at a barrier of {of}"
            if there == of:
                self.arrived.clear()
                self.phase += 1
                self.condition.notify_all()
        return phase

    def wait(self, phase: int, hang_s: float) -> None:
        with self.condition:
            if not self.condition.wait_for(lambda: self.phase != phase, hang_s):
                raise RuntimeError("a named barrier was waited for in vain")
