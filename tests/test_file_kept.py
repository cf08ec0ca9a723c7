"""A results file that is damaged, linked to, or taken away while it is written loses no row."""

from __future__ import annotations

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from test_runfile import ENVIRONMENT, OPTIONS, cells, done, write
from test_verify import edit, verify

from flashbench import ceilings, paths, runfile, tuned
from flashbench._cli.interrupt import kept as kept_of
from flashbench._cli.interrupt import terminable
from flashbench._runfile import lines
from flashbench._runfile.lock import NAME
from flashbench.errors import RunFileError, UsageError

PLANNED = cells(4)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    return write(tmp_path / "out" / "r.jsonl", PLANNED[:3], [done(cell) for cell in PLANNED[:3]])


def resumed(path: Path) -> runfile.Resumed:
    found = runfile.resume(path, PLANNED[:3], ENVIRONMENT, OPTIONS)
    with found.writer as writer:
        for cell in found.missing:
            writer.append(done(cell))
    return found


def _nul(path: Path) -> None:
    rows = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*rows[:2], b"\0" * (len(rows[2]) - 1) + b"\n", *rows[3:]]))


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda path: edit(path, 3, '"failed"', '"FAILED"'), "line 3: status is 'FAILED'"),
        (_nul, "line 3: not JSON"),
        (lambda path: edit(path, 3, '"record"', '"note"'), "line 3: type is 'note'"),
        (lambda path: edit(path, 3, "\n", "x" * 2**17 + "\n"), "line 3: longer than 0 MiB"),
    ],
    ids=["status", "zeros", "type", "long"],
)
def test_a_row_that_cannot_be_read_is_measured_again(
    whole: Path,
    damage: Callable[[Path], None],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 2**16)
    damage(whole)
    before = whole.read_bytes()
    with pytest.raises(RunFileError, match=said):
        runfile.load(whole)
    code, _, err = verify(capsys, whole)
    assert code == 4
    assert "hint: 'flashbench run --resume' measures the cells of such lines again" in err
    found = resumed(whole)
    copy = whole.with_name("r.jsonl.damaged")
    assert found.missing == (PLANNED[1],)
    assert [cell.cell for cell in found.kept] == [PLANNED[0], PLANNED[2]]
    assert any(said in note and note.endswith("; the line is taken out") for note in found.notes)
    assert f"the file as it was is kept as {copy}" in found.notes
    assert copy.read_bytes() == before
    assert verify(capsys, whole)[0] == 0
    assert len(runfile.load(whole).records) == 3
    damage(whole)
    resumed(whole)
    assert whole.with_name("r.jsonl.damaged-2").exists()
    assert copy.read_bytes() == before


def test_an_edited_row_is_kept_in_a_copy_and_a_torn_one_needs_none(whole: Path) -> None:
    whole.write_bytes(whole.read_bytes()[:-5])
    assert resumed(whole).missing == (PLANNED[2],)
    assert [path.name for path in whole.parent.iterdir()] == ["r.jsonl"]
    edit(whole, 3, "X: y", "X: z")
    resumed(whole)
    assert "X: z" in whole.with_name("r.jsonl.damaged").read_text()


def test_counters_of_a_row_that_cannot_be_read_go_with_it(whole: Path) -> None:
    with runfile.Writer(whole, [cell.key for cell in PLANNED[:3]]) as writer:
        writer.attach(PLANNED[1].key, "counters", {"total": {}})
        writer.put({"type": "timings", "wall_s": 1.5})
    edit(whole, 3, '"failed"', '"FAILED"')
    edit(whole, 6, "1.5", "2.5")
    found = resumed(whole)
    assert found.missing == (PLANNED[1],)
    assert sum(note.endswith("the line is taken out") for note in found.notes) == 3
    assert runfile.load(whole).timings == ()  # never sealed anew, as if it were what was measured


