"""Counted and traced in one go: ``profile --counters --trace`` and ``run --counters --trace``.

The counters are a fake ncu's; the traces are real ones, in children, unless a test plays them.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import fake_ncu
import pytest
import typer
from attention import problem

from flashbench import cli, counting, iomodel, kernels, runfile, table
from flashbench._cli import joined, profile_counters
from flashbench.errors import EXIT_GATE, EXIT_INTERRUPTED, GateError
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.tracing import apart

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

GPU = Target(device="cuda:0", name="NVIDIA H100 80GB HBM3", capability=(9, 0), l2_bytes=50 * 2**20)
SHAPE = {"batch": 2, "num_heads": 4, "num_kv_heads": 2, "head_dim": 16, "head_dim_v": 16, "dtype": "bf16"}
COUNTED = 2 * 32
"""Bytes that the fake counts at L2 for each cell: two kernels of 32."""
SWEEP = [
    "run", "--device", "cpu", "--seqlens", "64", "--head-dims", "16", "--dtypes", "bf16", "--passes", "fwd",
    "--causal", "no", "--batch", "2", "--heads", "2", "--impls", "naive,flash",
]  # fmt: skip


@pytest.fixture(autouse=True)
def counters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_ncu.install(tmp_path, monkeypatch)
    monkeypatch.setattr("flashbench.environment.collect", lambda target: {"device_name": GPU.name})
    monkeypatch.setattr(counting, "why_unavailable", lambda target: None)


def cell(implementation: str = "flash", pass_: str = "fwd", seqlen: int = 100, **changes: Any) -> Cell:
    p = problem(**{**SHAPE, "seqlen_q": seqlen, "seqlen_k": seqlen, **changes})
    return Cell(implementation=implementation, pass_=pass_, problem=p)


def profile(asked: list[Cell], folder: Path, **options: Any) -> tuple[runfile.Record, ...]:
    profile_counters.show(asked, GPU, folder, profile_counters.Options(**{"trace_limit": 50, **options}))
    return runfile.load(folder / "results.jsonl").records


def played(monkeypatch: pytest.MonkeyPatch, found: Mapping[str, Any]) -> None:
    monkeypatch.setattr(apart, "_child", lambda *_: dict(found))


def main(*argv: str) -> int:
    with pytest.raises(SystemExit) as stop:
        cli.main([*argv])
    return int(stop.value.code or 0)


def test_a_cell_has_model_trace_and_counters_in_its_record_and_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = [cell(pass_="bwd"), cell(seqlen=4096), cell("naive")]
    small, long, naive = profile(asked, tmp_path / "out", json=True)
    rows = json.loads(capsys.readouterr().out)

    model = iomodel.estimate("flash", asked[0].problem, "bwd", tiles=small.config).requested
    assert small.trace is not None
    assert small.trace["difference_bytes"] == 0
    assert small.trace["traced_as"] == {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "dtype": "fp16"}
    assert small.trace["total"]["read_bytes"] == model.read_bytes
    assert small.counters["total"]["l2_read_bytes"] == COUNTED
    assert "tile visits are too many to interpret; the limit is 50" in str(long.trace)
    assert "no Triton kernel" in str(naive.trace)
    assert [record.status for record in (small, long, naive)] == ["profiled"] * 3

    shown = {(row["cell"], row["level"]): row for row in rows if not row["kernel"]}
    read = shown[asked[0].key, "L2 read"]
    assert (read["value"], read["traced"], read["difference"]) == (model.read_bytes, model.read_bytes, 0)
    assert (read["counted"], read["within"], read["traced_share"]) == (COUNTED, True, 0.25)
    assert read["ratio"] == COUNTED / model.read_bytes
    far = shown[asked[1].key, "L2 read"]
    assert (far["traced"], far["counted"], far["within"]) == (None, COUNTED, False)
    assert far["not_traced"] == long.trace["reason"]


def test_kernel_by_kernel_the_trace_stands_beside_the_step_of_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    three = fake_ncu.COUNT.replace('("one", "two")', '("first", "second", "third")')
    fake_ncu.install(tmp_path, monkeypatch, three)
    (record,) = profile([cell(pass_="bwd")], tmp_path / "out", json=True)
    rows = [row for row in json.loads(capsys.readouterr().out) if row["kernel"]]
    steps = iomodel.estimate("flash", record.cell.problem, "bwd", tiles=record.config).steps
    read = {row["kernel"]: row["traced"] for row in rows if row["level"] == "L2 read"}
    assert read == {
        f"{step.name}: {name}": sum(step.read.values())
        for step, name in zip(steps, ("first", "second", "third"), strict=True)
    }
    assert {row["difference"] for row in rows if row["traced"] is not None} == {0}


def test_the_text_has_a_column_for_the_trace_only_where_there_is_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    profile([cell()], tmp_path / "a", trace_limit=None)
    said = capsys.readouterr()
    assert "predicted beside counted" in said.out
    assert "traced" not in said.out + said.err
    played(monkeypatch, {"reason": "the trace took longer than 9 s"})
    (record,) = profile([cell()], tmp_path / "b")
    said = capsys.readouterr()
    assert "traced" not in said.out
    assert "1 cell not traced: the trace took longer than 9 s" in said.err
    assert "1 cell counted, 0 outside the model's band at DRAM" in said.err
    assert (record.status, record.trace) == ("profiled", {"reason": "the trace took longer than 9 s"})
    total = {"read_bytes": 7, "write_bytes": 0, "atomic_bytes": 0}
    played(monkeypatch, {"difference_bytes": 0, "difference_flops": 0, "total": total, "kernels": []})
    profile([cell()], tmp_path / "c")
    said = capsys.readouterr()
    assert "predicted beside traced and counted" in said.out
    assert "traced-predicted" in said.out


@pytest.mark.parametrize(
    ("found", "said"),
    [
        ({"error": "RuntimeError: no such luck"}, "its kernels raise RuntimeError: no such luck"),
        ({"difference_bytes": 0, "difference_flops": 8, "total": {}, "kernels": []}, "8 FLOPs apart"),
    ],
)
def test_a_wrong_trace_fails_the_command_after_everything_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: dict[str, Any], said: str
) -> None:
    played(monkeypatch, found)
    with pytest.raises(GateError) as stop:
        profile([cell()], tmp_path / "out", quiet=True)
    assert stop.value.exit_code == EXIT_GATE
    assert f"not as their model says: 1 traced cell, first: {cell().key}: {said}" in str(stop.value)
    (record,) = runfile.load(tmp_path / "out" / "results.jsonl").records
    assert record.counters["total"]["l2_read_bytes"] == COUNTED
    assert record.trace == {"tool": apart._tool(), **found}


def test_a_cell_is_traced_with_the_tiles_of_its_row_and_only_where_it_ran(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    card = Target(device="cuda:0", capability=(9, 0), smem_per_block_bytes=232448)
    ran = [cell(seqlen=n) for n in (64, 65, 66)]
    config = kernels.get("flash-v2").on_card(ran[0].problem, "fwd", card)
    done = {"total": {}, "difference_bytes": 0}
    records = [
        runfile.Record(cell=ran[0], status="profiled", reason="counted", config=config),
        runfile.Record(cell=ran[1], status="oom", reason="no room"),
        runfile.Record(cell=ran[2], status="checked", reason="correct", config=config, trace=done),
    ]
    asked: list[dict[str, Any]] = []
    monkeypatch.setattr(apart, "_child", lambda text, _: asked.append(json.loads(text)) or {"reason": "x"})
    head = runfile.header(argv=[], options={}, environment={}, cells=ran)
    with runfile.create(tmp_path / "results.jsonl", head) as writer:
        for record in records:
            writer.append(record)
        joined.trace(records, writer, limit=9, seed=3, quiet=True)
    (one,) = asked
    assert Cell.from_json(one.pop("cell")) == ran[0]
    assert one == {"config": dict(config), "limit": 9, "seed": 3}
    found = [record.trace for record in runfile.load(tmp_path / "results.jsonl").records]
    assert found == [{"reason": "x"}, None, done]


def test_an_interrupted_trace_loses_no_cell(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: Any) -> Any:
        raise KeyboardInterrupt

    monkeypatch.setattr(apart, "_child", stop)
    with pytest.raises(typer.Exit) as raised:
        profile([cell()], tmp_path / "out")
    assert raised.value.exit_code == EXIT_INTERRUPTED
    said = capsys.readouterr()
    assert "holds 1 of 1 cell" in said.err
    assert "L2 read" in said.out
    (record,) = runfile.load(tmp_path / "out" / "results.jsonl").records
    assert (record.counters["total"]["l2_read_bytes"], record.trace) == (COUNTED, None)


@pytest.mark.slow
def test_a_sweep_is_counted_and_traced_and_a_resumed_one_only_what_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    if kernels.get("flash").why_unavailable(Target()) is not None:
        pytest.skip("this process compiles for a GPU")
    out = tmp_path / "out"
    assert main(*SWEEP, "--counters", "--trace", "--json", "--out", str(out)) == 0
    rows = {row["implementation"]: row for row in json.loads(capsys.readouterr().out)}
    found = runfile.load(out / "results.jsonl")
    assert rows["flash"]["status"] == "checked"
    assert rows["flash"]["traced_read_bytes"] > 0
    assert (rows["flash"]["traced_difference_bytes"], rows["flash"]["traced_share"]) == (0, 0.25)
    assert rows["naive"]["counted_l2_read_bytes"] == COUNTED
    assert "no Triton kernel" in rows["naive"]["not_traced"]
    assert list(rows.values()) == table.rows(table.build([found]))
    page = (out / "report.html").read_text(encoding="utf-8")
    mark = ["skipped", "status skipped", rows["naive"]["not_traced"]]
    assert json.dumps(mark, separators=(",", ":")) in page

    before = {record.cell.key: record.trace for record in found.records}
    played(monkeypatch, {"reason": "asked again"})
    line = ["run", "--resume", "--device", "cpu", "--seqlens", "64,65", "--out", str(out), "--csv"]
    assert main(*line) == 0
    after = {record.cell.key: record for record in runfile.load(out / "results.jsonl").records}
    assert len(after) == 4
    for key, record in after.items():
        if key.startswith("flash"):
            assert record.trace == before.get(key, {"reason": "asked again"})
    assert "traced, of them not as modelled: 0" in capsys.readouterr().err
