"""DRAM traffic: the requested bytes that L2 does not hold, as a value between the least and the most.

Kernel by kernel, from a cold cache. Three kinds of reuse:

- between kernels: a tensor that was touched before is found with the probability that the L2's curve
  gives for the bytes touched since;
- between waves: thread blocks that run at the same time stream the same K/V (or Q) nearly in step, so a
  wave fetches it once. A head whose thread blocks spread over several waves is fetched again per wave;
- inside a thread block: one that passes over the same rows again (FlashAttention-1's inner loop).

The least takes an LRU cache and heads that start with a wave; the most takes the curve less its error
and two heads at a time wherever one spreads over waves. Reads never exceed what is requested and never
fall below what is compulsory. Dirty lines may stay in L2 when the last kernel ends.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

from flashbench._iomodel.l2 import Cache, Hits
from flashbench._iomodel.tensors import FP32, sizes
from flashbench._iomodel.types import Estimate, Step
from flashbench.problem import Problem


class Band(NamedTuple):
    """Bytes: the least that the model allows, what it expects, the most."""

    low: int
    value: int
    high: int

    def plus(self, other: Band) -> Band:
        """Both together."""
        return Band(self.low + other.low, self.value + other.value, self.high + other.high)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dram:
    """Traffic between L2 and memory. steps: the expected bytes of each kernel, dirty lines written."""

    read: Band
    write: Band
    steps: tuple[float, ...]

    @property
    def total(self) -> Band:
        """Reads and writes."""
        return self.read.plus(self.write)


_Three = tuple[float, float, float]
"""Least, expected, most."""


class Grid(NamedTuple):
    """How a tiled kernel covers the work.

    ctas: thread blocks in all. units: heads that share what is streamed. slots: thread blocks that
    run at once. filled: rows of the outer side over those of its tiles, below 1 for a ragged last one.
    loops: a thread block owns a head and passes over the same rows again itself. uneven: scores of the
    longest thread block over those of a mean one.
    """

    ctas: int
    units: int
    slots: int
    filled: float = 1.0
    loops: bool = False
    uneven: float = 1.0


def dram(estimate: Estimate, cache: Cache, grids: tuple[Grid | None, ...]) -> Dram:
    """What of the requested traffic reaches DRAM. grids: one per step, None for one without tiles."""
    tracker = _Tracker(cache, tensor_bytes(estimate.problem))
    steps = tuple(tracker.run(step, grid) for step, grid in zip(estimate.steps, grids, strict=True))
    atomic = estimate.requested.atomic_bytes
    most = estimate.requested.read_bytes + atomic
    least = min(estimate.compulsory.read_bytes, most)
    read = Band(*(min(max(round(part), least), most) for part in tracker.read))
    most = estimate.requested.write_bytes + atomic
    low, value, high = (min(round(part), most) for part in tracker.write)
    left = min(value, tracker.dirty_share * cache.capacity)
    low = max(0, low - round(cache.capacity))
    return Dram(read=read, write=Band(low, max(low, value - round(left)), max(high, value)), steps=steps)


@lru_cache(maxsize=64)
def tensor_bytes(problem: Problem) -> dict[str, int]:
    """Bytes of every tensor by its name in a step."""
    total: dict[str, int] = {}
    for part in problem.parts():
        s = sizes(part)
        scale = FP32 // part.dtype_bytes if part.dtype_bytes <= FP32 else 1
        rows = {
            "q": s.q, "k": s.k, "v": s.v, "o": s.o, "do": s.o, "lse": s.lse, "delta": s.lse,
            "lse_log2": s.lse, "l, m": 2 * s.lse, "dq": s.q, "dk": s.k, "dv": s.v,
            "dq_acc": s.q * scale, "dq_tmp": s.q * scale, "o_tmp": s.o * scale, "dk_acc": s.k * scale,
            "dv_acc": s.v * scale, "k_heads": s.k_heads, "v_heads": s.v_heads, "dk_heads": s.k_heads,
            "dv_heads": s.v_heads,
        }  # fmt: skip
        for name, size in rows.items():
            total[name] = total.get(name, 0) + size
    return total


@dataclass(slots=True)
class _Tracker:
    """Walks over the steps and remembers when each tensor was last touched.

    clock: bytes touched so far. last: per tensor, the clock in the middle of the step that touched it.
    read, write: least, expected and most bytes so far. shared: a tensor whose requests name it per
    query head is one in memory if it was never written so.
    """

    cache: Cache
    sizes: Mapping[str, int]
    clock: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    dirty: set[str] = field(default_factory=set)
    read: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    write: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    dirty_share: float = 0.0

    def run(self, step: Step, grid: Grid | None) -> float:
        """One step; returns its expected DRAM bytes, read and written."""
        known, sizes = self.last, self.sizes
        inputs = [(name, req, min(req, sizes.get(name, req))) for name, req in step.read.items()]
        adds = [(name, req, min(req, sizes.get(name, req))) for name, req in step.atomic.items()]
        outputs = [(name, req, min(req, sizes.get(name, req))) for name, req in step.write.items()]
        touched = float(sum(size for _, _, size in inputs) + sum(size for _, _, size in adds))
        written = sum(size for name, _, size in outputs if name not in step.read)
        touched += written
        again = _Again.of(self.cache, grid, inputs + adds, touched)
        middle = self.clock + touched / 2
        before = self.read[1] + self.write[1]
        for name, req, size in inputs:
            seen = known.get(name)
            found = None if seen is None else self.cache.hits(middle - seen)
            self._add(self.read, size, found, again.times(req, size))
        for name, req, size in adds:
            seen = known.get(name)
            found = None if seen is None else self.cache.hits(middle - seen)
            times = again.times(req, size)
            self._add(self.read, size, found, times)
            self._write(name, size, found, times)
        for name, req, size in outputs:
            seen = known.get(name)
            found = None if seen is None else self.cache.hits(middle - seen)
            self._write(name, size, found, again.times(req, size))
        for name, _, _ in (*inputs, *adds, *outputs):
            known[name] = middle
        self.clock += touched
        self.dirty_share = (written + sum(size for _, _, size in adds)) / touched if touched else 0.0
        return self.read[1] + self.write[1] - before

    def _write(self, name: str, size: int, found: Hits | None, times: _Three) -> None:
        """Write size bytes: what is still dirty in L2 from before is overwritten there and saved once."""
        self._add(self.write, size, found if name in self.dirty else None, times)
        self.dirty.add(name)

    @staticmethod
    def _add(to: list[float], size: int, found: Hits | None, times: _Three) -> None:
        best, value, worst = found or (0.0, 0.0, 0.0)
        to[0] += size * (1 - best + times[0])
        to[1] += size * (1 - value + times[1])
        to[2] += size * (1 - worst + times[2])


class _Again(NamedTuple):
    """How often a kernel fetches again what it streams.

    loops: a thread block makes its passes itself; missing: what is not found in L2 per pass. Else
    waves: further waves over which a unit's passes spread, per pass; missing: what is then not found.
    """

    loops: bool
    waves: _Three
    missing: _Three

    @classmethod
    def of(cls, cache: Cache, grid: Grid | None, asked: list[tuple[str, int, int]], touched: float) -> _Again:
        """From the kernel's grid and its (tensor, requested, size) rows."""
        if grid is None:
            return _ONCE
        ctas, units, slots, filled, loops, _ = grid
        per_unit = ctas / units
        streamed = asked_for = 0
        for _, requested, size in asked:
            if requested > size:
                streamed += size
                asked_for += requested
        own = (touched - streamed) * min(slots, ctas) / ctas
        unit_bytes = streamed / units
        if loops:
            one = cache.hits(min(float(units), float(slots)) * unit_bytes + own)
            return cls(True, _ZERO, (1 - one.best, 1 - one.value, 1 - one.worst))
        if ctas <= slots or not streamed:
            return _ONCE
        active = min(float(units), max(1.0, slots / (per_unit * filled)))
        # under a mask a pass ends early and comes back to its rows sooner, after seen of them on average
        seen = min(1.0, asked_for / (streamed * per_unit))
        best = cache.hits(active * unit_bytes * seen + own).best
        typical = unit_bytes * seen**_MASKED
        value = cache.hits(active * typical + own).value
        if per_unit > slots:
            # in its first and last wave a unit shares the cache with a neighbour, for half the time
            edges = min(1.0, 2 * slots / per_unit)
            value += edges * (cache.hits(min(float(units), 1.5) * typical + own).value - value)
        worst = cache.hits(min(float(units), active + 1) * unit_bytes + own).worst
        # how units and waves line up is not known: at best every unit starts with a wave
        waves = (max(0.0, 1 / slots - 1 / per_unit), 1 / slots - 0.5 / ctas, 1 / slots)
        return cls(False, waves, (1 - best, 1 - value, 1 - worst))

    def times(self, requested: int, size: int) -> _Three:
        """How many times over the tensor is fetched again."""
        if requested <= size or not size:
            return _ZERO
        passes = requested / size
        best, value, worst = self.missing
        if self.loops:
            return (passes - 1) * best, (passes - 1) * value, (passes - 1) * worst
        low, mean, high = (min(passes * wave, passes - 1) for wave in self.waves)
        return low * best, mean * value, high * worst


_MASKED = 0.585
"""A row that sees the share s is come back to after s**0.585: 2/3 for causal, where long rows count most."""

_ZERO = (0.0, 0.0, 0.0)
_ONCE = _Again(False, _ZERO, _ZERO)
