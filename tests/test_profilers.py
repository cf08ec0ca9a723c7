"""Every sample is kept, what to distrust is flagged and never dropped, and memory is that of one call."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import pytest
import torch

from flashbench import profilers
from flashbench._profilers import clocks, timers
from flashbench._profilers.telemetry import throttled_by
from flashbench._profilers.timers import between_events
from flashbench.profilers import Policy, drifted, measure_memory, measure_time

FEW = Policy(limit_s=0.01, min_samples=3, max_samples=7, warmup=2)


def test_a_cpu_call_is_timed_by_the_wall_after_its_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[float] = [0.0]
    assert timers.WallTimer(lambda: time.sleep(0.01)).host_s() >= 0.01
    monkeypatch.setattr(timers, "WallTimer", partial(timers.WallTimer, clock=lambda: calls[-1]))

    def call() -> None:
        calls.append(calls[-1] + (0.125 if len(calls) <= FEW.warmup else 0.0078125))

    timing = measure_time(call, device="cpu", cache="cold", policy=FEW)
    samples = timing.samples
    assert len(calls) - 1 == timing.how["warmup"]["calls"] + len(samples.samples_s)
    assert 3 <= len(samples.samples_s) <= 7
    assert set(samples.samples_s) == {0.0078125}
    assert (samples.method, samples.cache) == ("wall", "hot")


def test_what_the_call_raises_comes_out() -> None:
    def call() -> None:
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        measure_time(call, device="cpu", policy=FEW)


@pytest.mark.parametrize(
    ("samples", "flagged"),
    [
        ([1.0] * 8, False),
        ([1.0, 1.0] + [1.2] * 6, True),
        ([1.2, 1.2] + [1.0] * 6, True),
        ([1.0, 1.0, 5.0, 5.0, 5.0, 5.0, 1.04, 1.04], False),
        ([1.0, 2.0, 3.0], False),
        ([], False),
    ],
)
def test_drift_compares_the_last_quarter_with_the_first(samples: list[float], flagged: bool) -> None:
    assert drifted(samples) is flagged


def test_memory_on_a_cpu_counts_outputs_and_does_not_guess_the_rest() -> None:
    usage = measure_memory(lambda: (torch.zeros(3, 4), torch.zeros(5, dtype=torch.float16)), "cpu")
    assert usage == profilers.Usage(outputs_bytes=58, peak_extra_bytes=None, reserved_bytes=None)


class FakeNvml(SimpleNamespace):
    """NVML as bindings of some version show it: queries refuse, names are bytes."""

    NVML_CLOCK_SM = 1
    NVML_TEMPERATURE_GPU = 0

    def nvmlDeviceGetPowerUsage(self, handle: str) -> int:
        return 412_500

    def nvmlDeviceGetClockInfo(self, handle: str, kind: int) -> int:
        return 1410

    def nvmlDeviceGetTemperature(self, handle: str, kind: int) -> int:
        raise RuntimeError("Not Supported")

    def nvmlDeviceGetHandleByUUID(self, uuid: str | bytes) -> str:
        known = {b"GPU-1234": "by uuid", b"MIG-5678": "slice"}
        if not isinstance(uuid, bytes) or uuid not in known:
            raise RuntimeError("Not Found")
        return known[uuid]

    def nvmlDeviceGetHandleByPciBusId_v2(self, address: bytes) -> str:
        return address.decode()


def test_a_refused_query_is_none_and_the_others_stand() -> None:
    nvml = FakeNvml(nvmlDeviceGetCurrentClocksThrottleReasons=lambda handle: 0x4 | 0x1)
    assert clocks.Clocks(nvml, "handle").read() == {
        "sm_clock_mhz": 1410, "memory_clock_mhz": None, "power_w": 412.5, "temperature_c": None,
        "throttle": ["power cap"],
    }  # fmt: skip
    assert clocks.Clocks(FakeNvml(), "handle").read()["throttle"] is None
    assert clocks.Clocks(FakeNvml(), "handle").facts() == {
        "power_limit_w": None, "persistence": None, "max_sm_clock_mhz": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    ("reasons", "names"),
    [
        (0x1, []),  # idle
        (0x2, []),  # application clocks
        (0x20, ["thermal cap"]),
        (0xC8, ["hardware slowdown", "hardware thermal slowdown", "power brake"]),
    ],
)
def test_only_caps_count_as_throttling(reasons: int, names: list[str]) -> None:
    nvml = FakeNvml(nvmlDeviceGetCurrentClocksEventReasons=lambda handle: reasons)
    reading = clocks.Clocks(nvml, "handle").read()
    assert reading["throttle"] == names
    assert throttled_by({}, {}, reading) == [f"{name} at the last samples" for name in names]


@pytest.mark.parametrize(
    ("properties", "handle"),
    [
        (SimpleNamespace(uuid="1234"), "by uuid"),
        (SimpleNamespace(uuid="GPU-1234"), "by uuid"),
        (SimpleNamespace(uuid="MIG-5678"), "slice"),
        (SimpleNamespace(uuid="5678"), "slice"),
        (SimpleNamespace(uuid="other", pci_bus_id=0x65), "00000000:65:00.0"),
        (SimpleNamespace(pci_domain_id=1, pci_bus_id=0x1B, pci_device_id=2), "00000001:1B:02.0"),
        (SimpleNamespace(), None),
    ],
)
def test_the_gpu_is_found_by_what_torch_calls_it(properties: SimpleNamespace, handle: str | None) -> None:
    assert clocks.find_handle(FakeNvml(), properties) == handle


@pytest.mark.parametrize("key", ["MIG-12", b"MIG-12", "GPU-12", b"GPU-12"])
def test_cards_and_slices_are_found_by_a_uuid_with_or_without_its_prefix(key: str | bytes) -> None:
    nvml = FakeNvml(nvmlDeviceGetHandleByUUID=lambda uuid: {key: "right"}[uuid])
    whole = key.decode() if isinstance(key, bytes) else key
    assert clocks.find_handle(nvml, SimpleNamespace(uuid="12")) == "right"
    assert clocks.find_handle(nvml, SimpleNamespace(uuid=whole)) == "right"


def test_without_nvml_there_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    import pynvml

    def refuse() -> None:
        raise RuntimeError("Driver Not Loaded")

    monkeypatch.setattr(pynvml, "nvmlInit", refuse)
    clocks.nvml.cache_clear()
    assert clocks.open_clocks("cuda:0") is None
    assert clocks.open_clocks("cuda:0") is None
    assert [record.message for record in caplog.records] == [
        "no clocks, power or throttle reasons: NVML does not answer (Driver Not Loaded); see whether"
        " 'nvidia-smi' works: if driver and library do not match, reboot or reinstall the driver"
    ]
    clocks.nvml.cache_clear()


def test_the_flush_reads_twice_the_l2_and_writes_and_allocates_next_to_nothing() -> None:
    flush = profilers.Flush("cpu", l2_bytes=3 * 2**20)
    assert 0 <= flush.buffer.nbytes - 6 * 2**20 < flush.sums.nbytes == 4 * len(flush.buffer)
    flush.buffer[:, -1] = torch.arange(len(flush.buffer))
    untouched, place = flush.buffer._version, flush.sums.data_ptr()
    flush.sums.fill_(-1)
    flush()
    assert flush.sums.tolist() == list(range(len(flush.buffer)))  # every row was read to its end
    assert (flush.buffer._version, flush.sums.data_ptr()) == (untouched, place)


GPU = "cuda:0"


@pytest.mark.gpu
def test_gpu_time_is_the_devices_and_the_flush_stays_outside() -> None:
    tiny = torch.zeros(256, device=GPU)
    cold = measure_time(lambda: tiny.clone(), device=GPU, cache="cold").samples
    hot = measure_time(lambda: tiny.clone(), device=GPU, cache="hot").samples
    assert cold.method == hot.method == "events"
    assert [(x.cache, x.flush) for x in (cold, hot)] == [("cold", "read"), ("hot", None)]
    assert cold.median_s - hot.median_s < 5e-6  # the flush alone takes over 30 us
    assert len(cold.samples_s) == profilers.GPU_POLICY.max_samples


@pytest.mark.gpu
def test_a_cold_cache_shows_where_data_would_fit_the_l2() -> None:
    """Few blocks with one load in flight each: their time is the latency of L2 or memory, not the host's."""
    from slow_reader import BLOCK, BLOCKS, read_slowly

    x = torch.zeros(6 * 2**20, device=GPU)  # 24 MiB
    found = torch.empty(BLOCKS, device=GPU)

    def call() -> None:
        read_slowly[(BLOCKS,)](x, found, x.numel() // BLOCKS, BLOCK=BLOCK, num_warps=4)

    call()
    cold, hot = (measure_time(call, device=GPU, cache=cache).samples.median_s for cache in ("cold", "hot"))
    assert cold > 1.1 * hot > 100e-6


@pytest.mark.gpu
def test_the_flush_leaves_nothing_that_the_timed_call_has_to_write_back() -> None:
    """A read after the flush is as fast as after a second one, which finds nothing dirty."""
    x, sums = torch.zeros(8192, 4096, device=GPU), torch.empty(8192, device=GPU)  # 128 MiB

    def read() -> None:
        torch.sum(x, dim=1, out=sums)

    flush, again = profilers.Flush(GPU), profilers.Flush(GPU)

    def after(*flushes: Callable[[], object]) -> float:
        return statistics.median(between_events(read, lambda: [one() for one in flushes], 40))

    after(flush, again)  # nothing compiles or loads below
    once, twice = after(flush), after(flush, again)
    assert once == pytest.approx(twice, rel=0.1)
    with torch.cuda.device(GPU):
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        flush()
        assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


@pytest.mark.gpu
def test_gpu_time_agrees_with_the_wall_over_many_calls() -> None:
    a = torch.randn(4096, 4096, device=GPU, dtype=torch.bfloat16)
    timed = measure_time(lambda: a @ a, device=GPU, cache="hot", clocks=profilers.open_clocks(GPU))
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(200):
        a @ a
    torch.cuda.synchronize()
    wall = (time.perf_counter() - start) / 200
    assert timed.samples.median_s == pytest.approx(wall, rel=0.15)
    assert timed.clocks["after"]["sm_clock_mhz"] > 0
    assert "launch-bound" not in timed.flags


@pytest.mark.gpu
def test_many_tiny_launches_are_flagged_launch_bound() -> None:
    x = torch.zeros(16, device=GPU)

    def call() -> None:
        for _ in range(30):
            x.add_(1)

    assert "launch-bound" in measure_time(call, device=GPU).flags


@pytest.mark.gpu
def test_gpu_memory_is_above_what_was_allocated_and_forgets_earlier_peaks() -> None:
    held = torch.zeros(2**20, device=GPU)

    def call() -> torch.Tensor:
        scratch = held + 1  # 4 MiB beside the result's 4 MiB
        return scratch * 2

    call()
    alone = measure_memory(call, GPU)
    del_me = torch.zeros(2**26, device=GPU)
    del del_me
    after_a_peak = measure_memory(call, GPU)
    assert alone == after_a_peak
    assert alone.outputs_bytes == 2**22
    assert alone.peak_extra_bytes == 2 * 2**22
    assert alone.reserved_bytes is not None
    assert alone.reserved_bytes >= 3 * 2**22


@pytest.mark.gpu
def test_the_context_is_not_made_by_importing() -> None:
    import subprocess
    import sys

    code = (
        "import flashbench.runner, flashbench.environment, torch\n"
        "flashbench.environment.gpu_status()\n"
        "assert not torch.cuda.is_initialized()"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
