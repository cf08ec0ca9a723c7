"""Files written whole: what a kill leaves half written is cleared away, what is being written is not."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from flashbench import paths

KILLED = """
import os, signal, sys
from flashbench import paths
os.replace = lambda *names: os.kill(os.getpid(), signal.SIGKILL)
paths.put(sys.argv[1], b"half")
"""
WRITES = """
import sys
from pathlib import Path
from flashbench import paths
path = Path(sys.argv[1])
for count in range(150):
    paths.put(path, sys.argv[2] * 100_000)
    text = path.read_text()
    assert len(text) == 100_000 and len(set(text)) == 1, (len(text), set(text))
"""


def run(code: str, *argv: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", code, *argv])


def test_what_a_kill_left_goes_with_the_next_file_of_the_name(tmp_path: Path) -> None:
    """Of any name, which the page of a run's report is one of."""
    path, others = tmp_path / "report.html", tmp_path / ".other.html.1.part"
    others.touch()
    for _ in range(2):
        assert run(KILLED, str(path)).wait() == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) == 2  # the second took that of the first away
    paths.put(path, b"x")
    assert sorted(tmp_path.iterdir()) == [others, path]


def test_what_is_being_written_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another process or thread, whatever number it has; one that went is known by its lock alone."""
    path, replace = tmp_path / "x", os.replace

    def meanwhile(part: Path, real: Path) -> None:
        monkeypatch.setattr(os, "replace", replace)
        assert subprocess.run([sys.executable, "-c", WRITES, str(path), "b"], check=False).returncode == 0
        paths.put(path, b"c")
        assert part.read_bytes() == b"a"
        replace(part, real)

    monkeypatch.setattr(os, "replace", meanwhile)
    paths.put(path, b"a")
    assert path.read_bytes() == b"a"
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("how", ["processes", "threads"])
def test_many_that_write_a_name_at_once_each_write_it_whole(tmp_path: Path, how: str) -> None:
    path = tmp_path / "x"
    if how == "processes":
        ended = [one.wait() for one in [run(WRITES, str(path), text) for text in "abc"]]
        assert ended == [0, 0, 0]
    else:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda count: paths.put(path, f"{count % 10}" * 100_000), range(200)))
        assert len(set(path.read_text())) == 1
    assert list(tmp_path.iterdir()) == [path]


def test_a_part_whose_name_is_another_file_now_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between opening a part and locking it its writer may have gone on, and the next one begun."""
    path, part, lock = tmp_path / "x", tmp_path / ".x.1.part", paths.lock
    part.write_bytes(b"old")

    def late(file: int) -> bool | None:
        monkeypatch.setattr(paths, "lock", lock)
        part.rename(path)
        part.write_bytes(b"new")
        return lock(file)

    monkeypatch.setattr(paths, "lock", late)
    paths.clear_parts(path)
    assert (path.read_bytes(), part.read_bytes()) == (b"old", b"new")


@pytest.mark.parametrize("other", [lambda part: part.symlink_to("kept"), os.mkfifo, os.mkdir])
def test_what_is_no_part_stays(tmp_path: Path, other: Callable[[Path], None]) -> None:
    part, kept = tmp_path / ".x.1.part", tmp_path / "kept"
    kept.write_bytes(b"kept")
    other(part)
    paths.put(tmp_path / "x", b"x")
    assert os.path.lexists(part)
    assert kept.read_bytes() == b"kept"
