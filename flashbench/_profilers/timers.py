"""Ways to time a call, all alike to whoever uses them: ``samples(count)`` gives seconds, in order.

- ``WallTimer``: the host's clock, on a CPU.
- ``EventTimer``: CUDA events around each call, the L2 flushed outside of them.
- ``GraphTimer``: the same around the replay of a CUDA graph, so that one launch stands for all of the call's.
- ``CuptiTimer``: the time in which kernels of the call ran, from CUPTI's records: no launch and no gap in it.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import cache, partial
from typing import Any, Protocol

from flashbench._profilers.flush import Before, Pause
from flashbench._profilers.timeline import arrange, device_records
from flashbench.errors import UnavailableError

Call = Callable[[], object]
Meanwhile = Callable[[], None]

EVENT_STEP_S = 0.5e-6
"""Resolution of CUDA events. Source: cudaEventElapsedTime in the CUDA runtime API."""
CLOCK_HZ = 2e9
"""An SM clock that no GPU exceeds by much, so that a pause of so many cycles is not shorter than meant."""
LONG_PAUSE = 1_000_000
"""Cycles, 500 us and more."""
AHEAD, START_MOST_S, LEAD_MOST_S = 1.5, 5e-3, 100e-6
"""How much more than measured a sample's host time is reckoned as, for it varies; and the longest pauses for
its sake, before some samples and before each: a call that needs more is launch-bound."""


def _nothing() -> None:
    return


class Timer(Protocol):
    """method: its name in a row. flush_s: device time of the flush before a sample, 0 without one. late: of
    all samples so far, those whose call the device may have waited for."""

    method: str
    flush_s: float
    step_s: float
    late: int
    call: Call

    def samples(self, count: int, meanwhile: Meanwhile = _nothing) -> list[float]:
        """Seconds of each of count calls; ``meanwhile`` is called while the last ones run."""

    def host_s(self) -> float:
        """Call once on an idle device and wait; the host's seconds until the call returned."""

    def wait(self) -> None:
        """Until the device has nothing left to do."""


class WallTimer:
    """The host's clock around each call."""

    method = "wall"
    flush_s = 0.0
    step_s = 0.0
    late = 0

    def __init__(self, call: Call, clock: Callable[[], float] = time.perf_counter) -> None:
        self.call = call
        self._clock = clock

    def samples(self, count: int, meanwhile: Meanwhile = _nothing) -> list[float]:
        """As Timer has it; meanwhile is called after the last."""
        found = [self.host_s() for _ in range(count)]
        meanwhile()
        return found

    def host_s(self) -> float:
        """Seconds of one call."""
        start = self._clock()
        self.call()
        return self._clock() - start

    def wait(self) -> None:
        """Nothing runs on."""


class EventTimer:
    """Seconds between two CUDA events; waits for the device once, after the last sample.

    While the device flushes, the host runs ahead: the launch of the call hides behind the flush and, where
    that and the call are too short, behind a pause before it; the first samples come after one, too. A sample
    is late where it does not: the device had reached the first event when all was enqueued. flush_s: with the
    pause before each sample, once something was sampled.
    """

    method = "events"
    step_s = EVENT_STEP_S
    late = 0

    def __init__(self, call: Call, device: str, flush: Before | None) -> None:
        self.call = call
        self.device = device
        self.flush = flush
        self.flush_s = flush_seconds(flush, device) if flush is not None else 0.0
        self._start: Pause | None = None
        self._lead: Pause | None = None

    def samples(self, count: int, meanwhile: Meanwhile = _nothing) -> list[float]:
        """As Timer has it."""
        with _current(self.device):
            if self._start is None:
                start_s, lead_s = ahead(self.call, self.flush)
                self._start, self._lead = (Pause(round(s * CLOCK_HZ)) for s in (start_s, lead_s))
                self.flush_s += lead_s
            self._start()
            found, late = _timed(self.call, self._before, count, meanwhile)
        self.late += late
        return found

    def _before(self) -> None:
        if self._lead and self._lead.cycles:
            self._lead()
        if self.flush is not None:
            self.flush()

    def host_s(self) -> float:
        """Host time of enqueueing one call on an idle device, seconds."""
        self.wait()
        with _current(self.device):
            start = time.perf_counter()
            self.call()
            took = time.perf_counter() - start
        self.wait()
        return took

    def wait(self) -> None:
        """Until the device has nothing left to do."""
        import torch

        torch.cuda.synchronize(self.device)


class GraphTimer(EventTimer):
    """The kernels of a call, captured once and replayed. The flush stays outside of the graph.

    make: makes the call anew, so that whatever a backward remembers of its forward's stream is the stream of
    the capture. Raises what the capture raises; nothing was timed then.
    """

    method = "graph"

    def __init__(self, make: Callable[[], Call], device: str, flush: Before | None) -> None:
        # the call is kept: what it made before the capture, such as what a forward saved for its backward, is
        # read at each replay and is not the graph's own
        graph, self.captured = capture(make, device)
        super().__init__(graph.replay, device, flush)


