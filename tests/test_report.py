"""The report's data, figures and page: what is shown is what the table holds, and nothing else."""

from __future__ import annotations

import html
import json
import math
import re
import time
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import child
import pandas as pd
import pytest
import synthetic

from flashbench import iomodel, report, runfile, table
from flashbench.record import Samples
from flashbench.report import data, figures, glance, summary, words
from flashbench.report import page as page_module
from flashbench.report.data import KEYS, Results
from flashbench.report.sections import SECTIONS

ROOT = Path(__file__).resolve().parent.parent

HOSTILE = "</script><script>alert(1)</script><img src=x onerror=alert(2)>&\"'<b>"
NAMES = {section.key: section for section in SECTIONS}
FIGURES = [section for section in SECTIONS if section.figure is not None]
DRAWN = [section for section in FIGURES if section.key not in ("energy", "timeline", "clocks")]
"""Those of the synthetic results, which hold no energy, kernels or clocks."""


def results(*files: Any) -> Results:
    return Results(table=table.build(files), headers=table.headers(files))


def page_of(*files: Any) -> str:
    shown = results(*files)
    return report.build(shown.table, shown.headers)


def test_a_page_of_cells_that_were_counted_alone_says_in_one_line_what_it_lacks() -> None:
    counted = ROOT / "reports" / "h100-sxm" / "counters" / "decode" / "results.jsonl"
    text = page_of(runfile.load(counted))
    (told,) = re.findall(r'id="without">([^<]*)<', text)
    assert told.startswith("No cell was timed. Without data: Who is fastest; Latency; Throughput; ")
    shown = set(re.findall(r'<section id="([\w-]+)"', text))
    assert {"joined", "cells"} < shown
    lacking = told.split(": ")[1].rstrip(".").split("; ")
    assert {section.title for section in SECTIONS if section.key not in shown} == set(lacking)
    assert set(re.findall(r'<a href="#([\w-]+)">', text)) <= shown


@pytest.fixture(scope="module")
def full() -> Results:
    return results(synthetic.run_file(synthetic.sweep()))


@pytest.fixture(scope="module")
def page(full: Results) -> str:
    return report.build(full.table, full.headers)


def drawn(section: Any, frame: pd.DataFrame) -> Any:
    """The section's figure as plotly.py has it, which checks every property."""
    return section.figure(frame).plotly()


def grid_of(body: str) -> dict[str, Any]:
    """The data of the first table that the script draws."""
    [text] = re.findall(r'class="grid-data">(.*?)</script>', body, re.DOTALL)
    found: dict[str, Any] = json.loads(text)
    return found


def grid_texts(body: str) -> list[dict[str, Any]]:
    """Its rows: a text, or a text with its mark and tooltip, by column."""
    grid = grid_of(body)
    names = [head["name"] for head in grid["head"]]
    rows = zip(*grid["columns"], strict=True)
    return [dict(zip(names, (grid["texts"][at] for at in row), strict=True)) for row in rows]


def without_library(page: str) -> str:
    """The page less plotly.js, which is full of addresses that it never asks for."""
    library = page_module.text(page_module.LIBRARY)
    assert page.count(library) == 1
    return page.replace(library, "")


# ---- data


@pytest.mark.parametrize("metric", ["time_s", "flops_per_s", "spread"])
def test_points_are_the_tables_values_of_timed_cells(full: Results, metric: str) -> None:
    found = data.points(metric)(full)
    timed = full.table["status"] == "ok"
    assert len(found) == len(full.table)
    assert list(found["value"][timed].dropna()) == list(full.table[metric][timed].dropna())
    assert found["value"][~timed].isna().all()


def test_an_interpreted_cell_is_never_performance() -> None:
    """Even if a row brought numbers along: only ``ok`` is plotted."""
    file = synthetic.run_file(
        [synthetic.record("naive"), synthetic.record("flash", status="checked", reason="interpreter")]
    )
    shown = results(file)
    shown.table.loc[1, ["time_s", "flops_per_s", "speedup_over_naive", "peak_extra_bytes"]] = 1.0
    for section in (
        NAMES[key] for key in ("latency", "throughput", "speedup", "memory", "roofline", "causal")
    ):
        found = section.data(shown)
        if "value" in found and len(found):
            assert found.loc[found["implementation"] == "flash", "value"].isna().all(), section.key
    assert set(summary.headline(shown)["implementation"].dropna()) <= {"naive"}
    assert summary.regimes(shown).empty


