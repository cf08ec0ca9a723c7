"""Results on disk: JSON lines, one finished cell each, so that a crash or a kill loses nothing.

Line 1 is the header::

    {"type": "header", "schema": 5, "created_at", "argv", "options", "environment", "cells": [keys],
     "checksum"}

then one ``{"type": "record", …}`` per cell, on disk before the next cells start, and, for cells that were
counted or traced after they ran, ``{"type": "counters", "key", "counters"}`` and ``{"type": "trace", …}``
lines, which belong to the record of that key, and ``{"type": "timings", …}`` when a run ends. ``check
--numerics``, ``block`` and ``ring`` write lines of their own types. JSON is strict, with null for NaN.

A line is written whole or, where the disk is full, not at all, and ends in a checksum
(``_runfile/lines.py``). A last line that was torn by a kill is dropped with a note; a line that is not as
it was written is told (``verify`` says which), and its cell measured again by ``resume``. One process writes
into a folder at a time (``_runfile/lock.py``). A header with a newer schema is refused; an older file is read
as it is and becomes one of this schema when it is resumed.

Resuming (``resume``) measures the cells of the present plan that the file has no final row for: rows that
were not started (time budget, lost device) and those of a function of somebody's own whose file has changed
are taken out and measured again, every other row stays, rows of cells outside the present plan stay too, and
the header's list of cells becomes the union. What would make rows incomparable is refused: another device,
another ``cache``, ``seed`` or flush; and to leave out what the file's rows are given after they ran
(``AFTERWARDS``). Nothing that a file holds is executed or imported.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashbench._runfile import alike, lines
from flashbench._runfile.alike import AFTERWARDS, CONDITIONS, SOURCE_HASH
from flashbench._runfile.lock import Lock
from flashbench._runfile.reading import Lines, parse_object
from flashbench._runfile.verify import Verdict
from flashbench._runfile.verify import verify as _verify
from flashbench.errors import RunFileError, UsageError
from flashbench.problem import Cell
from flashbench.record import Record
from flashbench.record_json import json_able, record_to_json

SCHEMA = 5
"""Raised by one when a reader of the old schema would misread the new. 2: lines of type counters; 3: of
type trace; 4: of type timings; 5: a line without a checksum is a damaged one."""

NOT_STARTED = ("time budget of", "the device was lost")
"""How the reason of a skipped row begins that ``resume`` measures after all."""

__all__ = [
    "AFTERWARDS", "CONDITIONS", "NOT_STARTED", "SCHEMA", "SOURCE_HASH", "Resumed", "RunFile", "Verdict",
    "Writer", "create", "header", "intact", "is_final", "load", "resume", "verify",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A results file as read. header: line 1; notes: what had to be repaired; numerics, blocks, ring: lines
    of that type; timings: of each run that wrote rows, as runner.run_cells returns it; edited: keys of rows
    of which a line is not as it was written; damaged: the numbers of such lines."""

    path: Path
    header: Mapping[str, Any]
    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()
    numerics: tuple[Mapping[str, Any], ...] = ()
    timings: tuple[Mapping[str, Any], ...] = ()
    blocks: tuple[Mapping[str, Any], ...] = ()
    ring: tuple[Mapping[str, Any], ...] = ()
    edited: frozenset[str] = frozenset()
    damaged: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What ``resume`` found: where to append, which cells are still to be measured, what to tell."""

    writer: Writer
    missing: tuple[Cell, ...]
    kept: tuple[Record, ...]
    notes: tuple[str, ...]


class Writer:
    """Appends records to a results file; each is on the disk when ``append`` returns."""

    def __init__(self, path: Path, known: Iterable[str] = (), lock: Lock | None = None) -> None:
        self.path = path
        self._known = set(known)
        self._lock = lock
        try:
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise _unwritable(path, error) from None

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
        data, before = lines.seal(json_able(value)), os.fstat(self._file.fileno()).st_size
        try:
            while data:
                data = data[self._file.write(data) :]
            os.fsync(self._file.fileno())
        except OSError as error:
            with suppress(OSError):  # a part of a line would be taken for one that a kill tore off
                os.ftruncate(self._file.fileno(), before)
            raise _unwritable(self.path, error) from None

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


def header(
    *, argv: Sequence[str], options: Mapping[str, Any], environment: Mapping[str, Any], cells: Iterable[Cell],
    overheads: Mapping[str, Any] | None = None, calibration: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The header of a new file, stamped with the present time (UTC); overheads: profilers.measure_overheads'
    of timing itself; calibration: Ceilings.document's of the card."""
    return {
        "type": "header",
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": list(argv),
        "options": json_able(options),
        "environment": json_able(environment),
        "overheads": json_able(overheads or {}),
        **({"calibration": json_able(calibration)} if calibration else {}),
        "cells": [cell.key for cell in cells],
    }


