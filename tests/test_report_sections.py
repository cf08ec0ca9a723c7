"""Sections whose data come from more than the rows: roofs, kernels of a call, bytes over memory and block."""

from __future__ import annotations

import json
import re
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import synthetic

from flashbench import ceilings, devices, iomodel, report, runfile, table
from flashbench._cli.report import results_of
from flashbench.errors import RunFileError
from flashbench.report import onchip, roofline, timelines
from flashbench.report.data import Results
from flashbench.report.sections import SECTIONS

REPORTS = Path(__file__).parent.parent / "reports" / "h100-sxm"
NAMES = {section.key: section for section in SECTIONS}
HOSTILE = "</script><img src=x onerror=alert(1)>"


def results(*records: Any, **header: Any) -> Results:
    file = synthetic.run_file(records, **header)
    return Results(table=table.build([file]), headers=table.headers([file]), ceilings=table.ceilings([file]))


@pytest.fixture(scope="module")
def measured() -> ceilings.Ceilings:
    return ceilings.load(REPORTS / "ceilings.json")


# ---- every metric over the length, from the raw samples


@pytest.fixture(scope="module")
def grid() -> list[Any]:
    records = [
        replace(one, energy={"joules_per_call": 7.0 + at}, timing={"rounds": [{"sm_clock_mhz": 1000.0 + at}]})
        for at, one in enumerate(synthetic.sweep(lengths=(1024, 32768), head_dims=(64,)))
    ]
    assert {one.status for one in records} == {"ok", "skipped"}
    return records


def expected(section: str, one: Any, others: dict[tuple[Any, ...], Any]) -> float | None:
    """What the section shows of a record, computed from its samples and counters."""
    cell, problem = one.cell, one.cell.problem
    pairs = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    pairs = pairs // 2 + pairs // (2 * problem.seqlen_q) if problem.causal else pairs
    flops = pairs * problem.head_dim * (4 if cell.pass_ == "fwd" else 10)
    time_s = statistics.median(one.samples.samples_s)

    def over(implementation: str, causal: bool, pass_: str) -> float | None:
        other = others.get((implementation, problem.seqlen_q, causal, pass_))
        return statistics.median(other.samples.samples_s) if other else None

    name, causal, pass_ = cell.implementation, problem.causal, cell.pass_
    naive, full, forward = over("naive", causal, pass_), over(name, False, pass_), over(name, causal, "fwd")
    low, _, high = statistics.quantiles(one.samples.samples_s, method="inclusive")
    total = one.counters["total"]
    model = iomodel.estimate(one.io_model, problem, pass_)
    alone = sum(kernel.read.value for kernel in iomodel.kernels_alone(model, devices.find("h100-sxm")))
    joules = one.energy["joules_per_call"]
    return {
        "latency": time_s, "throughput": flops / time_s, "speedup": naive / time_s if naive else None,
        "memory": float(one.memory.peak_extra_bytes), "energy": joules / (flops / 1e12),
        "stability": (high - low) / time_s, "clocks": one.timing["rounds"][0]["sm_clock_mhz"] * 1e6,
        "split": time_s / forward if pass_ == "bwd" else None, "causal": time_s / full if causal else None,
        "l2": total["l2_read_bytes"] / model.requested.read_bytes, "dram": total["dram_read_bytes"] / alone,
    }[section]  # fmt: skip


@pytest.mark.parametrize(
    "section",
    ["latency", "throughput", "speedup", "memory", "energy", "stability", "clocks", "split", "causal", "l2",
     "dram"],
)  # fmt: skip
def test_a_section_shows_what_follows_from_the_raw_samples(grid: list[Any], section: str) -> None:
    timed = {
        (one.cell.implementation, one.cell.problem.seqlen_q, one.cell.problem.causal, one.cell.pass_): one
        for one in grid if one.status == "ok"
    }  # fmt: skip
    frame = NAMES[section].data(results(*grid))
    shown = {row.cell: row.value for row in frame.itertuples() if row.value == row.value}
    fused = {at for at, one in enumerate(grid) if one.io_model != "standard"}  # torch's copies are its own
    wanted = {
        at: value for at, one in enumerate(grid)
        if one.status == "ok" and (value := expected(section, one, timed)) is not None
        and (at in fused or section not in ("l2", "dram"))
    }  # fmt: skip
    if section in ("l2", "dram"):
        shown = {at: value for at, value in shown.items() if at in fused}
    assert len(wanted) >= len(timed) // 2 - 4
    assert shown == pytest.approx(wanted, rel=1e-6)


# ---- roofline


