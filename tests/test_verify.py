"""A row that was edited or damaged is found, told and measured again; a folder has one writer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import faults
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_runfile import ENVIRONMENT, OPTIONS, cells, done, write

from flashbench import runfile
from flashbench._runfile import lines
from flashbench._runfile.lock import NAME, Lock
from flashbench.cli import main
from flashbench.errors import RunFileError, UsageError

PLANNED = cells(3)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "r.jsonl", PLANNED, [done(cell) for cell in PLANNED])


def verify(capsys: pytest.CaptureFixture[str], *argv: object) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as stop:
        main(["verify", *map(str, argv)])
    said = capsys.readouterr()
    return int(stop.value.code or 0), said.out, said.err


def edit(path: Path, number: int, old: str, new: str) -> None:
    """Replace text in a line, as an editor would."""
    rows = path.read_text().splitlines(keepends=True)
    assert old in rows[number - 1]
    rows[number - 1] = rows[number - 1].replace(old, new)
    path.write_text("".join(rows))


names = st.text(min_size=1).filter(lambda name: name != lines.FIELD)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
)


@given(st.dictionaries(names, values, min_size=1, max_size=4))
def test_a_line_reads_back_and_is_intact(value: dict) -> None:
    line = lines.seal(value)
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    assert lines.intact(line[:-1])
    assert lines.parse(line) == value


@settings(max_examples=300, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.data())
def test_a_changed_byte_anywhere_is_found(whole: Path, data: st.DataObject) -> None:
    text = bytearray(whole.read_bytes())
    place = data.draw(st.integers(0, len(text) - 2))
    old = text[place]
    text[place] = data.draw(st.integers(0, 255).filter(lambda byte: byte != old))
    other = whole.with_name("changed.jsonl")
    other.write_bytes(text)
    assert not runfile.verify(other).ok


def test_an_edited_row_is_named_and_told_by_every_reader(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert verify(capsys, whole) == (0, f"{whole}: as written; 3 rows\n", "")
    edit(whole, 3, "X: y", "X: z")
    code, out, err = verify(capsys, whole)
    assert code == 4
    assert out.splitlines()[1:] == ["  line 3: its checksum does not fit"]
    assert f"error: 1 of 1 files are damaged, first: {whole}, line 3: its checksum does not fit" in err
    found = runfile.load(whole)
    assert found.notes == (f"{whole}, line 3: not as written, by the checksum: edited or damaged",)
    assert found.edited == {PLANNED[1].key}
    code, out, _ = verify(capsys, whole, "--json")
    [row] = json.loads(out)
    assert (code, row["ok"], row["damage"]) == (4, False, [{"line": 3, "what": "its checksum does not fit"}])


def test_a_row_whose_checksum_was_taken_out_is_damaged(whole: Path) -> None:
    rows = whole.read_text().splitlines()
    value = json.loads(rows[2])
    del value[lines.FIELD]
    whole.write_text("\n".join([rows[0], rows[1], json.dumps(value), rows[3]]) + "\n")
    assert runfile.verify(whole).damage == [(3, "it has no checksum")]
    assert runfile.load(whole).edited == {PLANNED[1].key}


def test_resume_measures_an_edited_row_again(whole: Path) -> None:
    edit(whole, 3, "X: y", "X: z")
    resumed = runfile.resume(whole, PLANNED, ENVIRONMENT, OPTIONS)
    with resumed.writer as writer:
        assert resumed.missing == (PLANNED[1],)
        assert f"{whole}: 1 rows that are not as they were written are taken out" in resumed.notes
        writer.append(done(PLANNED[1]))
    assert runfile.verify(whole).ok
    assert not runfile.load(whole).notes


def test_counters_that_were_edited_take_their_row_with_them(whole: Path) -> None:
    with runfile.Writer(whole, [cell.key for cell in PLANNED]) as writer:
        writer.attach(PLANNED[0].key, "counters", {"total": {"dram_read_bytes": 1}})
    edit(whole, 5, 'dram_read_bytes":1', 'dram_read_bytes":2')
    assert runfile.load(whole).edited == {PLANNED[0].key}


@pytest.mark.parametrize(
    ("break_it", "damage"),
    [
        (lambda text: text[:-5], []),
        (lambda text: "", [(1, "no complete line; a results file begins with a header")]),
        (lambda text: text.replace('"schema":5', '"schema":99'),
         [(1, f"schema 99; this flashbench reads up to {runfile.SCHEMA}")]),
        (lambda text: text + "[" * 100_000 + "\n", [(5, "not JSON")]),
        (lambda text: text + "[1]\n", [(5, "a JSON object is wanted")]),
        (lambda text: text + text.splitlines()[1] + "\n", [(5, f"a second row for {PLANNED[0].key}")]),
    ],
    ids=["torn", "empty", "newer", "deep", "list", "twice"],
)  # fmt: skip
def test_what_else_can_be_wrong_with_a_file(whole: Path, break_it, damage: list) -> None:
    whole.write_text(break_it(whole.read_text()))
    found = runfile.verify(whole)
    assert [(number, what[: len(wanted)]) for (number, what), (_, wanted) in
            zip(found.damage, damage, strict=False)] == damage  # fmt: skip
    assert bool(found.damage) == bool(damage)


def test_a_torn_line_is_no_damage_and_a_missing_row_no_secret(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole.write_bytes(whole.read_bytes()[:-5])
    code, out, _ = verify(capsys, whole)
    assert code == 0
    assert out == (
        f"{whole}: as written; 2 rows, 1 planned cells have none, the last line was torn off and is ignored\n"
    )


def test_a_file_that_nests_too_deeply_is_refused(whole: Path) -> None:
    whole.write_text(whole.read_text() + '{"a":' * 100_000 + "\n")
    with pytest.raises(RunFileError, match=r"line 5: not JSON"):
        runfile.load(whole)


@pytest.mark.parametrize("schema", [1, 2, 3, 4])
def test_a_file_from_before_checksums_is_read_and_becomes_a_new_one_when_it_is_resumed(
    whole: Path, schema: int
) -> None:
    old = [json.loads(line) for line in whole.read_text().splitlines()]
    for value in old:
        del value[lines.FIELD]
    old[0]["schema"] = schema
    whole.write_text("".join(json.dumps(value) + "\n" for value in old))
    found = runfile.load(whole)
    assert (found.notes, found.edited, len(found.records)) == ((), frozenset(), 3)
    verdict = runfile.verify(whole)
    assert (verdict.ok, verdict.schema, verdict.unsealed) == (True, schema, 4)
    runfile.resume(whole, PLANNED, ENVIRONMENT, OPTIONS).writer.close()
    verdict = runfile.verify(whole)
    assert (verdict.ok, verdict.schema, verdict.unsealed) == (True, runfile.SCHEMA, 0)
    assert runfile.load(whole).records == found.records


def test_what_is_half_written_when_the_disk_is_full_is_taken_back(
    whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = whole.read_bytes()
    more = cells(4)[3]
    with runfile.Writer(whole) as writer:
        real = writer._file

        class Full:
            """Takes ten bytes, then no more."""

            took = 0

            def write(self, data: bytes) -> int:
                if self.took:
                    raise OSError(28, "No space left on device")
                self.took = real.write(data[:10])
                return self.took

            def __getattr__(self, name: str) -> object:
                return getattr(real, name)

        writer._file = Full()
        with pytest.raises(UsageError, match="cannot be written: No space left on device"):
            writer.append(done(more))
        assert whole.read_bytes() == before
        writer._file = real
        writer.append(done(more))
    assert len(runfile.load(whole).records) == 4


def test_a_folder_has_one_writer_and_is_free_once_that_is_closed(tmp_path: Path) -> None:
    head = runfile.header(argv=[], options=OPTIONS, environment=ENVIRONMENT, cells=PLANNED)
    path, other = tmp_path / "r.jsonl", tmp_path / "s.jsonl"
    with runfile.create(path, head):
        for attempt in (
            lambda: runfile.create(path, head),
            lambda: runfile.create(other, head),
            lambda: runfile.resume(path, PLANNED, ENVIRONMENT, OPTIONS),
        ):
            with pytest.raises(
                UsageError, match=rf"is being written by another run \(process {os.getpid()} on"
            ):
                attempt()
    assert [one.name for one in tmp_path.iterdir()] == ["r.jsonl"]
    runfile.resume(path, PLANNED, ENVIRONMENT, OPTIONS).writer.close()


def test_a_refusal_lets_go_of_the_folder(whole: Path) -> None:
    with pytest.raises(UsageError, match="is not overwritten"):
        runfile.create(whole, {"type": "header"})
    with pytest.raises(UsageError, match="cache"):
        runfile.resume(whole, PLANNED, ENVIRONMENT, {**OPTIONS, "cache": "hot"})
    runfile.resume(whole, PLANNED, ENVIRONMENT, OPTIONS).writer.close()


def test_a_lock_file_that_a_kill_left_behind_holds_nothing(tmp_path: Path) -> None:
    (tmp_path / NAME).write_text("process 1 on elsewhere\n")
    with Lock(tmp_path), pytest.raises(UsageError):
        Lock(tmp_path)
    assert not (tmp_path / NAME).exists()


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "folder", "pipe"])
def test_a_lock_that_leads_elsewhere_is_refused_and_what_it_leads_to_is_left(
    kind: str, tmp_path: Path
) -> None:
    victim, out = tmp_path / "victim", tmp_path / "out"
    out.mkdir()
    name = out / NAME
    if kind != "dangling link":
        victim.write_text("precious\n")
    if kind == "hard link":
        os.link(victim, name)
    elif kind == "folder":
        name.mkdir()
    elif kind == "pipe":
        os.mkfifo(name)
    else:
        name.symlink_to("../victim")
    if kind == "link":
        line = ["run", "--device", "cpu", "--impls", "naive", "--seqlens", "8", "--out", str(out)]
        said = subprocess.run(
            [sys.executable, faults.__file__, "--quick", *line], capture_output=True, text=True, check=False
        )
        assert (said.returncode, said.stdout) == (2, "")
        assert "Traceback" not in said.stderr
        [error] = [text for text in said.stderr.splitlines() if text.startswith("error: ")]
    else:
        with pytest.raises(UsageError) as refused:
            Lock(out)
        error = str(refused.value)
    assert f"{NAME}' is a link or no file" in error
    assert victim.exists() == (kind != "dangling link")
    assert kind == "dangling link" or victim.read_text() == "precious\n"
    assert [one.name for one in out.iterdir()] == [NAME]


@pytest.mark.parametrize(
    ("name", "said", "others"),
    [
        ("h200-sxm-x2/ring/forward.jsonl", "as written; 4 rows of ring", {"ring": 4}),
        ("h200-sxm/block/gpt2-medium.jsonl", "rows of block", {"block": 24}),
    ],
)
def test_rows_of_other_commands_are_counted_as_theirs(
    name: str, said: str, others: dict[str, int], capsys: pytest.CaptureFixture[str]
) -> None:
    path = Path(__file__).resolve().parent.parent / "reports" / name
    code, out, _ = verify(capsys, path)
    assert code == 0
    assert said in out
    assert " 0 rows" not in out
    _, out, _ = verify(capsys, path, "--json")
    [row] = json.loads(out)
    assert (row["rows"], row["other_rows"]) == (0, others)
