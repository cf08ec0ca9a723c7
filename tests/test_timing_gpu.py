"""On a card: the ways to time agree, graphs capture every pass, and what is recorded is there."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
import torch
from attention import problem

from flashbench import environment, profilers, runner
from flashbench._profilers import methods, timers
from flashbench._profilers.flush import Pause
from flashbench.problem import PASSES, Cell
from flashbench.profilers import measure_overheads, measure_time
from flashbench.record import Record
from flashbench.runner import RunOptions

pytestmark = pytest.mark.gpu

GPU = "cuda:0"
SHAPE = {"dtype": "bf16", "head_dim": 64, "head_dim_v": 64, "causal": False}
TINY = {**SHAPE, "batch": 1, "num_heads": 1, "num_kv_heads": 1, "seqlen_q": 128, "seqlen_k": 128}
LONG = {**SHAPE, "batch": 4, "num_heads": 16, "num_kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096}


def sweep(*cells: Cell, **options: Any) -> list[Record]:
    records: list[Record] = []
    target = environment.target(GPU)
    runner.run_cells(cells, target, RunOptions(environment={}, **options), records.append)
    assert all(record.status == "ok" for record in records), [record.reason for record in records]
    return records


def cells(shape: dict[str, Any], *names: str, pass_: str = "fwd") -> list[Cell]:
    return [Cell(implementation=name, problem=problem(**shape), pass_=pass_) for name in names]


def test_an_empty_kernel_costs_a_few_microseconds_by_every_method() -> None:
    found = measure_overheads(GPU, cupti=True)
    for name in ("events", "graph", "cupti"):
        for suffix in ("_s", "_cold_s"):
            time = found[name + suffix]
            assert time is not None
            assert 0 < time < 20e-6, name + suffix
    assert found["cupti_s"] < found["events_s"]  # type: ignore[operator]
    assert 5e-6 < found["flush_s"] < 1e-3  # type: ignore[operator]


@pytest.mark.parametrize("method", ["events", "graph", "cupti"])
def test_the_flush_leaks_into_no_method(method: str) -> None:
    """256 MiB of flush once turned a copy of 4 us into one of 60."""
    source, target = torch.zeros(256, device=GPU), torch.empty(256, device=GPU)

    def copy() -> None:
        target.copy_(source)

    cold, hot = (measure_time(copy, device=GPU, cache=cache, method=method) for cache in ("cold", "hot"))
    assert cold.samples.method == hot.samples.method == method
    assert cold.samples.median_s - hot.samples.median_s < 5e-6


def test_events_graph_and_kernel_time_agree_where_launching_is_no_limit() -> None:
    call = cells(LONG, "sdpa-flash")
    times = [sweep(*call, timing=method)[0].samples for method in ("events", "graph", "cupti")]
    assert [one.method for one in times if one] == ["events", "graph", "cupti"]
    medians = [one.median_s for one in times if one]
    assert medians[0] == pytest.approx(medians[2], rel=0.03)
    assert medians[1] == pytest.approx(medians[2], rel=0.03)


@pytest.mark.parametrize("pass_", PASSES)
def test_a_launch_bound_cell_is_timed_by_graph_all_implementations_alike(
    pass_: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("START_MOST_S", "LEAD_MOST_S"):
        monkeypatch.setattr(timers, name, 0.0)
    monkeypatch.setattr(methods, "Pause", lambda: Pause(1))
    group = cells(TINY, "naive", "sdpa-flash", "flash", pass_=pass_)
    events = {record.cell: record for record in sweep(*group, timing="events", cache="hot")}
    assert any("launch-bound" in record.flags for record in events.values())
    for record in sweep(*group, cache="hot"):
        assert record.samples is not None
        assert record.samples.method == "graph", record.timing.get("method_refused")
        before = events[record.cell].samples
        assert before is not None
        assert record.samples.median_s < before.median_s


@pytest.mark.parametrize("cache", ["cold", "hot"])
def test_the_hosts_time_of_a_short_call_is_not_in_it(cache: str) -> None:
    x = torch.zeros(2**20, device=GPU)

    def call(host_s: float) -> None:
        end = time.perf_counter() + host_s
        while time.perf_counter() < end:
            pass
        torch.cuda._sleep(20_000)
        x.add_(1)

    quick, slow, slower = (
        measure_time(lambda host_s=host_s: call(host_s), device=GPU, cache=cache, method="auto")  # type: ignore[misc]
        for host_s in (0.0, 60e-6, 400e-6)
    )
    assert quick.samples.method == slow.samples.method == "events"
    assert abs(slow.samples.median_s - quick.samples.median_s) < 2e-6
    assert slower.samples.method == "graph"  # else it were 400 us
    assert abs(slower.samples.median_s - quick.samples.median_s) < 3e-6


def test_graphs_of_one_cell_outlive_each_others_captures() -> None:
    """A capture gives unused memory back to the driver, where a graph without its call then read."""
    big = {**SHAPE, "batch": 16, "num_heads": 32, "num_kv_heads": 32, "seqlen_q": 1024, "seqlen_k": 1024}
    group = cells(big, "naive", "sdpa-cudnn", "flash", pass_="bwd")
    for record in sweep(*group, timing="graph"):
        assert record.samples is not None
        assert record.samples.method == "graph", record.timing.get("method_refused")


def test_a_call_that_cannot_be_captured_keeps_all_on_events() -> None:
    x = torch.zeros(16, device=GPU)

    def waits() -> None:
        x.add_(1).sum().item()

    timing = measure_time(waits, device=GPU, method="graph")
    assert timing.samples.method == "events"
    assert timing.how["method_refused"].startswith("graph: the call refuses it (")
    assert measure_time(lambda: x.add_(1), device=GPU, method="graph").samples.method == "graph"
    torch.cuda.empty_cache()
    assert torch.randn(3, device=GPU).isfinite().all()


@pytest.mark.parametrize("load", ["burst", "sustained"])
def test_every_round_has_its_clock_and_every_row_its_load(load: str) -> None:
    clocks = profilers.open_clocks(GPU)
    for record in sweep(*cells(LONG, "sdpa-flash", "flash"), load=load):
        assert record.samples is not None
        assert record.samples.load == load
        assert record.timing["schedule"] == "interleaved"
        assert sum(one["samples"] for one in record.timing["rounds"]) == len(record.samples.samples_s)
        if clocks is not None:
            assert all(one["sm_clock_mhz"] > 0 for one in record.timing["rounds"])
        assert len(record.timing["set_aside"]) <= 3
        json.dumps([record.timing, record.clocks, record.spent], allow_nan=False)