def test_a_file_whose_header_cannot_be_read_is_left_alone(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    edit(whole, 1, '"header"', '"HEADER"')
    before = whole.read_bytes()
    with pytest.raises(RunFileError, match="line 1: not a flashbench header"):
        runfile.resume(whole, PLANNED, ENVIRONMENT, OPTIONS)
    assert (whole.read_bytes(), len(list(whole.parent.iterdir()))) == (before, 1)
    assert "hint: without its header it is no results file" in verify(capsys, whole)[2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda data: data.replace(b"\n", b"\r\n"), f"{lines.CRLF}; without that its checksum fits"),
        (lambda data: b"\xef\xbb\xbf" + data, "it begins with a byte order mark"),
        (lambda data: data.decode().encode("utf-16"), "it begins with a byte order mark"),
    ],
    ids=["crlf", "utf-8", "utf-16"],
)
def test_what_an_editor_did_to_the_file_is_said(
    whole: Path, change: Callable[[bytes], bytes], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    whole.write_bytes(change(whole.read_bytes()))
    code, out, err = verify(capsys, whole)
    assert code == 4
    assert out.splitlines()[1].startswith(f"  line 1: {said}")
    assert "hint: make it UTF-8 with LF line endings and no byte order mark again" in err


def test_line_endings_are_told_by_every_reader_and_beside_other_damage(whole: Path) -> None:
    whole.write_bytes(whole.read_bytes().replace(b"\n", b"\r\n"))
    assert runfile.load(whole).notes == (f"{whole}, lines 1, 2, 3, 4: not as written: {lines.CRLF}",)
    whole.write_bytes(whole.read_bytes().replace(b"X: y", b"X: z"))
    assert (2, f"{lines.CRLF}, and its checksum does not fit") in runfile.verify(whole).damage
    [note] = runfile.load(whole).notes
    assert note.endswith("not as written, by the checksum: edited or damaged")


def _tuned(path: Path) -> None:
    tuned.save({"type": "tuned"}, path)


def _calibrated(path: Path) -> None:
    known = ceilings.Ceilings(
        device_name="card", device_uuid=None, created_at="2026-01-01T00:00:00+00:00", copy_bytes_per_s=1.0,
        read_bytes_per_s=None, l2_bytes_per_s=None, exps_per_s=None, flops_per_s={},
    )  # fmt: skip
    ceilings.save(known.document(), path)


@pytest.mark.parametrize("save", [_tuned, _calibrated])
def test_what_is_written_whole_goes_through_a_link(tmp_path: Path, save: Callable[[Path], None]) -> None:
    real, link = tmp_path / "elsewhere" / "real.json", tmp_path / "link.json"
    real.parent.mkdir()
    real.write_text("old")
    link.symlink_to(real)
    save(link)
    assert link.is_symlink()
    assert json.loads(real.read_text())["type"] in ("tuned", "calibration")
    assert sorted(path.name for path in tmp_path.rglob("*.json*")) == ["link.json", "real.json"]


def test_what_is_no_file_is_written_to_and_not_replaced(tmp_path: Path) -> None:
    device = tmp_path / "null"
    device.symlink_to(os.devnull)
    paths.put(device, b"x")
    assert device.is_symlink()
    assert Path(os.devnull).is_char_device()


@pytest.mark.parametrize("there", [True, False])
def test_a_results_file_that_is_a_link_stays_one(whole: Path, there: bool) -> None:
    real = whole.with_name("real.jsonl")
    whole.rename(real)
    whole.symlink_to("real.jsonl")
    if there:
        real.write_bytes(real.read_bytes()[:-5])
        assert resumed(whole).missing == (PLANNED[2],)
    else:
        real.unlink()
        write(whole, PLANNED[:3], [done(cell) for cell in PLANNED[:3]])
    assert whole.is_symlink()
    assert len(runfile.load(real).records) == 3


def test_what_a_killed_run_left_half_written_is_cleared_away(tmp_path: Path) -> None:
    """Of this file alone: another's neighbour may be one that is written just now."""
    path, others = tmp_path / "r.jsonl", tmp_path / ".s.jsonl.1.part"
    others.touch()
    dies = "os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)"
    code = f"import os, signal; from flashbench import paths; {dies}; paths.put({str(path)!r}, b'x')"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2
    write(path, PLANNED[:3], [done(cell) for cell in PLANNED[:2]])
    assert sorted(tmp_path.iterdir()) == [others, path]


def _cut(path: Path) -> None:
    os.truncate(path, 100)


def _other(path: Path) -> None:
    path.unlink()
    path.write_text("another's\n")


def _copied(path: Path) -> None:
    """As sed -i does it."""
    other = path.with_name("copy")
    shutil.copy(path, other)
    other.rename(path)


def _linked(to: str) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        path.unlink()
        path.symlink_to(to)

    return link


def _added(text: str) -> Callable[[Path], None]:
    def add(path: Path) -> None:
        with path.open("a") as file:
            file.write(text)

    return add


def _changed(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"#")
    os.utime(path, ns=(0, 1))  # clocks of file systems are coarse


HARMS: dict[str, tuple[Callable[[Path], Any], str, bool]] = {
    "folder": (lambda path: shutil.rmtree(path.parent), "was removed", False),
    "file": (Path.unlink, "was removed", False),
    "cut": (_cut, "was cut short", False),
    "other": (_other, "was replaced", True),
    "copied": (_copied, "was replaced", False),
    "circle": (_linked("r.jsonl"), "was replaced", False),
    "null": (_linked(os.devnull), "was replaced", False),
    "nowhere": (_linked("gone"), "was removed", False),
    "text": (_added("garbage"), "was added to", True),
    "line": (_added("garbage\n"), "was added to", True),
    "zeros": (lambda path: os.truncate(path, path.stat().st_size + 100), "was added to", True),
    "changed": (_changed, "was changed", True),
}
"""What is done to a file, how it is told, and whether something then stands there that is worth keeping."""


@pytest.mark.parametrize(("harm", "said", "kept"), HARMS.values(), ids=HARMS)
def test_a_file_that_is_taken_away_is_put_back_with_the_next_row(
    tmp_path: Path,
    harm: Callable[[Path], Any],
    said: str,
    kept: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(logging.getLogger("flashbench"), "propagate", True)
    path = tmp_path / "out" / "r.jsonl"
    head = runfile.header(argv=["run"], options=OPTIONS, environment=ENVIRONMENT, cells=PLANNED)
    with runfile.create(path, head) as writer:
        writer.append(done(PLANNED[0]))
        harm(path)
        for count, cell in enumerate(PLANNED[1:], start=2):
            writer.append(done(cell))
            assert len(runfile.load(path).records) == count
        with pytest.raises(UsageError, match="is being written by another run"):
            runfile.create(path.with_name("s.jsonl"), head)  # the folder is held, the new one as well
    # pytest may listen at a logger that does not propagate, too, and then hears each twice
    assert len({(record.created, record.levelname) for record in caplog.records}) == 1
    assert f"{path} {said} while it was written to, and is put back with all its rows" in caplog.text
    assert runfile.verify(path).ok
    left = {one.name for one in path.parent.iterdir()} - {"r.jsonl"}
    assert left == ({"r.jsonl.other"} if kept else set())
    if harm is _other:
        assert path.with_name("r.jsonl.other").read_text() == "another's\n"


@pytest.mark.parametrize(("harm", "said", "kept"), HARMS.values(), ids=HARMS)
@pytest.mark.parametrize("stop", [None, KeyboardInterrupt], ids=["end", "stop"])
def test_a_file_is_put_back_at_the_end_too(
    tmp_path: Path, harm: Callable[[Path], Any], said: str, kept: bool, stop: type[BaseException] | None
) -> None:
    path = tmp_path / "out" / "r.jsonl"
    with pytest.raises(stop) if stop else nullcontext(), _fresh(path) as writer:
        writer.append(done(PLANNED[0]))
        harm(path)
        if stop:
            raise stop
    assert [record.cell for record in runfile.load(path).records] == PLANNED[:1]
    assert runfile.verify(path).ok
    assert not path.is_symlink()
    assert not (path.parent / NAME).exists()


def test_a_link_to_another_runs_file_takes_no_rows_from_it(tmp_path: Path) -> None:
    path, others = tmp_path / "out" / "r.jsonl", write(tmp_path / "r.jsonl", PLANNED[:1], [done(PLANNED[0])])
    before = others.read_bytes()
    with _fresh(path) as writer:
        _linked("../r.jsonl")(path)
        writer.append(done(PLANNED[1]))
    assert others.read_bytes() == before
    assert [record.cell for record in runfile.load(path).records] == [PLANNED[1]]


def test_a_file_behind_a_link_is_put_back_there(tmp_path: Path) -> None:
    path, real = tmp_path / "out" / "r.jsonl", tmp_path / "real" / "r.jsonl"
    path.parent.mkdir()
    real.parent.mkdir()
    path.symlink_to(real)
    with _fresh(path) as writer:
        _added("garbage")(path)
        writer.append(done(PLANNED[0]))
    assert path.is_symlink()
    assert real.with_name("r.jsonl.other").read_bytes().endswith(b"garbage")
    assert len(runfile.load(real).records) == 1


def test_a_folder_behind_a_link_is_held_too(tmp_path: Path) -> None:
    path, link = tmp_path / "a" / "r.jsonl", tmp_path / "b" / "r.jsonl"
    link.parent.mkdir()
    link.symlink_to(path)
    with _fresh(path) as writer:
        writer.append(done(PLANNED[0]))
        with pytest.raises(UsageError, match=r"a is being written by another run"):
            runfile.resume(link, PLANNED, ENVIRONMENT, OPTIONS)
        assert [one.name for one in link.parent.iterdir()] == ["r.jsonl"]  # let go of
    with runfile.resume(link, PLANNED, ENVIRONMENT, OPTIONS).writer as writer:
        with pytest.raises(UsageError, match=r"a is being written by another run"):
            runfile.resume(path, PLANNED, ENVIRONMENT, OPTIONS)
        writer.append(done(PLANNED[1]))
    assert len(runfile.load(path).records) == 2
    assert {one.name for one in tmp_path.rglob("*")} == {"a", "b", "r.jsonl"}


def test_a_signal_in_the_middle_of_a_line_waits_for_its_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the line would be there and not known of, and be taken for somebody else's."""
    path, sync = tmp_path / "r.jsonl", os.fsync

    def stopped(file: int) -> None:
        sync(file)
        os.kill(os.getpid(), signal.SIGTERM)

    def sweep() -> None:
        with terminable(), _fresh(path) as writer:
            monkeypatch.setattr(os, "fsync", stopped)
            writer.append(done(PLANNED[0]))

    with pytest.raises(KeyboardInterrupt):
        sweep()
    assert len(runfile.load(path).records) == 1
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("stop", [False, True])
def test_rows_that_cannot_be_put_back_are_saved_at_the_end_too(
    tmp_path: Path, stop: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """And a run that was stopped ends as one that was stopped."""
    monkeypatch.setattr(logging.getLogger("flashbench"), "propagate", True)
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    path = tmp_path / "out" / "r.jsonl"

    def sweep() -> None:
        with _fresh(path) as writer:
            writer.append(done(PLANNED[0]))
            path.parent.rename(tmp_path / "moved")
            path.parent.symlink_to("out")
            if stop:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt if stop else UsageError) as caught:
        sweep()
    [saved] = (tmp_path / "tmp").iterdir()
    assert len(runfile.load(saved).records) == 1
    assert f"its rows are in {saved}" in (caplog.text if stop else str(caught.value))


def test_a_run_that_was_stopped_says_what_its_file_holds_though_a_line_cannot_be_read(
    whole: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with whole.open("a") as file:
        file.write("garbage\n")
    assert len(kept_of(whole)) == 3
    whole.write_text("garbage\n")
    assert kept_of(whole) == ()
    assert "warning: " in capsys.readouterr().err


def _fresh(path: Path) -> runfile.Writer:
    head = runfile.header(argv=["run"], options=OPTIONS, environment=ENVIRONMENT, cells=PLANNED)
    return runfile.create(path, head)


@pytest.mark.parametrize("why", ["a file", "another run"])
def test_where_it_cannot_be_put_back_the_rows_are_saved_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, why: str
) -> None:
    (tmp_path / "tmp").mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "tmp"))
    path = tmp_path / "out" / "r.jsonl"
    head = runfile.header(argv=["run"], options=OPTIONS, environment=ENVIRONMENT, cells=PLANNED)
    writer = runfile.create(path, head)
    record = done(PLANNED[0])
    writer.append(record)
    shutil.rmtree(path.parent)
    if why == "a file":
        path.parent.write_text("in the way")
        said = r"File exists"
    else:
        second = runfile.create(path, head)
        said = "is being written by another run"
    with pytest.raises(UsageError, match=rf"r\.jsonl was re\w+ while .* put back \(.*{said}.*; its rows are"):
        writer.append(done(PLANNED[1]))
    writer.close()
    [saved] = (tmp_path / "tmp").iterdir()
    assert [one.cell for one in runfile.load(saved).records] == PLANNED[:2]
    if why == "another run":
        assert (path.parent / NAME).exists()  # the second run's own
        second.append(record)
        second.close()
        assert len(runfile.load(path).records) == 1
