"""The lines of a results file as they are read: rows, what is attached to them, and what is damaged."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashbench._runfile import lines
from flashbench._runfile.alike import AFTERWARDS
from flashbench._runfile.verify import SEALED
from flashbench.errors import RunFileError
from flashbench.record import Record
from flashbench.record_json import record_from_json


class Lines:
    """The lines of a file as they are read, one after the other."""

    def __init__(self, path: Path, head: Mapping[str, Any]) -> None:
        self.path = path
        self.records: dict[str, Record] = {}
        self.others = {name: list[Mapping[str, Any]]() for name in ("numerics", "timings", "blocks", "ring")}
        self.edited: set[str] = set()
        self.damaged: list[int] = []
        self._schema = head.get("schema")
        self._twice: list[str] = []

    def take(self, number: int, line: bytes) -> None:
        """Take in a line. Raises RunFileError for one that cannot be read."""
        intact = lines.intact(line)
        damaged = intact is False or (intact is None and (self._schema or 1) >= SEALED)
        if damaged:
            self.damaged.append(number)
        if number == 1:
            return
        where = f"{self.path}, line {number}"
        value = parse_object(self.path, number, line)
        kind = value.get("type")
        if isinstance(kind, str) and kind in self.others:
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
            notes.append(f"{self.path}, {which}: not as written, by the checksum: edited or damaged")
        if torn:
            notes.append(f"{self.path}: the last line was torn off in the middle of a write and is ignored")
        return tuple(notes)


def parse_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    """The object of a line. Raises RunFileError that names the line."""
    try:
        return lines.parse(line)
    except ValueError as error:
        raise RunFileError(f"{path}, line {number}: {error}") from None
