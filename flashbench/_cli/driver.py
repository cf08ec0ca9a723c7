"""What the NVIDIA driver says through NVML, without torch. Every field is None where it refuses."""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One GPU. Clocks in MHz; processes: pids of the other compute processes; caps: what holds it back."""

    index: int
    name: str | None
    persistence: bool | None
    clock_mhz: int | None
    max_clock_mhz: int | None
    processes: tuple[int, ...] | None
    mig: bool | None
    caps: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Driver:
    """The driver and its GPUs; ``why_none`` says why there are none."""

    version: str | None = None
    gpus: tuple[Gpu, ...] = ()
    why_none: str = ""


def look(library: Any = None) -> Driver:
    """Ask NVML (``library`` stands in for pynvml). Never raises: what fails is a reason or a None."""
    from flashbench._profilers.clocks import optional, text

    try:
        nvml = library if library is not None else importlib.import_module("pynvml")
        nvml.nvmlInit()
    except ImportError as error:
        return Driver(why_none=f"nvidia-ml-py cannot be imported ({error})")
    except Exception as error:
        return Driver(why_none=f"no NVIDIA driver answers ({error})")
    version = text(optional(nvml.nvmlSystemGetDriverVersion))
    count = optional(nvml.nvmlDeviceGetCount) or 0
    gpus = tuple(gpu for index in range(count) if (gpu := _gpu(nvml, index)) is not None)
    return Driver(version=version, gpus=gpus, why_none="" if gpus else "the driver reports no GPU")


def _gpu(nvml: Any, index: int) -> Gpu | None:
    from flashbench._profilers.clocks import Clocks, optional, text

    handle = optional(lambda: nvml.nvmlDeviceGetHandleByIndex(index))
    if handle is None:
        return None

    def ask(query: Callable[..., Any], *more: Any) -> Any:
        return optional(lambda: query(handle, *more))

    now, fixed = Clocks(nvml, handle).read(), Clocks(nvml, handle).facts()
    processes = ask(nvml.nvmlDeviceGetComputeRunningProcesses)
    mig = ask(nvml.nvmlDeviceGetMigMode)
    return Gpu(
        index=index,
        name=text(ask(nvml.nvmlDeviceGetName)),
        persistence=fixed["persistence"],
        clock_mhz=now["sm_clock_mhz"],
        max_clock_mhz=fixed["max_sm_clock_mhz"],
        processes=None if processes is None else tuple(int(p.pid) for p in processes if p.pid != os.getpid()),
        mig=None if mig is None else bool(mig[0]),
        caps=tuple(now["throttle"] or ()),
    )


@dataclass(frozen=True, kw_only=True)
class Card:
    """What the driver says of one card or MIG slice; None where it refuses. memory_bytes: in all."""

    name: str
    uuid: str | None
    num_sms: int | None
    memory_bytes: int | None


def card(library: Any = None) -> Card | None:
    """The first card that the driver shows, or its first MIG slice where it is cut up. Never raises."""
    from flashbench._profilers.clocks import optional, text

    try:
        nvml = library if library is not None else importlib.import_module("pynvml")
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByIndex(0)
    except Exception:
        return None
    mode = optional(lambda: nvml.nvmlDeviceGetMigMode(handle))
    slice_ = _first_slice(nvml, handle) if mode is not None and mode[0] else None
    chosen = handle if slice_ is None else slice_
    name = text(optional(lambda: nvml.nvmlDeviceGetName(chosen)))
    if not name:
        return None
    memory = optional(lambda: nvml.nvmlDeviceGetMemoryInfo(chosen).total)
    sms = (
        _num_sms(nvml, handle)
        if slice_ is None
        else optional(lambda: nvml.nvmlDeviceGetAttributes(slice_).multiprocessorCount)
    )
    return Card(
        name=name,
        uuid=text(optional(lambda: nvml.nvmlDeviceGetUUID(chosen))),
        num_sms=None if sms is None else int(sms),
        memory_bytes=None if memory is None else int(memory),
    )


def _first_slice(nvml: Any, handle: Any) -> Any:
    from flashbench._profilers.clocks import optional

    count = optional(lambda: nvml.nvmlDeviceGetMaxMigDeviceCount(handle)) or 0
    for index in range(count):
        found = optional(lambda: nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index))  # noqa: B023
        if found is not None:
            return found
    return None


def _num_sms(nvml: Any, handle: Any) -> int | None:
    """fp32 cores over those of one SM: 64 on Volta, Turing, GA100, else 128 (CUDA programming guide)."""
    from flashbench._profilers.clocks import optional

    cores = optional(lambda: nvml.nvmlDeviceGetNumGpuCores(handle))
    capability = optional(lambda: tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle)))
    if not cores or capability is None:
        return None
    return int(cores) // (64 if capability in ((7, 0), (7, 2), (7, 5), (8, 0)) else 128)
