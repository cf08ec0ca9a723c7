"""Files and lines that once ended in a traceback, a wrong number or an error without a name."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fuzz_files import CLAIMS, OTHERS
from fuzzing import check
from judging import written
from synthetic import record
from test_judge_formats import FLASH, nvbench, pyperf

from flashbench._runfile import lines

LONG = "9" * 400
ROWS = (
    ("config", "4", "config is '4'; an object"), ("config", {"a": []}, "config.a is '[]'"),
    ("config", {"fwd_block_k": "64"}, "config.fwd_block_k is '64'; a whole number"),
    ("config", {"block_q": None}, "config.block_q is 'None'; a whole number"),
    ("config", {"fwd_block_q": 64.5}, "config.fwd_block_q is '64.5'; a whole number"),
    ("counters", {"total": {"spill_write_bytes": 0.5}}, "counters.total.spill_write_bytes is '0.5'; a whole"),
    ("counters", {"kernels": [{"kernel": "x"}]}, "the field 'grid' of counters.kernels[0] is missing"),
    ("counters", {"kernels": [None]}, "counters.kernels[0] is null"),
    ("trace", {"kernels": [{"step": "x", "tensors": [{"read_bytes": 1, "write_bytes": 0}]}]},
    "the field 'atomic_bytes' of trace.kernels[0].tensors[0] is missing"),
    ("trace", {"difference_bytes": 0.5}, "trace.difference_bytes is '0.5'; a whole number"),
    ("energy", [], "energy is '[]'"), ("apart", "x", "apart is 'x'; an object"),
    ("exact", "yes", "exact is 'yes'; true or false"),
    ("timing", {"rounds": [1]}, "timing.rounds[0] is '1'; an object"),
    ("timing", {"rounds": [{"samples": "x"}]}, "timing.rounds[0].samples is 'x'"),
    ("spent", {"samples_s": "x"}, "spent.samples_s is 'x'; a number"), ("flags", "ok",
    "flags is 'ok'; a list"),
    ("counters", {"total": {"l2_read_bytes": "x"}}, "counters.total.l2_read_bytes is 'x'"),
    ("environment", {"num_sms": 10**30}, "environment.num_sms is '1000"),
    ("samples", {"samples_s": []}, "samples_s holds 'None'; seconds"),
    ("samples", {"samples_s": [-1.0]}, "samples_s holds '-1.0'"),
    ("samples", {"samples_s": [1e300]}, "samples_s holds '1e+300'"),
    ("memory", {"inputs_bytes": -1}, "memory.inputs_bytes is '-1'"),
    ("accuracy", {"max_abs_error": {"o": 1.0}, "budget": {}, "query_rows": 1, "key_rows": 0},
    "no budget for o"),
    ("status", ["x" * 5000], "status is"), ("type", {"a": "x" * 5000}, "type is"),
)  # fmt: skip
PROBLEMS = (("batch", 10**30), ("head_dim", 2**40), ("causal", "no"), ("window", ["x", 1]), ("lengths",
[[1.5, 2]]),
            ("alibi", 1), ("bias", 3), ("softcap", "30"))  # fmt: skip


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def edited(change: Callable[[dict[str, Any]], object]) -> None:
    """A results file of which the only row was changed, with a checksum that fits."""
    written(Path("r.jsonl"), [record("naive", 1024)])
    head, row = Path("r.jsonl").read_bytes().splitlines()
    value = json.loads(row)
    change(value)
    Path("r.jsonl").write_bytes(head + b"\n" + lines.seal(value))


@pytest.mark.parametrize(("name", "value", "said"), ROWS, ids=[f"{row[0]}-{row[2]:.30}" for row in ROWS])
def test_a_field_of_another_type_is_named(name: str, value: Any, said: str) -> None:
    edited(lambda row: row.update({name: value}))
    for line in ("compare r.jsonl r.jsonl", "verify r.jsonl"):
        found = check(line.split(), ("r.jsonl",))
        assert found.code == 4
        assert said in found.err
        assert "line 2" in found.err


@pytest.mark.parametrize(("name", "value"), PROBLEMS)
def test_so_is_one_of_the_problem(name: str, value: Any) -> None:
    edited(lambda row: row["cell"]["problem"].update({name: value}))
    found = check(["report", "r.jsonl"], ("r.jsonl",))
    assert found.code == 4
    assert f"cell.problem.{name}" in found.err


@pytest.mark.parametrize("count", [2**62, None])
def test_rounds_of_other_counts_than_there_are_samples_have_no_cycles(count: int | None) -> None:
    edited(lambda row: row.update(timing={"rounds": [{"samples": count, "sm_clock_mhz": 1980}]}))
    assert check(["report", "r.jsonl"]).code == 0


def test_null_is_what_is_not_told() -> None:
    edited(lambda row: row.update(dict.fromkeys(("config", "energy", "clocks", "timing", "spent", "trace"))))
    assert check(["compare", "r.jsonl", "r.jsonl", "--metric", "time_s,energy_j"]).code in (0, 6)


@pytest.mark.parametrize("document", [
    pyperf(0.1) | {"benchmarks": [1.5]}, {"benchmarks": [None, {"states": 3}], "devices": []},
    {"type": "gate", "schema": "x" * 5000}, nvbench(0.1, Path()) | {"devices": [3]},
])  # fmt: skip
def test_other_tools_files_with_the_wrong_things_in_them(document: Any) -> None:
    Path("x.json").write_text(json.dumps(document))
    found = check(["compare", "x.json", "x.json"], ("x.json",))
    assert found.code == 4
    assert len(found.err) < 500


@pytest.mark.parametrize("data", [b"", b"PK\x03\x04", b"PK\x05\x06" + bytes(18), b"no archive" * 10])
def test_a_block_mask_that_is_no_archive(data: bytes) -> None:
    Path("m.npz").write_bytes(data)
    for line in ("io-model --models flash", "run --dry-run --device cpu"):
        assert check([*line.split(), "--seqlens", "256", "--block-mask", "m.npz"], ("m.npz",)).code == 2


@pytest.mark.parametrize("line", [
    f"baseline show {LONG}", f"compare {LONG} {LONG}", f"history {LONG} x", f"noise {LONG}", f"report {LONG}",
    f"run --out {LONG} --device cpu", f"compare --baseline {LONG} x",
])  # fmt: skip
def test_a_path_that_no_system_takes(line: str) -> None:
    assert check(line.split(), ("path ", "RUNS", "baseline", LONG[:50])).code == 2


@pytest.mark.parametrize(
    "line", ["profile --static --gpu 16", "compare a b --metric x", "noise a --metric x"]
)
def test_the_option_is_named(line: str) -> None:
    found = check(line.split())
    assert found.code == 2
    assert line.split()[-2] in found.err


@pytest.mark.parametrize("kind", ["numerics", "blocks", "ring"])
def test_a_line_of_another_command_without_what_it_needs(kind: str) -> None:
    written(Path("r.jsonl"), [record("naive", 1024)])
    whole = Path("r.jsonl").read_bytes()
    (line,) = [one for one in OTHERS if one["type"] == kind]
    Path("r.jsonl").write_bytes(whole + lines.seal(line))
    assert check(["report", "r.jsonl"]).code == 0
    for value, said in ((None, "the field 'status' is missing"), (3, "status is '3'")):
        Path("r.jsonl").write_bytes(whole + lines.seal({**line, "status": value}))
        found = check(["report", "r.jsonl"], ("r.jsonl",))
        assert found.code == 4
        assert said in found.err


@pytest.mark.parametrize(
    ("line", "data"),
    [
        ("claims x", None), ("claims x", b"a = " + b"[" * 3000), ("claims x", b"\xff"),
        ("claims x --results .", CLAIMS.replace("value = {", "value = [3] #").encode()),
        ("compare --baseline b --store . r.jsonl", b"[" * 100_000), ("compare x x", b'a"\rb",c\n1,2\n'),
        ("compare flash.csv flash.csv", FLASH.format(3.5).encode() + b'a\rb,"\n'),
    ],
)  # fmt: skip
def test_what_once_ended_in_a_traceback(line: str, data: bytes | None) -> None:
    written(Path("r.jsonl"), [record("naive", 1024)])
    Path("b/c").mkdir(parents=True)
    for name in ("x", "b/c/baseline.json", "flash.csv") if data is not None else ():
        Path(name).write_bytes(data)
    found = check(line.split(), ("x", "b/c", "claim", "flash.csv"))
    assert found.code in (2, 4)


def test_an_unknown_figure_names_the_option() -> None:
    written(Path("r.jsonl"), [record("naive", 1024)])
    found = check(["report", "r.jsonl", "--figures", "out", "--figure", "x"])
    assert found.code == 2
    assert found.err.startswith("error: --figure 'x' is not known")


def test_runs_of_two_environments_are_no_baseline_and_are_named() -> None:
    written(Path("a.jsonl"), [record("naive", 1024)])
    written(Path("b.jsonl"), [record("naive", 1024)], torch="1.0")
    for line in ("baseline save *.jsonl", "baseline save a.jsonl,b.jsonl"):
        found = check(line.split(), [line.split()[-1]])
        assert found.code == 2
    assert check(["baseline", "save", "a.jsonl", "--name", "b", "--store", "store"]).code == 0
    found = check(["compare", "--baseline", "b", "--store", "store", "*.jsonl"], ["*.jsonl"])
    assert found.code == 2
    assert "'*.jsonl'" in found.err


def test_a_baseline_whose_words_are_no_unicode_is_handed_on() -> None:
    written(Path("a.jsonl"), [record("naive", 1024)])
    assert check(["baseline", "save", "a.jsonl", "--name", "b", "--store", "store"]).code == 0
    (about,) = Path("store").rglob("baseline.json")
    about.write_text(json.dumps(json.loads(about.read_text()) | {"commit": "\ud800"}))
    assert check(["baseline", "promote", "b", "c", "--store", "store"]).code == 0


@pytest.mark.parametrize("spread", [[1e308, 3.0], [0.1, 1e300], [-0.1, 3.0], [0.1, 0.0]])
def test_a_noise_profile_whose_spread_is_none(spread: list[float]) -> None:
    written(Path("a.jsonl"), [record("naive", 1024)])
    metrics = {"time_s": {"correlation": 0.5, "cells": {"a": spread}}}
    profile = {"type": "noise", "schema": 1, "device": "x", "runs": 3, "metrics": metrics}
    Path("noise.json").write_text(json.dumps(profile))
    found = check(["compare", "a.jsonl", "a.jsonl", "--noise", "noise.json"], ["noise.json"])
    assert found.code == 4
    assert "degrees of freedom" in found.err


@pytest.mark.parametrize(
    ("line", "named"),
    [
        ("check --seqlens 1-4096+1", "--seqlens"), ("run --seqlens-k 1-4096+1", "--seqlens-k"),
        pytest.param(
            "io-model --seqlens 1-4096+1 --head-dims 1-64+1", "--seqlens, --head-dims", marks=pytest.mark.slow
        ),
        ("decode --kv-lens 1-4096+1 --batch 1-32+1", "--kv-lens"),
        ("ring --dry-run --world-size 8 --seqlens 1-4096+1 --head-dims 1-64+1", "--seqlens"),
    ],
)  # fmt: skip
def test_axes_that_multiply_to_too_many_name_one(line: str, named: str) -> None:
    found = check(line.split())
    assert found.code == 2
    assert found.err.startswith(f"error: {named}")


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["report", ""], "FILE '': no path"), (["report", "r.jsonl", " "], "FILE ' ': no path"),
        (["verify", ""], "FILE '': no path"), (["new-impl", ""], "FILE '': no path"),
        (["report", "r.jsonl", "--claims", ""], "--claims '': no such folder"),
        (["report", "r.jsonl", "--figures", ""], "--figures '': no path"),
        (["claims", "--results", ""], "--results '': no such folder"),
        (["claims", "--results", "nowhere"], "--results 'nowhere': no such folder"),
        (["ring", "--device", "cpu", "--out", ""], "--out '': no path"),
        (["compare", "r.jsonl", "--allow", "", "device,missing"], "NEW 'device,missing': device does not"),
        (["compare", "r.jsonl,bad.json", "r.jsonl"], "BASE 'r.jsonl,bad.json': bad.json: JSON of no known"),
        (["history", "r.jsonl, device"], "RUNS 'r.jsonl, device': device does not exist"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_path_is_named_as_it_was_typed(argv: list[str], said: str) -> None:
    """Though a blank is the folder here to the system, and of a list one part is at fault."""
    written(Path("r.jsonl"), [record("naive", 1024)])
    Path("bad.json").write_text("{}")
    found = check(argv, ("FILE", "BASE", "NEW", "RUNS"))
    assert found.code in (2, 4)
    assert f"error: {said}" in found.err
    assert sorted(path.name for path in Path().iterdir()) == ["bad.json", "r.jsonl"]
