"""``flashbench profile``: modes, their options, the trace's verdict; counters are tested in test_counting."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from attention import problem

from flashbench import cli, kernels, tracing
from flashbench._cli import profile as command
from flashbench._cli import profile_timeline
from flashbench.errors import EXIT_GATE, EXIT_UNAVAILABLE, EXIT_UNREADABLE, EXIT_USAGE
from flashbench.kernels import Target
from flashbench.problem import Cell

WIDE = str(Path(__file__).parent / "data" / "ncu_wide.csv")
SMALL = ["--seqlens", "65", "--head-dims", "16", "--dtypes", "fp16", "--causal", "yes", "--kv-heads", "1"]

interpreted = pytest.mark.skipif(
    torch.cuda.is_available() or importlib.util.find_spec("triton") is None,
    reason="kernels are interpreted on a machine without GPU, with Triton",
)


def run(capsys: pytest.CaptureFixture[str], *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(["profile", *argv])
    code = stop.value.code
    said = capsys.readouterr()
    return int(code or 0), said.out, said.err


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["--trace", "--known"], "--trace and --known exclude each other"),
        (["--counters", "--trace", "--static"], "--trace and --static exclude each other"),
        (
            ["--counters", "--trace", "--gpu", "t4"],
            "--gpu does nothing with --counters --trace; accepted with --trace, --static",
        ),
        (
            ["--counters", "--trace-limit", "9"],
            "--trace-limit does nothing with --counters; accepted with --trace",
        ),
        (["--counters", "--trace", "--trace-limit", "x"], "--trace-limit 'x'"),
        (["--static", "--import", "x"], "--static and --import exclude each other"),
        (["--trace", "--arch", "sm_90"], "--arch does nothing with --trace; accepted with --static"),
        (["--trace", "--detail"], "--detail does nothing with --trace; accepted with --counters"),
        (["--import", WIDE, "--seqlens", "1k"], "--seqlens does nothing with --import"),
        (["--trace", "--out", "x"], "--out does nothing with --trace"),
        (["--trace", "--trace-limit", "0"], "--trace-limit '0'"),
        (["--trace", "--gpu", "mi300x"], "--gpu 'mi300x'"),
        (["--trace", "--gpu", "h1000"], "h1000"),
        (["--trace", "--impls", "nope"], "'nope' is not known"),
        (["--trace", "--json", "--csv"], "--json and --csv exclude each other"),
        (["--counters", "--device", "gpu"], "--device 'gpu'"),
        (["--static", "--arch", "sm_1"], "sm_1"),
        (["--import", "/nonexistent"], "--import '/nonexistent'"),
        (["--import", "."], "is a folder"),
        (["--import", ""], "--import ''"),
        (["--import", "", "--trace"], "--trace and --import exclude each other"),
    ],
)
def test_bad_input_is_one_line(capsys: pytest.CaptureFixture[str], argv: list[str], says: str) -> None:
    code, out, err = run(capsys, *argv)
    assert code == EXIT_USAGE
    assert says in err.splitlines()[0]
    assert out == ""
    assert "Traceback" not in err


def test_a_file_that_is_no_profile_is_unreadable(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "x.csv"
    path.write_text("a,b\n1,2\n")
    assert run(capsys, "--import", str(path))[0] == EXIT_UNREADABLE
    path.write_text("==WARNING== No kernels were profiled.\n")
    code, _, err = run(capsys, "--import", str(path))
    assert (code, "saw no kernel" in err) == (EXIT_UNREADABLE, True)
    path.write_text('"ID","Kernel Name","sm__x.sum"\n"","",""\n"0","k","1"\n')
    assert "--page raw --csv" in run(capsys, "--import", str(path))[2]
    code, _, err = run(capsys, "--import", str(path))
    assert (code, "none of the metrics" in err, "dram__bytes_read.sum" in err) == (
        EXIT_UNREADABLE,
        True,
        True,
    )


def test_an_imported_file_without_certain_values_is_refused_and_broken_lines_are_told(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path, text = tmp_path / "x.csv", Path(WIDE).read_text(encoding="utf-8")
    path.write_text(text.replace('"byte"', '"furlong"'), encoding="utf-8")
    code, out, err = run(capsys, "--import", str(path))
    assert (code, out) == (EXIT_UNREADABLE, "")
    assert f"--import {str(path)!r}: column " in err
    assert "'furlong'" in err.splitlines()[0]
    path.write_text(text[: text.rindex('"(2, 64, 1)"')], encoding="utf-8")
    code, out, err = run(capsys, "--import", str(path), "--json")
    assert (code, len(json.loads(out)), "1 line below the header" in err) == (0, 2, True)
    odd = '"Kernel Name","dram__bytes_read.sum","dram__bytes_write.sum"\n"","byte","byte"\n"k",'
    path.write_text(f'{odd}"5","n/a"\n"k","(!) nan","7"\n', encoding="utf-8")
    code, out, err = run(capsys, "--import", str(path), "--json")
    assert (code, [row["dram_write_bytes"] for row in json.loads(out)]) == (0, [None, 7])
    assert "without a number: dram__bytes_write.sum ('n/a'), dram__bytes_read.sum ('(!) nan')" in err
    path.write_text(f'{odd}"inf",""\n', encoding="utf-8")
    code, out, err = run(capsys, "--import", str(path))
    assert (code, out) == (EXIT_UNREADABLE, "")
    assert "1 kernel, but no counter can be made of what is no number: dram__bytes_read.sum ('inf')" in err
    again = '"dram__bytes_read.sum","dram__bytes_read.sum"'
    path.write_text(f'"Kernel Name",{again}\n"","byte","byte"\n"k","1","2"\n', encoding="utf-8")
    code, out, err = run(capsys, "--import", str(path), "--json")
    assert (code, json.loads(out)[0]["dram_read_bytes"]) == (0, 2)
    assert "more than once for a kernel: dram__bytes_read.sum; the last one counts" in err


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "holds nothing; accepted: tables [[cells]]"), ("cells = 3", "holds cells; accepted: tables"),
        ("seqlens = 5", "holds seqlens; accepted: tables [[cells]]"),
        ("cells = [3]", "[[cells]] 1: is no table"),
        ("[[cells]]\nseqlen = 5", "[[cells]] 1: key 'seqlen' is not known; did you mean 'seqlens'?"),
        ("[[cells]]\n[[cells]]\nwindow = \"x\"", "[[cells]] 2: window 'x'"),
        ("[[cells]]\n[[cells]]\n", "[[cells]] 2: the cell "),
    ],
)  # fmt: skip
def test_a_file_of_grids_that_is_none_is_refused_in_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    path = tmp_path / "x.toml"
    path.write_text(text, encoding="utf-8")
    code, out, err = run(capsys, "--trace", "--config", str(path))
    assert (code, out) == (EXIT_USAGE, "")
    assert err.startswith(f"error: --config {str(path)!r}: {says}")


def test_an_imported_profile_is_shown_in_bytes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    code, out, _ = run(capsys, "--import", WIDE, "--json")
    rows = json.loads(out)
    assert code == 0
    assert [row["l2_read_bytes"] for row in rows] == [201_326_592] * 3
    assert rows[0]["registers_per_thread"] == 168
    wide = tmp_path / "wide.csv"
    wide.write_text(Path(WIDE).read_text(encoding="utf-8"), encoding="utf-16")
    assert run(capsys, "--import", str(wide), "--json")[1] == out
    code, out, _ = run(capsys, "--import", WIDE)
    assert "201 MB" in out


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("mode", ["--counters", "--counters --trace", "--known", "--timeline"])
def test_without_a_gpu_it_says_what_serves_instead(capsys: pytest.CaptureFixture[str], mode: str) -> None:
    code, out, err = run(capsys, *mode.split())
    assert (code, out) == (EXIT_UNAVAILABLE, "")
    assert "--trace" in err or "GPU" in err


def test_every_option_belongs_to_a_mode() -> None:
    import inspect

    named = set(inspect.signature(command.profile).parameters) - {*command.MODES, "json", "csv", "quiet"}
    assert named == {name for names in command.TAKES.values() for name in names}


@interpreted
def test_the_trace_is_the_model_to_the_byte(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "--trace", *SMALL, "--json")
    assert code == 0, err
    found = json.loads(out)
    assert len(found) == 2
    for cell in found:
        assert (cell["difference_bytes"], cell["difference_flops"]) == (0, 0)
        assert cell["total"]["read_bytes"] == cell["total"]["modelled_read_bytes"] > 0
        assert cell["total"]["flops"] == cell["total"]["modelled_flops"] > 0
        assert cell["total"]["exps"] > 0
        assert 0 < cell["kernels"][0]["masked_share"] < 1
    assert [kernel["kernel"] for kernel in found[1]["kernels"]] == [
        "delta_rows",
        "backward_dq",
        "backward_dkdv",
    ]


@interpreted
@pytest.mark.parametrize("kept", [0, 1])
def test_what_was_traced_before_an_interrupt_is_shown(
    kept: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    trace, calls = tracing.trace_cell, list[Cell]()

    def stopped(cell: Cell, *how: Any, **more: Any) -> dict[str, Any]:
        calls.append(cell)
        if len(calls) > kept:
            signal.raise_signal(signal.SIGTERM)
        return trace(cell, *how, **more)

    monkeypatch.setattr(tracing, "trace_cell", stopped)
    code, out, err = run(capsys, "--trace", *SMALL, "--json", "-q")
    assert (code, len(json.loads(out))) == (130, kept)
    assert err == f"warning: interrupted; {kept} of 2 cells were traced\n"


@pytest.mark.parametrize("kept", [0, 1])
def test_what_was_recorded_before_an_interrupt_is_shown(
    kept: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [Cell(implementation="naive", problem=problem(), pass_=pass_) for pass_ in ("fwd", "bwd")]
    replies = iter([{"reason": "no GPU"}] * kept)

    def timed(*_: Any) -> dict[str, Any]:
        if (reply := next(replies, None)) is None:
            signal.raise_signal(signal.SIGTERM)
        return reply or {}

    monkeypatch.setattr(profile_timeline, "_timed", timed)
    card = Target(device="cuda:0", name="a card")
    with pytest.raises(typer.Exit) as stop:
        profile_timeline.show(cells, card, seed=0, json=True, csv=False, quiet=True)
    out, err = capsys.readouterr()
    assert (stop.value.exit_code, len(json.loads(out))) == (130, kept)
    assert err == f"warning: interrupted; {kept} of 2 cells were recorded\n"


@interpreted
def test_options_of_attention_are_traced_with_their_gradients(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--seqlens", "33", "--head-dims", "16", "--dtypes", "fp16", "--passes", "bwd", "--causal", "no"]
    options = ["--window", "9,0", "--bias", "1hqk", "--sinks", "--alibi"]
    code, out, err = run(capsys, "--trace", *grid, *options, "--json")
    assert code == 0, err
    (cell,) = json.loads(out)
    assert (cell["difference_bytes"], cell["difference_flops"]) == (0, 0)
    assert [kernel["step"] for kernel in cell["kernels"]] == ["delta", "dq", "dkdv", "dbias", "dsinks"]


@interpreted
def test_the_tiles_of_a_card_can_be_traced(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--seqlens", "200", "--head-dims", "64", "--dtypes", "bf16", "--passes", "fwd", "--causal", "no"]
    reads = []
    for more in ([], ["--gpu", "h100-sxm"]):
        asked = [*grid, "--impls", "flash-v2", "--kv-heads", "2", "--json", *more]
        code, out, _ = run(capsys, "--trace", *asked)
        assert code == 0
        (cell,) = json.loads(out)
        assert cell["difference_bytes"] == 0
        reads.append(cell["total"]["read_bytes"])
    assert reads[1] < reads[0]  # larger tiles read K and V less often


@interpreted
def test_what_flash_runs_on_hopper_is_not_traced_and_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--seqlens", "200", "--head-dims", "64", "--dtypes", "bf16", "--passes", "fwd"]
    code, _, err = run(capsys, "--trace", *grid, "--gpu", "h100-sxm")
    assert code == EXIT_UNAVAILABLE
    assert "flash-v3 is written in Gluon" in err


@interpreted
def test_what_cannot_be_traced_says_why(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "--trace", *SMALL, "--impls", "naive")
    assert (code, "no Triton kernel" in err) == (EXIT_UNAVAILABLE, True)
    code, _, err = run(capsys, "--trace", *SMALL, "--impls", "naive,flash", "--passes", "fwd")
    assert (code, "1 cell not traced: naive is no Triton kernel" in err) == (0, True)
    code, _, err = run(capsys, "--trace", *SMALL, "--trace-limit", "1")
    assert (code, "too many to interpret" in err) == (EXIT_UNAVAILABLE, True)


@interpreted
def test_each_reason_is_given_once(capsys: pytest.CaptureFixture[str]) -> None:
    grid = ["--impls", "naive,flash", "--seqlens", "65,129,1000", *SMALL[2:]]
    code, _, err = run(capsys, "--trace", *grid, "--trace-limit", "1")
    assert code == EXIT_UNAVAILABLE
    assert err.count("too many to interpret") == err.count("no Triton kernel") == 1
    assert re.search(r"up to \d+ tile visits", err)
    _, _, err = run(capsys, "--trace", *grid, "--trace-limit", "1", "--seqlens", "65", "--passes", "fwd")
    assert "up to" not in err


@pytest.mark.parametrize("mode", ["--static", "--trace"])
def test_a_broken_triton_is_one_line(tmp_path: Path, mode: str) -> None:
    pytest.importorskip("triton")
    (tmp_path / "triton").mkdir()
    (tmp_path / "triton" / "__init__.py").write_text("raise RuntimeError('no\\nsuch symbol')\n")
    line = [mode, "--head-dims", "64", "--dtypes", "bf16", "--causal", "no", "--passes", "fwd"]
    done = subprocess.run(
        [sys.executable, "-m", "flashbench", "profile", *line, "--quiet"],
        capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )  # fmt: skip
    assert done.returncode == EXIT_UNAVAILABLE, done.stderr
    (said,) = done.stderr.splitlines()
    assert mode in said
    assert "triton cannot be imported: RuntimeError: no such symbol; reinstall it" in said


LOADS_K = "k = tiles.load(tiles.at(K, start_n, k_n), k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE)"


@interpreted
def test_a_kernel_that_loads_k_twice_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own source with one line written twice, in the place of the real one."""
    assert kernels.get("flash").why_unavailable(Target(device="cpu", capability=None)) is None
    from flashbench.kernels import _flash_kernels, _launches

    source = Path(_flash_kernels.__file__).read_text(encoding="utf-8")
    line = next(line for line in source.splitlines() if line.strip() == LOADS_K)
    path = tmp_path / "loads_twice.py"
    path.write_text(source.replace(line, f"{line}\n{line}", 1), encoding="utf-8")
    spec = importlib.util.spec_from_file_location("loads_twice", path)
    assert spec is not None
    assert spec.loader is not None
    edited = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "loads_twice", edited)
    spec.loader.exec_module(edited)
    monkeypatch.setattr(_launches.kernels, "forward", edited.forward)
    p = problem(batch=1, num_heads=2, num_kv_heads=2, seqlen_q=130, seqlen_k=130, dtype="fp16")
    cell = Cell(implementation="flash", pass_="fwd", problem=p)
    found = tracing.trace_cell(cell)
    (k,) = (tensor for tensor in found["kernels"][0]["tensors"] if tensor["tensor"] == "k")
    assert k["read_bytes"] == 2 * k["modelled_read_bytes"]
    assert found["difference_bytes"] == k["modelled_read_bytes"]
    code, _, err = run(capsys, "--trace", *SMALL, "--passes", "fwd")
    assert code == EXIT_GATE
    assert "forward: read of k" in err


