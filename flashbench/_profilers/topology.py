"""Where a GPU sits in its host, and what joins it to the other cards there, as NVML tells it."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from flashbench._profilers.clocks import optional, text

SYSTEM = Path("/sys/bus/pci/devices")

MEETING = {
    0: "one board", 10: "one PCIe switch", 20: "PCIe switches", 30: "host bridge", 40: "NUMA node",
    50: "between NUMA nodes",
}  # fmt: skip
"""Where the ways of two cards meet that no NVLink joins, by nvmlGpuTopologyLevel_t: from 10 on nvidia-smi's
PIX, PXB, PHB, NODE and SYS."""

NVLINK = "NVLink"


def read(library: Any, handle: Any, system: Path | None = None) -> dict[str, Any]:
    """pci (bus id), pcie (``gen 5 x16``), numa_node, and peers: by bus id, what joins it to the others that
    NVML sees. None, or a peer left out, where NVML does not say.

    library: pynvml. handle: of a whole card. system: where Linux lists PCI devices, ``SYSTEM``.
    """
    own = _bus_id(library, handle)
    return {
        "pci": own,
        "pcie": _pcie(library, handle),
        "numa_node": _numa_node(own, system or SYSTEM),
        "peers": _peers(library, handle, own),
    }


def _bus_id(library: Any, handle: Any) -> str | None:
    """As Linux writes it: ``0000:18:00.0``; NVML's domain has eight digits."""
    said = text(optional(lambda: library.nvmlDeviceGetPciInfo(handle).busId))
    if said is None:
        return None
    domain, _, rest = said.lower().partition(":")
    return f"{domain[-4:]}:{rest}"


def _pcie(library: Any, handle: Any) -> str | None:
    """The generation that card and slot can do, as an idle link is slower, and the lanes that are in use."""
    generation = optional(lambda: library.nvmlDeviceGetMaxPcieLinkGeneration(handle))
    lanes = optional(lambda: library.nvmlDeviceGetCurrPcieLinkWidth(handle))
    return None if generation is None or lanes is None else f"gen {generation} x{lanes}"


def _numa_node(bus_id: str | None, system: Path) -> int | None:
    node = optional(lambda: int((system / str(bus_id) / "numa_node").read_text(encoding="ascii")))
    return node if node is not None and node >= 0 else None  # -1: the firmware does not say


def _peers(library: Any, handle: Any, own: str | None) -> dict[str, str]:
    found = {}
    for index in range(optional(library.nvmlDeviceGetCount) or 0):
        other = optional(partial(library.nvmlDeviceGetHandleByIndex, index))
        name = None if other is None else _bus_id(library, other)
        link = None if name in (None, own) else _between(library, handle, other)
        if name is not None and link is not None:
            found[name] = link
    return found


def _between(library: Any, one: Any, other: Any) -> str | None:
    status = optional(lambda: library.nvmlDeviceGetP2PStatus(one, other, library.NVML_P2P_CAPS_INDEX_NVLINK))
    if status is not None and status == getattr(library, "NVML_P2P_STATUS_OK", 0):
        return NVLINK
    return MEETING.get(optional(lambda: library.nvmlDeviceGetTopologyCommonAncestor(one, other)))
