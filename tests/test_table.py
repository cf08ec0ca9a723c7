"""The join: one row per record, SI values, missing is missing, and nothing is compared across runs."""

from __future__ import annotations

import io
import json
import math
from dataclasses import replace
from typing import Any

import pandas as pd
import pytest
import synthetic

from flashbench import devices, iomodel, runfile, table
from flashbench.metrics import METRICS
from flashbench.runfile import RunFile


def built(*records: Any, **header: Any) -> pd.DataFrame:
    return table.build([synthetic.run_file(records, **header)])


def test_columns_are_identity_then_metrics() -> None:
    frame = built(synthetic.record())
    assert list(frame.columns) == list(table.COLUMNS)
    assert table.COLUMNS[-len(METRICS) :] == tuple(metric.name for metric in METRICS)


def test_one_row_per_record_in_the_order_of_the_file() -> None:
    records = synthetic.sweep(lengths=(1024, 65536))
    frame = table.build([synthetic.run_file(records)])
    assert len(frame) == len(records)
    assert list(frame["implementation"]) == [record.cell.implementation for record in records]
    assert list(frame["status"]) == [record.status for record in records]


def test_the_predicted_memory_follows_the_implementations_own_model() -> None:
    frame = built(synthetic.record("naive", 4096), synthetic.record("flash", 4096))
    problem = synthetic.problem(4096)
    expected = [iomodel.estimate(model, problem, "fwd").extra_bytes for model in ("standard", "flash-v2")]
    assert list(frame["predicted_extra_bytes"]) == expected
    assert expected[0] > 10 * expected[1]


def test_a_row_with_options_of_attention_has_its_models_bytes() -> None:
    options = {"window": (32, 0), "bias": "1hqk", "alibi": True, "sinks": True}
    frame = built(
        synthetic.record(
            "flash", 1024, "bwd", io_model="flash", status="checked", reason="not timed", **options
        )
    )
    row = iomodel.estimate(
        "flash", synthetic.problem(1024, **options), "bwd", device=devices.find("h100-sxm")
    )
    assert frame["requested_bytes"].iloc[0] == row.requested.total_bytes
    assert frame["predicted_extra_bytes"].iloc[0] == row.extra_bytes
    assert frame["compulsory_bytes"].iloc[0] == row.compulsory.total_bytes


def test_the_records_tiles_decide_its_requested_bytes() -> None:
    def requested(**tiles: int) -> int:
        record = synthetic.record("flash", 4096, io_model="flash-v2", config=tiles)
        return int(built(record)["requested_bytes"].iloc[0])

    assert requested(block_q=64, block_k=64) > 1.5 * requested(block_q=128, block_k=64)


def test_the_configuration_reads_as_pairs() -> None:
    frame = built(synthetic.record(config={"block_q": 128, "num_warps": 8}))
    assert frame["config"].iloc[0] == "block_q=128 num_warps=8"


@pytest.mark.parametrize("model", [None, "a-model-of-tomorrow"])
def test_an_unknown_model_leaves_its_columns_empty(model: str | None) -> None:
    row = table.rows(built(synthetic.record(io_model=model)))[0]
    assert row["requested_bytes"] is None
    assert row["predicted_extra_bytes"] is None
    assert row["compulsory_bytes"] > 0


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_compulsory_bytes_are_those_of_the_pass_for_every_implementation(pass_: str) -> None:
    frame = built(synthetic.record("naive", pass_=pass_), synthetic.record("flash", pass_=pass_))
    expected = iomodel.compulsory(synthetic.problem(), pass_).total_bytes
    assert list(frame["compulsory_bytes"]) == [expected, expected]


def test_an_unknown_device_has_no_peak_and_no_percentages() -> None:
    row = table.rows(built(synthetic.record(environment={"device_name": "NVIDIA Foo 9999"})))[0]
    assert row["device"] == "NVIDIA Foo 9999"
    assert row["flops_per_s"] > 0
    for name in ("peak_fraction", "roof_fraction", "bandwidth_fraction", "peak_flops_per_s"):
        assert row[name] is None