@interpreted
def test_other_flops_fail_too(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbench._profilers.trace import _Recorder

    def twice(self: _Recorder, result: Any, inner: int) -> None:
        self.launches[-1].flops += 4 * result.data.size * inner

    monkeypatch.setattr(_Recorder, "product", twice)
    code, _, err = run(capsys, "--trace", *SMALL, "--passes", "fwd")
    assert (code, "FLOPs apart" in err) == (EXIT_GATE, True)


@interpreted
def test_a_kernel_that_raises_fails_and_the_others_are_still_shown(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    real = tracing._launches

    def launches(cell: Cell, *rest: Any) -> Any:
        if cell.pass_ == "bwd":
            raise RuntimeError("no\nsuch luck")
        return real(cell, *rest)

    monkeypatch.setattr(tracing, "_launches", launches)
    code, out, err = run(capsys, "--trace", *SMALL, "--json")
    assert (code, "its kernels raise RuntimeError: no such luck" in err) == (EXIT_GATE, True)
    fwd, bwd = json.loads(out)
    assert fwd["difference_bytes"] == 0
    assert bwd["error"] == "RuntimeError: no such luck"
    code, out, _ = run(capsys, "--trace", *SMALL, "--csv")
    assert (code, "no such luck" in out) == (EXIT_GATE, True)


@interpreted
def test_forward_and_backward_together_is_the_sum_of_both(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys, "--trace", *SMALL, "--passes", "fwd,bwd,fwd+bwd", "--json")
    fwd, bwd, both = (cell["total"] for cell in json.loads(out))
    assert code == 0
    assert both == {name: fwd[name] + bwd[name] for name in both}