def test_filters_tell_panels_apart() -> None:
    file = synthetic.run_file([
        synthetic.record(),
        synthetic.record(pass_="bwd", causal=True, dtype="fp16", head_dim=192, head_dim_v=128),
        synthetic.record(seqlen_q=1, num_kv_heads=4),
        synthetic.record(num_kv_heads=1),
        synthetic.record(window=(512, 0), dropout_p=0.1),
    ])  # fmt: skip
    frame = data.labelled(results(file).table)
    assert frame[KEYS].to_numpy().tolist() == [
        ["fwd", "bf16", "128", "full", "none", "same", "MHA"],
        ["bwd", "fp16", "192/128", "causal", "none", "same", "MHA"],
        ["fwd", "bf16", "128", "full", "none", "1", "GQA 4:1"],
        ["fwd", "bf16", "128", "full", "none", "same", "MQA"],
        ["fwd", "bf16", "128", "full", "w512,0 dropout0.1", "same", "MHA"],
    ]


def test_series_carry_the_run_only_where_there_are_several(full: Results) -> None:
    assert set(data.labelled(full.table)["series"]) == set(synthetic.RATES)
    files = [synthetic.run_file([synthetic.record()], path=f"{name}.jsonl") for name in "ab"]
    assert list(data.labelled(results(*files).table)["series"]) == ["flash · a", "flash · b"]


def test_traffic_has_every_shown_model_at_every_length(full: Results) -> None:
    found = data.traffic(full)
    assert set(found["model"]) >= {"standard", "flash-v1", "flash-v2"}
    assert set(found["seqlen"]) == set(synthetic.LENGTHS)
    assert not found.duplicated([*KEYS, "model", "seqlen"]).any()
    assert (found["value"] >= found["compulsory"]).all()


def test_causal_ratio_is_of_the_same_implementation_and_shape(full: Results) -> None:
    found = data.causal_ratio(full)
    naive = found[found["implementation"] == "naive"]["value"]
    flash = found[(found["implementation"] == "flash") & (found["seqlen"] == 65536)]["value"]
    assert naive.to_list() == pytest.approx([1.0] * len(naive), abs=2e-3)  # the formula skips nothing
    assert flash.to_list() == pytest.approx([0.5] * len(flash), abs=1e-3)
    assert "mask" not in found


def test_model_trace_and_counters_of_each_level_side_by_side() -> None:
    right = synthetic.record("flash", 2048, "bwd")
    total = right.counters["total"]
    spilling = {**total, "spill_write_bytes": 5, "l2_write_bytes": total["l2_write_bytes"] + 5,
                "dram_write_bytes": 9 * total["dram_write_bytes"]}  # fmt: skip
    off = {**right.trace, "total": {**right.trace["total"], "read_bytes": total["l2_read_bytes"]}}
    wrong = replace(right, counters={"total": spilling, "kernels": []}, trace=off)
    frame = data.joined(results(synthetic.run_file([wrong])))
    assert list(frame["level"]) == ["L2 read", "L2 write", "DRAM read", "DRAM write", "spills"]
    assert list(frame["missed"]) == [False, False, False, True, False]
    rows = frame.set_index("level")
    read, write = rows.loc["L2 read"], rows.loc["L2 write"]
    assert read["traced"] == read["counted"] == total["l2_read_bytes"]
    assert read["difference"] == read["traced"] - read["predicted"] > 0
    assert (write["predicted"], write["traced"], write["difference"], write["counted"], write["ratio"]) == (
        *(total["l2_write_bytes"],) * 2, 0, total["l2_write_bytes"], 1,
    )  # fmt: skip
    assert (rows.loc["spills", "counted"], rows.loc["DRAM write", "ratio"]) == (5, 9)


def test_a_missed_band_is_marked_and_what_was_not_traced_says_why() -> None:
    def body(**changes: Any) -> str:
        section = NAMES["joined"]
        file = synthetic.run_file([replace(synthetic.record("flash", 2048), **changes)])
        return section.page(section, section.data(results(file)))

    right = synthetic.record("flash", 2048).counters

    def marks(column: str, **changes: Any) -> list[Any]:
        return [row[column] for row in grid_texts(body(**changes)) if row[column]]

    assert [mark[0] for mark in marks("band")] == ["met"] * 4
    assert marks("difference_bytes") == ["0 B"] * 2
    far = {**right, "total": {**right["total"], "dram_read_bytes": 10**12}}
    assert [mark[1] for mark in marks("band", counters=far)].count("status missed") == 1
    reason = "9 visits are too many <b>"
    skipped = marks("traced_bytes", trace={"reason": reason})
    assert skipped == [["skipped", "status skipped", reason]] * 2  # read and write, not DRAM
    assert "<b>" not in body(trace={"reason": reason})
    traced = {"counters": {"reason": "no ncu"}}
    assert marks("counted_bytes", **traced) == [["skipped", "status skipped", "no ncu"]] * 2
    assert marks("difference_bytes", **traced) == ["0 B"] * 2
    frame = data.joined(results(synthetic.run_file([synthetic.record(trace=None, counters={})])))
    assert frame.empty


