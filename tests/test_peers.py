"""The table of ratios to the fastest other kernel, from records whose ratios are known."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from attention import problem

from flashbench.problem import Cell
from flashbench.record import Record, Samples

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import peers_table

LENGTHS = peers_table.LENGTHS


def record(name: str, seconds: float, seqlen: int, status: str = "ok", **changes: Any) -> Record:
    """A row whose median is seconds; without a time where its status is another."""
    pass_, flags = changes.pop("pass_", "fwd"), changes.pop("flags", ())
    shape = {"head_dim": 64, "causal": False, **changes}
    p = problem(seqlen_q=seqlen, seqlen_k=seqlen, head_dim_v=shape["head_dim"], dtype="fp16", **shape)
    cell = Cell(implementation=name, problem=p, pass_=pass_)
    if status != "ok":
        return Record(cell=cell, status=status, reason="it says why")
    samples = Samples(samples_s=(seconds, seconds, 9.0), cache="cold", method="events")
    return Record(cell=cell, status="ok", samples=samples, flags=flags)


def test_the_fastest_other_is_asked_and_flash_attention_4_is_scaled_by_cudnn() -> None:
    found = peers_table.ratios([
        record("flash", 2.0, 512), record("sdpa-cudnn", 1.0, 512), record("sdpa-flash", 0.5, 512),
        record("flash", 2.0, 1024), record("sdpa-cudnn", 3.0, 1024), record("sdpa-flash", 4.0, 1024),
        record("naive", 0.1, 1024),
        record("flash", 2.0, 8192), record("sdpa-cudnn", 2.0, 8192),
        record("flash", 2.0, 2048), record("fa4", 2.0, 2048),
    ])  # fmt: skip
    assert found == {
        ("fwd", 64, False, 512): (0.25, "sdpa-flash", True),
        ("fwd", 64, False, 1024): (1.5, "sdpa-cudnn", True),
        ("fwd", 64, False, 8192): (pytest.approx(455 / 537), "fa4 (scaled)", True),
    }
    text = peers_table.render(found)
    assert "| fwd | 64 | full | 0.25* | 1.50* | – | – | 0.85* | – |" in text
    assert "of 3 cells, least 0.2500 (d=64 full at 512); bar 1.02: not judged by 3 of 36" in text
    assert "FlashAttention-4: measured in 0 cells, scaled by cuDNN (*) in 3" in text


@pytest.mark.parametrize("status", ["wrong", "failed", "unavailable"])
def test_flash_attention_4_is_the_runs_own_where_its_row_is_ok_and_scaled_elsewhere(status: str) -> None:
    """Also where the scaled figure would have been the faster."""
    rows = [
        record("flash", 2.0, 4096), record("sdpa-cudnn", 4.0, 4096), record("fa4", 3.0, 4096),
        record("flash", 2.0, 8192), record("sdpa-cudnn", 2.0, 8192), record("fa4", 3.0, 8192),
        record("flash", 2.0, 16384), record("sdpa-cudnn", 2.0, 16384), record("fa4", 0.1, 16384, status),
    ]  # fmt: skip
    found = peers_table.ratios(rows)
    assert found == {
        ("fwd", 64, False, 4096): (1.5, "fa4", False),
        ("fwd", 64, False, 8192): (1.0, "sdpa-cudnn", False),
        ("fwd", 64, False, 16384): (pytest.approx(451 / 530), "fa4 (scaled)", True),
    }
    text = peers_table.render(found)
    assert "| fwd | 64 | full | – | – | – | 1.50 | 1.00 | 0.85* |" in text
    assert "FlashAttention-4: measured in 2 cells, scaled by cuDNN (*) in 1" in text
    assert peers_table.untimed(rows) == [f"- rows of fa4 that are {status}: 1"]


def whole(pass_: str, ratio: float, **others: float) -> dict[peers_table.Key, peers_table.Ratio]:
    """Ratios over a pass's grid; others: those of head dim 64, full, by length."""
    found = {
        (*of, n): peers_table.Ratio(ratio, "fa4", False) for of in peers_table.REFERENCE if of[0] == pass_
        for n in LENGTHS
    }  # fmt: skip
    changed = {(pass_, 64, False, int(n[1:])): peers_table.Ratio(x, "fa4", False) for n, x in others.items()}
    return found | changed


@pytest.mark.parametrize(
    ("pass_", "ratio", "others", "mean", "under"),
    [
        ("fwd", 1.05, {}, "1.0500 of 36 cells", "none"),
        ("fwd", 1.05, {"n512": 0.88, "n1024": 0.95}, "reached", "none"),
        ("fwd", 1.05, {"n512": 0.87, "n1024": 0.94}, "reached",
         "0.8700 (d=64 full at 512), 0.9400 (d=64 full at 1024)"),
        ("fwd", 1.05, {"n16384": 0.9}, "reached", "0.9000 (d=64 full at 16384)"),
        ("fwd", 1.019, {}, "bar 1.02: missed", "none"),
        ("bwd", 0.93, {"n1024": 0.5},
         "0.9141 of 36 cells, least 0.5000 (d=64 full at 1024); bar 0.92: missed", None),
        ("bwd", 0.93, {"n1024": 0.7},
         "0.9227 of 36 cells, least 0.7000 (d=64 full at 1024); bar 0.92: reached", None),
    ],
)  # fmt: skip
def test_a_pass_is_held_to_the_bar_of_its_mean_and_each_cell_to_that_of_its_length(
    pass_: str, ratio: float, others: dict[str, float], mean: str, under: str | None
) -> None:
    text = peers_table.render(whole(pass_, ratio, **others))
    assert mean in text
    said = [line.partition("): ")[2] for line in text.splitlines() if line.startswith("- cells under")]
    assert said == ([] if under is None else [under])


def test_a_pass_that_lacks_cells_is_not_said_to_reach_its_bar() -> None:
    found = whole("bwd", 2.0)
    del found["bwd", 256, True, 512]
    assert "bar 0.92: not judged by 35 of 36" in peers_table.render(found)


def test_the_docs_show_the_committed_run_which_reaches_both_bars_in_all_cells() -> None:
    part = peers_table.part()
    assert f"\n{part}\n" in peers_table.PAGE.read_text(encoding="utf-8"), (
        "python tools/peers_table.py --write"
    )
    assert "bar 1.02: reached" in part
    assert "bar 0.92: reached" in part
    assert part.count("FlashAttention-4: measured in 36 cells, scaled by cuDNN (*) in 0") == 2
