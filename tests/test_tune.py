"""``flashbench tune``: what is tried, what is chosen, the file and its use; the timer alone is not real.

Kernels run in the interpreter here. The card is a made-up one with the tables of sm_90, on the CPU.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from attention import problem

from flashbench import (
    decode_configs,
    flash_configs,
    kernels,
    presets,
    record_json,
    runner,
    tuned,
    tuning,
)
from flashbench.cli import main
from flashbench.decoding import Step
from flashbench.errors import RunFileError, UsageError
from flashbench.flash_configs import Config
from flashbench.kernels import Candidate, Target, _compile
from flashbench.problem import Cell
from flashbench.profilers import Timing
from flashbench.record import Samples
from flashbench.tuning import compiling, search

pytest.importorskip("triton")
ROOT = Path(__file__).resolve().parent.parent
CARD = Target(
    device="cpu", name="A Card", capability=(9, 0), smem_per_block_bytes=232448, num_sms=8, l2_bytes=2**25
)
TUNABLE = tuning.tunable()
PASSES = {"flash-decode": ("fwd",), "flash-fp8": ("fwd",), "flash-v2-fp8": ("fwd",)}


def cell(pass_: str = "fwd", implementation: str = "flash-v2", **changes: Any) -> Cell:
    shape = {"batch": 1, "num_heads": 1, "num_kv_heads": 1, "seqlen_q": 64, "seqlen_k": 64, "head_dim": 32,
             "head_dim_v": 32, "dtype": "fp16", "causal": True}  # fmt: skip
    return Cell(implementation=implementation, problem=problem(**{**shape, **changes}), pass_=pass_)


def dtype_of(implementation: str) -> str:
    known = {"flash-fp8": "fp8", "flash-v2-fp8": "fp8", "flash": "fp32"}  # flash: where flash-v2 runs
    return known.get(implementation, "bf16")


# What is tried


@pytest.mark.parametrize("implementation", TUNABLE)
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_what_is_compiled_for_a_candidate_is_what_would_run(implementation: str, dim: int) -> None:
    row, bundled = kernels.get(implementation), _compile.BUNDLED[implementation].kernels
    dim -= 8 if implementation == "flash-fp8" else 0  # where flash-v2-fp8 runs
    assert row.prepare_tiles is not None
    for pass_ in PASSES.get(implementation, ("fwd", "bwd")):
        one = cell(pass_, implementation, head_dim=dim, head_dim_v=dim, dtype=dtype_of(implementation))
        described = row.on_card(one.problem, pass_, CARD)
        tried = row.candidates(one.problem, pass_, CARD)
        assert tried
        seen = set()
        for candidate in tried:
            assert candidate.compiled in bundled[pass_]
            if candidate.kernel not in seen:  # the table's own comes first
                assert all(described.get(name, value) == value for name, value in candidate.tiles.items())
            seen.add(candidate.kernel)
            launch = _compile.launch(tuning.CellCase(one).task(candidate, CARD))
            words = {"block_q": "BLOCK_M", "block_k": "BLOCK_N"}
            for name, value in candidate.tiles.items():
                field = name.removeprefix(f"{candidate.kernel}_")
                if field not in ("resident", "ahead"):
                    assert launch.options[words.get(field, field)] == value
    assert len({(c.kernel, tuple(c.tiles.values())) for c in tried}) == len(tried)


def test_the_nearest_to_the_table_are_tried_first() -> None:
    own = Config(128, 64, 8, 3)
    first, *rest = flash_configs.candidates("fwd", own, "half")
    assert first == own
    assert rest[:2] == [Config(128, 64, 8, 4), Config(128, 64, 8, 2)]
    halves = {Config(64, 64, 8, 3), Config(128, 32, 8, 3), Config(128, 128, 8, 3), Config(128, 64, 4, 3)}
    assert set(rest[2:6]) == halves
    assert rest.index(Config(128, 32, 8, 3)) < rest.index(Config(64, 32, 4, 1))
    assert flash_configs.candidates("delta", own, "half") == []


def test_pages_are_read_ahead_or_not_in_a_paged_cache_only() -> None:
    own = decode_configs.DecodeConfig(64, 4, 4)
    shape = decode_configs.Shape("half", 128, 128, 2)
    assert {one.ahead for one in decode_configs.candidates(own, shape)} == {True}
    paged = decode_configs.candidates(own, replace(shape, page_size=16))
    assert {one.ahead for one in paged} == {True, False}


def test_what_the_card_has_no_shared_memory_for_is_dropped_with_both_numbers() -> None:
    small = replace(CARD, smem_per_block_bytes=60_000)
    case = tuning.CellCase(cell(head_dim=128, head_dim_v=128))
    of_kernel = compiling.trials(case, small, 4).of["fwd"]
    dropped = [trial for trial in of_kernel if trial.status == "dropped"]
    assert dropped
    for trial in dropped:
        assert trial.candidate.shared_bytes > 60_000
        assert trial.reason == (
            f"needs {trial.candidate.shared_bytes} B of shared memory per block, limit 60000 B"
        )
    assert sum(trial.status == "waiting" for trial in of_kernel) <= 4


def trial(own: bool = False, spills: int | None = None, **tiles: int) -> compiling.Trial:
    config = {"fwd_block_q": 64, "fwd_block_k": 64, "fwd_num_warps": 4, "fwd_num_stages": 2, **tiles}
    made = Candidate(kernel="fwd", compiled="fwd", config=None, tiles=config, shared_bytes=0)
    return compiling.Trial(made, own=own, spills=spills)


SPILLING = """
.text.k:
        /*0000*/                   STL [R1], R2 ;
        /*0010*/                   LDL R2, [R1] ;
