"""Each metric is what its definition says, and None, never 0, where it cannot be known."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import synthetic

from flashbench import devices, iomodel
from flashbench.compared import LEVELS, REQUESTED
from flashbench.metrics import METRICS, Row
from flashbench.record import Accuracy, Memory, Record, Samples

BY_NAME = {metric.name: metric for metric in METRICS}


def row(record: Record | None = None, **changes: Any) -> Row:
    record = record or synthetic.record("flash", 1024)
    cell = record.cell
    values: dict[str, Any] = {
        "record": record,
        "estimate": iomodel.estimate("flash-v2", cell.problem, cell.pass_),
        "compulsory_bytes": iomodel.compulsory(cell.problem, cell.pass_).total_bytes,
        "device": devices.find("h100-sxm"),
        "naive_time_s": 1.0,
    }
    return Row(**{**values, **changes})


def value(name: str, of: Row) -> Any:
    return BY_NAME[name].compute(of)


def timed(*samples_s: float, **changes: Any) -> Record:
    samples = Samples(samples_s=samples_s, cache="cold", method="events")
    return replace(
        synthetic.record("flash", 4096, batch=1, num_heads=16, num_kv_heads=16, **changes), samples=samples
    )


def test_rates_and_fractions_of_a_known_cell() -> None:
    # 16 heads, 4096 x 4096 pairs, d = dv = 128: 2 * pairs * 256 FLOPs
    cell = row(timed(0.001, 0.002, 0.003))
    flops = 2 * 16 * 4096 * 4096 * 256
    # q, k, v and o in bf16, lse in fp32
    compulsory = 4 * 16 * 4096 * 128 * 2 + 16 * 4096 * 4
    assert value("time_s", cell) == 0.002
    assert value("time_min_s", cell) == 0.001
    assert value("num_samples", cell) == 3
    assert value("flops", cell) == value("flops_half", cell) == flops == 137_438_953_472
    assert value("flops_per_s", cell) == pytest.approx(flops / 0.002)
    assert value("compulsory_bytes", cell) == compulsory == 67_371_008
    assert value("intensity_compulsory", cell) == pytest.approx(flops / compulsory)
    peak, bandwidth = cell.device.peak_flops_per_s["bf16"], cell.device.hbm_bytes_per_s
    assert value("peak_flops_per_s", cell) == peak
    assert value("peak_fraction", cell) == pytest.approx(flops / 0.002 / peak)
    assert value("bandwidth_fraction", cell) == pytest.approx(compulsory / 0.002 / bandwidth)
    # 2040 FLOP/byte is far right of the ridge, so the roof is the peak
    assert value("roof_fraction", cell) == value("peak_fraction", cell)


def test_a_memory_bound_cell_is_held_against_the_bandwidth() -> None:
    record = synthetic.record("flash", 1024, batch=1, seqlen_q=1)
    cell = row(record)
    assert value("roof_fraction", cell) == pytest.approx(value("bandwidth_fraction", cell))
    assert value("roof_fraction", cell) > 10 * value("peak_fraction", cell)


def test_the_half_convention_of_the_papers_differs_from_the_visible_pairs() -> None:
    cell = row(timed(1.0, causal=True))
    pairs = 16 * 4096 * 4097 // 2
    assert value("flops", cell) == 2 * pairs * 256
    assert value("flops_half", cell) == 137_438_953_472 // 2


def test_speedup_is_a_ratio_of_times_and_equals_the_ratio_of_rates() -> None:
    naive, flash = row(timed(0.004), naive_time_s=0.004), row(timed(0.001), naive_time_s=0.004)
    assert value("speedup_over_naive", naive) == 1.0
    assert value("speedup_over_naive", flash) == 4.0
    assert value("flops_per_s", flash) / value("flops_per_s", naive) == pytest.approx(4.0)


def test_error_ratio_is_the_worst_tensor_and_none_where_it_is_not_finite() -> None:
    def ratio(errors: dict[str, float], budgets: dict[str, float]) -> Any:
        accuracy = Accuracy(max_abs_error=errors, budget=budgets, query_rows=1, key_rows=1)
        return value("max_error_ratio", row(replace(synthetic.record(), accuracy=accuracy)))

    assert ratio({"o": 0.5, "dq": 0.3}, {"o": 2.0, "dq": 0.4}) == pytest.approx(0.75)
    assert ratio({"o": 0.0}, {"o": 0.0}) == 0.0
    assert ratio({"o": 0.1}, {"o": 0.0}) is None
    assert ratio({"o": float("nan")}, {"o": 1.0}) is None
    assert ratio({"o": float("nan"), "dq": 0.1}, {"o": 1.0, "dq": 1.0}) is None
    assert value("max_error_ratio", row(replace(synthetic.record(), accuracy=None))) is None


def test_the_clock_is_the_median_of_the_rounds() -> None:
    rounds = [{"samples": 1, "sm_clock_mhz": clock} for clock in (1980.0, None, 1410.0, 1500.0)]
    record = replace(synthetic.record(), timing={"rounds": rounds})
    assert value("sm_clock_hz", row(record)) == 1.5e9


def test_dram_bytes_are_counted_or_else_the_models() -> None:
    counted = row(synthetic.record())
    total = counted.record.counters["total"]
    assert value("dram_bytes", counted) == total["dram_read_bytes"] + total["dram_write_bytes"]
    plain = replace(synthetic.record(), counters={})
    estimate = iomodel.estimate("flash-v2", plain.cell.problem, "fwd")
    said = iomodel.predict(estimate, devices.find("h100-sxm"))
    modelled = row(plain, prediction=said)
    assert value("dram_bytes", modelled) == round(said.dram.value)
    assert value("intensity_dram", modelled) == pytest.approx(modelled.flops / said.dram.value, rel=1e-6)
    assert value("dram_bytes", row(plain)) is None


@pytest.mark.parametrize(
    ("rounds", "cycles"),
    [
        # 2 ms at 1.5 GHz is 3 M cycles, as is 1.5 ms at 2 GHz: the clock changed and the work did not
        ([{"samples": 2, "sm_clock_mhz": 1500.0}, {"samples": 1, "sm_clock_mhz": 2000.0}], 3_000_000),
        ([{"samples": 2, "sm_clock_mhz": 1500.0}, {"samples": 1, "sm_clock_mhz": None}], None),
        ([{"samples": 2, "sm_clock_mhz": 1500.0}], None),
        ([], None),
    ],
)
def test_cycles_are_of_each_samples_own_clock(rounds: list[dict[str, Any]], cycles: int | None) -> None:
    record = replace(timed(0.002, 0.002, 0.0015), timing={"rounds": rounds})
    assert value("cycles", row(record)) == (cycles if cycles is None else pytest.approx(cycles))


def test_memory_that_was_not_measured_is_none() -> None:
    memory = Memory(inputs_bytes=3, outputs_bytes=1, peak_extra_bytes=None, reserved_bytes=None)
    cell = row(replace(synthetic.record(), memory=memory))
    assert (value("inputs_bytes", cell), value("outputs_bytes", cell)) == (3, 1)
    assert value("peak_extra_bytes", cell) is None
    assert value("reserved_bytes", cell) is None
    assert value("inputs_bytes", row(replace(synthetic.record(), memory=None))) is None


@pytest.mark.parametrize("status", ["checked", "skipped", "oom", "wrong", "failed", "timeout", "unsupported"])
def test_a_cell_that_was_not_timed_has_model_numbers_and_no_measured_ones(status: str) -> None:
    cell = row(synthetic.record("naive", 65536, status=status, reason="why"))
    known = {name for name in BY_NAME if value(name, cell) is not None}
    assert known == {
        "flops", "done_flops", "flops_half", "peak_flops_per_s", "hbm_bytes_per_s", "requested_bytes",
        "compulsory_bytes", "intensity_requested", "intensity_compulsory", "predicted_extra_bytes",
    }  # fmt: skip


def test_without_device_model_or_naive_their_metrics_are_none() -> None:
    bare = row(device=None, estimate=None, naive_time_s=None)
    missing = {name for name in BY_NAME if value(name, bare) is None}
    assert missing == {
        "done_flops", "peak_flops_per_s", "hbm_bytes_per_s", "peak_fraction", "requested_bytes",
        "intensity_requested", "roof_fraction", "bandwidth_fraction", "predicted_extra_bytes",
        "speedup_over_naive", "energy_j", "cycles", "sm_clock_hz", "exact_error",
        "exact_error_relative", "j_per_tflop", "counted_spill_write_bytes",
        "counted_spill_missed_bytes", "counted_tensor_share",
            *(f"{part}_difference_bytes" for part in REQUESTED.values()),
        "least_dram_read_bytes", "most_dram_read_bytes", "least_dram_write_bytes", "most_dram_write_bytes",
        *(f"predicted_{counter}" for counter in LEVELS.values()),
        *(f"{counter.removesuffix('_bytes')}_ratio" for counter in LEVELS.values()),
    }  # fmt: skip


def test_a_pass_that_the_model_of_another_method_has_not_has_no_flops() -> None:
    """Attention's nominal FLOPs are not those of linear attention."""
    record = replace(timed(0.002), exact=False, io_model="linear-attention")
    cell = row(record, estimate=None)
    names = ("flops", "flops_per_s", "peak_fraction", "roof_fraction", "intensity_compulsory")
    assert [value(name, cell) for name in names] == [None] * 5
    assert value("time_s", cell) == 0.002
    assert (
        value("flops", row(replace(record, io_model=None), estimate=None)) > 0
    )  # 8-bit attention has its own


def test_a_dtype_without_a_peak_has_no_fraction_of_it() -> None:
    v100 = next(device for device in devices.DEVICES if device.peak_flops_per_s["bf16"] is None)
    cell = row(device=v100)
    assert value("peak_fraction", cell) is None
    assert value("roof_fraction", cell) is None
    assert value("bandwidth_fraction", cell) > 0


def test_every_metric_says_what_it_is() -> None:
    assert len(BY_NAME) == len(METRICS)
    for metric in METRICS:
        assert metric.help
        assert metric.unit
        assert metric.better in {"higher", "lower", ""}
        if metric.name.endswith("_bytes"):
            assert metric.unit == "B"
            assert metric.whole
        if metric.name.endswith("_s") and not metric.name.endswith("_per_s"):
            assert metric.unit == "s"
