"""Predicted beside counted: what the model says of a cell, what the hardware counted, level by level.

Counted kernel by kernel from a cold L2 (the profiler flushes it before each), so the model's DRAM
band is that of each kernel alone. The requested level is exact: a ratio other than 1 there is a
kernel that does something else than its model says, or, below 1, reads that the L1 answered. Registers
that a kernel spills are no tensor's traffic: what is written of them is taken off and told apart.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flashbench import iomodel
from flashbench.devices import Device
from flashbench.errors import FlashbenchError
from flashbench.iomodel import Alone, Band, Estimate, Step
from flashbench.problem import Cell

LEVELS = {
    "L2 read": "l2_read_bytes", "L2 write": "l2_write_bytes", "L2 atomic": "l2_atomic_bytes",
    "DRAM read": "dram_read_bytes", "DRAM write": "dram_write_bytes",
}  # fmt: skip
"""Levels of a comparison and the counter of each. L2: between SM and L2. DRAM: between L2 and memory."""

SPILLS = "spills"
"""Level of registers written to memory, where there are any: nothing is predicted."""

COPIES = frozenset({"mask backward: copy"})
"""Steps that torch does with a copy of the driver's: no kernel, so a profiler of kernels does not see it."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One quantity of a call or a kernel. low, value, high: the model's; bytes; None where it has none."""

    kernel: str
    level: str
    low: int | None
    value: int | None
    high: int | None
    counted: int | None

    @property
    def ratio(self) -> float | None:
        """Counted over predicted; None where either is missing or nothing was predicted."""
        return self.counted / self.value if self.counted is not None and self.value else None

    @property
    def within(self) -> bool | None:
        """Whether the count lies in the band, to 1 % and 1 MB of the profiler's own; None where unknown."""
        if self.counted is None or self.low is None or self.high is None:
            return None
        slack = 0.01
        return self.low * (1 - slack) - _OWN <= self.counted <= self.high * (1 + slack) + _OWN

    def row(self) -> dict[str, Any]:
        """As a JSON-able row."""
        names = ("kernel", "level", "low", "value", "high", "counted", "ratio", "within")
        return {name: getattr(self, name) for name in names}


_OWN = 10**6
"""Bytes that the profiler, instructions and parameters add to any kernel, at most."""


def compare(
    cell: Cell,
    counters: Mapping[str, Any],
    model: str | None,
    config: Mapping[str, Any],
    device: Device | None,
) -> list[Level]:
    """The call as a whole (kernel ``""``), then kernel by kernel where model and profile have as many.

    counters: as in a record. model: a row of iomodel.MODELS, or None. Nothing is predicted at DRAM
    without a device.
    """
    if "total" not in counters:
        return []
    estimate = _estimate(model, cell, config)
    alone = _alone(estimate, device)
    if estimate is not None and any(step.name in COPIES for step in estimate.steps):
        kept = [index for index, step in enumerate(estimate.steps) if step.name not in COPIES]
        alone = tuple(alone[index] for index in kept) if alone else None
        estimate = replace(estimate, steps=tuple(estimate.steps[index] for index in kept))
    found = _levels("", estimate.steps if estimate else None, alone, counters["total"], model)
    kernels = counters["kernels"]
    if estimate and len(estimate.steps) < len(kernels):
        kernels = _joined(kernels)
    if estimate and len(estimate.steps) == len(kernels) > 1:
        for index, (step, row) in enumerate(zip(estimate.steps, kernels, strict=True)):
            one = alone[index : index + 1] if alone else None
            found += _levels(f"{step.name}: {row['kernel']}", (step,), one, row, model)
    elif len(kernels) > 1:
        for row in kernels:
            found += _levels(row["kernel"], None, None, row, model)
    return found


def _joined(kernels: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Launches in a row of one kernel over one grid as one: torch splits what 32 bits cannot index."""
    found: list[dict[str, Any]] = []
    for row in kernels:
        last = found[-1] if found else {}
        if last and all(last[name] == row[name] for name in ("kernel", "grid", "block")):
            for name in LEVELS.values():
                if last.get(name) is not None and row.get(name) is not None:
                    last[name] += row[name]
        else:
            found.append(dict(row))
    return found


def _estimate(model: str | None, cell: Cell, config: Mapping[str, Any]) -> Estimate | None:
    if model is None:
        return None
    try:
        return iomodel.estimate(model, cell.problem, cell.pass_, tiles=dict(config) or None)
    except FlashbenchError:
        return None


def _alone(estimate: Estimate | None, device: Device | None) -> tuple[Alone, ...] | None:
    if estimate is None or device is None:
        return None
    try:
        return iomodel.kernels_alone(estimate, device)
    except FlashbenchError:
        return None


def _levels(
    name: str,
    steps: Sequence[Step] | None,
    alone: Sequence[Alone] | None,
    counted: Mapping[str, Any],
    model: str | None,
) -> list[Level]:
    bands: dict[str, Band] = {}
    if steps is not None and model not in iomodel.ONCE:
        for level, part in (("L2 read", "read"), ("L2 write", "write"), ("L2 atomic", "atomic")):
            count = sum(sum(getattr(step, part).values()) for step in steps)
            bands[level] = Band(count, count, count)
    if alone:
        nothing = Band(0, 0, 0)
        bands["DRAM read"], bands["DRAM write"] = nothing, nothing
        for one in alone:
            bands["DRAM read"] = bands["DRAM read"].plus(one.read)
            bands["DRAM write"] = bands["DRAM write"].plus(one.write)
    rows = []
    spilled = counted.get("spill_write_bytes")
    for level, counter in LEVELS.items():
        band, value = bands.get(level), counted.get(counter)
        if level == "L2 write" and value is not None and spilled:
            value -= spilled
        if level == "L2 atomic" and not value and not (band and band.value):
            continue
        low, middle, high = band or (None, None, None)
        rows.append(Level(kernel=name, level=level, low=low, value=middle, high=high, counted=value))
    if spilled:
        rows.append(Level(kernel=name, level=SPILLS, low=None, value=None, high=None, counted=spilled))
    return rows
