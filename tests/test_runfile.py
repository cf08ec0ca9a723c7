"""What was appended is on disk and reads back the same; a torn line is repaired, anything else is refused."""

from __future__ import annotations

import json
import math
import os
from dataclasses import replace
from pathlib import Path

import pytest
from attention import problem
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from flashbench import record_json, runfile, runner
from flashbench.errors import RunFileError, UsageError
from flashbench.problem import PASSES, Cell
from flashbench.record import FLAGS, STATUSES, Accuracy, Memory, Record, Samples

ENVIRONMENT = {"device_name": "card", "torch": "2.11.0", "driver": "580"}
OPTIONS = {"cache": "cold", "seed": "0"}


def cells(count: int) -> list[Cell]:
    return [Cell(implementation="naive", problem=problem(seqlen_q=n + 1), pass_="fwd") for n in range(count)]


def done(cell: Cell, status: str = "failed", reason: str | None = "X: y") -> Record:
    return Record(cell=cell, status=status, reason=reason, environment=ENVIRONMENT)


def write(path: Path, planned: list[Cell], records: list[Record]) -> Path:
    head = runfile.header(argv=["run"], options=OPTIONS, environment=ENVIRONMENT, cells=planned)
    with runfile.create(path, head) as writer:
        for record in records:
            writer.append(record)
    return path


def test_a_file_without_a_row_is_begun_anew_and_any_other_is_kept(tmp_path: Path) -> None:
    planned = cells(2)
    path = write(tmp_path / "r.jsonl", planned, [])
    head = path.read_bytes()
    kept = {
        "a row": write(tmp_path / "rows.jsonl", planned, [done(planned[0])]).read_bytes(),
        "edited": head.replace(b'"card"', b'"bard"'), "no newline": head.rstrip(), "empty": b"",
        "of another": b'{"type":"tuned"}\n', "notes": head + b"what I saw", "a line": head + b"{}\n",
        "rows of block": head + b'{"type":"blocks"}\n', "older": head.replace(b'"schema":5', b'"schema":4'),
    }  # fmt: skip
    for why, data in kept.items():
        path.write_bytes(data)
        assert not runfile.rowless(path), why
        with pytest.raises(UsageError, match="is not overwritten"):
            write(path, planned, [])
        assert path.read_bytes() == data
    assert not runfile.rowless(tmp_path)
    assert not runfile.rowless(tmp_path / "none")
    for data in (head, head + b'{"type":"record","key":"nai'):
        path.write_bytes(data)
        assert runfile.rowless(path)
        write(path, cells(3), [done(planned[0])])
        found = runfile.load(path)
        assert (len(found.header["cells"]), len(found.records), found.notes) == (3, 1, ())


def test_a_file_that_another_run_writes_is_none_without_a_row(tmp_path: Path) -> None:
    head = runfile.header(argv=["run"], options=OPTIONS, environment=ENVIRONMENT, cells=cells(1))
    with runfile.create(tmp_path / "r.jsonl", head) as writer:
        with pytest.raises(UsageError, match="is being written by another run"):
            runfile.create(tmp_path / "r.jsonl", head)
        writer.append(done(cells(1)[0]))
    assert len(runfile.load(tmp_path / "r.jsonl").records) == 1


finite = st.floats(min_value=1e-9, max_value=1e9)
errors = st.dictionaries(st.sampled_from(["o", "dq", "dk", "dv"]), finite, min_size=1)
plain = st.dictionaries(
    st.text(max_size=5), st.none() | st.booleans() | st.integers() | finite | st.text(max_size=5), max_size=3
)


