"""The model's page: its data are the model's, it is one file, and a real browser draws and filters it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import chromium
import pytest
from chromium import Browser

from flashbench import devices, iomodel, whatif
from flashbench.problem import Problem
from flashbench.report import io_data, io_page
from flashbench.report.io_figures import Line

FIGURES = ("length", "memory", "block", "time", "roofline")
CARDS = (devices.find("h100-sxm"), devices.find("a100-sxm-80gb"))
LENGTHS = (1024, 4096, 16384)
NAMES = ("standard", "flash-v1", "flash-v2", "linear-attention")


def problem(n: int, *, causal: bool, head_dim: int = 128) -> Problem:
    return Problem(batch=1, num_heads=16, num_kv_heads=16, seqlen_q=n, seqlen_k=n, head_dim=head_dim,
                   head_dim_v=head_dim, dtype="bf16", causal=causal)  # fmt: skip


@pytest.fixture(scope="module")
def study() -> whatif.Study:
    problems = [problem(n, causal=causal) for causal in (False, True) for n in LENGTHS]
    return whatif.study(problems, ("fwd",), NAMES, CARDS)


@pytest.fixture(scope="module")
def text(study: whatif.Study) -> str:
    return io_page.build(study, command="flashbench io-model --html x.html <script>alert(1)</script>")


def line(lines: list[Line], name: str, **where: str) -> Line:
    (found,) = [row for row in lines if row.name == name and where.items() <= row.where.items()]
    return found


def test_bytes_over_the_length_are_the_model_s(study: whatif.Study) -> None:
    lines = io_data.level_lines(study)
    found = line(lines, "flash-v2", mask="causal", gpu="h100-sxm")
    assert list(found.x) == list(LENGTHS)
    for n, value in zip(found.x, found.y, strict=True):
        row = iomodel.estimate("flash-v2", problem(int(n), causal=True), "fwd", device=CARDS[0])
        assert value == row.requested.total_bytes
    dram, floor = (line(lines, name, mask="causal", gpu="h100-sxm")
                   for name in ("flash-v2, DRAM", "compulsory (attention)"))  # fmt: skip
    for low, middle, high in zip(floor.y, dram.y, found.y, strict=True):
        # outputs may stay in L2 when the kernel ends
        assert 0.7 * low < middle <= high
    assert not [row for row in lines if row.name == "linear-attention, DRAM"]


def test_bytes_over_memory_fall_towards_the_bound(study: whatif.Study) -> None:
    lines = io_data.sram_lines(study)
    where = {"mask": "full", "length": "16k"}
    one, two = (line(lines, name, **where) for name in ("flash-v1", "flash-v2"))
    assert list(two.y) == sorted(two.y, reverse=True)
    assert all(low < high for low, high in zip(two.y, one.y, strict=True))
    bound = line(lines, "lower bound, up to a constant", **where)
    assert all(low < high for low, high in zip(bound.y, two.y, strict=True))
    standard = line(lines, "standard", **where)
    assert len(set(standard.y)) == 1
    crossing = iomodel.crossover("flash-v1", problem(16384, causal=False)) * 2
    for size, value, other in zip(one.x, one.y, standard.y, strict=True):
        if abs(size - crossing) > 0.05 * crossing:
            assert (value < other) == (size > crossing)


def test_bytes_over_the_block_fall(study: whatif.Study) -> None:
    found = line(io_data.block_lines(study), "flash-v2", mask="full", length="4k")
    assert list(found.x) == list(range(16, 257, 16))
    assert found.y[0] > 2 * found.y[4]


def test_points_stay_under_their_roofs(study: whatif.Study) -> None:
    points, roofs = io_data.roof_lines(study)
    assert {row.where["gpu"] for row in points} == {card.name for card in CARDS}
    for row in points:
        card = devices.find(row.where["gpu"])
        level = card.hbm_bytes_per_s if not row.open[0] else card.l2_bytes_per_s
        for x, y in zip(row.x, row.y, strict=True):
            assert y <= 1.05 * min(card.peak_flops_per_s["bf16"], x * level), row.name
    assert {row.name for row in roofs} == {f"roof of {c.name}, {lv}" for c in CARDS for lv in ("DRAM", "L2")}


def test_the_page_is_one_file_and_everything_is_escaped(text: str) -> None:
    assert "<script>alert(1)" not in text
    assert not re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=.(?!data:)", text)
    assert text.count("Content-Security-Policy") == 1
    assert text.count('class="plot-data"') == len(FIGURES)
    assert len(text) < 7_000_000


def test_the_page_says_what_it_shows(text: str) -> None:
    for words in ("All of it is predicted, nothing measured", "49,152 elements", "d²", "h100-sxm and a100",
                  "Alternatives against flash-v2", "GB = 1e9", "KiB = 1024 bytes"):  # fmt: skip
        assert words in text, words
    for name in NAMES:
        assert f"<td>{name}</td>" in text


def test_without_a_card_there_is_no_time_and_no_roof() -> None:
    found = io_page.build(whatif.study([problem(1024, causal=False)], ("fwd",), ("standard", "flash-v2")))
    for key in ("time", "roofline", "cards"):
        assert f'id="{key}"' not in found
    for key in ("length", "memory", "block", "crossovers", "assumptions"):
        assert f'id="{key}"' in found


def test_alternatives_alone_make_a_page() -> None:
    found = io_page.build(whatif.study([problem(1024, causal=False)], ("fwd",), ("mamba", "mamba2")))
    assert 'id="plot-length"' in found
    assert 'id="crossovers"' in found


needs_browser = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no chromium or google-chrome on PATH"),
]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


@pytest.fixture
def page(text: str, tmp_path: Path, browser: Browser) -> Iterator[Path]:
    path = tmp_path / "io.html"
    path.write_text(text, encoding="utf-8")
    browser.events.clear()
    yield path
    browser.run("0")
    assert browser.problems() == []
    assert len(browser.requests()) == 1


def shown(browser: Browser, key: str) -> list[dict[str, Any]]:
    look = "({name: t.name, y: t.y, where: t.meta.where})"
    return json.loads(
        browser.run(f"JSON.stringify(document.getElementById('plot-{key}').data.map(t => {look}))")
    )


class TestBrowser:
    pytestmark = needs_browser

    @pytest.mark.parametrize(("width", "dark"), [(1280, False), (1280, True), (390, False)])
    def test_every_figure_is_drawn(self, browser: Browser, page: Path, width: int, dark: bool) -> None:
        browser.open(page, width=width, dark=dark)
        for key in FIGURES:
            points = browser.run(
                f"document.querySelectorAll('#plot-{key} .scatterlayer .points path').length"
            )
            assert points >= 6, key
        assert browser.run("document.documentElement.scrollWidth") <= width

    def test_a_choice_changes_figures_tables_and_sentences(self, browser: Browser, page: Path) -> None:
        browser.open(page)
        before = {key: shown(browser, key) for key in FIGURES}
        rows = "[...document.querySelectorAll('#summary li')].filter(n => !n.hidden).map(n => n.textContent)"
        sentences = browser.run(rows)
        assert len(sentences) == 1
        assert "non-causal" in sentences[0]
        browser.click("input[name=mask][value=causal] + span")
        for key in FIGURES:
            after = shown(browser, key)
            assert [row["name"] for row in after] == [row["name"] for row in before[key]]
            assert after != before[key], key
            assert {row["where"].get("mask") for row in after} <= {"causal", None}
        assert "non-causal" not in browser.run(rows)[0]
        hidden = "[...document.querySelectorAll('#cards tbody tr')].filter(n => !n.hidden).length"
        assert browser.run(hidden) == len(NAMES) * len(LENGTHS)

    def test_a_length_moves_memory_and_block_alone(self, browser: Browser, page: Path) -> None:
        browser.open(page)
        before = {key: shown(browser, key) for key in FIGURES}
        browser.click("input[name=length][value='16k'] + span")
        after = {key: shown(browser, key) for key in FIGURES}
        assert [key for key in FIGURES if after[key] != before[key]] == ["memory", "block"]
