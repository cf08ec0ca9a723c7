"""One card with one family's constants and one dtype: every number that the time model needs of them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

from flashbench._iomodel.constants import (
    FAMILIES,
    LIKE,
    OF_MODEL,
    REFERENCE_MATMUL,
    REFERENCE_MEMORY,
    Family,
    Pace,
    Rates,
)
from flashbench._iomodel.l2 import Cache
from flashbench._iomodel.roofline import Roofs, roofs
from flashbench.errors import UnknownName

if TYPE_CHECKING:
    from flashbench._iomodel.types import Step
    from flashbench.devices import Device


class Setting(NamedTuple):
    """family, device: where the numbers come from. roof: the card's ceilings, as they are shown.

    flops, dram: its ceilings as data sheets count them, which the constants refer to. tiled: rates of the
    family's tiled kernels by their names, for that generation; empty for a family without. stream_fwd,
    stream_bwd: shares of the memory bandwidth. calibrated: whether a table of the card's generation stands
    behind the constants. paces: of the family, for that generation.
    """

    family: Family
    device: Device
    roof: Roofs
    flops: float
    dram: float
    clock: float
    sms: int
    cache: Cache
    tiled: Mapping[str, Rates]
    stream_fwd: float
    stream_bwd: float
    calibrated: bool
    note: str
    paces: Mapping[str, Pace]

    def kernel(self, step: Step) -> str:
        """The tiled kernel whose rates the step takes: its pass's, where the family has none of its own.

        Of fp8's two forwards, that of row sums alone reads V's mean.
        """
        pass_ = "fwd" if step.name == "forward" else "bwd"
        own = "sums" if "v_mean" in step.read else "apart" if step.name in ("dkdv", "dq") else pass_
        return own if own in self.tiled else pass_

    def rates(self, step: Step) -> Rates | None:
        """Of the tiled kernel that the step is, None for a family without."""
        return self.tiled.get(self.kernel(step))

    def pace(self, op: str, row: int) -> float:
        """Requested bytes per second of an op over rows of that length; infinite where its bytes decide."""
        pace = next((pace for longest, pace in self.paces.get(op, ()) if row <= longest), math.inf)
        return pace * self.sms * self.clock


_made: dict[tuple[int, int, str], Setting] = {}
_MOST = 64


def setting(device: Device, model: str, family: str | None, dtype: str) -> Setting:
    """The setting for a model's own family or the named one; made once per card, family and dtype.

    Raises UnknownName for an unknown family, SpecError for a dtype that the card lacks.
    """
    name = family or OF_MODEL.get(model, "triton")
    row = FAMILIES.get(name)
    if row is None:
        raise UnknownName("family", name, FAMILIES)
    key = id(device), id(row), dtype
    found = _made.get(key)
    if found is None or found.device is not device or found.family is not row:
        if len(_made) >= _MOST:
            _made.clear()
        found = _made[key] = _make(device, row, dtype)
    return found


def _make(device: Device, row: Family, dtype: str) -> Setting:
    roof = roofs(device, dtype)
    generation, own = _generation(row, device.arch)
    measured = device.measured
    streams = [row.stream.get((pass_, generation)) or row.stream[pass_, "sm80"] for pass_ in ("fwd", "bwd")]
    return Setting(
        family=row,
        device=device,
        roof=roof,
        flops=roof.flops / REFERENCE_MATMUL if f"{dtype}_flops_per_s" in measured else roof.flops,
        dram=roof.dram / REFERENCE_MEMORY if "hbm_bytes_per_s" in measured else roof.dram,
        clock=device.clock_hz,
        sms=device.num_sms,
        cache=Cache.of(device),
        tiled={kernel: rates for (kernel, of), rates in row.rates.items() if of == generation},
        stream_fwd=streams[0],
        stream_bwd=streams[1],
        calibrated=row.calibrated and own,
        note=_note(row, device, generation, own),
        paces={op: pace for (op, of), pace in row.paces.items() if of == generation},
    )


def _generation(row: Family, arch: str) -> tuple[str, bool]:
    """Whose constants stand for the card's generation, and whether they are its own."""
    known = {generation for _, generation in (row.rates or row.stream)}
    found = arch
    while found not in known and found in LIKE:
        found = LIKE[found]
    if found not in known:
        found = "sm80" if "sm80" in known else min(known)
    return found, found == arch


def _note(row: Family, device: Device, generation: str, own: bool) -> str:
    words = [f"time by the constants of {row.name}"]
    if not own:
        words.append(f"those of {generation}, for want of {device.arch}'s")
    if not row.calibrated:
        words.append("from a single published number")
    words.append(f"L2 hits {device.name}: {Cache.of(device).curve.source}")
    if device.l2_bytes_per_s is None:
        words.append("L2 bandwidth estimated")
    words.append(f"roofs: {device.roofs}")
    return "; ".join(words)