def test_the_roofline_needs_a_known_device() -> None:
    unknown = synthetic.record(environment={"device_name": "NVIDIA Foo 9999"})
    assert NAMES["roofline"].data(results(synthetic.run_file([unknown], environment={}))).empty
    known = NAMES["roofline"].data(results(synthetic.run_file([synthetic.record()])))
    assert list(known["level"]) == ["compulsory", "dram", "requested"]


def test_untimed_groups_by_reason() -> None:
    records = [synthetic.record("naive", n, status="oom", reason="no room") for n in (4096, 1024)]
    records += [synthetic.record("naive", 8192, "bwd", status="oom", reason="no room")]
    records += [synthetic.record("flash", 1024, status="failed", reason="ValueError: x"), synthetic.record()]
    found = data.untimed(results(synthetic.run_file(records)))
    assert found[["implementation", "status", "reason", "cells"]].to_numpy().tolist() == [
        ["naive", "oom", "no room", 3], ["flash", "failed", "ValueError: x", 1],
    ]  # fmt: skip
    assert found["seqlens"][0] == [1024, 4096, 8192]
    assert found["passes"][0] == ["fwd", "bwd"]


def test_the_environment_is_flattened_and_empty_values_left_out() -> None:
    file = synthetic.run_file([], environment={"gpu": {"driver": "570.1", "power": None}, "torch": "2.13"})
    found = data.environment(results(file))
    assert dict(zip(found["item"], found["value"], strict=True)) == {
        "created_at": "2000-01-01T00:00:00+00:00",
        "argv": ["flashbench", "run", "--seqlens", "1k-64k"],
        "gpu.driver": "570.1", "torch": "2.13",
    }  # fmt: skip


# ---- summary


def test_headline_names_the_best_cells(full: Results) -> None:
    found = summary.headline(full).set_index("claim")
    assert found.loc["timed", ["value", "of"]].to_list() == [264, 280]
    assert found.loc["timed", "rest"] == {"skipped": 16}
    timed = full.table[full.table["status"] == "ok"]
    assert found.loc["flops_per_s", "value"] == timed["flops_per_s"].max()
    assert found.loc["flops_per_s", "implementation"] == "sdpa-cudnn"
    assert found.loc["speedup_over_naive", "value"] == timed["speedup_over_naive"].max()
    assert found.loc["memory_saving", "value"] > 100


def test_a_suspect_cell_makes_no_claim() -> None:
    records = [synthetic.record(name, n) for name in ("naive", "flash") for n in (1024, 2048)]
    honest = summary.headline(results(synthetic.run_file(records))).set_index("claim")
    records.append(synthetic.record("sdpa", 2048, flags=("suspect",)))
    doubted = results(synthetic.run_file(records))
    found = summary.headline(doubted).set_index("claim")
    assert found.loc["flops_per_s", "value"] == honest.loc["flops_per_s", "value"]
    assert "sdpa" not in set(summary.regimes(doubted)["fastest"])


def test_flags_are_counted_beside_the_statuses() -> None:
    records = [
        synthetic.record("flash", n, flags=flags)
        for n, flags in ((1024, ("drift",)), (2048, ("drift", "throttled")))
    ]
    records.append(synthetic.record("naive", 1024, status="oom", reason="no room"))
    found = summary.headline(results(synthetic.run_file(records))).set_index("claim")
    assert found.loc["timed", "rest"] == {"oom": 1, "flagged drift": 2, "flagged throttled": 1}


