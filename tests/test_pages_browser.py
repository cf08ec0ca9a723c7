"""All pages in a real browser: nothing is cut on a phone, a screen or paper, and axe is content."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import chromium
import pytest
from chromium import Browser
from tiers import tiers
from typer.testing import CliRunner

from flashbench._runfile.lines import seal
from flashbench.cli import app

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium.PROGRAM is None, reason="no chromium or google-chrome on PATH"),
]

ROOT = Path(__file__).parent.parent
REPORTS = ROOT / "reports" / "h100-sxm"
AXE = Path(__file__).parent / "data" / "axe" / "axe.min.js"
SWEEP, FAMILY = str(REPORTS / "results.jsonl"), str(REPORTS / "family" / "results.jsonl")
MADE = {
    "report": ["report", SWEEP, "--timeline", str(REPORTS / "timeline.json"), "--ceilings",
               str(REPORTS / "ceilings.json"), "-o", "{page}"],
    "runs": ["report", SWEEP, FAMILY, str(REPORTS / "energy" / "results.jsonl"), "-o", "{page}"],
    "cpu": ["report", str(ROOT / "reports" / "cpu" / "results.jsonl"), "-o", "{page}"],
    "compare": ["compare", SWEEP, FAMILY, "--allow", "flush,method,missing", "-o", "html={page}"],
    "io-model": ["io-model", "--gpu", "h100-sxm,a100-sxm-80gb", "--seqlens", "1k-64k", "--html", "{page}"],
    "kv-cache": ["kv-cache", "--model", "llama-3-70b,deepseek-v3", "--batch", "4", "--dtypes", "bf16,fp8",
                 "--gpu", "h100-sxm,h200", "--tp", "8", "--html", "{page}"],
    "history": ["history", "{runs}", "--html", "{page}"],
}  # fmt: skip


def runs(folder: Path) -> Path:
    """The family's run as six commits, one of its kernels slower from the fourth on."""
    header, *rows = [json.loads(line) for line in Path(FAMILY).read_text(encoding="utf-8").splitlines()]
    for at in range(6):
        environment = {**header["environment"], "git_commit": f"{at}" * 40, "git_dirty": False}
        lines = [{**header, "created_at": f"2026-01-0{at + 1}T00:00:00+00:00", "environment": environment}]
        for row in rows[:24]:
            slower = 1 + 0.001 * at + 0.2 * (at > 2 and row["cell"]["implementation"] == "flash-v2")
            samples = row["samples"] and {
                **row["samples"], "samples_s": [slower * one for one in row["samples"]["samples_s"]]
            }  # fmt: skip
            lines.append(
                {key: value for key, value in row.items() if key != "checksum"} | {"samples": samples}
            )
        path = folder / f"commit{at}" / "results.jsonl"
        path.parent.mkdir(parents=True)
        path.write_bytes(b"".join(map(seal, lines)))
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder, found = tmp_path_factory.mktemp("pages"), {}
    names = [str(path) for path in sorted(runs(folder / "runs").iterdir())]
    for name, command in MADE.items():
        found[name] = folder / f"{name}.html"
        line = [part.replace("{page}", str(found[name])) for part in command]
        at = line.index("{runs}") if "{runs}" in line else len(line)
        done = CliRunner().invoke(app, [*line[:at], *(names if at < len(line) else []), *line[at + 1 :]])
        assert found[name].exists(), (name, done.output, done.exception)
    return found


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("profile")) as started:
        yield started


CUT = """
[...document.querySelectorAll('.plot')].flatMap(plot => {
  const box = plot.getBoundingClientRect();
  return [...plot.querySelectorAll('text')].filter(text => {
    const at = text.getBoundingClientRect();
    return at.width && !text.closest('.hoverlayer') && (at.left < box.left - 1
      || at.right > box.left + 1 + %s || at.top < box.top - 1 || at.bottom > box.bottom + 1);
  }).map(text => plot.id + ': ' + text.textContent);
})"""


@pytest.mark.parametrize("name", tiers([x for x in MADE if x != "runs"], ["runs"]))
def test_no_page_is_cut_or_scrolls_sideways(browser: Browser, pages: dict[str, Path], name: str) -> None:
    for width, dark in ((390, True), (1280, False)):
        browser.events.clear()
        browser.open(pages[name], width=width, dark=dark)
        assert browser.run("document.documentElement.scrollWidth") <= width
        assert browser.run(CUT % "box.width") == []
        assert browser.problems() == []
    browser.run("window.dispatchEvent(new Event('beforeprint'))")
    browser.send("Emulation.setEmulatedMedia", media="print")
    browser.settle()
    assert browser.run(CUT % "681") == []
    # a button does not show in the heading that a browser repeats on each sheet
    display = (
        "[...document.querySelectorAll('.sortable th button')].map(one => getComputedStyle(one).display)"
    )
    assert set(browser.run(display)) <= {"contents"}
    touching = (
        "[...document.querySelectorAll('.sortable thead tr')].flatMap(row => { const found = [...row.cells]"
        ".filter(cell => cell.offsetWidth).map(cell => { const range = document.createRange();"
        " range.selectNodeContents(cell); return range.getBoundingClientRect(); });"
        " return found.slice(1).map((at, i) => at.left - found[i].right).filter(gap => gap < 2); })"
    )
    assert browser.run(touching) == []
    wide = "Math.max(0, ...[...document.querySelectorAll('.sortable')].map(table => table.scrollWidth))"
    browser.resize(680)
    browser.settle()
    assert browser.run(wide) <= 680
    browser.send("Emulation.setEmulatedMedia", media="")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in MADE if name not in ("report", "runs", "cpu")])
