"""What is wrong with a results file, line by line."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
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
MOST_DAMAGE = 1000
"""Flaws of which each is kept with the number of its line."""
SEALED = 5
"""The first schema whose lines have checksums."""


@dataclass(kw_only=True)
class Verdict:
    """What ``verify`` found. damaged: how often a line is not as it was written; damage: (line, what) of the
    first MOST_DAMAGE; rows: of cells; others: rows of other commands, by command; missing: planned cells
    without a row, those of ring by their number; unsealed: lines from before there were checksums; torn: the
    last line broke off in a write, which loses nothing that was finished."""

    path: Path
    schema: int | None = None
    rows: int = 0
    others: Counter[str] = field(default_factory=Counter)
    missing: int = 0
    unsealed: int = 0
    torn: bool = False
    damaged: int = 0
    damage: list[tuple[int, str]] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        """Whether every whole line is as it was written, as far as that can be told."""
        return not self.damaged

    def tell(self, number: int, what: str) -> None:
        """Count something that is wrong with a line; there may be millions, of which the first are kept."""
        self.damaged += 1
        if self.damaged <= MOST_DAMAGE:
            self.damage.append((number, what))


def verify(path: Path, source: Iterable[tuple[bytes, bool]], newest: int) -> Verdict:
    """Look at every line, each of which is let go of before the next. source: as of lines.each. newest: the
    newest schema that is read."""
    found = Verdict(path=path)
    keys = set[str]()
    planned, others, number = list[Any](), 0, 0
    for number, (line, whole) in enumerate(source, start=1):
        if not whole:
            found.torn, number = True, number - 1
            break
        try:
            value = lines.parse(line)
            if number == 1:
                found.schema, planned = _head(value, newest)
                others = count if type(count := value.get("planned")) is int else 0
            elif value.get("type") not in AFTER:
                record = record_from_json(value)
                for said in _row(value, record.cell.key, keys):
                    found.tell(number, said)
                keys.add(record.cell.key)
            elif value["type"] in OTHERS:
                found.others[OTHERS[value["type"]]] += 1
        except (ValueError, RunFileError) as error:
            found.tell(number, str(error))
            continue
        sealed = lines.intact(line)
        if sealed is None and (found.schema or 0) < SEALED:
            found.unsealed += 1
        elif not sealed:
            found.tell(number, lines.flaw(line))
    if not number:
        found.tell(1, "no complete line; a results file begins with a header")
        return found
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
