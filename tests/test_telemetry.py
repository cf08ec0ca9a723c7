"""Telemetry never stops a run: what NVML refuses is None; a drop of power or clock is flagged."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from ctypes import c_uint
from types import SimpleNamespace
from typing import Any

import pytest

from flashbench import profilers
from flashbench._profilers import energy, gpm, load, telemetry, timers
from flashbench._profilers.clocks import Clocks
from flashbench._profilers.telemetry import sampling, summary, throttled_by

CALLS = (
    "nvmlDeviceGetClockInfo", "nvmlDeviceGetPowerUsage", "nvmlDeviceGetTemperature",
    "nvmlDeviceGetCurrentClocksEventReasons", "nvmlDeviceGetTotalEnergyConsumption",
    "nvmlDeviceGetComputeRunningProcesses", "nvmlDeviceGetGraphicsRunningProcesses",
    "nvmlDeviceGetEnforcedPowerLimit", "nvmlDeviceGetPersistenceMode", "nvmlDeviceGetMaxClockInfo",
    "nvmlDeviceIsMigDeviceHandle", "nvmlDeviceGetDeviceHandleFromMigDeviceHandle",
)  # fmt: skip
"""Every function of NVML that is called with a handle."""
SLICE = "slice"
SLICE_TELLS = {name for name in CALLS if "Mig" in name or name.endswith("RunningProcesses")}
"""What the handle of a MIG slice does not refuse."""


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

        def query(handle: str, *arguments: object) -> Any:
            if name == self.refuses or (handle == SLICE and name not in SLICE_TELLS):
                raise RuntimeError("Not Supported")
            return getattr(self, f"_{name}")(handle, *arguments)

        return query

    def _nvmlDeviceIsMigDeviceHandle(self, handle: str) -> c_uint:
        return c_uint(handle == SLICE)

    def _nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return "its card"

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

    def _nvmlDeviceGetGraphicsRunningProcesses(self, handle: str) -> list[SimpleNamespace]:
        return []

    def _nvmlDeviceGetEnforcedPowerLimit(self, handle: str) -> int:
        return 700_000

    def _nvmlDeviceGetPersistenceMode(self, handle: str) -> int:
        return 1

    def _nvmlDeviceGetMaxClockInfo(self, handle: str, kind: int) -> int:
        return 1980


def watch(nvml: FakeNvml, least: int = 8) -> dict[str, Any]:
    """What is read until there are so many readings: a thread may wait long for a busy processor."""
    with sampling(Clocks(nvml, "handle"), 0.002) as readings:
        deadline = time.monotonic() + 30
        while len(readings) < least and time.monotonic() < deadline:
            time.sleep(0.005)
    return summary(readings, 0.002)


def test_a_steady_card_is_described_and_not_flagged() -> None:
    found = watch(FakeNvml())
    assert found["readings"] >= 3
    assert found["sm_clock_mhz"] == dict.fromkeys(("first", "last", "min", "median", "max"), 1980)
    assert found["memory_clock_mhz"]["median"] == 2619
    assert found["power_w"]["max"] == 300.0
    assert found["temperature_c"] == 55
    assert found["throttle"] == {}
    assert throttled_by({}, found, {}) == []


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
    assert throttled_by({}, watch(nvml), {})


def test_a_clock_that_rises_or_wavers_a_little_is_not_flagged() -> None:
    assert not throttled_by({}, watch(FakeNvml(sm_mhz=lambda n: 1200 if n < 2 else 1980)), {})
    assert not throttled_by({}, watch(FakeNvml(sm_mhz=lambda n: 1980 - 60 * (n % 3))), {})


@pytest.mark.parametrize(("last", "flagged"), [(899, True), (900, False), (1500, False)])
def test_a_clock_may_end_a_tenth_below_its_start(last: int, flagged: bool) -> None:
    during = summary([{"sm_clock_mhz": clock} for clock in (1000, 500, last)])
    assert bool(throttled_by({}, during, {})) is flagged


def test_each_reason_is_told_in_words() -> None:
    readings = [{"throttle": [], "sm_clock_mhz": 1980}, {"throttle": ["power brake"], "sm_clock_mhz": 1200}]
    before, after = {"throttle": ["thermal cap"]}, {"throttle": ["power cap"]}
    assert throttled_by(before, summary(readings), after) == [
        "thermal cap before the samples",
        "power brake in 50% of 2 readings",
        "power cap at the last samples",
        "the SM clock fell from 1980 to 1200 MHz",
    ]
    assert throttled_by({}, {}, {}) == []


def read_more(nvml: FakeNvml, more: int) -> None:
    """Wait until the thread has read the clock so many times more, if it reads at all."""
    before, deadline = nvml.asked, time.monotonic() + 30
    alive = any(thread.name == "flashbench-telemetry" for thread in threading.enumerate())
    while alive and nvml.asked < before + more and time.monotonic() < deadline:
        time.sleep(0.005)


def timed(monkeypatch: pytest.MonkeyPatch, nvml: FakeNvml, **meanwhile: Any) -> profilers.Timing:
    """A timing with made-up events; while they are taken the card is in another state, unless it stays."""

    def events(call: object, flush: object, count: int, last: Callable[[], None] = lambda: None) -> Any:
        if count > 3:
            read_more(nvml, 2)
            usual = {name: getattr(nvml, name) for name in meanwhile}
            vars(nvml).update(meanwhile)
            read_more(nvml, 2)
            vars(nvml).update({name: value for name, value in usual.items() if name == "reasons"})
            last()
        return [1e-3] * count, 0

    monkeypatch.setattr(timers, "_timed", events)
    monkeypatch.setattr(timers.EventTimer, "host_s", lambda *_: 0.0)
    monkeypatch.setattr("torch.cuda.device", lambda _: nullcontext())
    monkeypatch.setattr(timers, "flush_seconds", lambda *_: 0.0)
    monkeypatch.setattr(timers, "ahead", lambda *_: (0.0, 0.0))
    monkeypatch.setattr(timers.Pause, "__call__", lambda _: None)
    return profilers.measure_time(lambda: None, device="cuda:0", cache="hot", clocks=Clocks(nvml, "card"))


def test_a_run_that_is_not_disturbed_is_not_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = timed(monkeypatch, FakeNvml())
    assert timing.flags == ()
    assert set(timing.clocks) == {"before", "during", "after", "host_s"}
    assert timing.clocks["before"]["other_bytes"] == timing.clocks["after"]["other_bytes"] == 7
    json.dumps(timing.clocks, allow_nan=False)


def test_a_run_under_a_cap_that_only_the_thread_sees_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = timed(monkeypatch, FakeNvml(), reasons=0x4)
    assert timing.clocks["before"]["throttle"] == timing.clocks["after"]["throttle"] == []
    assert timing.flags == ("throttled",)
    assert timing.clocks["throttled_by"][0].startswith("power cap in ")


def test_a_run_whose_clock_drops_without_a_cap_is_flagged(monkeypatch: pytest.MonkeyPatch) -> None:
    timing = timed(monkeypatch, FakeNvml(), sm_mhz=lambda n: 1200)
    assert timing.flags == ("throttled",)
    assert timing.clocks["throttled_by"] == ["the SM clock fell from 1980 to 1200 MHz"]


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
        "nvmlDeviceGetGraphicsRunningProcesses": {"other_processes", "other_bytes"},
        "nvmlDeviceGetEnforcedPowerLimit": {"power_limit_w"},
        "nvmlDeviceGetPersistenceMode": {"persistence"},
        "nvmlDeviceGetMaxClockInfo": {"max_sm_clock_mhz"},
    }
    assert empty == fields.get(refuses, set())
    assert not throttled_by({}, watch(FakeNvml(refuses=refuses), 3), {})


@pytest.mark.parametrize("refuses", ["", *CALLS])
def test_a_slice_tells_its_own_neighbours_and_else_what_its_card_tells(refuses: str) -> None:
    slice_ = Clocks(FakeNvml(refuses=refuses), SLICE)
    found = {**slice_.read(), **slice_.facts(), "energy_j": slice_.energy_j()}
    whole = Clocks(FakeNvml(refuses=refuses), "card")
    told = {**whole.read(), **whole.facts(), "energy_j": whole.energy_j()}
    assert found == (dict.fromkeys(told) if "Mig" in refuses else told)  # whose card is not known
    assert slice_.others() == whole.others()


def test_a_driver_that_goes_away_ends_the_telemetry_only() -> None:
    class Gone:
        def read(self) -> dict[str, Any]:
            raise OSError("driver gone")

    with sampling(Gone(), 0.001) as readings:  # type: ignore[arg-type]
        time.sleep(0.01)
    assert readings == []
    assert summary(readings) == {}


def test_the_thread_ends_with_the_block_also_after_an_error() -> None:
    with pytest.raises(ZeroDivisionError), sampling(Clocks(FakeNvml(), "handle"), 0.001):
        raise ZeroDivisionError
    assert not [thread for thread in threading.enumerate() if thread.name == "flashbench-telemetry"]


def test_a_machine_without_threads_has_no_readings(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with sampling(Clocks(FakeNvml(), "handle")) as readings:
        pass
    assert readings == []


def test_without_clocks_nothing_is_read() -> None:
    with sampling(None) as readings:
        pass
    assert summary(readings) == {}


class Lookup:
    """NVML's look-ups of a card, of which some refuse and some are not in its bindings."""

    def __init__(self, refuses: tuple[str, ...] = (), lacks: tuple[str, ...] = ()) -> None:
        for name in ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByPciBusId_v2"):
            if name not in lacks:
                setattr(self, name, self._refuse if name in refuses else lambda key: "card")

    def _refuse(self, key: object) -> str:
        raise RuntimeError("Not Supported")


