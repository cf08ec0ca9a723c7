"""Results on disk: JSON lines, one finished cell each, so that a crash or a kill loses nothing.

Line 1 is the header::

    {"type": "header", "schema": 4, "created_at", "argv", "options", "environment", "cells": [keys]}

then one ``{"type": "record", …}`` per cell, flushed to disk before the next cell starts, and, for cells
that were counted or traced after they ran, ``{"type": "counters", "key", "counters"}`` and ``{"type":
"trace", "key", "trace"}`` lines, which belong to the record of that key, and ``{"type": "timings", …}``
when a run ends. ``check --numerics`` writes lines
of type numerics alone. JSON is strict (no NaN); a value that is not finite is null. A last line that was
torn by a kill is dropped with a note. A header with a newer schema is refused.

Resuming (``resume``) measures the cells of the present plan that the file has no final row for:
rows that were not started (time budget, lost device) are taken out and measured again, every other
row stays, rows of a function of somebody's own whose file has changed since are measured again, rows of
cells outside the present plan stay too, and the header's list of cells becomes
the union. What would make rows incomparable is refused: another device, another ``cache``, ``seed`` or flush;
and to leave out what the file's rows are given after they ran (``AFTERWARDS``).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashbench.errors import RunFileError, UsageError
from flashbench.problem import Cell
from flashbench.record import FLUSH, Record
from flashbench.record_json import json_able, record_from_json, record_to_json

SCHEMA = 4
"""Raised by one when a reader of the old schema would misread the new. 2: lines of type counters; 3: of
type trace; 4: of type timings."""

NOT_STARTED = ("time budget of", "the device was lost")
"""How the reason of a skipped row begins that ``resume`` measures after all."""

CONDITIONS = ("cache", "seed", "timing", "load")
"""Options that all rows of one file share."""

SOURCE_HASH = "source_sha256"
"""Of the configuration of an implementation that is not flashbench's: which file it was measured from."""

AFTERWARDS = ("counters", "trace")
"""Fields of a record that are found after the sweep, by the option of the same name."""


@dataclass(frozen=True, kw_only=True)
class RunFile:
    """A results file as read. header: line 1; notes: what had to be repaired; numerics: of numerics.rows;
    timings: of each run that wrote rows, as runner.run_cells returns it."""

    path: Path
    header: Mapping[str, Any]
    records: tuple[Record, ...]
    notes: tuple[str, ...] = ()
    numerics: tuple[Mapping[str, Any], ...] = ()
    timings: tuple[Mapping[str, Any], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What ``resume`` found: where to append, which cells are still to be measured, what to tell."""

    writer: Writer
    missing: tuple[Cell, ...]
    kept: tuple[Record, ...]
    notes: tuple[str, ...]


class Writer:
    """Appends records to a results file; each is on the disk when ``append`` returns."""

    def __init__(self, path: Path, known: Iterable[str] = ()) -> None:
        self.path = path
        self._known = set(known)
        try:
            self._file = path.open("a", encoding="utf-8", newline="\n")
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
        try:
            self._file.write(_line(json_able(value)))
            self._file.flush()
            os.fsync(self._file.fileno())
        except OSError as error:
            raise _unwritable(self.path, error) from None

    def close(self) -> None:
        """Close the file; what was appended is safe without it."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def header(
    *, argv: Sequence[str], options: Mapping[str, Any], environment: Mapping[str, Any], cells: Iterable[Cell],
    overheads: Mapping[str, Any] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """The header of a new file, stamped with the present time (UTC).

    overheads: what timing itself costs here, as of profilers.measure_overheads.
    """
    return {
        "type": "header",
        "schema": SCHEMA,
        "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "argv": list(argv),
        "options": json_able(options),
        "environment": json_able(environment),
        "overheads": json_able(overheads or {}),
        "cells": [cell.key for cell in cells],
    }


def create(path: Path | str, head: Mapping[str, Any]) -> Writer:
    """A new results file with that header. Makes missing folders.

    Raises UsageError where the path exists, is a folder or cannot be written.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder; a results file is wanted")
    if os.path.exists(path):
        raise UsageError(
            f"{path} exists and is not overwritten", hint="pass --resume to complete it, or another --out"
        )
    _replace(path, [head])
    return Writer(path)


def load(path: Path | str) -> RunFile:
    """Read a results file.

    Raises UsageError for a path that is missing, a folder or unreadable, and RunFileError for a
    file that opens but is not one of ours, is damaged before its last line, or has a newer schema.
    """
    path = Path(path)
    lines = _read(path).split(b"\n")
    torn_tail = lines.pop()  # empty where the file ends in a newline
    if not lines:
        what = "is empty" if not torn_tail else "holds no complete line"
        raise RunFileError(f"{path} {what}; a results file begins with a header")
    head = _parse_header(path, lines[0])
    records: dict[str, Record] = {}
    notes, numerics, timings = list[str](), list[Mapping[str, Any]](), list[Mapping[str, Any]]()
    if "schema" not in head:
        notes.append(f"{path}, line 1: no schema; read as the first")
    for number, line in enumerate(lines[1:], start=2):
        where = f"{path}, line {number}"
        value = _parse_object(path, number, line)
        if value.get("type") in AFTERWARDS:
            _attach(records, value, where)
        elif value.get("type") == "numerics":
            numerics.append(value)
        elif value.get("type") == "timings":
            timings.append(value)
        else:
            record = record_from_json(value, where)
            if record.cell.key in records:
                notes.append(f"{where}: a second row for {record.cell.key}; the later one counts")
            records[record.cell.key] = record
    if torn_tail:
        notes.append(f"{path}: the last line was torn off in the middle of a write and is ignored")
    return RunFile(
        path=path,
        header=head,
        records=tuple(records.values()),
        notes=tuple(notes),
        numerics=tuple(numerics),
        timings=tuple(timings),
    )


def _attach(records: dict[str, Record], value: Mapping[str, Any], where: str) -> None:
    """Give the counters or the trace of a line to the record that it names."""
    key, name = value.get("key"), value["type"]
    if key not in records or not isinstance(value.get(name), dict):
        raise RunFileError(f"{where}: {name} of {key!r}, which has no row above it")
    records[key] = replace(records[key], **{name: value[name]})


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

    sources: by implementation that is not flashbench's, the hash of its file now; a row of another is
    measured again.

    Raises as ``load`` does, and UsageError where the file is of another device or was measured
    under other conditions (``CONDITIONS``, ``AFTERWARDS``).
    """
    found = load(path)
    _refuse_unlike(found, environment, options)
    changed = {record.cell.key for record in found.records if _changed(record, sources or {})}
    kept = tuple(r for r in found.records if is_final(r) and r.cell.key not in changed)
    known = {record.cell.key for record in kept}
    missing = tuple(cell for cell in cells if cell.key not in known)
    planned = list(dict.fromkeys([*found.header.get("cells", ()), *(cell.key for cell in cells)]))
    notes = [*found.notes, *_environment_notes(found.header.get("environment", {}), environment)]
    if changed:
        notes.append(
            f"{found.path}: {len(changed)} rows are of another source than now and are measured again"
        )
    outside = len(known - {cell.key for cell in cells})
    if outside:
        notes.append(f"{found.path}: {outside} rows of cells that are not asked for now are kept")
    more = {name: True for name in AFTERWARDS if options.get(name) is True}
    head = {**found.header, "schema": SCHEMA, "options": {**found.header["options"], **more}}
    _replace(found.path, [{**head, "cells": planned}, *map(record_to_json, kept), *found.timings])
    return Resumed(writer=Writer(found.path, known), missing=missing, kept=kept, notes=tuple(notes))


def _changed(record: Record, sources: Mapping[str, str]) -> bool:
    """Whether the row is of another file than the implementation of its name is now."""
    before, now = record.config.get(SOURCE_HASH), sources.get(record.cell.implementation)
    return now is not None and before != now


def _line(value: Mapping[str, Any]) -> str:
    return json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":")) + "\n"


