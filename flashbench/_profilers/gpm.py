"""Utilisation of a Hopper or later GPU without the counters' permission: NVML's GPM metrics.

They are shares over the time between two samples, so the call is repeated for MIN_S. They tell how
busy DRAM and the tensor cores were, not how many bytes a kernel moved. Source: nvml.h, nvmlGpmMetricId_t.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from flashbench._profilers.clocks import Clocks

MIN_S = 0.3
"""Seconds between the samples, at least: GPM renews its values about ten times a second."""

METRICS = {"sm_utilisation": 2, "occupancy": 3, "tensor_utilisation": 5, "dram_utilisation": 10}
"""Name here, and the number of NVML's metric."""


def measure(
    call: Callable[[], object], wait: Callable[[], object], clocks: Clocks | None, min_s: float = MIN_S
) -> dict[str, Any]:
    """Shares (0 to 1) while the call is repeated, None for one that is refused; or ``{"reason": …}``.

    wait: waits for the device, such as ``torch.cuda.synchronize``. Never raises for what NVML does.
    """
    if clocks is None:
        return {"reason": "GPM needs a GPU that NVML can read"}
    nvml, handle = clocks.nvml, clocks.handle
    samples: list[Any] = []
    try:
        if not nvml.nvmlGpmQueryDeviceSupport(handle).isSupportedDevice:
            return {"reason": "this GPU has no GPM metrics; Hopper and later do"}
        samples.append(nvml.nvmlGpmSampleAlloc())
        samples.append(nvml.nvmlGpmSampleAlloc())
        nvml.nvmlGpmSampleGet(handle, samples[0])
        start = time.perf_counter()
        while time.perf_counter() - start < min_s:
            call()
            wait()
        nvml.nvmlGpmSampleGet(handle, samples[1])
        return _read(nvml, samples)
    except Exception as error:  # a driver or bindings without GPM, a MIG slice, no permission
        return {"reason": f"GPM: {type(error).__name__}: {' '.join(str(error).split())[:200]}"}
    finally:
        for sample in samples:
            nvml.nvmlGpmSampleFree(sample)


def _read(nvml: Any, samples: list[Any]) -> dict[str, Any]:
    asked = nvml.c_nvmlGpmMetricsGet_t()
    asked.version = nvml.NVML_GPM_METRICS_GET_VERSION
    asked.numMetrics = len(METRICS)
    asked.sample1, asked.sample2 = samples
    for index, number in enumerate(METRICS.values()):
        asked.metrics[index].metricId = number
    nvml.nvmlGpmMetricsGet(asked)
    return {
        name: asked.metrics[index].value / 100 if asked.metrics[index].nvmlReturn == 0 else None
        for index, name in enumerate(METRICS)
    }