LOOKUPS = ("nvmlDeviceGetHandleByUUID", "nvmlDeviceGetHandleByPciBusId_v2")


@pytest.mark.parametrize("how", ["refuses", "lacks"])
def test_a_card_is_found_by_either_look_up_and_else_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    properties = SimpleNamespace(uuid="12", pci_bus_id=1, pci_domain_id=0, pci_device_id=0)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda device: properties)
    for name in LOOKUPS:
        found = profilers.open_clocks("cuda:0", Lookup(**{how: (name,)}))
        assert found is not None
        assert found.handle == "card"
    assert not caplog.messages
    assert profilers.open_clocks("cuda:0", Lookup(**{how: LOOKUPS})) is None
    (said,) = caplog.messages
    assert "does not know cuda:0" in said
    assert "CUDA_VISIBLE_DEVICES" in said
    assert "\n" not in said


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
    drawing = FakeNvml()
    drawing._nvmlDeviceGetGraphicsRunningProcesses = lambda handle: [  # type: ignore[method-assign]
        SimpleNamespace(pid=1, usedGpuMemory=7), SimpleNamespace(pid=3, usedGpuMemory=9)
    ]  # fmt: skip
    assert Clocks(drawing, "h").others() == {"other_processes": 2, "other_bytes": 16}


