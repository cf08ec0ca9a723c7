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
