"""Whole layers: FLOPs by hand, what is right and what is wrong, files, tables and the report's section."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flashbench import blocks, kernels, presets, report, runfile, table
from flashbench._cli import block as command
from flashbench.cli import main
from flashbench.kernels import Target, _layer

TASK = blocks.Task(
    preset=presets.TINY, implementation="sdpa", mode="train", batch=2, seqlen=48, layers=2, dtype="fp32"
)


def flashbench(*line: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(list(line))
    return int(str(ended.value.code))


def test_flops_by_hand() -> None:
    gpt2 = replace(TASK, preset=presets.find("gpt2-medium"), mode="infer", batch=1, seqlen=1024, layers=1)
    # the paper's count of a layer: 24·N·h² of matrices, and attention of the causal half
    pairs = 16 * 1024 * 1025 // 2
    assert gpt2.flops == 24 * 1024 * 1024**2 + 4 * pairs * 64
    assert replace(gpt2, mode="train", layers=24).flops == 3 * 24 * gpt2.flops


def test_parameters_of_a_layer_are_those_of_the_models() -> None:
    def parameters(name: str) -> int:
        return sum(rows * columns for rows, columns in presets.find(name).matrices)

    assert parameters("gpt2-medium") == 12 * 1024**2
    assert parameters("bert-large") == 12 * 1024**2
    assert parameters("llama-3-8b") == 4096 * (4096 + 2 * 1024) + 4096**2 + 3 * 4096 * 14336
    assert 32 * parameters("llama-3-8b") == pytest.approx(8.03e9 - 2 * 128256 * 4096, rel=0.01)
    assert all(row.hidden == 64 * row.num_heads for row in presets.PRESETS if row.name.startswith("gpt2"))


@pytest.mark.parametrize("mode", blocks.MODES)
@pytest.mark.parametrize(
    "model", ["tiny", *(pytest.param(name, marks=pytest.mark.slow) for name in ("plain", "encoder"))]
)
def test_a_right_layer_is_timed(model: str, mode: str) -> None:
    changes = {"plain": {"gated": False}, "encoder": {"gated": False, "causal": False}}.get(model, {})
    row = blocks.measure(replace(TASK, preset=replace(presets.TINY, **changes), mode=mode), Target())
    assert row["status"] == "ok", row
    assert row["tokens_per_s"] == pytest.approx(96 / row["time_s"])
    assert row["flops_per_s"] == pytest.approx(row["flops"] / row["time_s"])
    assert row["attention_share"] > 0
    assert "mfu" not in row  # a CPU's peak is not known


def test_an_attention_that_is_wrong_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    sdpa = kernels.get("sdpa")

    def off(problem: object, inputs: object) -> object:
        call = sdpa.prepare(problem, inputs)  # type: ignore[arg-type]
        return lambda: call() * 1.01

    monkeypatch.setitem(kernels.registry(), "sdpa", replace(sdpa, prepare=off))
    row = blocks.measure(TASK, Target())
    assert row["status"] == "wrong"
    assert "is off by" in row["reason"]
    assert "time_s" not in row


def test_others_end_with_a_reason() -> None:
    found = {
        name: blocks.measure(replace(TASK, implementation=name, seqlen=16), Target())
        for name in ("flash", "sdpa-cudnn", "linformer")
    }
    statuses = {name: row["status"] for name, row in found.items()}
    assert statuses == {"flash": "checked", "sdpa-cudnn": "unavailable", "linformer": "unsupported"}
    assert all(row["reason"] for row in found.values())
    for name in ("linformer", "reformer", "longformer", "linear-attention"):
        row = blocks.measure(replace(TASK, implementation=name, seqlen=16, mode="infer"), Target())
        assert row["reason"] == "not exact attention: the layer would be another", name


def test_the_command_writes_what_the_report_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "blocks.jsonl"
    line = ("block", "--model", "tiny", "--impls", "naive,sdpa", "--seqlens", "32", "--layers", "all",
            "--dtype", "fp32", "--device", "cpu", "--out", str(out), "--json", "-q")  # fmt: skip
    assert flashbench(*line) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [(row["implementation"], row["mode"], row["status"]) for row in rows] == [
        ("naive", "train", "ok"), ("sdpa", "train", "ok"), ("naive", "infer", "ok"), ("sdpa", "infer", "ok"),
    ]  # fmt: skip
    assert {row["layers"] for row in rows} == {2}
    found = runfile.load(out)
    assert len(found.blocks) == 4
    assert not found.notes
    page = report.build(table.build([found]), table.headers([found]), None, table.blocks([found]))
    assert "tiny, train: 2 layers, batch 1, fp32" in page
    assert flashbench(*line) == 2
    assert "a results file, which is not overwritten" in capsys.readouterr().err


OWN = """
import torch
from torch.nn.functional import scaled_dot_product_attention as sdpa