def test_energy_is_the_counter_and_else_the_power_and_else_a_reason() -> None:
    powers = [{"power_w": 200.0}, {"power_w": 400.0}, {"power_w": None}]
    counted = energy.settle(100.0, 700.0, powers, seconds=2.0, calls=60)
    assert (counted["joules_per_call"], counted["watts"], counted["method"]) == (10.0, 300.0, "counter")
    for before, after in ((None, 5.0), (5.0, None), (5.0, 5.0)):
        assert energy.settle(before, after, powers, seconds=2.0, calls=60) == counted | {"method": "power"}
    silent = energy.settle(None, None, [{"power_w": None}], 2.0, 60)["reason"]
    assert "neither" in silent
    assert "without --energy" in silent
    asked = energy.measure_energy(lambda: None, device="cpu", clocks=None)
    assert "NVML" in asked["reason"]
    assert "without --energy" in asked["reason"]


class Board:
    """600 W for ever; the counter is renewed every period_s, the clock moves by 1 ms with each call."""

    card = None

    def __init__(self, period_s: float, phase_s: float) -> None:
        self.now, self.period_s, self.calls = phase_s, period_s, 0

    def call(self) -> None:
        self.now += 1e-3
        self.calls += 1

    def energy_j(self) -> float | None:
        return 600 * self.period_s * (self.now // self.period_s) if self.period_s else None

    def read(self) -> dict[str, Any]:
        return {"power_w": 600.0}

    def measure(self, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
        for module in (energy, load):
            monkeypatch.setattr(module, "time", SimpleNamespace(perf_counter=lambda: self.now))
        return energy.measure_energy(self.call, device="cpu", clocks=self)  # type: ignore[arg-type]


@pytest.mark.parametrize("phase_s", [0.0, 0.03, 0.06, 0.084])
def test_the_period_of_the_counter_is_no_error(monkeypatch: pytest.MonkeyPatch, phase_s: float) -> None:
    found = Board(0.085, phase_s).measure(monkeypatch)
    assert found["method"] == "counter"
    assert found["watts"] == pytest.approx(600, rel=2 * load.BATCH_S)
    assert found["joules_per_call"] == pytest.approx(0.6, rel=2 * load.BATCH_S)
    assert 1.0 <= found["seconds"] <= 1.0 + 0.085 + 2 * load.BATCH_S
    assert found["scope"] == "board, idle included"


@pytest.mark.parametrize("period_s", [0.0, 1e9], ids=["no counter", "a counter that stands still"])
def test_power_is_read_after_it_has_settled(monkeypatch: pytest.MonkeyPatch, period_s: float) -> None:
    board = Board(period_s, 0.0)
    found = board.measure(monkeypatch)
    assert found["method"] == "power"
    assert found["joules_per_call"] == pytest.approx(0.6)
    assert (board.calls - found["calls"]) * 1e-3 >= energy.SETTLE_S


def test_a_slow_call_is_repeated_twice_before_it_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    board = Board(0.09, 0.0)

    def slow() -> None:
        board.call()
        board.now += 10

    monkeypatch.setattr(energy, "time", SimpleNamespace(perf_counter=lambda: board.now))
    monkeypatch.setattr(load, "time", SimpleNamespace(perf_counter=lambda: board.now))
    found = energy.measure_energy(slow, device="cpu", clocks=board)  # type: ignore[arg-type]
    assert (found["calls"], board.calls) == (1, 3)
    assert found["watts"] == pytest.approx(600, rel=0.01)


def test_a_slices_energy_says_that_it_is_the_whole_boards(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(energy, "SETTLE_S", 0.01)
    found = energy.measure_energy(lambda: None, device="cpu", clocks=Clocks(FakeNvml(), SLICE), min_s=0.01)
    assert found["scope"] == "board, idle and other MIG slices included"


@pytest.mark.parametrize("refuses", CALLS)
@pytest.mark.parametrize("handle", ["card", SLICE])
def test_energy_survives_each_refusal(monkeypatch: pytest.MonkeyPatch, refuses: str, handle: str) -> None:
    monkeypatch.setattr(energy, "SETTLE_S", 0.01)
    monkeypatch.setattr(energy, "TICK_S", 0.01)
    clocks = Clocks(FakeNvml(refuses=refuses), handle)
    found = energy.measure_energy(lambda: None, device="cpu", clocks=clocks, min_s=0.01)
    json.dumps(found, allow_nan=False)
    if handle == SLICE and "Mig" in refuses:
        assert set(found) == {"reason"}
        assert "without --energy" in found["reason"]
    else:
        counted = "TotalEnergy" not in refuses
        assert found["method"] == ("counter" if counted else "power")


@pytest.mark.gpu
def test_a_boards_mean_power_lies_below_its_limit() -> None:
    import torch

    clocks = profilers.open_clocks("cuda:0")
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    one, other = (profilers.measure_energy(lambda: a @ a, device="cuda:0", clocks=clocks) for _ in range(2))
    limit_w = clocks.facts()["power_limit_w"] if clocks else None
    assert 100 < one["watts"] < 1.05 * (limit_w or 1500)
    assert one["joules_per_call"] == pytest.approx(other["joules_per_call"], rel=0.1)


def test_the_interval_is_no_shorter_than_the_counters_are_renewed() -> None:
    assert telemetry.INTERVAL_S >= 0.02


class FakeGpm:
    """NVML's GPM calls; each may refuse."""

    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, refuses: str = "", supported: int = 1) -> None:
        self.refuses, self.supported, self.freed, self.of_slice = refuses, supported, 0, False

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
        assert handle == "handle"
        self._may("nvmlGpmSampleGet")

    def nvmlGpmSampleFree(self, sample: object) -> None:
        self.freed += 1
        self._may("nvmlGpmSampleFree")

    def nvmlDeviceIsMigDeviceHandle(self, handle: str) -> c_uint:
        return c_uint(handle == SLICE)

    def nvmlDeviceGetDeviceHandleFromMigDeviceHandle(self, handle: str) -> str:
        return "handle"

    def nvmlDeviceGetGpuInstanceId(self, handle: str) -> int:
        self._may("nvmlDeviceGetGpuInstanceId")
        return {SLICE: 5}[handle]

    def nvmlGpmMigSampleGet(self, handle: str, instance: int, sample: object) -> None:
        self._may("nvmlGpmMigSampleGet")
        assert (handle, instance) == ("handle", 5)
        self.of_slice = True

    def c_nvmlGpmMetricsGet_t(self) -> SimpleNamespace:
        metric = [SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0) for _ in range(8)]
        return SimpleNamespace(metrics=metric)

    def nvmlGpmMetricsGet(self, asked: SimpleNamespace) -> None:
        self._may("nvmlGpmMetricsGet")
        for metric in asked.metrics[: asked.numMetrics]:
            metric.value = 10.0 * metric.metricId
            metric.nvmlReturn = 3 if metric.metricId == 3 else 0


def use(nvml: FakeGpm, handle: str = "handle") -> dict[str, Any]:
    return gpm.measure(lambda: None, lambda: None, Clocks(nvml, handle), min_s=0.01)


def test_gpm_gives_shares_and_none_for_what_is_refused() -> None:
    nvml = FakeGpm()
    assert use(nvml) == {
        "sm_utilisation": 0.2, "occupancy": None, "tensor_utilisation": 0.5, "dram_utilisation": 1.0
    }  # fmt: skip
    assert nvml.freed == 2


def test_gpm_of_a_slice_is_asked_of_its_card_by_number() -> None:
    nvml = FakeGpm()
    assert use(nvml, SLICE)["tensor_utilisation"] == 0.5
    assert nvml.of_slice
    for name in ("nvmlDeviceGetGpuInstanceId", "nvmlGpmMigSampleGet"):
        assert use(FakeGpm(name), SLICE) == {"reason": f"GPM: RuntimeError: Not Supported; {gpm.NEEDS}"}


def test_a_sample_that_cannot_be_freed_costs_nothing() -> None:
    nvml = FakeGpm("nvmlGpmSampleFree")
    assert use(nvml)["tensor_utilisation"] == 0.5
    assert nvml.freed == 2


def test_gpm_does_not_wait_after_each_call() -> None:
    calls, waits = [], []
    gpm.measure(lambda: calls.append(1), lambda: waits.append(1), Clocks(FakeGpm(), "handle"), min_s=0.01)
    assert len(calls) > 100 * len(waits)


@pytest.mark.parametrize(
    "name",
    [
        "nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMigSampleGet",
        "nvmlGpmSampleFree", "nvmlGpmMetricsGet", "c_nvmlGpmMetricsGet_t", "NVML_GPM_METRICS_GET_VERSION",
        "nvmlDeviceGetGpuInstanceId", *CALLS,
    ],
)  # fmt: skip
def test_the_fakes_have_the_names_of_the_real_bindings(name: str) -> None:
    import pynvml

    assert hasattr(pynvml, name)


def test_gpms_numbers_are_those_of_the_bindings() -> None:
    import pynvml

    assert gpm.METRICS == {
        "sm_utilisation": pynvml.NVML_GPM_METRIC_SM_UTIL,
        "occupancy": pynvml.NVML_GPM_METRIC_SM_OCCUPANCY,
        "tensor_utilisation": pynvml.NVML_GPM_METRIC_ANY_TENSOR_UTIL,
        "dram_utilisation": pynvml.NVML_GPM_METRIC_DRAM_BW_UTIL,
    }


@pytest.mark.parametrize(
    "refuses",
    ["nvmlGpmQueryDeviceSupport", "nvmlGpmSampleAlloc", "nvmlGpmSampleGet", "nvmlGpmMetricsGet"],
)
def test_a_gpu_without_gpm_says_so(refuses: str) -> None:
    nvml = FakeGpm(refuses)
    assert use(nvml) == {"reason": f"GPM: RuntimeError: Not Supported; {gpm.NEEDS}"}
    assert nvml.freed == (2 if refuses in ("nvmlGpmSampleGet", "nvmlGpmMetricsGet") else 0)
    old, unread = use(FakeGpm(supported=0)), gpm.measure(lambda: None, lambda: None, None)
    unknown = use(FakeNvml())  # type: ignore[arg-type]  # bindings that know no GPM
    for found in (old, unread, unknown):
        for part in ("Hopper", "driver from 520", "--counters"):
            assert part in found["reason"]


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
