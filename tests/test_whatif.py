"""The model over ranges: typed rows, data frame, and the values of ``estimate`` and ``predict`` in them."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import flashbench
from flashbench import devices, iomodel, units, whatif
from flashbench._iomodel.time import predict
from flashbench.errors import SpecError, UnknownName, UsageError
from flashbench.problem import Problem

ROOT = Path(__file__).resolve().parent.parent
H100 = devices.find("h100-sxm")


def problem(n: int = 4096, **changes: object) -> Problem:
    fields = {"batch": 2, "num_heads": 8, "num_kv_heads": 8, "seqlen_q": n, "seqlen_k": n, "head_dim": 64,
              "head_dim_v": 64, "dtype": "bf16", "causal": False}  # fmt: skip
    return Problem(**{**fields, **changes})


def test_one_call_gives_typed_rows_in_order() -> None:
    table = flashbench.io_table(
        models="standard,flash-v2", seqlens="1k-4k", passes="fwd,bwd", batch=1, heads=4
    )
    keys = [(r.estimate.problem.seqlen_q, r.estimate.pass_, r.estimate.model) for r in table]
    assert keys == [(n, pass_, model) for n in (1024, 2048, 4096) for pass_ in ("fwd", "bwd")
                    for model in ("standard", "flash-v2")]  # fmt: skip
    assert len(table) == 12
    for row in table:
        e = row.estimate
        assert e == iomodel.estimate(e.model, e.problem, e.pass_)
        assert row.device is row.prediction is None


def test_cards_stand_side_by_side_with_time() -> None:
    table = flashbench.io_table(["flash-v2"], gpus=["h100-sxm", devices.find("h200")], seqlens=8192)
    assert [row.device.name for row in table] == ["h100-sxm", "h200"]
    for row in table:
        assert row.prediction == predict(row.estimate, row.device)
        record = row.record()
        assert record["time_s"] == row.prediction.time_s
        assert record["dram_low_bytes"] <= record["dram_high_bytes"]


def test_an_alternative_has_no_time_and_no_failure() -> None:
    (row,) = flashbench.io_table("linformer:rank=128", gpus="h100-sxm", seqlens="4k")
    assert row.prediction is None
    assert row.record()["time_s"] is None
    assert row.estimate.model == "linformer:rank=128"


def test_memory_and_blocks_set_the_tiles() -> None:
    sizes = list(flashbench.io_table("flash-v1", sram="16KB-64KB", seqlens="4k"))
    assert [row.sram_bytes for row in sizes] == [2**14, 2**15, 2**16]
    assert [row.estimate.tiles["fwd_block_k"] for row in sizes] == [16, 32, 64]
    bytes_ = [row.estimate.requested.total_bytes for row in sizes]
    assert bytes_ == sorted(bytes_, reverse=True)
    blocks = list(flashbench.io_table("flash-v2", blocks="16-64", seqlens="4k", passes="bwd"))
    assert [set(row.estimate.tiles.values()) for row in blocks] == [{16}, {32}, {64}]
    assert [row.block for row in blocks] == [16, 32, 64]


def test_a_frame_has_units_in_its_names_and_every_row() -> None:
    table = flashbench.io_table(seqlens="1k,2k", gpus="a100-sxm-80gb")
    frame = table.frame()
    assert len(frame) == len(table) == 6
    assert frame["requested_read_bytes"].dtype == "int64"
    assert list(frame.columns) == list(table.records()[0])
    assert frame["time_s"].notna().all()


def test_presets_and_workloads_are_axes() -> None:
    (row,) = flashbench.io_table("flash-v2", model="llama-3-8b", seqlens="4k")
    p = row.estimate.problem
    assert (p.num_heads, p.num_kv_heads, p.head_dim) == (32, 8, 128)
    (row,) = flashbench.io_table("standard-minimal", preset="fa1-fig2")
    p = row.estimate.problem
    # 4N² + 4Nd and 7N² + 8Nd elements per head
    n, d, heads = p.seqlen_q, p.head_dim, p.batch * p.num_heads
    assert row.estimate.requested.total_bytes == 2 * heads * (11 * n * n + 12 * n * d)
    assert round(row.estimate.requested.total_bytes / 1e9, 2) == 25.23
    assert row.estimate.pass_ == "fwd+bwd"
    (row,) = flashbench.io_table("flash-v2", preset="fa1-fig2", dtypes="bf16", passes="fwd")
    assert (row.estimate.problem.dtype, row.estimate.problem.batch) == ("bf16", 64)


def test_problems_may_be_given() -> None:
    rows = flashbench.io_table("flash-v2", problems=[problem(window=(128, 0))], passes="fwd,bwd")
    assert [row.estimate.pass_ for row in rows] == ["fwd", "bwd"]


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"seqlen": 5}, SpecError, "'seqlen' is no axis"),
        ({"seqlens": "1k-3k"}, SpecError, "seqlens '1k-3k'"),
        ({"model": "llama-3-8b", "heads": 4}, UsageError, "model 'llama-3-8b' and heads '4'"),
        ({"gpus": "h100"}, UnknownName, "'h100' is not known"),
        ({"models": "flash-v9"}, UnknownName, "models 'flash-v9' is not known"),
        ({"sram": "16KB-50KB"}, SpecError, "doubling from 16KB passes 50KB"),
        ({"blocks": "16-100"}, SpecError, "blocks '16-100'"),
        ({"problems": [], "heads": 3}, SpecError, "heads beside problems"),
        ({"preset": "fig3"}, UnknownName, "preset 'fig3'"),
        ({"seqlens": "1-4096+1", "heads": 1, "sram": range(1000, 2000)}, SpecError, "accepted: at most"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, error: type, text: str) -> None:
    with pytest.raises(error) as caught:
        flashbench.io_table(**arguments)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [("192KB", (196608,)), ("16KB-64KB", (16384, 32768, 65536)), ("1KB, 3KiB", (1024, 3072)),
     ("8KB,16KB-32KB", (8192, 16384, 32768))],
)  # fmt: skip
def test_sizes_parse(text: str, expected: tuple[int, ...]) -> None:
    assert units.parse_byte_axis(text, "--sweep-sram") == expected


@pytest.mark.parametrize(
    "text", ["", "16", "x", "64KB-16KB", "16KB-16KB", "16KB-", "16KB,", "1KB,1KiB", "1KB-2KB-4KB"]
)
def test_bad_sizes_name_option_and_value(text: str) -> None:
    if text == "16":
        assert units.parse_byte_axis(text, "--sweep-sram") == (16,)
        return
    with pytest.raises(SpecError, match="--sweep-sram") as caught:
        units.parse_byte_axis(text, "--sweep-sram")
    assert repr(text) in str(caught.value)
    assert "accepted" in str(caught.value)


def test_points_in_between_keep_the_ends() -> None:
    assert whatif.between((16, 32, 64), parts=2) == (16, 23, 32, 45, 64)
    assert whatif.between((16,)) == (16,)


def test_a_study_covers_every_combination() -> None:
    problems = [problem(n, causal=causal) for n in (1024, 4096) for causal in (False, True)]
    names = ("standard", "flash-v1", "flash-v2", "mamba")
    found = whatif.study(problems, ("fwd",), names, (H100,), sram=(2**15, 2**16), blocks=(32, 64))
    assert len(found.by_length) == 4 * 4
    assert {row.estimate.model for row in found.by_sram} == {"standard", "flash-v1", "flash-v2"}
    assert len(found.by_sram) == 4 * 3 * 2
    assert {row.estimate.model for row in found.by_block} == {"flash-v1", "flash-v2"}
    assert {row.model for row in found.lengths} == {"mamba"}
    assert [view.problem for view in found.views] == problems


def test_neither_torch_nor_pandas_are_needed() -> None:
    code = (
        "import sys, flashbench\n"
        "rows = flashbench.io_table(seqlens='1k-8k', gpus='h100-sxm').records()\n"
        "assert rows and not {'torch', 'pandas', 'numpy', 'plotly'} & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