"""


@pytest.mark.parametrize(("allowed", "status"), [(0, "dropped"), (1, "dropped"), (2, "waiting")])
def test_a_candidate_may_spill_no_more_than_the_table_s_own(allowed: int, status: str) -> None:
    one = trial()
    task = _compile.Task("fwd", cell().problem, (9, 0))
    done = _compile.Compiled(task, usage="REG:255 STACK:0 SHARED:0", sass=SPILLING)
    compiling._judge(one, trial(own=True, spills=allowed), done, CARD)
    assert one.spills == 2
    assert one.status == status
    assert (one.reason is None) == (status == "waiting")


def test_what_does_not_compile_is_dropped_but_the_table_s_own_still_runs() -> None:
    done = _compile.Compiled(_compile.Task("fwd", cell().problem, (9, 0)), error="Boom:\n  no registers")
    one, own = trial(), trial(own=True)
    compiling._judge(one, own, done, CARD)
    compiling._judge(own, own, done, CARD)
    assert (one.status, one.reason) == ("dropped", "does not compile: Boom: no registers")
    assert own.status == "waiting"


# What is chosen


def finalist(block_k: int, *rounds: float) -> search.Finalist:
    return search.Finalist({"fwd_block_k": block_k}, lambda: None, list(rounds))


def test_the_table_gives_way_to_what_is_faster_by_more_than_the_margin() -> None:
    own = finalist(64, 1.0, 1.0, 9.0)
    for faster, winner in ((0.995, 64), (0.98, 32)):
        found = search.chosen([own, finalist(32, faster), finalist(128, 2.0)], own.config)
        assert found["winner"]["config"] == {"fwd_block_k": winner}
        assert found["table"]["time_s"] == 1.0
        assert found["table"]["gain"] == 1.0
        assert [row["time_s"] for row in found["runners_up"]][-1] == 2.0
        assert found["winner"]["gain"] == pytest.approx(1 if winner == 64 else 1 / faster)


def test_without_a_right_table_the_fastest_of_the_others_wins() -> None:
    found = search.chosen([finalist(32, 2.0), finalist(128, 1.0)], {"fwd_block_k": 64})
    assert found["winner"]["config"] == {"fwd_block_k": 128}
    assert found["table"]["time_s"] is None


class Clock:
    """A timer that says what the launched tiles are worth; the launches are real, and may be sabotaged."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, seconds: Any, sabotaged: Any) -> None:
        from flashbench.kernels import _call

        self.launched: list[tuple[str, dict[str, Any]]] = []
        self.timed: list[list[tuple[str, dict[str, Any]]]] = []
        self.seconds = seconds
        real = _call.Launch.run

        def run(launch: Any) -> None:
            real(launch)
            self.launched.append((launch.name, launch.options))
            if sabotaged(launch):
                next(x for x in launch.args[3:] if isinstance(x, torch.Tensor)).add_(0.5)

        monkeypatch.setattr(_call.Launch, "run", run)
        monkeypatch.setattr(search, "measure_time", self.measure_time)
        monkeypatch.setattr(compiling._compile, "compile_each", nothing_compiled)

    def measure_time(self, call: Any, **_: Any) -> Timing:
        self.launched.clear()
        call()
        self.timed.append(list(self.launched))
        return Timing(samples=Samples(samples_s=(self.seconds(self.launched),), cache="hot", method="wall"))