import flashbench


def attention(q, k, v, causal=False, scale=None):
    return sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=True)


@flashbench.implementation(layout="bshd")
def rows_first(q, k, v, causal=False, scale=None):
    assert q.is_contiguous() and q.shape[2] == 4, "rows before heads"
    return attention(*(x.transpose(1, 2) for x in (q, k, v)), causal, scale).transpose(1, 2)


def blind(q, k, v, causal=False):
    return attention(q.detach(), k.detach(), v.detach(), causal)


def off(q, k, v, causal=False):
    return 1.01 * attention(q, k, v, causal)


def writes(q, k, v, causal=False):
    o = attention(q, k, v, causal)
    with torch.no_grad():
        k.zero_()
    return o


def other(q, k, v):
    return attention(q, k, v)


def counted(q, k, v, causal=False):
    global calls
    calls += 1
    return attention(q, k, v, causal)


calls = 0
"""


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.chdir(tmp_path)
    Path("own.py").write_text(OWN)
    yield
    for name in [name for name in kernels.registry() if name.startswith("own.py:")]:
        del kernels.registry()[name]  # another test's file is another


BLIND = ("unsupported", "its o has no gradient: it has a forward only")


@pytest.mark.usefixtures("own")
@pytest.mark.parametrize(
    ("name", "train", "infer"),
    [
        ("attention", ("ok", ""), ("ok", "")), ("rows_first", ("ok", ""), ("ok", "")),
        ("blind", BLIND, ("ok", "")),
        ("off", ("wrong", "a layer is off by"), ("wrong", "rows first: @flashbench.implementation")),
        ("writes", ("failed", "modified by an inplace operation"), ("wrong", "it changes its input k")),
        ("other", ("unsupported", "its signature has no causal"), ("unsupported", "no causal")),
    ],
)  # fmt: skip
def test_a_function_of_ones_own_takes_part(
    name: str, train: tuple[str, str], infer: tuple[str, str], capsys: pytest.CaptureFixture[str]
) -> None:
    spec = f"own.py:{name}"
    wrong = {"wrong", "failed"} & {train[0], infer[0]}
    line = ("block", "--model", "tiny", "--impls", "none", "--impl", spec, "--seqlens", "32",
            "--dtype", "fp32", "--device", "cpu", "--out", "o.jsonl", "-q")  # fmt: skip
    assert flashbench(*line) == (5 if wrong else 0)
    capsys.readouterr()
    rows = {row["mode"]: row for row in runfile.load("o.jsonl").blocks}
    assert set(rows) == {"train", "infer"}
    for mode, (status, reason) in (("train", train), ("infer", infer)):
        row = rows[mode]
        assert (row["implementation"], row["status"]) == (spec, status), row
        assert reason in row.get("reason", "")
        assert ("time_s" in row) == (status == "ok")
        assert row["config"]["source"] == spec
        assert len(row["config"]["source_sha256"]) == 16


@pytest.mark.usefixtures("own")
def test_it_stands_beside_the_default_ones_and_is_called_once_a_layer() -> None:
    spec = "own.py:counted"
    texts = command.DEFAULTS | {"impl": spec, "model": "tiny"}
    assert [task.implementation for task in command.parse_tasks(texts)][:4] == [
        "naive", "sdpa", "flash", spec,
    ]  # fmt: skip
    task = replace(TASK, implementation=spec, layers=3, mode="infer")
    module = sys.modules[kernels.get(spec).origin.load(Target()).function.__module__]  # type: ignore
    stack = _layer.Stack(
        task.preset, task.problem,
        [_layer.weights(task.preset, dtype=torch.float32, device="cpu", seed=0)] * task.layers, spec,
    )  # fmt: skip
    stack(torch.randn(task.batch, task.seqlen, task.preset.hidden))
    assert module.calls == 3


ROW = {"type": "blocks", "model": "tiny", "implementation": "flash", "exact": True, "mode": "train",
       "batch": 1, "seqlen": 64, "layers": 2, "dtype": "bf16", "status": "ok", "time_s": 2e-3,
       "tokens_per_s": 32e3,
       "attention_share": 0.5, "samples_s": [1.9e-3, 2e-3, 2e-3, 2.2e-3]}  # fmt: skip


@pytest.mark.parametrize(
    ("flags", "of_attention", "shown", "hosts"),
    [
        ([], [], "", False), (["multimodal"], [], "multimodal", False),
        (["launch-bound"], ["drift"], "launch-bound, attention drift", True),
        ([], ["launch-bound"], "attention launch-bound", True),
    ],
)  # fmt: skip
def test_flags_and_spread_are_shown_and_a_share_that_is_the_hosts_is_said_to_be(
    flags: list[str], of_attention: list[str], shown: str, hosts: bool,
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    row = ROW | {"flags": flags, "attention_flags": of_attention}
    path = tmp_path / "b.jsonl"
    with runfile.create(path, runfile.header(argv=[], options={}, environment={}, cells=())) as writer:
        writer.put(row)
    found = runfile.load(path)
    assert not found.notes
    page = report.build(table.build([found]), table.headers([found]), None, table.blocks([found]))
    assert f"<td>11.2 %</td><td>{shown}</td>" in page
    said = "1 row is launch-bound: time and share of attention there are partly the host"
    assert (said in page) == hosts
    monkeypatch.setattr(blocks, "rows", lambda *_, **__: iter([row]))
    monkeypatch.setenv("COLUMNS", "200")
    assert flashbench("block", "--model", "tiny", "--impls", "sdpa", "--device", "cpu", "-q") == 0
    out, err = capsys.readouterr()
    assert "11.2%" in out
    assert shown in out
    assert (said in " ".join(err.split())) == hosts


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("--model", "mistral-7b", "--model"), ("--modes", "trial", "--modes"),
        ("--layers", "none", "all, or 1"),
        ("--dtype", "fp8", "--dtype"), ("--impls", "flesh", "flash"),
        ("--impls", "none", "--impls 'none': nothing is left"),
        ("--impl", "nowhere.py:f", "--impl 'nowhere.py:f': there is no file"),
        ("--impl", "f", "--impl 'f': not a function"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(
    option: str, value: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert flashbench("block", option, value) == 2
    assert said in capsys.readouterr().err


LATE = """
calls = 0
def late(q, k, v, causal=False, scale=None, enable_gqa=False):
    import torch
    global calls
    calls += 1
    sdpa = torch.nn.functional.scaled_dot_product_attention
    o = sdpa(q, k, v, is_causal=causal, scale=scale, enable_gqa=enable_gqa)
    return o * (1 if calls < 5 else 1.25)
