"""A results file as it is read: its header, its rows, and what had to be overlooked."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import chain, islice
from pathlib import Path
from typing import Any

from flashbench._runfile import decodes, lines
from flashbench._runfile.alike import AFTERWARDS
from flashbench._runfile.verify import SEALED
from flashbench.errors import FlashbenchError, RunFileError, UsageError
from flashbench.record import Record
from flashbench.record_json import record_from_json

SCHEMA = 5
"""Raised by one when a reader of the old schema would misread the new. 2: lines of type counters; 3: of
type trace; 4: of type timings; 5: a line without a checksum is a damaged one."""


MOST_TOLD = 5
"""Lines of which each is told that it cannot be read, or repeats another."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A results file as read. header: line 1; notes: what had to be repaired; numerics, blocks, ring: lines
    of that type; decode: rows of a document of ``decode --out``; timings: of each run that wrote rows, as
    runner.run_cells returns it; edited: keys of rows of which a line is not as it was written; damaged: how
    many lines are not, and first_damaged the number of one; left_out: how many lines could not be read, and
    unread what is wrong with the first MOST_TOLD."""

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
    damaged: int = 0
    first_damaged: int = 0
    left_out: int = 0
    unread: tuple[str, ...] = ()


def load(path: Path | str, *, damaged: bool = False, documents: bool = False) -> RunFile:
    """Read a results file. damaged: leave lines out that cannot be read (``unread``), as ``resume`` does;
    documents: a file of ``decode --out`` is read, too.

    Raises UsageError for a path that is missing, a folder or unreadable, and RunFileError for a
    file that opens but is not one of ours, is damaged before its last line, or has a newer schema.
    """
    path = Path(path)
    source: Iterator[tuple[bytes, bool]] = read(path)
    if documents:
        first = list(islice(source, 3))
        source = chain(first, source)
        if decodes.begins([line for line, _ in first]):
            head, steps = decodes.parse(path, decodes.text_of(line for line, _ in source))
            return RunFile(path=path, header=head, records=(), decode=steps)
    found, torn = None, False
    for number, (line, whole) in enumerate(source, start=1):
        torn = not whole
        if torn:
            break
        if found is None:
            found = _Lines(path, _parse_header(path, line), damaged)
        try:
            found.take(number, line)
        except RunFileError as error:
            if not damaged:
                raise
            found.leave_out(error)
    if found is None:
        what = "is empty" if not torn else "holds no complete line"
        raise RunFileError(f"{path} {what}; a results file begins with a header")
    return found.file(torn=torn)


def rowless(path: Path | str) -> bool:
    """Whether the path is of a results file, as it was written, that holds a header and no finished row: of a
    run that was stopped before its first, so that another loses nothing in its place.
    """
    path = Path(path)
    try:
        first = list(islice(read(path), 2))
        begun = bool(first) and all(first[0]) and lines.intact(first[0][0]) is True
        if begun:
            _parse_header(path, first[0][0])
    except (FlashbenchError, OSError, ValueError):
        return False
    return begun and not any(whole or not line.startswith(b'{"type":"') for line, whole in first[1:])


def intact(file: RunFile) -> RunFile:
    """The file, to judge by: raises RunFileError where a line is not as it was written."""
    if file.damaged:
        more = f" and {file.damaged - 1} more" if file.damaged > 1 else ""
        raise RunFileError(
            f"{file.path}, line {file.first_damaged}{more}: not as written, by the checksum;"
            f" 'flashbench verify {file.path}' says what is wrong"
        )
    return file


class _Lines:
    """The lines of a file as they are read, one after the other."""

    def __init__(self, path: Path, head: Mapping[str, Any], repaired: bool) -> None:
        self.path, self.head = path, head
        self.records: dict[str, Record] = {}
        self.others = {name: list[Mapping[str, Any]]() for name in ("numerics", "timings", "blocks", "ring")}
        self.edited: set[str] = set()
        self._repaired = repaired  # what is no row is not written again as if it were whole
        self._schema = head.get("schema")
        self._unread, self._left_out = list[str](), 0
        self._damaged, self._first_damaged = 0, list[int]()
        self._endings = 0
        self._twice, self._repeated = list[str](), 0

    def leave_out(self, error: RunFileError) -> None:
        """Count a line that cannot be read; there may be millions, of which a few are told."""
        self._left_out += 1
        if self._left_out <= MOST_TOLD:
            self._unread.append(str(error))

    def take(self, number: int, line: bytes) -> None:
        """Take in a line. Raises RunFileError for one that cannot be read."""
        intact = lines.intact(line)
        damaged = intact is False or (intact is None and (self._schema or 1) >= SEALED)
        if damaged:
            self._damaged += 1
            self._first_damaged += [number] if self._damaged <= MOST_TOLD else []
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
                self._repeated += 1
                told = [f"{where}: a second row for {key}; the later one counts"]
                self._twice += told if self._repeated <= MOST_TOLD else []
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

    def file(self, *, torn: bool) -> RunFile:
        """What was taken in. torn: something stood behind the last line."""
        return RunFile(
            path=self.path,
            header=self.head,
            records=tuple(self.records.values()),
            notes=self._notes(torn=torn),
            **{name: tuple(rows) for name, rows in self.others.items()},
            edited=frozenset(self.edited),
            damaged=self._damaged,
            first_damaged=next(iter(self._first_damaged), 0),
            left_out=self._left_out,
            unread=tuple(self._unread),
        )

    def _notes(self, *, torn: bool) -> tuple[str, ...]:
        """What had to be repaired, or overlooked."""
        notes = list(self._twice)
        if self._repeated > MOST_TOLD:
            notes.append(f"{self.path}: {self._repeated - MOST_TOLD} more second rows; the later ones count")
        if self._schema is None:
            notes.insert(0, f"{self.path}, line 1: no schema; read as the first")
        if self._damaged:
            shown = ", ".join(map(str, self._first_damaged)) + ", …" * (self._damaged > MOST_TOLD)
            which = f"line{'s' * (self._damaged > 1)} {shown}"
            crlf = self._endings == self._damaged
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


def read(path: Path) -> Iterator[tuple[bytes, bool]]:
    """As ``lines.each``. Raises UsageError."""
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder; a results file is wanted")
    try:
        yield from lines.each(path)
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; a results file is wanted") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None
