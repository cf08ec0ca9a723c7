"""Record: what became of one cell. Plain data; runfile.py turns it into JSON and back."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashbench.problem import Cell

STATUSES = {
    "ok": "checked against the fp64 reference, then timed",
    "checked": "correct, not timed (Triton's interpreter)",
    "profiled": "ran under a profiler: counted, not timed",
    "unsupported": "the implementation does not take this problem",
    "unavailable": "the implementation cannot run on this machine",
    "skipped": "not started, because it could not fit or the time budget was spent",
    "oom": "ran out of memory",
    "wrong": "the result was outside the error budget; not timed",
    "failed": "raised an exception",
    "timeout": "took longer than it may",
}
"""Every status of a row. All but ``ok`` come with a reason; only ``ok`` has samples."""

FLAGS = {
    "suspect": "faster than the hardware allows, or at odds with other times of the same implementation",
    "throttled": "the GPU reported a thermal or power cap, or its SM clock fell by over 10 %, meanwhile",
    "launch-bound": "the host could not feed the device; the time is the launch overhead",
    "drift": "the last quarter of the samples differs from the first by over 5 %",
    "multimodal": "the samples have two levels, apart by over 1 %",
}
"""Marks on a row that was timed; they stand apart from the status."""


HOSTS = ("launch-bound",)
"""Flags of a time that is partly the host's."""


def spread_of(samples: Sequence[float] | None) -> float:
    """Interquartile range over the median (0 for fewer than 4 samples), a fraction."""
    if not samples or len(samples) < 4:
        return 0.0
    first, middle, third = statistics.quantiles(samples, n=4)
    return (third - first) / middle if middle else 0.0


def layer_flags(row: Mapping[str, Any]) -> list[str]:
    """The flags of a row of ``block``: those of the step, and those of its attention alone, named so."""
    return [*(row.get("flags") or ()), *(f"attention {flag}" for flag in row.get("attention_flags") or ())]


def hosts_share(rows: Iterable[Mapping[str, Any]]) -> str:
    """What to say of the rows of ``block`` whose time is partly the host's; empty where there are none."""
    count = sum(any(flag.endswith(HOSTS) for flag in layer_flags(row)) for row in rows)
    if not count:
        return ""
    which = "1 row is" if count == 1 else f"{count} rows are"
    return (
        f"{which} launch-bound: time and share of attention there are partly the host's, and no share of the"
        " GPU's time"
    )


TIMINGS = ("auto", "events", "graph", "cupti")
"""How a call may be asked to be timed; ``auto`` is events, and graph where launching is the limit."""
LOADS = ("burst", "sustained")
"""What a sample follows: a chip that no cap holds back, or the same call until its clock has settled."""
FLUSH = "read"
"""How the L2 is made cold now: a buffer is read, so that no dirty line is left."""
FLUSH_BEFORE = "write"
"""How it was in files whose cold samples do not say: a buffer was written, and the call evicted its lines."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """Raw times of one call, in order, nothing dropped.

    samples_s: seconds. cache: ``cold`` (L2 flushed before each sample, outside the timed window)
    or ``hot``. method: ``events`` (CUDA events around the call), ``graph`` (around the replay of a CUDA
    graph of it), ``cupti`` (the time its kernels ran) or ``wall`` (host clock, on a CPU). flush: how the L2
    was flushed, ``FLUSH`` or ``FLUSH_BEFORE``; None where it was not. load: ``burst`` or ``sustained``; None
    where nothing was done about what came before.
    """

    samples_s: tuple[float, ...]
    cache: str
    method: str
    flush: str | None = None
    load: str | None = None

    @property
    def median_s(self) -> float:
        """Median of the samples, seconds."""
        return statistics.median(self.samples_s)

    @property
    def spread(self) -> float:
        """Interquartile range over the median (0 for fewer than 4 samples), a fraction."""
        return spread_of(self.samples_s)


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Device memory of one call, bytes; None where it was not measured (CPU).

    peak_extra: highest allocated during the call minus allocated just before it (so it holds the
    outputs and scratch, not the inputs, nor, for a backward, what the forward saved).
    reserved: what the allocator held from the driver at the peak.
    """

    inputs_bytes: int
    outputs_bytes: int
    peak_extra_bytes: int | None
    reserved_bytes: int | None