def test_regimes_say_who_wins_where_and_by_how_much() -> None:
    records = [synthetic.record(name, n) for n in (1024, 2048, 65536) for name in ("sdpa", "flash")]
    records += [synthetic.record("naive", n) for n in (1024, 2048)]
    shown = results(synthetic.run_file(records))
    found = summary.regimes(shown)
    assert len(found) == 1
    row = found.iloc[0]
    times = shown.table.pivot_table(index="seqlen_k", columns="implementation", values="time_s")
    assert (row["fastest"], row["next_best"]) == ("sdpa", "flash")
    assert (row["lengths_won"], row["lengths"], row["lead_seqlen"]) == (3, 3, 65536)
    assert row["lead"] == pytest.approx(times.loc[65536, "flash"] / times.loc[65536, "sdpa"])
    speedups = (times["naive"] / times["sdpa"]).dropna()
    assert row["speedup_low"] == pytest.approx(speedups.min())
    assert row["speedup_high"] == pytest.approx(speedups.max())


def timed(name: str, seqlen: int, time_s: float, backend: str | None = None, **problem: Any) -> Any:
    """A record with that median and an interquartile range of 4 %."""
    samples = tuple(time_s * factor for factor in (0.97, 0.98, 1.0, 1.02, 1.03))
    one = synthetic.record(name, seqlen, backend=backend, **problem)
    return replace(one, samples=replace(one.samples, samples_s=samples))


def test_who_is_level_with_the_fastest_changes_no_names() -> None:
    times = {
        "sdpa": (1.00, 2.02, 4.00, 8.0),
        "sdpa-cudnn": (1.01, 2.00, 4.01, 9.0),
        "flash": (1.5, 3.0, 6.0, 7.0),
    }
    records = [timed(name, 1024 << at, 1e-3 * value) for name, each in times.items()
               for at, value in enumerate(each)]  # fmt: skip
    [item] = summary.regimes(results(synthetic.run_file(records))).to_dict("records")
    assert item["spans"] == [("sdpa", 1024, 4096), ("flash", 8192, 8192)]
    assert item["level"] == [("sdpa-cudnn", [1024, 2048, 4096])]
    assert item["covers"] == {"sdpa": 3, "sdpa-cudnn": 3, "flash": 1}
    said = glance.paragraph(item, "{}".format)
    assert said.startswith(
        "fastest are sdpa from 1k to 4k (level with sdpa-cudnn at 1k, 2k, 4k) and flash at 8k; "
    )


def test_an_implementation_is_not_compared_with_the_kernel_that_it_ran() -> None:
    records = [timed(name, n, value * n * 1e-6, backend) for n in (1024, 2048) for name, value, backend in
               (("sdpa", 1.0, "cudnn"), ("sdpa-cudnn", 1.001, "cudnn"), ("flash", 1.3, None))]  # fmt: skip
    shown = results(synthetic.run_file(records))
    [item] = summary.regimes(shown).to_dict("records")
    assert (item["ran"], item["twins"], item["next_best"]) == ("cudnn", ["sdpa-cudnn"], "flash")
    assert item["lead"] == pytest.approx(1.3)
    assert "sdpa (backend cudnn, as sdpa-cudnn) reaches" in glance.paragraph(item, "{}".format)
    first = summary.headline(shown).iloc[0]
    assert (first["claim"], first["implementation"], first["value"], first["of"]) == ("fastest", "sdpa", 2, 2)
    assert first[["lead", "lead_low", "lead_high"]].tolist() == pytest.approx([1.3] * 3)


def test_where_nothing_was_timed_the_first_card_says_why() -> None:
    records = [synthetic.record("flash", n, status="failed", reason="no <b>driver</b>; and more")
               for n in (1024, 2048)]  # fmt: skip
    [(caption, value, detail)] = glance.claims(summary.headline(results(synthetic.run_file(records))))
    assert (caption, value) == ("cells timed", "0 of 2")
    assert detail == "2 failed; first of all: no &lt;b&gt;driver&lt;/b&gt;"


def test_problems_of_another_run_do_not_count_against_the_fastest() -> None:
    mine = [timed(name, 1024 << at, value, backend) for at in range(3)
            for name, value, backend in (("sdpa", 1.0, "cudnn"), ("flash", 1.5, None))]  # fmt: skip
    other = [timed("sdpa-cudnn", 1024, 1.0), timed("flash", 1024, 2.0)]
    first = synthetic.run_file(mine, path="a.jsonl")
    second = synthetic.run_file(other, path="b.jsonl")
    shown = results(first, second)
    found = summary.headline(shown).iloc[0]
    assert (found["implementation"], found["value"], found["of"], found["ran"]) == ("sdpa", 3, 3, "cudnn")
    said = [glance.paragraph(item) for item in summary.regimes(shown).to_dict("records")]
    assert "backend cudnn" in said[0]
    assert "backend" not in said[1]


