"""The L2 cache: how likely a line is still there when it is asked for again, by working set over capacity.

For the H100 SXM h was counted: DRAM reads of a kernel that comes back to one set with all SMs
(``flashbench profile --known``). The other curves are lines through measured bandwidth against working
set (gpu-benches, gpu-l2-cache), read as h ≥ 1 − BW_dram/BW; below about 0.75 of the capacity such a
measurement is capped by the bandwidth of L2 itself and bounds h from below only. All fall more softly
than an LRU cliff.
"""

from __future__ import annotations

from bisect import bisect
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from flashbench.devices import Device


class Curve(NamedTuple):
    """h(x) = clamp((end − x) / width, 0, 1), x = working set / (scale · capacity); error: of the fit.

    points: counted (x, h), falling; where there are some, h runs straight from one to the next, from 1 at
    0 to 0 past the last.
    """

    end: float
    width: float
    error: float
    source: str
    scale: float = 1.0
    points: tuple[tuple[float, float], ...] = ()

    def raw(self, x: float) -> float:
        """h before it is clamped to 0 and 1; of a counted curve, between them."""
        if not self.points:
            return (self.end - x) / self.width
        at = bisect(self.points, (x, 2.0))
        if at == len(self.points):
            return 0.0
        low, high = self.points[at - 1] if at else (0.0, 1.0), self.points[at]
        return low[1] + (high[1] - low[1]) * (x - low[0]) / (high[0] - low[0])


H100_SXM = Curve(
    2.0, 1.0, 0.03, "counted on an H100 SXM5 80GB, reports/h100-sxm/counters/known.json", 1.0,
    ((0.495, 1.0), (0.619, 0.99), (0.66, 0.977), (0.701, 0.963), (0.743, 0.947), (0.784, 0.903),
     (0.866, 0.756), (0.907, 0.674), (0.949, 0.561), (0.99, 0.43), (1.031, 0.369), (1.114, 0.254),
     (1.155, 0.217), (1.196, 0.127), (1.32, 0.067), (1.485, 0.028), (1.98, 0.001)),
)  # fmt: skip
HOPPER = Curve(1.21, 0.63, 0.04, "gpu-benches on an H100 PCIe, 50 MiB")
H200 = Curve(1.21, 0.63, 0.07, "gpu-benches on an H200; as a cache of 53 MiB", 53 / 50)
AMPERE = Curve(1.17, 0.73, 0.10, "gpu-benches on an A100-80, 40 MiB")
ADA = Curve(1.15, 0.13, 0.05, "gpu-benches on an L40, 96 MiB: one partition, a cliff")
UNMEASURED = Curve(1.21, 0.63, 0.15, "as an H100: nobody measured this card")

_BY_NAME = {"h200": H200, "h100-sxm": H100_SXM}
_BY_ARCH = {"sm80": AMPERE, "sm89": ADA, "sm90": HOPPER}


def curve(device: Device) -> Curve:
    """The curve of the card, of its generation, or of the H100 with a wide error."""
    return _BY_NAME.get(device.name) or _BY_ARCH.get(device.arch, UNMEASURED)


class Hits(NamedTuple):
    """Hit probability: at best (LRU, or the fit and its error), as fitted, at worst."""

    best: float
    value: float
    worst: float


ALWAYS = Hits(1.0, 1.0, 1.0)
NEVER = Hits(0.0, 0.0, 0.0)

_BOUND = 0.35 / 0.75
"""Slope of the least that the measurements allow where they only bound h: 1 at x = 0, 0.65 at x = 0.75."""


_FITS = 1.05
"""An LRU cache keeps a set up to its capacity; the set is counted in whole tiles, hence some slack."""


class Cache(NamedTuple):
    """The L2 of one card."""

    capacity: float
    curve: Curve

    @classmethod
    def of(cls, device: Device) -> Cache:
        """Capacity as the curve counts it."""
        found = curve(device)
        return cls(device.l2_bytes * found.scale, found)

    def hits(self, working_set: float) -> Hits:
        """How likely a line is still cached after working_set bytes (its own tensor among them) went by."""
        capacity, curve = self
        error = curve.error
        x = working_set / capacity
        if x >= curve.end:
            return Hits(1.0 if x <= _FITS else error, 0.0, 0.0)
        raw = curve.raw(x)
        value = raw if raw < 1 else 1.0
        best = 1.0 if x <= _FITS or value + error >= 1 else value + error
        worst = 1.0 if curve.points and raw >= 1 else raw - error
        bound = 1.0 if curve.points else 1 - _BOUND * x
        if worst > bound:
            worst = bound
        return Hits(best, value, worst if worst > 0 else 0.0)
