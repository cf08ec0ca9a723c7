"""LINKS: what one card sends to another, per device row, each with its source and what is uncertain.

To give a card links, add a row. Rates are bytes per second in one direction, without protocol overhead: a
data sheet's "900 GB/s" of NVLink is both directions together. NCCL reaches less; ``flashbench ring`` measures
how much (docs/ring.md: two H200s).
"""

from __future__ import annotations

from dataclasses import dataclass

from flashbench.errors import SpecError

KINDS = ("nvlink", "pcie", "network")
"""Links that a ring may run over. AMD's Infinity Fabric stands as nvlink."""

_GEN3, _GEN4, _GEN5, _GEN6 = 15.75e9, 31.5e9, 63e9, 126e9  # PCIe x16, one direction


@dataclass(frozen=True, kw_only=True)
class Links:
    """Rates of one card, bytes per second in one direction; None where it has no such link or nobody says.

    nvlink: to one other card of the same host. pcie: x16 to the host. network: of the network card that the
    vendor's own server has for each GPU.
    """

    nvlink: float | None = None
    pcie: float | None = None
    network: float | None = None
    source: str
    uncertain: str = ""

    def rate(self, kind: str) -> float:
        """Bytes per second over that kind of link. Raises SpecError where the card has none."""
        found: float | None = getattr(self, kind)
        if found is None:
            there = [name for name in KINDS if getattr(self, name) is not None]
            raise SpecError(f"--link {kind!r}: this card has none in the table; accepted: {', '.join(there)}")
        return found

    @property
    def fastest(self) -> str:
        """The kind that two cards of one host would use."""
        return "pcie" if self.nvlink is None else "nvlink"


_DGX_H100 = Links(
    nvlink=450e9, pcie=_GEN5, network=50e9,
    source="NVIDIA H100 and H200 data sheets (NVLink 4, 900 GB/s both ways); DGX H100: 400 Gb/s a GPU",
)  # fmt: skip
_BRIDGE = "an NVLink bridge joins two cards only"
_A100_SXM = Links(
    nvlink=300e9, pcie=_GEN4, network=25e9,
    source="NVIDIA A100 data sheet (NVLink 3, 600 GB/s both ways); DGX A100: 200 Gb/s a GPU",
)  # fmt: skip
_A100_PCIE = Links(
    nvlink=300e9, pcie=_GEN4, source="NVIDIA A100 data sheet (bridge: 600 GB/s both ways)", uncertain=_BRIDGE
)
_V100 = Links(
    nvlink=150e9, pcie=_GEN3, network=6.25e9,
    source="NVIDIA V100 data sheet (NVLink 2, 300 GB/s both ways); DGX-1: 4 x 100 Gb/s for 8 GPUs",
    uncertain="without NVSwitch a neighbour has one or two of the six links, 25 GB/s each",
)  # fmt: skip
_ADA = Links(pcie=_GEN4, source="NVIDIA L4, L40S and RTX 4090 data sheets (PCIe 4 x16, no NVLink)")
_BLACKWELL = Links(
    nvlink=900e9, pcie=_GEN5, network=50e9,
    source="NVIDIA B200 and GB200 data sheets (NVLink 5, 1.8 TB/s both ways); DGX B200: 400 Gb/s a GPU",
)  # fmt: skip
_BLACKWELL_ULTRA = Links(
    nvlink=900e9, pcie=_GEN6, network=100e9,
    source="NVIDIA B300 and GB300 data sheets (NVLink 5, 1.8 TB/s both ways); 800 Gb/s a GPU",
    uncertain="PCIe 6 and the network card from memory",
)  # fmt: skip
_CDNA3 = Links(
    nvlink=64e9, pcie=_GEN5, network=50e9,
    source="AMD Instinct MI300X platform data sheet (seven Infinity Fabric links, 128 GB/s both ways each)",
    uncertain="one link to each neighbour; all seven together 448 GB/s; the network card from memory",
)  # fmt: skip

LINKS = {
    "v100-sxm2": _V100,
    "v100-sxm2-32gb": _V100,
    "t4": Links(pcie=_GEN3, source="NVIDIA T4 data sheet (PCIe 3 x16)"),
    "a10g": Links(pcie=_GEN4, source="NVIDIA A10 data sheet (PCIe 4 x16)", uncertain="an A10G may have x8"),
    "a100-sxm-40gb": _A100_SXM,
    "a100-pcie-40gb": _A100_PCIE,
    "a100-sxm-80gb": _A100_SXM,
    "a100-pcie-80gb": _A100_PCIE,
    "l4": _ADA,
    "l40s": _ADA,
    "rtx-3090": Links(
        nvlink=56.25e9, pcie=_GEN4, source="NVIDIA GA102 white paper (NVLink 3, 112.5 GB/s both ways)",
        uncertain=_BRIDGE,
    ),
    "rtx-4090": _ADA,
    "rtx-5090": Links(pcie=_GEN5, source="NVIDIA RTX Blackwell white paper (PCIe 5 x16, no NVLink)"),
    "h100-sxm": _DGX_H100,
    "h100-pcie": Links(
        nvlink=300e9, pcie=_GEN5, source="NVIDIA H100 data sheet (bridge: 600 GB/s both ways)",
        uncertain=_BRIDGE,
    ),
    "h100-nvl": Links(
        nvlink=300e9, pcie=_GEN5, source="NVIDIA H100 NVL product brief (bridge: 600 GB/s both ways)",
        uncertain=_BRIDGE,
    ),
    "h200": _DGX_H100,
    "b200": _BLACKWELL,
    "gb200": _BLACKWELL,
    "b300": _BLACKWELL_ULTRA,
    "gb300": _BLACKWELL_ULTRA,
    "mi250x": Links(
        nvlink=50e9, pcie=_GEN4,
        source="AMD Instinct MI250X data sheet (Infinity Fabric, 100 GB/s both ways)",
        uncertain="from memory; one to four links between two dies",
    ),
    "mi300x": _CDNA3,
    "mi325x": _CDNA3,
    "mi355x": Links(
        nvlink=76.8e9, pcie=_GEN5, network=50e9,
        source="AMD Instinct MI355X data sheet (Infinity Fabric, 153.6 GB/s both ways to each neighbour)",
        uncertain="partly from memory",
    ),
}  # fmt: skip
"""Links of every row of DEVICES, by its name."""


def of(device: str) -> Links:
    """The links of a row of DEVICES. Raises SpecError for a card without any here, such as one of a file."""
    if device not in LINKS:
        raise SpecError(
            f"no link is known of the card {device!r}; accepted: a card of 'flashbench list devices'"
        )
    return LINKS[device]