def test_each_level_has_its_own_intensity_and_roof(measured: ceilings.Ceilings) -> None:
    one = synthetic.record("flash", 4096)
    frame = roofline.data(results(one, calibration=measured.document())).set_index("level")
    flops = iomodel.flops(one.cell.problem, "fwd")
    total, estimate = one.counters["total"], iomodel.estimate("flash-v2", one.cell.problem, "fwd")
    moved = {
        "compulsory": iomodel.compulsory(one.cell.problem, "fwd").total_bytes,
        "dram": total["dram_read_bytes"] + total["dram_write_bytes"],
        "requested": estimate.requested.total_bytes,
    }
    card = devices.find("h100-sxm")
    rates = dict.fromkeys(("compulsory", "dram"), (card.hbm_bytes_per_s, measured.read_bytes_per_s))
    rates["requested"] = (card.l2_bytes_per_s or 32 * card.num_sms * card.clock_hz, measured.l2_bytes_per_s)
    rate = flops / one.samples.median_s
    for level, count in moved.items():
        row = frame.loc[level]
        assert row["value"] == pytest.approx(rate)
        assert row["intensity"] == pytest.approx(flops / count)
        assert row["roof_bytes_per_s"] == pytest.approx(rates[level][0], rel=1e-6), level
        assert row["measured_bytes_per_s"] == pytest.approx(rates[level][1]), level
        roof = min(measured.flops_per_s["bf16"], flops / count * rates[level][1])
        assert row["measured_fraction"] == pytest.approx(rate / roof), level
    assert list(frame["counted"]) == [False, True, False]


def test_measured_roofs_are_dashed_beside_those_of_the_data_sheet(measured: ceilings.Ceilings) -> None:
    records = [synthetic.record(name, n) for n in (1024, 4096) for name in ("naive", "flash")]

    def roofs(shown: Results) -> dict[str, Any]:
        figure = roofline.figure(roofline.data(shown)).plotly()
        return {f"{t.line.dash} {t.meta['where']['level']}": t for t in figure.data if "roof, " in t.name}

    levels = ("compulsory", "dram", "requested")
    plain = roofs(results(*records))
    assert set(plain) == {f"solid {level}" for level in levels}
    both = roofs(results(*records, calibration=measured.document()))
    assert set(both) == {f"{dash} {level}" for dash in ("solid", "dash") for level in levels}
    assert max(both["dash dram"].y) * 1e12 == pytest.approx(measured.flops_per_s["bf16"], rel=1e-6)


def test_ceilings_are_of_the_card_that_the_run_names(measured: ceilings.Ceilings) -> None:
    ours = synthetic.run_file([synthetic.record()])
    other = synthetic.run_file([], path="b.jsonl", environment={"device_name": "NVIDIA L4"})
    broken = synthetic.run_file([], path="c.jsonl", calibration={"type": HOSTILE})
    assert table.ceilings([ours, other, broken]) == {}
    assert table.ceilings([ours, other], [measured]) == {"synthetic": measured}
    kept = ceilings.parse(measured.document(), "here")
    assert kept.flops_per_s == measured.flops_per_s
    assert kept.copy_bytes_per_s == measured.copy_bytes_per_s


# ---- files that are not whole


def test_a_run_that_was_stopped_makes_a_page_that_counts_what_is_left(tmp_path: Path) -> None:
    """Of the schema before, its last line torn off."""
    records = [synthetic.record(name, 1024) for name in ("naive", "flash")]
    planned = [one.cell for one in records] + [synthetic.record("flash", 65536).cell]
    path = tmp_path / "results.jsonl"
    head = runfile.header(argv=["flashbench", "run"], options={}, environment={}, cells=planned)
    with runfile.create(path, {**head, "schema": runfile.SCHEMA - 1}) as writer:
        for one in records:
            writer.append(one)
    with path.open("ab") as file:
        file.write(b'{"type":"record","key":"fla')
    shown = results_of([runfile.load(path)])
    claim = NAMES["summary"].data(shown).set_index("claim").loc["timed"]
    assert (claim["value"], claim["of"], claim["rest"]) == (2, 3, {"not reached": 1})
    page = report.of(shown)
    assert "<strong>2 of 3</strong>" in page
    assert "1 not reached" in page


# ---- kernels of a call


def recorded(cell: str, *kernels: tuple[str, float]) -> dict[str, Any]:
    return {"cell": cell, "gap_s": 1e-6, "kernels": [
        {"kernel": name, "start_s": 0.0, "duration_s": duration} for name, duration in kernels
    ]}  # fmt: skip


