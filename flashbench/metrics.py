"""Every number of the joined table, one row each: what it is, its unit, how it follows.

A metric sees a ``Row``: the record, the model's estimate of its implementation, the device and
the naive time of the same problem and pass. It returns None where it cannot be known; never 0.
To add one, add a row to ``METRICS``: table, JSON, CSV, console and report follow.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

from flashbench import compared, iomodel
from flashbench._iomodel.time import Prediction
from flashbench.compared import Level
from flashbench.devices import Device
from flashbench.iomodel import Estimate
from flashbench.record import Record

Number = int | float | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One record beside what it is compared with.

    estimate: the implementation's own model (None if it names none). compulsory_bytes: each tensor
    once, the same for all implementations of a cell. naive_time_s: median of ``naive`` on the same
    problem, pass and cache policy in the same run (None if naive was not timed). prediction: what the
    time model makes of the estimate on the device (None where it has no say).
    """

    record: Record
    estimate: Estimate | None
    compulsory_bytes: int
    device: Device | None
    naive_time_s: float | None
    prediction: Prediction | None = None

    @property
    def time_s(self) -> float | None:
        """Median seconds, None where nothing was timed."""
        samples = self.record.samples
        return samples.median_s if samples else None

    @cached_property
    def levels(self) -> dict[str, Level]:
        """Predicted, traced and counted bytes of the call by level; empty without counters and trace."""
        record = self.record
        found = compared.of_call(self.estimate, record.counters, record.trace, self.device)
        return {level.level: level for level in found}

    @property
    def flops(self) -> int | None:
        """Nominal FLOPs of the cell; of one that is not exact attention its own, by its model, and None of a
        pass that its model has not.
        """
        if not self.record.exact and self.record.io_model:
            return self.estimate.flops if self.estimate else None
        return iomodel.flops(self.record.cell.problem, self.record.cell.pass_)

    @property
    def peak_flops_per_s(self) -> float | None:
        """Dense peak of the cell's dtype on the device, None where unknown."""
        return self.device.peak_flops_per_s.get(self.record.cell.problem.dtype) if self.device else None

    @property
    def bytes_per_s(self) -> float | None:
        """HBM bandwidth of the device, None where unknown."""
        return self.device.hbm_bytes_per_s if self.device else None

    @property
    def roof_flops_per_s(self) -> float | None:
        """min(peak, compulsory intensity x bandwidth): the roofline at this cell."""
        if self.peak_flops_per_s is None or self.bytes_per_s is None or self.flops is None:
            return None
        return min(self.peak_flops_per_s, self.flops / self.compulsory_bytes * self.bytes_per_s)


@dataclass(frozen=True, kw_only=True)
class Metric:
    """A column of the table. better: ``higher``, ``lower`` or ``""``; whole: an integer (bytes, counts)."""

    name: str
    unit: str
    better: str
    help: str
    compute: Callable[[Row], Number]
    whole: bool = False


def _over(numerator: float | None, denominator: float | None) -> float | None:
    """numerator / denominator; None where either is missing or the denominator is 0."""
    return numerator / denominator if numerator is not None and denominator else None


def _rate(row: Row) -> float | None:
    return _over(row.flops, row.time_s)


def _memory(name: str) -> Callable[[Row], Number]:
    def compute(row: Row) -> Number:
        value: int | None = getattr(row.record.memory, name) if row.record.memory else None
        return value

    return compute


def _requested(row: Row) -> int | None:
    return row.estimate.requested.total_bytes if row.estimate else None


def _counted(name: str) -> Callable[[Row], Number]:
    def compute(row: Row) -> Number:
        value: float | None = row.record.counters.get("total", {}).get(name)
        return value

    return compute


def _level(level: str, name: str) -> Callable[[Row], Number]:
    def compute(row: Row) -> Number:
        value: float | None = getattr(row.levels[level], name) if level in row.levels else None
        return value

    return compute


def _trace(name: str) -> Callable[[Row], Number]:
    def compute(row: Row) -> Number:
        trace = row.record.trace or {}
        value: float | None = {**trace, **trace.get("total", {})}.get(name)
        return value

    return compute


def _error_ratio(row: Row) -> float | None:
    accuracy = row.record.accuracy
    if accuracy is None or not accuracy.max_abs_error:
        return None
    ratios = []
    for name, error in accuracy.max_abs_error.items():
        budget = accuracy.budget[name]
        ratios.append(error / budget if budget else (0.0 if error == 0 else math.inf))
    return max(ratios) if all(map(math.isfinite, ratios)) else None


COUNTED = {
    "l2_read_bytes": "read by SMs from L2",
    "l2_write_bytes": "written by SMs to L2, spilled registers included",
    "l2_atomic_bytes": "added atomically at L2",
    "dram_read_bytes": "read from DRAM",
    "dram_write_bytes": "written to DRAM before the kernels ended",
    "spill_write_bytes": "registers written to local memory",
    "spill_missed_bytes": "registers read back from local memory past the L1",
}
"""Counters that have a column."""


