"""A results file as it is read: its header, its rows, and what had to be overlooked."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashbench._runfile import decodes, lines
from flashbench._runfile.alike import AFTERWARDS
from flashbench._runfile.verify import SEALED
from flashbench.errors import RunFileError, UsageError
from flashbench.record import Record
from flashbench.record_json import record_from_json

SCHEMA = 5
"""Raised by one when a reader of the old schema would misread the new. 2: lines of type counters; 3: of
type trace; 4: of type timings; 5: a line without a checksum is a damaged one."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A results file as read. header: line 1; notes: what had to be repaired; numerics, blocks, ring: lines
    of that type; decode: rows of a document of ``decode --out``; timings: of each run that wrote rows, as
    runner.run_cells returns it; edited: keys of rows of which a line is not as it was written; damaged: the
    numbers of such lines; unread: what is wrong with lines that were left out."""

    path: Path
    header: Mapping[str, Any]
    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()
    numerics: tuple[Mapping[str, Any], ...] = ()
    timings: tuple[Mapping[str, Any], ...] = ()
    blocks: tuple[Mapping[str, Any], ...] = ()
    ring: tuple[Mapping[str, Any], ...] = ()
    decode: tuple[Mapping[str, Any], ...] = ()
    edited: frozenset[str] = frozenset()
    damaged: tuple[int, ...] = ()
    unread: tuple[str, ...] = ()


def load(path: Path | str, *, damaged: bool = False, documents: bool = False) -> RunFile:
    """Read a results file. damaged: leave lines out that cannot be read (``unread``), as ``resume`` does;
    documents: a file of ``decode --out`` is read, too.

    Raises UsageError for a path that is missing, a folder or unreadable, and RunFileError for a
    file that opens but is not one of ours, is damaged before its last line, or has a newer schema.
    """
    path = Path(path)
    whole, torn_tail = read(path)
    if documents and decodes.begins([*whole, torn_tail][:3]):
        head, steps = decodes.parse(path, b"\n".join([*whole, torn_tail]))
        return RunFile(path=path, header=head, records=(), decode=steps)
    if not whole:
        what = "is empty" if not torn_tail else "holds no complete line"
        raise RunFileError(f"{path} {what}; a results file begins with a header")
    head = _parse_header(path, whole[0])
    found = _Lines(path, head, damaged)
    for number, line in enumerate(whole, start=1):
        try:
            found.take(number, line)
        except RunFileError as error:
            if not damaged:
                raise
            found.unread.append(str(error))
    return RunFile(
        path=path,
        header=head,
        records=tuple(found.records.values()),
        notes=found.notes(torn=bool(torn_tail)),
        **{name: tuple(rows) for name, rows in found.others.items()},
        edited=frozenset(found.edited),
        damaged=tuple(found.damaged),
        unread=tuple(found.unread),
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


class _Lines:
    """The lines of a file as they are read, one after the other."""

    def __init__(self, path: Path, head: Mapping[str, Any], repaired: bool) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self.others = {name: list[Mapping[str, Any]]() for name in ("numerics", "timings", "blocks", "ring")}
        self.edited: set[str] = set()
        self.unread: list[str] = []
        self._repaired = repaired  # what is no row is not written again as if it were whole
        self._schema = head.get("schema")
        self.damaged: list[int] = []
        self._endings = 0
        self._twice: list[str] = []

    def take(self, number: int, line: bytes) -> None:
        """Take in a line. Raises RunFileError for one that cannot be read."""
        intact = lines.intact(line)
        damaged = intact is False or (intact is None and (self._schema or 1) >= SEALED)
        if damaged:
            self.damaged.append(number)
            self._endings += lines.intact(line.removesuffix(b"\r")) is True
        if number == 1:
            return
        where = f"{self.path}, line {number}"
        value = _parse_object(self.path, number, line)
        kind = value.get("type")
        if isinstance(kind, str) and kind in self.others:
            if damaged and self._repaired:
                raise RunFileError(f"{where}: {lines.flaw(line)}")
            self.others[kind].append(value)
            return
        if kind in AFTERWARDS:
            key = self._attach(value, where)
        else:
            record = record_from_json(value, where)
            key = record.cell.key
            if key in self.records:
                self._twice.append(f"{where}: a second row for {key}; the later one counts")
            self.records[key] = record
        if damaged:
            self.edited.add(key)

    def _attach(self, value: Mapping[str, Any], where: str) -> str:
        """Give the counters or the trace of a line to the record that it names."""
        key, name = value.get("key"), value["type"]
        if not isinstance(key, str) or key not in self.records or not isinstance(value.get(name), dict):
            raise RunFileError(f"{where}: {name} of {key!r}, which has no row above it")
        self.records[key] = replace(self.records[key], **{name: value[name]})
        return key

    def notes(self, *, torn: bool) -> tuple[str, ...]:
        """What had to be repaired, or overlooked."""
        notes = list(self._twice)
        if self._schema is None:
            notes.insert(0, f"{self.path}, line 1: no schema; read as the first")
        if self.damaged:
            shown = ", ".join(map(str, self.damaged[:5])) + ", …" * (len(self.damaged) > 5)
            which = f"line{'s' * (len(self.damaged) > 1)} {shown}"
            crlf = self._endings == len(self.damaged)
            what = f": {lines.CRLF}" if crlf else ", by the checksum: edited or damaged"
            notes.append(f"{self.path}, {which}: not as written{what}")
        if torn:
            notes.append(f"{self.path}: the last line was torn off in the middle of a write and is ignored")
        return tuple(notes)


def _parse_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return lines.parse(line)
    except ValueError as error:
        raise RunFileError(f"{path}, line {number}: {error}") from None


def _parse_header(path: Path, line: bytes) -> dict[str, Any]:
    head = _parse_object(path, 1, line)
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


def read(path: Path) -> tuple[list[bytes], bytes]:
    """As ``lines.read``. Raises UsageError."""
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder; a results file is wanted")
    try:
        return lines.read(path)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; a results file is wanted") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
