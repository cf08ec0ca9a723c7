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

from flashbench._iomodel import listed
from flashbench._iomodel.l2 import Cache, Hits
from flashbench._iomodel.tensors import FP32, INT32, bias_bytes, sizes
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
    run at once. loops: a thread block owns a head and passes over the same rows again itself.
    uneven: scores of the longest thread block over those of a mean one. section: units that are
    interleaved, tile by tile; 1 where one follows the other. lost: of what L2 should have kept from one
    wave to the next, the share that is fetched again all the same, expected and at worst. skew: at worst,
    the share of what is streamed that is fetched again within a wave, as thread blocks lose step.
    staggered: thread blocks of one head start at rows of their own, so that all that a wave moves goes by
    before a row is asked for again. crowd: how many times over what a wave moves counts against the L2 until
    the next wave, or pass, comes back to its rows. passes: of a loop, those
    over which a thread block spreads what it moves once. seen: the share of the rows that a pass visits.
    """

    ctas: int
    units: int
    slots: int
    loops: bool = False
    uneven: float = 1.0
    section: int = 1
    lost: tuple[float, float] = (0.0, 0.0)
    skew: float = 0.0
    staggered: bool = False
    crowd: float = 1.0
    passes: int = 1
    seen: float = 1.0


def dram(estimate: Estimate, cache: Cache, grids: tuple[Grid | None, ...]) -> Dram:
    """What of the requested traffic reaches DRAM. grids: one per step, None for one without tiles."""
    tracker = _Tracker(cache, tensor_bytes(estimate.problem))
    steps = tuple(tracker.run(step, grid) for step, grid in zip(estimate.steps, grids, strict=True))
    atomic = estimate.requested.atomic_bytes
    most = estimate.requested.read_bytes + atomic
    least = min(estimate.compulsory.read_bytes, most)
    read = Band(*(min(max(round(part), least), most) for part in tracker.read))
    most = estimate.requested.write_bytes + atomic + sum(step.spills.written for step in estimate.steps)
    low, value, high = (min(round(part), most) for part in tracker.write)
    left = min(value, _left(tracker.dirty_share) * cache.capacity)
    low = max(0, low - round(cache.capacity))
    return Dram(read=read, write=Band(low, max(low, value - round(left)), max(high, value)), steps=steps)


class Alone(NamedTuple):
    """DRAM traffic of one kernel that starts with a cold L2, as a profiler that flushes sees it."""

    name: str
    read: Band
    write: Band


def alone(estimate: Estimate, cache: Cache, grids: tuple[Grid | None, ...]) -> tuple[Alone, ...]:
    """Each step by itself: nothing of an earlier one is left in L2, and the flush is not counted."""
    sizes = tensor_bytes(estimate.problem)
    return tuple(_alone(*pair, cache, sizes) for pair in zip(estimate.steps, grids, strict=True))


def _alone(step: Step, grid: Grid | None, cache: Cache, sizes: Mapping[str, int]) -> Alone:
    tracker = _Tracker(cache, sizes)
    tracker.run(step, grid)
    added = sum(step.atomic.values())
    most = sum(step.read.values()) + added
    least = sum(
        min(count, sizes.get(name, count)) for name, count in (*step.read.items(), *step.atomic.items())
    )
    low, value, high = (min(max(round(part), least), most) for part in tracker.read)
    most = sum(step.write.values()) + added + step.spills.written
    written = [min(round(part), most) for part in tracker.write]
    left = min(written[1], _left(tracker.dirty_share) * cache.capacity)
    least = max(0, written[0] - round(cache.capacity))
    value_left = max(least, written[1] - round(left))
    return Alone(step.name, Band(low, value, high), Band(least, value_left, max(written[2], value_left)))


@lru_cache(maxsize=64)
def tensor_bytes(problem: Problem) -> dict[str, int]:
    """Bytes of every tensor by its name in a step."""
    total: dict[str, int] = {}
    for part in problem.parts():
        s = sizes(part)
        scale = FP32 // part.dtype_bytes if part.dtype_bytes <= FP32 else 1
        rows = {
            "q": s.q, "k": s.k, "v": s.v, "o": s.o, "do": s.o, "lse": s.lse, "delta": s.lse, "norm": s.lse,
            "mask": part.seqlen_q * part.seqlen_k,
            "lse_log2": s.lse, "l, m": 2 * s.lse, "l": s.lse, "m": s.lse, "dq": s.q, "dk": s.k, "dv": s.v,
            "dq_acc": s.q * scale, "dq_tmp": s.q * scale, "o_tmp": s.o * scale, "dk_acc": s.k * scale,
            "dv_acc": s.v * scale, "do_rows": s.o, "o_rows": s.o, "k_heads": s.k_heads,
            "v_heads": s.v_heads, "dk_heads": s.k_heads, "dv_heads": s.v_heads,
        }  # fmt: skip
        for name, size in rows.items():
            total[name] = total.get(name, 0) + size
    if problem.alibi or problem.sinks:
        total |= dict.fromkeys(("slopes", "sinks", "dsinks"), problem.num_heads * FP32)
    if problem.bias:
        total |= dict.fromkeys(("bias", "dbias"), bias_bytes(problem))
    if problem.block_mask:
        total |= listed.tensor_bytes(problem)
    if problem.lengths:
        total |= dict.fromkeys(("cu_q", "cu_k"), (len(problem.lengths) + 1) * INT32)
    return total


@dataclass(slots=True)
class _Tracker:
    """Walks over the steps and remembers when each tensor was last touched.

    clock: bytes touched so far. last: per tensor, the clock in the middle of the step that touched it.
    dirty: tensors that were written. read, write: least, expected and most bytes so far. dirty_share:
    of what the last step touched, what it wrote.
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
        inputs, adds, outputs = self._rows(step.read), self._rows(step.atomic), self._rows(step.write)
        touched = written = 0
        for _, _, size in inputs:
            touched += size
        for _, _, size in adds:
            touched += size
            written += size
        for name, _, size in outputs:
            written += size
            if name not in step.read:
                touched += size
        again = (
            _ONCE if grid is None else _Again.of(self.cache, grid, inputs + adds, touched + step.spills.held)
        )
        middle = self.clock + touched / 2
        before = self.read[1] + self.write[1]
        how = (middle, again, grid.skew if grid else 0.0)
        self._move(self.read, inputs, how, None)
        if adds:
            self._move(self.read, adds, how, None)
            self._move(self.write, adds, how, self.dirty)
        self._move(self.write, outputs, how, self.dirty)
        self.write[1] += _SAVED * step.spills.held
        self.write[2] += step.spills.held
        for rows in (inputs, adds, outputs):
            for name, _, _ in rows:
                self.last[name] = middle
        self.clock += touched
        self.dirty_share = written / touched if touched else 0.0
        return self.read[1] + self.write[1] - before

    def _rows(self, moved: Mapping[str, int]) -> list[tuple[str, int, int]]:
        """(tensor, requested bytes, bytes of the tensor itself)."""
        sizes = self.sizes
        return [
            (name, count, count if (size := sizes.get(name, count)) > count else size)
            for name, count in moved.items()
        ]

    def _move(
        self,
        to: list[float],
        rows: list[tuple[str, int, int]],
        how: tuple[float, _Again, float],
        dirty: set[str] | None,
    ) -> None:
        """Add what the rows move: each tensor once, less what L2 holds, and what is fetched again.

        dirty: of writes, the tensors that L2 may still hold unsaved: overwritten there, they are saved once.
        """
        middle, again, skew = how
        low = value = high = 0.0
        for name, requested, size in rows:
            seen = self.last.get(name)
            if seen is None or (dirty is not None and name not in dirty):
                low += size
                value += size
                high += size
            else:
                hits = self.cache.hits(middle - seen)
                low += size * (1 - hits[0])
                value += size * (1 - hits[1])
                high += size * (1 - hits[2])
            if requested > size:
                high += size * skew
            if requested > size and again is not _ONCE:
                times = again.times(requested, size)
                low += size * times[0]
                value += size * times[1]
                high += size * times[2]
            if dirty is not None:
                dirty.add(name)
        to[0] += low
        to[1] += value
        to[2] += high


