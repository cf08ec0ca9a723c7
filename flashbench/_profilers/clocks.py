"""SM clock, power, temperature and cap reasons of a GPU, read through NVML. Everything is optional."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
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


class Clocks:
    """One GPU's telemetry. ``read`` never raises: a field that NVML refuses is None."""

    def __init__(self, nvml: Any, handle: Any) -> None:
        self.nvml = nvml
        self.handle = handle

    def read(self) -> dict[str, Any]:
        """sm_clock_mhz, memory_clock_mhz, power_w, temperature_c and throttle (names of the active caps)."""
        nvml, handle = self.nvml, self.handle
        power = optional(lambda: nvml.nvmlDeviceGetPowerUsage(handle))  # mW
        reasons = self._reasons()
        return {
            "sm_clock_mhz": optional(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)),
            "memory_clock_mhz": optional(lambda: nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_MEM)),
            "power_w": power / 1000 if power is not None else None,
            "temperature_c": optional(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            "throttle": None
            if reasons is None
            else [name for bit, name in THROTTLE_REASONS.items() if reasons & bit],
        }

    def _reasons(self) -> int | None:
        for name in ("nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetCurrentClocksThrottleReasons"):
            query = getattr(self.nvml, name, None)
            if query is not None:
                value = optional(partial(query, self.handle))
                return None if value is None else int(value)
        return None

    def energy_j(self) -> float | None:
        """Joules since the driver was loaded, the whole board's; None before Volta and in MIG slices."""
        spent = optional(lambda: self.nvml.nvmlDeviceGetTotalEnergyConsumption(self.handle))  # mJ
        return spent / 1000 if spent is not None else None

    def others(self) -> dict[str, Any]:
        """other_processes and other_bytes: who else holds memory on the card; None where NVML is silent.

        In a container NVML may not tell this process from others: then both are None, not 0.
        """
        running = optional(lambda: self.nvml.nvmlDeviceGetComputeRunningProcesses(self.handle))
        if running is None or all(entry.pid != os.getpid() for entry in running):
            return {"other_processes": None, "other_bytes": None}
        others = [entry for entry in running if entry.pid != os.getpid()]
        sizes = [getattr(entry, "usedGpuMemory", None) for entry in others]
        return {
            "other_processes": len(others),
            "other_bytes": None if None in sizes else sum(size for size in sizes if size is not None),
        }

    def facts(self) -> dict[str, Any]:
        """power_limit_w, persistence (bool), max_sm_clock_mhz: what does not change during a sweep."""
        nvml, handle = self.nvml, self.handle
        limit = optional(lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle))  # mW
        persistence = optional(lambda: nvml.nvmlDeviceGetPersistenceMode(handle))
        return {
            "power_limit_w": limit / 1000 if limit is not None else None,
            "persistence": bool(persistence) if persistence is not None else None,
            "max_sm_clock_mhz": optional(lambda: nvml.nvmlDeviceGetMaxClockInfo(handle, nvml.NVML_CLOCK_SM)),
        }


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
        log.warning("no clocks, power or throttle reasons: NVML does not answer (%s)", error)
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
        log.warning("no clocks, power or throttle reasons: NVML does not know %s", device)
        return None
    return Clocks(library, handle)


def find_handle(library: Any, properties: Any) -> Any:
    """NVML's handle for torch's device properties, or None."""
    uuid = getattr(properties, "uuid", None)
    if uuid is not None:
        name = str(uuid)
        known = name.startswith(("GPU-", "MIG-"))
        full = (name,) if known else (f"GPU-{name}", f"MIG-{name}")
        for key in (form for text in full for form in (text, text.encode())):
            handle = optional(partial(library.nvmlDeviceGetHandleByUUID, key))
            if handle is not None:
                return handle
    bus = getattr(properties, "pci_bus_id", None)
    if bus is None:
        return None
    domain, slot = getattr(properties, "pci_domain_id", 0), getattr(properties, "pci_device_id", 0)
    address = f"{domain:08X}:{bus:02X}:{slot:02X}.0"
    return optional(lambda: library.nvmlDeviceGetHandleByPciBusId_v2(address.encode()))


def throttled(*readings: Mapping[str, Any]) -> bool:
    """True if any reading names a cap reason."""
    return any(reading.get("throttle") for reading in readings)
