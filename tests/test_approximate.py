"""Implementations that are not exact attention: right by their own fp64 form, marked wherever they show."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from peer_packages import APPROXIMATE

from flashbench import kernels, named_masks, report, runfile, table
from flashbench._iomodel.approximate import BLOCK_Q, BlockSparse
from flashbench.cli import main
from flashbench.kernels import alternatives
from flashbench.problem import Problem
from flashbench.report import summary
from flashbench.report.data import Results

NAMES = [row.name for row in alternatives.IMPLEMENTATIONS]
BUNDLED = {"longformer", "block-sparse"}


def problem(n: int = 192, **changes: object) -> Problem:
    row = Problem(
        batch=1, num_heads=2, num_kv_heads=2, seqlen_q=n, seqlen_k=n, head_dim=16, head_dim_v=16,
        dtype="fp32", causal=True,
    )  # fmt: skip
    return replace(row, **changes)


def computed(name: str, p: Problem) -> tuple:
    from flashbench.kernels._inputs import make_inputs

    row, inputs = kernels.get(name), make_inputs(p, "cpu", 0)
    assert row.own_check is not None
    assert row.why_unsupported(p, "fwd", kernels.Target()) is None
    return row, inputs, row.prepare(p, inputs)()


@pytest.mark.parametrize("dtype", ["fp32", pytest.param("bf16", marks=pytest.mark.slow)])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("name", [name for name in NAMES if name not in BUNDLED])
def test_the_timed_form_is_the_plain_form_in_fp64(name: str, causal: bool, dtype: str) -> None:
    p = problem(causal=causal, dtype=dtype)
    if kernels.get(name).why_unsupported(p, "fwd", kernels.Target()):
        assert (name, causal) in {("linformer", True), ("mamba", False)}
        return
    row, inputs, o = computed(name, p)
    assert row.own_check(p, inputs, o, None).ok
    assert not row.own_check(p, inputs, o * 1.1, None).ok
    with pytest.raises(ValueError, match="is wanted"):
        row.own_check(p, inputs, o[:, :, 1:], None)


def test_sums_that_leave_fp16_make_no_wider_bound_of_linear_attention() -> None:
    row, inputs, o = computed("linear-attention", problem(4096, num_heads=1, num_kv_heads=1, dtype="fp16"))
    assert row.own_check is not None
    found = row.own_check(problem(4096, num_heads=1, num_kv_heads=1, dtype="fp16"), inputs, o, None)
    assert found.ok
    assert found.budget["o"] < 0.02


@pytest.mark.parametrize("name", sorted(BUNDLED))
def test_windows_and_blocks_are_held_to_exact_attention_of_their_pairs(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(alternatives, "WINDOW", 32)
    p = problem(512, num_heads=1, num_kv_heads=1, causal=False)
    row, inputs, o = computed(name, p)
    assert row.own_check(p, inputs, o, None).ok
    from flashbench.kernels._reference import Reference

    exact = Reference(p, inputs)
    assert not exact.compare(o).ok
    assert exact.apart(o)["relative"] > 0.1


def test_the_error_to_exact_attention_is_what_it_is_by_hand() -> None:
    import torch

    from flashbench.kernels._inputs import make_inputs
    from flashbench.kernels._reference import Reference

    p = problem(32)
    inputs = make_inputs(p, "cpu", 0)
    exact = Reference(p, inputs)
    o = exact.expected(gradients=False)["o"].refs[0]
    assert exact.apart(o) == {"max_abs_error": 0.0, "relative": 0.0}
    assert exact.apart(1.5 * o)["relative"] == pytest.approx(0.5)
    assert exact.apart(o + 0.25)["max_abs_error"] == pytest.approx(0.25)
    assert exact.apart(torch.zeros_like(o))["relative"] == 1


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("n", [1, 128, 129, 700, 1024, 1500])
def test_the_model_of_block_sparse_counts_the_blocks_of_the_mask(n: int, causal: bool) -> None:
    p = problem(n, causal=causal)
    blocks = -(-n // BLOCK_Q)
    seen = named_masks.butterfly(blocks, blocks)
    if causal:
        seen = np.tril(seen)
    sizes = np.full(blocks, BLOCK_Q)
    sizes[-1] = n - (blocks - 1) * BLOCK_Q
    [step] = BlockSparse().steps(p)
    assert step.read["k"] == 2 * int((seen * sizes[None, :]).sum()) * 16 * 4
    assert step.exps == 2 * int((seen * np.outer(sizes, sizes)).sum())
    assert step.flops == step.exps * 2 * 32


def test_each_has_a_model_that_covers_what_it_takes() -> None:
    from flashbench import iomodel

    for name in NAMES:
        p = problem(causal=name != "linformer")
        row = kernels.get(name)
        assert not row.exact
        found = iomodel.estimate(str(row.model(p, kernels.Target())), p, "fwd", tiles={"fwd_block_q": 64})
        assert found.requested.total_bytes > 0
        assert row.why_unsupported(p, "bwd", kernels.Target()) == "only its forward is here"
    assert kernels.get("naive").exact


def test_rows_tables_and_reports_say_what_is_not_exact(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["run", "--impls", "naive,sdpa,linear-attention", "--seqlens", "64", "--head-dims", "16",
            "--heads", "2", "--batch", "1", "--dtypes", "fp32", "--causal", "yes", "--passes", "fwd",
            "--in-process", "--device", "cpu", "--out", str(tmp_path)]  # fmt: skip
    with pytest.raises(SystemExit, match=r"^0$"):
        main(line)
    assert "linear-attention (not exact)" in capsys.readouterr().out
    found = runfile.load(tmp_path / "results.jsonl")
    by_name = {record.cell.implementation: record for record in found.records}
    other = by_name["linear-attention"]
    assert (other.status, other.exact) == ("ok", False)
    assert other.apart["relative"] > 0.1
    assert by_name["sdpa"].exact
    assert not by_name["sdpa"].apart
    frame = table.build([found])
    row = {item["implementation"]: item for item in table.rows(frame)}
    assert row["linear-attention"]["exact"] is False
    assert row["linear-attention"]["exact_error_relative"] == other.apart["relative"]
    assert row["linear-attention"]["flops"] != row["sdpa"]["flops"]
    assert row["sdpa"]["exact_error"] is None
    results = Results(table=frame, headers=table.headers([found]), numerics={})
    claims = [frame.to_dict("records") for frame in (summary.headline(results), summary.regimes(results))]
    said = json.dumps(claims, default=str)
    assert "linear-attention" not in said
    assert "linear-attention (not exact)" in report.build(frame, table.headers([found]))


def test_list_says_it(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match=r"^0$"):
        main(["list", "implementations", "--json"])
    exact = {row["name"]: row["exact"] for row in json.loads(capsys.readouterr().out)}
    assert {name for name, value in exact.items() if not value} == {*NAMES, *APPROXIMATE}
