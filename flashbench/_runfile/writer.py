"""The file that rows are appended to, each safe on the disk, and put back where somebody takes it away."""

from __future__ import annotations

import errno
import logging
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashbench import paths
from flashbench._runfile import lines
from flashbench._runfile.lock import Locks
from flashbench.errors import UsageError
from flashbench.record import Record
from flashbench.record_json import json_able, record_to_json
from flashbench.signals import postponed

_LOG = logging.getLogger("flashbench")


class Writer:
    """Appends records to a results file; each is on the disk when ``append`` returns.

    One rule keeps them: before each line and at the end, what the path leads to holds exactly what was
    written. Where somebody saw to it that it does not, it is put back, what stood there is kept under another
    name, and where it cannot be put back, the lines are saved in the folder for temporary files.
    """

    def __init__(self, path: Path, known: Iterable[str] = (), lock: Locks | None = None) -> None:
        self.path = path
        self._known = set(known)
        self._lock = lock
        self._saved = False
        try:
            self._real = paths.resolved(path)
            self._file = path.open("ab", buffering=0)
            # None of a device; else what the file is to hold, to put it back
            self._written = bytearray(paths.whole(path)) if path.is_file() else None
        except OSError as error:
            raise unwritable(path, error) from None
        self._touched = self._modified()

    def append(self, record: Record) -> None:
        """Write one record, flush and fsync. Raises UsageError where the disk refuses.

        A cell has one row: a second one is a bug in the caller (ValueError).
        """
        key = record.cell.key
        if key in self._known:
            raise ValueError(f"{self.path} already has a row for {key}")
        self.put(record_to_json(record))
        self._known.add(key)

    def attach(self, key: str, name: str, value: Mapping[str, Any]) -> None:
        """Write a field of AFTERWARDS of a cell that has its row, as safely. Raises as ``append`` does."""
        if key not in self._known:
            raise ValueError(f"{self.path} has no row for {key}")
        self.put({"type": name, "key": key, name: value})

    def put(self, value: Mapping[str, Any]) -> None:
        """Write any line, such as a row of numerics, as safely; the caller gives its type."""
        line = lines.seal(json_able(value))
        with postponed():  # a line is written and known to be, or neither
            self._look_after(line)
            before = os.fstat(self._file.fileno()).st_size
            try:
                data = line
                while data:
                    data = data[self._file.write(data) :]
                os.fsync(self._file.fileno())
            except OSError as error:
                with suppress(OSError):  # a part of a line would be taken for one that a kill tore off
                    os.ftruncate(self._file.fileno(), before)
                self._look_after(line)
                raise unwritable(self.path, error) from None
            if self._written is not None:
                self._written += line
            self._touched = self._modified()

    def close(self) -> None:
        """Look after the file a last time, close it and let go of its folder; more than once is once.

        Raises UsageError where the file is not as it was written and cannot be put back.
        """
        if self._file.closed:
            return
        with postponed():
            try:
                if not self._saved:
                    self._look_after()
            finally:
                self._file.close()
                if self._lock is not None:
                    self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            self.close()
        except UsageError as lost:
            if error is None:
                raise
            _LOG.warning("%s", lost)  # what ends the run already is told by its caller

    def _modified(self) -> int:
        return os.fstat(self._file.fileno()).st_mtime_ns

    def _look_after(self, next_line: bytes = b"") -> None:
        """Put the file back with all that it held where it is not as it was written.

        Raises UsageError where that cannot be done, and names the file that then holds what was measured.
        """
        if self._written is None or not (what := self._harm(self._written)):
            return
        whole = bytes(self._written)
        try:
            aside = self._put_back(whole)
        except (OSError, UsageError) as error:
            self._saved = True
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise UsageError(
                f"{self.path} {what} while it was written to, and cannot be put back ({reason});"
                f" {_rescue(whole + next_line)}"
            ) from None
        kept = f"; what stood there is kept as {aside}" if aside else ""
        _LOG.warning(
            "%s %s while it was written to, and is put back with all its rows%s", self.path, what, kept
        )

    def _harm(self, written: bytearray) -> str:
        """What became of the file since it was written, in words; empty where it is as it was."""
        try:
            named = os.stat(self.path)
        except OSError as error:
            if isinstance(error, (FileNotFoundError, NotADirectoryError)):
                return "was removed"
            return "was replaced" if error.errno == errno.ELOOP else "was made unreachable"
        held = os.fstat(self._file.fileno())
        if not os.path.samestat(held, named):
            return "was replaced"
        if held.st_size != len(written):
            return "was cut short" if held.st_size < len(written) else "was added to"
        if held.st_mtime_ns != self._touched:  # else nobody wrote to it, and it need not be read
            try:
                if _begin(self.path, len(written)) != written:
                    return "was changed"
            except OSError:
                return "was made unreachable"
            self._touched = held.st_mtime_ns
        return ""

    def _put_back(self, whole: bytes) -> Path | None:
        """Write the file anew, where it was; a copy of what stands there is kept unless it is a part.

        A link that leads elsewhere than before is taken away, and what it leads to is left alone.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._real.parent.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            self._lock.renew()
        through = os.path.islink(self.path) and os.path.realpath(self.path) == str(self._real)
        place = self._real if through else self.path
        aside, other = None, None
        if os.path.lexists(place) and stat.S_ISREG(os.lstat(place).st_mode):
            other = _begin(place, len(whole) + 1)
            aside = None if whole.startswith(other) else set_aside(place, "other")
        if other != whole:
            paths.replace(place, whole)
        file = place.open("ab", buffering=0)
        self._file.close()
        self._file, self._real = file, Path(os.path.realpath(place))
        self._touched = self._modified()
        return aside


def _begin(path: Path, size: int) -> bytes:
    """As many bytes of the file, or all that it has."""
    with paths.opened(path) as file:
        return file.read(size)


def set_aside(path: Path, why: str) -> Path:
    """A copy of the file beside it, on the disk, under a name that was free. Raises OSError."""
    data, number = paths.whole(path), 1
    while True:
        copy = path.with_name(f"{path.name}.{why}" + (f"-{number}" if number > 1 else ""))
        try:
            with copy.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
        except FileExistsError:
            number += 1
        except OSError:
            with suppress(OSError):
                copy.unlink()
            raise
        else:
            return copy


def unwritable(path: Path, error: OSError) -> UsageError:
    """The line to say where a disk refuses."""
    return UsageError(f"{path} cannot be written: {error.strerror or error}")


def _rescue(data: bytes) -> str:
    """Keep the lines in the folder for temporary files, and say where."""
    try:
        number, name = tempfile.mkstemp(prefix="flashbench-results-", suffix=".jsonl")
        with os.fdopen(number, "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        return f"its rows are lost ({error.strerror or error})"
    return f"its rows are in {name}"
