"""The papers' view: block sizes, accesses in elements, the lower bound, the crossovers; and totals."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tilewalk import problems

from flashbench import iomodel
from flashbench.errors import FlashbenchError
from flashbench.iomodel import MODELS, Choice, Variant, estimate, paper_view, totals
from flashbench.problem import PASSES, Problem

FIGURE_2 = Problem(batch=64, num_heads=16, num_kv_heads=16, seqlen_q=1024, seqlen_k=1024, head_dim=64,
                   head_dim_v=64, dtype="fp16", causal=False)  # fmt: skip
ONE_HEAD = replace(FIGURE_2, batch=1, num_heads=1, num_kv_heads=1)


def test_where_n2d2_over_m_comes_from() -> None:
    """192 KB of fp16 is M = 98,304 elements: B_c 384, B_r 64, T_c 3; bytes taken for elements: 768."""
    view = paper_view(FIGURE_2, 192 * 1024)
    assert (view.sram_elements, view.block_k, view.block_q, view.passes) == (98_304, 384, 64, 3)
    assert view.paper_v1 == 2 * 1024 * 64 + 3 * (3 * 1024 * 64 + 4 * 1024) == 733_184
    assert round(view.paper_v1 * 2 * 64 * 16 / 1e9, 2) == 1.50
    moved = estimate("flash-v1", FIGURE_2, "fwd", sram_bytes=192 * 1024).requested
    assert (moved.read_bytes, moved.write_bytes) == (1_098_907_648, 570_425_344)
    confused = paper_view(FIGURE_2, 2 * 192 * 1024)
    assert confused.block_k == 768
    assert round(confused.paper_v1 * 2 * 64 * 16 / 1e9, 2) == 1.09


def test_theta_forms_are_the_models_for_long_sequences() -> None:
    p = replace(ONE_HEAD, seqlen_q=2**20, seqlen_k=2**20)
    view = paper_view(p, 64 * 1024)
    assert view.covered

    def elements(model: str) -> float:
        return estimate(model, p, "fwd", sram_bytes=64 * 1024).requested.total_bytes / 2

    assert view.standard == elements("standard") - 2 * p.seqlen_q * p.head_dim  # the scaled q
    assert elements("flash-v2") == pytest.approx(view.flash_v2, rel=1e-3)
    statistics = 8 / (3 * 64)  # l, m in fp32 beside q, o, o in 16 bit
    assert elements("flash-v1") == pytest.approx(view.flash_v1 * (1 + statistics), rel=2e-3)


@pytest.mark.parametrize("d", [64, 128])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize(("seqlen", "dtype"), [(512, "fp16"), (4096, "bf16"), (2**18, "fp32")])
def test_crossovers_are_exact(seqlen: int, dtype: str, causal: bool, d: int) -> None:
    """One element less of fast memory, and flash requests no fewer bytes than standard."""
    p = replace(
        ONE_HEAD, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=d, head_dim_v=d, dtype=dtype, causal=causal
    )
    standard = estimate("standard", p, "fwd").requested.total_bytes
    view = paper_view(p, 192 * 1024)
    for model, elements in view.crossovers.items():
        assert elements is not None
        moved = [
            estimate(model, p, "fwd", sram_bytes=m * p.dtype_bytes).requested.total_bytes
            for m in (elements - 1, elements)
        ]
        assert moved[0] >= standard > moved[1]


def test_crossovers_tend_to_3d2_and_d2() -> None:
    """v1 stays above its limit by the row statistics, 8 bytes beside 3·d elements."""
    for d in (64, 128, 256):
        p = replace(
            FIGURE_2,
            batch=1,
            num_heads=1,
            num_kv_heads=1,
            head_dim=d,
            head_dim_v=d,
            seqlen_q=2**20,
            seqlen_k=2**20,
        )
        view = paper_view(p, 192 * 1024)
        assert view.limits == {"flash-v1": 3 * d * d, "flash-v2": d * d}
        assert view.crossovers["flash-v1"] == pytest.approx((3 + 8 / d) * d * d, rel=0.02)
        assert view.crossovers["flash-v2"] == pytest.approx(d * d, rel=0.01)
    tiny = replace(FIGURE_2, seqlen_q=2, seqlen_k=2, head_dim=512, head_dim_v=512)
    assert paper_view(tiny, 192 * 1024).crossovers["flash-v1"] is None  # 4N² is too little to save


@given(st.integers(1, 2**20), st.sampled_from([16, 64, 256]), st.integers(1, 2**22))
def test_the_bound_is_the_lower_of_two_and_switches_at_d2(seqlen: int, d: int, elements: int) -> None:
    p = replace(FIGURE_2, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=d, head_dim_v=d)
    bound = iomodel.lower_bound(p, elements)
    large, small = seqlen**2 * d * d / elements, seqlen**2 * d / math.sqrt(elements)
    assert bound == (large if elements >= d * d else small) or math.isclose(large, small)
    assert paper_view(p, 2 * elements).regime.startswith("M >= d^2" if elements >= d * d else "M < d^2")
    tiled = 4 * seqlen**2 * d * d / elements  # flash-v2's leading term, where its tiles fit
    assert elements < d * d or tiled >= bound


def test_flops_of_figure_2_in_every_convention() -> None:
    """Forward 274.88 GFLOP; with S kept the backward is twice that, with S computed again 2.5 times."""
    assert round(iomodel.flops(FIGURE_2, "fwd") / 1e9, 2) == 274.88
    assert round(iomodel.flops_materialised(FIGURE_2, "fwd+bwd") / 1e9, 2) == 824.63
    assert round(iomodel.flops(FIGURE_2, "fwd+bwd") / 1e9, 2) == 962.07
    ratio = iomodel.flops(FIGURE_2, "fwd+bwd") / iomodel.flops_materialised(FIGURE_2, "fwd+bwd")
    assert round(ratio, 4) == 1.1667
    assert estimate("standard", FIGURE_2, "fwd+bwd").done_flops == iomodel.flops_materialised(
        FIGURE_2, "fwd+bwd"
    )


def test_causal_flops_count_visible_pairs() -> None:
    p = replace(ONE_HEAD, seqlen_q=8192, seqlen_k=8192, head_dim=128,
                head_dim_v=128, causal=True)  # fmt: skip
    assert p.visible_pairs == 33_558_528
    assert round(iomodel.flops(p, "fwd") / 1e9, 2) == 17.18
    for seqlen, percent in ((8192, 0.012), (128, 0.78)):
        one = replace(p, seqlen_q=seqlen, seqlen_k=seqlen)
        excess = iomodel.flops(one, "fwd") / iomodel.flops_half_convention(one, "fwd") - 1
        assert 100 * excess == pytest.approx(percent, rel=0.02)


VARIANTS: list[Variant] = [Variant(), Variant(pack_gqa=True, num_splits=3, page_size=2), Variant(density=0.5)]


@settings(max_examples=200, deadline=None)
@given(problems(), st.sampled_from([None, 1, 600, 10**5]), st.sampled_from(VARIANTS))
def test_totals_are_the_sums_of_estimates(p: Problem, sram_bytes: int | None, variant: Variant) -> None:
    names = [row.name for row in MODELS if row.refuses(p) is None and row.passes == PASSES]
    rows = totals(p, names, PASSES, Choice(sram_bytes=sram_bytes, variant=variant))
    assert [(row.pass_, row.model) for row in rows] == [(pass_, name) for pass_ in PASSES for name in names]
    for row in rows:
        own = variant.only(iomodel.find(row.model).takes)
        whole = estimate(row.model, p, row.pass_, sram_bytes=sram_bytes, variant=own)
        assert row.read_bytes == whole.requested.read_bytes
        assert row.write_bytes == whole.requested.write_bytes
        assert row.atomic_bytes == whole.requested.atomic_bytes
        assert row.compulsory_read_bytes == whole.compulsory.read_bytes
        assert row.compulsory_write_bytes == whole.compulsory.write_bytes
        for name in ("flops", "done_flops", "exps", "saved_bytes", "extra_bytes", "tile_source", "tiles_fit"):
            assert getattr(row, name) == getattr(whole, name), name
        assert {f"{kernel}_block_q": tile.block_q for kernel, tile in row.tiles.items()} == {
            name: rows for name, rows in whole.tiles.items() if name.endswith("block_q")
        }
        again = iomodel.whole(row, p, Choice(sram_bytes=sram_bytes, variant=variant))
        assert again == (whole if row.pass_ != "bwd" else replace(whole, variant=row.variant))


def test_what_totals_cannot_do_is_refused() -> None:
    wrong: list[dict[str, Any]] = [{"models": ["flash-v9"]}, {"passes": ["forward"]}, {"choice": Choice(0)}]
    for changes in wrong:
        arguments = {"models": ["flash-v2"], "passes": ["fwd"], "choice": Choice(), **changes}
        with pytest.raises(FlashbenchError):
            totals(FIGURE_2, **arguments)
