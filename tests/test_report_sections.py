"""Sections whose data come from more than the rows: roofs, kernels of a call, bytes over memory and block."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import synthetic

from flashbench import ceilings, devices, iomodel, report, table
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
    from flashbench import runfile

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
