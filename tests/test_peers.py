"""The table of ratios to the fastest other kernel, from records whose ratios are known."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from attention import problem

from flashbench.problem import Cell, Problem
from flashbench.record import Record, Samples

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import peers_table


def test_the_fastest_other_is_asked_and_flash_attention_4_is_scaled_by_cudnn() -> None:
    at_512, at_1k, long = (
        problem(seqlen_q=n, seqlen_k=n, head_dim=64, head_dim_v=64, dtype="fp16", causal=False)
        for n in (512, 1024, 8192)
    )

    def record(name: str, seconds: float, p: Problem) -> Record:
        samples = Samples(samples_s=(seconds, seconds, 9.0), cache="cold", method="events")
        return Record(cell=Cell(implementation=name, problem=p, pass_="fwd"), status="ok", samples=samples)

    found = peers_table.ratios([
        record("flash", 2.0, at_512), record("sdpa-cudnn", 1.0, at_512), record("sdpa-flash", 0.5, at_512),
        record("flash", 2.0, at_1k), record("sdpa-cudnn", 3.0, at_1k), record("sdpa-flash", 4.0, at_1k),
        record("naive", 0.1, at_1k),
    ])  # fmt: skip
    fa4 = "FlashAttention-4, scaled"
    assert found["fwd", 64, False, 512] == (0.25, "sdpa-flash")
    assert found["fwd", 64, False, 1024] == (1.5, "sdpa-cudnn")
    alone = peers_table.ratios([record("flash", 2.0, long), record("sdpa-cudnn", 2.0, long)])
    assert alone["fwd", 64, False, 8192] == (pytest.approx(455 / 537), fa4)
    text = peers_table.render(found | alone)
    assert "| fwd | 64 | full | 0.25 | 1.50 | – | – | 0.85 | – |" in text
    assert "of 3 cells, least 0.250 (d=64 full at 512)" in text