def test_the_headline_says_where_memory_ends(full: Results) -> None:
    wall = summary.headline(full).set_index("claim").loc["memory_wall"]
    table = full.table[full.table["status"] == "skipped"]
    assert wall["value"] == table["seqlen_k"].min()
    [said] = [detail for caption, _, detail in glance.claims(summary.headline(full)) if "wall" in caption]
    assert said.startswith("naive at 32k, ")
    assert "needs " in said


def test_a_run_that_reached_no_cell_says_so() -> None:
    headers = {"run": {"cells": ["a", "b"]}}
    frame = table.build([synthetic.run_file([])])
    claim = summary.headline(Results(table=frame, headers=headers)).iloc[0]
    assert (claim["value"], claim["of"], claim["rest"]) == (0, 2, {"not reached": 2})


def test_a_length_with_one_timed_implementation_is_no_contest() -> None:
    records = [synthetic.record("flash", 1024), synthetic.record("sdpa", 2048)]
    assert summary.regimes(results(synthetic.run_file(records))).empty


# ---- figures


@pytest.mark.parametrize("section", DRAWN, ids=lambda section: section.key)
def test_figures_plot_the_values_of_their_data(full: Results, section: Any) -> None:
    frame = section.data(full)
    figure = drawn(section, frame)
    drawn_y = [y for trace in figure.data if trace.yaxis != "y2" for y in (trace.y or ()) if y is not None]
    found = {float(f"{y:.7g}") for y in drawn_y}
    factor = 1e12 if section.key in ("throughput", "roofline") else 1.0
    for value in frame["value"].dropna():
        assert float(f"{value / factor:.7g}") in found
    assert 0 not in found
    assert all(math.isfinite(value) for value in found)


def test_failed_cells_have_a_cross_at_their_length_and_no_value(full: Results) -> None:
    frame = data.points("time_s")(full)
    figure = drawn(NAMES["latency"], frame)
    lane = [trace for trace in figure.data if trace.yaxis == "y2"]
    assert len(lane) == 8  # naive, in each of 2 passes x 2 head dims x 2 masks
    for trace in lane:
        assert list(trace.x) == [32768, 65536]
        assert set(trace.marker.symbol) == {"x"}
        assert any(text.startswith("naive: memory wall at 32k, needs ") for text in trace.text)
        assert all("skipped: needs" in text for text in trace.customdata)
    lines = [trace for trace in figure.data if trace.yaxis != "y2" and trace.name == "naive"]
    assert all(trace.y[-2:] == (None, None) for trace in lines)


def test_checked_cells_are_marked_otherwise_than_failed_ones() -> None:
    records = [synthetic.record("naive", n) for n in (1024, 2048)]
    records += [synthetic.record("flash", n, status="checked", reason="interpreter") for n in (1024, 2048)]
    frame = data.points("time_s")(results(synthetic.run_file(records)))
    lane = [trace for trace in drawn(NAMES["latency"], frame).data if trace.yaxis == "y2"]
    assert [set(trace.marker.symbol) for trace in lane] == [{"circle-open"}]
    assert "flash: checked, not timed" in lane[0].text


def test_flagged_points_have_a_ring() -> None:
    records = [synthetic.record("flash", 1024), synthetic.record("flash", 2048, flags=("throttled",))]
    frame = data.points("time_s")(results(synthetic.run_file(records)))
    line, ring = drawn(NAMES["latency"], frame).data
    shown = results(synthetic.run_file(records)).table
    assert ["throttled" in words.cell_note(row) for row in shown.itertuples()] == [False, True]
    assert line.meta["cells"] == [0, 1]
    assert (list(ring.x), list(ring.y)) == ([2048], [line.y[1]])
    assert ring.legendgroup == line.legendgroup


def test_length_axis_is_labelled_at_the_measured_lengths(full: Results) -> None:
    axis = drawn(NAMES["latency"], data.points("time_s")(full)).layout.xaxis
    assert axis.type == "log"
    assert list(axis.tickvals) == list(synthetic.LENGTHS)
    assert list(axis.ticktext) == ["1k", "2k", "4k", "8k", "16k", "32k", "64k"]


def test_many_lengths_get_fewer_ticks_but_both_ends() -> None:
    lengths = range(1024, 65537, 1024)
    ticks = figures.length_ticks(lengths)
    assert len(ticks) <= 13
    assert {1024, 65536} <= set(ticks) <= set(lengths)
    assert figures.length_ticks([512, 3072]) == [512, 3072]


