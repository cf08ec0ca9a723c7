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
from flashbench._iomodel.again import ONCE, Again, Grid, Turns
from flashbench._iomodel.l2 import Cache
from flashbench._iomodel.tensors import FP16, FP32, INT32, bias_bytes, sizes
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


def dram(estimate: Estimate, cache: Cache, grids: tuple[Grid | None, ...]) -> Dram:
    """What of the requested traffic reaches DRAM. grids: one per step, None for one without tiles."""
    tracker = _Tracker(cache, tensor_bytes(estimate.problem))
    steps = tuple(tracker.run(step, grid) for step, grid in zip(estimate.steps, grids, strict=True))
    atomic = estimate.requested.atomic_bytes
    most = estimate.requested.read_bytes + atomic + round(tracker.beyond)
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
    most = sum(step.read.values()) + added + round(tracker.beyond)
    rows = tracker.rows(step.read, grid.bias if grid else None) + tracker.rows(step.atomic)
    least = sum(size for _, _, size in rows)
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
        o = max(s.o, s.o // part.dtype_bytes * FP16)  # of fp8 in 16 bits, or less where a kernel writes less
        rows = {
            "q": s.q, "k": s.k, "v": s.v, "o": o, "do": s.o, "lse": s.lse, "delta": s.lse, "norm": s.lse,
            "mask": part.seqlen_q * part.seqlen_k,
            "lse_log2": s.lse, "lse_2": s.lse, "l, m": 2 * s.lse, "l": s.lse, "m": s.lse,
            "dq": s.q, "dk": s.k, "dv": s.v,
            "dq_acc": s.q * scale, "dq_tmp": s.q * scale, "o_tmp": s.o * scale, "dk_acc": s.k * scale,
            "dv_acc": s.v * scale, "do_rows": s.o, "o_rows": s.o, "k_heads": s.k_heads,
            "v_heads": s.v_heads, "dk_heads": s.k_heads, "dv_heads": s.v_heads,
            "v_mean": part.batch * part.num_kv_heads * part.head_dim_v * FP16,
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
    of what the last step touched, what it wrote. beyond: what a library's products may fetch again, which
    is not among the bytes requested.
    """

    cache: Cache
    sizes: Mapping[str, int]
    clock: float = 0.0
    last: dict[str, float] = field(default_factory=dict)
    dirty: set[str] = field(default_factory=set)
    read: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    write: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    dirty_share: float = 0.0
    beyond: float = 0.0

    def run(self, step: Step, grid: Grid | None) -> float:
        """One step; returns its expected DRAM bytes, read and written."""
        shared = grid.bias if grid else None
        inputs = self.rows(step.read, shared)
        adds, outputs = self.rows(step.atomic), self.rows(step.write)
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
            ONCE if grid is None else Again.of(self.cache, grid, inputs + adds, touched + step.spills.held)
        )
        if shared and again is not ONCE:
            bias = next(size for name, _, size in inputs if name == "bias")
            again = again.coming_back(self.cache, shared, bias, touched)
        middle = self.clock + touched / 2
        before = self.read[1] + self.write[1]
        how = (middle, again, grid.skew if grid else 0.0)
        self._move(self.read, inputs, how, None)
        if grid and grid.operands:
            self._fetch_again(step, grid.operands, touched)
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

    def _fetch_again(self, step: Step, operands: Mapping[str, float], touched: float) -> None:
        """Add what a library's product fetches again, where not all of it stays in L2: none to twice that."""
        missed = 1 - self.cache.hits(touched).value
        value = missed * sum([step.read[name] * times for name, times in operands.items()])
        self.read[1] += value
        self.read[2] += 2 * value
        self.beyond += 2 * value

    def rows(self, moved: Mapping[str, int], shared: Turns | None = None) -> list[tuple[str, int, int]]:
        """(tensor, requested bytes, bytes of the tensor itself; of a bias, those that a turn reads)."""
        sizes = self.sizes
        if shared and moved["bias"] < shared.turns * sizes["bias"]:
            sizes = {**sizes, "bias": moved["bias"] // shared.turns}
        return [
            (name, count, count if (size := sizes.get(name, count)) > count else size)
            for name, count in moved.items()
        ]

    def _move(
        self,
        to: list[float],
        rows: list[tuple[str, int, int]],
        how: tuple[float, Again, float],
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
            if requested > size and again is not ONCE:
                shared = again.bias if name == "bias" else None
                times = shared or again.times(requested, size)
                low += size * times[0]
                value += size * times[1]
                high += size * times[2]
            if dirty is not None:
                dirty.add(name)
        to[0] += low
        to[1] += value
        to[2] += high


def _left(dirty_share: float) -> float:
    """The share of L2 that holds unsaved lines when the last kernel ends."""
    return min(_DIRTY * dirty_share, _MOST_DIRTY)


_DIRTY = 0.84
"""What the last kernel leaves unsaved, over what it would if as much of L2 were dirty as of what it moved.

Counted on an H100 SXM, less what the profiler itself left to be written: 0.88 of a copy, 0.85 of a scaling,
0.73 of a softmax (docs/counters.md).
"""

_MOST_DIRTY = 0.46
"""Of the L2, what holds unsaved lines at most: 0.48 after a kernel that only writes, 0.44 after one in place.

As _DIRTY.
"""

_SAVED = 0.5
"""How often a thread block's spilled registers reach memory: between never and once, as they stay in use."""
