"""How long calls wait for a cap to end, and how the next ones learn what it was good for.

NVML names a power cap for a third of a second after its load has ended, while the chip runs at its full clock
again after a quarter of that (``cooling`` of ``tools/timing_evidence.py``): its word does not say whether a
wait helped. The rounds do: one of them came after the wait, the others did not.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence

WAITED_MOST_S = 0.12
"""Seconds that a call waits for caps to end, of all its rounds. A chip that is at its cap all the time would
only make a sweep longer."""
PAUSE_S, PAUSE_GROWS = 0.02, 1.5
NOTHING_S = 1e-6
HELPED = 0.015
"""A wait helped where the rounds without one took longer by this share, in the median."""


class Patience:
    """Shared by the calls of a process: how long the next one may wait for caps to end, seconds."""

    def __init__(self) -> None:
        self.may_wait_s = WAITED_MOST_S

    def learn(self, helped: bool) -> None:
        """From a call that waited for a cap: in vain, and the next may wait half as long, but one pause."""
        self.may_wait_s = WAITED_MOST_S if helped else max(PAUSE_S, self.may_wait_s / 2)


class Waits:
    """The waits of one call. pause: waits, seconds. number, waited_s: of those so far; took_s: by the clock.

    may_wait_s: for caps, in all; known once it has waited for one.
    """

    def __init__(self, patience: Patience, pause: Callable[[float], None]) -> None:
        self.number, self.waited_s, self.took_s = 0, 0.0, 0.0
        self.may_wait_s: float | None = None
        self._patience, self._pause = patience, pause
        self._ended, self._before_s = False, 0.0
        self._after_a_wait, self._others = list[float](), list[float]()

    @property
    def left_s(self) -> float:
        """Seconds that it may still wait for caps."""
        may = self._patience.may_wait_s if self.may_wait_s is None else self.may_wait_s
        left = may - self.waited_s
        return left if left > NOTHING_S else 0.0

    def for_cap(self, times: int) -> None:
        """Wait for a cap to end, the longer the more often in a row, and in all no longer than it may."""
        self.may_wait_s = self.may_wait_s or self._patience.may_wait_s
        self._wait(min(PAUSE_S * PAUSE_GROWS ** (times - 1), self.left_s))

    def for_word(self, wait_s: float) -> bool:
        """Wait until NVML's reading must be new; False where the call has waited as long as any may."""
        wait_s = min(wait_s, WAITED_MOST_S - self.waited_s)
        if wait_s <= 0:
            return False
        self._wait(wait_s)
        return True

    def ended_cap(self) -> None:
        """NVML names no cap any more, after a wait for one."""
        self._ended = True

    def took(self, samples: Sequence[float]) -> float:
        """A round was taken; the seconds that the call had waited right before it."""
        before_s, self._before_s = self._before_s, 0.0
        (self._after_a_wait if before_s else self._others).append(statistics.median(samples))
        return before_s

    def teach(self) -> None:
        """Tell the patience what waiting for a cap did, if the call has; once it is done."""
        if self.may_wait_s is not None and (self._ended or (self._after_a_wait and self._others)):
            self._patience.learn(self._ended or helped(self._after_a_wait, self._others))

    def _wait(self, wait_s: float) -> None:
        self.number += 1
        self.waited_s += wait_s
        self._before_s += wait_s
        start = time.perf_counter()
        self._pause(wait_s)
        self.took_s += time.perf_counter() - start


def helped(after_a_wait: Sequence[float], others: Sequence[float]) -> bool:
    """Whether rounds after a wait are faster than the others. Both: seconds, the rounds' medians."""
    return statistics.median(others) > (1 + HELPED) * statistics.median(after_a_wait)