def _parse_object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not strict JSON")

    try:
        value = json.loads(line.decode("utf-8"), parse_constant=refuse)
    except ValueError as error:
        raise RunFileError(f"{path}, line {number}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise RunFileError(f"{path}, line {number}: a JSON object is wanted")
    return value


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


def _refuse_unlike(found: RunFile, environment: Mapping[str, Any], options: Mapping[str, Any]) -> None:
    before, now = found.header["environment"].get("device_name"), environment.get("device_name")
    if before != now:
        raise UsageError(
            f"{found.path} was measured on {before!r}; this is {now!r}, and a file holds one kind of device",
            hint="choose another --out",
        )
    for name in CONDITIONS:
        old, new = found.header["options"].get(name), json_able(options.get(name))
        if old is None and name == "cache":
            raise UsageError(
                f"{found.path} holds a check: nothing in it was timed", hint="choose another --out"
            )
        if old is None and new is not None:
            raise UsageError(
                f"{found.path} does not say with which --{name} it was measured; now it is {new!r}",
                hint="choose another --out",
            )
        if old != new:
            raise UsageError(
                f"{found.path} was measured with {name} {old!r}; now {name} is {new!r}",
                hint=f"pass --{name} {old}, or choose another --out",
            )
    if others := {record.samples.flush for record in found.records if record.samples} - {None, FLUSH}:
        said = f"{found.path} was measured with the L2 flushed by a {others.pop()}; now it is by a {FLUSH}"
        raise UsageError(said, hint="choose another --out")
    for name in AFTERWARDS:
        if found.header["options"].get(name) is True and options.get(name) is False:
            raise UsageError(
                f"{found.path} was measured with --{name}; now it is --no-{name}",
                hint=f"leave --no-{name} out, or choose another --out",
            )


def _environment_notes(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    names = ("driver", "torch", "triton", "cuda", "cudnn", "python", "flashbench", "source_hash")
    return [
        f"{name} was {before.get(name)} when the file was begun and is {now.get(name)} now"
        for name in names
        if before.get(name) != now.get(name)
    ]


def _read(path: Path) -> bytes:
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder; a results file is wanted")
    try:
        return path.read_bytes()
    except FileNotFoundError:
        raise UsageError(f"{path} does not exist; a results file is wanted") from None
    except OSError as error:
        raise UsageError(f"{path} cannot be read: {error.strerror or error}") from None


def _replace(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Write all lines to a neighbour, then rename it over the path: old or new, never half."""
    scratch = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with scratch.open("w", encoding="utf-8", newline="\n") as file:
            file.writelines(map(_line, values))
            file.flush()
            os.fsync(file.fileno())
        os.replace(scratch, path)
    except OSError as error:
        with suppress(OSError):
            scratch.unlink()
        raise _unwritable(path, error) from None


def _unwritable(path: Path, error: OSError) -> UsageError:
    return UsageError(f"{path} cannot be written: {error.strerror or error}")
