"""Cells under a profiler, with a fake ncu that plays the watched process: what is counted, what is kept."""

from __future__ import annotations

import json
from collections.abc import Mapping
from contextlib import nullcontext
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest
from attention import problem
from fake_ncu import COUNT, install

from flashbench import cli, compared, counting, iomodel, runfile
from flashbench._cli import joined, profile_counters, profile_known, profile_timeline
from flashbench._profilers import ncu
from flashbench._profilers.timeline import KernelTime, Timeline
from flashbench.counting import known
from flashbench.devices import find
from flashbench.errors import UnavailableError
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.profilers import Timing
from flashbench.record import Record, Samples

ROOT = Path(__file__).parent.parent

GPU = Target(device="cuda:0", name="NVIDIA H100 80GB HBM3", capability=(9, 0), l2_bytes=50 * 2**20)
ON_A_CPU = "run --device cpu --seqlens 64 --head-dims 16 --dtypes fp32 --passes fwd --causal no"


@pytest.fixture
def fake(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    return lambda play=COUNT, end="": install(tmp_path, monkeypatch, play, end)


def cells(count: int) -> list[Cell]:
    return [
        Cell(implementation="flash", pass_="fwd", problem=problem(seqlen_q=n + 1, seqlen_k=n + 1))
        for n in range(count)
    ]


def count(asked: list[Cell], folder: Path) -> list[Mapping[str, Any]]:
    found: list[Mapping[str, Any]] = []
    counting.count_cells(asked, GPU, folder=folder, on_count=lambda cell, counters: found.append(counters))
    assert len(found) == len(asked)
    return found


def test_each_cell_gets_its_own_kernels(fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "BATCH", 2)
    fake()
    found = count(cells(3), tmp_path / "raw")
    assert [one["total"]["dram_read_bytes"] for one in found] == [2000, 2002, 2000]
    first = found[0]
    assert (first["tool"], first["cache_control"], first["clock_control"]) == (
        "ncu 2025.3.1.0",
        "all",
        "none",
    )
    assert [(k["kernel"], k["grid"]) for k in first["kernels"]] == [
        ("one", "(1, 1, 1)"), ("two", "(1, 1, 1)"),
    ]  # fmt: skip
    assert first["total"]["time_s"] == pytest.approx(2e-6)
    assert first["total"]["l2_read_bytes"] == 64
    assert "l2_write_bytes" not in first["total"]
    assert sorted(path.name for path in (tmp_path / "raw").iterdir()) == [
        "counters-001.csv", "counters-002.csv"
    ]  # fmt: skip


class FakeClocks:
    """A card whose clock falls by 10 MHz at each reading."""

    def __init__(self) -> None:
        self.mhz = 2000

    def read(self) -> dict[str, Any]:
        self.mhz -= 10
        return {"sm_clock_mhz": self.mhz, "power_w": None}

    def others(self) -> dict[str, Any]:
        return {"other_processes": 0}


def reading(mhz: int) -> dict[str, Any]:
    return {"sm_clock_mhz": mhz, "power_w": None, "other_processes": 0}


def test_the_clocks_are_read_before_and_after_each_process(
    fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(counting, "BATCH", 2)
    monkeypatch.setattr(counting, "open_clocks", lambda device: FakeClocks())
    fake()
    found = [one["clocks"] for one in count(cells(3), tmp_path / "raw")]
    assert found == [
        {"before": reading(1990), "after": reading(1980)}, {"before": reading(1990), "after": reading(1980)},
        {"before": reading(1970), "after": reading(1960)},
    ]  # fmt: skip


def test_without_nvml_cells_are_counted_and_have_no_clocks(
    fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(device: str) -> None:
        raise RuntimeError("Not Supported")

    fake()
    for silent in (refuse, lambda device: None):
        monkeypatch.setattr(counting, "open_clocks", silent)
        (found,) = count(cells(1), tmp_path / "raw")
        assert (found["clocks"], found["total"]["dram_read_bytes"]) == ({}, 2000)


def test_known_traffic_and_the_timeline_tell_the_clocks(
    fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(counting, "open_clocks", lambda device: FakeClocks())
    monkeypatch.setattr("flashbench.environment.collect", lambda target: {})
    job = counting.Job(kind="known", what={"name": "copy", "bytes": 1000})
    monkeypatch.setattr(known, "jobs", lambda target: [job])
    fake()
    profile_known.show(GPU, tmp_path, json=True, csv=False, quiet=True)
    shown = json.loads(capsys.readouterr().out)
    kept = json.loads((tmp_path / "known.json").read_text(encoding="utf-8"))["rows"]
    clocks = {"before": reading(1990), "after": reading(1980)}
    assert shown[0]["clocks"] == kept[0]["clocks"] == clocks

    line = Timeline(kernels=(KernelTime(name="k", start_s=0.0, duration_s=1e-3),))
    timing = Timing(samples=Samples(samples_s=(1e-3,), cache="hot", method="events"), clocks=clocks)
    monkeypatch.setattr("flashbench.plan.refuses", lambda *_: None)
    monkeypatch.setattr("flashbench.counting.child.call_of", lambda *_: nullcontext(lambda: None))
    monkeypatch.setattr("flashbench._profilers.timeline.timeline", lambda *_: line)
    monkeypatch.setattr("flashbench.profilers.open_clocks", lambda device: "the clocks")
    monkeypatch.setattr(
        "flashbench.profilers.measure_time",
        lambda call, *, clocks, **_: timing if clocks == "the clocks" else None,
    )
    monkeypatch.setattr("flashbench._profilers.gpm.measure", lambda *_: {"reason": "no"})
    profile_timeline.show(cells(1), GPU, seed=0, json=True, csv=False, quiet=True)
    (row,) = json.loads(capsys.readouterr().out)
    assert (row["clocks"], row["launch_bound"], row["disagreement"]) == (clocks, False, None)

    line = Timeline(kernels=(KernelTime(name="k", start_s=0.0, duration_s=2e-3),))
    profile_timeline.show(cells(1), GPU, seed=0, json=False, csv=False, quiet=True)
    assert "events 50% shorter than the kernels" in " ".join(capsys.readouterr().out.split())


def test_a_cell_without_kernels_leaves_the_others_their_timelines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """CUPTI shows none of the first cell, such as one without queries."""
    lines = [Timeline(kernels=()), Timeline(kernels=(KernelTime(name="k", start_s=0.0, duration_s=1e-3),))]
    monkeypatch.setattr("flashbench._profilers.timeline.device_records", lambda *_: [])
    monkeypatch.setattr("flashbench._profilers.timeline.arrange", lambda _: lines.pop(0))
    monkeypatch.setattr("torch.cuda.synchronize", lambda *_: None)
    timing = Timing(samples=Samples(samples_s=(1e-3,), cache="hot", method="events"), clocks={})
    monkeypatch.setattr("flashbench.plan.refuses", lambda *_: None)
    monkeypatch.setattr("flashbench.counting.child.call_of", lambda *_: nullcontext(lambda: None))
    monkeypatch.setattr("flashbench.profilers.open_clocks", lambda device: None)
    monkeypatch.setattr("flashbench.profilers.measure_time", lambda *_, **__: timing)
    profile_timeline.show(cells(2), GPU, seed=0, json=True, csv=False, quiet=True)
    rows = json.loads(capsys.readouterr().out)
    assert rows[0]["reason"] == "CUPTI recorded no kernel; another profiler may hold it; stop that one"
    assert [kernel["kernel"] for kernel in rows[1]["kernels"]] == ["k"]
    lines += [Timeline(kernels=())]
    with pytest.raises(UnavailableError, match="no cell was recorded: CUPTI recorded no kernel"):
        profile_timeline.show(cells(1), GPU, seed=0, json=True, csv=False, quiet=True)


def test_a_cell_that_cannot_run_says_why_and_the_others_are_counted(fake, tmp_path: Path) -> None:
    fake(
        "    if index == 1:\n"
        "        said.write(json.dumps({'index': 1, 'reason': 'OutOfMemoryError: no'}) + '\\n'); continue\n"
        + COUNT
    )
    found = count(cells(3), tmp_path / "raw")
    assert found[1] == {"reason": "OutOfMemoryError: no"}
    assert ["total" in one for one in found] == [True, False, True]


def test_a_process_that_dies_costs_what_it_had_not_counted(fake, tmp_path: Path) -> None:
    fake(
        COUNT.replace("said.write", "if index == 1: break\n    said.write"),
        end="print('killed by signal'); sys.exit(9)",
    )
    found = count(cells(3), tmp_path / "raw")
    assert "total" in found[0]
    assert found[1] == found[2] == {"reason": "ncu exited with 9: killed by signal"}


def test_a_refusal_is_asked_for_once(fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(counting, "BATCH", 1)
    fake("    pass", end="print('==ERROR== ERR_NVGPUCTRPERM'); open('asked', 'a').write('x'); sys.exit(1)")
    monkeypatch.chdir(tmp_path)
    found = count(cells(3), tmp_path / "raw")
    assert len({one["reason"] for one in found}) == 1
    assert "NVreg_RestrictProfilingToAdminUsers" in found[0]["reason"]
    assert (tmp_path / "asked").read_text() == "x"


def test_without_a_gpu_or_ncu_every_cell_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "--trace" in str(counting.why_unavailable(Target()))
    monkeypatch.setenv("FLASHBENCH_NCU", str(tmp_path / "none"))
    assert all("install it" in one["reason"] for one in count(cells(2), tmp_path / "raw"))


@pytest.mark.parametrize("name", ["AMD Instinct MI300X", "Instinct MI250", "AMD Radeon PRO W7900"])
def test_on_an_amd_gpu_the_other_profiler_is_named(tmp_path: Path, name: str) -> None:
    target = Target(device="cuda:0", name=name, capability=(9, 4))
    reason = str(counting.why_unavailable(target))
    assert "rocprofv3" in reason
    assert "NVIDIA GPUs only" in reason
    assert "\n" not in reason


def test_on_a_torch_for_rocm_the_other_profiler_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.version.hip", "6.4")
    for target in (GPU, Target(name="AMD EPYC 9654 96-Core Processor")):
        assert "rocprofv3" in str(counting.why_unavailable(target))


def test_an_amd_cpu_is_no_amd_gpu() -> None:
    reason = counting.why_unavailable(Target(name="AMD EPYC 9654 96-Core Processor"))
    assert "counters need an NVIDIA GPU" in str(reason)


def test_a_job_comes_back_from_json_as_its_cell() -> None:
    p = problem(num_kv_heads=2, causal=True)
    what = json.loads(
        json.dumps(counting.cell_job(Cell(implementation="flash", pass_="bwd", problem=p)).what)
    )
    assert Cell.from_json(what) == Cell(implementation="flash", pass_="bwd", problem=p)


def counted(cell: Cell, **changes: int) -> dict[str, Any]:
    """Counters exactly as the model says, but for the changes."""
    row = iomodel.estimate("flash", cell.problem, cell.pass_, device=find("h100-sxm"))
    kernels = [
        {
            "kernel": step.name, "l2_read_bytes": sum(step.read.values()),
            "l2_write_bytes": sum(step.write.values()), "l2_atomic_bytes": 0,
            "dram_read_bytes": one.read.value, "dram_write_bytes": one.write.value,
        }
        for step, one in zip(row.steps, iomodel.kernels_alone(row, find("h100-sxm")), strict=True)
    ]  # fmt: skip
    total = {name: sum(k[name] for k in kernels) for name in kernels[0] if name != "kernel"}
    return {"total": total | changes, "kernels": kernels}


@pytest.mark.parametrize("pass_", ["fwd", "bwd", "fwd+bwd"])
def test_what_is_as_modelled_has_ratio_1_and_lies_in_its_band(pass_: str) -> None:
    cell = Cell(
        implementation="flash", pass_=pass_, problem=problem(seqlen_q=2048, seqlen_k=2048, causal=True)
    )
    levels = compared.compare(cell, counted(cell), "flash", {}, find("h100-sxm"))
    assert {level.level for level in levels if not level.kernel} == {
        "L2 read", "L2 write", "DRAM read", "DRAM write"
    }  # fmt: skip
    assert all(level.within for level in levels)
    assert all(level.ratio == 1 for level in levels if level.value)
    kernels = {level.kernel for level in levels if level.kernel}
    assert len(kernels) == {"fwd": 0, "bwd": 3, "fwd+bwd": 4}[pass_]


def test_a_kernel_that_reads_twice_is_out_of_its_band() -> None:
    cell = Cell(implementation="flash", pass_="fwd", problem=problem(seqlen_q=4096, seqlen_k=4096))
    right = counted(cell)
    wrong = counted(cell, l2_read_bytes=2 * right["total"]["l2_read_bytes"])
    level = compared.compare(cell, wrong, "flash", {}, find("h100-sxm"))[0]
    assert (level.level, level.ratio, level.within) == ("L2 read", 2.0, False)


def test_spilled_registers_are_taken_off_what_is_written() -> None:
    cell = Cell(implementation="flash", pass_="fwd", problem=problem())
    right = counted(cell)
    spilling = counted(cell, l2_write_bytes=right["total"]["l2_write_bytes"] + 10**9, spill_write_bytes=10**9)
    levels = {level.level: level for level in compared.compare(cell, spilling, "flash", {}, None)}
    assert levels["L2 write"].ratio == 1
    assert (levels["spills"].counted, levels["spills"].within) == (10**9, None)


def test_registers_that_are_read_back_past_the_l1_are_taken_off_what_is_read() -> None:
    cell = Cell(implementation="flash", pass_="fwd", problem=problem())
    right = counted(cell)
    spilling = counted(cell, l2_read_bytes=right["total"]["l2_read_bytes"] + 10**9, spill_missed_bytes=10**9)
    assert compared.compare(cell, spilling, "flash", {}, None)[0].ratio == 1


def test_what_crosses_and_what_is_asked_for_are_told_apart() -> None:
    """One query: lse is 4 B a head and takes a sector. Counters see the one, a trace the other."""
    cell = Cell(implementation="flash", pass_="fwd", problem=problem(seqlen_q=1))
    (step,) = iomodel.estimate("flash", cell.problem, "fwd", device=find("h100-sxm")).steps
    asked, heads = sum(step.write.values()), cell.problem.batch * cell.problem.num_heads
    trace = {"total": {"read_bytes": 0, "write_bytes": asked, "atomic_bytes": 0}}
    whole = counted(cell, l2_write_bytes=asked + 28 * heads)
    for counters in (whole, {}):
        levels = compared.compare(cell, counters, "flash", {}, find("h100-sxm"), trace)
        (written,) = (one for one in levels if one.level == "L2 write")
        assert (written.requested, written.difference) == (asked, 0)
        assert (written.value, written.ratio) == ((asked + 28 * heads, 1.0) if counters else (asked, None))


def test_what_the_profiler_left_is_pushed_out_by_kernels_that_touch_most_of_the_l2() -> None:
    """As the kernels of known.json that only read were counted, to 0.7 MB, and the most by none exceeded."""
    card = find("h100-sxm")
    rows = json.loads((ROOT / "reports/h100-sxm/counters/known.json").read_text(encoding="utf-8"))["rows"]
    reading = [row for row in rows if row["kernel"] == "read"]
    assert len(reading) == 21
    for row in reading:
        size = row["dram_read_bytes"]
        one = iomodel.Alone("read", iomodel.Band(size, size, size), iomodel.Band(0, 0, 0))
        left = compared.left_by_the_profiler(one, card)
        assert row["dram_write_bytes"] == pytest.approx(left.value, abs=7e5), size
        assert row["dram_write_bytes"] <= left.high + 1e6


def test_what_a_kernel_is_known_to_spill_is_predicted_and_taken_off_where_it_was_not_counted_apart() -> None:
    cell = Cell(
        implementation="sdpa-flash", pass_="fwd",
        problem=problem(head_dim=128, head_dim_v=128, dtype="bf16"),
    )  # fmt: skip
    (step,) = iomodel.estimate("sdpa-flash", cell.problem, "fwd").steps
    written = sum(step.write.values())
    both = {"l2_write_bytes": written + step.spills.written}
    apart = {**both, "spill_write_bytes": step.spills.written}
    assert step.spills.written > 0
    for total in (both, apart):
        counters = {"total": total, "kernels": []}
        rows = compared.compare(cell, counters, "sdpa-flash", {}, None)
        levels = {level.level: level for level in rows}
        assert levels["L2 write"].ratio == 1
        assert ("spills" in levels) == ("spill_write_bytes" in total)
    assert levels["spills"].within


def test_without_model_or_device_the_counts_stand_alone() -> None:
    cell = Cell(implementation="flash", pass_="bwd", problem=problem())
    levels = compared.compare(cell, counted(cell), None, {}, None)
    assert all(level.value is None and level.within is None and level.counted is not None for level in levels)
    assert {level.kernel for level in levels} == {"", "delta", "dq", "dkdv"}
    assert compared.compare(cell, {"reason": "no"}, "flash", {}, None) == []
    at_dram = compared.compare(cell, counted(cell), "flash", {}, None)
    assert all(level.value is None for level in at_dram if level.level.startswith("DRAM"))


def test_naive_is_compared_at_dram_only() -> None:
    cell = Cell(implementation="naive", pass_="fwd", problem=problem())
    found = {"total": {"l2_read_bytes": 10, "dram_read_bytes": 10}, "kernels": []}
    levels = compared.compare(cell, found, "standard", {}, find("h100-sxm"))
    assert {level.level: level.value is not None for level in levels} == {
        "L2 read": False, "L2 write": False, "DRAM read": True, "DRAM write": True
    }  # fmt: skip


def test_known_kernels_show_what_l2_kept() -> None:
    size = 10_000_000
    job = counting.Job(kind="known", what={"name": "read", "bytes": size})
    totals = {"l2_read_bytes": 16 * size, "l2_write_bytes": 528, "dram_read_bytes": size + 15 * size // 4}
    (row,) = known.rows([job], [{"total": totals}])
    assert (row["hit"], row["expected_read_bytes"]) == (0.75, 16 * size)
    copy = counting.Job(kind="known", what={"name": "copy", "bytes": 8})
    (row,) = known.rows([copy], [{"reason": "no"}])
    assert (row["hit"], row["counted_read_bytes"], row["reason"]) == (None, None, "no")


def test_the_command_keeps_every_cell_in_a_results_file(
    fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake(
        "    if index == 1:\n"
        "        said.write(json.dumps({'index': 1, 'reason': 'unsupported: no'}) + '\\n'); continue\n"
        + COUNT
    )
    monkeypatch.setattr("flashbench.environment.collect", lambda target: {"device_name": GPU.name})
    monkeypatch.setattr(counting, "open_clocks", lambda device: FakeClocks())
    asked = cells(2)
    options = profile_counters.Options(json=True, argv=("flashbench", "profile"))
    profile_counters.show(asked, GPU, tmp_path / "out", options)
    shown = json.loads(capsys.readouterr().out)
    assert {row["cell"] for row in shown} == {asked[0].key}
    found = runfile.load(tmp_path / "out" / "results.jsonl").records
    assert [record.status for record in found] == ["profiled", "unsupported"]
    assert all(datetime.fromisoformat(record.started_at).tzinfo for record in found)
    assert found[0].counters["total"]["dram_read_bytes"] == 2000
    assert [record.clocks for record in found] == [{"before": reading(1990), "after": reading(1980)}, {}]
    assert "clocks" not in found[0].counters
    with pytest.raises(UnavailableError, match="no counters"):
        profile_counters.show(asked, Target(), tmp_path / "out2", options)


@pytest.mark.parametrize("asked", [{"detail": True}, {"kernels": True}, {}])
def test_what_else_is_counted_is_shown_by_kernel(
    capsys: pytest.CaptureFixture[str], asked: dict[str, bool]
) -> None:
    """Hit rates, sectors per request, shares of units and of time, as table and as rows of a level."""
    record = profiled()
    options = profile_counters.Options(json=True, **asked)
    joined.show([record], GPU, kernels=options.kernels, detail=options.detail, json=True)
    rows = [row for row in json.loads(capsys.readouterr().out) if row["level"] == "hardware"]
    joined.show([record], GPU, kernels=options.kernels, detail=options.detail)
    said = capsys.readouterr().out
    assert ("What else was counted" in said) == bool(rows) == bool(asked)
    if not asked:
        return
    assert [row["kernel"] for row in rows] == ["", "one", "two"]
    assert [row["time_share"] for row in rows] == [1, 0.25, 0.75]
    assert [row["l2_hit_share"] for row in rows] == [0.4, 0.9, 0.15]
    assert [row["sectors_per_request"] for row in rows] == [None, 4, None]
    assert [row["tensor_share"] for row in rows] == [None, 0.5, None]
    for text in ("l2 hit", "sectors per request", "tensor", "90.0%", "4.00", "25.0%", "168"):
        assert text in " ".join(said.split()), text
    assert "mufu" not in said  # nothing counted it


def profiled() -> Record:
    """A counted cell of two kernels; the L1 of the second was not counted."""
    one = {"time_s": 1e-3, "l2_hit_sectors": 9, "l2_miss_sectors": 1, "l1_sectors": 40, "l1_requests": 10,
           "tensor_share": 0.5, "registers_per_thread": 168}  # fmt: skip
    two = {"time_s": 3e-3, "l2_hit_sectors": 3, "l2_miss_sectors": 17, "registers_per_thread": 32}
    total = {"time_s": 4e-3, "l2_hit_sectors": 12, "l2_miss_sectors": 18}
    kernels = [{"kernel": "one", **one}, {"kernel": "two", **two}]
    return Record(
        cell=cells(1)[0], status="profiled", reason="no", counters={"total": total, "kernels": kernels}
    )


def test_grids_of_one_file_are_compiled_together_and_counted_in_one_process(
    fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake()
    profile, file = ncu.profile, tmp_path / "grids.toml"
    grid = 'seqlens = 64\nhead-dims = 64\ncausal = false\nimpls = ["flash"]\n'
    file.write_text(f"[[cells]]\n{grid}alibi = true\n[[cells]]\n{grid}softcap = 30\n", encoding="utf-8")
    done: list[Any] = []
    monkeypatch.setattr("flashbench.runner.precompile", lambda cells, *_: done.append(len(cells)))
    monkeypatch.setattr(ncu, "profile", lambda *a: (done.append("ncu"), profile(*a))[1])
    monkeypatch.setattr("flashbench.environment.target", lambda device: GPU)
    monkeypatch.setattr("flashbench.environment.collect", lambda target: {"device_name": GPU.name})
    monkeypatch.setattr("flashbench._cli.options.settle", lambda *_: None)
    out = tmp_path / "out"
    line = f"profile --counters --config {file} --dtypes fp16 --out {out} --json"
    with pytest.raises(SystemExit) as stop:
        cli.main(line.split())
    assert not stop.value.code
    found = runfile.load(out / "results.jsonl").records
    assert [(one.cell.problem.alibi, one.cell.problem.softcap, one.cell.pass_) for one in found] == [
        (True, 0, "fwd"), (True, 0, "bwd"), (False, 30, "fwd"), (False, 30, "bwd"),
    ]  # fmt: skip
    assert {one.cell.problem.dtype for one in found} == {"fp16"}, "the line wins over every table"
    assert {one.counters["total"]["l2_read_bytes"] for one in found} == {64}
    assert done == [4, "ncu"]


def test_a_sweep_is_counted_afterwards_and_what_was_refused_leaves_its_times(
    fake, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A sweep on a CPU, with a profiler that plays a GPU's: rows keep their times and get counters."""
    fake(
        "    if index == 1:\n"
        "        said.write(json.dumps({'index': 1, 'reason': 'OutOfMemoryError: no'}) + '\\n'); continue\n"
        + COUNT
    )
    monkeypatch.setattr(counting, "why_unavailable", lambda target: None)
    line = f"{ON_A_CPU} --impls naive,sdpa"
    out = tmp_path / "out"
    with pytest.raises(SystemExit) as stop:
        cli.main([*line.split(), "--counters", "--out", str(out)])
    assert not stop.value.code
    found = runfile.load(out / "results.jsonl").records
    assert [record.status for record in found] == ["ok", "ok"]
    assert found[0].counters["total"]["dram_read_bytes"] == 2000
    assert found[1].counters == {"reason": "OutOfMemoryError: no"}
    assert "not counted: 1 of 2 cells: OutOfMemoryError: no" in capsys.readouterr().err
    assert (out / "counters" / "counters-001.csv").exists()


def test_without_counters_the_sweep_goes_on(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    line = f"{ON_A_CPU} --impls naive"
    with pytest.raises(SystemExit) as stop:
        cli.main([*line.split(), "--counters", "--out", str(tmp_path / "out")])
    assert not stop.value.code
    assert "no counters: counters need an NVIDIA GPU" in capsys.readouterr().err
    (record,) = runfile.load(tmp_path / "out" / "results.jsonl").records
    assert (record.status, record.counters) == ("ok", {})


@pytest.mark.gpu
def test_counters_of_a_copy_and_of_the_bundled_kernel_are_as_known(tmp_path: Path) -> None:
    from flashbench import environment, kernels

    target = environment.target("cuda:0")
    if reason := counting.why_unavailable(target):
        pytest.skip(reason)
    p = problem(batch=2, num_heads=8, num_kv_heads=2, seqlen_q=1000, seqlen_k=1000, causal=True, dtype="bf16")
    asked = [Cell(implementation="flash", pass_=pass_, problem=p) for pass_ in ("fwd", "bwd")]
    jobs = [
        counting.Job(kind="known", what={"name": "copy", "bytes": 2**28}), *map(counting.cell_job, asked)
    ]  # fmt: skip
    found: list[Mapping[str, Any]] = []
    counting.count_jobs(jobs, target, folder=tmp_path, on_count=lambda _, counters: found.append(counters))
    (copy,) = known.rows(jobs[:1], found[:1])
    assert copy["counted_read_bytes"] == pytest.approx(2**28, rel=0.01)
    assert copy["counted_write_bytes"] == pytest.approx(2**28, rel=0.01)
    assert copy["dram_read_bytes"] == pytest.approx(2**28, rel=0.01)
    for cell, counters in zip(asked, found[1:], strict=True):
        row = kernels.get("flash")
        model, config = row.model(p, target), row.describe(p, cell.pass_, target)
        read = compared.compare(cell, counters, model, config, find("h100-sxm"))[0]
        assert read.level == "L2 read"
        assert read.ratio == pytest.approx(1.0, abs=0.01)
