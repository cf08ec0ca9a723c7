"""The report as Markdown, in a terminal, in a notebook and as single figures."""

from __future__ import annotations

import csv
import html
import json
import re
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import synthetic

from flashbench import report, runfile, table
from flashbench._cli.report import results_of
from flashbench.api import Results as ApiResults
from flashbench.errors import UnavailableError, UnknownName, UsageError
from flashbench.report import data, export, glance, summary, text, words
from flashbench.report.data import KEYS, Results
from flashbench.report.sections import SECTIONS

HOSTILE = "<img src=x onerror=alert(1)>|`"
NAMES = {section.key: section for section in SECTIONS}


def results(*files: Any) -> Results:
    return Results(table=table.build(files), headers=table.headers(files))


@pytest.fixture(scope="module")
def small() -> Results:
    return results(synthetic.run_file(synthetic.sweep(lengths=(1024, 2048, 32768), passes=("fwd",))))


def test_a_paragraph_says_who_wins_where_by_how_much_and_what_has_no_time(small: Results) -> None:
    items = summary.regimes(small).to_dict("records")
    [item] = [item for item in items if (item["dims"], item["mask"]) == ("128", "full")]
    times = small.table[(small.table["head_dim"] == 128) & ~small.table["causal"]]
    at = times.pivot_table(index="seqlen_k", columns="implementation", values="time_s")
    spread = times.pivot_table(index="seqlen_k", columns="implementation", values="spread")
    assert item["spans"] == [("sdpa-cudnn", 1024, 32768)]
    assert item["lead"] == pytest.approx(at.loc[32768, "sdpa"] / at.loc[32768, "sdpa-cudnn"])
    two = [spread.loc[32768, name] for name in ("sdpa", "sdpa-cudnn")]
    assert item["lead_spread"] == pytest.approx((two[0] ** 2 + two[1] ** 2) ** 0.5 / 2)
    memory = times.pivot_table(index="seqlen_k", columns="implementation", values="peak_extra_bytes")
    assert item["memory_seqlen"] == 2048
    assert item["memory_ratio"] == pytest.approx(memory.loc[2048, "naive"] / memory.loc[2048, "sdpa-cudnn"])
    assert [one[:3] for one in item["untimed"]] == [("naive", "skipped", [32768])]
    said = glance.paragraph(item, "{}".format)
    assert said.startswith("fastest is sdpa-cudnn from 1k to 32k; sdpa-cudnn reaches ")
    assert "naive has no time at 32k: skipped, needs " in said
    assert f"{words.times(item['memory_ratio'])} less extra memory than naive at 2k" in said


def test_a_lead_within_the_spread_is_level() -> None:
    records = [synthetic.record(name, n) for n in (1024, 2048) for name in ("sdpa", "sdpa-cudnn")]
    [item] = summary.regimes(results(synthetic.run_file(records))).to_dict("records")
    assert item["lead"] - 1 > item["lead_spread"]
    assert "level with" not in glance.paragraph(item)
    assert "is level with" in glance.paragraph({**item, "lead_spread": 0.5})


@pytest.mark.parametrize("baseline", [None, "flash"])
def test_speedups_over_any_baseline(small: Results, baseline: str | None) -> None:
    found = data.speedup(small, baseline)
    keys = ["seqlen_k", "head_dim", "causal", "pass"]
    of = small.table[small.table["implementation"] == (baseline or "naive")].set_index(keys)["time_s"]
    expected = [of[tuple(row[key] for key in keys)] / row["time_s"] for row in small.table.to_dict("records")]
    assert found["value"].tolist() == pytest.approx(expected, nan_ok=True)


def test_the_backward_over_the_forward() -> None:
    shown = results(synthetic.run_file(synthetic.sweep(lengths=(1024,))))
    found = data.backward_ratio(shown)
    times = shown.table.pivot_table(
        index=["implementation", "head_dim", "causal"], columns="pass", values="time_s"
    )
    expected = sorted(times["bwd"] / times["fwd"])
    assert sorted(found["value"]) == pytest.approx(expected)
    assert "pass" not in found


def test_markdown_has_every_time_and_the_command(small: Results) -> None:
    lines = text.markdown(small)
    assert lines[0] == "## Attention on NVIDIA H100 80GB HBM3"
    body = "\n".join(lines)
    for time_s in small.table["time_s"].dropna():
        assert f" {words.seconds(time_s)} |" in body
    assert body.count("| skipped |") == 4
    assert lines[-1] == "Made by `flashbench run --seqlens 1k-64k`."


def test_names_cannot_break_out_of_markdown_or_a_notebook() -> None:
    records = [synthetic.record("naive", 1024, status="failed", reason=HOSTILE)]
    records += [synthetic.record(name, 1024, backend=HOSTILE) for name in ("flash", "sdpa")]
    file = synthetic.run_file(records, argv=[HOSTILE], environment={"device_name": HOSTILE})
    assert "<img" not in "\n".join(line for line in text.markdown(results(file)) if "Made by" not in line)
    shown = ApiResults(file=file)._repr_html_()
    assert "<img" not in shown
    assert "&lt;img" in shown


