"""Model, trace and counters of a cell, level by level: predicted, traced and counted bytes side by side.

Counted kernel by kernel from a cold L2 (the profiler flushes it before each), so the model's DRAM
band is that of each kernel alone. The requested level is exact: a ratio other than 1 there is a
kernel that does something else than its model says, or, below 1, reads that the L1 answered. Registers
that a kernel spills are no tensor's traffic: what is written of them, as counted or else as known of
the kernel, is taken off and told apart. A trace is what a kernel asks for, so it stands beside the
requested levels and differs from the model by 0 bytes.
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

REQUESTED = {"L2 read": "read", "L2 write": "write", "L2 atomic": "atomic"}
"""Levels of what kernels ask for, and the part of a model's step and of a traced tensor that each is."""

SPILLED = {"L2 read": "spill_missed_bytes", "L2 write": "spill_write_bytes"}
"""Levels in which spilled registers are counted as well, and the counter of those."""

SPILLS = "spills"
"""Level of registers written to memory, where there are any: between SM and L2."""

COPIES = frozenset({"mask backward: copy"})
"""Steps that torch does with a copy of the driver's: no kernel, so a profiler of kernels does not see it."""


@dataclass(frozen=True, kw_only=True)
class Level:
    """One quantity of a call or a kernel, bytes. low, value, high: the model's; None where there is none.

    requested: what threads ask for, where hardware is expected to move other bytes than that.
    """

    kernel: str
    level: str
    low: int | None
    value: int | None
    high: int | None
    counted: int | None
    traced: int | None = None
    requested: int | None = None

    @property
    def difference(self) -> int | None:
        """Traced less what is asked for by the model; None where either is missing."""
        asked = self.value if self.requested is None else self.requested
        return self.traced - asked if self.traced is not None and asked is not None else None

    @property
    def ratio(self) -> float | None:
        """Counted over predicted; None where either is missing or nothing was predicted."""
        return self.counted / self.value if self.counted is not None and self.value else None

    @property
    def within(self) -> bool | None:
        """Whether the count lies in the band, to 1 % and what is the profiler's own; None where unknown."""
        if self.counted is None or self.low is None or self.high is None:
            return None
        slack = 0.01
        return self.low * (1 - slack) - _OWN <= self.counted <= self.high * (1 + slack) + _OWN

    def row(self) -> dict[str, Any]:
        """As a JSON-able row."""
        names = (
            "kernel", "level", "low", "value", "high", "requested", "traced", "difference", "counted",
            "ratio", "within",
        )  # fmt: skip
        return {name: getattr(self, name) for name in names}


_OWN = 10**6
"""Bytes that the profiler, instructions and parameters add to any kernel, at most."""

_LEFT, _MOST_LEFT = 2_400_000, 3_100_000
"""Bytes that are written to DRAM under a kernel that writes nothing itself, expected and at most: what the
profiler left in L2 (the reading kernels of known.json, whose middle and largest these are)."""

_PUSHES, _PUSHED = 0.4, 0.65
"""Of the L2, what a kernel fetches and writes before the first and the last of that is pushed out: 0.1 MB at
0.41, 0.9 at 0.49, 2.2 at 0.66 (the same kernels)."""


def left_by_the_profiler(one: Alone, device: Device) -> Band:
    """What a kernel pushes out of L2 that the profiler left there: DRAM writes that are not its own."""
    touched = (one.read.value + one.write.value) / device.l2_bytes
    share = min(1.0, max(0.0, (touched - _PUSHES) / (_PUSHED - _PUSHES)))
    return Band(0, round(share * _LEFT), round(share * _MOST_LEFT))


@dataclass(frozen=True, kw_only=True)
class _Model:
    """What is predicted: the steps that are kernels, DRAM of each; exact: whether requested bytes are."""

    steps: Sequence[Step] | None = None
    alone: Sequence[Alone] | None = None
    exact: bool = False
    device: Device | None = None

    def step(self, index: int) -> _Model:
        """What is predicted of one kernel."""
        alone = self.alone[index : index + 1] if self.alone else None
        steps = (self.steps or ())[index : index + 1]
        return replace(self, steps=steps, alone=alone)


def compare(
    cell: Cell,
    counters: Mapping[str, Any],
    model: str | None,
    config: Mapping[str, Any],
    device: Device | None,
    trace: Mapping[str, Any] | None = None,
) -> list[Level]:
    """The call as a whole (kernel ``""``), then kernel by kernel where model and profile have as many.

    counters, trace: as in a record; nothing is compared where neither has bytes. model: a row of
    iomodel.MODELS, or None. Nothing is predicted at DRAM without a device or counters.
    """
    if _nothing(counters, trace):
        return []
    card = device if "total" in counters else None  # a trace is of the interpreter's tiles
    predicted = _model(_estimate(model, cell, config, card), counters, device)
    return _call(predicted, counters, trace) + _kernels(predicted, counters, trace)


def of_call(
    estimate: Estimate | None,
    counters: Mapping[str, Any],
    trace: Mapping[str, Any] | None,
    device: Device | None,
) -> list[Level]:
    """As ``compare``, of the call as a whole, for an estimate that is there already."""
    if _nothing(counters, trace):
        return []
    return _call(_model(estimate, counters, device), counters, trace)


