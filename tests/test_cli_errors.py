"""Every bad input exits 2 (3 for what is not on this machine) with one line that says what is accepted."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from flashbench.cli import main

GPU = Path("/proc/driver/nvidia/version").exists()


def run(argv: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of a command line, in this process."""
    with pytest.raises(SystemExit) as stop:
        main(argv)
    captured = capsys.readouterr()
    return int(stop.value.code or 0), captured.out, captured.err


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Work in a folder of its own, with the files that the bad inputs name."""
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("I am a file\n")
    Path("empty").write_text("")
    Path("folder").mkdir()
    Path("taken").mkdir()
    Path("taken/results.jsonl").write_text("")
    Path("list.toml").write_text("seqlens = [1.5]\n")
    Path("unknown.toml").write_text("seqlen = '1k'\n")
    Path("value.toml").write_text("seqlens = '1k-3k'\n")
    Path("pair.toml").write_text("batch = 1\ntokens = 2\n")
    Path("base.toml").write_text('name = "x"\nbase = "nope"\n')
    Path("latin.toml").write_bytes(b"out = '\xe9'\n")
    Path("broken.toml").write_text("seqlens = \n")
    Path("newer.jsonl").write_text('{"type":"header","schema":999}\n')
    Path("other.jsonl").write_text('{"a":1}\n')


NOT_LENGTHS = [
    "",
    ",",
    "0",
    "-1",
    "x",
    "1.5",
    "1k-3k",
    "1k,1k",
    "1,,2",
    "1k-2k+3",
    "2k-1k",
    "9" * 40,
    "1e3",
    "3g",
]
NOT_NUMBERS = ["", "0", "-1", "x", "1.5", "1,2", "9" * 40, "1e3", "inf", "nan"]

NOT_SEQLENS = [value for value in NOT_LENGTHS if value != "0"]
"""A sequence may be empty, which no head dim can be."""

BAD_VALUES = {
    "--seqlens": NOT_SEQLENS,
    "--seqlens-k": NOT_SEQLENS,
    "--head-dims": [*NOT_LENGTHS, "128k"],
    "--head-dims-v": [*NOT_LENGTHS, "128k"],
    "--kv-heads": NOT_LENGTHS,
    "--dtypes": ["", ",", "bf61", "float32", "BF16", "bf16,bf16", "bf16,", "bf16 fp32", "fp9"],
    "--impls": ["", ",", "flahs", "naive,naive", "Naive", "naive;sdpa"],
    "--passes": ["", "forward", "fwd,fwd", "fwd-bwd", "FWD"],
    "--causal": ["", "true", "maybe", "yes,no", "YES"],
    "--batch": NOT_NUMBERS,
    "--heads": [*NOT_NUMBERS, "1m"],
    "--device": ["", "gpu", "CUDA", "cuda:x", "cuda:-1", "cpu:1", "0", "cuda:0,cuda:1"],
    "--seed": ["", "-1", "x", "1.5", "9" * 40],
}
RUN_ONLY = {
    "--tokens": NOT_NUMBERS,
    "--hidden": NOT_NUMBERS,
    "--cache": ["", "warm", "COLD", "cold,hot"],
    "--time-budget": ["", "5", "0s", "-5m", "5 minutes", "m", "nan", "1e9h"],
    "--config": ["", "missing.toml", "folder", "file/x.toml", "list.toml", "unknown.toml", "value.toml",
                 "latin.toml", "broken.toml", "pair.toml", "a" * 5000],
    "--out": ["", "file", "file/below", "taken", "taken/results.jsonl/below", "a" * 5000],
}  # fmt: skip
CASES = [
    *(
        (command, name, value)
        for command in ("run", "check")
        for name in BAD_VALUES
        for value in BAD_VALUES[name]
    ),
    *(("run", name, value) for name in RUN_ONLY for value in RUN_ONLY[name]),
]


def assert_refused(code: int, out: str, err: str, expected: int = 2) -> None:
    lines = err.splitlines()
    assert code == expected, err
    assert out == ""
    assert [line for line in lines if line.startswith("error: ")] == lines[:1], err
    assert len(lines) <= 2, err
    assert lines[1:] == [line for line in lines[1:] if line.startswith("hint: ")], err
    assert "Traceback" not in err
    assert len(lines[0]) < 800, err


@pytest.mark.parametrize(("command", "option", "value"), CASES, ids=[f"{c} {o} {v:.20}" for c, o, v in CASES])
def test_bad_value(command: str, option: str, value: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run([command, option, value], capsys)
    assert_refused(code, out, err)
    assert option in err
    assert value[:40] in err
    assert "accepted: " in err or "known: " in err


OTHER = [
    ("run --batch 1 --tokens 16k", ["--batch '1'", "--tokens '16k'", "exclude each other"]),
    ("run --heads 1 --hidden 16k", ["--heads '1'", "--hidden '16k'", "exclude each other"]),
    ("run --heads 6 --kv-heads 4 --device cpu", ["--kv-heads '4'", "6 query heads", "divisor of 6"]),
    ("run --hidden 512 --kv-heads 3 --head-dims 64 --device cpu", ["8 query heads", "--hidden 512", "by 3"]),
    ("check --heads 6 --kv-heads 2,4 --device cpu", ["6 query heads", "by 4"]),
    ("check --varlen 3,x --seqlens 33", ["--varlen '3,x': 'x' is no length", "accepted: a length such as"]),
    ("check --varlen 3,4 --seqlens 33", ["--varlen '3,4'", "--seqlens '33'", "exclude each other"]),
    ("run --json --csv", ["--json", "--csv", "exclude"]),
    ("run --quiet --verbose", ["--quiet", "--verbose", "exclude"]),
    ("check --json --csv", ["--json", "--csv", "exclude"]),
    ("check --quiet --verbose", ["--quiet", "--verbose", "exclude"]),
    ("doctor --json --csv", ["--json", "--csv", "exclude"]),
    ("list --json --csv", ["--json", "--csv", "exclude"]),
    ("list --csv", ["--csv", "implementations"]),
    ("list kernels", ["'kernels'", "known: implementations, devices, metrics, models"]),
    ("list implementation", ["did you mean 'implementations'"]),
    ("run --resume", ["--resume", "--out DIR"]),
    ("run --cache cold --device cpu", ["--cache 'cold'", "accepted on a CPU: hot"]),
    ("run --seqlens 1-4096+1 --seqlens-k 1-4096+1 --device cpu", ["402653184", "cells; accepted: at most"]),
    ("run --resume --out folder/missing --seqlens 1k-3k", ["--seqlens '1k-3k'"]),
    ("run --seqlen 1k", ["--seqlen is not an option", "did you mean --seqlens?"]),
    ("run --head-dim 64", ["did you mean --head-dims?"]),
    ("run --dryrun", ["did you mean --dry-run?"]),
    ("run --zzzzzz", ["--zzzzzz is not an option of 'flashbench run'", "--help"]),
    ("run -x", ["-x is not an option"]),
    ("run extra", ["extra", "'flashbench run --help'"]),
    ("run --seqlens", ["--seqlens", "'flashbench run --help'"]),
    ("run --quiet=yes", ["--quiet"]),
    ("rum", ["'rum' is not a command", "did you mean run?"]),
    (
        "benchmark",
        ["'benchmark' is not a command; accepted: run, io-model, kv-cache, decode, block, ring, calibrate,"],
    ),
    ("--nope", ["--nope is not an option of 'flashbench'"]),
    ("report", ["files"]),
    ("report missing.jsonl", ["missing.jsonl"]),
    ("report folder", ["folder"]),
    ("report file/x", ["file/x"]),
    ("report newer.jsonl -o folder", ["--output 'folder'", "accepted: the path of an HTML file"]),
    ("report newer.jsonl -o newer.jsonl", ["--output 'newer.jsonl'", "accepted: another path"]),
    ("report newer.jsonl ./newer.jsonl", ["given twice"]),
    ("io-model --sram 192XB", ["--sram '192XB'", "accepted"]),
    ("io-model --seqlens 1k-3k", ["--seqlens '1k-3k'", "accepted"]),
    ("io-model --gpu h100", ["--gpu 'h100'", "did you mean 'h100-sxm' or 'h100-pcie' or 'h100-nvl'?"]),
    ("io-model --models linformer:rank=0", ["--models 'linformer:rank=0': rank '0'", "accepted: 1 to"]),
    ("io-model --models linformer:foo=3", ["--models 'linformer:foo=3'", "separated by ':'", "known: rank"]),
    ("io-model --models linformer:", ["--models 'linformer:'", "accepted: linformer[:rank=N]"]),
    ("io-model --gpu base.toml", ["device file 'base.toml': base 'nope' is not known", "h100-sxm"]),
    ("io-model --splits 0", ["--splits '0'", "accepted: 1 to 256, or auto with --gpu"]),
    ("io-model --splits x", ["--splits 'x': not a whole number", "or auto with --gpu"]),
    ("io-model --dropout abc", ["--dropout 'abc': not a number", "at least 0 and below 1"]),
    ("run --energy --device cpu", ["--energy: a CPU's energy is not measured"]),
    ("io-model --dropout 1", ["--dropout '1': out of range"]),
    ("kv-cache --model llama-3-70b --tp 3", ["--tp '3'", "accepted: ", "1, 2, 4, 8, 16, 32, 64"]),
]


@pytest.mark.parametrize(("line", "parts"), OTHER, ids=[line for line, _ in OTHER])
def test_bad_line(line: str, parts: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(line.split(), capsys)
    assert_refused(code, out, err)
    for part in parts:
        assert part in err


@pytest.mark.parametrize("name", ["empty", "file", "newer.jsonl", "other.jsonl"])
def test_a_file_that_is_no_results_file_exits_4(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert_refused(*run(["report", name], capsys), expected=4)


@pytest.mark.skipif(GPU, reason="this machine has a GPU")
@pytest.mark.parametrize("command", ["run", "check"])
@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_device_that_is_not_here_exits_3(
    command: str, device: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = run([command, "--device", device], capsys)
    assert_refused(code, out, err, expected=3)
    assert f"--device '{device}'" in err


def test_bad_input_is_found_before_a_missing_device(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(["run", "--device", "cuda:7", "--heads", "6", "--kv-heads", "4"], capsys)
    assert code == 2, err


def test_nothing_is_left_behind(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(Path().rglob("*"))
    for line in ("run --seqlens 1k-3k", "run --out new --causal maybe", "report other.jsonl"):
        run(line.split(), capsys)
    assert sorted(Path().rglob("*")) == before


def test_debug_shows_the_traceback(capsys: pytest.CaptureFixture[str]) -> None:
    from flashbench.errors import SpecError

    with pytest.raises(SpecError):
        main(["run", "--debug", "--seqlens", "1k-3k"])


REAL = [
    (["run", "--seqlens", "1k-3k"], 2),
    (["run", "--out", "/proc/flashbench"], 2),
    (["run", "--out", "/proc/version/below"], 2),
    (["run", "--config", "/proc/self/mem"], 2),
    (["report", "other.jsonl"], 4),
    (["list", "nothing"], 2),
    (["--seqlens"], 2),
    (["run", "--impls", "na\udcefve"], 2),
]


@pytest.mark.parametrize(("argv", "expected"), REAL, ids=[ascii(" ".join(argv)) for argv, _ in REAL])
def test_the_real_program_refuses(argv: list[str], expected: int) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "flashbench", *argv],
        capture_output=True,
        env={**os.environ, "COLUMNS": "40"},
        check=False,
    )
    assert_refused(done.returncode, done.stdout.decode(), done.stderr.decode("utf-8", "replace"), expected)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("line", ["io-model --seqlens 1k", "list devices --json"])
def test_a_full_disk_behind_stdout_is_one_line(line: str) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "flashbench", *line.split()], stdout=full, stderr=subprocess.PIPE,
            text=True, timeout=240,
        )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == "error: the output cannot be written: No space left on device\n"


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["verify", "\ud800"], r"error: '\ud800': is no text; accepted: words in Unicode"),
        (["block", "--model", "\ud800"], r"error: --model '\ud800': is no text; accepted: words in Unicode"),
        (
            ["io-model", "--seqlens", "16", "--block-mask", "causal", "--paper"],
            "error: block mask 'causal': the papers' view (--paper) has none; accepted: no block mask",
        ),
    ],
)
def test_what_long_fuzzing_found(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, _, stderr = run(argv, capsys)
    assert (code, stderr.splitlines()[0]) == (2, said)
