"""What is wrong with a results file, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flashbench._runfile import lines
from flashbench.errors import RunFileError
from flashbench.record_json import record_from_json

OTHERS = {"numerics": "check --numerics", "blocks": "block", "ring": "ring"}
"""Types of lines that are rows of other commands than run, and which."""
AFTER = ("counters", "trace", "timings", *OTHERS)
"""Types of lines that are no row of a cell."""
SEALED = 5
"""The first schema whose lines have checksums."""


@dataclass(kw_only=True)
class Verdict:
    """What ``verify`` found. damage: (line, what) of lines that are not as they were written; rows: of cells;
    others: rows of other commands, by command; missing: planned cells without a row, those of ring by their
    number; unsealed: lines from before there were checksums; torn: the last line broke off in a write, which
    loses nothing that was finished."""

    path: Path
    schema: int | None = None
    rows: int = 0
    others: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    unsealed: int = 0
    torn: bool = False
    damage: list[tuple[int, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every whole line is as it was written, as far as that can be told."""
        return not self.damage


def verify(path: Path, whole: Sequence[bytes], torn: bytes, newest: int) -> Verdict:
    """Look at every line. torn: what stands behind the last one. newest: the newest schema that is read."""
    found = Verdict(path=path, torn=bool(torn))
    if not whole:
        found.damage.append((1, "no complete line; a results file begins with a header"))
        return found
    keys = set[str]()
    planned, others = list[Any](), 0
    for number, line in enumerate(whole, start=1):
        try:
            value = lines.parse(line)
            if number == 1:
                found.schema, planned = _head(value, newest)
                others = count if type(count := value.get("planned")) is int else 0
            elif value.get("type") not in AFTER:
                record = record_from_json(value)
                found.damage += [(number, said) for said in _row(value, record.cell.key, keys)]
                keys.add(record.cell.key)
            elif value["type"] in OTHERS:
                found.others[OTHERS[value["type"]]] += 1
        except (ValueError, RunFileError) as error:
            found.damage.append((number, str(error)))
            continue
        sealed = lines.intact(line)
        if sealed is None and (found.schema or 0) < SEALED:
            found.unsealed += 1
        elif not sealed:
            found.damage.append((number, lines.flaw(line)))
    found.rows = len(keys)
    found.missing = len({key for key in planned if isinstance(key, str)} - keys)
    found.missing += max(0, others - found.others.total())
    return found


def _head(value: dict[str, Any], newest: int) -> tuple[int, list[Any]]:
    """Its schema and the planned cells. Raises ValueError where it is none or newer."""
    schema, cells = value.get("schema", 1), value.get("cells")
    if value.get("type") != "header" or type(schema) is not int or not isinstance(cells, list):
        raise ValueError("not a flashbench header")
    if schema > newest:
        raise ValueError(f"schema {schema}; this flashbench reads up to {newest}")
    return schema, cells


def _row(value: dict[str, Any], key: str, known: set[str]) -> Iterator[str]:
    if value.get("key") != key:
        yield f"its key is {value.get('key')!r}, and its cell {key!r}"
    if key in known:
        yield f"a second row for {key}"
