"""Utilisation of a Hopper or later GPU without the counters' permission: NVML's GPM metrics.

They are shares over the time between two samples, so the call is repeated for MIN_S. They tell how
busy DRAM and the tensor cores were, not how many bytes a kernel moved. Source: nvml.h, nvmlGpmMetricId_t.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from flashbench._profilers.clocks import Clocks, optional
from flashbench._profilers.load import Load

MIN_S = 0.3
"""Seconds between the samples, at least: GPM renews its values about ten times a second."""

NEEDS = (
    "it needs an NVIDIA GPU from Hopper on, not a virtual one, and a driver from 520 on; else use --counters"
)
"""What helps where GPM is refused."""

METRICS = {"sm_utilisation": 2, "occupancy": 3, "tensor_utilisation": 5, "dram_utilisation": 10}
"""Name here, and the number of NVML's metric."""


def measure(
    call: Callable[[], object], wait: Callable[[], object], clocks: Clocks | None, min_s: float = MIN_S
) -> dict[str, Any]:
    """Shares (0 to 1) while the call is repeated, None for one that is refused; or ``{"reason": …}``.

    call: has run before; it is repeated in batches, so that the device does not wait for the host after
    each. wait: waits for the device, such as ``torch.cuda.synchronize``. On a MIG slice they are the
    slice's shares. Never raises.
    """
    if clocks is None:
        return {"reason": f"GPM: NVML does not answer for this GPU; {NEEDS}"}
    nvml = clocks.nvml
    samples: list[Any] = []
    try:
        card = clocks.handle if clocks.card is None else clocks.card
        if not nvml.nvmlGpmQueryDeviceSupport(card).isSupportedDevice:
            return {"reason": f"this GPU has no GPM metrics; {NEEDS}"}
        samples.append(nvml.nvmlGpmSampleAlloc())
        samples.append(nvml.nvmlGpmSampleAlloc())
        sample = _sampler(clocks)
        load = Load(call, wait)
        load.run()
        sample(samples[0])
        load.run_for(min_s)
        sample(samples[1])
        return _read(nvml, samples)
    except Exception as error:  # a driver or bindings without GPM, no permission
        said = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
        return {"reason": f"GPM: {said}; {NEEDS}"}
    finally:
        for taken in samples:
            optional(partial(nvml.nvmlGpmSampleFree, taken))


def _sampler(clocks: Clocks) -> Callable[[Any], object]:
    """What fills a sample: of the card, or of the slice by its number on the card."""
    nvml = clocks.nvml
    if clocks.card is None:
        return partial(nvml.nvmlGpmSampleGet, clocks.handle)
    return partial(nvml.nvmlGpmMigSampleGet, clocks.card, nvml.nvmlDeviceGetGpuInstanceId(clocks.handle))


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