@pytest.mark.parametrize("values", [[4e-6], [4e-6, 3.0], [0.5, 0.9], [1e-6, 1e6], [float("nan"), 2.0]])
def test_value_ticks_enclose_the_values(values: list[float]) -> None:
    ticks = figures.value_ticks(values)
    known = [value for value in values if value == value]
    assert ticks == sorted(ticks)
    assert ticks[0] <= min(known)
    assert ticks[-1] >= max(known)
    assert len(ticks) <= 20


def test_a_series_looks_the_same_in_every_figure(full: Results) -> None:
    looks = [
        figures.styles(NAMES[key].data(full))
        for key in ("latency", "speedup", "memory", "causal", "roofline")
    ]
    assert all(look == looks[0] for look in looks)
    assert len({style.symbol for style in looks[0].values()}) == len(looks[0])
    assert len({style.slot for style in looks[0].values()}) == len(looks[0])
    assert (looks[0]["naive"].slot, looks[0]["flash"].slot) == (0, 1)


def test_runs_differ_by_dash_not_by_colour() -> None:
    files = [synthetic.run_file([synthetic.record()], path=f"{name}.jsonl") for name in "ab"]
    first, second = figures.styles(data.points("time_s")(results(*files))).values()
    assert (first.slot, first.symbol) == (second.slot, second.symbol)
    assert first.dash != second.dash


def relative_luminance(colour: str) -> float:
    channels = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


@pytest.mark.parametrize(("palette", "ground"), [(figures.LIGHT, "#ffffff"), (figures.DARK, "#171d26")])
def test_colours_stand_out_from_the_page(palette: tuple[str, ...], ground: str) -> None:
    for colour in palette:
        high, low = sorted((relative_luminance(colour), relative_luminance(ground)), reverse=True)
        assert (high + 0.05) / (low + 0.05) >= 3, colour


# ---- words


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (words.seconds(4.3e-6), "4.30 µs"),
        (words.seconds_tick(2e-4), "200 µs"),
        (words.seconds_tick(1e-3), "1 ms"),
        (words.bytes_tick(5e7), "50 MB"),
        (words.bytes_tick(1e12), "1 TB"),
        (words.rate(6.5e14), "650 TFLOP/s"),
        (words.times(12.64), "12.6×"),
        (words.times(3), "3×"),
        (words.times(4321.0), "4321×"),
        (words.percent(0.62), "62 %"),
        (words.short_reason("needs 275 GB; the device has 85 GB"), "needs 275 GB"),
        (
            words.panel({"pass": "fwd", "dims": "128", "mask": "full", "kv": "MHA"}),
            "forward, head dim 128, non-causal",
        ),
        (words.panel({"pass": "bwd", "queries": "1", "kv": "GQA 4:1"}), "backward, 1 queries, GQA 4:1"),
    ],
)
def test_words(text: str, expected: str) -> None:
    assert text == expected


# ---- page


