"""The L2 cache: how likely a line is still there when it is asked for again, by working set over capacity.

The curves are lines through measured bandwidth against working set (gpu-benches, gpu-l2-cache: all SMs
re-read one set), read as h ≥ 1 − BW_dram/BW. They fall more softly than an LRU cliff. Below about 0.75
of the capacity such a measurement is capped by the bandwidth of L2 itself and bounds h from below only.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from flashbench.devices import Device


class Curve(NamedTuple):
    """h(x) = clamp((end − x) / width, 0, 1), x = working set / (scale · capacity); error: of the fit."""

    end: float
    width: float
    error: float
    source: str
    scale: float = 1.0


HOPPER = Curve(1.21, 0.63, 0.04, "gpu-benches on an H100 PCIe, 50 MiB")
H200 = Curve(1.21, 0.63, 0.07, "gpu-benches on an H200; as a cache of 53 MiB", 53 / 50)
AMPERE = Curve(1.17, 0.73, 0.10, "gpu-benches on an A100-80, 40 MiB")
ADA = Curve(1.15, 0.13, 0.05, "gpu-benches on an L40, 96 MiB: one partition, a cliff")
UNMEASURED = Curve(1.21, 0.63, 0.15, "as an H100: nobody measured this card")

_BY_NAME = {"h200": H200}
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
        capacity, (end, width, error, _, _) = self
        x = working_set / capacity
        if x >= end:
            return Hits(1.0 if x <= _FITS else error, 0.0, 0.0)
        raw = (end - x) / width
        value = raw if raw < 1 else 1.0
        best = 1.0 if x <= _FITS or value + error >= 1 else value + error
        worst = raw - error
        bound = 1 - _BOUND * x
        if worst > bound:
            worst = bound
        return Hits(best, value, worst if worst > 0 else 0.0)
