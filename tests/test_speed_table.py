"""The table of ``flash``'s speed in docs/kernels.md, and how tools write parts of pages."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from test_peers import record

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import marked  # noqa: E402
import speed_table  # noqa: E402


def test_the_page_shows_this_table() -> None:
    shown = speed_table.PAGE.read_text(encoding="utf-8")
    assert f"\n{speed_table.part()}\n" in shown, "run: python tools/speed_table.py --write"
    found = speed_table.speeds(speed_table.runfile.load(ROOT / speed_table.RESULTS).records)
    assert len(found) == 16
    assert {len(by_length) for by_length in found.values()} == {7}


def test_a_speed_is_the_others_time_over_that_of_flash_where_both_have_one() -> None:
    doubted = record("flash", 9.0, 4096, flags=("suspect",))
    rows = [
        record("flash", 2.0, 1024), record("sdpa-cudnn", 3.0, 1024), record("sdpa", 1.0, 1024),
        record("flash", 2.0, 2048), record("sdpa-cudnn", 6.0, 2048), record("sdpa-flash", 1.0, 2048),
        doubted, record("sdpa-cudnn", 6.0, 4096),
        record("flash", 2.0, 8192, "failed"), record("sdpa-cudnn", 6.0, 8192),
        record("flash", 4.0, 1024, pass_="bwd", causal=True),
        record("sdpa", 1.0, 1024, pass_="bwd", causal=True),
    ]  # fmt: skip
    assert speed_table.speeds(rows) == {
        (64, False, "fwd", "sdpa-cudnn"): {1024: 1.5, 2048: 3.0},
        (64, False, "fwd", "sdpa"): {1024: 0.5},
        (64, True, "bwd", "sdpa"): {1024: 0.25},
    }


def test_another_cards_run_says_what_ran_there() -> None:
    text = speed_table.part(ROOT / "reports" / "h100-sxm" / "results.jsonl")
    assert "On one NVIDIA H100 80GB HBM3 ([reports/h100-sxm/results.jsonl]" in text
    assert "`flash` ran `flash-v3`" not in text, "that run is older"
    assert "| head dim 64, causal | " in text


def test_a_part_takes_the_place_of_the_one_before_and_of_nothing_else(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# π\n<!-- a -->\nold\n<!-- end -->\nmore\n<!-- b -->\nold\n<!-- end -->\n", encoding="utf-8"
    )
    marked.put(page, "<!-- b -->\n\\1 new\n<!-- end -->")
    marked.put(page, "<!-- a -->\n1\n2\n<!-- end -->")
    assert page.read_text(encoding="utf-8") == (
        "# π\n<!-- a -->\n1\n2\n<!-- end -->\nmore\n<!-- b -->\n\\1 new\n<!-- end -->\n"
    )
    with pytest.raises(SystemExit, match="has no part from <!-- c --> to <!-- end -->"):
        marked.put(page, "<!-- c -->\n<!-- end -->")
