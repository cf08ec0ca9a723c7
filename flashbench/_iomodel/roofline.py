"""The ceilings of a card, and what they allow at an arithmetic intensity."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from flashbench.errors import SpecError

if TYPE_CHECKING:
    from flashbench.devices import Device

SMEM_BYTES_PER_CLK = 128
"""Shared memory of one SM. Source: FlashAttention-4 (arXiv:2603.05451), for Hopper and Blackwell."""

L2_BYTES_PER_CLK = 32
"""What one SM draws from L2 where nobody measured the card: 35 on an A100 and an H100, 15 on an L40."""


class Roofs(NamedTuple):
    """Ceilings of a whole card: FLOP/s of a dtype's dense matrix products, exponentials/s, and B/s."""

    flops: float
    exps: float
    l2: float
    dram: float
    smem: float

    @property
    def ridge(self) -> float:
        """FLOPs per DRAM byte above which matrix products are the limit."""
        return self.flops / self.dram

    def attainable(self, intensity: float) -> float:
        """FLOP/s that the roofline allows at so many FLOPs per DRAM byte."""
        return min(self.flops, intensity * self.dram)


def roofs(device: Device, dtype: str) -> Roofs:
    """The card's ceilings for one dtype. Raises SpecError where the card lacks the dtype."""
    peak = device.peak_flops_per_s.get(dtype)
    if not peak:
        raise SpecError(f"{device.name} has no matrix products in {dtype}; choose another dtype or card")
    clocks = device.num_sms * device.clock_hz
    return Roofs(
        flops=peak,
        exps=device.exps_per_s,
        l2=device.l2_bytes_per_s or L2_BYTES_PER_CLK * clocks,
        dram=device.hbm_bytes_per_s,
        smem=SMEM_BYTES_PER_CLK * clocks,
    )