def test_a_slice_of_a_card_is_held_against_its_share() -> None:
    """A record names its device; how large it is stands in the header."""
    name = f"{synthetic.H100} MIG 1g.10gb"
    machine = {"device_name": name, "num_sms": 16, "total_bytes": 10 * 2**30}
    whole = built(synthetic.record())["peak_flops_per_s"].iloc[0]
    sliced = built(synthetic.record(environment={"device_name": name}), environment=machine)
    assert sliced["peak_flops_per_s"].iloc[0] == pytest.approx(whole * 16 / 132)


def test_speedup_compares_the_same_problem_pass_and_cache_only() -> None:
    other_cache = synthetic.record("sdpa", 2048)
    hot = replace(other_cache.samples, cache="hot")
    frame = built(
        synthetic.record("naive", 1024),
        synthetic.record("flash", 1024),
        synthetic.record("flash", 1024, "bwd"),
        synthetic.record("flash", 1024, causal=True),
        synthetic.record("naive", 2048),
        replace(other_cache, samples=hot),
    )
    speedups = list(frame["speedup_over_naive"])
    assert speedups[0] == 1.0
    assert speedups[1] == pytest.approx(frame["time_s"][0] / frame["time_s"][1])
    assert all(math.isnan(value) for value in (speedups[2], speedups[3], speedups[5]))


def test_speedup_never_reaches_into_another_run() -> None:
    with_naive = synthetic.run_file([synthetic.record("naive")], path="a.jsonl")
    without = synthetic.run_file([synthetic.record("flash")], path="b.jsonl")
    frame = table.build([with_naive, without])
    assert math.isnan(frame["speedup_over_naive"][1])


def test_runs_are_named_by_file_or_folder_and_never_alike() -> None:
    paths = ["reports/h100-sxm/results.jsonl", "old.jsonl", "x/old.jsonl", "reports/h100-pcie/results.jsonl"]
    assert table.run_names(paths) == ["h100-sxm", "old", "old#2", "h100-pcie"]
    files = [synthetic.run_file([synthetic.record()], path=path) for path in paths]
    assert list(table.build(files)["run"]) == table.run_names(paths)
    assert list(table.headers(files)) == table.run_names(paths)


def test_a_run_without_rows_does_not_shift_the_names() -> None:
    empty = synthetic.run_file([], path="empty.jsonl")
    full = synthetic.run_file([synthetic.record()], path="full.jsonl")
    assert list(table.build([empty, full])["run"]) == ["full"]


def test_no_records_make_an_empty_table_with_all_columns() -> None:
    frame = table.build([synthetic.run_file([])])
    assert len(frame) == 0
    assert list(frame.columns) == list(table.COLUMNS)
    assert table.rows(frame) == []


def test_rows_are_strict_json_with_null_for_missing() -> None:
    frame = built(synthetic.record(), synthetic.record("naive", 65536, status="oom", reason="out of memory"))
    text = json.dumps(table.rows(frame), allow_nan=False)
    ok, oom = json.loads(text)
    assert ok["time_s"] > 0
    assert ok["causal"] is False
    assert isinstance(ok["flops"], int)
    assert isinstance(ok["num_samples"], int)
    assert oom["time_s"] is None
    assert oom["flops_per_s"] is None
    assert oom["reason"] == "out of memory"


def test_csv_has_numbers_only_in_metric_columns_and_empty_for_missing() -> None:
    records = [
        synthetic.record(),
        synthetic.record("naive", 65536, status="oom", reason='a "quoted", reason'),
    ]
    text = table.to_csv(table.build([synthetic.run_file(records)]))
    frame = pd.read_csv(io.StringIO(text))
    assert list(frame.columns) == list(table.COLUMNS)
    for metric in METRICS:
        assert pd.api.types.is_numeric_dtype(frame[metric.name]), metric.name
    assert frame["reason"][1] == 'a "quoted", reason'
    assert math.isnan(frame["time_s"][1])


def test_a_cell_too_large_for_64_bits_keeps_its_row() -> None:
    huge = synthetic.record("naive", 2**31 - 1, batch=64, status="skipped", reason="needs more than there is")
    row = table.rows(built(huge, synthetic.record()))[0]
    assert row["flops"] == pytest.approx(iomodel.flops(huge.cell.problem, "fwd"))