@dataclass(frozen=True, kw_only=True)
class Accuracy:
    """Largest absolute error against the fp64 reference per tensor, and what it may be.

    Keys are ``o``, ``dq``, ``dk``, ``dv``; rows: how many query and key rows were compared.
    """

    max_abs_error: Mapping[str, float]
    budget: Mapping[str, float]
    query_rows: int
    key_rows: int

    @property
    def ok(self) -> bool:
        """True if every error is finite and within its budget."""
        return all(self.max_abs_error[name] <= self.budget[name] for name in self.max_abs_error)


@dataclass(frozen=True, kw_only=True)
class Record:
    """One row of results.

    io_model: the row of iomodel.MODELS that describes the implementation's traffic, if one does.
    stated: what a model of the implementation's author says of the cell, as in declared.Stated; empty
    without.
    exact: whether the implementation computes attention; where not, accuracy is against its own fp64 form
    and apart says how far o is from exact attention in fp64: ``max_abs_error``, and ``relative``, the
    RMS error over the RMS of exact attention, over the compared rows.
    backend: what really ran, where the name leaves it open (``sdpa``: ``flash``, ``cudnn``, …).
    config: the kernel's chosen configuration (block_q, block_k, num_warps, num_stages, …).
    tuned: where of that configuration the table's does not stand, the file it came from and the cases of it
    that serve, as in tuned.py; empty where the table's alone ran.
    clocks: SM and memory clock (MHz), power (W), temperature (C) and cap reasons before and after the
    samples, a summary of readings ``during`` them, and ``throttled_by``, why a row is flagged so.
    timing: how it was timed: ``rounds`` in order, each with the number of its ``samples``, its ``place`` in
    the round, what was waited right before it (``waited_s``), SM clock, power and ``caps``; ``schedule``:
    ``interleaved`` with the other implementations of the same work, or ``alone`` (``alone_because``);
    ``order_seed``; why it ``stopped`` and the median's ``half_width``; ``warmup``; rounds ``set_aside`` under
    a cap; ``method_refused``: why another method than the one wanted was used; ``doubts``: why the row is
    suspect.
    spent: seconds of the cell by what they went to.
    energy: joules per call, as in profilers.measure_energy; empty where it was not asked for.
    counters: what the hardware counted, as in counting/__init__.py; empty where it was not asked for.
    trace: what its Triton kernels moved in the interpreter, as in tracing/apart.py; None where it was not
    asked for.
    environment: device, driver and versions this row was measured with; see environment.py.
    """

    cell: Cell
    status: str
    reason: str | None = None
    flags: tuple[str, ...] = ()
    samples: Samples | None = None
    memory: Memory | None = None
    accuracy: Accuracy | None = None
    io_model: str | None = None
    stated: Mapping[str, Any] = field(default_factory=dict)
    exact: bool = True
    apart: Mapping[str, float] = field(default_factory=dict)
    backend: str | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tuned: Mapping[str, Any] = field(default_factory=dict)
    clocks: Mapping[str, Any] = field(default_factory=dict)
    timing: Mapping[str, Any] = field(default_factory=dict)
    spent: Mapping[str, float] = field(default_factory=dict)
    energy: Mapping[str, Any] = field(default_factory=dict)
    counters: Mapping[str, Any] = field(default_factory=dict)
    trace: Mapping[str, Any] | None = None
    environment: Mapping[str, Any] = field(default_factory=dict)
    device_type: str = "cuda"
    started_at: str = ""
    wall_s: float = 0.0

    def __post_init__(self) -> None:
        assert self.status in STATUSES, self.status
        assert set(self.flags) <= set(FLAGS), self.flags
        assert (self.samples is not None) == (self.status == "ok"), "only an ok row has samples"
        assert self.status == "ok" or self.reason, f"{self.status} needs a reason"
