"""A time limit that stands still while this process does: a job that is suspended (Slurm, ``docker pause``, a
laptop's lid) has not hung."""

from __future__ import annotations

import time

MOST_S = 1.0
"""Between two looks no more than this counts; whoever waits looks more often."""


class Limit:
    """So many seconds of this process's own running from now on. It has to be looked at all the while."""

    def __init__(self, seconds: float) -> None:
        self._left_s = seconds
        self._seen = time.monotonic()

    def left_s(self) -> float:
        """What is left of it, below 0 once it is over."""
        now = time.monotonic()
        self._left_s -= min(now - self._seen, MOST_S)
        self._seen = now
        return self._left_s

    def shorten(self, seconds: float) -> None:
        """Leave no more than so many seconds."""
        self._left_s = min(self.left_s(), seconds)