def nothing_compiled(tasks: Any, **_: Any) -> Any:
    for task in tasks:
        yield _compile.Compiled(task, unread="not here")


def tuned_in_the_interpreter(cases: list[tuning.Case], per_kernel: int, **changes: Any) -> dict[str, Any]:
    found = tuning.document(CARD, ["flashbench", "tune"])
    saved: list[str] = []
    asked = tuning.Options(per_kernel=per_kernel, **changes)
    tuning.tune(cases, CARD, found, asked, on_change=lambda: saved.append(json.dumps(found)))
    assert json.loads(saved[-1]) == found
    return found


def test_the_fastest_right_candidate_wins_and_a_wrong_one_is_never_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock(
        monkeypatch,
        seconds=lambda launches: launches[0][1]["BLOCK_N"] * launches[0][1]["num_warps"] * 1e-6,
        sabotaged=lambda launch: launch.name == "fwd" and launch.options["num_warps"] == 4,
    )
    (case,) = tuned_in_the_interpreter(tuning.cases_of([cell()]), 7)["cases"]
    assert {trial["status"] for trial in case["trials"]} == {"timed", "wrong"}
    wrong = [trial for trial in case["trials"] if trial["status"] == "wrong"]
    assert {trial["config"]["fwd_num_warps"] for trial in wrong} == {4}
    assert all("o is off by" in trial["reason"] and trial["time_s"] is None for trial in wrong)
    assert all(options["num_warps"] == 8 for launches in clock.timed for _, options in launches)
    assert case["winner"]["config"]["fwd_block_k"] == 32
    assert case["winner"]["gain"] == pytest.approx(case["table"]["time_s"] / case["winner"]["time_s"]) == 2
    assert case["table"]["config"] == dict(kernels.get("flash-v2").on_card(cell().problem, "fwd", CARD))
    assert len(case["winner"]["rounds_s"]) == search.ROUNDS
    entrants = 1 + len(case["runners_up"])
    final = [repr(launches[0][1]) for launches in clock.timed[-search.ROUNDS * entrants :]]
    rounds = [final[start : start + entrants] for start in range(0, len(final), entrants)]
    assert len({frozenset(one) for one in rounds}) == 1
    assert len(set(rounds[0])) == entrants > 1
    assert len({one[0] for one in rounds}) == min(entrants, search.ROUNDS), "each round begins with another"


@pytest.mark.slow
def test_a_backward_is_tuned_kernel_by_kernel_and_then_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    def seconds(launches: Any) -> float:
        options = dict(launches)
        return 1e-6 * (options["dq"]["num_stages"] + options["dkdv"]["num_stages"])

    Clock(monkeypatch, seconds, sabotaged=lambda launch: False)
    (case,) = tuned_in_the_interpreter(tuning.cases_of([cell("bwd")]), 3)["cases"]
    best = case["winner"]["config"]
    assert (best["dq_num_stages"], best["dkdv_num_stages"]) == (2, 2)
    assert case["winner"]["time_s"] == pytest.approx(4e-6)
    assert case["table"]["time_s"] == pytest.approx(6e-6)


