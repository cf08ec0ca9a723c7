"""How often a kernel fetches again what it reads more than once, from its grid and the L2.

Between waves, within one, and inside a thread block that makes its passes itself (dram.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from flashbench._iomodel.l2 import Cache

if TYPE_CHECKING:
    from flashbench.problem import Problem

Three = tuple[float, float, float]
"""Least, expected, most."""

NONE: Mapping[str, float] = MappingProxyType({})


class Turns(NamedTuple):
    """How a kernel comes back to a bias that batches or heads share.

    turns: heads that read the same numbers, one after the other. own, rest: of the bias and of all else that
    the kernel touches, the share that goes by from one turn to the next.
    """

    turns: int
    own: float
    rest: float

    @classmethod
    def of(cls, p: Problem) -> Turns:
        """Heads go one by one, batch after batch: a bias of every head is read again after a whole batch."""
        batches, heads, *_ = p.bias_shape
        turns = p.batch // batches * (p.num_heads // heads)
        if heads < p.num_heads:
            return cls(turns, 1 / batches, 1 / (p.batch * p.num_heads))
        return cls(turns, 1.0, 1 / p.batch)


class Grid(NamedTuple):
    """How a tiled kernel covers the work.

    ctas: thread blocks in all. units: heads that share what is streamed. slots: thread blocks that
    run at once. loops: a thread block owns a head and passes over the same rows again itself.
    uneven: scores of the longest thread block, or tile, over those of a mean one. section: units that are
    interleaved, tile by tile; 1 where one follows the other. lost: of what L2 should have kept from one
    wave to the next, the share that is fetched again all the same, expected and at worst. skew: at worst,
    the share of what is streamed that is fetched again within a wave, as thread blocks lose step.
    stagger: of a head's rows, the share by which a thread block starts after the one before it; 0 where all
    start at the same row. crowd: how many times over what a wave moves counts against the L2 until
    the next wave, or pass, comes back to its rows. passes: of a loop, those
    over which a thread block spreads what it moves once. seen: the share of the rows that a pass visits.
    bias: how the kernel comes back to a bias; None where there is none, or a program has its turns in a row.
    tiles: of all that persistent programs take one after the other; 0 where each has a thread block.
    drifts: those programs lose step as they go, and so find rows gone within a wave as well. operands: of a
    library's product, how many times over each is fetched again (products.py).
    """

    ctas: int
    units: int
    slots: int
    loops: bool = False
    uneven: float = 1.0
    section: int = 1
    lost: tuple[float, float] = (0.0, 0.0)
    skew: float = 0.0
    stagger: float = 0.0
    crowd: float = 1.0
    passes: int = 1
    seen: float = 1.0
    bias: Turns | None = None
    tiles: int = 0
    drifts: bool = False
    operands: Mapping[str, float] = NONE


class Again(NamedTuple):
    """How often a kernel fetches again what it streams.

    loops: a thread block makes its passes itself; missing: what is not found in L2 per pass. Else
    waves: further waves over which a unit's passes spread, per pass; missing: what is then not found;
    within: what is not found of the passes of one wave. bias: how many times over a shared bias is fetched
    again; None where it is streamed as the rest.
    """

    loops: bool
    waves: Three
    missing: Three
    within: Three = (0.0, 0.0, 0.0)
    bias: Three | None = None

    @classmethod
    def of(cls, cache: Cache, grid: Grid, asked: list[tuple[str, int, int]], touched: float) -> Again:
        """From the kernel's grid and its (tensor, requested, size) rows."""
        units, slots, section, lost, crowd = grid.units, grid.slots, grid.section, grid.lost, grid.crowd
        ctas = grid.tiles or grid.ctas
        per_unit = ctas / units
        streamed = asked_for = 0
        for _, requested, size in asked:
            if requested > size:
                streamed += size
                asked_for += requested
        own = (touched - streamed) * min(slots, ctas) / ctas
        unit_bytes = streamed / units
        if grid.loops:
            moved = min(float(units), float(slots)) * unit_bytes + own / grid.passes
            return cls(True, _ZERO, _missing(cache, moved, crowd, grid.seen))
        # under a mask a pass ends early and comes back to its rows sooner, after seen of them on average
        seen = min(1.0, asked_for / (streamed * per_unit)) if streamed else 1.0
        if grid.stagger and streamed:
            within = _staggered(cache, grid, (unit_bytes, own), seen)
            waves = (0.0, 1 / slots - 0.5 / ctas, 1 / slots) if ctas > slots else _ZERO
            kept = (1.0, (1 - within[1]) * (1 - lost[0]), (1 - within[2]) * (1 - lost[1]))
            return cls(False, waves, (1 - kept[0], 1 - kept[1], 1 - kept[2]), within)
        active = min(float(units), max(1.0, slots / per_unit, section))
        within = _ZERO
        if grid.drifts and per_unit > slots:
            within = _apart(cache, unit_bytes, min(2, units) * unit_bytes + own)
        if ctas <= slots or not streamed:
            return ONCE
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
        if section * per_unit > slots:
            # a section is one long unit: its first wave is the first pass; of several units, cut to stay in
            # L2, rows are lost once, as the next section begins
            further = max(0.0, section / slots - 1 / per_unit)
            waves = (0.0, further if section == 1 else min(further, 1 / per_unit), section / slots)
        found = (best, value * (1 - lost[0]), worst)
        if unit_bytes > cache.capacity / 2:  # who falls behind finds its rows gone
            waves, found = (waves[0], waves[1], waves[2] + _DRIFT), (best, found[1], 0.0)
        return cls(False, waves, (1 - found[0], 1 - found[1], 1 - found[2]), within)

    def coming_back(self, cache: Cache, shared: Turns, bias: int, touched: float) -> Again:
        """The same with what is fetched again of a bias of so many bytes."""
        missed = [1 - hit for hit in cache.hits(shared.own * bias + shared.rest * (touched - bias))]
        low, value, high = ((shared.turns - 1) * share for share in missed)
        return self._replace(bias=(low, value, high))

    def times(self, requested: int, size: int) -> Three:
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