class _Again(NamedTuple):
    """How often a kernel fetches again what it streams.

    loops: a thread block makes its passes itself; missing: what is not found in L2 per pass. Else
    waves: further waves over which a unit's passes spread, per pass; missing: what is then not found;
    within: what is not found of the passes of one wave.
    """

    loops: bool
    waves: _Three
    missing: _Three
    within: _Three = (0.0, 0.0, 0.0)

    @classmethod
    def of(cls, cache: Cache, grid: Grid, asked: list[tuple[str, int, int]], touched: float) -> _Again:
        """From the kernel's grid and its (tensor, requested, size) rows."""
        ctas, units, slots, loops, _, section, lost, _, staggered, crowd, passes, visited = grid
        per_unit = ctas / units
        streamed = asked_for = 0
        for _, requested, size in asked:
            if requested > size:
                streamed += size
                asked_for += requested
        own = (touched - streamed) * min(slots, ctas) / ctas
        unit_bytes = streamed / units
        if loops:
            moved = min(float(units), float(slots)) * unit_bytes + own / passes
            return cls(True, _ZERO, _missing(cache, moved, crowd, visited))
        active = min(float(units), max(1.0, slots / per_unit, section))
        within = _staggered(cache.hits(active * unit_bytes + own)) if staggered else _ZERO
        if ctas <= slots or not streamed:
            return cls(False, _ZERO, _ZERO, within) if staggered else _ONCE
        # under a mask a pass ends early and comes back to its rows sooner, after seen of them on average
        seen = min(1.0, asked_for / (streamed * per_unit))
        best = cache.hits(active * unit_bytes * seen + own).best
        typical = unit_bytes * seen**_MASKED
        value = cache.hits(crowd * (active * typical + own)).value
        if per_unit > slots:
            # in its first and last wave a unit shares the cache with a neighbour, for half the time
            edges = min(1.0, 2 * slots / per_unit)
            shared = crowd * (min(float(units), 1.5) * typical + own)
            value += edges * (cache.hits(shared).value - value)
        widest = min(float(units), active + 1) * unit_bytes + own
        worst = min(cache.hits(widest).worst * (1 - lost[1]), cache.hits(crowd * widest).worst)
        # how units and waves line up is not known: at best every unit starts with a wave
        waves = (max(0.0, 1 / slots - 1 / per_unit), 1 / slots - 0.5 / ctas, 1 / slots)
        if section * per_unit > slots:  # a section is one long unit: its first wave is the first pass
            waves = (0.0, max(0.0, section / slots - 1 / per_unit), section / slots)
        found = (best, value * (1 - lost[0]), worst)
        if unit_bytes > cache.capacity / 2:  # who falls behind finds its rows gone
            waves, found = (waves[0], waves[1], waves[2] + _DRIFT), (best, found[1], 0.0)
        return cls(False, waves, (1 - found[0], 1 - found[1], 1 - found[2]), within)

    def times(self, requested: int, size: int) -> _Three:
        """How many times over a tensor that is requested more than once is fetched again."""
        passes = requested / size
        if self.loops:
            best, value, worst = self.missing
            return (passes - 1) * best, (passes - 1) * value, (passes - 1) * worst
        times = []
        for wave, missing, within in zip(self.waves, self.missing, self.within, strict=True):
            apart = min(passes * wave, passes - 1)
            times.append(apart * missing + (passes - 1 - apart) * within)
        low, mean, high = times
        return low, mean, high