def test_a_paged_cache_in_fp8_is_tuned_and_the_step_runs_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbench import decoding

    Clock(monkeypatch, lambda launches: 1e-6 * launches[0][1]["BLOCK_N"], lambda launch: False)
    small = replace(presets.find("llama-3-8b"), num_heads=2, num_kv_heads=1, head_dim=32, head_dim_v=32)
    step = Step(preset=small, kv_len=70, batch=1, page_size=16, dtype="fp8")
    found = tuned_in_the_interpreter(tuning.steps_of([step]), 8)
    (case,) = found["cases"]
    assert case["winner"]["config"]["fwd_block_k"] == 32
    served, name = tuned.Tuned(Path("x"), found["cases"]).step(replace(step, kv_len=100))
    assert name == case["case"]
    assert served.config is not None
    assert served.config.block_k == 32
    row = decoding.check(served, Target())
    assert (row["status"], row["block_k"]) == ("ok", 32)
    other = tuned.Tuned(Path("x"), found["cases"]).step(replace(step, page_size=0))
    assert other == (replace(step, page_size=0), None)


def test_a_budget_that_is_spent_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, lambda launches: 1.0, lambda launch: False)
    (case,) = tuned_in_the_interpreter(tuning.cases_of([cell()]), 3, budget_s=0)["cases"]
    assert case["reason"] == "not tried: the budget of 0 s was spent"
    assert case["winner"] is None


def test_a_case_that_fails_leaves_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    Clock(monkeypatch, lambda launches: 1.0, lambda launch: False)
    huge = cell(seqlen_q=2**22, seqlen_k=2**22, num_heads=64, num_kv_heads=64)
    first, second = tuned_in_the_interpreter(tuning.cases_of([huge, cell()]), 1)["cases"]
    assert "of memory" in first["reason"]
    assert (first["winner"], second["reason"]) == (None, None)
    assert second["winner"]["gain"] == 1


# The file


def entry(one: Cell, config: dict[str, int] | None, **point: int) -> dict[str, Any]:
    return {
        "case": f"{one.key} {point}",
        "shape": tuned.shape_of(one.implementation, one.pass_, one.problem),
        "point": tuned.point_of(one.problem) | point,
        "winner": None if config is None else {"config": config},
    }


TILES = {"fwd_block_q": 32, "fwd_block_k": 16, "fwd_num_warps": 4, "fwd_num_stages": 1}


def written(path: Path, target: Target, *cases: dict[str, Any], **key: str) -> Path:
    document = tuning.document(target, [])
    tuned.save({**document, "key": document["key"] | key, "cases": list(cases)}, path)
    return path


def test_the_log_sum_exp_that_is_checked_is_of_the_file_s_tiles() -> None:
    from flashbench.kernels import _call
    from flashbench.kernels._inputs import make_inputs

    one = cell()
    prepare = tuned.Tuned(Path("x"), [entry(one, TILES)]).get("flash-v2").prepare_lse
    assert prepare is not None
    with _call.rehearsed(((9, 0), None)) as launches:
        prepare(one.problem, make_inputs(one.problem, "meta", 0), {})()
    assert [(one.options["BLOCK_M"], one.options["BLOCK_N"]) for one in launches] == [(32, 16)]


def test_the_nearest_finished_case_of_the_same_shape_serves() -> None:
    one = cell(seqlen_q=4096, seqlen_k=4096)
    cases = [
        entry(one, {"fwd_block_q": 1}, seqlen_q=1024, seqlen_k=1024),
        entry(one, {"fwd_block_q": 2}, seqlen_q=8192, seqlen_k=8192),
        entry(one, {"fwd_block_q": 3}, seqlen_q=8192, seqlen_k=8192, heads=64),
        entry(one, None),
        entry(cell(head_dim=64, seqlen_q=4096, seqlen_k=4096), {"fwd_block_q": 4}),
        entry(replace(one, pass_="bwd"), {"dq_block_q": 5}),
    ]
    found = tuned.Tuned(Path("x"), cases)

    def tiles(pass_: str = "fwd", **changes: Any) -> dict[str, Any]:
        return found.tiles("flash-v2", replace(one.problem, **changes), pass_)

    assert tiles() == {"fwd_block_q": 2}
    assert tiles(batch=50) == {"fwd_block_q": 3}
    assert tiles(seqlen_q=1500, seqlen_k=1500) == {"fwd_block_q": 1}
    assert tiles("fwd+bwd") == {"fwd_block_q": 2, "dq_block_q": 5}
    assert tiles(seqlen_q=200, seqlen_k=200) == {}
    assert tiles(causal=False) == tiles(dtype="bf16") == tiles(softcap=3.0) == tiles(num_heads=2) == {}
    assert tiles(layout="bshd", deterministic=True) == {"fwd_block_q": 2}


