"""What can be compared: each number's direction, and how nearly a run repeats it.

The columns of ``metrics`` with a direction, and what the compiler made of each kernel (``profile --static``).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashbench.kernels._defaults import FIELDS
from flashbench.metrics import METRICS

FLOORS = {"s": 5e-6, "B": float(2**20)}
"""Differences below are none: five microseconds, one MiB (an allocator's grain), by unit."""

EXACT = {"requested_bytes"}
"""And traced bytes."""
STEADY = {"peak_extra_bytes"}


@dataclass(frozen=True, kw_only=True)
class Measure:
    """better: ``lower``, ``higher`` or ``same`` (must not change).

    repeats: ``varies`` (from run to run), ``steady`` (no noise, small differences are none) or ``exact`` (any
    difference counts; 0 is a value).
    """

    name: str
    unit: str
    better: str
    repeats: str = "varies"

    @property
    def floor(self) -> float:
        """Differences below are none."""
        return 0.0 if self.repeats == "exact" else FLOORS.get(self.unit, 0.0)


def _of_metrics() -> list[Measure]:
    found = []
    for row in METRICS:
        exact = row.name in EXACT or (row.name.startswith("traced_") and row.unit == "B")
        repeats = "exact" if exact else "steady" if row.name in STEADY else "varies"
        if row.better:
            found.append(Measure(name=row.name, unit=row.unit, better=row.better, repeats=repeats))
    return found


_LOWER = {
    "registers_per_thread": "registers", "spill_stored_bytes_per_thread": "B",
    "spill_loaded_bytes_per_thread": "B", "stack_bytes_per_thread": "B", "shared_bytes": "B",
    "code_bytes": "B", "instructions": "instructions",
}  # fmt: skip
TILES = ("block_q", "block_k", "num_warps", "num_stages")
INSTRUCTIONS = (
    "wgmma", "mma", "tcgen05", "tma", "cp_async", "ldg", "stg", "lds", "sts", "ldsm", "stsm", "ldtm", "sttm",
    "ex2", "other_mufu", "barrier", "mbarrier", "atomic", "shared_atomic", "spill_store", "spill_load",
)  # fmt: skip
"""Classes of instructions, as in the static profile."""

STATIC = (
    *(Measure(name=name, unit=unit, better="lower", repeats="exact") for name, unit in _LOWER.items()),
    Measure(name="occupancy_percent", unit="%", better="higher", repeats="exact"),
    *(Measure(name=name, unit="", better="same", repeats="exact") for name in TILES),
    *(
        Measure(name=f"{name}_instructions", unit="instructions", better="same", repeats="exact")
        for name in INSTRUCTIONS
    ),
)
"""Of a kernel as compiled. What an instruction mix should be nobody can say: it must not change unseen."""


def _exact(better: str, *names: str) -> tuple[Measure, ...]:
    units = {"bytes": "B", "flops": "FLOP", "exps": "", "programs": "", "results": ""}
    return tuple(
        Measure(name=name, unit=units[name.rpartition("_")[2]], better=better, repeats="exact")
        for name in names
    )


GATE = {
    "model": _exact(
        "same", "modelled_requested_read_bytes", "modelled_requested_write_bytes",
        "modelled_requested_atomic_bytes", "modelled_compulsory_bytes", "modelled_done_flops",
        "modelled_exps", "modelled_extra_bytes",
    ),
    "trace": (
        *_exact("lower", "traced_read_bytes", "traced_write_bytes", "traced_atomic_bytes"),
        *_exact("same", "traced_programs", "traced_flops", "traced_exps"),
    ),
    "check": _exact("lower", "wrong_results"),
    "tiles": tuple(Measure(name=name, unit="", better="same", repeats="exact") for name in FIELDS),
    "static": STATIC,
}  # fmt: skip
"""Of the exact gate, by part. Whether a model should say more or less nobody can tell, as of instructions."""

_ROWS = (*(row for part in GATE.values() for row in part), *_of_metrics())
MEASURES = {measure.name: measure for measure in _ROWS}
"""Every number that can be compared, by name."""
