"""Telemetry never stops a run: what NVML refuses is None; a drop of power or clock is flagged."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from flashbench._profilers import energy, gpm, telemetry
from flashbench._profilers.clocks import Clocks
from flashbench._profilers.telemetry import sampling, slowed, summary

CALLS = (
    "nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetEnforcedPowerLimit",
    "nvmlDeviceGetPersistenceMode", "nvmlDeviceGetMaxClockInfo",
)  # fmt: skip
"""Every function of NVML that is called with a handle."""


class FakeNvml:
    """A card at 1980 MHz and 300 W; ``sm_mhz(n)`` is the SM clock at the n-th question."""

    NVML_CLOCK_SM, NVML_CLOCK_MEM, NVML_TEMPERATURE_GPU = 1, 2, 0

    def __init__(
        self, sm_mhz: Callable[[int], int] = lambda n: 1980, reasons: int = 0, refuses: str = ""
    ) -> None:
        self.sm_mhz, self.reasons, self.refuses = sm_mhz, reasons, refuses
        self.asked = 0
        self.joules = 0.0

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in CALLS:
            raise AttributeError(name)
        if name == self.refuses:
            return self._refuse
        return getattr(self, f"_{name}")

    def _refuse(self, *_: object) -> None:
        raise RuntimeError("Not Supported")

    def _nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        if kind == self.NVML_CLOCK_MEM:
            return 2619
        self.asked += 1
        return self.sm_mhz(self.asked - 1)

    def _nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 300_000

    def _nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        return 55

    def _nvmlDeviceGetCurrentClocksEventReasons(self, handle: str) -> int:
        return self.reasons

    def _nvmlDeviceGetTotalEnergyConsumption(self, handle: str) -> int:
        self.joules += 10.0
        return int(self.joules * 1000)

    def _nvmlDeviceGetComputeRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=os.getpid(), usedGpuMemory=5), SimpleNamespace(pid=1, usedGpuMemory=7)]

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def _nvmlDeviceGetPersistenceMode(self, handle: str) -> int:
        return 1

    def _nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980


def watch(nvml: FakeNvml, seconds: float = 0.05) -> dict[str, Any]:
    with sampling(Clocks(nvml, "handle"), 0.002) as readings:
        time.sleep(seconds)
    return summary(readings, 0.002)


def test_a_steady_card_is_described_and_not_flagged() -> None:
    found = watch(FakeNvml())
    assert found["readings"] >= 3
    assert found["sm_clock_mhz"] == dict.fromkeys(("first", "last", "min", "median", "max"), 1980)
    assert found["memory_clock_mhz"]["median"] == 2619
    assert found["power_w"]["max"] == 300.0
    assert found["temperature_c"] == 55
    assert found["throttle"] == {}
    assert not slowed(found)


@pytest.mark.parametrize(
    "nvml",
    [
        FakeNvml(sm_mhz=lambda n: 1980 if n < 2 else 1500),  # the clock falls, no reason is given
        FakeNvml(reasons=0x4),  # power cap
        FakeNvml(reasons=0x20),  # thermal cap
    ],
    ids=["clock", "power", "heat"],
)
def test_a_card_that_is_held_back_during_the_samples_is_flagged(nvml: FakeNvml) -> None:
    assert slowed(watch(nvml))


def test_a_clock_that_rises_or_wavers_a_little_is_not_flagged() -> None:
    assert not slowed(watch(FakeNvml(sm_mhz=lambda n: 1200 if n < 2 else 1980)))
    assert not slowed(watch(FakeNvml(sm_mhz=lambda n: 1980 - 60 * (n % 3))))


def test_the_share_of_readings_in_which_a_cap_was_active_is_told() -> None:
    readings = [{"throttle": ["power cap"]}, {"throttle": []}, {"throttle": None}, {"throttle": []}]
    assert summary(readings)["throttle"] == {"power cap": 1 / 3}


@pytest.mark.parametrize("refuses", CALLS)
def test_each_refusal_leaves_its_field_empty_and_the_rest_stands(refuses: str) -> None:
    clocks = Clocks(FakeNvml(refuses=refuses), "handle")
    everything = {**clocks.read(), **clocks.facts(), **clocks.others(), "energy_j": clocks.energy_j()}
    empty = {name for name, value in everything.items() if value is None}
    fields = {
        "nvmlDeviceGetClockInfo": {"sm_clock_mhz", "memory_clock_mhz"},
        "nvmlDeviceGetPowerUsage": {"power_w"},
        "nvmlDeviceGetTemperature": {"temperature_c"},
        "nvmlDeviceGetCurrentClocksEventReasons": {"throttle"},
        "nvmlDeviceGetTotalEnergyConsumption": {"energy_j"},
        "nvmlDeviceGetComputeRunningProcesses": {"other_processes", "other_bytes"},
        "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
        "nvmlDeviceGetPersistenceMode": {"persistence"},
        "nvmlDeviceGetMaxClockInfo": {"max_sm_clock_mhz"},
    }
    assert empty == fields[refuses]
    assert not slowed(watch(FakeNvml(refuses=refuses), 0.01))


def test_a_driver_that_goes_away_ends_the_telemetry_only() -> None:
    class Gone:
        def read(self) -> dict[str, Any]:
            raise OSError("driver gone")

    with sampling(Gone(), 0.001) as readings:  # type: ignore[arg-type]
        time.sleep(0.01)
    assert readings == []
    assert summary(readings) == {}
    assert not slowed({})


def test_the_thread_ends_with_the_block_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), sampling(Clocks(FakeNvml(), "handle"), 0.001):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name == "flashbench-telemetry"]


def test_without_clocks_nothing_is_read() -> None:
    with sampling(None) as readings:
        pass
    assert summary(readings) == {}


def test_others_on_the_card_are_counted_without_this_process() -> None:
    assert Clocks(FakeNvml(), "h").others() == {"other_processes": 1, "other_bytes": 7}
    in_container = FakeNvml()
    in_container._nvmlDeviceGetComputeRunningProcesses = lambda handle: []  # type: ignore[method-assign]
    assert Clocks(in_container, "h").others() == {"other_processes": None, "other_bytes": None}
    silent = FakeNvml()
    silent._nvmlDeviceGetComputeRunningProcesses = lambda handle: [  # type: ignore[method-assign]
        SimpleNamespace(pid=os.getpid(), usedGpuMemory=None), SimpleNamespace(pid=2, usedGpuMemory=None)
    ]  # fmt: skip
    assert Clocks(silent, "h").others() == {"other_processes": 1, "other_bytes": None}


def test_energy_is_the_counter_and_else_the_power_and_else_a_reason() -> None:
    powers = [{"power_w": 200.0}, {"power_w": 400.0}, {"power_w": None}]
    counted = energy.settle(100.0, 700.0, powers, seconds=2.0, calls=60)
    assert (counted["joules_per_call"], counted["watts"], counted["method"]) == (10.0, 300.0, "counter")
    for before, after in ((None, 5.0), (5.0, None), (5.0, 5.0)):
        assert energy.settle(before, after, powers, seconds=2.0, calls=60) == counted | {"method": "power"}
    assert "neither" in energy.settle(None, None, [{"power_w": None}], 2.0, 60)["reason"]
    asked = energy.measure_energy(lambda: None, device="cpu", clocks=None, call_s=1.0)
    assert "NVML" in asked["reason"]


def test_the_interval_is_no_shorter_than_the_counters_are_renewed() -> None:
    assert telemetry.INTERVAL_S >= 0.02


class FakeGpm:
    """NVML's GPM calls; each may refuse."""

    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, refuses: str = "", supported: int = 1) -> None:
        self.refuses, self.supported, self.freed = refuses, supported, 0

    def _may(self, name: str) -> None:
        if name == self.refuses:
            raise RuntimeError("Not Supported")

    def nvmlGpmQueryDeviceSupport(self, handle: str) -> SimpleNamespace:
        self._may("nvmlGpmQueryDeviceSupport")
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self) -> object:
        self._may("nvmlGpmSampleAlloc")
        return object()

    def nvmlGpmSampleGet(self, handle: str, sample: object) -> None:
        self._may("nvmlGpmSampleGet")

    def nvmlGpmSampleFree(self, sample: object) -> None:
        self.freed += 1

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        metric = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]
        return SimpleNamespace(metrics=metric)

    def nvmlGpmMetricsGet(self, asked: SimpleNamespace) -> None:
        self._may("nvmlGpmMetricsGet")
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = 10.0 * metric.metricId
            metric.nvmlReturn = 3 if metric.metricId == 3 else 0