def test_axe_finds_no_serious_violation_on_other_pages(
    browser: Browser, pages: dict[str, Path], name: str
) -> None:
    for dark in (False, True):
        browser.open(pages[name], dark=dark)
        browser.run(AXE.read_text(encoding="utf-8") + ";0")
        found = browser.run(
            "axe.run(document, {resultTypes: ['violations']}).then(found => found.violations.filter("
            "one => ['serious', 'critical'].includes(one.impact)).map(one => [one.id, one.nodes[0].html]))"
        )
        assert found == []


def test_values_near_each_other_have_ticks_to_read_them_by(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["cpu"])
    for key in ("latency", "speedup", "memory"):
        ticks = browser.run(
            f"[...document.querySelectorAll('#plot-{key} .ytick text')].map(node => node.textContent)"
        )
        assert 3 <= len(ticks) <= 12, (key, ticks)
    assert "1.2×" in browser.run("document.getElementById('plot-speedup').textContent")


def test_hover_texts_stay_in_their_figure(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["report"])
    browser.click("input[name=dims][value='64'] + span")
    browser.click("input[name=pass][value=bwd] + span")  # of long configurations
    browser.run("document.getElementById('plot-latency').scrollIntoView({block: 'center'})")
    browser.settle()
    x, y = browser.run(
        "(() => { const at = document.querySelectorAll('#plot-latency .scatterlayer .points path')[10]"
        ".getBoundingClientRect(); return [at.x + at.width / 2, at.y + at.height / 2]; })()"
    )
    browser.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.wait("document.querySelector('#plot-latency .hoverlayer text')")
    browser.settle()
    out = browser.run(
        "(() => { const box = document.getElementById('plot-latency').getBoundingClientRect();"
        " return [...document.querySelectorAll('#plot-latency .hoverlayer text')].filter(text => {"
        " const at = text.getBoundingClientRect(); return at.left < box.left || at.right > box.right ||"
        " at.top < box.top || at.bottom > box.bottom; }).map(text => text.textContent); })()"
    )
    assert out == []
    said = browser.run("document.querySelector('#plot-latency .hoverlayer').textContent")
    for text in ("samples", "dq_num_stages=3", "limit: ", "runs cudnn"):
        assert text in said


def test_a_deep_link_ends_below_the_bar(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["report"])
    browser.click("nav a[href='#throughput']")
    browser.settle()
    bar = browser.run("document.getElementById('controls').getBoundingClientRect().bottom")
    assert browser.run("document.querySelector('#throughput h2').getBoundingClientRect().top") >= bar


def test_the_history_shows_every_commit_and_values_with_their_unit(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["history"])
    ticks = "[...document.querySelectorAll('#plot-%s .%stick text')].map(node => node.textContent)"
    commits = browser.run(ticks % ("changes", "x"))
    assert [name[:1] for name in commits] == list("012345")
    assert all(text.endswith("s") for text in browser.run(ticks % ("course", "y")))


def test_the_comparison_draws_no_change_and_names_its_lines(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["compare"])
    legend = browser.run(
        "[...document.querySelectorAll('#plot-intervals .legendtext')].map(node => node.textContent)"
    )
    assert legend == ["sdpa-flash"]
    assert browser.run(
        "document.getElementById('plot-intervals').data.some(one => one.name === 'no change' &&"
        " one.y.every(value => value === 1))"
    )
    caption = browser.run("document.querySelector('#intervals .selection').textContent")
    assert caption == "backward, bf16, head dim 64, causal"
    facts = browser.run("document.getElementById('environment').textContent")
    assert "NVIDIA H100 80GB HBM3" in facts
    assert "2.11.0+cu130" in facts


def test_the_model_s_page_has_bytes_by_tensor_of_the_length_that_is_chosen(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["io-model"])
    shown = "[...document.querySelectorAll('#tensors-table tbody tr')].map(row => row.textContent)"
    before = browser.run(shown)
    assert any("flash-v2" in row for row in before)
    browser.click("input[name=length][value='64k'] + span")
    after = browser.run(shown)
    assert len(after) == len(before)
    assert all("64k" in row for row in after)


def test_a_selection_without_recorded_kernels_says_which_has_some(
    browser: Browser, pages: dict[str, Path]
) -> None:
    browser.open(pages["report"])
    caption = "document.querySelector('#timeline .selection').textContent"
    assert browser.run(caption).startswith("recorded: forward, bf16, head dim 64")
    browser.click("input[name=dims][value='64'] + span")
    assert browser.run(caption).startswith("forward, bf16, head dim 64")


def test_markers_near_zero_stand_whole(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["report"])
    low = browser.run("document.getElementById('plot-stability')._fullLayout.yaxis.range[0]")
    assert low < 0
