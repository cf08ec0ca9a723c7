"""A call repeated back to back, for what a device's slow sensors must see for a while."""

from __future__ import annotations

import time
from collections.abc import Callable

BATCH_S = 0.02
"""About how long the device works between two looks at it; waiting for it takes some microseconds."""
MAX_BATCH = 10_000


class Load:
    """Repeats a call that has run before, in batches, and waits for the device after each.

    wait: waits for the device, such as ``torch.cuda.synchronize``. calls: how many are done.
    Raises what the call raises.
    """

    def __init__(self, call: Callable[[], object], wait: Callable[[], object]) -> None:
        self._call = call
        self._wait = wait
        self._batch = 1
        self.calls = 0
        self.run()

    def run(self) -> None:
        """One batch, to its end on the device; the next is as long as this one says it must be."""
        start = time.perf_counter()
        for _ in range(self._batch):
            self._call()
        self._wait()
        self.calls += self._batch
        took = (time.perf_counter() - start) / self._batch
        self._batch = max(1, min(MAX_BATCH, int(BATCH_S / took))) if took > 0 else MAX_BATCH

    def run_until(self, done: Callable[[], bool], *, least_s: float = 0.0, most_s: float) -> bool:
        """Batches until ``done``, asked after each, says so: at least one, for least_s to most_s seconds.

        Returns what ``done`` said last.
        """
        start = time.perf_counter()
        while True:
            self.run()
            said, took = done(), time.perf_counter() - start
            if took >= most_s or (said and took >= least_s):
                return said

    def run_for(self, seconds: float) -> None:
        """Batches until the time is over."""
        self.run_until(lambda: True, least_s=seconds, most_s=seconds)
