"""The folder on a shared file system through which a sweep and its jobs speak (``on_slurm``, ``slurm_job``).

    setup.json               what a job needs to know before it measures; until it is there jobs wait
    cards/JOB.json           a job that has its card says which
    todo/000012.json         a group that nobody has
    taken/000012@JOB.json    the same file, renamed: JOB measures it
    done/000012@JOB.json     its rows
    beats/NAME               a number that changes for as long as NAME lives
    over                     nobody begins anything any more

A rename has one winner, also over NFS, so that a group is one job's. A file has its name only once it is
whole, and its checksum says whether it is as it was written. Nothing in it is executed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from flashbench._runfile import lines
from flashbench.record_json import json_able

BEAT_S = 5.0
SILENT_S = 180.0
"""Who has not shown life for so long is gone. A network file system may show old files for a minute."""

_FOLDERS = ("cards", "todo", "taken", "done", "beats")


class Mailbox:
    """One sweep's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def make(self) -> None:
        """Make the folder, whose name is new."""
        for name in _FOLDERS:
            (self.folder / name).mkdir(parents=True)

    def write(self, name: str, value: Mapping[str, Any]) -> None:
        """Write a file at once as a whole."""
        _put(self.folder / name, lines.seal(json_able(dict(value))))

    def read(self, name: str) -> dict[str, Any] | None:
        """What a file holds; None where there is none (yet), or one that is damaged."""
        try:
            line = (self.folder / name).read_bytes().rstrip(b"\n")
        except OSError:
            return None
        if not lines.intact(line):
            return None
        value: dict[str, Any] = json.loads(line)
        value.pop(lines.FIELD, None)
        return value

    def numbers(self, kind: str) -> dict[int, str]:
        """The groups in todo, taken or done, with the job of each, in order."""
        found = {}
        with suppress(OSError):
            for name in sorted(os.listdir(self.folder / kind)):
                number, _, job = name.removesuffix(".json").partition("@")
                if number.isdecimal():
                    found[int(number)] = job
        return found

    def claim(self, job: str) -> tuple[int, dict[str, Any]] | None:
        """The first group that nobody has, which is this job's from now on; None where there is none."""
        for number in self.numbers("todo"):
            mine = _name("taken", number, job)
            with suppress(OSError):  # another was faster; or a rename was done, and its answer lost
                self._path("todo", number).rename(self.folder / mine)
            if (value := self.read(mine)) is not None:
                return number, value
        return None

    def give_back(self, job: str) -> list[int]:
        """What the job has taken is nobody's again; which groups that were."""
        mine = [number for number, other in self.numbers("taken").items() if other == job]
        return [number for number in mine if self._renamed(number, job)]

    def _renamed(self, number: int, job: str) -> bool:
        try:
            (self.folder / _name("taken", number, job)).rename(self._path("todo", number))
        except OSError:
            return False
        return True

    def answer(self, number: int, job: str, value: Mapping[str, Any]) -> None:
        """The rows of a group that the job has taken."""
        self.write(_name("done", number, job), value)
        with suppress(OSError):
            (self.folder / _name("taken", number, job)).unlink()

    def withdraw(self, number: int) -> bool:
        """Take a group back that nobody has; False where somebody was faster."""
        try:
            self._path("todo", number).unlink()
        except OSError:
            return False
        return True

    def forget(self, number: int, job: str) -> None:
        """Of a group whose rows are kept no file is left."""
        for name in (_name("done", number, job), _name("taken", number, job), _name("todo", number)):
            with suppress(OSError):
                (self.folder / name).unlink()

    @property
    def over(self) -> bool:
        """Whether nobody begins anything any more, or the whole folder is gone."""
        return (self.folder / "over").exists() or not self.folder.exists()

    def close(self) -> None:
        """Let nobody begin anything any more."""
        with suppress(OSError):
            (self.folder / "over").touch()

    def _path(self, kind: str, number: int) -> Path:
        return self.folder / _name(kind, number)


def _put(path: Path, data: bytes) -> None:
    """Who reads meanwhile finds what was there before, or all of it."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    with part.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    part.rename(path)


def _name(kind: str, number: int, job: str = "") -> str:
    return f"{kind}/{number:06d}{'@' * bool(job)}{job}.json"


class Beat:
    """Shows that this process lives, from a thread, until the ``with`` ends."""

    def __init__(self, box: Mailbox, name: str) -> None:
        self._path = box.folder / "beats" / name
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        for number in _counted():
            with suppress(OSError):
                _put(self._path, f"{number}\n".encode())
            if self._end.wait(BEAT_S):
                return


def _counted() -> Iterator[int]:
    number = time.time_ns()  # of a job that is started again, another than before
    while True:
        yield number
        number += 1


class Pulse:
    """How long another has shown no life, by this host's clock alone: the hosts' need not agree."""

    def __init__(self, box: Mailbox, name: str) -> None:
        self._path = box.folder / "beats" / name
        self._seen, self._at = "", time.monotonic()

    @property
    def silent_s(self) -> float:
        """Seconds since its beat was last seen to change; since this began to look where there is none."""
        with suppress(OSError):
            now = self._path.read_text()
            if now != self._seen:
                self._seen, self._at = now, time.monotonic()
        return time.monotonic() - self._at

    @property
    def begun(self) -> bool:
        """Whether it was ever seen."""
        return bool(self._seen)
