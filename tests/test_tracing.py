"""One K/V head stands for all, to the byte; a trace in a process of its own, and what may become of that."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention import problem

from flashbench import iomodel, kernels, tracing
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.tracing import apart

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

interpreted = pytest.mark.skipif(torch.cuda.is_available(), reason="this process compiles for the GPU")

CARD = Target(device="cuda:0", name="h100-sxm", capability=(9, 0), smem_per_block_bytes=232448)
SHARED = {"batch": 3, "num_heads": 4, "num_kv_heads": 2, "seqlen_q": 70, "seqlen_k": 90, "head_dim": 16}
PARTS = {
    "shared K/V heads": SHARED,
    "as many K/V heads": {**SHARED, "num_heads": 2, "causal": True},
    "one K/V head": {**SHARED, "num_kv_heads": 1, "causal": True, "dtype": "fp32"},
    "one batch": {**SHARED, "batch": 1, "seqlen_k": 33, "causal": True},
    "decode": {**SHARED, "seqlen_q": 1},
    "other head dim of v": {**SHARED, "head_dim": 40, "head_dim_v": 24, "dtype": "bf16"},
}


def cell_of(pass_: str = "fwd", **changes: Any) -> Cell:
    values = {"causal": False, "head_dim_v": changes.get("head_dim", 8), "dtype": "fp16", **changes}
    return Cell(implementation="flash", pass_=pass_, problem=problem(**values))


@interpreted
@pytest.mark.parametrize(
    ("shape", "pass_"), [*((shape, pass_) for shape in PARTS for pass_ in ("fwd", "bwd")),
                         ("shared K/V heads", "fwd+bwd")],
)  # fmt: skip
def test_one_k_v_head_scaled_is_the_whole_cell_traced_to_the_byte(shape: str, pass_: str) -> None:
    cell = cell_of(pass_, **PARTS[shape])
    part, whole = tracing.trace_cell(cell, one_head=True), tracing.trace_cell(cell)
    count = cell.problem.batch * cell.problem.num_kv_heads
    said = {name: part.pop(name) for name in ("traced_as", "scaled_by", "traced_share")}
    assert part == whole
    assert whole["total"]["read_bytes"] > 0
    assert (said["scaled_by"], said["traced_share"]) == (count, 1 / count)
    assert (said["traced_as"]["batch"], said["traced_as"]["num_kv_heads"]) == (1, 1)
    assert said["traced_as"]["num_heads"] == cell.problem.group


@interpreted
def test_the_difference_is_to_the_model_of_the_whole_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that forgot one batch is told apart, though the traced part is as modelled."""
    real = iomodel.estimate

    def short(model: str, asked: Any, pass_: str, **options: Any) -> Any:
        return real(model, replace(asked, batch=max(1, asked.batch - 1)), pass_, **options)

    cell = cell_of(**SHARED)
    right = tracing.trace_cell(cell, one_head=True)
    monkeypatch.setattr(iomodel, "estimate", short)
    wrong = tracing.trace_cell(cell, one_head=True)
    moved = sum(right["total"][f"{kind}_bytes"] for kind in ("read", "write", "atomic"))
    assert (right["difference_bytes"], wrong["difference_bytes"]) == (0, moved // 3)


@interpreted
def test_tf32_is_traced_as_fp32_and_is_as_its_own_model() -> None:
    cell = cell_of("fwd+bwd", **{**SHARED, "dtype": "tf32"})
    found = tracing.trace_cell(cell, one_head=True)
    assert found["traced_as"]["dtype"] == "fp32"
    config = kernels.get("flash").describe(replace(cell.problem, dtype="fp32"), cell.pass_, Target())
    model = iomodel.estimate("flash", cell.problem, cell.pass_, tiles=config).requested
    assert found["difference_bytes"] == 0
    assert found["total"]["read_bytes"] == model.read_bytes
    assert found["total"]["write_bytes"] == model.write_bytes


@interpreted
def test_the_limit_is_on_what_is_run() -> None:
    """A quarter of the visits that the whole cell has; with many heads the whole is never asked for."""
    cell = cell_of(batch=2, num_heads=2, num_kv_heads=2, seqlen_q=128, seqlen_k=128, head_dim=16)
    assert "reason" not in tracing.trace_cell(cell, limit=4, one_head=True)
    assert "16 tile visits are too many" in tracing.trace_cell(cell, limit=4)["reason"]
    found = tracing.trace_cell(cell, limit=3, one_head=True)
    assert found == {"reason": "4 tile visits are too many to interpret; the limit is 3"}


BESIDE = """
import json, os, sys
from flashbench.problem import Cell
from flashbench.tracing import apart
asked = json.load(sys.stdin)
found = apart.trace_apart(Cell.from_json(asked["cell"]), asked["config"])
assert "triton" not in sys.modules and "TRITON_INTERPRET" not in os.environ, "this process is not free"
print(json.dumps(found))
"""


def test_a_real_child_traces_with_the_tiles_of_the_card_and_leaves_its_parent_free() -> None:
    cell = cell_of("bwd", batch=64, num_heads=32, num_kv_heads=4, seqlen_q=200, seqlen_k=200, head_dim=64,
                   dtype="bf16", causal=True)  # fmt: skip
    config = kernels.get("flash").on_card(cell.problem, "bwd", CARD)
    env = {name: text for name, text in apart.environment.for_child().items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, "-c", BESIDE], input=json.dumps({"cell": cell.to_json(), "config": dict(config)}),
        capture_output=True, text=True, check=False, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    model = iomodel.estimate("flash", cell.problem, "bwd", tiles=config).requested
    assert found["tool"].startswith("triton 3.")
    assert (found["difference_bytes"], found["difference_flops"]) == (0, 0)
    assert (found["total"]["read_bytes"], found["total"]["write_bytes"]) == (
        model.read_bytes, model.write_bytes,
    )  # fmt: skip
    assert found["traced_as"] == {"batch": 1, "num_heads": 8, "num_kv_heads": 1, "dtype": "fp16"}
    assert (found["scaled_by"], found["traced_share"]) == (256, 1 / 256)
    assert [kernel["step"] for kernel in found["kernels"]] == ["delta", "dq", "dkdv"]


def test_what_is_not_worth_a_process_gets_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "run", None)
    config = {"fwd_block_q": 128, "fwd_block_k": 64}
    found = apart.trace_apart(cell_of(seqlen_q=65536, seqlen_k=65536), config)
    assert found == {"reason": "524288 tile visits are too many to interpret; the limit is 2000"}
    naive = replace(cell_of(), implementation="naive")
    assert "no Triton kernel" in apart.trace_apart(naive, {})["reason"]


