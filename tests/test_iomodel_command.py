"""``flashbench io-model``: what it prints, quickly, without torch; and what it refuses."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from flashbench.cli import main
from flashbench.iomodel import estimate
from flashbench.problem import Problem

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture
def io_model(capsys: pytest.CaptureFixture[str]) -> Any:
    """Run the command in this process: (exit code, stdout, stderr)."""

    def run(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            main(["io-model", *arguments])
        out, err = capsys.readouterr()
        return int(stop.value.code or 0), out, err

    return run


def test_it_prints_1k_to_64k_for_three_algorithms(io_model: Any) -> None:
    code, out, err = io_model("--sram", "192KB")
    assert code == 0
    rows = [line.split() for line in out.splitlines() if "flash-v1" in line]
    assert [row[0] for row in rows] == ["1k", "2k", "4k", "8k", "16k", "32k", "64k"]
    assert sum("standard" in line for line in out.splitlines()) == 7 + 1  # and the header standard/this
    assert sum("flash-v2" in line for line in out.splitlines()) == 7
    assert "M = 196,608 bytes = 98,304 elements of bf16" in out
    assert "KB = 1024" in err
    assert "GB = 10^9" in err
    assert "275 GB" in out  # what naive needs at 64k


def test_quiet_leaves_the_table_alone(io_model: Any) -> None:
    assert io_model("-q", "--seqlens", "1k")[2] == ""


def test_json_holds_the_models_own_integers(io_model: Any) -> None:
    _, out, err = io_model(
        "--seqlens", "4k", "--batch", "4", "--passes", "bwd", "--causal", "yes", "--json", "-q"
    )
    rows = {row["model"]: row for row in json.loads(out)}
    assert (list(rows), err) == (["standard", "flash-v1", "flash-v2"], "")
    p = Problem(batch=4, num_heads=16, num_kv_heads=16, seqlen_q=4096, seqlen_k=4096, head_dim=128,
                head_dim_v=128, dtype="bf16", causal=True)  # fmt: skip
    for name, row in rows.items():
        expected = estimate(name, p, "bwd", sram_bytes=192 * 1024)
        assert row["requested_read_bytes"] == expected.requested.read_bytes
        assert row["requested_write_bytes"] == expected.requested.write_bytes
        assert row["compulsory_read_bytes"] == expected.compulsory.read_bytes
        assert row["extra_bytes"] == expected.extra_bytes
        assert row["flops"] == expected.flops
        assert row["sram_elements"] == 98_304
        assert row["tiles"] == (dict(expected.tiles) or None)
        standard = rows["standard"]["requested_read_bytes"] + rows["standard"]["requested_write_bytes"]
        assert row["standard_ratio"] == standard / expected.requested.total_bytes


def test_csv_has_the_columns_of_json(io_model: Any) -> None:
    options = ("--seqlens", "512,3k", "--models", "flash-v2,standard", "--dtypes", "fp16,fp32", "-q")
    rows = list(csv.DictReader(io.StringIO(io_model(*options, "--csv")[1])))
    objects = json.loads(io_model(*options, "--json")[1])
    assert len(rows) == len(objects) == 8
    assert list(rows[0]) == list(objects[0])
    assert [row["model"] for row in rows[:2]] == ["flash-v2", "standard"]
    assert [int(row["requested_read_bytes"]) for row in rows] == [
        row["requested_read_bytes"] for row in objects
    ]


def test_a_card_brings_its_memory(io_model: Any) -> None:
    rows = json.loads(io_model("--seqlens", "1k", "--gpu", "h100-sxm", "--json", "-q")[1])
    assert {row["sram_bytes"] for row in rows} == {228 * 1024}
    rows = json.loads(io_model("--seqlens", "1k", "--gpu", "h100-sxm", "--sram", "64KB", "--json", "-q")[1])
    assert {row["sram_bytes"] for row in rows} == {64 * 1024}


def test_given_tiles_are_marked_and_checked_against_memory(io_model: Any) -> None:
    _, out, err = io_model("--seqlens", "1k", "--block-q", "128", "--block-k", "128", "--sram", "96KB")
    assert "128x128 (given, does not fit)" in out
    assert "does not fit" in err


def test_columns_that_differ_are_shown(io_model: Any) -> None:
    out = io_model("-q", "--seqlens", "1k", "--passes", "fwd,bwd", "--causal", "both", "--kv-heads", "4")[1]
    header = out.splitlines()[2]
    assert all(word in header for word in ("causal", "pass", "kv heads"))
    assert "dkdv" in out
    plain = io_model("-q", "--seqlens", "1k")[1].splitlines()[2]
    assert not any(word in plain for word in ("causal", "pass", "kv heads", "atomic", "dtype"))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--sram", "0"), "--sram '0'"),
        (("--sram", "192XB"), "--sram '192XB'"),
        (("--sram", "-1"), "--sram"),
        (("--sram", ""), "--sram ''"),
        (("--gpu", "h100"), "--gpu 'h100'"),
        (("--models", "flash-v9"), "--models 'flash-v9'"),
        (("--models", ""), "--models ''"),
        (("--models", "standard,standard"), "given twice"),
        (("--models", "flash-v1-cuda", "--causal", "yes"), "flash-v1-cuda"),
        (("--block-q", "0"), "--block-q '0'"),
        (("--block-k", "1.5"), "--block-k '1.5'"),
        (("--seqlens", "1k-3k"), "--seqlens '1k-3k'"),
        (("--seqlens", ""), "--seqlens ''"),
        (("--head-dims", "0"), "--head-dims '0'"),
        (("--dtypes", "fp64"), "--dtypes 'fp64'"),
        (("--passes", "forward"), "--passes 'forward'"),
        (("--causal", "maybe"), "--causal 'maybe'"),
        (("--kv-heads", "3"), "--kv-heads '3'"),
        (("--batch", "2", "--tokens", "1k"), "exclude each other"),
        (("--json", "--csv"), "exclude each other"),
        (("--seqlens", "1-4096+1", "--head-dims", "1-64+1"), "at most 100000"),
        (("--sequences", "1k"), "--sequences"),
        (("extra",), "extra"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_bad_input_is_one_line_and_exit_code_2(io_model: Any, arguments: tuple[str, ...], said: str) -> None:
    code, out, err = io_model(*arguments)
    lines = err.splitlines()
    assert (code, out) == (2, "")
    assert lines[0].startswith("error: ")
    assert said in lines[0]
    assert len(lines) <= 2
    assert len(lines) == 1 or lines[1].startswith("hint: ")


def test_it_takes_under_half_a_second() -> None:
    """In processor time, which other work on the machine does not stretch; it waits for nothing."""

    def seconds() -> float:
        before = os.times()
        command = [sys.executable, "-m", "flashbench", "io-model", "--sram", "192KB"]
        done = subprocess.run(command, capture_output=True, cwd=ROOT, env={**os.environ, "PYTHONPATH": ""})
        assert done.returncode == 0, done.stderr
        after = os.times()
        return after.children_user + after.children_system - before.children_user - before.children_system

    assert min(seconds() for _ in range(5)) < 0.5


def test_a_large_table_stays_fast(io_model: Any) -> None:
    """9,000 rows: a cell costs microseconds, whatever its length."""
    start = time.process_time()
    code, out, _ = io_model(
        "--seqlens", "1-1000+1", "--passes", "fwd,bwd,fwd+bwd", "--batch", "1", "--csv", "-q"
    )  # fmt: skip
    assert code == 0
    assert out.count("\n") == 1 + 9000
    assert time.process_time() - start < 5