def _compared() -> Iterator[Metric]:
    """Model, trace and counters of every level, and how they agree."""
    for level, counter in compared.LEVELS.items():
        what = COUNTED[counter].removesuffix(", spilled registers included")
        once = "" if level in compared.REQUESTED else ", each kernel from a cold L2"
        yield Metric(
            name=f"predicted_{counter}", unit="B", better="", whole=True, compute=_level(level, "value"),
            help=f"{what}, by the model{once}; of cells that were counted{'' if once else ' or traced'}",
        )  # fmt: skip
        for name, bound in (("least", "low"), ("most", "high")) if once else ():
            yield Metric(
                name=f"{name}_{counter}", unit="B", better="", whole=True, compute=_level(level, bound),
                help=f"{what}: the {name} of the model's band",
            )  # fmt: skip
    for level, part in compared.REQUESTED.items():
        yield Metric(
            name=f"traced_{part}_bytes", unit="B", better="lower", whole=True,
            compute=_trace(f"{part}_bytes"),
            help=f"{COUNTED[compared.LEVELS[level]].split(',')[0]}, as Triton's interpreter traced it",
        )  # fmt: skip
        yield Metric(
            name=f"{part}_difference_bytes", unit="B", better="", whole=True,
            compute=_level(level, "difference"), help=f"{level}, traced less what is asked for by the model",
        )  # fmt: skip
    yield Metric(
        name="traced_difference_bytes", unit="B", better="lower", whole=True,
        compute=_trace("difference_bytes"),
        help="traced apart from modelled, added up tensor by tensor; 0 is as modelled",
    )  # fmt: skip
    yield Metric(
        name="traced_share", unit="fraction", better="", compute=_trace("traced_share"),
        help="share of the cell that was interpreted: one K/V head of one batch stands for all",
    )  # fmt: skip
    for counter, help_ in COUNTED.items():
        yield Metric(
            name=f"counted_{counter}", unit="B", better="lower", whole=True, compute=_counted(counter),
            help=f"hardware counters: {help_}",
        )  # fmt: skip
    yield Metric(
        name="counted_tensor_share", unit="fraction", better="higher", compute=_counted("tensor_share"),
        help="hardware counters: cycles in which the tensor cores worked, kernels weighted by their time",
    )  # fmt: skip
    for level, counter in compared.LEVELS.items():
        spills = ", spilled registers taken off" if level in compared.SPILLED else ""
        yield Metric(
            name=f"{counter.removesuffix('_bytes')}_ratio", unit="fraction", better="",
            compute=_level(level, "ratio"),
            help=f"{level}, counted over predicted{spills}; 1 is as modelled",
        )  # fmt: skip


def _dram(row: Row) -> int | None:
    counted = row.record.counters.get("total", {})
    parts = [counted.get(f"dram_{way}_bytes") for way in ("read", "write")]
    if None not in parts:
        return int(sum(parts))
    return round(row.prediction.dram.value) if row.prediction else None


def _clock(row: Row) -> float | None:
    """Median of the rounds' clocks; None where no round has one."""
    rounds = row.record.timing.get("rounds") or ()
    clocks = [clock for one in rounds if (clock := one.get("sm_clock_mhz"))]
    return float(statistics.median(clocks)) * 1e6 if clocks else None


def _cycles(row: Row) -> float | None:
    """Median over the samples of time times clock; None unless every round has a clock."""
    rounds, samples = row.record.timing.get("rounds") or (), row.record.samples
    counts = [one.get("samples") or 0 for one in rounds]
    if samples is None or sum(counts) != len(samples.samples_s):  # before a file's number is a length
        return None
    clocks = [one.get("sm_clock_mhz") for at, one in enumerate(rounds) for _ in range(counts[at])]
    if not all(clocks):
        return None
    pairs = zip(samples.samples_s, clocks, strict=True)
    return float(statistics.median(seconds * clock * 1e6 for seconds, clock in pairs))