@pytest.mark.parametrize(
    ("play", "said"),
    [
        ("import time; time.sleep(60)", "the trace took longer than 1 s"),
        ("import os; os.abort()", "the tracing process exited with -6: without a word"),
        ("raise MemoryError('no room')", "the tracing process exited with 1: MemoryError: no room"),
        ("pass", "the tracing process exited with 0: without a word"),
        ("print('hello')", "the tracing process exited with 0: without a word"),
    ],
)
def test_a_process_that_is_lost_says_so(monkeypatch: pytest.MonkeyPatch, play: str, said: str) -> None:
    real = subprocess.run

    def run(command: list[str], **options: Any) -> Any:
        assert command[1:] == ["-m", "flashbench.tracing.child"]
        assert options["env"]["TRITON_INTERPRET"] == "1"
        return real([sys.executable, "-c", play], **options)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(apart, "START_S", 1.0 if "longer" in said else 60.0)
    monkeypatch.setattr(apart, "VISIT_S", 0.0)
    found = apart.trace_apart(cell_of(), {"fwd_block_q": 64, "fwd_block_k": 64})
    assert found == {"reason": said}


def test_a_process_that_cannot_start_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "executable", "/nonexistent")
    found = apart.trace_apart(cell_of(), {"fwd_block_q": 64, "fwd_block_k": 64})
    assert found["reason"].startswith("the tracing process did not start: ")


@interpreted
@pytest.mark.parametrize("shape", [(0, 0), (0, 9), (9, 0)])
@pytest.mark.parametrize("pass_", ["fwd", "bwd"])
def test_without_queries_or_keys_what_moves_is_as_modelled(shape: tuple[int, int], pass_: str) -> None:
    traced = tracing.trace_cell(cell_of(pass_, seqlen_q=shape[0], seqlen_k=shape[1]))
    assert traced["difference_bytes"] == traced["difference_flops"] == 0
