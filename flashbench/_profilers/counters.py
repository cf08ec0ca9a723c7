"""What the hardware counts of a kernel: the counters that flashbench asks for, and what they are made of.

To add a counter, add a row to COUNTERS. The metrics are Nsight Compute's; their names are those of
Volta and later, and one that a chip lacks is left out of its sum (``optional``) or makes its counter
None. Sources: Nsight Compute's documentation (metrics reference) and ``ncu --query-metrics``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashbench._profilers.ncu_csv import Kernel

SECTOR = 32
"""Bytes that the L2 moves at once."""

_READ, _WRITE = "l1tex__m_xbar2l1tex_read_bytes", "l1tex__m_l1tex2xbar_write_bytes"
_ATOMIC = tuple(f"{_WRITE}_mem_global_op_{name}.sum" for name in ("red", "atom", "tma_red"))
_L1 = "l1tex__t_sectors_pipe_lsu_mem_global_op_ld"


@dataclass(frozen=True, kw_only=True)
class Counter:
    """One quantity of a kernel: scale · (Σ adds − Σ less), or the mean of a share over a cell's time.

    unit: ``B``, ``s``, ``fraction`` or a count. group: ``traffic`` (always asked for) or ``detail``.
    optional: metrics of the sums that some chips lack; there they are 0.
    """

    name: str
    unit: str
    help: str
    adds: tuple[str, ...]
    less: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()
    scale: float = 1
    group: str = "traffic"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Every metric that it is made of."""
        return self.adds + self.less

    def of(self, metrics: Mapping[str, float | None]) -> float | None:
        """Its value, or None where a metric that it needs was not counted."""
        total = 0.0
        for sign, names in ((1, self.adds), (-1, self.less)):
            for name in names:
                value = metrics.get(name)
                if value is None:
                    if name in self.optional:
                        continue
                    return None
                total += sign * value
        total *= self.scale
        return int(total) if self.unit not in ("s", "fraction") and total.is_integer() else total


def _share(name: str, metric: str, help_: str) -> Counter:
    return Counter(name=name, unit="fraction", help=help_, adds=(metric,), scale=0.01, group="detail")


def _launch(name: str, unit: str, help_: str) -> Counter:
    return Counter(name=name, unit=unit, help=help_, adds=(f"launch__{name}",), group="launch")


COUNTERS = (
    Counter(name="time_s", unit="s", adds=("gpu__time_duration.sum",),
            help="kernel time under the profiler: for shares only, never a benchmark"),
    Counter(name="dram_read_bytes", unit="B", adds=("dram__bytes_read.sum",), help="read from DRAM"),
    Counter(name="dram_write_bytes", unit="B", adds=("dram__bytes_write.sum",),
            help="written to DRAM before the kernel ended; what stays in L2 is not in it"),
    Counter(name="l2_read_bytes", unit="B", adds=(f"{_READ}.sum",), less=(f"{_READ}_mem_dshared.sum",),
            optional=(f"{_READ}_mem_dshared.sum",),
            help="L2 to SM on every path, TMA included, without what SMs of a cluster send each other"),
    Counter(name="l2_write_bytes", unit="B", adds=(f"{_WRITE}.sum",),
            less=(f"{_WRITE}_mem_dshared.sum", *_ATOMIC),
            optional=(f"{_WRITE}_mem_dshared.sum", _ATOMIC[2]),
            help="SM to L2 on every path, atomic additions apart"),
    Counter(name="l2_atomic_bytes", unit="B", adds=_ATOMIC, optional=_ATOMIC[2:],
            help="SM to L2 as atomic additions"),
    Counter(name="l2_hit_sectors", unit="sectors", adds=("lts__t_sectors_srcunit_tex_lookup_hit.sum",),
            help="sectors of 32 B that SMs asked for and L2 held"),
    Counter(name="l2_miss_sectors", unit="sectors", adds=("lts__t_sectors_srcunit_tex_lookup_miss.sum",),
            help="sectors that L2 did not hold"),
    Counter(name="spill_write_bytes", unit="B", scale=SECTOR,
            adds=("l1tex__t_sectors_pipe_lsu_mem_local_op_st.sum",),
            help="local memory written (spilled registers): all of it is in l2_write_bytes"),
    Counter(name="spill_missed_bytes", unit="B", scale=SECTOR,
            adds=("l1tex__t_sectors_pipe_lsu_mem_local_op_ld_lookup_miss.sum",),
            help="local memory read that the L1 did not hold: all of it is in l2_read_bytes"),
    Counter(name="spill_read_bytes", unit="B", scale=SECTOR, group="detail",
            adds=("l1tex__t_sectors_pipe_lsu_mem_local_op_ld.sum",),
            help="local memory read (spilled registers), by the L1 or past it"),
    Counter(name="tma_read_bytes", unit="B", adds=(f"{_READ}_mem_global_op_tma_ld.sum",), group="detail",
            help="of l2_read_bytes, by the tensor memory accelerator"),
    Counter(name="l1_sectors", unit="sectors", adds=(f"{_L1}.sum",), group="detail",
            help="sectors that load instructions asked of the L1"),
    Counter(name="l1_hit_sectors", unit="sectors", adds=(f"{_L1}_lookup_hit.sum",), group="detail",
            help="of them, held by the L1: not in l2_read_bytes"),
    Counter(name="l1_requests", unit="requests", group="detail",
            adds=("l1tex__t_requests_pipe_lsu_mem_global_op_ld.sum",),
            help="load instructions of whole warps; sectors per request say how coalesced they are"),
    Counter(name="shared_bytes", unit="B", scale=128, group="detail",
            adds=("l1tex__data_pipe_lsu_wavefronts_mem_shared.sum",),
            help="shared memory through load/store instructions, 128 B a wavefront; operands of wgmma and"
            " TMA are not in it"),
    Counter(name="bank_conflicts", unit="wavefronts", group="detail",
            adds=("l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum",),
            help="wavefronts more than a conflict-free access would take"),
    _share("tensor_share", "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active",
           "cycles in which the tensor cores worked"),
    _share("mufu_share", "sm__inst_executed_pipe_xu.avg.pct_of_peak_sustained_active",
           "issue slots of the unit for exp2 and conversions that were used"),
    _share("occupancy", "sm__warps_active.avg.pct_of_peak_sustained_active",
           "warps that were resident, of those that the SM can hold"),
    _launch("registers_per_thread", "registers", "registers of a thread"),
    _launch("shared_mem_per_block", "B", "shared memory of a block"),
    _launch("waves_per_multiprocessor", "waves", "thread blocks over those that run at once"),
)  # fmt: skip
"""Every counter, in the order of the tables. ``launch``: comes with every profile, no pass is needed."""

