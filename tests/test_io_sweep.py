"""``io-model``'s what-if options: sweeps of M and of tiles as rows, and the page."""

from __future__ import annotations

import csv
import io
import json
from pathlib import Path
from typing import Any

import pytest

from flashbench import iomodel
from flashbench.cli import main
from flashbench.problem import Problem


def said(argv: list[str], capsys: pytest.CaptureFixture[str]) -> Any:
    with pytest.raises(SystemExit) as stop:
        main(["io-model", *argv])
    captured = capsys.readouterr()
    assert not stop.value.code, captured.err
    return captured


def test_a_row_per_size_of_m(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--sweep-sram", "16KB-64KB", "--seqlens", "2k", "--models", "flash-v1,flash-v2", "--csv", "-q"]
    rows = list(csv.DictReader(io.StringIO(said(argv, capsys).out)))
    assert [row["sram_bytes"] for row in rows if row["model"] == "flash-v1"] == ["16384", "32768", "65536"]
    problem = Problem(batch=8, num_heads=16, num_kv_heads=16, seqlen_q=2048, seqlen_k=2048, head_dim=128,
                      head_dim_v=128, dtype="bf16", causal=False)  # fmt: skip
    for row in rows:
        size = int(row["sram_bytes"])
        expected = iomodel.estimate(row["model"], problem, "fwd", sram_bytes=size)
        assert int(row["requested_read_bytes"]) == expected.requested.read_bytes
        assert int(row["sram_elements"]) == size // 2


def test_a_row_per_tile(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--sweep-block", "16-48+16", "--seqlens", "2k", "--models", "flash-v2", "--json", "-q"]
    rows = json.loads(said(argv, capsys).out)
    assert [row["tiles"] for row in rows] == [{"fwd_block_q": n, "fwd_block_k": n} for n in (16, 32, 48)]
    assert {row["tile_source"] for row in rows} == {"given"}


def test_both_sweeps_cross_with_cards(capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["--sweep-sram", "64KB,1MB", "--sweep-block", "64,128", "--gpu", "h100-sxm,h200", "--seqlens",
            "1k", "--models", "flash-v2", "--json", "-q"]  # fmt: skip
    rows = json.loads(said(argv, capsys).out)
    assert len(rows) == 2 * 2 * 2
    assert [row["gpu"] for row in rows[:2]] == ["h100-sxm", "h200"]
    fits = {(row["sram_bytes"], row["tiles"]["fwd_block_q"]): row["tiles_fit"] for row in rows}
    assert fits[65536, 64] is True
    assert fits[65536, 128] is False
    assert fits[2**20, 128] is True


def test_the_table_shows_the_size(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    text = said(["--sweep-sram", "16KB-64KB", "--seqlens", "2k"], capsys).out
    for size in ("16.0 KiB", "32.0 KiB", "64.0 KiB"):
        assert size in text


def test_the_page_is_written_beside_the_table(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    argv = ["--html", str(path), "--seqlens", "1k,2k", "--gpu", "h100-sxm,h200", "--models",
            "standard,flash-v2,flash,linformer", "--sweep-sram", "32KB-64KB", "--json"]  # fmt: skip
    captured = said(argv, capsys)
    assert len(json.loads(captured.out)) == 2 * 2 * 2 * 4
    assert f"page: {path}" in captured.err
    text = path.read_text(encoding="utf-8")
    for key in ("length", "memory", "block", "time", "roofline", "crossovers", "cards"):
        assert f'id="{key}"' in text
    assert "32 KiB" in text


def test_a_decode_step_has_a_page(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "page.html"
    argv = ["--html", str(path), "--mode", "decode", "--model", "llama-3-8b", "--seqlens", "1k-8k", "--gpu",
            "h100-sxm", "-q"]  # fmt: skip
    assert said(argv, capsys).err == ""
    text = path.read_text(encoding="utf-8")
    assert "1 query" in text
    assert "GQA 4:1" in text


@pytest.mark.parametrize(
    "argv",
    [
        ["--lengths", "512,1k", "--gpu", "h100-sxm"],
        ["--window", "128,0", "--causal", "yes", "--seqlens", "1k"],
        ["--dtypes", "bf16", "--gpu", "v100-sxm2", "--seqlens", "1k"],
        [
            "--mode",
            "decode",
            "--splits",
            "auto",
            "--gpu",
            "h100-sxm",
            "--model",
            "llama-3-8b",
            "--seqlens",
            "1k",
        ],
        ["--models", "mamba", "--seqlens", "1k"],
        ["--models", "flash-v1-cuda,flash-v4", "--seqlens", "1k"],
        ["--seqlens", "1-64", "--head-dims", "3"],
        ["--density", "0.25", "--dropout", "0.1", "--seqlens", "1k"],
        ["--preset", "fa1-fig2"],
    ],
    ids=" ".join,
)
def test_whatever_the_model_covers_has_a_page(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "page.html"
    assert said([*argv, "--html", str(path), "-q"], capsys).err == ""
    assert 'id="plot-length"' in path.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--sweep-sram", "16KB-64KB", "--sram", "192KB"], "--sweep-sram '16KB-64KB' and --sram '192KB'"),
        (["--sweep-block", "16-64", "--block-q", "32"], "--sweep-block '16-64' and --block-q '32'"),
        (["--sweep-block", "16-64", "--block-k", "32"], "--sweep-block '16-64' and --block-k '32'"),
        (["--sweep-sram", "16KB-48KB"], "--sweep-sram '16KB-48KB': doubling from 16KB passes 48KB"),
        (["--sweep-sram", "x"], "--sweep-sram 'x': not a size"),
        (["--sweep-block", "0"], "--sweep-block '0'"),
        (["--html", "/no/such/folder/page.html"], "--html '/no/such/folder/page.html': its folder"),
        (["--html", "."], "--html '.': not a file"),
        (["--html", ""], "--html '': not a file"),
        (
            ["--html", "/proc/page.html", "--seqlens", "1k", "--models", "flash-v2"],
            "--html '/proc/page.html'",
        ),
    ],
)
def test_bad_input_is_one_line(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["io-model", *argv])
    captured = capsys.readouterr()
    assert stop.value.code == 2
    assert captured.out == ""
    lines = [line for line in captured.err.splitlines() if not line.startswith("hint:")]
    assert len(lines) == 1
    assert text in lines[0]
    assert "accepted" in lines[0]