def test_a_notebook_shows_bars_and_times(small: Results) -> None:
    file = synthetic.run_file(synthetic.sweep(lengths=(1024,), passes=("fwd",)))
    shown = ApiResults(file=file)._repr_html_()
    assert shown.count("<svg") == shown.count("<table") == 4
    for time_s in table.build([file])["time_s"]:
        assert words.seconds(time_s) in shown
    assert "<script" not in shown
    assert ApiResults(file=synthetic.run_file([]))._repr_html_() == "<p>The results hold no cell.</p>"


def test_the_terminal_fits_80_columns(small: Results) -> None:
    pytest.importorskip("plotext", reason="plotext is not installed (flashbench[terminal])")
    lines = text.terminal(small, width=80)
    assert max(map(len, lines)) <= 80
    assert sum("TFLOP/s: forward" in line for line in lines) == 4
    assert "\x1b" not in "".join(lines)


REPORTS = Path(__file__).parent.parent / "reports"
TABLES = {
    "blocks": "h200-sxm/block/bert-large.jsonl", "numerics": "h200-sxm/numerics.jsonl",
    "decode": "h200-sxm/decode/llama-3-8b-page-16.json", "across": "h200-sxm-x2/ring/others.jsonl",
}  # fmt: skip
"""A committed file of each kind that has no timed cell, by the section that it fills."""