def test_a_sweep_runs_with_the_file_and_its_record_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from flashbench.kernels import _call

    launched, real = [], _call.Launch.run
    monkeypatch.setattr(_call.Launch, "run", lambda self: launched.append(self.options) or real(self))
    served, other = cell(), cell(head_dim=16, head_dim_v=16)
    path = written(tmp_path / "t.json", Target(), entry(served, TILES))
    found = tuned.read(path, Target())
    records: list[Any] = []
    runner.run_cells([served, other], Target(), runner.RunOptions(time=False, tuned=found), records.append)
    first, second = (record_json.record_from_json(record_json.record_to_json(record)) for record in records)
    assert (first.status, second.status) == ("checked", "checked")
    assert first.config == TILES
    assert first.tuned == {"file": str(path), "cases": [entry(served, TILES)["case"]]}
    assert {one["BLOCK_N"] for one in launched} == {16, second.config["fwd_block_k"]}
    assert second.tuned == {}
    assert second.config["fwd_block_k"] == 64


def test_what_is_profiled_runs_with_the_file(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flashbench.counting.child import call_of
    from flashbench.kernels import _call

    launched, real = [], _call.Launch.run
    monkeypatch.setattr(_call.Launch, "run", lambda self: launched.append(self.options) or real(self))
    found = tuned.read(written(tmp_path / "t.json", Target(), entry(cell(), TILES)), Target())
    for file, block_k in ((found, 16), (None, 64)):
        launched.clear()
        with call_of(cell(), Target(), 0, file) as call:
            call()
        assert [one["BLOCK_N"] for one in launched] == [block_k]


def test_a_decode_of_the_file_names_the_splits_that_follow_from_its_tiles(tmp_path: Path) -> None:
    one = cell(implementation="flash-decode", seqlen_q=1, seqlen_k=4096)
    tiles = {
        "fwd_block_k": 128,
        "fwd_num_warps": 4,
        "fwd_num_stages": 2,
        "fwd_resident": 1,
        "fwd_ahead": True,
    }
    found = tuned.read(written(tmp_path / "t.json", Target(), entry(one, tiles)), Target())
    said = found.get("flash-decode").describe(one.problem, "fwd", Target())
    assert said["fwd_block_k"] == 128
    plain = kernels.get("flash-decode").describe(one.problem, "fwd", Target())
    assert said["split_block_k"] % 128 == 0
    assert {**plain, **said}.keys() == plain.keys() | {"fwd_resident", "fwd_ahead"}


@pytest.mark.parametrize(
    ("field", "refused"),
    [("gpu", True), ("capability", True), ("triton", True), ("driver", False), ("kernels", False)],
)
def test_a_file_of_another_machine_is_refused_and_names_what_differs(
    field: str, refused: bool, tmp_path: Path
) -> None:
    path = written(tmp_path / "t.json", CARD, **{field: "other"})
    if refused:
        with pytest.raises(UsageError, match=rf"t\.json'.*\({field} other, here .*accepted: a file of this"):
            tuned.read(path, CARD)
    else:
        (note,) = tuned.read(path, CARD).notes
        assert f"was tuned with {field} other; here is " in note


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "not JSON"),
        ("[]", "no tuning"),
        ('{"type": "tuned", "schema": 99}', "schema 99; accepted: 1"),
        ('{"type": "tuned", "schema": 1, "key": {}, "cases": [{}]}', "a damaged case"),
    ],
)
def test_a_file_that_is_none_is_named(content: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(content)
    with pytest.raises(RunFileError, match=text):
        tuned.read(path, CARD)
    with pytest.raises(UsageError, match="No such file"):
        tuned.read(tmp_path / "missing.json", CARD)


# The command


def command(argv: list[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(argv)
    out, err = capsys.readouterr()
    return int(stop.value.code or 0), out, err


no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="shows what a machine without a GPU does")


@no_gpu
@pytest.mark.parametrize("argv", [[], ["--kv-lens", "1k"]])
def test_without_a_gpu_it_says_so_in_one_line(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = command(["tune", *argv], capsys)
    assert (code, out) == (3, "")
    first, hint = err.splitlines()
    assert first.startswith("error: no GPU to tune on")
    assert "--dry-run" in hint
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (["--impls", "naive"], "--impls 'naive': it has no configurations to choose from; accepted: flash,"),
        (["--impls", "flash-v9"], "--impls 'flash-v9' is not known"),
        (["--page-size", "16"], "--page-size does nothing without --kv-lens"),
        (["--kv-lens", "1k", "--head-dims", "64"], "--head-dims does nothing with --kv-lens"),
        (["--kv-lens", "1k", "--impls", "flash"], "--impls 'flash' with --kv-lens; accepted: flash-decode"),
        (["--causal", "top-left"], "--causal 'top-left'"),
        (
            ["--head-dims", "64,300"],
            "--head-dims '64,300': no kernel takes a head dim of 300; accepted: at most",
        ),
        (
            ["--dry-run", "--head-dims", "64", "--head-dims-v", "512"],
            "--head-dims-v '512': no kernel takes a head dim of 512; accepted: at most 256",
        ),
        (["--budget", "soon"], "--budget 'soon'"),
        (["--candidates", "0"], "--candidates '0'"),
        (["--gpu", "h100-sxm"], "--gpu: is of --dry-run"),
        (["--out", "no/such/x.json"], "--out 'no/such/x.json': not a file in a folder that is there"),
        (["--out", __file__], "exists and is not overwritten"),
        (["--json", "--csv"], "exclude each other"),
    ],
)
def test_bad_input_is_one_line(argv: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = command(["tune", *argv], capsys)
    assert (code, out) == (2, "")
    assert text in err
    assert sum(line.startswith("error:") for line in err.splitlines()) == 1


@no_gpu
@pytest.mark.parametrize(
    "argv",
    [
        ["run", "--impls", "naive", "--seqlens", "8"],
        ["check", "--impls", "naive", "--seqlens", "8"],
        ["decode", "--check", "--kv-lens", "8"],
        ["profile", "--timeline"],
    ],
    ids=lambda argv: argv[0],
)
def test_every_use_refuses_a_file_of_another_gpu(
    argv: list[str], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = written(tmp_path / "t.json", CARD)
    out = ["--out", str(tmp_path / "out")] if argv[0] == "run" else []
    code, said, err = command([*argv, *out, "--tuned", str(path)], capsys)
    assert (code, said) == (2, "")
    assert "error: --tuned" in err
    assert "gpu A Card, here" in err
    assert not (tmp_path / "out").exists()


@no_gpu
def test_run_takes_the_file_from_toml_and_a_resumed_run_goes_on_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    from flashbench import environment

    here = environment.target("cpu")
    path = written(tmp_path / "t.json", here, entry(cell(causal=False), TILES))
    config = tmp_path / "c.toml"
    config.write_text(f'tuned = "{path}"\nimpls = "flash-v2"\nhead-dims = 32\ndtypes = "fp16"\n'
                      'causal = "no"\npasses = "fwd"\nbatch = 1\nheads = 1\n')  # fmt: skip
    out = tmp_path / "out"
    first = ["run", "--config", str(config), "--seqlens", "64", "--out", str(out), "--json"]
    code, text, err = command(first, capsys)
    assert code == 0, err
    (row,) = json.loads(text)
    assert (row["tuned"], row["status"]) == (str(path), "checked")
    code, text, err = command(["run", "--resume", "--out", str(out), "--seqlens", "64,96", "--json"], capsys)
    assert code == 0, err
    assert [row["tuned"] for row in json.loads(text)] == [str(path)] * 2


INTERRUPTED = """
import sys, time
from flashbench import environment
from flashbench.kernels import Target
from flashbench.profilers import Timing
from flashbench.record import Samples
from flashbench.tuning import search
card = Target(device="cpu", name="A Card", capability=(9, 0), smem_per_block_bytes=232448, num_sms=8)
environment.target = lambda device=None: card
from flashbench.kernels import _compile
_compile.compile_each = lambda tasks, **_: (_compile.Compiled(task, unread="no") for task in tasks)
count = 0
def measure_time(call, **_):
    global count
    count += 1
    if count == 3:
        print("ready", flush=True)
        time.sleep(60)
    return Timing(samples=Samples(samples_s=(1e-3,), cache="cold", method="events"))
search.measure_time = measure_time
from flashbench.cli import main
main(["tune", "--seqlens", "32", "--head-dims", "32", "--dtypes", "fp16", "--causal", "no", "--passes", "fwd",
      "--batch", "1", "--heads", "1", "--out", sys.argv[1], "--candidates", "4"])
"""


@no_gpu
@pytest.mark.parametrize("stop", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_leaves_all_that_was_measured_in_the_file(stop: signal.Signals, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    child = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(path)], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
        text=True, cwd=ROOT, env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
    )  # fmt: skip
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n"
    time.sleep(0.2)
    child.send_signal(stop)
    _, err = child.communicate(timeout=240)
    assert child.returncode == 130, err
    assert "interrupted; " in err
    (case,) = tuned.load(path)["cases"]
    assert [trial["status"] for trial in case["trials"]] == ["timed", "timed", "waiting", "waiting"]
    assert case["trials"][1]["time_s"] == 1e-3
    assert case["winner"] is None
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_of_a_dry_run_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tuning, "candidates", lambda *_: signal.raise_signal(signal.SIGTERM))
    code, out, err = command(["tune", "--dry-run", "--gpu", "h100-sxm", "--head-dims", "64", "-q"], capsys)
    assert (code, out, err) == (130, "", "warning: interrupted; not all candidates were compiled\n")


@pytest.mark.slow
def test_a_dry_run_lists_candidates_with_what_they_compile_to(capsys: pytest.CaptureFixture[str]) -> None:
    argv = [
        "tune",
        "--dry-run",
        "--gpu",
        "h100-sxm",
        "--head-dims",
        "64",
        "--causal",
        "no",
        "--passes",
        "fwd",
    ]
    code, out, err = command([*argv, "--candidates", "2", "--json"], capsys)
    rows = json.loads(out)
    assert code == 0, err
    assert [row["own"] for row in rows] == ["own", None]
    for row in rows:
        assert row["shared_bytes"] > 0
        assert row["registers"] is None or 24 <= row["registers"] <= 255


@pytest.mark.gpu
def test_a_gpu_is_tuned_and_a_run_takes_the_file(tmp_path: Path) -> None:
    from flashbench import environment

    target = environment.target("cuda:0")
    shape = {"batch": 2, "num_heads": 8, "num_kv_heads": 4, "seqlen_q": 1024, "seqlen_k": 1024,
             "head_dim": 64, "head_dim_v": 64, "dtype": "bf16"}  # fmt: skip
    cells = [cell(pass_, **shape) for pass_ in ("fwd", "bwd")]
    found, path = tuning.document(target, []), tmp_path / "t.json"
    step = Step(preset=presets.find("llama-3-8b"), kv_len=4096, batch=1, page_size=16)
    cases = [*tuning.cases_of(cells), *tuning.steps_of([step])]
    tuning.tune(cases, target, found, tuning.Options(per_kernel=3), lambda: tuned.save(found, path))
    for case in found["cases"]:
        assert case["reason"] is None
        assert not [trial for trial in case["trials"] if trial["status"] == "wrong"]
        assert case["winner"]["time_s"] <= (1 + search.MARGIN) * case["table"]["time_s"]
    records: list[Any] = []
    asked = runner.RunOptions(tuned=tuned.read(path, target))
    runner.run_cells(cells, target, asked, records.append)
    assert [record.status for record in records] == ["ok", "ok"]
    for record, case in zip(records, found["cases"], strict=False):
        assert record.tuned["file"] == str(path)
        assert case["winner"]["config"].items() <= record.config.items()
