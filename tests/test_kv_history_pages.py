"""The pages of ``kv-cache --html`` and ``history --html``: their data are the command's, text stays text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from chromium import Browser
from typer.testing import CliRunner

from flashbench import devices, kvcache, presets
from flashbench.cli import app
from flashbench.report import history_page, kv_page

HOSTILE = "</script><img src=x onerror=alert(1)>"
CARD = devices.find("h100-sxm")


def estimates(*, card: bool = True) -> list[kvcache.CacheEstimate]:
    how = kvcache.Serving(device=CARD if card else None, tp=8)
    return [
        kvcache.estimate(presets.find(name), seqlen=n, batch=4, dtype=dtype, serving=how)
        for name in ("llama-3-70b", "deepseek-v3") for dtype in ("bf16", "fp8") for n in (1024, 4096)
    ]  # fmt: skip


def history() -> list[dict[str, Any]]:
    change = {"point": "c2", "before": 1e-3, "after": 1.2e-3, "worse": 0.2, "versions": ["torch: 1, 2 now"]}
    return [
        {"device": HOSTILE, "metric": "time_s", "unit": "s", "cell": f"flash {HOSTILE}",
         "points": ["c0", "c1", "c2"], "values": [1e-3, None, 1.2e-3], "changes": [change]},
        {"device": "card", "metric": "spills", "unit": "B", "cell": "naive", "points": ["c0", "c2"],
         "values": [0.0, 8.0], "changes": [{**change, "worse": None, "versions": []}]},
    ]  # fmt: skip


def test_lines_of_a_cache_are_the_estimates() -> None:
    rows = estimates()
    for key, (value, _) in kv_page.SHOWN.items():
        lines = {(one.name, one.where["dtype"]): one for one in kv_page.lines(key, rows)}
        for row in rows:
            expected = value(row)
            if not expected:  # no sequence fits: not on a log axis
                continue
            line = lines[row.preset.name, row.dtype]
            assert line.y[line.x.index(row.seqlen)] == expected, key
            assert line.where["gpu"] == "h100-sxm"
    rooms = {one.y[0] for one in kv_page.lines("length", rows) if one.dash == "dash"}
    assert rooms == {row.room_bytes for row in rows if row.room_bytes > 0}


def test_without_a_card_there_is_the_cache_alone() -> None:
    page = kv_page.build(estimates(card=False), [], [], command=HOSTILE, notes=[HOSTILE])
    assert re.findall(r'<section id="(\w+)"', page) == ["summary", "length", "models", "notes"]
    assert "<img" not in page


def test_changes_and_courses_are_the_rows() -> None:
    rows = history()
    assert [(one["cell"], one["kind"]) for one in history_page.changes(rows)] == [
        (f"flash {HOSTILE}", "worse"), ("naive", "worse"),
    ]  # fmt: skip
    figure = history_page.course_figure(rows).plotly()
    first, ring = figure.data[:2]
    assert list(first.y) == [1e-3, None, 1.2e-3]
    assert (list(ring.x), list(ring.y)) == (["c2"], [1.2e-3])
    [marks] = history_page.changes_figure(rows).plotly().data
    assert (list(marks.x), list(marks.y), marks.name) == (["c2"], [0.2], "worse")


def test_text_of_histories_stays_text_and_none_is_a_page() -> None:
    page = history_page.build(history(), command=HOSTILE)
    assert "<img" not in page
    [grid] = re.findall(r'class="grid-data">(.*?)</script>', page, re.DOTALL)
    assert f"flash {HOSTILE}" in json.loads(grid)["texts"]
    assert "No cell changed its level." in history_page.build([], command="")


def test_html_that_cannot_be_written_is_refused_in_a_line(tmp_path: Path) -> None:
    for command in (["kv-cache", "--model", "llama-3-8b"], ["history", "x", "y"]):
        done = CliRunner().invoke(app, [*command, "--html", str(tmp_path)])
        assert done.exception is not None
        assert "accepted: a file to write" in str(done.exception)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if chromium.PROGRAM is None:
        pytest.skip("no chromium or google-chrome on PATH")
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.mark.browser
def test_both_pages_draw_choose_and_fit_a_phone(browser: Browser, tmp_path: Path) -> None:
    rows, kv, past = estimates(), tmp_path / "kv.html", tmp_path / "history.html"
    kv.write_text(kv_page.build(rows, [], [], command="flashbench kv-cache"), encoding="utf-8")
    past.write_text(history_page.build(history(), command="flashbench history"), encoding="utf-8")
    browser.open(kv, width=390)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    browser.click("input[name=dtype][value=fp8] + span")
    wanted = [row.card_bytes for row in rows if row.dtype == "fp8" and row.preset.name == "llama-3-70b"]
    assert browser.run("document.getElementById('plot-length').data[0].y") == wanted
    browser.open(past, width=390)
    assert browser.run("document.documentElement.scrollWidth") <= 390
    assert browser.run("document.getElementById('plot-course').data[0].y") == [1e-3, None, 1.2e-3]
    browser.run(
        "(() => { const box = document.querySelector('select[name=cell]'); box.value = '1';"
        " box.dispatchEvent(new Event('change', {bubbles: true})); })()"
    )
    assert browser.run("document.getElementById('plot-course').data[0].y") == [0, 8]
    browser.click("#course details summary")
    head = browser.run("[...document.querySelectorAll('#course details th')].map(th => th.textContent)")
    assert head[:3] == ["series", "c0", "c2"]
    assert browser.run("typeof window.hit") == "undefined"
    assert browser.problems() == []
