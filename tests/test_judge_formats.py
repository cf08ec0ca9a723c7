"""Results of other tools as a side: small files of each format, written here, with the values they hold."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
from judging import run

from flashbench import judge
from flashbench.errors import EXIT_GATE, EXIT_UNDECIDED, EXIT_UNREADABLE, RunFileError


@pytest.fixture(autouse=True)
def no_profile_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHBENCH_NOISE", str(tmp_path / "noise"))


def saved(path: Path, document: Any) -> str:
    path.write_text(document if isinstance(document, str) else json.dumps(document))
    return str(path)


def pyperf(time_s: float) -> dict[str, Any]:
    runs = [
        {"metadata": {"cpu_model_name": "cpu"}, "values": [time_s * (1 + step / 1000) for step in range(3)]}
    ] * 8
    calibration = {"metadata": {}, "warmups": [[1, 9.0]]}  # a process without values
    meta = {"name": "attention", "unit": "second", "python_version": "3.12"}
    return {
        "version": "1.0",
        "metadata": {},
        "benchmarks": [{"metadata": meta, "runs": [calibration, *runs]}],
    }


def asv(time_s: float, version: str = "abc") -> dict[str, Any]:
    nan = float("nan")
    return {
        "commit_hash": "0123", "params": {"cpu": "cpu", "python": "3.12"}, "requirements": {"numpy": "2.3"},
        "result_columns": ["result", "params", "version", "samples"], "version": 2,
        "results": {
            "suite.time_attention": [
                [time_s, time_s, None, nan], [["1", "2"], ["'a'", "'b'"]], version,
                [[time_s * (1 + step / 1000) for step in range(20)], None, None, None],
            ],
            "suite.track_loss": [[3.0], [], "v"],
            "suite.peakmem_attention": [[2**30], []],
        },
    }  # fmt: skip


def nvbench(time_s: float, folder: Path, tag: str = "mean", samples: bool = False) -> dict[str, Any]:
    summaries = [{"tag": f"nv/cold/time/gpu/{tag}", "data": [{"name": "value", "value": str(time_s)}]}]
    if samples:
        (folder / "x.json-bin").mkdir(exist_ok=True)
        (folder / "x.json-bin" / "0.bin").write_bytes(struct.pack("<25f", *[time_s] * 25))
        names = {"filename": "run/x.json-bin/0.bin", "size": "25"}
        data = [{"name": name, "value": value} for name, value in names.items()]
        summaries.append({"tag": "nv/json/bin:nv/cold/sample_times", "data": data})
    axis = [{"name": "N", "type": "int64", "value": "4096"}]
    states = [
        {"device": 0, "axis_values": axis, "summaries": summaries, "is_skipped": False},
        {
            "device": 0,
            "axis_values": [{"name": "N", "value": "1"}],
            "is_skipped": True,
            "skip_reason": "tiny",
        },
    ]
    return {
        "meta": {"version": {"nvbench": {"string": "1.0"}}}, "devices": [{"id": 0, "name": "H100"}],
        "benchmarks": [{"name": "copy", "states": states}],
    }  # fmt: skip


CUDNN = (
    "model_name,backend,data_type,attn_mask,batch_size,q_seqlen,profile_pass,time_ms,tflops,success,skipped,"
    "error_message,gpu_name,cudnn_version\n"
    "llama,cudnn,bfloat16,no_mask,2,4096,fwd,{0},619.0,True,False,,NVIDIA H200,1.31\n"
    "llama,cudnn,bfloat16,no_mask,2,4096,bwd,0.0,0.0,False,False,no engine,NVIDIA H200,1.31\n"
)
FLASH = (
    "dtype,batch size,seqlen,nheads,embedding dim,causal,dropout,fwd(ms),bwd(ms),fwd(tflops),bwd(tflops)\n"
    "torch.float16,2,16,64,4096,True,0.0,{0},3.00,300.00,250.00\n"
)


def static(spills: int, block_k: int = 64) -> list[dict[str, Any]]:
    row = {
        "implementation": "flash", "kernel": "forward", "pass": "fwd", "arch": "sm_90", "dtype": "bf16",
        "head_dim": 128, "causal": True, "status": "ok", "reason": None, "triton_version": "3.6.0",
        "registers_per_thread": 200, "spill_stored_bytes_per_thread": spills, "static_shared_bytes": 1024,
        "dynamic_shared_bytes": 98304, "block_k": block_k,
    }  # fmt: skip
    return [row, {**row, "causal": False}]


def read(path: Path, document: Any) -> judge.Run:
    return judge.load_run(Path(saved(path, document)))


def test_pyperf(tmp_path: Path) -> None:
    found = read(tmp_path / "x.json", pyperf(1e-3))
    assert (found.kind, found.conditions["device"], found.versions["python"]) == ("pyperf", "cpu", "3.12")
    assert len(found.cells["attention"].samples("time_s")) == 24
    with pytest.raises(RunFileError, match="unit 'integer' has no direction"):
        read(tmp_path / "y.json", json.loads(json.dumps(pyperf(1)).replace("second", "integer")))


def test_pyperf_benchmarks_of_one_name_are_refused_by_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    document = pyperf(1e-3)
    document["benchmarks"] *= 2
    path = saved(tmp_path / "x.json", document)
    code, _, err = run(capsys, path, path)
    assert (code, "two benchmarks are named 'attention'" in err) == (EXIT_UNREADABLE, True)


def test_asv(tmp_path: Path) -> None:
    found = read(tmp_path / "x.json", asv(1e-3))
    assert found.kind == "asv"
    assert [(key, cell.status) for key, cell in found.cells.items()] == [
        ("suite.time_attention(1, 'a')", "ok"), ("suite.time_attention(1, 'b')", "ok"),
        ("suite.time_attention(2, 'a')", "failed"), ("suite.time_attention(2, 'b')", "skipped"),
        ("suite.peakmem_attention", "ok"),
    ]  # fmt: skip
    assert [len(cell.samples("time_s")) for cell in found.cells.values()] == [20, 1, 0, 0, 0]
    assert found.cells["suite.peakmem_attention"].samples("peak_extra_bytes") == (2**30,)
    assert found.measures == ("time_s", "peak_extra_bytes")
    assert "suite.track_loss" in found.notes[0]


@pytest.mark.parametrize("version", [1, 3, "3"])
def test_asv_of_another_version_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, version: object
) -> None:
    path = saved(tmp_path / "x.json", {**asv(1e-3), "version": version})
    code, _, err = run(capsys, path, path)
    assert (code, f"not what asv writes: version {version!r}; this flashbench reads 2" in err) == (
        EXIT_UNREADABLE, True
    )  # fmt: skip


def test_asv_code_that_changed_is_not_compared(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base, new = saved(tmp_path / "a.json", asv(1e-3)), saved(tmp_path / "b.json", asv(1e-3, version="def"))
    code, _, err = run(capsys, base, new, "--metric", "time_s")
    assert (code, "benchmark is abc on the base side and def on the new one" in err) == (EXIT_UNDECIDED, True)


def test_of_asv_benchmarks_only_those_whose_code_changed_are_not_compared(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    documents = [asv(1e-3), asv(1e-3, version="def")]
    for document in documents:
        document["results"]["suite.time_other"] = [[1e-3], [], "other"]
    paths = [saved(tmp_path / f"{at}.json", document) for at, document in enumerate(documents)]
    code, out, err = run(capsys, *paths, "--metric", "time_s", "--json", "--allow", "failed")
    found = {row["cell"]: row["verdict"] for row in json.loads(out)["cells"]}
    assert code == EXIT_UNDECIDED
    assert found["suite.time_other"] == "same"
    assert found["suite.time_attention(1, 'a')"] == "incomparable"
    assert "first: suite.time_attention(1, 'a'): benchmark is abc on the base side and def" in err


@pytest.mark.parametrize("tag", ["mean", "median"])
def test_nvbench(tmp_path: Path, tag: str) -> None:
    cell = read(tmp_path / "x.json", nvbench(1e-4, tmp_path, tag)).cells["copy N=4096"]
    assert cell.samples("time_s") == (1e-4,)
    assert cell.conditions == {"device": "H100", "cache": "cold", "method": "events", "estimator": tag}
    found = read(tmp_path / "x.json", nvbench(1e-4, tmp_path, tag, samples=True))
    cell, skipped = found.cells["copy N=4096"], found.cells["copy N=1"]
    assert cell.samples("time_s") == pytest.approx([1e-4] * 25)
    assert (cell.conditions["estimator"], skipped.status, skipped.reason) == ("median", "skipped", "tiny")
    (tmp_path / "x.json-bin" / "0.bin").write_bytes(b"12345")
    with pytest.raises(RunFileError, match="holds 5 bytes; 25 samples are 100"):
        judge.load_run(tmp_path / "x.json")


def test_nvbench_on_two_cards_has_cells_of_both(tmp_path: Path) -> None:
    document = nvbench(1e-4, tmp_path)
    document["devices"].append({"id": 1, "name": "A100"})
    states = document["benchmarks"][0]["states"]
    states[1:] = [{**states[0], "device": 1}]
    assert set(read(tmp_path / "x.json", document).cells) == {"copy N=4096 on H100", "copy N=4096 on A100"}


def test_tables_of_cudnn_and_flash_attention(tmp_path: Path) -> None:
    found = read(tmp_path / "x.csv", CUDNN.format(2.5))
    forward, backward = found.cells.values()
    assert (forward.samples("time_s"), forward.samples("flops_per_s")) == ((2.5e-3,), (619e12,))
    assert (backward.status, backward.reason) == ("failed", "no engine")
    assert (found.conditions["device"], forward.groups["pass"]) == ("NVIDIA H200", "fwd")
    found = read(tmp_path / "y.csv", FLASH.format("1.25"))
    assert [cell.samples("time_s") for cell in found.cells.values()] == [(1.25e-3,), (3e-3,)]
    assert all("nheads=64" in key for key in found.cells)


def test_cudnns_older_tables_have_both_passes_in_a_row(tmp_path: Path) -> None:
    text = (
        "model_name,backend,data_type,batch_size,q_seqlen,profile_pass,fwd_time_ms,bwd_time_ms,fwd_tflops,"
        "bwd_tflops,success,error_message,gpu_name,cudnn_backend_version\n"
        "llama,cudnn,bfloat16,2,4096,both,3.0,9.0,358.0,299.0,True,,NVIDIA H200,91901.0\n"
        "llama,cudnn,bfloat16,2,2048,fwd,1.0,0.0,350.0,0.0,True,,NVIDIA H200,91901.0\n"
        'llama,cudnn,fp8,2,4096,both,inf,inf,0.0,0.0,False,"failed,\nof two lines",,\n'
    )
    found = read(tmp_path / "x.csv", text)
    times = [cell.samples("time_s") for cell in found.cells.values()]
    assert times == [(3e-3,), (9e-3,), (1e-3,), (), ()]
    assert [cell.groups["pass"] for cell in found.cells.values()] == ["fwd", "bwd", "fwd", "fwd", "bwd"]
    assert [cell.status for cell in found.cells.values()] == ["ok", "ok", "ok", "failed", "failed"]
    assert found.conditions["device"] == "NVIDIA H200"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (CUDNN.format("fast"), "line 2: time_ms is 'fast'"),
        (CUDNN.format("1") + "llama,cudnn\n", "line 4: 14 columns"),
        (FLASH.format("1") + FLASH.format("1").splitlines()[1], "line 3: a second row"),
        ("{}", "JSON of no known format"),
        ("[]", "JSON of no known format"),
        ('{"benchmarks": [{"states": [{}]}]}', "the field 'devices' is missing"),
        ('{"benchmarks": [{"runs": 3}]}', "not what pyperf writes"),
        (
            "a,b\n1,2\n",
            "CSV of no known benchmark; accepted: columns backend, batch_size, time_ms or ",
        ),
        ("1,2\n3,4\n", "not JSON"),
    ],
)
def test_a_file_that_is_none_of_them_is_unreadable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    path = saved(tmp_path / "x", text)
    code, out, err = run(capsys, path, path)
    assert (code, out, says in err) == (EXIT_UNREADABLE, "", True), err


def test_static_profiles_are_a_gate(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """One more spilled register, or another tile, fails by default; the same code does not."""
    base = saved(tmp_path / "a.json", static(0))
    assert run(capsys, base, base)[0] == 0
    code, _, err = run(capsys, base, saved(tmp_path / "b.json", static(8)))
    assert code == EXIT_GATE
    assert "spill_stored_bytes_per_thread: 2 of 2 cells are worse by more than 0%" in err
    assert "first: flash fwd forward sm_90 bf16 d128 causal: 0, now 8 B" in err
    assert "note: the same in all cells: registers_per_thread, shared_bytes, block_k" in err
    code, out, _ = run(capsys, base, saved(tmp_path / "c.json", static(0, block_k=32)), "--json")
    fails = [row for row in json.loads(out)["cells"] if row["fails"]]
    assert (code, {row["metric"] for row in fails}) == (EXIT_GATE, {"block_k"})
    assert run(capsys, base, saved(tmp_path / "d.json", static(0)[:1]))[0] == EXIT_UNDECIDED


@pytest.mark.parametrize("made", [pyperf, CUDNN.format, FLASH.format], ids=["pyperf", "cudnn", "flash"])
def test_a_slower_result_of_another_tool_fails(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, made: Any
) -> None:
    base, new = saved(tmp_path / "a", made(1.0)), saved(tmp_path / "b", made(1.2))
    assert run(capsys, base, base, "--allow", "failed")[0] == 0  # cuDNN's backward has no engine
    code, _, err = run(capsys, base, new, "--metric", "time_s")
    assert (code, "+20.0%" in err) == (EXIT_GATE, True)
