"""check --numerics: the reference, the draws, the errors that it finds, the file and the report."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from fp8 import exact

from flashbench import kernels, numerics, report, runfile, table
from flashbench._cli import check_numerics
from flashbench.cli import main
from flashbench.kernels import Target
from flashbench.numerics import Grid, rows

CPU = Target()
GRID = Grid(
    impls=("naive", "sdpa"), dtypes=("fp32", "bf16"), seqlens=(64, 200), ranges=("plain", "large"),
    head_dim=16, heads=2, queries=8,
)  # fmt: skip


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["check", "--numerics", "--device", "cpu", *arguments])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


def test_the_reference_is_attention_whatever_the_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = numerics.draw(GRID, "large", 200, "cpu")
    expected, _ = exact(q, k, v)
    for chunk in (7, 64, 4096):
        monkeypatch.setitem(numerics.CHUNK, "cpu", chunk)
        torch.testing.assert_close(numerics.exact(q, k, v), expected, atol=1e-13, rtol=1e-12)


def test_draws_are_what_the_ranges_say() -> None:
    grid = replace(GRID, head_dim=128, heads=4, queries=2000)
    plain, outliers, large = (numerics.draw(grid, name, 2000, "cpu") for name in numerics.RANGES)
    assert all(x.std() == pytest.approx(1, abs=0.01) for x in plain)
    assert all(x.var() == pytest.approx(1 + 0.001 * 100, abs=0.02) for x in outliers)
    assert large[0].std() == pytest.approx(30, abs=0.3)
    scores = large[0][0, 0] @ large[1][0, 0].mT * 128**-0.5
    assert scores.std() == pytest.approx(30, rel=0.05)
    assert torch.equal(plain[1], numerics.draw(grid, "plain", 2000, "cpu")[1])
    assert not torch.equal(plain[1], numerics.draw(replace(grid, seed=1), "plain", 2000, "cpu")[1])


def test_errors_are_those_of_the_implementations_own_results() -> None:
    found = list(rows(GRID, CPU))
    assert len(found) == GRID.count == 2 * 2 * 2 * 2
    assert {row["status"] for row in found} == {"ok"}
    q, k, v = numerics.draw(GRID, "plain", 200, "cpu")
    ref, _ = exact(q, k, v)
    row = next(
        row for row in found
        if (row["implementation"], row["dtype"], row["seqlen_k"]) == ("naive", "bf16", 200)
        and row["range"] == "plain"
    )  # fmt: skip
    q, k, v = (x.bfloat16() for x in (q, k, v))
    error = ((q * 16**-0.5) @ k.mT).softmax(-1) @ v - ref
    assert row["rmse"] == pytest.approx(float(error.square().mean().sqrt()), rel=1e-6)
    assert row["max_abs_error"] == pytest.approx(float(error.abs().max()), rel=1e-6)
    rounded, _ = exact(q, k, v)
    assert row["input_rmse"] == pytest.approx(float((rounded - ref).square().mean().sqrt()), rel=1e-6)
    assert row["reference_rms"] == pytest.approx(float(ref.square().mean().sqrt()), rel=1e-6)


def test_rounding_the_inputs_costs_what_the_dtype_has_bits() -> None:
    found = {(row["dtype"], row["range"]): row for row in rows(GRID, CPU) if row["implementation"] == "sdpa"}
    for name in GRID.ranges:
        assert found["fp32", name]["input_rmse"] == 0
        assert found["fp32", name]["rmse"] < 1e-3 * found["bf16", name]["rmse"]
        assert found["bf16", name]["rmse"] > 0.8 * found["bf16", name]["input_rmse"] > 0


def test_fp8_is_measured_both_ways_and_rotation_helps_against_outliers() -> None:
    if reason := kernels.get("flash-fp8").why_unavailable(CPU):
        pytest.skip(reason)
    grid = replace(GRID, impls=("naive", "flash"), dtypes=("fp8", "fp32"), seqlens=(256,), head_dim=64,
                   ranges=("outliers",), queries=64, heads=1)  # fmt: skip
    found = list(rows(grid, CPU))
    ways = [(row["implementation"], row["dtype"], row["fp8_scale"], row["hadamard"]) for row in found]
    assert ways == [
        ("flash-fp8", "fp8", "tensor", False), ("flash-fp8", "fp8", "block", True),
        ("naive", "fp32", "", False), ("flash", "fp32", "", False),
    ]  # fmt: skip
    plain, best = found[:2]
    assert best["rmse"] < 0.8 * plain["rmse"] < 0.04
    assert all(0.8 < row["rmse"] / row["input_rmse"] < 1.3 for row in found[:2])


def test_what_does_not_run_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    tf32 = list(rows(replace(GRID, dtypes=("tf32",), seqlens=(64,), ranges=("plain",)), CPU))
    assert {row["status"] for row in tf32} == {"unsupported"}
    assert all("TF32" in row["reason"] and "rmse" not in row for row in tf32)

    def broken(*_: object) -> Any:
        raise ZeroDivisionError("division\nby zero")

    row = kernels.get("naive")
    monkeypatch.setitem(kernels.registry(), "naive", replace(row, prepare=broken))
    one = replace(GRID, impls=("naive",), dtypes=("fp32",), seqlens=(64,), ranges=("plain",))
    [failed] = rows(one, CPU)
    assert (failed["status"], failed["reason"]) == ("failed", "ZeroDivisionError: division by zero")
    monkeypatch.setitem(
        kernels.registry(), "naive",
        replace(row, prepare=lambda _, inputs: lambda: torch.full_like(inputs.q, float("nan"))),
    )  # fmt: skip
    [bad] = rows(one, CPU)
    assert bad["status"] == "nonfinite"
    monkeypatch.setattr(numerics.environment, "free_bytes", lambda target: 1000)
    [huge] = rows(one, CPU)
    assert huge["status"] == "skipped"
    assert huge["reason"].startswith("needs ")
    assert huge["reason"].endswith("1.00 kB free")


def test_the_command_writes_rows_that_json_and_the_report_show(command: Any, tmp_path: Path) -> None:
    out = tmp_path / "numerics.jsonl"
    line = ("--seqlens", "64,128", "--dtypes", "fp32,bf16", "--impls", "naive,sdpa", "--head-dims", "16",
            "--ranges", "outliers")  # fmt: skip
    code, text, err = command(*line, "--json", "--out", str(out))
    assert code == 0
    printed = json.loads(text)
    assert len(printed) == 2 * 2 * 2
    assert f"results: {out}" in err
    file = runfile.load(out)
    assert file.records == ()
    assert [{name: row[name] for name in printed[0]} for row in file.numerics] == printed
    page = report.build(table.build([file]), table.headers([file]), table.numerics([file]))
    section = page[page.index('id="numerics"') :]
    section = section[: section.index("</section>")]
    for row in printed:
        assert f"{row['rmse']:.2e} <small>(max {row['max_abs_error']:.2e}" in section
    assert "outliers: 64 queries of 1 heads, head dim 16" in section
    code, _, err = command(*line, "--out", str(out))
    assert code == 2
    assert "exists and is not overwritten; accepted: the path of a new file" in err


def test_the_table_says_what_was_measured(command: Any) -> None:
    code, text, err = command(
        "--seqlens", "64", "--dtypes", "fp32,tf32", "--impls", "naive", "--head-dims", "16"
    )
    assert code == 0
    assert [line.split()[:5] for line in text.splitlines() if "naive" in line] == [
        [name, "16", "64", "fp32", "naive"] for name in numerics.RANGES
    ]
    assert "3 rows of naive unsupported: TF32 products exist on NVIDIA GPUs only" in err
    assert numerics.RANGES["large"] in err


def test_each_head_dim_has_its_rows_and_a_gpu_takes_16_heads(command: Any) -> None:
    code, text, _ = command(
        "--seqlens", "64", "--dtypes", "fp32", "--impls", "naive", "--head-dims", "8,16", "--ranges", "plain"
    )
    assert code == 0
    rows = [line.split()[:2] for line in text.splitlines() if "naive" in line]
    assert rows == [["plain", "8"], ["plain", "16"]]
    on_gpu = check_numerics.DEFAULTS["cuda"]
    assert (on_gpu["heads"], on_gpu["head_dims"]) == ("16", "64,128")


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["--causal", "yes"], ["--causal", "no meaning with --numerics", "--seqlens"]),
        (["--dtypes", "fp9"], ["--dtypes", "fp9", "fp8"]),
        (["--ranges", "huge"], ["--ranges", "huge", "outliers"]),
        (["--dtypes", "fp8", "--impls", "naive"], ["--impls 'naive'", "--dtypes 'fp8'", "flash for fp8"]),
        (["--out", "/"], ["--out", "a folder", "the path of a new file"]),
        (["--json", "--csv"], ["--json", "--csv", "exclude"]),
    ],
)
def test_bad_input_is_named(line: list[str], words: list[str], command: Any) -> None:
    code, out, err = command(*line)
    assert (code, out) == (2, "")
    assert err.startswith("error: ")
    assert all(word in err for word in words), err


def test_ranges_are_of_numerics_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["check", "--ranges", "plain"])
    assert stop.value.code == 2
    assert "--ranges: is of --numerics" in capsys.readouterr().err


@pytest.mark.gpu
def test_on_a_gpu_a_million_keys_fit_and_errors_stay_in_proportion() -> None:
    from flashbench import environment

    grid = replace(GRID, impls=("flash", "sdpa", "naive"), dtypes=("fp16", "bf16", "fp8"),
                   seqlens=(2**10, 2**20), ranges=("plain",), head_dim=128, queries=128)  # fmt: skip
    found = list(rows(grid, environment.target("cuda")))
    assert {row["status"] for row in found} == {"ok"}
    limits = {"fp16": 2e-3, "bf16": 2e-2, "fp8": 0.12}
    for row in found:
        if row["implementation"] != "naive":  # which rounds scores and probabilities too
            assert row["rmse"] <= limits[row["dtype"]] * row["reference_rms"], row
