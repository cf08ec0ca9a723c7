"""Tables that the page's script draws from data: sorted, searched, copied and saved there.

A row of HTML per cell of 5,000 would make the page ten times as long: each text stands here once.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

Text = str | tuple[str, str, str]
"""A text, or a text with the classes and the tooltip of its mark. Plain: the script escapes by itself."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column. name: in saved files; title: above it; texts: a row each; values: numbers to sort by.

    printed: whether it is on paper as well, which is narrower.
    """

    name: str
    title: str
    texts: Sequence[Text]
    values: Sequence[float | None] | None = None
    wide: bool = False
    printed: bool = True


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Columns of equal length. where: the selection that each row belongs to. tools: search, copy, save.

    noun: what a row is, in the count of those that are shown; example: of what can be searched for.
    """

    key: str
    label: str
    columns: Sequence[Column]
    where: Sequence[Mapping[str, str]] = field(default=())
    tools: bool = False
    noun: str = "row"
    example: str = ""


def html(grid: Grid) -> str:
    """The place of the table and its data. label: what the table holds, for a screen reader."""
    texts: dict[Text, int] = {"": 0}
    wheres: dict[str, int] = {}
    columns = [[texts.setdefault(text, len(texts)) for text in column.texts] for column in grid.columns]
    where = [wheres.setdefault(json.dumps(one), len(wheres)) for one in grid.where]
    content = {
        "label": grid.label, "noun": grid.noun, "example": grid.example, "tools": grid.tools,
        "head": [
            {"name": one.name, "title": one.title, "kind": _kind(one), "number": one.values is not None}
            for one in grid.columns
        ],
        "texts": list(texts), "columns": columns,
        "values": [None if one.values is None else _packed(one.values) for one in grid.columns],
        "wheres": list(map(json.loads, wheres)), "where": where,
    }  # fmt: skip
    data = safe(json.dumps(content, allow_nan=False, ensure_ascii=False, separators=(",", ":")))
    return (
        f'<div class="grid" id="{escape(grid.key, quote=True)}"><script type="application/json"'
        f' class="grid-data">{data}</script></div>'
    )


def _kind(column: Column) -> str:
    return " ".join(["reason"] * column.wide + ["screen"] * (not column.printed))


LONG = 2000
"""Rows from which on numbers that repeat stand once."""


def _packed(values: Sequence[float | None]) -> Any:
    """The numbers; of a long column each once (``of``), and the place of each row's (``at``)."""
    found = list(map(_short, values))
    once: dict[Any, int] = {}
    at = [once.setdefault(value, len(once)) for value in found]
    return {"of": list(once), "at": at} if len(found) > LONG and 2 * len(once) < len(found) else found


def safe(text: str) -> str:
    """JSON that cannot end the script element that holds it."""
    return text.replace("<", "\\u003c").replace("&", "\\u0026")


def _short(value: Any) -> float | int | None:
    if value is None or value != value:
        return None
    return int(value) if float(value).is_integer() else float(f"{value:.7g}")