class Outline(HTMLParser):
    """Every element with its attributes, and the text of the tables' bodies."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))


def test_the_page_asks_for_nothing_outside(page: str) -> None:
    rest = without_library(page)
    assert not re.search(r"https?://|//cdn|@import|url\(", rest)
    for tag, attributes in Outline(rest).elements:
        assert tag not in {"img", "iframe", "object", "embed", "base"}
        for name in ("src", "href", "action", "srcset"):
            target = attributes.get(name)
            assert target is None or target.startswith("#") or target == "data:,", (tag, target)
    policy = next(a["content"] for t, a in Outline(rest).elements if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'")


def test_the_page_stays_under_6_mb(page: str) -> None:
    assert len(page.encode()) < 6e6


def test_every_section_is_there_and_in_the_contents(page: str) -> None:
    elements = Outline(without_library(page)).elements
    ids = [attributes["id"] for tag, attributes in elements if tag == "section"]
    links = [attributes["href"] for tag, attributes in elements if tag == "a" and "class" not in attributes]
    anchors = [attributes["href"] for _, attributes in elements if attributes.get("class") == "anchor"]
    assert anchors == links
    assert ids == [section.key for section in SECTIONS]
    assert links == [f"#{key}" for key in ids]


def test_every_figure_has_a_text_alternative_and_its_numbers(page: str) -> None:
    elements = Outline(without_library(page)).elements
    plots = [attributes for _, attributes in elements if attributes.get("class") == "plot"]
    assert len(plots) == len(DRAWN)
    assert all(attributes["role"] == "group" and attributes["aria-label"] for attributes in plots)
    assert sum(attributes.get("class") == "numbers" for _, attributes in elements) == len(DRAWN)


def test_figures_in_the_page_are_strict_json(page: str) -> None:
    found = re.findall(
        r'<script type="application/json" class="plot-data"[^>]*>(.*?)</script>',
        without_library(page),
        re.DOTALL,
    )
    assert len(found) == len(DRAWN)

    def refuse(text: str) -> None:
        raise AssertionError(text)

    for text in found:
        figure = json.loads(text, parse_constant=refuse)
        assert all("slot" in trace["meta"] for trace in figure["shared"])
        for shared, where, x, y, *_ in figure["traces"]:
            assert shared < len(figure["shared"])
            assert where < len(figure["wheres"])
            assert len(figure["xs"][x]) == len(y)
            assert isinstance(y, list)


def test_reasons_and_the_exact_command_are_in_the_page(page: str) -> None:
    rest = without_library(page)
    assert "needs 275 GB; the device has 85 GB" in rest
    assert "<code>flashbench run --seqlens 1k-64k</code>" in rest
    assert "synthetic: made by tests/synthetic.py, never measured" in rest


def test_hostile_text_stays_text() -> None:
    record = synthetic.record(
        "naive", 1024, status="failed", reason=HOSTILE, backend=HOSTILE, config={HOSTILE: HOSTILE},
        environment={"device_name": HOSTILE},
    )  # fmt: skip
    timed = synthetic.record("flash", 1024, backend=HOSTILE, environment={"device_name": HOSTILE})
    files = [
        synthetic.run_file(
            [record, timed],
            path=f"{name}/<i>{HOSTILE.replace('/', '')}.jsonl",
            argv=["x", HOSTILE],
            environment={HOSTILE: HOSTILE, "device_name": HOSTILE},
        )
        for name in "ab"
    ]
    rest = without_library(page_of(*files))
    elements = Outline(rest).elements
    assert not [tag for tag, _ in elements if tag in {"img", "i"}]
    assert not [name for _, attributes in elements for name in attributes if name.startswith("on")]
    # figures, tables, notes, plotly.js, our own script: as many scripts as without the attack
    data_scripts = rest.count('class="plot-data"') + rest.count('class="grid-data"')
    assert sum(tag == "script" for tag, _ in elements) == data_scripts + 3
    assert "alert(1)" in rest
    pattern = r'<script type="application/json" (?:class="plot-data"|id="cell-notes")[^>]*>(.*?)</script>'
    found = re.findall(pattern, rest, re.DOTALL)
    assert len(found) > 3
    for text in found:
        figure = json.loads(text)
        figure.pop("wheres", None)  # these are compared, never drawn
        for shared in figure.get("shared", ()):
            shared["meta"].pop("run", None)
        assert "<b>" not in json.dumps(figure)


def test_figure_json_cannot_end_its_script_whatever_the_figure_library_writes() -> None:
    class Figure:
        def to_json(self) -> str:
            return json.dumps({"name": HOSTILE})

    text = page_module.script_json(Figure())
    assert "<" not in text
    assert json.loads(text) == {"name": HOSTILE}


def test_an_empty_file_makes_a_page_that_says_so() -> None:
    rest = without_library(page_of(synthetic.run_file([])))
    assert rest.count("The results hold no cell.") == 1  # not once a section
    [told] = re.findall(r'id="without">(.*?)</p>', rest)
    expected = "; ".join(section.title for section in SECTIONS if section.key != "environment")
    assert html.unescape(told) == f"The results hold no cell. Without data: {expected}."
    assert 'class="plot"' not in rest


@pytest.mark.parametrize(("device_type", "said"), [("cpu", True), ("cuda", False)])
def test_a_page_of_cpu_times_says_so_at_the_top(device_type: str, said: bool) -> None:
    rest = page_of(synthetic.run_file([synthetic.record()], environment={"device_type": device_type}))
    assert ("Times of a CPU say nothing about a GPU." in rest) == said


def test_sections_without_data_say_why() -> None:
    """A CPU run: the interpreter's cells are checked, memory and roofs are unknown."""
    records = [synthetic.record("flash", n, status="checked", reason="interpreter", io_model=None,
                                environment={"device_name": "Some CPU"}) for n in (64, 128)]  # fmt: skip
    rest = without_library(page_of(synthetic.run_file(records, environment={"device_name": "Some CPU"})))
    for key in ("fastest", "latency", "throughput", "speedup", "memory", "roofline", "causal"):
        assert NAMES[key].empty in rest, key
    assert "<strong>0 of 2</strong>" in rest
    assert "2 checked" in rest


