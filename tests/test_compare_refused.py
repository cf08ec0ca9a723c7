"""What no comparison may pass for a success: nothing measured, damaged files, and what files do not tell.

One law: exit code 0 says that cells were measured on both sides, read as they were written, and are no worse.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from judging import cell, run, written

import flashbench
from flashbench import cli
from flashbench.errors import (
    EXIT_GATE,
    EXIT_UNDECIDED,
    EXIT_UNREADABLE,
    EXIT_USAGE,
    RunFileError,
)
from flashbench.record import Record, Samples

NOISE = Path(__file__).parents[1] / "reports/h200-sxm/noise/20261129-122448"
Capture = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def nothing_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHBENCH_NOISE", str(tmp_path / "noise"))
    monkeypatch.setenv("FLASHBENCH_BASELINES", str(tmp_path / "store"))


def command(capsys: Capture, *argv: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        cli.main(list(argv))
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


def without_value(seqlen: int, status: str = "failed") -> Record:
    return replace(cell(1e-3, seqlen), status=status, reason="no luck", samples=None)


def errors(err: str) -> list[str]:
    return [line for line in err.splitlines() if line.startswith("error:")]


# ---- what differs in some cells


def test_one_cell_that_was_timed_another_way_leaves_the_others_judged(
    capsys: Capture, tmp_path: Path
) -> None:
    """Three runs a side; in one of the new ones a cell was timed by graph."""
    graph = Samples(samples_s=(1e-3,) * 21, cache="cold", method="graph")

    def side(name: str, last: list[Record]) -> str:
        runs = [*([cell((1 + at / 1e4) * 1e-3, n) for n in LENGTHS] for at in range(2)), last]
        return ",".join(written(tmp_path / f"{name}{at}.jsonl", rows) for at, rows in enumerate(runs))

    rows = [cell(1.0003e-3, n) for n in LENGTHS]
    base = side("base", rows)
    new = side("new", [replace(rows[0], samples=graph), *rows[1:]])
    code, out, err = run(capsys, base, new, "--json")
    found = {row["cell"]: row for row in json.loads(out)["cells"]}
    assert (code, [row["verdict"] for row in found.values()].count("same")) == (EXIT_UNDECIDED, 2)
    odd = found[rows[0].cell.key]
    assert odd["verdict"] == "incomparable"
    assert odd["reason"] == "method is events on the base side and events and graph on the new one"
    assert "method differs between the sides in 1 of 3 cells" in err
    assert rows[0].cell.key in errors(err)[0]
    assert run(capsys, base, new, "--allow", "method")[0] == 0


LENGTHS = (1024, 2048, 4096)


# ---- nothing measured


@pytest.mark.parametrize("metric", ["energy_j", "registers_per_thread", "time_s,energy_j"])
def test_a_metric_that_no_file_has_is_nothing_in_common(capsys: Capture, metric: str) -> None:
    same = str(NOISE / "000-same"), str(NOISE / "007-same")
    code, out, err = run(capsys, *same, "--metric", metric, "--json")
    document = json.loads(out)
    assert (code, document["exit_code"]) == (EXIT_UNDECIDED, EXIT_UNDECIDED)
    name = metric.rpartition(",")[2]
    assert not [row for row in document["cells"] if row["metric"] == name]
    (line,) = errors(err)
    assert line.startswith(f"error: {name}: the two sides have nothing in common")
    assert "both sides have " in line
    assert "time_s" in line
    assert run(capsys, *same)[0] == 0


def test_a_metric_of_one_side_alone_is_nothing_in_common(capsys: Capture, tmp_path: Path) -> None:
    plain = written(tmp_path / "a.jsonl", [cell(1e-3)])
    gate = tmp_path / "gate.json"
    rows = [{"cell": cell(1e-3).cell.key, "arch": "sm_90", "status": "ok", "reason": None, "exps": 5}]
    document = {"type": "gate", "schema": 1, "triton": "3.6", "flashbench": "0", "trace": [], "check": [],
                "static": [], "model": rows}  # fmt: skip
    gate.write_text(json.dumps(document))
    code, _, err = run(capsys, str(gate), str(gate), "--metric", "time_s")
    assert (code, "both sides have modelled_exps" in err) == (EXIT_UNDECIDED, True)
    assert run(capsys, str(gate), str(gate))[0] == 0  # of what was not asked for some is enough
    code, _, err = run(capsys, plain, plain, "--metric", "modelled_exps")
    assert (code, "modelled_exps: the two sides have nothing" in err) == (EXIT_UNDECIDED, True)


@pytest.mark.parametrize("status", ["failed", "wrong", "timeout"])
def test_cells_that_failed_on_both_sides_are_failed(capsys: Capture, tmp_path: Path, status: str) -> None:
    none = written(tmp_path / "none.jsonl", [without_value(n, status) for n in (1024, 2048)])
    some = written(tmp_path / "some.jsonl", [cell(1e-3), without_value(2048, status)])
    code, _, err = run(capsys, none, none)
    assert (code, "time_s: 2 cells are failed, first: flash fwd" in err) == (EXIT_UNDECIDED, True)
    assert f"neither side has a value ({status}: no luck)" in err
    code, _, err = run(capsys, some, some)
    assert (code, "1 cells are failed" in err, "--allow failed passes them" in err) == (
        EXIT_UNDECIDED, True, True
    )  # fmt: skip
    assert run(capsys, some, some, "--allow", "failed")[0] == 0
    code, _, err = run(capsys, none, none, "--allow", "failed")  # then nothing is left
    assert (code, "nothing in common" in err) == (EXIT_UNDECIDED, True)
    assert "both sides have no cell that was measured" in err


@pytest.mark.parametrize("status", ["oom", "unsupported", "skipped", "unavailable"])
def test_what_fits_on_neither_side_got_no_worse_and_alone_is_nothing(
    capsys: Capture, tmp_path: Path, status: str
) -> None:
    some = written(tmp_path / "some.jsonl", [cell(1e-3), without_value(2048, status)])
    none = written(tmp_path / "none.jsonl", [without_value(2048, status)])
    assert run(capsys, some, some)[0] == 0
    code, _, err = run(capsys, none, none)
    assert (code, "time_s: the two sides have nothing in common" in err) == (EXIT_UNDECIDED, True)


def test_a_side_that_measured_nothing_is_no_base(capsys: Capture, tmp_path: Path) -> None:
    none = written(tmp_path / "none.jsonl", [without_value(1024)])
    some = written(tmp_path / "some.jsonl", [cell(1e-3)])
    code, _, err = run(capsys, none, some)
    assert (code, "the base side has no cell that was measured, the new side has time_s" in err) == (
        EXIT_UNDECIDED, True
    )  # fmt: skip
    judgement = flashbench.compare(none, some)
    assert not judgement.ok
    assert flashbench.compare(some, some).ok


def test_a_baseline_of_nothing_is_refused(capsys: Capture, tmp_path: Path) -> None:
    good = written(tmp_path / "good.jsonl", [cell(1e-3), without_value(2048)])
    none = written(tmp_path / "none.jsonl", [without_value(1024), without_value(2048)])
    code, _, err = command(capsys, "baseline", "save", f"{good},{none}", "-q")
    assert (code, f"{none}: no cell of it was measured (2 failed)" in err) == (EXIT_UNDECIDED, True)
    assert not (tmp_path / "store").exists()
    assert command(capsys, "baseline", "save", good, "-q")[0] == 0


# ---- damaged files


@pytest.fixture
def damaged(tmp_path: Path) -> str:
    """A run whose samples were edited by hand: the second row is 30 % faster than was measured."""
    path = Path(written(tmp_path / "edited.jsonl", [cell(1e-3), cell(1e-3, 2048)]))
    lines = path.read_text().splitlines(keepends=True)
    row = json.loads(lines[2])
    row["samples"]["samples_s"] = [0.7 * one for one in row["samples"]["samples_s"]]
    lines[2] = json.dumps(row, separators=(",", ":")) + "\n"
    path.write_text("".join(lines))
    return str(path)


@pytest.mark.parametrize(
    "argv",
    [
        ("compare", "BAD", "GOOD"), ("compare", "GOOD", "BAD", "-q"), ("compare", "BAD", "--cards"),
        ("baseline", "save", "BAD"), ("history", "GOOD", "BAD"), ("noise", "GOOD,BAD"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_a_failed_checksum_is_unreadable(
    capsys: Capture, tmp_path: Path, damaged: str, argv: tuple[str, ...]
) -> None:
    good = written(tmp_path / "good.jsonl", [cell(1e-3), cell(1e-3, 2048)])
    words = [word.replace("BAD", damaged).replace("GOOD", good) for word in argv]
    code, out, err = command(capsys, *words)
    assert (code, out) == (EXIT_UNREADABLE, "")
    (line,) = errors(err)
    assert f"{damaged}, line 3: not as written, by the checksum" in line
    assert f"'flashbench verify {damaged}'" in line


def test_a_damaged_file_passes_where_it_is_allowed_with_a_warning(
    capsys: Capture, tmp_path: Path, damaged: str
) -> None:
    good = written(tmp_path / "good.jsonl", [cell(1e-3), cell(1e-3, 2048)])
    code, _, err = run(capsys, good, damaged, "--allow", "damaged")
    assert (code, "warning: " in err, "line 3: not as written" in err) == (0, True, True)
    assert run(capsys, damaged, good, "--allow", "damaged")[0] == EXIT_GATE
    with pytest.raises(RunFileError, match="line 3: not as written"):
        flashbench.compare(good, damaged)
    assert flashbench.compare(good, damaged, allowed=frozenset({"damaged"})).ok  # type: ignore[arg-type]


def test_bisect_ends_at_a_damaged_base_and_skips_a_damaged_commit(tmp_path: Path, damaged: str) -> None:
    good = written(tmp_path / "good.jsonl", [cell(1e-3), cell(1e-3, 2048)])
    for base, measured, allow, wanted in (
        (damaged, good, [], 128), (good, damaged, [], 125), (good, damaged, ["--allow", "damaged"], 0),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            cli.main(["bisect", "--base", base, *allow, "--", "cp", measured, "{out}/results.jsonl"])
        assert stop.value.code == wanted


def test_a_baseline_that_was_damaged_before_it_was_kept_is_refused(
    capsys: Capture, tmp_path: Path, damaged: str
) -> None:
    """As one that an older version saved."""
    from flashbench import baselines, judge

    side = judge.load_side(damaged, "RUNS", {"damaged"})
    baselines.save(side, tmp_path / "store", "main", "abc")
    good = written(tmp_path / "good.jsonl", [cell(1e-3), cell(0.7e-3, 2048)])
    code, _, err = run(capsys, good, "--baseline", "main")
    assert (code, "line 3: not as written" in err) == (EXIT_UNREADABLE, True)
    assert run(capsys, good, "--baseline", "main", "--allow", "damaged")[0] == 0


def test_a_torn_last_line_is_still_recovered(capsys: Capture, tmp_path: Path) -> None:
    good = written(tmp_path / "good.jsonl", [cell(1e-3), cell(1e-3, 2048)])
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(Path(good).read_bytes()[:-40])
    code, _, err = run(capsys, good, str(torn), "--allow", "missing")
    assert (code, "torn off" in err) == (0, True)
    assert run(capsys, str(torn), good)[0] == 0


# ---- what a file does not tell


def told(path: Path, load: str | None = "sustained", power: float | None = 350.0) -> str:
    samples = Samples(samples_s=(1e-3,) * 21, cache="cold", method="events", load=load)
    return written(path, [replace(cell(1e-3), samples=samples)], power_limit_w=power)


@pytest.mark.parametrize(
    ("base", "new", "says"),
    [
        ({"load": None, "power": None}, {}, "by the base side, taken to be the same: power_limit, load"),
        ({}, {"load": None, "power": None}, "by the new side, taken to be the same: power_limit, load"),
        (
            {"load": None}, {"power": None},
            "by the base side, taken to be the same: load; nor by the new side: power_limit",
        ),
        ({}, {}, None),
        ({"load": None}, {"load": None}, None),
    ],
)  # fmt: skip
def test_a_condition_that_one_side_does_not_tell_is_warned_of(
    capsys: Capture, tmp_path: Path, base: dict[str, None], new: dict[str, None], says: str | None
) -> None:
    sides = told(tmp_path / "a.jsonl", **base), told(tmp_path / "b.jsonl", **new)
    code, _, err = run(capsys, *sides)
    lines = [line for line in err.splitlines() if "not told" in line]
    assert (code, len(lines)) == (0, 1 if says else 0)
    assert says is None or lines[0].endswith(f"not told {says}")


def test_one_silent_run_of_several_is_warned_of(capsys: Capture, tmp_path: Path) -> None:
    base = ",".join((told(tmp_path / "a.jsonl"), told(tmp_path / "b.jsonl", load=None)))
    _, _, err = run(capsys, base, told(tmp_path / "c.jsonl"))
    assert "not told by the base side, taken to be the same: load" in err


def test_a_table_that_tells_little_has_one_line(capsys: Capture, tmp_path: Path) -> None:
    table = tmp_path / "a.csv"
    table.write_text(
        "dtype,batch size,seqlen,nheads,embedding dim,causal,dropout,fwd(ms),bwd(ms)\n"
        "torch.float16,2,16,64,4096,True,0.0,1.0,3.00\n"
    )
    code, _, err = run(capsys, str(table), str(table))
    lines = [line for line in err.splitlines() if "not told" in line]
    assert (code, len(lines)) == (0, 1)
    assert lines[0].endswith("not told by either side, taken to be the same: device, cache, method")


# ---- where it is written to


def test_a_folder_as_output_is_called_one(capsys: Capture, tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [cell(1e-3)])
    code, out, err = run(capsys, path, path, "-o", f"html={tmp_path}")
    assert (code, out) == (EXIT_USAGE, "")
    (line,) = errors(err)
    assert f"{str(tmp_path)!r} is a folder; accepted: a file in a folder that exists" in line


# ---- names of anybody's


@pytest.mark.parametrize("shown", ["--markdown", "--csv", "--json", "--all"])
def test_no_name_steers_a_terminal(capsys: Capture, tmp_path: Path, shown: str) -> None:
    """Escapes, bells and letters turned round in a cell's name, in what is printed and what is written."""
    name = "evil\x1b[31m\x07\x9b\u202e"
    document = {"version": "1.0", "metadata": {"name": name, "unit": "second"}, "benchmarks": [
        {"metadata": {}, "runs": [{"metadata": {}, "values": [1.0]}]}
    ]}  # fmt: skip
    paths = [tmp_path / "a.json", tmp_path / "b.json"]
    for path, value in zip(paths, (1.0, 2.0), strict=True):
        document["benchmarks"][0]["runs"][0]["values"] = [value]  # type: ignore[index]
        path.write_text(json.dumps(document))
    files = {kind: tmp_path / f"out.{kind}" for kind in ("json", "csv", "markdown", "junit", "bencher",
                                                         "github-lower")}  # fmt: skip
    written_to = [word for kind, path in files.items() for word in ("-o", f"{kind}={path}")]
    code, out, err = run(capsys, *map(str, paths), shown, *written_to)
    assert code == EXIT_GATE
    for text in (out, err, *(path.read_text(encoding="utf-8") for path in files.values())):
        assert not set(text) & set("\x1b\x07\x9b\u202e")
        assert "evil" in text
    assert json.loads(files["json"].read_text(encoding="utf-8"))["cells"][0]["cell"] == name


