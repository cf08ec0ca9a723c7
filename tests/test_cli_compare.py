"""``flashbench compare`` and ``noise``: exit codes, what is refused, and what other programs read."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from judging import cell, run, written

from flashbench import cli
from flashbench._runfile import lines
from flashbench.errors import EXIT_GATE, EXIT_UNDECIDED, EXIT_UNREADABLE, EXIT_USAGE
from flashbench.record import Samples

MEASURED = '{"type":"noise","schema":1,"device":"x","metrics":{"time_s":{%s}}}'


@pytest.fixture(autouse=True)
def no_profile_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLASHBENCH_NOISE", str(tmp_path / "noise"))


def test_the_command_and_its_exit_codes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = written(tmp_path / "base.jsonl", [cell(1e-3), cell(2e-3, 2048), cell(3e-3, 4096)])
    same = written(
        tmp_path / "same.jsonl", [cell(1.001e-3), cell(2e-3, 2048), cell(3e-3, 4096), cell(1e-3, 8192)]
    )
    worse = written(tmp_path / "worse.jsonl", [cell(1.2e-3), cell(1.5e-3, 2048), cell(3e-3, 4096)])
    fewer = written(tmp_path / "fewer.jsonl", [cell(1e-3)])
    code, _, err = run(capsys, base, same)
    assert (code, "1 new" in err) == (0, True)
    code, out, err = run(capsys, base, worse)
    assert (code, out.index("slower") < out.index("faster")) == (EXIT_GATE, True)
    assert "1 of 3 cells are worse by more than 5%" in err
    code, _, err = run(capsys, base, fewer)
    assert (code, "2 cells are missing" in err) == (EXIT_UNDECIDED, True)
    assert run(capsys, base, fewer, "--allow", "missing")[0] == 0
    code, out, _ = run(capsys, base, worse, "--json")
    document = json.loads(out)
    assert [row["verdict"] for row in document["cells"]] == ["slower", "faster", "same"]
    assert (document["exit_code"], document["metrics"][0]["counts"]["faster"]) == (EXIT_GATE, 1)
    code, out, _ = run(capsys, base, worse, "--markdown", "-q")
    assert "| slower (fails) | `flash fwd" in out
    several = [f"{base},{same}", str(tmp_path / "wor*.jsonl")]
    assert run(capsys, *several, "--fail", "30%", "--warn", "25%", "--allow", "missing")[0] == 0


def test_unlike_runs_are_refused_by_name(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = written(tmp_path / "a.jsonl", [cell(1e-3)], power_limit_w=700)
    hot = Samples(samples_s=(1e-3,) * 5, cache="hot", method="events")
    other = written(
        tmp_path / "b.jsonl", [replace(cell(1e-3), samples=hot)], device_name="NVIDIA H200", power_limit_w=600
    )
    code, out, err = run(capsys, base, other)
    assert (code, out) == (EXIT_UNDECIDED, "")
    for text in (
        "device is NVIDIA H100",
        "NVIDIA H200",
        "cache is cold",
        "power_limit is 700 W",
        "--allow device",
    ):
        assert text in err
    assert run(capsys, base, other, "--allow", "device,cache,power_limit")[0] == 0
    wrote, read = (
        written(
            tmp_path / f"{flush}.jsonl",
            [replace(cell(1e-3), samples=replace(hot, cache="cold", flush=flush))],
            power_limit_w=700,
        )
        for flush in ("write", "read")
    )
    code, _, err = run(capsys, wrote, read)
    assert (code, "flush is write" in err) == (EXIT_UNDECIDED, True)
    assert run(capsys, wrote, read, "--allow", "flush")[0] == 0
    nothing = written(tmp_path / "c.jsonl", [cell(1e-3, 8192)], power_limit_w=700)
    code, _, err = run(capsys, base, nothing)
    assert (code, "no cell in common" in err) == (EXIT_UNDECIDED, True)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--metric", "nope"], "metric 'nope' is not known"),
        (["--metric", "flops"], "neither more nor less"),
        (["--fail", "1%", "--warn", "3%"], "--fail '1%' is below --warn"),
        (["--warn", "x"], "--warn 'x'"),
        (["--noise", "200%"], "--noise '200%'"),
        (["--floor", "-1"], "--floor '-1'"),
        (["--allow", "all"], "--allow 'all'"),
        (["--fail-on", "faster"], "--fail-on 'faster'"),
        (["--by", "colour"], "--by 'colour'"),
        (["--output", "pdf=x"], "--output 'pdf=x'"),
        (["--output", "json"], "--output 'json'"),
        (["--output", "json=nowhere/x.json"], "no such folder"),
        (["--noise", "nowhere.json"], "nowhere.json"),
        (["--json", "--markdown"], "--markdown excludes"),
    ],
)
def test_bad_options_are_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, more: list[str], says: str
) -> None:
    path = written(tmp_path / "a.jsonl", [cell(1e-3)])
    code, out, err = run(capsys, path, path, *more)
    assert (code, out) == (EXIT_USAGE, "")
    assert says in err.splitlines()[0]


def test_a_missing_file_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "nowhere.jsonl", "nowhere.jsonl")
    assert (code, "nowhere.jsonl" in err) == (EXIT_USAGE, True)


def test_a_failed_cell_is_named_and_not_passed_as_missing(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = written(tmp_path / "base.jsonl", [cell(1e-3), cell(1e-3, 2048)])
    oom = replace(cell(1e-3, 2048), status="oom", reason="no room", samples=None)
    new = written(tmp_path / "new.jsonl", [cell(1e-3), oom])
    code, _, err = run(capsys, base, new, "--allow", "missing")
    assert (code, "1 cells are failed, first: flash fwd b8" in err, "oom: no room" in err) == (
        EXIT_UNDECIDED, True, True
    )  # fmt: skip
    assert run(capsys, new, new)[0] == 0  # failed on both sides: nothing got worse


def test_warn_and_fail_are_two_thresholds(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = written(tmp_path / "base.jsonl", [cell(1e-3)])
    new = written(tmp_path / "new.jsonl", [cell(1.12e-3)])
    code, out, _ = run(capsys, base, new, "--warn", "5%", "--fail", "20%")
    assert (code, "slower" in out) == (0, True)
    assert run(capsys, base, new, "--warn", "5%", "--fail", "10%")[0] == EXIT_GATE
    code, out, _ = run(capsys, base, new, "--warn", "15%", "--fail", "20%", "--all")
    assert (code, "slower" in out) == (0, False)


def test_undecided_fails_only_on_request(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = written(tmp_path / "base.jsonl", [cell(1e-3)])
    new = written(tmp_path / "new.jsonl", [cell(1.025e-3)])
    assert run(capsys, base, new)[0] == 0
    assert run(capsys, base, new, "--fail-on", "slower,undecided")[0] == EXIT_UNDECIDED


def test_what_a_file_does_not_tell_is_warned_of(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = written(tmp_path / "base.jsonl", [cell(1e-3)])
    old = Path(written(tmp_path / "old.jsonl", [cell(1e-3)], device_name=None))
    lines = [json.loads(line) for line in old.read_text().splitlines()]
    del lines[1]["samples"]["method"], lines[1]["samples"]["cache"], lines[0]["schema"]
    old.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, _, err = run(capsys, str(old), base)
    assert (code, "not told by the base side, taken to be the same: device, cache, method" in err) == (
        0,
        True,
    )
    assert "no schema" in err


def test_a_time_of_nothing_is_named_and_no_success(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    new = written(tmp_path / "n.jsonl", [cell(1e-3), cell(1e-3, 2048)])
    broken = written(tmp_path / "b.jsonl", [cell(0.0), cell(1e-3, 2048)])
    code, out, err = run(capsys, broken, new, "--json")
    assert (code, "time_s is zero, negative or no number on the base side" in err) == (EXIT_UNDECIDED, True)
    assert {row["verdict"]: row["change"] for row in json.loads(out)["cells"]} == {
        "incomparable": None, "same": 0.0
    }  # fmt: skip
    below = written(tmp_path / "c.jsonl", [cell(-1e-3)])
    code, out, err = run(capsys, below, new)
    assert (code, out, "line 2" in err) == (EXIT_UNREADABLE, "", True)


def test_versions_that_differ_are_told_and_pass_and_another_estimator_is_refused(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    base = written(tmp_path / "a.jsonl", [cell(1e-3)], torch="2.11", driver="580.1")
    newer = written(tmp_path / "b.jsonl", [cell(1e-3)], torch="2.13", driver="590.2")
    code, _, err = run(capsys, base, newer)
    assert code == 0
    assert "torch: 2.11 on the base side, 2.13 on the new one" in err
    assert "driver: 580.1 on the base side" in err
    head, *rows = Path(newer).read_bytes().splitlines(keepends=True)
    head = lines.seal({**lines.parse(head), "options": {"estimator": "min"}})
    other = tmp_path / "c.jsonl"
    other.write_bytes(b"".join([head, *rows]))
    code, _, err = run(capsys, base, str(other))
    assert (code, "estimator is median on the base side and min on the new one" in err) == (
        EXIT_UNDECIDED, True
    )  # fmt: skip


@pytest.mark.parametrize("value", [None, "fast", True, {}])
def test_a_sample_that_is_no_number_is_named(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, value: object
) -> None:
    base = Path(written(tmp_path / "base.jsonl", [cell(1e-3)]))
    lines = [json.loads(line) for line in base.read_text().splitlines()]
    lines[1]["samples"]["samples_s"][3] = value
    base.write_text("".join(json.dumps(line) + "\n" for line in lines))
    code, out, err = run(capsys, str(base), str(base))
    assert (code, out) == (EXIT_UNREADABLE, "")
    assert "line 2" in err
    assert "samples_s holds" in err


def test_a_folder_of_runs_is_a_side(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    for number in range(3):
        (tmp_path / f"base/{number}").mkdir(parents=True)
        written(tmp_path / f"base/{number}/results.jsonl", [cell((1 + number / 1000) * 1e-3)])
    new = written(tmp_path / "new.jsonl", [cell(1e-3)])
    code, out, _ = run(capsys, str(tmp_path / "base"), new, "--json")
    assert (code, json.loads(out)["cells"][0]["base_runs"]) == (0, 3)
    (tmp_path / "empty").mkdir()
    code, _, err = run(capsys, str(tmp_path / "empty"), new)
    assert (code, "a folder without results" in err) == (EXIT_USAGE, True)


@pytest.fixture
def outputs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> Path:
    """Every format of one comparison: one cell fails, one is better, one is gone, one is new."""
    base = written(tmp_path / "b.jsonl", [cell(1e-3), cell(2e-3, 2048), cell(3e-3, 4096)], torch="2.10")
    new = written(tmp_path / "n.jsonl", [cell(1.2e-3), cell(1.5e-3, 2048), cell(1e-3, 8192)], torch="2.11")
    wanted = [f"--output={name}={tmp_path / name}" for name in
              ("json", "csv", "markdown", "junit", "bencher", "github-lower", "github-higher")]  # fmt: skip
    assert run(capsys, base, new, *wanted, "-q", "--metric", "time_s,flops_per_s")[0] == EXIT_GATE
    return tmp_path


def test_json_and_csv_hold_the_same_cells(outputs: Path) -> None:
    document = json.loads((outputs / "json").read_text())
    rows = list(csv.DictReader(io.StringIO((outputs / "csv").read_text())))
    assert [row["cell"] for row in rows] == [row["cell"] for row in document["cells"]]
    assert len(rows) == 8
    first = document["cells"][0]
    assert (first["verdict"], first["fails"], rows[0]["fails"]) == ("slower", True, "true")
    assert first["low"] < 1.2 < first["high"]
    assert first["ratio"] == pytest.approx(1.2)
    assert "torch: 2.10 on the base side, 2.11 on the new one" in document["notes"]
    assert {(row["metric"], row["verdict"]) for row in rows} == {
        (metric, verdict) for metric in ("time_s", "flops_per_s")
        for verdict in ("slower", "faster", "missing", "new")
    }  # fmt: skip


def test_junit_has_a_case_per_cell(outputs: Path) -> None:
    root = ElementTree.parse(outputs / "junit").getroot()
    suite = root.find("testsuite[@name='time_s']")
    assert suite is not None
    assert {name: suite.get(name) for name in ("tests", "failures", "errors", "skipped")} == {
        "tests": "4", "failures": "1", "errors": "1", "skipped": "1"
    }  # fmt: skip
    assert [len(suite.findall(f"testcase/{tag}")) for tag in ("failure", "error", "skipped")] == [1, 1, 1]
    failure = suite.find("testcase/failure")
    assert failure is not None
    assert "slower: +20.0%" in (failure.get("message") or "")


def test_markdown_names_cells_groups_and_versions(outputs: Path) -> None:
    text = (outputs / "markdown").read_text()
    assert "### time_s: 1 slower, 1 missing, 1 faster, 1 new" in text
    assert "| slower (fails) | `flash fwd b16 h16 n1024 d128 bf16 full` | 1.200 |" in text
    assert "| all | 2 | 0.949 |" in text
    assert "- torch: 2.10 on the base side" in text


def test_bencher_and_github_action_hold_the_new_values(outputs: Path) -> None:
    bencher = json.loads((outputs / "bencher").read_text())
    key = "flash fwd b16 h16 n1024 d128 bf16 full"
    measure = bencher[key]["time_s"]
    assert measure["lower_value"] < 1.2e-3 < measure["upper_value"]
    assert measure["value"] == pytest.approx(1.2e-3)
    assert set(bencher[key]) == {"time_s", "flops_per_s"}
    for name, unit in (("github-lower", "s"), ("github-higher", "FLOP/s")):
        rows = json.loads((outputs / name).read_text())
        assert {row["unit"] for row in rows} == {unit}
        assert len(rows) == 3
        assert all(isinstance(row["value"], float) and set(row) >= {"name", "unit", "value"} for row in rows)


def test_text_from_a_file_cannot_break_out(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    base = written(tmp_path / "base.jsonl", [cell(1e-3)])
    evil = replace(cell(1e-3), status="failed", reason='a|b\n<script>`\x00"&', samples=None)
    new = written(tmp_path / "new.jsonl", [evil])
    junit = tmp_path / "junit.xml"
    code, out, _ = run(capsys, base, new, "--markdown", "-q", "-o", f"junit={junit}")
    assert code == EXIT_UNDECIDED
    (row,) = [line for line in out.splitlines() if "failed" in line and line.startswith("|")]
    assert (row.count("|") - row.count("\\|"), "<script" in row) == (5, False)
    error = ElementTree.parse(junit).getroot().find("testsuite/testcase/error")
    assert error is not None
    assert "<script>" in (error.get("message") or "")


def test_noise_is_stored_and_found_by_the_device(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A 4 % change of a cell that is known to repeat to 0.1 % is sure from one run a side."""
    for number in range(6):
        written(
            tmp_path / f"r{number}.jsonl",
            [cell((1 + (number % 3) / 1000 + number * 1e-9) * 1e-3, spread=0.001)],
        )
    base = written(tmp_path / "base.jsonl", [cell(1e-3, spread=0.001)])
    new = written(tmp_path / "new.jsonl", [cell(1.03e-3, spread=0.001)])
    assert json.loads(run(capsys, base, new, "--json")[1])["cells"][0]["verdict"] == "undecided"
    with pytest.raises(SystemExit) as stop:
        cli.main(["noise", str(tmp_path / "r*.jsonl"), "--json"])
    assert not stop.value.code
    rows = json.loads(capsys.readouterr().out)
    assert (len(rows), rows[0]["spread"], rows[0]["runs"]) == (1, pytest.approx(0.894e-3, rel=1e-2), 6)
    code, out, err = run(capsys, base, new, "--all")
    assert ("slower" in out, "by " + str(tmp_path / "noise") in err) == (True, True)
    stored = next((tmp_path / "noise").glob("*.json"))
    assert "slower" in run(capsys, base, new, "--noise", str(stored))[1]
    assert "slower" not in run(capsys, base, new, "--noise", "1%")[1]
    document = json.loads(stored.read_text())
    (tmp_path / "other.json").write_text(json.dumps({**document, "device": "another card"}))
    code, _, err = run(capsys, base, new, "--noise", str(tmp_path / "other.json"))
    assert (code, "of another card" in err) == (EXIT_USAGE, True)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "no noise profile"),
        ("{", "noise profile"),
        ('{"type":"noise","schema":9}', "schema 9"),
        ('{"type":"noise","schema":1,"device":"x"}', "'metrics' is missing"),
        (MEASURED % '"correlation":2,"cells":{}', "is 2.0"),
        (MEASURED % '"correlation":0,"cells":{"a":[-1,2]}', "'a' has a spread"),
    ],
)  # fmt: skip
def test_a_damaged_noise_profile_is_unreadable(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str, says: str
) -> None:
    base = written(tmp_path / "base.jsonl", [cell(1e-3)])
    path = tmp_path / "noise.json"
    path.write_text(text)
    code, _, err = run(capsys, base, base, "--noise", str(path))
    assert (code, says in err) == (EXIT_UNREADABLE, True)


def test_noise_needs_repeated_runs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    one = written(tmp_path / "a.jsonl", [cell(1e-3)])
    other = written(tmp_path / "b.jsonl", [cell(1e-3)], device_name="NVIDIA H200")
    for runs, says in ((one, "no cell was measured by two runs"), (f"{one},{other}", "the runs are unlike")):
        with pytest.raises(SystemExit) as stop:
            cli.main(["noise", runs])
        assert stop.value.code == EXIT_UNDECIDED
        assert says in capsys.readouterr().err