def use(nvml: FakeGpm) -> dict[str, Any]:
    return gpm.measure(lambda: None, lambda: None, Clocks(nvml, "handle"), min_s=0.01)


def test_gpm_gives_shares_and_none_for_what_is_refused() -> None:
    nvml = FakeGpm()
    assert use(nvml) == {
        "sm_utilisation": 0.2, "occupancy": None, "tensor_utilisation": 0.5, "dram_utilisation": 1.0
    }  # fmt: skip
    assert nvml.freed == 2


@pytest.mark.parametrize(
    "refuses",
    ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"],
)
def test_a_gpu_without_gpm_says_so(refuses: str) -> None:
    nvml = FakeGpm(refuses)
    assert use(nvml) == {"reason": "GPM: RuntimeError: Not Supported"}
    assert nvml.freed == (2 if refuses in ("nvmlGpmSampleGet", "nvmlGpmMetricsGet") else 0)
    assert "Hopper" in use(FakeGpm(supported=0))["reason"]
    assert "NVML" in gpm.measure(lambda: None, lambda: None, None)["reason"]
    assert "reason" in use(FakeNvml())  # type: ignore[arg-type]  # bindings that know no GPM


@pytest.mark.gpu
def test_a_product_keeps_the_tensor_cores_of_a_hopper_busy() -> None:
    import torch

    from flashbench import profilers

    if torch.cuda.get_device_capability() < (9, 0):
        pytest.skip("GPM begins with Hopper")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    found = gpm.measure(lambda: a @ a, torch.cuda.synchronize, profilers.open_clocks("cuda:0"))
    assert "reason" not in found, found
    assert 0.3 < found["tensor_utilisation"] <= 1