class CuptiTimer(EventTimer):
    """Time in which kernels of the call ran, kernels side by side counted once."""

    method = "cupti"
    step_s = 0.0

    def samples(self, count: int, meanwhile: Meanwhile = _nothing) -> list[float]:
        """As Timer has it. Raises UnavailableError where CUPTI's records do not tell the calls apart."""

        def enqueue() -> None:
            for _ in range(count):
                if self.flush is not None:
                    self.flush()
                self.call()
            meanwhile()

        with _current(self.device):
            records = device_records(enqueue, self.device)
        return busy_times(records, count, skip=0 if self.flush is None else self.flush.KERNELS)


def between_events(
    call: Call, flush: Call | None, count: int, meanwhile: Meanwhile = _nothing
) -> list[float]:
    """Seconds between events around each of count calls on the current device and stream.

    meanwhile: called while the last one runs.
    """
    return _timed(call, flush, count, meanwhile)[0]


def _timed(call: Call, flush: Call | None, count: int, meanwhile: Meanwhile) -> tuple[list[float], int]:
    """As ``between_events``, and how many were late."""
    import torch

    starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    late = 0
    for start, end in zip(starts, ends, strict=True):
        if flush is not None:
            flush()
        start.record()
        call()
        end.record()
        late += start.query()
    if count > 1:  # the host is far ahead by now
        ends[-2].synchronize()
    meanwhile()
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in zip(starts, ends, strict=True)], late


def ahead(call: Call, flush: Call | None) -> tuple[float, float]:
    """Seconds that the device has to pause for the host to be ahead of it: once, and before each sample.

    The second is 0 for calls that take the device longer than the host, and LEAD_MOST_S at most.
    """
    import torch

    start_s, lead_s, pause = 0.0, 0.0, Pause(LONG_PAUSE)
    for _ in range(2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        pause()
        start = time.perf_counter()
        begin.record()
        if flush is not None:
            flush()
        call()
        end.record()
        host_s = time.perf_counter() - start
        end.synchronize()
        device_s = begin.elapsed_time(end) / 1000
        start_s = max(start_s, AHEAD * host_s)
        lead_s = max(lead_s, AHEAD * host_s - device_s)
        if device_s > AHEAD * host_s:
            break
    return min(start_s, START_MOST_S), min(lead_s, LEAD_MOST_S)


def flush_seconds(flush: Before, device: str) -> float:
    """How long the device is busy with one flush, measured once for each buffer.

    After a pause that is longer than any launch of it: else it would be the host's time.
    """
    if flush.seconds is None:
        with _current(device):
            flush()
            flush.seconds = statistics.median(between_events(flush, Pause(LONG_PAUSE), 5))
    return flush.seconds


@cache
def _stream(device: str) -> Any:
    """Of captures on the device, which is the current one."""
    import torch

    return torch.cuda.Stream()


def capture(make: Callable[[], Call], device: str) -> tuple[Any, Call]:
    """A CUDA graph of the call that ``make`` makes, and that call, which must live as long as the graph.

    Made, run and captured on one stream of their own, the same for all: cuBLAS keeps 32 MiB for each.
    """
    import torch

    with _current(device):
        stream, graph = _stream(device), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            call = make()
            for _ in range(2):  # what is compiled, loaded or chosen by trying must not be inside
                call()
            torch.cuda.synchronize()
            try:
                with torch.cuda.graph(graph, stream=stream):
                    call()
            except Exception:
                with suppress(Exception):  # a broken capture may leave the allocator inside of it
                    torch._C._cuda_endAllocateToPool(torch.cuda.current_device(), graph.pool())
                raise
        torch.cuda.synchronize()
    return graph, call


def busy_times(records: Sequence[tuple[str, float, float]], count: int, skip: int) -> list[float]:
    """Seconds in which kernels ran, per call, from the records of count calls, each after skip of a flush.

    records: (name, start, end) in microseconds. Raises UnavailableError where the calls did not all launch
    the same kernels, so that they cannot be told apart.
    """
    ordered = sorted(records, key=lambda record: record[1])
    each = len(ordered) // count
    calls = [ordered[at * each : (at + 1) * each] for at in range(count)]
    names = {tuple(name for name, _, _ in one) for one in calls}
    if each * count != len(ordered) or each <= skip or len(names) > 1:
        raise UnavailableError(
            f"--timing cupti: {len(ordered)} kernels of {count} calls do not repeat, so no call can be told"
            " from the next",
            "time this cell with --timing events",
        )
    return [arrange(one[skip:]).busy_s for one in calls]


def _current(device: str) -> Any:
    import torch

    return torch.cuda.device(device)


def timer_of(method: str, call: Call, again: Callable[[], Call], device: str, flush: Before | None) -> Timer:
    """The timer of that name. again: makes the call anew, for a capture. Raises what a capture raises."""
    if not device.startswith("cuda"):
        return WallTimer(call)
    kinds: dict[str, Callable[[], Timer]] = {
        "events": partial(EventTimer, call, device, flush),
        "graph": partial(GraphTimer, again, device, flush),
        "cupti": partial(CuptiTimer, call, device, flush),
    }
    return kinds[method]()
