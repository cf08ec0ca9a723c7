"""How long a call takes, how much memory it needs, what its Triton kernels move. Knows a call, not attention.

Time on a GPU is between two CUDA events around the call. With a cold cache the L2 is flushed before
each sample, outside the timed window (``Flush``); while the device flushes, the host runs ahead, so the
launch overhead of the call hides behind the flush. Whether the host could keep up otherwise is measured
apart and flagged ``launch-bound``. Every sample is kept.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashbench._profilers.clocks import Clocks, open_clocks
from flashbench._profilers.energy import measure_energy
from flashbench._profilers.flush import Flush
from flashbench._profilers.gpm import measure as measure_gpm
from flashbench._profilers.telemetry import sampling, summary, throttled_by
from flashbench._profilers.timeline import Timeline, backend_of, timeline
from flashbench._profilers.trace import Launch, Moved, trace
from flashbench.record import FLUSH, Samples

__all__ = [
    "CPU_POLICY",
    "GPU_POLICY",
    "Clocks",
    "Flush",
    "Launch",
    "Moved",
    "Policy",
    "Timeline",
    "Timing",
    "Usage",
    "backend_of",
    "drifted",
    "measure_energy",
    "measure_gpm",
    "measure_memory",
    "measure_time",
    "open_clocks",
    "policy_for",
    "timeline",
    "trace",
]

DRIFT = 0.05
"""Flagged above this change from the first quarter of the samples to the last."""


@dataclass(frozen=True, kw_only=True)
class Policy:
    """How many samples to take.

    limit_s: wanted time in samples per cell; a fast call is repeated up to max_samples within it, a
    slow one is repeated min_samples times all the same. warmup: calls before the first sample.
    """

    limit_s: float
    min_samples: int
    max_samples: int
    warmup: int

    def samples(self, call_s: float) -> int:
        """How many samples of a call that takes about call_s seconds."""
        wanted = int(self.limit_s / call_s) if call_s > 0 else self.max_samples
        return max(self.min_samples, min(self.max_samples, wanted))


GPU_POLICY = Policy(limit_s=0.3, min_samples=5, max_samples=100, warmup=3)
CPU_POLICY = Policy(limit_s=0.2, min_samples=5, max_samples=200, warmup=3)


def policy_for(device: str) -> Policy:
    """The policy of a device type."""
    return GPU_POLICY if device.startswith("cuda") else CPU_POLICY


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Samples of a call, what to flag, and the GPU's clocks before and after (empty on a CPU)."""

    samples: Samples
    flags: tuple[str, ...] = ()
    clocks: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Memory of one call, bytes. peak_extra and reserved are None on a CPU, which torch does not track."""

    outputs_bytes: int
    peak_extra_bytes: int | None
    reserved_bytes: int | None


def measure_time(
    call: Callable[[], object],
    *,
    device: str,
    cache: str = "cold",
    policy: Policy | None = None,
    clocks: Clocks | None = None,
) -> Timing:
    """Time a call that has run before (so that nothing compiles here). Raises what the call raises.

    cache: ``cold`` or ``hot``; a CPU's caches are never flushed, and its samples say ``hot``.
    """
    policy = policy or policy_for(device)
    if device.startswith("cuda"):
        return _time_on_gpu(call, device, cache, policy, clocks)
    return _time_on_cpu(call, policy)


def _time_on_cpu(call: Callable[[], object], policy: Policy) -> Timing:
    durations = [_wall(call) for _ in range(policy.warmup)]
    samples = tuple(_wall(call) for _ in range(policy.samples(durations[-1] if durations else 0.0)))
    flags = ("drift",) if drifted(samples) else ()
    return Timing(samples=Samples(samples_s=samples, cache="hot", method="wall"), flags=flags)


def _wall(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _time_on_gpu(
    call: Callable[[], object], device: str, cache: str, policy: Policy, clocks: Clocks | None
) -> Timing:
    import torch

    flush = Flush(device) if cache == "cold" else None
    with torch.cuda.device(device):
        host_s = _warm_up(call, policy)
        estimate_s = statistics.median(_events(call, flush, min(3, policy.min_samples)))
        before = clocks.read() | clocks.others() if clocks else {}
        after: dict[str, Any] = {}

        def still_running() -> None:
            if clocks:
                after.update(clocks.read() | clocks.others())

        with sampling(clocks) as readings:
            samples = tuple(_events(call, flush, policy.samples(estimate_s), still_running))
    telemetry: dict[str, Any] = {"host_s": host_s}
    if clocks:
        telemetry |= {"before": before, "during": summary(readings), "after": after}
    flags = []
    if reasons := throttled_by(before, telemetry.get("during", {}), after):
        telemetry["throttled_by"] = reasons
        flags.append("throttled")
    if host_s > statistics.median(samples):
        flags.append("launch-bound")
    if drifted(samples):
        flags.append("drift")
    return Timing(
        samples=Samples(samples_s=samples, cache=cache, method="events", flush=FLUSH if flush else None),
        flags=tuple(flags),
        clocks=telemetry,
    )


def _warm_up(call: Callable[[], object], policy: Policy) -> float:
    """Run the warm-up calls on an idle device; the least host time of one, seconds."""
    import torch

    host_s = []
    for _ in range(policy.warmup):
        torch.cuda.synchronize()
        host_s.append(_wall(call))
    torch.cuda.synchronize()
    return min(host_s, default=0.0)


def _events(
    call: Callable[[], object],
    flush: Callable[[], object] | None,
    count: int,
    before_waiting: Callable[[], None] = lambda: None,
) -> list[float]:
    """Seconds between events around each of count calls; waits for the device when all are queued.

    before_waiting: called while the last sample runs.
    """
    import torch

    starts = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    ends = [torch.cuda.Event(enable_timing=True) for _ in range(count)]
    for start, end in zip(starts, ends, strict=True):
        if flush is not None:
            flush()
        start.record()
        call()
        end.record()
    if count > 1:  # the host is far ahead by now
        ends[-2].synchronize()
    before_waiting()  # the device still works through the last sample
    torch.cuda.synchronize()
    return [start.elapsed_time(end) / 1000 for start, end in zip(starts, ends, strict=True)]


def drifted(samples: Sequence[float]) -> bool:
    """True if the median of the last quarter differs by over 5 % from that of the first.

    Fewer than 8 samples cannot tell.
    """
    quarter = len(samples) // 4
    if quarter < 2:
        return False
    first, last = statistics.median(samples[:quarter]), statistics.median(samples[-quarter:])
    return abs(last - first) > DRIFT * first


def measure_memory(call: Callable[[], object], device: str) -> Usage:
    """Memory of one call that has run before; its outputs are freed again.

    Peak is the most allocated during the call above what was allocated just before; what the
    allocator had cached is given back first, so that reserved is of this call and not of an earlier.
    """
    if not device.startswith("cuda"):
        return Usage(outputs_bytes=_bytes(call()), peak_extra_bytes=None, reserved_bytes=None)
    import torch

    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    outputs = _bytes(call())
    torch.cuda.synchronize(device)
    return Usage(
        outputs_bytes=outputs,
        peak_extra_bytes=torch.cuda.max_memory_allocated(device) - before,
        reserved_bytes=torch.cuda.max_memory_reserved(device),
    )


def _bytes(output: Any) -> int:
    tensors = output if isinstance(output, tuple | list) else (output,)
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)