@st.composite
def records(draw: st.DrawFn) -> Record:
    status = draw(st.sampled_from(sorted(STATUSES)))
    samples = Samples(
        samples_s=tuple(draw(st.lists(finite, min_size=1, max_size=4))),
        cache=draw(st.sampled_from(["cold", "hot"])),
        method=draw(st.sampled_from(["events", "wall"])),
        flush=draw(st.sampled_from(["read", "write", None])),
    )
    count = st.none() | st.integers(0, 2**60)
    memory = Memory(inputs_bytes=1, outputs_bytes=2, peak_extra_bytes=draw(count), reserved_bytes=draw(count))
    error = draw(errors)
    accuracy = Accuracy(max_abs_error=error, budget=error, query_rows=3, key_rows=4)
    p = problem(dtype=draw(st.sampled_from(["fp16", "bf16", "fp32", "tf32"])), causal=draw(st.booleans()))
    return Record(
        cell=Cell(implementation=draw(st.text(min_size=1)), problem=p, pass_=draw(st.sampled_from(PASSES))),
        status=status,
        reason=None if status == "ok" else draw(st.text(min_size=1)),
        flags=tuple(draw(st.sets(st.sampled_from(sorted(FLAGS))))),
        samples=samples if status == "ok" else None,
        memory=draw(st.none() | st.just(memory)),
        accuracy=draw(st.none() | st.just(accuracy)),
        backend=draw(st.none() | st.text()),
        config=draw(plain),
        trace=draw(st.none() | plain),
        clocks=draw(plain),
        timing=draw(plain),
        spent=draw(plain),
        environment=draw(plain),
        started_at="2026-01-01T00:00:00+00:00",
        wall_s=draw(finite),
    )


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(records())
def test_a_record_reads_back_as_it_was_written(record: Record) -> None:
    line = json.dumps(record_json.record_to_json(record), allow_nan=False)
    assert record_json.record_from_json(json.loads(line)) == record


def test_a_row_from_before_energy_counters_and_trace_has_none() -> None:
    value = record_json.record_to_json(done(cells(1)[0]))
    for name in ("energy", "counters", "trace", "timing", "spent"):
        del value[name]
    assert record_json.record_from_json(value) == done(cells(1)[0])
    assert done(cells(1)[0]).trace is None


def test_what_is_found_after_the_sweep_joins_its_row_and_survives_a_resume(tmp_path: Path) -> None:
    planned = cells(2)
    path = write(tmp_path / "r.jsonl", planned, [done(cell) for cell in planned])
    with runfile.Writer(path, [cell.key for cell in planned]) as writer:
        writer.attach(planned[0].key, "counters", {"total": {"dram_read_bytes": 1}})
        writer.attach(planned[0].key, "trace", {"reason": "first"})
        writer.attach(planned[0].key, "trace", {"difference_bytes": 0})
        with pytest.raises(ValueError, match="no row for"):
            writer.attach("another", "trace", {})
    for _ in range(2):
        first, second = runfile.load(path).records
        assert (first.counters, first.trace) == ({"total": {"dram_read_bytes": 1}}, {"difference_bytes": 0})
        assert (second.counters, second.trace) == ({}, None)
        runfile.resume(path, planned, ENVIRONMENT, OPTIONS).writer.close()
    path.write_text(path.read_text() + '{"type":"trace","key":"another","trace":{}}\n')
    with pytest.raises(RunFileError, match="line 4: trace of 'another', which has no row above it"):
        runfile.load(path)