def _missing(cache: Cache, moved: float, crowd: float, seen: float) -> _Three:
    """Of what passes ask for again, what is not found, least to most.

    moved: bytes that go by during a whole pass. seen: the share of its rows that a pass visits on average.
    Under a causal mask each pass is shorter than the one before, and so comes back sooner.
    """
    if seen >= 1:
        # what a pass moved takes up to twice its room until its rows are asked for again
        best, value, worst = (
            cache.hits(moved).best,
            cache.hits(crowd * moved).value,
            cache.hits(max(2.0, crowd) * moved).worst,
        )
        return 1 - best, 1 - value, 1 - worst
    first, last = min(1.0, 2 * seen), max(0.0, 2 * seen - 1)
    lengths = [first + (last - first) * (i + 0.5) / _PASSES for i in range(_PASSES)]
    low = value = high = 0.0
    for length in lengths:
        of = _missing(cache, length * moved, crowd, 1.0)
        low, value, high = low + length * of[0], value + length * of[1], high + length * of[2]
    total = sum(lengths)
    return low / total, value / total, high / total


_PASSES = 8
"""Lengths of pass that stand for all of a masked loop."""


def _left(dirty_share: float) -> float:
    """The share of L2 that holds unsaved lines when the last kernel ends."""
    return min(_DIRTY * dirty_share, _MOST_DIRTY)


def _staggered(hits: Hits) -> _Three:
    """Of the passes of one wave, what is not found: none at best, at worst all that the curve says."""
    return (0.0, _STAGGER * (1 - hits.value), 1 - hits.worst)


_STAGGER = 0.5
"""Of what goes by between two uses of a row by staggered thread blocks, over all that a wave moves.

As a share of the misses that the whole would give. Set by counts of torch's FlashAttention-2 under a mask.
"""

_DIRTY = 0.75
"""What the last kernel leaves unsaved, over what it would if as much of L2 were dirty as of what it moved.

Counted on an H100 SXM: 0.79 of a copy, 0.76 of a scaling, 0.64 of a softmax (docs/counters.md).
"""

_MOST_DIRTY = 0.41
"""Of the L2, what holds unsaved lines at most: 0.43 after a kernel that only writes, 0.39 after one in place.

Counted on an H100 SXM (docs/counters.md).
"""

_SAVED = 0.5
"""How often a thread block's spilled registers reach memory: between never and once, as they stay in use."""

_DRIFT = 0.02
"""Of all passes over a unit of more than half the L2, those that are fetched again at worst.

Seen on an H100 SXM at 64k, d = 128 (docs/counters.md). In the band only, not in what is expected.
"""

_MASKED = 0.585
"""A row that sees the share s is come back to after s**0.585: 2/3 for causal, where long rows count most."""

_ZERO = (0.0, 0.0, 0.0)
_ONCE = _Again(False, _ZERO, _ZERO)