def test_a_page_for_300_cells_takes_under_3_seconds() -> None:
    file = synthetic.run_file(
        synthetic.sweep(passes=("fwd", "bwd", "fwd+bwd"), lengths=synthetic.LENGTHS[:5])
    )
    assert len(file.records) == 300
    frame = table.build([file])
    started = time.process_time()
    report.build(frame, table.headers([file]))
    assert (time.process_time() - started) / child.pace() < 3


def test_the_data_of_every_section_is_a_frame(full: Results) -> None:
    for section in SECTIONS:
        assert isinstance(section.data(full), pd.DataFrame), section.key
        assert section.empty
        assert section.title


@pytest.mark.parametrize(
    ("records", "said"),
    [
        ([synthetic.record()], "<strong>1 of 1</strong>"),
        ([synthetic.record("naive", status="oom", reason="no room")], "No cell was timed."),
        ([synthetic.record(memory=None, io_model=None)], "Memory was not measured"),
        ([synthetic.record(counters={}, trace=None)], "run --counters"),
        ([synthetic.record(samples=Samples(samples_s=(1e-3,), cache="cold", method="events"))], "1.00 ms"),
    ],
    ids=["one cell", "failures alone", "without memory", "without counters", "one sample"],
)
def test_poor_files_make_a_useful_page(records: list[Any], said: str) -> None:
    file = synthetic.run_file(records)
    rest = without_library(page_of(file))
    assert said in rest
    for section in SECTIONS:
        if section.data(results(file)).empty:
            assert rest.count(f'<section id="{section.key}">') == 1
    assert "NaN" not in re.sub(r"<script>.*?</script>", "", rest, flags=re.DOTALL)


def test_numbers_that_are_none_leave_gaps_and_no_nan(full: Results) -> None:
    frame = full.table.copy()
    frame.loc[frame.index[::3], ["time_s", "flops_per_s", "spread", "peak_extra_bytes"]] = math.nan
    rest = without_library(report.build(frame, full.headers))
    found = re.findall(r'<script type="application/json"[^>]*>(.*?)</script>', rest, re.DOTALL)
    for text in found:
        json.loads(text, parse_constant=pytest.fail)


@pytest.mark.parametrize("name", ["results.jsonl", "family/results.jsonl", "energy/results.jsonl"])
def test_committed_results_of_older_schemas_make_a_page(name: str) -> None:
    file = runfile.load(str(Path(__file__).parent.parent / "reports" / "h100-sxm" / name))
    rest = without_library(page_of(file))
    timed = sum(record.status == "ok" for record in file.records)
    assert f"<strong>{timed} of {len(file.records)}</strong>" in rest


def test_the_table_of_cells_holds_the_tables_values(full: Results) -> None:
    section = NAMES["cells"]
    body = section.page(section, section.data(full))
    grid = grid_of(body)
    names = [head["name"] for head in grid["head"]]
    assert "options" not in names  # no cell has one: the column is left out
    for name in ("time_s", "flops_per_s", "peak_extra_bytes", "seqlen_k"):
        values = [math.nan if value is None else value for value in grid["values"][names.index(name)]]
        expected = full.table[name].astype("float64").tolist()
        assert values == pytest.approx(expected, rel=1e-6, nan_ok=True), name
    assert [row["status"][0] for row in grid_texts(body)] == full.table["status"].tolist()
    assert [grid["wheres"][at]["pass"] for at in grid["where"]] == full.table["pass"].tolist()


def test_bytes_by_tensor_add_up_to_the_model() -> None:
    shown = results(synthetic.run_file([synthetic.record("flash", n, "bwd") for n in (1024, 2048)]))
    frame = NAMES["tensors"].data(shown)
    assert set(frame["seqlen"]) == {2048}
    for model, rows in frame.groupby("model"):
        estimate = iomodel.estimate(str(model), synthetic.problem(2048), "bwd")
        assert rows[["read", "write", "atomic"]].sum().sum() == estimate.requested.total_bytes, model
    assert {"q", "k", "v", "do"} <= {str(name).lower() for name in frame["tensor"]}