"""


@pytest.mark.parametrize("kept", [0, 1])
def test_what_was_measured_before_an_interrupt_is_shown_and_how_much_it_is(
    kept: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    measure, calls = blocks.measure, list[blocks.Task]()

    def stopped(task: blocks.Task, target: Target, *, seed: int) -> dict[str, Any]:
        calls.append(task)
        if len(calls) > kept:
            signal.raise_signal(signal.SIGTERM)
        return measure(task, target, seed=seed)

    monkeypatch.setattr(blocks, "measure", stopped)
    out = tmp_path / "blocks.jsonl"
    line = ("block", "--model", "tiny", "--impls", "naive", "--seqlens", "16", "--dtype", "fp32",
            "--device", "cpu", "--out", str(out), "-q")  # fmt: skip
    assert flashbench(*line, "--json") == 130
    shown, said = capsys.readouterr()
    assert len(json.loads(shown)) == len(runfile.load(out).blocks) == kept
    assert said == f"warning: interrupted; {kept} of 2 rows were measured\n"
    assert runfile.verify(out).missing == 2 - kept
    monkeypatch.setattr(blocks, "measure", measure)
    assert flashbench(*line, "--json") == (2 if kept else 0)  # rows are kept, a header alone is not
    assert len(runfile.load(out).blocks) == (kept or 2)


@pytest.mark.usefixtures("own")
def test_a_function_that_is_wrong_from_a_later_call_on_is_no_row_of_times(tmp_path: Path) -> None:
    (tmp_path / "late.py").write_text(LATE)
    row = blocks.measure(replace(TASK, implementation="late.py:late", mode="infer"), Target())
    assert row["status"] == "wrong"
    assert row["reason"].startswith("it was right at first, and wrong once it was timed: a layer is off by")
    assert "time_s" not in row
