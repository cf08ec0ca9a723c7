"""Clocks, power, temperature, cap reasons and neighbours of a GPU, read through NVML; all is optional."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import cache, partial
from typing import Any

log = logging.getLogger("flashbench")

THROTTLE_REASONS = {
    0x0000000000000004: "power cap",
    0x0000000000000008: "hardware slowdown",
    0x0000000000000020: "thermal cap",
    0x0000000000000040: "hardware thermal slowdown",
    0x0000000000000080: "power brake",
}
"""Bits of nvmlDeviceGetCurrentClocksEventReasons that mean the GPU was held back.

Source: nvml.h, nvmlClocksEventReason*; idle, application clocks, sync boost and display are no caps.
"""


_DRIVER = "see whether 'nvidia-smi' works: if driver and library do not match, reboot or reinstall the driver"
_CARD = "see that 'nvidia-smi -L' lists it (CUDA_VISIBLE_DEVICES, a container started without that card)"


class Clocks:
    """One GPU's telemetry. Its methods never raise: what NVML refuses is None.

    A MIG slice's handle refuses most questions; those are asked of its card.
    nvml: pynvml. handle: of the card or slice. card: of the slice's card, None unless it is a slice.
    """

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml = nvml
        self.handle = handle
        self.card = _card_of(nvml, handle)

    def read(self) -> dict[str, Any]:
        """sm_clock_mhz, memory_clock_mhz, power_w, temperature_c and throttle (names of the active caps)."""
        nvml = self.nvml
        power = self._ask(lambda handle: nvml.nvmlDeviceGetPowerUsage(handle))  # mW
        reasons = self._reasons()
        return {
            "sm_clock_mhz": self._ask(lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": self._ask(lambda h: nvml.nvmlDeviceGetClockInfo(h, nvml.NVML_CLOCK_MEM)),
            "power_w": power / 1000 if power is not None else None,
            "temperature_c": self._ask(lambda h: nvml.nvmlDeviceGetTemperature(h, nvml.NVML_TEMPERATURE_GPU)),
            "throttle": None
            if reasons is None
            else [name for bit, name in THROTTLE_REASONS.items() if reasons & bit],
        }

    def _reasons(self) -> int | None:
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            query = getattr(self.nvml, name, None)
            if query is not None:
                value = self._ask(query)
                return None if value is None else int(value)
        return None

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded, the whole board's also on a MIG slice; None before Volta."""
        spent = self._ask(lambda handle: self.nvml.nvmlDeviceGetTotalEnergyConsumption(handle))  # mJ
        return spent / 1000 if spent is not None else None

    def others(self) -> dict[str, Any]:
        """other_processes and other_bytes: who else holds memory on the card, or on the slice.

        None where NVML is silent. In a container NVML may not tell this process from others: then both
        are None, not 0.
        """
        sizes: dict[int, int | None] = {}  # by pid: a process that also draws is on both lists
        for kind in ("Compute", "Graphics"):
            query = getattr(self.nvml, f"nvmlDeviceGet{kind}RunningProcesses", None)
            running = optional(partial(query, self.handle)) if query else None
            if running is None:
                return {"other_processes": None, "other_bytes": None}
            sizes |= {entry.pid: getattr(entry, "usedGpuMemory", None) for entry in running}
        if os.getpid() not in sizes:
            return {"other_processes": None, "other_bytes": None}
        del sizes[os.getpid()]
        known = [size for size in sizes.values() if size is not None]
        return {
            "other_processes": len(sizes),
            "other_bytes": sum(known) if len(known) == len(sizes) else None,
        }

    def facts(self) -> dict[str, Any]:
        """power_limit_w, persistence (bool), max_sm_clock_mhz: what does not change during a sweep."""
        nvml = self.nvml
        limit = self._ask(lambda handle: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))  # mW
        persistence = self._ask(lambda handle: nvml.nvmlDeviceGetPersistenceMode(handle))
        return {
            "power_limit_w": limit / 1000 if limit is not None else None,
            "persistence": bool(persistence) if persistence is not None else None,
            "max_sm_clock_mhz": self._ask(lambda h: nvml.nvmlDeviceGetMaxClockInfo(h, nvml.NVML_CLOCK_SM)),
        }

    def _ask(self, query: Callable[[Any], Any]) -> Any:
        value = optional(partial(query, self.handle))
        if value is None and self.card is not None:
            value = optional(partial(query, self.card))
        return value


def _card_of(nvml: Any, handle: Any) -> Any:
    """The handle of a MIG slice's card; None for a whole card."""
    slice_ = optional(lambda: nvml.nvmlDeviceIsMigDeviceHandle(handle))
    if not getattr(slice_, "value", slice_):  # the bindings answer with a c_uint
        return None
    return optional(lambda: nvml.nvmlDeviceGetDeviceHandleFromMigDeviceHandle(handle))


def optional(query: Callable[[], Any]) -> Any:
    """What the query answers, or None where NVML (or this version of its bindings) refuses."""
    try:
        return query()
    except Exception:
        return None


def text(value: Any) -> str | None:
    """A string from NVML, whose bindings return bytes or str by version."""
    if value is None:
        return None
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


@cache
def nvml() -> Any:
    """The initialised pynvml module, or None with one warning where it does not work."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception as error:
        log.warning("no clocks, power or throttle reasons: NVML does not answer (%s); %s", error, _DRIVER)
        return None
    return pynvml


def open_clocks(device: str, library: Any = None) -> Clocks | None:
    """The telemetry of a torch device such as ``cuda:0``, or None.

    CUDA_VISIBLE_DEVICES renumbers torch's devices and not NVML's, so the GPU is found by its UUID
    or, on a torch that does not tell it, by its PCI bus id.
    """
    if not device.startswith("cuda"):
        return None
    library = library if library is not None else nvml()
    if library is None:
        return None
    import torch

    handle = find_handle(library, torch.cuda.get_device_properties(device))
    if handle is None:
        log.warning("no clocks, power or throttle reasons: NVML does not know %s; %s", device, _CARD)
        return None
    return Clocks(library, handle)


def find_handle(library: Any, properties: Any) -> Any:
    """NVML's handle for torch's device properties, or None."""
    by_uuid = getattr(library, "nvmlDeviceGetHandleByUUID", None)
    uuid = getattr(properties, "uuid", None)
    if by_uuid is not None and uuid is not None:
        name = str(uuid)
        known = name.startswith(("GPU-", "MIG-"))
        full = (name,) if known else (f"GPU-{name}", f"MIG-{name}")
        for key in (form for text in full for form in (text, text.encode())):
            handle = optional(partial(by_uuid, key))
            if handle is not None:
                return handle
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return None
    domain, slot = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
    address = f"{domain:08X}:{bus:02X}:{slot:02X}.0"
    return optional(lambda: library.nvmlDeviceGetHandleByPciBusId_v2(address.encode()))