# ---- what a torn file says, and a baseline that is not there


def test_a_file_cut_in_its_first_record_is_said_to_be(capsys: Capture, tmp_path: Path) -> None:
    good = written(tmp_path / "good.jsonl", [cell(1e-3)])
    torn = tmp_path / "torn.jsonl"
    torn.write_bytes(Path(good).read_bytes()[:-40])
    code, _, err = run(capsys, good, str(torn), "-q")
    (line,) = errors(err)
    assert (code, "no cell in common" in line) == (EXIT_UNDECIDED, True)
    assert f"{torn}: the last line was torn off" in line


def test_a_baseline_of_no_name_is_usage_and_one_of_another_device_cannot_be_told(
    capsys: Capture, tmp_path: Path
) -> None:
    """As the table of docs/ci.md has it."""
    rows = {
        text.split(" | ")[0].strip("| "): text
        for text in (Path(__file__).parents[1] / "docs/ci.md").read_text(encoding="utf-8").splitlines()
        if text.startswith("| ")
    }
    base = written(tmp_path / "a.jsonl", [cell(1e-3)])
    other = written(tmp_path / "b.jsonl", [cell(1e-3)], device_name="NVIDIA H200")
    assert command(capsys, "baseline", "save", base, "--name", "main", "-q")[0] == 0
    assert run(capsys, base, "--baseline", "man")[0] == EXIT_USAGE
    assert "a baseline's name that the store does not have" in rows["2, 3, 4"]
    assert run(capsys, other, "--baseline", "main")[0] == EXIT_UNDECIDED
    assert "the baseline has nothing of this device" in rows["6"]