def create(path: Path | str, head: Mapping[str, Any]) -> Writer:
    """A new results file with that header. Makes missing folders.

    Raises UsageError where the path exists, is a folder or cannot be written.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder; a results file is wanted")
    lock = _locked(path)
    try:
        if os.path.exists(path):
            raise UsageError(
                f"{path} exists and is not overwritten", hint="pass --resume to complete it, or another --out"
            )
        _replace(path, [head])
        return Writer(path, lock=lock)
    except BaseException:
        lock.release()
        raise


def verify(path: Path | str) -> Verdict:
    """Look for lines that are not as they were written. Raises UsageError for a path that cannot be read."""
    path = Path(path)
    return _verify(path, _read(path), SCHEMA)


def load(path: Path | str) -> RunFile:
    """Read a results file.

    Raises UsageError for a path that is missing, a folder or unreadable, and RunFileError for a
    file that opens but is not one of ours, is damaged before its last line, or has a newer schema.
    """
    path = Path(path)
    whole = _read(path).split(b"\n")
    torn_tail = whole.pop()  # empty where the file ends in a newline
    if not whole:
        what = "is empty" if not torn_tail else "holds no complete line"
        raise RunFileError(f"{path} {what}; a results file begins with a header")
    head = _parse_header(path, whole[0])
    found = Lines(path, head)
    for number, line in enumerate(whole, start=1):
        found.take(number, line)
    return RunFile(
        path=path,
        header=head,
        records=tuple(found.records.values()),
        notes=found.notes(torn=bool(torn_tail)),
        **{name: tuple(rows) for name, rows in found.others.items()},
        edited=frozenset(found.edited),
        damaged=tuple(found.damaged),
    )


def intact(file: RunFile) -> RunFile:
    """The file, to judge by: raises RunFileError where a line is not as it was written."""
    if file.damaged:
        more = f" and {len(file.damaged) - 1} more" if len(file.damaged) > 1 else ""
        raise RunFileError(
            f"{file.path}, line {file.damaged[0]}{more}: not as written, by the checksum;"
            f" 'flashbench verify {file.path}' says what is wrong"
        )
    return file


def is_final(record: Record) -> bool:
    """False for a row that stands for a cell that was never started; ``resume`` measures it."""
    return not (record.status == "skipped" and (record.reason or "").startswith(NOT_STARTED))


def resume(
    path: Path | str,
    cells: Sequence[Cell],
    environment: Mapping[str, Any],
    options: Mapping[str, Any],
    sources: Mapping[str, str] | None = None,
) -> Resumed:
    """Prepare to complete a results file: repair and extend it in place, say what is missing.

    sources: as of alike.of_another_source, whose rows are measured again. Raises as ``load`` does, and
    UsageError where the file is of another device or was measured under other conditions (``CONDITIONS``,
    ``AFTERWARDS``).
    """
    path = Path(path)
    lock = _locked(path)
    try:
        return _resume(load(path), cells, environment, options, sources or {}, lock)
    except BaseException:
        lock.release()
        raise


def _resume(
    found: RunFile,
    cells: Sequence[Cell],
    environment: Mapping[str, Any],
    options: Mapping[str, Any],
    sources: Mapping[str, str],
    lock: Lock,
) -> Resumed:
    alike.refuse_unlike(found, environment, options)
    changed = {record.cell.key for record in found.records if alike.of_another_source(record, sources)}
    again = found.edited | changed
    kept = tuple(r for r in found.records if is_final(r) and r.cell.key not in again)
    known = {record.cell.key for record in kept}
    missing = tuple(cell for cell in cells if cell.key not in known)
    names = list(dict.fromkeys([*found.header.get("cells", ()), *(cell.key for cell in cells)]))
    notes = [*found.notes, *alike.environment_notes(found.header.get("environment", {}), environment)]
    if found.edited:
        notes.append(
            f"{found.path}: {len(found.edited)} rows that are not as they were written are taken out"
        )
    if changed:
        notes.append(
            f"{found.path}: {len(changed)} rows are of another source than now and are measured again"
        )
    outside = len(known - {cell.key for cell in cells})
    if outside:
        notes.append(f"{found.path}: {outside} rows of cells that are not asked for now are kept")
    more = {name: True for name in AFTERWARDS if options.get(name) is True}
    head = {**found.header, "schema": SCHEMA, "options": {**found.header["options"], **more}}
    _replace(found.path, [{**head, "cells": names}, *map(record_to_json, kept), *found.timings, *found.ring])
    writer = Writer(found.path, known, lock)
    return Resumed(writer=writer, missing=missing, kept=kept, notes=tuple(notes))


def _parse_header(path: Path, line: bytes) -> dict[str, Any]:
    head = parse_object(path, 1, line)
    schema = head.get("schema", 1)  # load notes that it is missing
    if head.get("type") != "header" or not isinstance(schema, int):
        raise RunFileError(f"{path}, line 1: not a flashbench header")
    if schema > SCHEMA:
        raise RunFileError(
            f"{path} has schema {schema}; this flashbench reads up to {SCHEMA}", hint="update flashbench"
        )
    for name, kind in (("environment", dict), ("options", dict), ("cells", list)):
        if not isinstance(head.get(name), kind):
            raise RunFileError(f"{path}, line 1: the field {name!r} is missing or not a {kind.__name__}")
    return head


def _read(path: Path) -> bytes:
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder; a results file is wanted")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; a results file is wanted") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None


def _locked(path: Path) -> Lock:
    """The lock of the path's folder, which is made. Raises UsageError as ``create`` does."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return Lock(path.parent)
    except OSError as error:
        raise _unwritable(path, error) from None


def _replace(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Write all lines to a neighbour, then rename it over the path: old or new, never half."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with scratch.open("wb") as file:
            file.writelines(map(lines.seal, values))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise _unwritable(path, error) from None
    with suppress(OSError):  # the new name as well; not every system opens folders
        folder = os.open(path.parent, os.O_RDONLY)
        with suppress(OSError):
            os.fsync(folder)
        os.close(folder)


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be written: {error.strerror or error}")