@pytest.mark.parametrize("key", TABLES)
def test_sections_of_tables_are_the_same_in_every_form(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Title, words, headings and every cell of the page stand in Markdown and in a terminal of 80 columns,
    which needs no package for it.
    """
    monkeypatch.setitem(sys.modules, "plotext", None)
    shown = results_of([runfile.load(str(REPORTS / TABLES[key]), documents=True)])
    section = NAMES[key]
    page = section.page(section, section.data(shown))
    body, lines = "\n".join(text.markdown(shown)), text.terminal(shown, width=80)
    plain = re.sub(r"\s+", " ", " ".join(lines))
    assert max(map(len, lines)) <= 80
    for said in (section.title, section.about):
        assert said in body
        assert said.replace("- ", "-") in plain.replace("- ", "-")
    cells = [re.sub(r"<[^>]+>", "", one) for one in re.findall(r"<t[dh][^>]*>(.*?)</t[dh]>", page)]
    titles = re.findall(r"<h3>(.*?)</h3>", page)
    assert len(cells) > 20
    assert titles
    for cell in map(html.unescape, {*cells, *titles}):
        assert cell in html.unescape(body), cell
        assert re.sub(r"\s+", " ", cell) in plain, cell
    assert body.count("\n| ---") == page.count("<table") == len(titles)


def test_a_row_that_was_not_timed_has_its_reason_in_every_form() -> None:
    row = {
        "model": HOSTILE, "mode": "train", "dtype": "bf16", "batch": 4, "seqlen": 1024, "layers": 2,
        "implementation": "naive", "status": "oom", "reason": "needs 9 GB of <memory>\nin all",
    }  # fmt: skip
    file = synthetic.run_file([])
    shown = Results(table=table.build([file]), headers=table.headers([file]), blocks={"a": [row]})
    body = "\n".join(text.markdown(shown))
    assert "| 1k | naive | oom: needs 9 GB of &lt;memory&gt; in all |" in body
    assert "<img" not in body
    assert "oom: needs 9 GB of <memory> in all" in " ".join(text.terminal(shown, width=80))
    page = report.of(shown)
    assert 'class="status oom" title="needs 9 GB of &lt;memory&gt;' in page
    assert "<img" not in page


def test_what_has_nothing_to_show_says_so() -> None:
    file = synthetic.run_file([])
    shown = Results(table=table.build([file]), headers=table.headers([file]))
    assert "The results hold no cell." in text.markdown(shown)
    assert text.terminal(shown, width=80)[-1] == "The results hold no cell."


def test_what_a_budget_kept_from_being_begun_is_said_in_every_form() -> None:
    records = [synthetic.record("naive", n, status="ok") for n in (1024, 2048)]
    reason = "time budget of 9s spent"
    records += [synthetic.record("flash", n, status="skipped", reason=reason) for n in (2048, 4096)]
    records += [synthetic.record("naive", 65536, status="skipped", reason="needs 9 TB of device memory")]
    file = synthetic.run_file(records)
    said = "2 of 5 cells were not begun: flash, at 2k and 4k; time budget of 9s spent"
    assert f"- {said}" in text.markdown(results(file))
    assert said in " ".join(" ".join(text.terminal(results(file), width=80)).split())
    page = report.of(results(file))
    assert page.count(said) == 1
    assert page.index(said) < page.index('<section id="summary"')
    assert said in ApiResults(file=file)._repr_html_()
    other = synthetic.run_file(records[:2], path="b.jsonl")
    assert f"- synthetic: {said}" in text.markdown(results(file, other))
    assert not data.not_begun(results(other))


def test_without_plotext_the_message_names_it(small: Results, monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "plotext", None)
    with pytest.raises(UnavailableError, match="plotext"):
        text.terminal(small, width=80)


def test_each_figure_alone_with_the_data_behind_it(small: Results, tmp_path: Path) -> None:
    def files(folder: str) -> dict[str, bytes]:
        paths = export.write(small, tmp_path / folder, formats=[], names=["latency"], style="paper")
        return {path.name: path.read_bytes() for path in paths}

    first = files("one")
    assert first == files("two")  # the same results, the same bytes
    assert len(first) == 8  # 2 head dims x 2 masks, JSON and CSV
    rows = list(csv.DictReader(first["latency-fwd-bf16-64-full.csv"].decode().splitlines()))
    chosen = small.table[(small.table["head_dim"] == 64) & ~small.table["causal"]]
    assert [float(row["value"]) for row in rows if row["value"]] == pytest.approx(
        chosen["time_s"].dropna().tolist()
    )
    figure = json.loads(first["latency-fwd-bf16-64-full.json"])
    assert {trace["name"] for trace in figure["data"]} == set(synthetic.RATES)
    assert (figure["layout"]["width"], figure["layout"]["height"]) == (480, 320)
    for section in SECTIONS:
        if section.figure is not None and len(frame := section.data(small)):
            for _, alone in export.panels(section.figure(frame)):
                export.styled(alone, "slide").plotly()  # checked by plotly.py


@pytest.mark.slow
def test_pictures_are_the_same_each_time(small: Results) -> None:
    pytest.importorskip("kaleido", reason="kaleido is not installed (flashbench[figures])")
    section = NAMES["latency"]
    _, figure = next(export.panels(section.figure(section.data(small))))
    try:
        first, second = (export.picture(export.styled(figure, "paper"), "svg") for _ in range(2))
    except UnavailableError as error:
        pytest.skip(str(error))
    assert first == second
    assert b"naive: memory wall at 32k" in first


def test_pdfs_hold_no_date() -> None:
    made = b"x /CreationDate (D:20261129053412+00'00')\n/ModDate (D:20261129053412+00'00')>> 20261129"
    found = export._undated(made)
    assert (
        found == b"x /CreationDate (D:00000000000000+00'00')\n/ModDate (D:00000000000000+00'00')>> 20261129"
    )
    assert len(found) == len(made)  # offsets in the file hold


def test_without_the_package_for_pictures_nothing_is_written(
    small: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "kaleido", None)
    with pytest.raises(UnavailableError, match="needs the package kaleido"):
        export.write(small, tmp_path / "figures", formats=["svg"], names=["latency"], style="paper")
    assert not (tmp_path / "figures").exists()


def test_one_browser_draws_all_pictures(
    small: Results, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    maker = types.SimpleNamespace(
        start_sync_server=lambda **_: done.append("start"), stop_sync_server=lambda **_: done.append("stop")
    )
    monkeypatch.setitem(sys.modules, "kaleido", maker)
    monkeypatch.setattr(export, "picture", lambda figure, end: done.append(end) or b"")
    export.write(small, tmp_path, formats=["svg", "pdf"], names=["latency"], style="paper")
    panels = small.labelled.groupby(KEYS).ngroups
    assert done == ["start", *["svg", "pdf"] * panels, "stop"]


def test_a_figure_alone_has_ticks_among_its_values(small: Results) -> None:
    section = NAMES["speedup"]
    for where, alone in export.panels(section.figure(section.data(small))):
        values = [y for one in alone.data if "lane" not in one["meta"] for y in one["y"] if y]
        ticks = export.styled(alone, "paper").layout["yaxis"]["tickvals"]
        assert sum(min(values) / 1.1 <= tick <= max(values) * 1.1 for tick in ticks) >= 2, where


def test_svg_names_are_counted() -> None:
    svg = b'<a id="clip0a1b2cxy"/><b href="#clip0a1b2cxy"/><c class="trace99ffee"/>'
    assert export._same(svg) == b'<a id="clip000000xy"/><b href="#clip000000xy"/><c class="trace000001"/>'


@pytest.mark.parametrize(
    ("options", "error"),
    [
        ({"names": ["latncy"]}, UnknownName), ({"formats": ["gif"]}, UsageError),
        ({"style": "poster"}, UsageError),
    ],
)  # fmt: skip
def test_what_is_not_known_is_refused(
    small: Results, tmp_path: Path, options: dict[str, Any], error: type[Exception]
) -> None:
    with pytest.raises(error, match=re.escape(str(next(iter(options.values())))[2:8].strip("'[]"))):
        export.write(small, tmp_path, **{"formats": [], "names": [], "style": "paper", **options})