def test_the_table_of_a_file_that_was_written_and_read_is_the_same(tmp_path: Any) -> None:
    """What the join needs survives the trip through disk."""
    made = synthetic.run_file(synthetic.sweep(lengths=(1024, 65536)), path="synthetic.jsonl")
    path = tmp_path / "synthetic.jsonl"
    with runfile.create(path, made.header) as writer:
        for record in made.records:
            writer.append(record)
    pd.testing.assert_frame_equal(table.build([runfile.load(path)]), table.build([made]))


def test_models_have_a_row_per_problem_pass_and_shown_model() -> None:
    records = [synthetic.record(name, 2048, pass_) for name in ("naive", "flash") for pass_ in ("fwd", "bwd")]
    frame = table.models(built(*records))
    shown = [model.name for model in iomodel.MODELS if model.shown]
    assert len(frame) == 2 * len(shown)
    row = frame[(frame["model"] == "standard") & (frame["pass"] == "bwd")].iloc[0]
    expected = iomodel.estimate("standard", synthetic.problem(2048), "bwd")
    assert row["requested_bytes"] == expected.requested.total_bytes
    assert row["extra_bytes"] == expected.extra_bytes


def test_model_trace_and_counters_stand_in_one_row() -> None:
    record = synthetic.record("flash", 4096, "bwd")
    (row,) = table.rows(built(record))
    model = iomodel.estimate("flash-v2", record.cell.problem, "bwd").requested
    assert row["predicted_l2_read_bytes"] == row["traced_read_bytes"] == model.read_bytes
    assert row["predicted_l2_write_bytes"] == row["traced_write_bytes"] == model.write_bytes
    assert (row["traced_atomic_bytes"], row["traced_difference_bytes"], row["traced_share"]) == (0, 0, 1 / 64)
    assert row["counted_l2_read_bytes"] == model.read_bytes * 1001 // 1000
    assert row["l2_read_ratio"] == pytest.approx(1.001)
    assert row["l2_write_ratio"] == 1
    assert row["least_dram_read_bytes"] <= row["predicted_dram_read_bytes"] <= row["most_dram_read_bytes"]
    assert (row["not_counted"], row["not_traced"], row["band_missed"]) == (None, None, None)


def test_levels_outside_their_band_are_named_and_what_is_missing_says_why() -> None:
    right = synthetic.record("flash", 4096)
    total = right.counters["total"]
    lost = {**total, "dram_read_bytes": 9 * total["dram_read_bytes"], "spill_write_bytes": 10**9,
            "l2_write_bytes": total["l2_write_bytes"] + 10**9}  # fmt: skip
    (row,) = table.rows(built(replace(right, counters={"total": lost, "kernels": []}, trace=None)))
    assert (row["band_missed"], row["not_traced"], row["traced_read_bytes"]) == ("DRAM read", None, None)
    assert (row["l2_write_ratio"], row["counted_spill_write_bytes"]) == (1, 10**9)
    (row,) = table.rows(built(replace(right, counters={"reason": "no ncu"}, trace={"error": "E: no"})))
    assert (row["not_counted"], row["not_traced"]) == ("no ncu", "its kernels raise E: no")
    assert row["band_missed"] is row["predicted_l2_read_bytes"] is row["l2_read_ratio"] is None
    (row,) = table.rows(built(replace(right, counters={})))
    assert row["traced_read_bytes"] == row["predicted_l2_read_bytes"]
    assert row["predicted_dram_read_bytes"] is row["l2_read_ratio"] is None


def test_estimates_are_made_once_per_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    real = iomodel.estimate

    def counted(*arguments: Any, **options: Any) -> Any:
        calls.append(arguments)
        return real(*arguments, **options)

    monkeypatch.setattr(iomodel, "estimate", counted)
    files: list[RunFile] = [synthetic.run_file([synthetic.record()], path=f"{n}.jsonl") for n in range(5)]
    calls.clear()
    table.build(files)
    assert len(calls) == 1