METRICS = (
    Metric(name="time_s", unit="s", better="lower", help="median of the samples", compute=lambda r: r.time_s),
    Metric(
        name="time_min_s", unit="s", better="lower", help="fastest sample",
        compute=lambda r: min(r.record.samples.samples_s) if r.record.samples else None,
    ),
    Metric(
        name="spread", unit="fraction", better="lower", help="interquartile range over the median",
        compute=lambda r: r.record.samples.spread if r.record.samples else None,
    ),
    Metric(
        name="num_samples", unit="samples", better="", help="how many samples were taken", whole=True,
        compute=lambda r: len(r.record.samples.samples_s) if r.record.samples else None,
    ),
    Metric(
        name="cycles", unit="cycles", better="lower",
        help="median of each sample times the SM clock of its round, as NVML reads it",
        compute=_cycles,
    ),
    Metric(
        name="sm_clock_hz", unit="Hz", better="", help="median SM clock over the rounds, as NVML reads it",
        compute=_clock,
    ),
    Metric(
        name="flops", unit="FLOP", better="", whole=True,
        help="nominal: 2 x visible pairs x (d+dv) forward, 2 x pairs x (3d+2dv) backward; one count per cell",
        compute=lambda r: r.flops,
    ),
    Metric(
        name="done_flops", unit="FLOP", better="", whole=True,
        help="FLOPs that the implementation really does (masked parts, recomputation), by its model",
        compute=lambda r: r.estimate.done_flops if r.estimate else None,
    ),
    Metric(
        name="flops_per_s", unit="FLOP/s", better="higher", help="nominal FLOPs over the median time",
        compute=_rate,
    ),
    Metric(
        name="flops_half", unit="FLOP", better="", whole=True,
        help="the papers' count: causal is half of the full square",
        compute=lambda r: iomodel.flops_half_convention(r.record.cell.problem, r.record.cell.pass_),
    ),
    Metric(
        name="peak_flops_per_s", unit="FLOP/s", better="", help="the dtype's dense peak on the device",
        compute=lambda r: r.peak_flops_per_s,
    ),
    Metric(
        name="hbm_bytes_per_s", unit="B/s", better="", help="the device's memory bandwidth",
        compute=lambda r: r.bytes_per_s,
    ),
    Metric(
        name="peak_fraction", unit="fraction", better="higher", help="FLOP/s over the dtype's dense peak",
        compute=lambda r: _over(_rate(r), r.peak_flops_per_s),
    ),
    Metric(
        name="requested_bytes", unit="B", better="lower", whole=True,
        help="bytes asked of L2, by the implementation's model (reads, writes, atomics)", compute=_requested,
    ),
    Metric(
        name="compulsory_bytes", unit="B", better="", whole=True, help="each input and output once",
        compute=lambda r: r.compulsory_bytes,
    ),
    Metric(
        name="intensity_requested", unit="FLOP/B", better="higher", help="nominal FLOPs per requested byte",
        compute=lambda r: _over(r.flops, _requested(r)),
    ),
    Metric(
        name="intensity_compulsory", unit="FLOP/B", better="", help="nominal FLOPs per compulsory byte",
        compute=lambda r: _over(r.flops, r.compulsory_bytes),
    ),
    Metric(
        name="dram_bytes", unit="B", better="lower", whole=True, compute=_dram,
        help="read from and written to DRAM: as counted, where it was, else as the model expects",
    ),
    Metric(
        name="intensity_dram", unit="FLOP/B", better="higher", help="nominal FLOPs per byte of dram_bytes",
        compute=lambda r: _over(r.flops, _dram(r)),
    ),
    Metric(
        name="roof_fraction", unit="fraction", better="higher",
        help="FLOP/s over the roofline min(peak, compulsory intensity x bandwidth)",
        compute=lambda r: _over(_rate(r), r.roof_flops_per_s),
    ),
    Metric(
        name="bandwidth_fraction", unit="fraction", better="higher",
        help="compulsory bytes per second over the HBM bandwidth: the least that was moved",
        compute=lambda r: _over(_over(r.compulsory_bytes, r.time_s), r.bytes_per_s),
    ),
    Metric(
        name="inputs_bytes", unit="B", better="", help="bytes of the inputs", whole=True,
        compute=_memory("inputs_bytes"),
    ),
    Metric(
        name="outputs_bytes", unit="B", better="", help="bytes of the outputs", whole=True,
        compute=_memory("outputs_bytes"),
    ),
    Metric(
        name="peak_extra_bytes", unit="B", better="lower", whole=True,
        help="most allocated during the call minus allocated before it (outputs and scratch)",
        compute=_memory("peak_extra_bytes"),
    ),
    Metric(
        name="reserved_bytes", unit="B", better="", whole=True,
        help="what the allocator held from the driver at the peak", compute=_memory("reserved_bytes"),
    ),
    Metric(
        name="predicted_extra_bytes", unit="B", better="", whole=True,
        help="peak_extra_bytes by the implementation's model",
        compute=lambda r: r.estimate.extra_bytes if r.estimate else None,
    ),
    *_compared(),
    Metric(
        name="energy_j", unit="J", better="lower", help="joules of the whole board per call, back to back",
        compute=lambda r: r.record.energy.get("joules_per_call"),
    ),
    Metric(
        name="j_per_tflop", unit="J/TFLOP", better="lower", help="joules per nominal 10^12 FLOPs",
        compute=lambda r: _over(r.record.energy.get("joules_per_call"), _over(r.flops, 1e12)),
    ),
    Metric(
        name="speedup_over_naive", unit="x", better="higher",
        help="naive's median time over this one: same problem, pass, cache policy and run",
        compute=lambda r: _over(r.naive_time_s, r.time_s),
    ),
    Metric(
        name="max_error_ratio", unit="fraction", better="lower",
        help="largest error against the fp64 reference (not exact: its own) over its budget; right up to 1",
        compute=_error_ratio,
    ),
    Metric(
        name="exact_error", unit="o", better="lower",
        help="of one that is not exact: largest |o - exact attention in fp64| over the compared rows",
        compute=lambda r: r.record.apart.get("max_abs_error"),
    ),
    Metric(
        name="exact_error_relative", unit="fraction", better="lower",
        help="of one that is not exact: RMS of o - exact attention over the RMS of exact attention",
        compute=lambda r: r.record.apart.get("relative"),
    ),
)  # fmt: skip
"""Every metric, in the order of the table's columns."""
