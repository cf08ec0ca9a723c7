"""``flashbench decode``: checked in the interpreter, refused in one line, its file and its table."""

from __future__ import annotations

import csv
import io
import json
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_ncu import COUNT, install

from flashbench import (
    calibrate,
    counting,
    decode_configs,
    decoding,
    devices,
    environment,
    iomodel,
    presets,
)
from flashbench._cli import decode_counters
from flashbench.cli import main
from flashbench.counting import child
from flashbench.kernels import Target
from flashbench.profilers import Timing
from flashbench.record import Samples

if torch.cuda.is_available():
    pytest.skip("these show what a machine without a GPU does", allow_module_level=True)
pytest.importorskip("triton")

SMALL = ["decode", "--check", "--kv-lens", "1,40", "--batch", "1"]


def run(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    out, err = capsys.readouterr()
    code = stop.value.code or 0
    assert isinstance(code, int)
    assert "Traceback" not in err
    return code, out, err


def test_without_a_gpu_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["decode", "--kv-lens", "1k"], capsys)
    assert (code, out) == (3, "")
    first, hint = err.splitlines()
    assert first.startswith("error: no GPU to time decoding on")
    assert "--check" in hint


def test_check_decodes_every_kind_of_cache_in_the_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [*SMALL, "--page-size", "0,16", "--dtype", "fp16,fp8", "--queries", "2", "--splits", "2", "--json"]
    code, out, _ = run(argv, capsys)
    rows = json.loads(out)
    assert code == 0
    assert len(rows) == 2 * 2 * 2
    assert {row["status"] for row in rows} == {"ok"}
    assert all(row["max_abs_error"] <= row["budget"] and row["time_s"] is None for row in rows)
    assert {(row["dtype"], row["page_size"]) for row in rows} == {
        (dtype, page) for dtype in ("fp16", "fp8") for page in (0, 16)
    }
    half, eighth = (next(r for r in rows if r["dtype"] == d and r["kv_len"] == 40) for d in ("fp16", "fp8"))
    assert half["cache_bytes"] == 2 * eighth["cache_bytes"] == 40 * 8 * 256 * 2


