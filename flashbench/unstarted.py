"""Cells that a run never began, its time budget being spent, its device lost or the run itself stopped: how
many, which, and why, in words.

Whatever is made from rows says so beside what it shows: a length that is missing is not one that has no
result.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from flashbench import runfile
from flashbench.units import format_length

Row = Mapping[str, Any]

MOST = 8
"""So many lengths or names are listed; of more the first and the last."""

NOT_REACHED = "not reached by the run"
"""The reason of a cell that was planned and has no row: the run was stopped before it, or is at work."""


def is_one(row: Row) -> bool:
    """Whether a row is of a cell that was not begun, and has no result for no reason of its own."""
    if row.get("status") != "skipped":
        return False
    reason = row.get("reason")
    return isinstance(reason, str) and reason.startswith((*runfile.NOT_STARTED, NOT_REACHED))


def unreached(header: Mapping[str, Any], rows: Iterable[Row]) -> list[dict[str, Any]]:
    """A row for each planned cell that none of a file's rows (with their ``key``) is of, as one that was not
    begun. Not of cells that would be refused, by all that the file has of their like.
    """
    known, refused = set[Any](), dict[tuple[Any, ...], bool]()
    for row in rows:
        known.add(row.get("key"))
        refused[_like(row)] = refused.get(_like(row), True) and row.get("status") == "unsupported"
    keys = dict.fromkeys(key for key in header.get("cells") or () if isinstance(key, str))
    found = (cell for key in keys if key not in known and (cell := _planned(key)))
    return [cell for cell in found if not refused.get(_like(cell), False)]


def _like(row: Row) -> tuple[Any, ...]:
    """What decides whether a cell is refused, as far as it is told from length to length."""
    return tuple(row.get(name) for name in ("implementation", "pass", "dtype", "head_dim", "causal"))


def _planned(key: str) -> dict[str, Any] | None:
    """The fields of a row that a cell's key tells, None where it is none."""
    if not (found := _KEY.fullmatch(key)):
        return None
    sizes = {name: int(text) for name in _SIZES if (text := found[name])}
    alike = {more: sizes[name] for name, more in _ALIKE.items() if more not in sizes}
    return {
        "key": key, "implementation": found["implementation"], "pass": found["passes"], **sizes, **alike,
        "dtype": found["dtype"], "causal": found["mask"] == "causal", "options": found["options"] or None,
        "status": "skipped", "reason": NOT_REACHED,
    }  # fmt: skip


def lines(rows: Iterable[Row]) -> list[str]:
    """A text per reason: "32 of 112 cells were not begun: causal, at 8k and 16k; time budget of 50s spent".

    It names what tells these cells from the rest; lengths, always.
    """
    rows = list(rows)
    found: dict[str, list[Row]] = {}
    for row in filter(is_one, rows):
        found.setdefault(row["reason"], []).append(row)
    return [f"{_count(len(some), len(rows))}: {which(some, rows)}; {why}" for why, some in found.items()]


def _count(some: int, of: int) -> str:
    if some == of:
        return "the only cell was not begun" if of == 1 else f"none of {of} cells was begun"
    return f"{some} of {of} cells {'was' if some == 1 else 'were'} not begun"


def which(some: Sequence[Row], rows: Sequence[Row]) -> str:
    """What the cells have that not all rows have, and their lengths: "causal, at 8k and 16k"."""
    said = [text for name, word in _WORDS.items() if (text := _only(name, word, some, rows))]
    lengths = sorted({length for row in some if (length := _length(row)) is not None})
    if lengths:
        named = list(map(format_length, lengths))
        said.append(f"at {_list(named)}" if len(named) <= MOST else f"at {named[0]} to {named[-1]}")
    return ", ".join(said) or "all alike"


def _only(name: str, word: Callable[[Any], str], some: Sequence[Row], rows: Sequence[Row]) -> str:
    """The values of a field that the cells have, if others have other ones and these are not too many."""
    mine = list(dict.fromkeys(row[name] for row in some if row.get(name) is not None))
    every = {row[name] for row in rows if row.get(name) is not None}
    return _list(list(map(word, mine))) if set(mine) < every and len(mine) <= MOST else ""


def _length(row: Row) -> int | None:
    """Keys, or tokens of a layer: whichever the row has."""
    for name in _LENGTHS:
        if isinstance(length := row.get(name), int):
            return length
    return None


def _list(parts: Sequence[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]


_WORDS: Mapping[str, Callable[[Any], str]] = {
    "implementation": str, "model": str, "pass": str, "mode": str, "dtype": str, "head_dim": "d{}".format,
    "causal": lambda value: "causal" if value else "without a mask",
}  # fmt: skip
"""What tells cells apart, and how it reads."""

_KEY = re.compile(
    r"(?P<implementation>.+?) (?P<passes>fwd|bwd|fwd\+bwd) b(?P<batch>\d{1,9})"
    r" h(?P<num_heads>\d{1,9})(?:/(?P<num_kv_heads>\d{1,9}))?"
    r" n(?P<seqlen_q>\d{1,9})(?:x(?P<seqlen_k>\d{1,9}))?"
    r" d(?P<head_dim>\d{1,9})(?:/(?P<head_dim_v>\d{1,9}))?"
    r" (?P<dtype>\S+) (?P<mask>causal|full)(?: (?P<options>.+))?"
)
"""Of ``problem.Cell.key``; sizes that are the same twice stand there once."""
_ALIKE = {"num_heads": "num_kv_heads", "seqlen_q": "seqlen_k", "head_dim": "head_dim_v"}
_SIZES = ("batch", *_ALIKE, *_ALIKE.values())

_LENGTHS = ("seqlen_k", "kv_len", "seqlen")

TELLS = (*_WORDS, *_LENGTHS)
"""The fields that ``lines`` looks at, beside status and reason."""