DERIVED: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "l2_hit_share": ("l2_hit_sectors", ("l2_hit_sectors", "l2_miss_sectors")),
    "l1_hit_share": ("l1_hit_sectors", ("l1_sectors",)),
    "sectors_per_request": ("l1_sectors", ("l1_requests",)),
}
"""Quotients of counters: what is divided, and by the sum of what. Sectors of a request of 32 lanes: 4 where
they load 4 bytes side by side, 32 where each is elsewhere."""

BY_NAME = {counter.name: counter for counter in COUNTERS}
_SUMS = ("traffic", "detail")


def metrics(*, detail: bool) -> tuple[str, ...]:
    """The metrics to ask for, without repetition."""
    groups = _SUMS if detail else ("traffic",)
    return tuple(dict.fromkeys(m for c in COUNTERS if c.group in groups for m in c.metrics))


READ = frozenset(metric for counter in COUNTERS for metric in counter.metrics)
"""Every metric that is read from a profile."""


def derived(counted: Mapping[str, Any]) -> dict[str, float | None]:
    """The quotients of a kernel or a call; None where a counter is missing or nothing was asked for."""
    found: dict[str, float | None] = {}
    for name, (above, below) in DERIVED.items():
        values = [counted.get(part) for part in (above, *below)]
        known = [value for value in values if value is not None]
        of = sum(known[1:])
        found[name] = known[0] / of if len(known) == len(values) and of else None
    return found


@dataclass(frozen=True, kw_only=True)
class Counted:
    """One kernel's counters, by the names of COUNTERS; None where the chip or the profile lacks one."""

    kernel: str
    grid: str
    block: str
    counters: Mapping[str, float | None] = field(default_factory=dict)


def count(kernels: Sequence[Kernel]) -> tuple[Counted, ...]:
    """The counters of each kernel; those that no kernel has are left out."""
    rows = [{c.name: c.of(kernel.metrics) for c in COUNTERS} for kernel in kernels]
    present = [c.name for c in COUNTERS if any(row[c.name] is not None for row in rows)]
    return tuple(
        Counted(
            kernel=kernel.name,
            grid=kernel.grid,
            block=kernel.block,
            counters={name: row[name] for name in present},
        )
        for kernel, row in zip(kernels, rows, strict=True)
    )


def total(counted: Sequence[Counted]) -> dict[str, Any]:
    """The counters of a whole call: sums, shares weighted by kernel time; None where a kernel lacks one.

    What belongs to a launch (registers, shared memory) has no sum.
    """
    sums: dict[str, Any] = {}
    for counter in COUNTERS:
        values = [row.counters.get(counter.name) for row in counted]
        if counter.group == "launch" or all(value is None for value in values):
            continue
        if counter.unit == "fraction":
            sums[counter.name] = _weighted(values, [row.counters.get("time_s") for row in counted])
        else:
            sums[counter.name] = None if None in values else sum(v for v in values if v is not None)
    return sums


def _weighted(values: Sequence[float | None], times: Sequence[float | None]) -> float | None:
    pairs = [(v, t) for v, t in zip(values, times, strict=True) if v is not None and t is not None]
    if len(pairs) < len(values) or not sum(t for _, t in pairs):
        return None
    return sum(v * t for v, t in pairs) / sum(t for _, t in pairs)