def _missing(cache: Cache, moved: float, crowd: float, seen: float) -> Three:
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


def _staggered(cache: Cache, grid: Grid, moved: tuple[float, float], seen: float) -> Three:
    """Of the passes of staggered thread blocks over a unit, what is not found.

    moved: bytes of a unit's streamed rows, and all that the slots' thread blocks touch once. seen: the share
    of the rows that one visits on average.

    A thread block comes to a row one stagger after its neighbour. Meanwhile each slot streams as many rows of
    its own, and those that start then touch what is theirs. A neighbour that waited for a slot is later by
    that; at worst by all of it, while expected is that it makes up for most.
    """
    unit, own = moved
    steps = max(1.0, seen / grid.stagger)
    between = min(grid.slots, grid.ctas) * grid.stagger * unit + own / steps
    waits = steps / grid.slots if grid.ctas > grid.slots else 0.0
    typical = _BETWEEN * between * (1 + _DELAY * waits)
    found = [cache.hits(typical * (1 + apart)).value for apart in (-_UNEVEN, 0.0, _UNEVEN)]
    value = sum(found) / len(found)
    worst = cache.hits(2 * between * (1 + waits)).worst
    return 0.0, 1 - value, 1 - min(value, worst)


def _apart(cache: Cache, unit: float, moved: float) -> Three:
    """Of the passes of persistent programs over a unit of so many bytes, what is not found.

    moved: all that may go by between two uses of a row, where programs are anywhere in two units.
    """
    most = 1 - cache.hits(moved).worst
    expected = _APART * (unit / cache.capacity) ** 3
    return 0.0, min(expected, most), min(_FARTHEST * expected, most)


_APART = 0.08
"""Programs with a schedule of their own never wait for each other. Over a unit that they pass over in more
than one wave, those that fall far behind find its rows gone: of all passes, this times the cube of the unit
over the capacity, which is 0.3 % at a third, 2 % at two thirds and 17 % at 1.28.

A description of seven counts on an H100 SXM at 32k and 64k, not a derivation (docs/counters.md): 0, 0.1 and
1.2 % at a third, 0.7, 2.9 and 3.6 % at two thirds, 17 % at 1.28.
"""

_FARTHEST = 4.0
"""At worst so many times that: about as far above it as the farthest of those counts."""

_BETWEEN, _DELAY, _UNEVEN = 1.885, 0.25, 0.1
"""How many times what staggered thread blocks move from one use of a row to the next counts against the L2;
of the time that one waited for its slot, the share by which it stays behind its neighbour; and how far such
distances are from their middle, to either side.

The first is a crowd as those of time.py. Set by counts of torch's FlashAttention-2 under a mask at d = 128 on
an H100 SXM, N = 1k to 64k at one number of tokens: of all passes 12, 7, 3.4, 3.1, 3.0, 7 and 21 % are
missed. Counts at other numbers of batches and heads were weighed in, less; there up to 17 % more is read than
expected (docs/counters.md).
"""

_DRIFT = 0.02
"""Of all passes over a unit of more than half the L2, those that are fetched again at worst.

Seen on an H100 SXM at 64k, d = 128 (docs/counters.md). In the band only, not in what is expected.
"""

_MASKED = 0.585
"""A row that sees the share s is come back to after s**0.585: 2/3 for causal, where long rows count most."""

_ZERO = (0.0, 0.0, 0.0)
ONCE = Again(False, _ZERO, _ZERO)