def why_not_traced(trace: Mapping[str, Any] | None) -> str | None:
    """Why a record's trace has no bytes; None where it has, and where none was asked for."""
    error, reason = (trace or {}).get("error"), (trace or {}).get("reason")
    return f"its kernels raise {error}" if error else reason


def _nothing(counters: Mapping[str, Any], trace: Mapping[str, Any] | None) -> bool:
    return "total" not in counters and "total" not in (trace or {})


def _model(estimate: Estimate | None, counters: Mapping[str, Any], device: Device | None) -> _Model:
    if estimate is None:
        return _Model()
    alone = _alone(estimate, device) if "total" in counters else None
    kept = [index for index, step in enumerate(estimate.steps) if step.name not in COPIES]
    return _Model(
        steps=[estimate.steps[index] for index in kept],
        alone=[alone[index] for index in kept] if alone else None,
        exact=estimate.model not in iomodel.ONCE,
        device=device,
    )


def _call(predicted: _Model, counters: Mapping[str, Any], trace: Mapping[str, Any] | None) -> list[Level]:
    return _levels("", predicted, counters.get("total"), (trace or {}).get("total"))


def _kernels(predicted: _Model, counters: Mapping[str, Any], trace: Mapping[str, Any] | None) -> list[Level]:
    steps, rows = predicted.steps or (), counters.get("kernels", ())
    traced = {kernel["step"]: _moved(kernel) for kernel in (trace or {}).get("kernels", ())}
    if steps and len(steps) < len(rows):
        rows = _joined(rows)
    found: list[Level] = []
    if len(steps) == len(rows) > 1:
        for index, (step, row) in enumerate(zip(steps, rows, strict=True)):
            name = f"{step.name}: {row['kernel']}"
            found += _levels(name, predicted.step(index), row, traced.get(step.name))
    elif len(rows) > 1:
        for row in rows:
            found += _levels(row["kernel"], _Model(), row, None)
    elif traced and len(steps) > 1:
        for index, step in enumerate(steps):
            found += _levels(step.name, predicted.step(index), None, traced.get(step.name))
    return found


def _moved(kernel: Mapping[str, Any]) -> dict[str, int]:
    """What a traced kernel moved of all its tensors, by the names of a trace's total."""
    names = [f"{kind}_bytes" for kind in REQUESTED.values()]
    return {name: sum(tensor[name] for tensor in kernel["tensors"]) for name in names}


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


def _estimate(
    model: str | None, cell: Cell, config: Mapping[str, Any], device: Device | None
) -> Estimate | None:
    if model is None:
        return None
    try:
        return iomodel.estimate(model, cell.problem, cell.pass_, tiles=dict(config) or None, device=device)
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
    name: str, model: _Model, counted: Mapping[str, Any] | None, traced: Mapping[str, Any] | None
) -> list[Level]:
    """The levels of a call or a kernel; without counters only those that were traced."""
    bands = _bands(model)
    found: list[Level] = []
    spilled = (counted or {}).get("spill_write_bytes")
    spills = sum(step.spills.written for step in model.steps or ())
    for level, counter in LEVELS.items():
        band, value = bands.get(level), (counted or {}).get(counter)
        moved = traced.get(f"{REQUESTED[level]}_bytes") if traced and level in REQUESTED else None
        if level in SPILLED and value is not None:
            apart = (counted or {}).get(SPILLED[level])
            # else counted together: off goes what is known
            value -= apart if apart is not None else spills if level == "L2 write" else 0
        if level == "L2 atomic" and not value and not moved and not (band and band.value):
            continue
        if counted is None and moved is None:
            continue
        asked = _requested(model, level)
        if band and spilled and level == "DRAM write":  # between never and once
            band = band._replace(high=band.high + max(0, spilled - spills))
        if counted is None and asked is not None:  # nothing but a trace, which sees what is asked for
            band = Band(asked, asked, asked)
        low, middle, high = band or (None, None, None)
        found.append(Level(
            kernel=name, level=level, low=low, value=middle, high=high, counted=value, traced=moved,
            requested=asked,
        ))  # fmt: skip
    if spilled or (spills and spilled is not None):
        known = spills or None
        found.append(Level(kernel=name, level=SPILLS, low=known, value=known, high=known, counted=spilled))
    return found


def _requested(model: _Model, level: str) -> int | None:
    """What threads ask for at a level; None where that is not known exactly, and at DRAM."""
    if model.steps is None or not model.exact or level not in REQUESTED:
        return None
    return sum(sum(getattr(step, REQUESTED[level]).values()) for step in model.steps)


def _bands(model: _Model) -> dict[str, Band]:
    """What is predicted of each level: exactly at L2, for models that count what kernels ask for.

    There less what the L1 may answer, at the least; at DRAM with what the profiler itself left to be written.
    """
    bands: dict[str, Band] = {}
    if model.steps is not None and model.exact:
        for level, part in REQUESTED.items():
            count = sum(step.crossing(part) for step in model.steps)
            nearby = sum(step.nearby for step in model.steps) if part == "read" else 0
            bands[level] = Band(count - nearby, count, count)
    if model.alone and model.device:
        nothing = Band(0, 0, 0)
        bands["DRAM read"], bands["DRAM write"] = nothing, nothing
        for one in model.alone:
            bands["DRAM read"] = bands["DRAM read"].plus(one.read)
            left = left_by_the_profiler(one, model.device)
            bands["DRAM write"] = bands["DRAM write"].plus(one.write).plus(left)
    return bands
