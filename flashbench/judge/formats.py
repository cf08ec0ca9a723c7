"""Which reader a file needs: told by what it holds, not by its name.

To add a format, write a module with ``KIND``, ``matches(document)`` and ``read(path, document)`` and name
it in ``JSON_READERS`` (a document is the parsed JSON), or a table in ``csv_tables``."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashbench import paths, runfile, units
from flashbench.errors import RunFileError, UsageError
from flashbench.judge import asv, csv_tables, gate, native, nvbench, pyperf, static
from flashbench.judge.sides import Run, Side, paths_of
from flashbench.runfile import RunFile

JSON_READERS = (gate, static, pyperf, asv, nvbench)


DAMAGED = "damaged"
"""What --allow takes for results files with lines that are not as they were written."""


def load_side(texts: str, name: str, allowed: Collection[str] = (), *, copies: bool = False) -> Side:
    """The side of a comma list of files, folders and globs. allowed: may hold ``damaged``.

    copies: keep files of equal content, which are one run elsewhere.

    Raises UsageError for what matches nothing or cannot be opened, RunFileError for a file of no known
    format or with a damaged line, both with the list as it was typed where they are about a part of it.
    """
    runs: list[Run] = []
    for path in paths_of(texts, name):
        try:
            runs.append(load_run(path, allowed))
        except (UsageError, RunFileError) as error:
            if str(path).startswith(texts):
                raise
            raise type(error)(f"{name} {units.quoted(texts, 400)}: {error}", hint=error.hint) from None
    return Side(name=name.lower(), runs=tuple(runs) if copies else _each_once(runs))


def _each_once(runs: Sequence[Run]) -> tuple[Run, ...]:
    """Without copies, which say nothing of how far runs differ; the run that stays names them. Numbers that
    repeat exactly make equal files of their own."""
    found: dict[object, Run] = {}
    for run in runs:
        exact = run.kind in (gate.KIND, static.KIND)
        key = run.path if exact else hashlib.sha256(paths.whole(run.path)).digest()
        if key in found:
            note = f"{run.path} has the same content and is counted once"
            run = replace(found[key], notes=(*found[key].notes, note))
        found[key] = run
    return tuple(found.values())


def load_run(path: Path, allowed: Collection[str] = ()) -> Run:
    """One file as a run. Raises as ``load_side``."""
    try:
        data = paths.whole(path)
    except OSError:
        return native.run_of(_native(path, allowed))  # which says what is wrong
    document = _json(data)
    if document is None and csv_tables.matches(data):
        return csv_tables.read(path, data)
    if document is None or (isinstance(document, dict) and document.get("type") == "header"):
        return native.run_of(_native(path, allowed))
    for reader in JSON_READERS:
        if reader.matches(document):
            try:
                run: Run = reader.read(path, document)
            except (KeyError, ValueError, TypeError, AttributeError, IndexError) as error:
                said = f"the field {error} is missing" if isinstance(error, KeyError) else str(error)
                raise RunFileError(f"{path}: not what {reader.KIND} writes: {units.cut(said, 200)}") from None
            return run
    known = ", ".join(["flashbench run", *(reader.KIND for reader in JSON_READERS), *csv_tables.KINDS])
    raise RunFileError(f"{path}: JSON of no known format; accepted: results of {known}")


def _native(path: Path, allowed: Collection[str]) -> RunFile:
    found = runfile.load(path)
    return found if DAMAGED in allowed else runfile.intact(found)


def _json(data: bytes) -> Any:
    """The document, None where it is not one, as JSON lines are not."""
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