def test_shares_of_kernels_add_up_and_keep_their_order(tmp_path: Path) -> None:
    one = synthetic.record("naive", 1024)
    path, mul = tmp_path / "t.json", "void mul<float>(int)"
    path.write_text(json.dumps([
        recorded(one.cell.key, (mul, 1e-6), (HOSTILE, 2e-6), (mul, 1e-6)),
        {"cell": "another one", "reason": "no room"}, recorded("a cell of another run", ("x", 1.0)),
    ]))  # fmt: skip
    file = synthetic.run_file([one, synthetic.record("flash", 1024)])
    shown = Results(
        table=table.build([file]), headers=table.headers([file]), timelines=timelines.load(str(path))
    )
    frame = NAMES["timeline"].data(shown)
    assert frame[["implementation", "kernel", "launches", "value"]].to_numpy().tolist() == [
        ["naive", "void mul<float>(int)", 2, 0.5], ["naive", HOSTILE, 1, 0.5],
    ]  # fmt: skip
    bars = timelines.figure(frame).plotly().data
    assert [bar.x for bar in bars] == [(0.5,), (0.5,)]
    assert bars[0].text == ("mul",)
    page = report.of(shown)
    assert "<img" not in page
    assert "Kernels of a call" in page


def test_the_committed_timeline_belongs_to_the_committed_results() -> None:
    file = runfile.load(REPORTS / "results.jsonl")
    shown = Results(
        table=table.build([file]), headers=table.headers([file]),
        timelines=timelines.load(str(REPORTS / "timeline.json")),
    )  # fmt: skip
    frame = timelines.data(shown)
    assert frame["cell"].nunique() > 10
    assert frame.groupby("cell")["value"].sum().to_list() == pytest.approx([1.0] * frame["cell"].nunique())


@pytest.mark.parametrize("text", ["", "{}", "[1]", '[{"cell": 1}]', '[{"cell": "x", "kernels": [{}]}]'])
def test_what_is_no_timeline_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(RunFileError, match="accepted: what 'flashbench profile --timeline --json' prints"):
        timelines.load(str(path))


@pytest.mark.parametrize(
    ("name", "short"),
    [
        ("void at::native::vectorized_kernel<8, Mul<float> >(int)", "vectorized_kernel"),
        ("void (anonymous namespace)::softmax_warp_forward<float, 10>(float*, int)", "softmax_warp_forward"),
        ("Memset (Device)", "Memset"),
        ("forward", "forward"),
        ("", ""),
    ],
)  # fmt: skip
def test_names_of_kernels_are_short(name: str, short: str) -> None:
    assert timelines.short(name) == short


# ---- bytes over memory and block


def test_bytes_over_memory_and_block_are_the_models_at_the_longest_length() -> None:
    shown = results(*(synthetic.record("flash", n, "bwd") for n in (1024, 2048)))
    problem = synthetic.problem(2048)
    by_memory, by_block = onchip.by_memory(shown), onchip.by_block(shown)
    assert set(by_memory["seqlen"]) == set(by_block["seqlen"]) == {2048}
    assert set(by_memory["smem_bytes"]) == {devices.find("h100-sxm").smem_per_sm_bytes}
    for row in by_memory.itertuples():
        estimate = iomodel.estimate(row.model, problem, "bwd", sram_bytes=row.x)
        assert row.value == estimate.requested.total_bytes, (row.model, row.x)
    for row in by_block.itertuples():
        tiles = {"block_q": row.x, "block_k": row.x}
        assert row.value == iomodel.estimate(row.model, problem, "bwd", tiles=tiles).requested.total_bytes
    lines = {trace.name: trace for trace in onchip.memory_figure(by_memory).plotly().data}
    assert set(lines["shared memory of one SM, 228 KiB"].x) == {228 * 1024}
    assert lines["flash-v2"].marker.symbol == "star"  # all fit
    first = by_memory.assign(fits=by_memory["x"] > by_memory["x"].min())
    [two] = [trace for trace in onchip.memory_figure(first).plotly().data if trace.name == "flash-v2"]
    assert [symbol.endswith("-open") for symbol in two.marker.symbol] == [True] + [False] * (len(two.x) - 1)


def test_figures_of_every_level_have_their_own_file(tmp_path: Path) -> None:
    from flashbench.report import export

    shown = results(*(synthetic.record("flash", n) for n in (1024, 2048)))
    paths = export.write(shown, tmp_path, formats=(), names=["roofline"], style="paper")
    names = sorted(path.name for path in paths if path.suffix == ".csv")
    assert names == [
        f"roofline-fwd-bf16-128-full{level}.csv" for level in ("-dram", "-requested", "")
    ]  # fmt: skip
    for path in paths:
        if path.suffix == ".csv":
            assert len(re.findall("\n", path.read_text())) == 3
