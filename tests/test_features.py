"""The attention options are one list for four commands and TOML, with the same meaning and refusals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy
import pytest
import typer

from flashbench import features, runfile, sweep
from flashbench.cli import app, main
from flashbench.errors import FlashbenchError, SpecError
from flashbench.problem import Problem

GIVEN: dict[str, tuple[str, dict[str, Any]]] = {
    "--window 128,0": ("window = '128,0'", {"window": (128, 0)}),
    "--window tokens=64": ("window = 'tokens=64'", {"window": (63, 0)}),
    "--softcap 30": ("softcap = 30.0", {"softcap": 30.0}),
    "--alibi": ("alibi = true", {"alibi": True}),
    "--bias 1h1k": ("bias = '1h1k'", {"bias": "1h1k"}),
    "--sinks": ("sinks = true", {"sinks": True}),
    "--dropout 0.1": ("dropout = 0.1", {"dropout_p": 0.1}),
    "--block-mask random:0.5": ("block-mask = 'random:0.5'", {"block_mask": "random:0.5"}),
    "--varlen 1k,2*3x4": (
        "varlen = ['1k', '2*3x4']",
        {"lengths": ((1024, 1024), (3, 4), (3, 4)), "batch": 3, "seqlen_q": 1024, "seqlen_k": 1024},
    ),
    "--layout bshd": ("layout = 'bshd'", {"layout": "bshd"}),
    "--deterministic": ("deterministic = true", {"deterministic": True}),
    "--causal top-left": ("causal = 'top-left'", {"causal": True, "alignment": "top-left"}),
}
"""As typed → (as a config file says it, the fields of every problem)."""

BAD = {
    "--window 1,2,3": "--window '1,2,3': not a window; accepted: keys beside",
    "--softcap -1": "--softcap '-1': out of range; accepted: a number of 0 (off) or above",
    "--softcap nan": "--softcap 'nan': out of range",
    "--bias hqk": "--bias 'hqk': not a shape; accepted: bhqk with 1 for any of the letters",
    "--dropout 1": "--dropout '1': out of range; accepted: a number at least 0 and below 1",
    "--block-mask random:2": "--block-mask 'random:2': not a block mask; accepted: causal, window, butterfly",
    "--block-mask absent.npz": "--block-mask 'absent.npz': no such file; accepted: an .npz file",
    "--varlen 1k,x": "--varlen '1k,x': 'x' is no length; accepted: a length such as 512",
    "--varlen 2*": "--varlen '2*': '2*' is no length",
    "--varlen 1k,y": "--varlen '1k,y': 'y': not a whole number",
    "--layout hdsb": "--layout 'hdsb' is not known",
    "--fp8-scale row": "--fp8-scale 'row' is not known",
    "--causal top": "--causal 'top' is not known",
    "--hadamard": "--hadamard: hadamard is of fp8 alone; the dtype is",
    "--fp8-scale head": "--fp8-scale: fp8_scale is of fp8 alone; the dtype is",
    "--varlen 1k --bias bhqk": "--bias, --varlen: bias 'bhqk' has no meaning in a packed batch",
}
"""As typed → how the one line begins."""


def run(argv: list[str]) -> int:
    """The exit code of the program."""
    with pytest.raises(SystemExit) as left:
        main(argv)
    return int(left.value.code or 0)


def planned(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    assert run(["run", "--device", "cpu", "--impls", "naive", "--dry-run", "--json", *argv]) == 0
    found: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize("typed", GIVEN)
def test_the_line_and_the_file_mean_the_same(
    typed: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text, wanted = GIVEN[typed]
    config = tmp_path / "x.toml"
    config.write_text(text)
    on_line, in_file = planned(typed.split(), capsys), planned(["--config", str(config)], capsys)
    assert on_line == in_file
    assert on_line
    for row in on_line:
        plain = json.loads(json.dumps(wanted))
        assert {name: row[name] for name in wanted} == plain


@pytest.mark.parametrize("typed", BAD)
@pytest.mark.parametrize("command", ["run", "check", "io-model", "profile --trace"])
def test_a_bad_value_is_one_line_and_exit_code_2(
    command: str, typed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run([*command.split(), *typed.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(f"error: {BAD[typed]}"), err
    assert err.count("\n") == 1


@pytest.mark.parametrize("command", ["run", "check", "io-model", "profile"])
def test_every_command_has_every_option(command: str) -> None:
    group = typer.main.get_command(app)
    have = {parameter.name for parameter in group.commands[command].params}  # type: ignore[attr-defined]
    assert set(features.NAMES) <= have


def test_none_on_the_line_turns_off_what_a_file_turns_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "x.toml"
    config.write_text("window = '8,0'\nsinks = true\nbias = 'bhqk'\nblock_mask = 'causal'\nsoftcap = 5\n")
    off = "--window none --no-sinks --bias none --block-mask none --softcap 0"
    assert planned(["--config", str(config), *off.split()], capsys) == planned([], capsys)


def test_lengths_of_a_packed_batch_replace_those_of_the_defaults_and_exclude_those_of_the_line() -> None:
    for other in ("seqlens", "seqlens_k", "batch", "tokens"):
        with pytest.raises(FlashbenchError, match="exclude each other"):
            sweep.parse({"varlen": "4,5", other: "4"}, str, ())
    joined = sweep.combine(sweep.parse({"varlen": "4,5"}, str, ()), sweep.defaults("cuda"))
    assert {p.lengths for p in sweep.sweep_of(joined).problems()} == {((4, 4), (5, 5))}
    line = sweep.combine(sweep.parse({"seqlens": "4"}, str, ()), sweep.parse({"varlen": "4,5"}, str, ()))
    assert "varlen" not in line


def test_options_survive_resume_and_are_told_in_the_summary(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    grid = "--device cpu --impls naive --seqlens 32 --head-dims 16 --dtypes fp32 --causal no --passes fwd"
    asked = "--softcap 3 --sinks --window 4,0"
    assert run(["run", *grid.split(), *asked.split(), "--out", str(out)]) == 0
    shown = capsys.readouterr().out
    assert "w4,0 softcap3 sinks" in " ".join(shown.split())
    [record] = runfile.load(out / "results.jsonl").records
    assert record.status == "ok", record.reason
    assert record.cell.problem.options == {"window": (4, 0), "softcap": 3.0, "sinks": True}
    assert run(["run", "--resume", "--out", str(out), "--quiet"]) == 0
    assert len(runfile.load(out / "results.jsonl").records) == 1


def test_a_mask_from_a_file_is_measured(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "mask.npz"
    numpy.savez(path, numpy.tri(32, dtype=bool))
    grid = "--impls naive --seqlens 32 --heads 1 --head-dims 16 --dtypes fp32 --causal no --passes bwd --json"
    assert run(["check", *grid.split(), "--block-mask", str(path)]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert row["status"] == "checked"


def test_gradients_of_bias_and_sinks_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    grid = "--impls naive --seqlens 32 --heads 1 --head-dims 16 --dtypes fp32 --causal no --passes bwd --json"
    assert run(["check", *grid.split(), "--bias", "1hqk", "--sinks"]) == 0
    [row] = json.loads(capsys.readouterr().out)
    assert 0 < row["max_abs_error_dbias"] <= row["budget_dbias"]
    assert 0 < row["max_abs_error_dsinks"] <= row["budget_dsinks"]


def test_a_problem_takes_the_parsed_values_and_no_others() -> None:
    p = Problem(
        batch=1, num_heads=1, num_kv_heads=1, seqlen_q=4, seqlen_k=4, head_dim=8, head_dim_v=8, dtype="fp32",
        causal=False,
    )  # fmt: skip
    assert features.apply(p, {"seqlens": (3,)}) == p
    assert features.apply(p, {"varlen": ((1, 2),)}).lengths == ((1, 2),)
    with pytest.raises(SpecError, match="hadamard"):
        features.apply(p, {"hadamard": True})


BROKEN = {
    "no zip": (b"not a zip", "cannot be read (File is not a zip file)"),
    "empty": (b"", "cannot be read ("),
    "cut": (lambda whole: whole[: len(whole) // 2], "cannot be read ("),
    "one byte wrong": (lambda whole: whole[:99] + bytes([whole[99] ^ 255]) + whole[100:], "cannot be read ("),
    "another shape": (numpy.ones((3, 3), bool), "holds bool (3, 3); it must be one boolean matrix of (1, 1)"),
    "numbers": (numpy.ones((1, 1)), "holds float64 (1, 1); it must be one boolean matrix"),
}  # fmt: skip
"""What an .npz file may be → what is said of it."""


@pytest.mark.parametrize("command", ["check --device cpu --impls naive", "io-model --models flash"])
@pytest.mark.parametrize("broken", BROKEN)
def test_a_file_that_is_no_block_mask_is_refused_before_anything_runs(
    broken: str, command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content, said = BROKEN[broken]
    path = tmp_path / "mask.npz"
    numpy.savez(path, content if isinstance(content, numpy.ndarray) else numpy.ones((1, 1), bool))
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif not isinstance(content, numpy.ndarray):
        path.write_bytes(content(path.read_bytes()))
    assert run([*command.split(), "--seqlens", "65", "--block-mask", str(path)]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"error: --block-mask: block_mask '{path}' {said}")
    assert error.count("\n") == 1