def test_steps_are_counted_in_one_process_whatever_their_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With a profiler that plays two kernels a step, and reads each step back from what it was told."""
    told = tmp_path / "told"
    note = f"    open({str(told)!r}, 'a').write(json.dumps(job) + '\\n')\n"
    install(tmp_path, monkeypatch, note + COUNT)
    monkeypatch.setattr(counting, "why_unavailable", lambda target: None)
    raw, out = tmp_path / "raw", tmp_path / "decode.json"
    argv = ["decode", "--check", "--kv-lens", "40", "--batch", "1", "--page-size", "0,16", "--dtype",
            "fp16,fp8", "--counters", str(raw), "--out", str(out), "--json"]  # fmt: skip
    code, shown, _ = run(argv, capsys)
    assert code == 0
    assert [path.name for path in raw.iterdir()] == ["counters-001.csv"]
    assert {row["not_counted"] for row in json.loads(shown)} == {"this GPU lacks the counters"}, "of writes"
    kept = json.loads(out.read_text(encoding="utf-8"))["rows"]
    assert [row["counters"]["total"]["dram_read_bytes"] for row in kept] == [2000, 2002, 2004, 2006]
    jobs = [json.loads(line) for line in told.read_text(encoding="utf-8").splitlines()]
    found = [decoding.from_json(job["what"]) for job in jobs if job["kind"] == "step"]
    assert [(step.dtype, step.page_size, step.kv_len) for step in found] == [
        ("fp16", 0, 40), ("fp16", 16, 40), ("fp8", 0, 40), ("fp8", 16, 40),
    ]  # fmt: skip


@pytest.mark.parametrize(("kept", "there"), [(0, False), (1, False), (1, True)])
def test_what_was_measured_before_an_interrupt_is_shown_and_kept(
    kept: int, there: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """In a new file: what a former run wrote does not give way to a part."""
    check, calls = decoding.check, list[decoding.Step]()

    def stopped(step: decoding.Step, *how: Any, **more: Any) -> dict[str, Any]:
        calls.append(step)
        if len(calls) > kept:
            signal.raise_signal(signal.SIGTERM)
        return check(step, *how, **more)

    monkeypatch.setattr(decoding, "check", stopped)
    out = tmp_path / "decode.json"
    if there:
        out.write_text("{}")
    code, shown, said = run([*SMALL, "--out", str(out), "--json"], capsys)
    assert (code, len(json.loads(shown))) == (130, kept)
    where = "holds them" if kept and not there else "was not written"
    assert said == f"warning: interrupted; {kept} of 2 rows were checked; {out} {where}\n"
    assert out.exists() == bool(kept)
    if out.exists():
        assert len(json.loads(out.read_text()).get("rows", ())) == (0 if there else kept)


def test_an_interrupt_of_counting_leaves_the_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counting, "why_unavailable", lambda target: None)
    monkeypatch.setattr(counting, "count_jobs", lambda *_, **__: signal.raise_signal(signal.SIGINT))
    code, shown, said = run([*SMALL, "--counters", str(tmp_path / "raw"), "--json"], capsys)
    assert (code, said) == (130, "warning: interrupted; 2 of 2 rows were checked\n")
    assert [row["not_counted"] for row in json.loads(shown)] == ["interrupted"] * 2


def test_what_the_profiled_process_runs_is_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    step = decoding.Step(
        preset=presets.find("llama-3-8b"), kv_len=40, batch=1, page_size=16, dtype="fp8", queries=2,
        config=decode_configs.DecodeConfig(block_k=32, num_warps=4, num_stages=2),
    )  # fmt: skip
    job = json.loads(json.dumps({"kind": "step", "what": decoding.to_json(step)}))
    assert decoding.from_json(job["what"]) == step
    found: list[Any] = []
    monkeypatch.setattr(child, "_count", lambda index, call, target: found.append((index, call())))
    assert child._run(3, job, Target(), 0, None) == ""
    ((index, o),) = found
    assert (index, o.shape, bool(o.isfinite().all())) == (3, (1, 32, 2, 128), True)


def test_counted_bytes_are_held_to_the_requested_ones_without_spills() -> None:
    total = {"l2_read_bytes": 900, "l2_write_bytes": 150, "l2_atomic_bytes": 0, "spill_write_bytes": 40}
    found = decode_counters._fields({"total": total}, 1000)
    assert (found["counted_bytes"], found["counted_ratio"]) == (1010, 1.01)
    assert decode_counters._fields({"reason": "no"}, 1000) == {"not_counted": "no"}


@pytest.mark.parametrize(
    ("folder", "code", "says"),
    [
        ("", 2, "--counters '': no name"), ("/proc/none", 2, "--counters '/proc/none': "),
        ("raw", 3, "no counters: counters need an NVIDIA GPU"),
    ],
)  # fmt: skip
def test_counters_that_cannot_be_had_are_refused_before_anything_runs(
    folder: str, code: int, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    monkeypatch.chdir(tmp_path)
    found, out, err = run([*SMALL, "--counters", folder], capsys)
    assert (found, out) == (code, "")
    assert err.startswith(f"error: {says}")
    assert not (tmp_path / "raw").exists()


def test_csv_and_table_have_a_row_per_step(capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = run([*SMALL, "--csv"], capsys)
    assert [row["kv_len"] for row in csv.DictReader(io.StringIO(out))] == ["1", "40"]
    code, out, err = run(SMALL, capsys)
    assert code == 0
    assert out.count("llama-3-8b") == 2
    assert "not timed" in err


def test_the_file_holds_machine_and_rows_and_a_report_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "decode.json"
    line = [*SMALL, "--out", str(path), "-q"]
    monkeypatch.setattr("sys.argv", ["flashbench", *line])
    run(line, capsys)
    document = json.loads(path.read_text())
    assert (document["type"], document["schema"]) == ("decode", decoding.SCHEMA)
    assert document["environment"]["device_type"] == "cpu"
    assert document["copy"] is None
    assert [row["kv_len"] for row in document["rows"]] == [1, 40]
    assert document["argv"] == ["flashbench", *line]
    code, page, _ = run(["report", str(path)], capsys)
    assert code == 0
    shown = Path(page.strip()).read_text(encoding="utf-8")
    assert "batch 1, 1 query, bf16 cache" in shown
    assert f"<td>{document['rows'][1]['max_abs_error']:.1e}</td>" in shown
    assert "flashbench decode --check --kv-lens 1,40" in shown


BAD = {
    "--splits 0": "accepted: auto, or 1 to 256",
    "--splits many": "accepted: auto, or 1 to 256",
    "--kv-lens 0": "out of range",
    "--page-size -1": "--page-size",
    "--batch x": "--batch 'x'",
    "--dtype int8": "--dtype 'int8'",
    "--model deepseek-v3": "caches a latent",
    "--model bert-large": "an encoder",
    "--model nothing": "--model 'nothing'",
    "--queries 0": "--queries '0'",
    "--out no/such/folder/x": "not a file in a folder",
    "--json --csv": "exclude each other",
    "--seed x": "--seed 'x'",
}


@pytest.mark.parametrize("line", BAD)
def test_bad_input_is_one_line_and_exit_code_2(line: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(["decode", *line.split()], capsys)
    assert (code, out) == (2, "")
    assert err.splitlines()[0].startswith("error: ")
    assert BAD[line] in err


def test_a_wrong_result_ends_with_exit_code_5(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from decoding import decode

    real = decode.run
    monkeypatch.setattr(decode, "run", lambda *args, **options: real(*args, **options) + 1)
    code, out, err = run([*SMALL], capsys)
    assert code == 5
    assert "wrong" in out
    assert "2 of 2 rows wrong; the first: batch 1, 1 keys" in err


def step(**changes: Any) -> decoding.Step:
    return decoding.Step(**{"preset": presets.find("llama-3-8b"), "kv_len": 33, "batch": 1, **changes})


def test_a_time_is_set_beside_the_copy_and_the_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    samples = Samples(samples_s=(3e-6, 1e-6, 2e-6), cache="cold", method="events")
    timing = Timing(samples=samples, flags=("drift",), clocks={"host_s": 1e-6})
    monkeypatch.setattr(decoding, "measure_time", lambda call, **_: timing)
    row = decoding.measure(step(), Target(), 1e12)
    assert row["time_s"] == 2e-6
    assert row["bytes"] == iomodel.compulsory(step().problem, "fwd").total_bytes
    assert row["bytes_per_s"] == row["bytes"] / 2e-6
    assert row["copy_fraction"] == row["bytes_per_s"] / 1e12
    assert row["flags"] == ["drift"]
    assert row["clocks"] == {"host_s": 1e-6}


def test_a_cache_that_does_not_fit_is_a_row_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "free_bytes", lambda target: 10**6)
    row = decoding.check(step(kv_len=4096), Target())
    assert row["status"] == "skipped"
    assert "of memory" in row["reason"]
    assert "time_s" not in decoding.measure(step(kv_len=4096), Target())


def test_a_kernel_that_fails_is_a_row_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> dict[str, Any]:
        raise RuntimeError("out of\nshared memory")

    monkeypatch.setattr(decoding, "_run", broken)
    row = decoding.check(step(), Target())
    assert (row["status"], row["reason"]) == ("failed", "RuntimeError: out of shared memory")


def test_a_known_card_has_the_models_time() -> None:
    tiles = {"fwd_block_q": 16, "fwd_block_k": 64, "split_block_q": 16, "split_block_k": 4096}
    found = decoding.modelled(step(kv_len=131072, page_size=16), tiles, devices.find("h100-sxm"))
    assert found["bytes"] < found["requested_bytes"] < 1.02 * found["bytes"]
    assert found["bound_s"] < found["model_s"] < 1.3 * found["bound_s"]
    assert found["bytes"] == pytest.approx(step(kv_len=131072).cache_bytes, rel=1e-3)


def test_one_ceiling_is_measured_by_itself() -> None:
    row = calibrate.measure_one("copy_bytes_per_s", Target())
    assert row["value"] > 1e8
    assert row["name"] == "copy_bytes_per_s"


@pytest.mark.parametrize(
    ("file", "rows", "least"), [("llama-3-8b", 16, 0.85), ("llama-3-8b-page-16", 6, 0.80)]
)
def test_the_committed_steps_of_long_caches_reach_most_of_a_copy(file: str, rows: int, least: float) -> None:
    """32k to 128k keys on an H100: of what a plain copy moves per second there and then."""
    path = Path(__file__).parent.parent / "reports" / "h100-sxm" / "decode" / f"{file}.json"
    found = json.loads(path.read_text(encoding="utf-8"))["rows"]
    assert len(found) == rows
    assert all(row["status"] == "ok" for row in found)
    long = [row for row in found if row["kv_len"] >= 32768]
    assert {(row["batch"], row["kv_len"]) for row in long} == {
        (b, n) for b in (1, 16) for n in (32768, 65536, 131072)
    }
    assert all(row["copy_fraction"] >= least for row in long)
