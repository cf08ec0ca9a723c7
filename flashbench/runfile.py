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
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashbench import paths
from flashbench._runfile import alike, lines
from flashbench._runfile.alike import AFTERWARDS, CONDITIONS, SOURCE_HASH
from flashbench._runfile.lock import Locks
from flashbench._runfile.reading import SCHEMA, RunFile, intact, load, read, rowless
from flashbench._runfile.verify import Verdict
from flashbench._runfile.verify import verify as _verify
from flashbench._runfile.writer import Writer, set_aside, unwritable
from flashbench.errors import UsageError
from flashbench.problem import Cell
from flashbench.record import Record
from flashbench.record_json import json_able, record_to_json

NOT_STARTED = ("time budget of", "the device was lost")
"""How the reason of a skipped row begins that ``resume`` measures after all."""

__all__ = [
    "AFTERWARDS", "CONDITIONS", "NOT_STARTED", "SCHEMA", "SOURCE_HASH", "Resumed", "RunFile", "Verdict",
    "Writer", "create", "header", "intact", "is_final", "load", "resume", "rowless", "verify",
]  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What ``resume`` found: where to append, which cells are still to be measured, what to tell."""

    writer: Writer
    missing: tuple[Cell, ...]
    kept: tuple[Record, ...]
    notes: tuple[str, ...]


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
    """A new results file with that header, in the place of one that is ``rowless``. Makes missing folders.

    Raises UsageError where the path exists otherwise, is a folder or cannot be written.
    """
    path = Path(path)
    if os.path.isdir(path):
        raise UsageError(f"{path} is a folder; a results file is wanted")
    lock = _locked(path)
    try:
        if os.path.exists(path) and not rowless(path):
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
    return _verify(path, read(path), SCHEMA)


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
        return _resume(load(path, damaged=True), cells, environment, options, sources or {}, lock)
    except BaseException:
        lock.release()
        raise


def _resume(
    found: RunFile,
    cells: Sequence[Cell],
    environment: Mapping[str, Any],
    options: Mapping[str, Any],
    sources: Mapping[str, str],
    lock: Locks,
) -> Resumed:
    alike.refuse_unlike(found, environment, options)
    changed = {record.cell.key for record in found.records if alike.of_another_source(record, sources)}
    again = found.edited | changed
    kept = tuple(r for r in found.records if is_final(r) and r.cell.key not in again)
    known = {record.cell.key for record in kept}
    missing = tuple(cell for cell in cells if cell.key not in known)
    names = list(dict.fromkeys([*found.header.get("cells", ()), *(cell.key for cell in cells)]))
    notes = [*found.notes, *alike.environment_notes(found.header.get("environment", {}), environment)]
    if found.edited or found.left_out:
        notes += _taken_out(found)
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


def _locked(path: Path) -> Locks:
    """The lock of the path's folder, which is made, and of the one where the file lies that a link leads to.

    Raises UsageError as ``create`` does.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        real = paths.resolved(path)
        device = real.exists() and not real.is_file()
        return Locks(path.parent, *(() if device else (real.parent,)))
    except OSError as error:
        raise unwritable(path, error) from None


def _taken_out(found: RunFile) -> list[str]:
    """Keep the file as it is under another name, and say what of it is measured again."""
    try:
        copy = set_aside(found.path, "damaged")
    except OSError as error:
        raise unwritable(found.path.with_name(f"{found.path.name}.damaged"), error) from None
    said = [f"{text}; the line is taken out" for text in found.unread]
    if more := found.left_out - len(found.unread):
        said.append(f"{found.path}: {more} more such lines are taken out")
    if found.edited:
        said.append(f"{found.path}: {len(found.edited)} rows that are not as they were written are taken out")
    return [*said, f"the file as it was is kept as {copy}"]


def _replace(path: Path, values: Iterable[Mapping[str, Any]]) -> None:
    """Write all lines to a neighbour, then rename it over the path, or what that leads to: old or new, never
    half."""
    try:
        paths.replace(paths.resolved(path), b"".join(map(lines.seal, values)))
    except OSError as error:
        raise unwritable(path, error) from None
