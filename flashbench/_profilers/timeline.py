"""Which kernels a call launches, when, and for how long: CUPTI's activity records through torch.profiler.

    timeline(call, "cuda:0") -> Timeline

Needs no permission for counters. Kernel times here are each kernel's own; what an event pair measures
around the call also holds the gaps between kernels and the launch of the first.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from flashbench.errors import UnavailableError

LAUNCH_BOUND = 1.2
"""Event time over busy time from which on the host, not the device, sets the pace of a call."""
APART = 1.1
"""Event time over busy time, or the other way round, from which on the two do not agree."""

log = logging.getLogger("flashbench")


@dataclass(frozen=True, kw_only=True)
class KernelTime:
    """One kernel or copy on the device. start_s: since the first one of the call. Seconds."""

    name: str
    start_s: float
    duration_s: float

    @property
    def end_s(self) -> float:
        """When it ended, seconds since the start of the first."""
        return self.start_s + self.duration_s


@dataclass(frozen=True, kw_only=True)
class Timeline:
    """The kernels of one call in the order of their start."""

    kernels: tuple[KernelTime, ...]

    @property
    def kernel_s(self) -> float:
        """Sum of the kernels' times, seconds."""
        return sum(kernel.duration_s for kernel in self.kernels)

    @property
    def span_s(self) -> float:
        """Seconds from the start of the first kernel to the end of the last one."""
        return max((kernel.end_s for kernel in self.kernels), default=0.0)

    @property
    def gaps_s(self) -> tuple[float, ...]:
        """Idle seconds before each kernel but the first; 0 where an earlier one, on any stream, still ran."""
        gaps, end = [], self.kernels[0].end_s if self.kernels else 0.0
        for kernel in self.kernels[1:]:
            gaps.append(max(0.0, kernel.start_s - end))
            end = max(end, kernel.end_s)
        return tuple(gaps)

    @property
    def busy_s(self) -> float:
        """Seconds in which any kernel ran; kernels side by side count once, in kernel_s each."""
        return self.span_s - sum(self.gaps_s)

    @property
    def busy_share(self) -> float | None:
        """Busy time over the span, a fraction; None without a span."""
        return self.busy_s / self.span_s if self.span_s else None

    def shares(self) -> list[tuple[str, float]]:
        """(kernel, share of kernel_s), by name, the largest first."""
        spent: dict[str, float] = {}
        for kernel in self.kernels:
            spent[kernel.name] = spent.get(kernel.name, 0.0) + kernel.duration_s
        total = self.kernel_s
        ordered = sorted(spent.items(), key=lambda pair: -pair[1])
        return [(name, seconds / total if total else 0.0) for name, seconds in ordered]

    def launch_bound(self, event_s: float) -> bool:
        """Whether what events measured around the call exceeds its busy time by LAUNCH_BOUND."""
        return bool(self.kernels) and event_s > LAUNCH_BOUND * self.busy_s

    def disagreement(self, event_s: float) -> str | None:
        """How what events measured around the call departs from its busy time, in words, or None.

        Events also hold the launch of the first kernel and the gaps, so that longer ones are the host's
        doing, at most; shorter ones say that the recorded call is not the one that is timed.
        """
        if not self.busy_s:
            return None
        ratio = event_s / self.busy_s
        if 1 / APART <= ratio <= APART:
            return None
        if ratio < 1:
            return (
                f"events {1 - ratio:.0%} shorter than the kernels: the recorded call was slower (clocks,"
                " profiler) or runs where events do not see it"
            )
        cause = "launch-bound" if self.launch_bound(event_s) else "gaps, or other clocks"
        return f"events {ratio - 1:.0%} longer than the kernels: {cause}"

    def to_json(self) -> dict[str, Any]:
        """As it stands in JSON."""
        return {
            "kernel_s": self.kernel_s,
            "span_s": self.span_s,
            "gap_s": sum(self.gaps_s),
            "busy_share": self.busy_share,
            "kernels": [
                {"kernel": k.name, "start_s": k.start_s, "duration_s": k.duration_s} for k in self.kernels
            ],
        }


BACKENDS = (
    ("flash", ("pytorch_flash::", "flash_fwd", "flash_bwd")),
    ("cudnn", ("cudnn",)),
    ("efficient", ("fmha_cutlass", "efficient_attention")),
)
"""Parts of kernel names by which a backend of torch's attention is known; the first that fits counts."""


def backend_of(names: Sequence[str]) -> str | None:
    """The backend of torch's attention that launches such kernels; ``math`` where none of the fused does."""
    if not names:
        return None
    for backend, parts in BACKENDS:
        if any(part in name for name in names for part in parts):
            return backend
    return "math"


def timeline(call: Callable[[], object], device: str) -> Timeline:
    """The kernels of one call that has run before. Raises UnavailableError where CUPTI shows none."""
    if not device.startswith("cuda"):
        raise UnavailableError("--timeline: kernels run on a GPU; there is none in this run")
    import torch

    torch.cuda.synchronize(device)
    found = arrange(device_records(call, device))
    if not found.kernels:
        raise UnavailableError(
            "--timeline: CUPTI recorded no kernel", "another profiler may hold it; stop that one"
        )
    return found


def device_records(call: Callable[[], object], device: str) -> list[tuple[str, float, float]]:
    """(name, start, end) in microseconds of every kernel and copy of what ``call`` enqueues."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        call()
        torch.cuda.synchronize(device)
    return [
        (event.name, event.time_range.start, event.time_range.end)
        for event in profiler.events() or ()
        if event.device_type == torch.autograd.DeviceType.CUDA
        and not getattr(event, "is_user_annotation", False)  # a record_function's range on the device
    ]


def arrange(records: Any) -> Timeline:
    """A timeline of (name, start, end) records in microseconds, in any order."""
    ordered = sorted(records, key=lambda record: record[1])
    first = ordered[0][1] if ordered else 0
    return Timeline(
        kernels=tuple(
            KernelTime(name=name, start_s=(start - first) / 1e6, duration_s=(end - start) / 1e6)
            for name, start, end in ordered
        )
    )
