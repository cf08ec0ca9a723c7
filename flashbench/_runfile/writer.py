"""The file that rows are appended to, each safe on the disk, and put back where somebody takes it away."""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Iterable, Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashbench import paths
from flashbench._runfile import lines
from flashbench._runfile.lock import Lock
from flashbench.errors import UsageError
from flashbench.record import Record
from flashbench.record_json import json_able, record_to_json

_LOG = logging.getLogger("flashbench")


class Writer:
    """Appends records to a results file; each is on the disk when ``append`` returns."""

    def __init__(self, path: Path, known: Iterable[str] = (), lock: Lock | None = None) -> None:
        self.path = path
        self._known = set(known)
        self._lock = lock
        try:
            self._file = path.open("ab", buffering=0)
            # None of a device; else what the file is to hold, to put it back
            self._written = bytearray(paths.whole(path)) if path.is_file() else None
        except OSError as error:
            raise unwritable(path, error) from None

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
        data = line = lines.seal(json_able(value))
        self._look_after(line)
        before = os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # a part of a line would be taken for one that a kill tore off
                os.ftruncate(self._file.fileno(), before)
            raise unwritable(self.path, error) from None
        if self._written is not None:
            self._written += line

    def close(self) -> None:
        """Close the file and let go of its folder; what was appended is safe without it."""
        self._file.close()
        if self._lock is not None:
            self._lock.release()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _look_after(self, next_line: bytes) -> None:
        """Notice that the file was removed, replaced or cut short, and put it back with all that it held.

        Raises UsageError where that cannot be done, and names the file that then holds what was measured.
        """
        if self._written is None:
            return
        held = os.fstat(self._file.fileno())
        try:
            named = os.stat(self.path)
        except (FileNotFoundError, NotADirectoryError):
            what = "was removed"
        except OSError:
            return  # a file system that does not answer: the write itself will tell
        else:
            if not os.path.samestat(held, named):
                what = "was replaced"
            elif held.st_size < len(self._written):
                what = "was cut short"
            else:
                return
        whole = bytes(self._written)
        try:
            aside = self._put_back(whole, there=what != "was removed")
        except (OSError, UsageError) as error:
            reason = error.strerror or str(error) if isinstance(error, OSError) else str(error)
            raise UsageError(
                f"{self.path} {what} while it was written to, and cannot be put back ({reason});"
                f" {_rescue(whole + next_line)}"
            ) from None
        kept = f"; what stood there is kept as {aside}" if aside else ""
        _LOG.warning(
            "%s %s while it was written to, and is put back with all its rows%s", self.path, what, kept
        )

    def _put_back(self, whole: bytes, *, there: bool) -> Path | None:
        """Write the file anew. there: something has its name; a copy of it is kept unless it is a part."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        if self._lock is not None:
            self._lock.renew()
        aside = None
        if there:
            with paths.opened(self.path) as file:
                other = file.read(len(whole) + 1)
            aside = None if whole.startswith(other) else set_aside(self.path, "other")
        if not there or other != whole:
            paths.put(self.path, whole)
        file = self.path.open("ab", buffering=0)
        self._file.close()
        self._file = file
        return aside


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
    except OSError as error:
        return f"its rows are lost ({error.strerror or error})"
    return f"its rows are in {name}"
