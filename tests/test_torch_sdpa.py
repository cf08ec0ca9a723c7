"""The rows sdpa-flash and sdpa-cudnn: what torch adds to FlashAttention-2, and what cuDNN leaves out."""

from __future__ import annotations

from dataclasses import replace

import pytest

from flashbench._iomodel.batch import totals
from flashbench._iomodel.engine import Choice
from flashbench.devices import find
from flashbench.iomodel import Variant, estimate
from flashbench.problem import Problem

H100 = find("h100-sxm")


def problem(**changes: object) -> Problem:
    base = Problem(
        batch=4, num_heads=16, num_kv_heads=16, seqlen_q=4096, seqlen_k=4096, head_dim=128, head_dim_v=128,
        dtype="bf16", causal=False,
    )  # fmt: skip
    return replace(base, **changes)  # type: ignore[arg-type]


def decode(**changes: object) -> Problem:
    return problem(**{"batch": 16, "num_heads": 32, "num_kv_heads": 8, "seqlen_q": 1, **changes})


def test_the_backward_reads_the_copies_that_were_made() -> None:
    steps = {step.name: step for step in estimate("sdpa-flash", problem(), "bwd").steps}
    assert list(steps) == ["copy do", "copy o", "delta", "backward", "convert dq"]
    assert set(steps["delta"].read) == {"o_rows", "do_rows"}
    assert {"o", "do"} & set(steps["backward"].read) == set()
    assert (
        steps["backward"].read["do_rows"] == estimate("flash-v2-atomic", problem(), "bwd").steps[1].read["do"]
    )


@pytest.mark.parametrize("changes", [{"num_heads": 1, "num_kv_heads": 1}, {"seqlen_q": 1}])
def test_one_head_or_one_row_needs_no_copy(changes: dict[str, int]) -> None:
    """(batch, head, seqlen, dim) is then contiguous as (batch, seqlen, head, dim)."""
    p = problem(**changes)
    row, plain = estimate("sdpa-flash", p, "bwd"), estimate("flash-v2-atomic", p, "bwd")
    assert [step.name for step in row.steps] == ["delta", "backward", "convert dq"]
    assert (row.requested, row.extra_bytes) == (plain.requested, plain.extra_bytes)


def test_one_query_packs_the_heads_of_a_group_and_splits_on_the_card() -> None:
    """flash-attention 2, mha_fwd; grid (1, 2, 128) as counted: reports/h100-sxm/counters/decode."""
    row = estimate("sdpa-flash", decode(), "fwd", device=H100)
    assert (row.variant.pack_gqa, row.variant.num_splits) == (True, 2)
    assert row.steps[0].ctas == 2 * 16 * 8
    assert row.tiles == {"fwd_block_q": 64, "fwd_block_k": 128}
    assert row.requested.read["k"] == row.compulsory.read["k"]
    bare = estimate("sdpa-flash", decode(), "fwd")  # splits are the card's, packing is not
    assert (bare.variant.pack_gqa, bare.variant.num_splits) == (True, 1)


@pytest.mark.parametrize(
    "changes", [{"seqlen_q": 2}, {"num_kv_heads": 32}, {"dropout_p": 0.1}, {"head_dim": 36, "head_dim_v": 36}]
)
def test_nothing_else_packs(changes: dict[str, object]) -> None:
    assert not estimate("sdpa-flash", decode(**changes), "fwd", device=H100).variant.pack_gqa


def test_what_was_asked_for_is_kept() -> None:
    row = estimate("sdpa-flash", decode(), "fwd", device=H100, variant=Variant(pack_gqa=False, num_splits=8))
    assert (row.variant.pack_gqa, row.variant.num_splits) == (False, 8)
    again = estimate("sdpa-flash", decode(), "fwd", device=H100, variant=row.variant, tiles=row.tiles)
    assert again.requested == row.requested


def test_cudnn_writes_its_lse_where_a_backward_follows() -> None:
    p = problem()
    lse = 4 * p.batch * p.num_heads * p.seqlen_q
    alone, both = (estimate("sdpa-cudnn", p, pass_) for pass_ in ("fwd", "fwd+bwd"))
    assert "lse" not in alone.requested.write
    assert both.requested.write["lse"] == lse
    assert both.steps[0].write["lse"] == lse
    (row,) = totals(p, ("sdpa-cudnn",), ("fwd+bwd",), Choice())
    assert row.write_bytes == both.requested.write_bytes
    assert row.steps == both.steps


def test_only_the_counted_builds_spill() -> None:
    counted = estimate("sdpa-flash", problem(), "fwd").steps[0].spills
    tiles = 4 * 16 * (4096 // 128) * (4096 // 64)
    blocks = 4 * 16 * (4096 // 128)
    assert counted.written == 7168 * tiles + 7168 * blocks == 954_204_160
    assert counted.held == 14336 * blocks
    for changes in ({"dtype": "fp32"}, {"head_dim": 96, "head_dim_v": 96}, {"dropout_p": 0.1}):
        assert estimate("sdpa-flash", problem(**changes), "fwd").steps[0].spills.written == 0
    assert estimate("sdpa-flash", problem(), "fwd", tiles={"block_k": 32}).steps[0].spills.written == 0
    assert estimate("flash-v2", problem(), "fwd").steps[0].spills.written == 0