# ---- copies of a file


def test_copies_of_a_file_are_one_run(capsys: Capture, tmp_path: Path) -> None:
    path = Path(written(tmp_path / "a0.jsonl", [cell(1e-3)]))
    for at in (1, 2):
        (tmp_path / f"a{at}.jsonl").write_bytes(path.read_bytes())
    other = written(tmp_path / "b.jsonl", [cell(1.001e-3)])
    code, out, err = run(capsys, str(tmp_path / "a*.jsonl"), other, "--json")
    (row,) = json.loads(out)["cells"]
    assert (code, row["base_runs"], row["new_runs"]) == (0, 1, 1)
    assert "runs of a side differ" not in err
    for at in (1, 2):
        assert f"a{at}.jsonl has the same content and is counted once" in err
    assert run(capsys, str(path), str(path))[0] == 0  # a side may be the other's copy
    code, _, err = command(capsys, "noise", str(tmp_path / "a*.jsonl"))
    assert (code, "no cell was measured by two runs" in err) == (EXIT_UNDECIDED, True)
    assert "a1.jsonl has the same content" in err
    assert not (tmp_path / "noise").exists()
    code, out, err = command(capsys, "noise", f"{tmp_path / 'a*.jsonl'},{other}", "--json")
    assert (code, json.loads(out)[0]["runs"], "counted once" in err) == (0, 2, True)