def test_each_run_leaves_its_wall_time_and_a_resumed_file_keeps_it(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", cells(1), [done(cells(1)[0])])
    for wall_s in (1.5, 2.5):
        resumed = runfile.resume(path, cells(1), ENVIRONMENT, OPTIONS)
        with resumed.writer:
            resumed.writer.put({"type": "timings", "wall_s": wall_s, "precompile_s": 0.5})
    assert [one["wall_s"] for one in runfile.load(path).timings] == [1.5, 2.5]


def test_a_file_that_does_not_say_how_it_was_timed_is_not_resumed(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", cells(1), [])
    now = {**OPTIONS, "load": "burst"}
    with pytest.raises(UsageError, match="does not say with which --load it was measured; now it is 'burst'"):
        runfile.resume(path, cells(1), ENVIRONMENT, now)


def test_a_resumed_file_may_get_lines_that_older_versions_cannot_read(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", cells(1), [])
    path.write_text(path.read_text().replace(f'"schema":{runfile.SCHEMA}', '"schema":1'))
    assert runfile.load(path).header["schema"] == 1
    runfile.resume(path, cells(1), ENVIRONMENT, {**OPTIONS, "trace": True}).writer.close()
    head = runfile.load(path).header
    assert (head["schema"], head["options"]) == (runfile.SCHEMA, {**OPTIONS, "trace": True})


def test_what_is_not_finite_is_null_on_disk_and_never_passes_a_check(tmp_path: Path) -> None:
    [cell] = cells(1)
    accuracy = Accuracy(
        max_abs_error={"o": math.nan, "dq": math.inf}, budget={"o": 1.0, "dq": 1.0}, query_rows=1, key_rows=1
    )
    record = Record(cell=cell, status="wrong", reason="o is off", accuracy=accuracy, clocks={"x": math.nan})
    path = write(tmp_path / "r.jsonl", [cell], [record])
    assert "NaN" not in path.read_text()
    assert "Infinity" not in path.read_text()
    [read] = runfile.load(path).records
    assert read.accuracy is not None
    assert not read.accuracy.ok
    assert read.clocks == {"x": None}


def test_each_record_is_on_disk_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[int] = []
    real = os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(fd), real(fd))[1])
    path, planned = tmp_path / "r.jsonl", cells(3)
    head = runfile.header(argv=[], options=OPTIONS, environment=ENVIRONMENT, cells=planned)
    writer = runfile.create(path, head)
    for count, cell in enumerate(planned, start=1):
        before = len(synced)
        writer.append(done(cell))
        assert len(synced) == before + 1
        assert len(runfile.load(path).records) == count  # read while the writer is open
    writer.close()


def test_a_second_row_for_a_cell_is_a_bug(tmp_path: Path) -> None:
    [cell] = cells(1)
    head = runfile.header(argv=[], options=OPTIONS, environment=ENVIRONMENT, cells=[cell])
    with runfile.create(tmp_path / "r.jsonl", head) as writer:
        writer.append(done(cell))
        with pytest.raises(ValueError, match="already"):
            writer.append(done(cell))


def test_a_file_torn_at_any_byte_keeps_every_complete_row(tmp_path: Path) -> None:
    planned = cells(3)
    whole = write(tmp_path / "r.jsonl", planned, [done(cell) for cell in planned]).read_bytes()
    first_row = whole.index(b"\n") + 1
    for end in range(first_row, len(whole)):
        path = tmp_path / "torn.jsonl"
        path.write_bytes(whole[:end])
        found = runfile.load(path)
        assert len(found.records) == whole[:end].count(b"\n") - 1
        assert bool(found.notes) == (whole[end - 1 : end] != b"\n")
    resumed = runfile.resume(path, planned, ENVIRONMENT, OPTIONS)
    with resumed.writer as writer:
        assert resumed.missing == (planned[2],)
        writer.append(done(planned[2]))
    assert [record.cell for record in runfile.load(path).records] == planned
    assert not runfile.load(path).notes


def test_damage_before_the_last_line_is_refused_with_its_line(tmp_path: Path) -> None:
    planned = cells(2)
    path = write(tmp_path / "r.jsonl", planned, [done(cell) for cell in planned])
    lines = path.read_text().splitlines(keepends=True)
    path.write_text(lines[0] + lines[1][:20] + "\n" + lines[2])
    with pytest.raises(RunFileError, match=r"r\.jsonl, line 2: not JSON"):
        runfile.load(path)


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda row: row.pop("status"), "'status' is missing"),
        (lambda row: row["cell"].pop("problem"), "'problem' is missing"),
        (lambda row: row.update(status="fine"), "status is 'fine'; known: ok, checked"),
        (
            lambda row: row["cell"]["problem"].update(seqlen_q="x"),
            "cell.problem.seqlen_q is 'x'; a whole number up to 2147483647 is wanted",
        ),
        (lambda row: row.update(reason=None), "needs a reason"),
        (lambda row: row["cell"]["problem"].update(head_dim=0), "head_dim 0 is out of range"),
        (lambda row: row["cell"]["problem"].update(colour=1), "colour"),
        (lambda row: row["cell"].update({"pass": "sideways"}), "sideways"),
        (lambda row: row.update(type="note"), "'note'"),
    ],
)
def test_a_wrong_field_is_named(tmp_path: Path, edit, said: str) -> None:
    planned = cells(1)
    path = write(tmp_path / "r.jsonl", planned, [done(planned[0])])
    head, row = path.read_text().splitlines()
    value = json.loads(row)
    edit(value)
    path.write_text(f"{head}\n{json.dumps(value)}\n")
    with pytest.raises(RunFileError, match=r"line 2") as caught:
        runfile.load(path)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is empty"),
        ("{", "no complete line"),
        ("{}\n", "not a flashbench header"),
        ("[1]\n", "a JSON object is wanted"),
        ("hello\n", "not JSON"),
        ('{"type":"header","schema":1}\n', "'environment' is missing"),
        ('{"type":"header","schema":99,"environment":{},"options":{},"cells":[]}\n', "schema 99"),
        ('{"type":"header","schema":NaN}\n', "not strict JSON"),
    ],
)
def test_what_is_no_results_file_is_refused(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "r.jsonl"
    path.write_text(text)
    with pytest.raises(RunFileError) as caught:
        runfile.load(path)
    assert said in str(caught.value)
    assert caught.value.exit_code == 4


def test_bad_paths_are_usage_errors(tmp_path: Path) -> None:
    head = runfile.header(argv=[], options=OPTIONS, environment=ENVIRONMENT, cells=[])
    there = tmp_path / "there"
    there.write_text("x")
    for attempt in (
        lambda: runfile.load(tmp_path / "missing.jsonl"),
        lambda: runfile.load(tmp_path),
        lambda: runfile.create(tmp_path, head),
        lambda: runfile.create(there, head),
        lambda: runfile.create(there / "below" / "r.jsonl", head),
        lambda: runfile.create("/proc/no/r.jsonl", head),
    ):
        with pytest.raises(UsageError) as caught:
            attempt()
        assert caught.value.exit_code == 2
    assert there.read_text() == "x"
    assert list(tmp_path.iterdir()) == [there]


def test_resume_measures_what_is_missing_and_what_never_started(tmp_path: Path) -> None:
    planned = cells(5)
    path = write(
        tmp_path / "r.jsonl",
        planned,
        [
            done(planned[0]),
            done(planned[1], "skipped", "needs 275 GB of device memory, 79 GB free"),
            done(planned[2], "skipped", "time budget of 5m spent"),
            done(planned[3], "skipped", "the device was lost in naive fwd: RuntimeError: x"),
        ],
    )
    resumed = runfile.resume(path, planned, ENVIRONMENT, OPTIONS)
    assert resumed.missing == tuple(planned[2:])
    with resumed.writer as writer:
        for cell in resumed.missing:
            writer.append(done(cell))
    keys = [record.cell.key for record in runfile.load(path).records]
    assert sorted(keys) == sorted(cell.key for cell in planned)
    assert runfile.resume(path, planned, ENVIRONMENT, OPTIONS).missing == ()


def test_the_runners_words_are_those_that_resume_knows() -> None:
    run = object.__new__(runner.Session)
    run.options = runner.RunOptions(time_budget_s=300)
    run._started = -1e9
    for lost in (None, f"{runner.LOST} in x: y"):
        run.lost = lost
        outcome = run._not_started()
        assert outcome is not None
        assert not runfile.is_final(done(cells(1)[0], **outcome))


def test_resuming_with_other_cells_keeps_the_old_rows_and_extends_the_plan(tmp_path: Path) -> None:
    planned = cells(4)
    path = write(tmp_path / "r.jsonl", planned[:2], [done(planned[0])])
    resumed = runfile.resume(path, planned[1:], ENVIRONMENT, OPTIONS)
    resumed.writer.close()
    assert resumed.missing == tuple(planned[1:])
    assert any("1 rows" in note for note in resumed.notes)
    found = runfile.load(path)
    assert found.header["cells"] == [cell.key for cell in planned]
    assert [record.cell for record in found.records] == planned[:1]


@pytest.mark.parametrize(
    ("environment", "options", "said"),
    [
        ({**ENVIRONMENT, "device_name": "other"}, OPTIONS, "'card'; this is 'other'"),
        (ENVIRONMENT, {**OPTIONS, "cache": "hot"}, "cache 'cold'; now cache is 'hot'"),
        (ENVIRONMENT, {**OPTIONS, "seed": "1"}, "seed '0'; now seed is '1'"),
    ],
)
def test_resume_refuses_what_would_not_compare(
    tmp_path: Path, environment: dict, options: dict, said: str
) -> None:
    path = write(tmp_path / "r.jsonl", cells(1), [])
    before = path.read_bytes()
    with pytest.raises(UsageError) as caught:
        runfile.resume(path, cells(1), environment, options)
    assert said in str(caught.value)
    assert path.read_bytes() == before


def test_cold_samples_of_older_files_were_flushed_by_writing_and_are_not_resumed(tmp_path: Path) -> None:
    planned, samples = cells(2), Samples(samples_s=(1.0,), cache="cold", method="events", flush="read")
    row = Record(cell=planned[0], status="ok", samples=samples, environment=ENVIRONMENT)
    path = write(tmp_path / "r.jsonl", planned, [row])
    assert path.read_text().count(',"flush":"read"') == 1
    path.write_text(path.read_text().replace(',"flush":"read"', ""))
    (record,) = runfile.load(path).records
    assert record.samples == replace(samples, flush="write")
    with pytest.raises(UsageError, match="L2 flushed by a write; now it is by a read"):
        runfile.resume(path, planned, ENVIRONMENT, OPTIONS)
    path.write_text(path.read_text().replace('"cold"', '"hot"'))
    assert {record.samples.flush for record in runfile.load(path).records} == {None}


def test_resume_notes_other_versions(tmp_path: Path) -> None:
    path = write(tmp_path / "r.jsonl", cells(1), [])
    resumed = runfile.resume(path, cells(1), {**ENVIRONMENT, "torch": "2.13.0"}, OPTIONS)
    resumed.writer.close()
    assert resumed.notes == ("torch was 2.11.0 when the file was begun and is 2.13.0 now",)


def test_a_duplicate_row_in_a_file_counts_once_with_a_note(tmp_path: Path) -> None:
    planned = cells(1)
    path = write(tmp_path / "r.jsonl", planned, [done(planned[0])])
    row = path.read_text().splitlines()[1].replace("X: y", "Z: later")
    path.write_text(path.read_text() + row + "\n")
    found = runfile.load(path)
    assert [record.reason for record in found.records] == ["Z: later"]
    assert "line 3" in found.notes[0]


def test_a_full_disk_is_one_line(tmp_path: Path) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    writer = runfile.Writer(Path("/dev/full"))
    with pytest.raises(UsageError, match="cannot be written: No space left"):
        writer.append(done(cells(1)[0]))


def test_a_complete_last_line_that_is_not_json_is_damage_and_no_torn_write(tmp_path: Path) -> None:
    planned = cells(1)
    path = write(tmp_path / "r.jsonl", planned, [done(planned[0])])
    with path.open("a") as file:
        file.write('{"type":"record","samples_s":[NaN]}\n')
    with pytest.raises(RunFileError, match=r"line 3: not JSON"):
        runfile.load(path)
