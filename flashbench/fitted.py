"""Tables on a terminal that is narrower than they are: numbers stay whole, and words are not taken apart.

    plan(headers, rows, numeric, room=80)

First texts wrap between words. Where that is not enough, what is the same in every row is told once above the
table; where that is not enough either, a row takes several lines, as its heading does.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

EDGES, BETWEEN = 2, 3
"""Columns that rich's table takes around and between its columns."""
GAP, INDENT = 2, 2
"""Between columns of a row of several lines, and before its second line."""
TEXT = 24
"""A text is not made narrower than this."""

Rows = Sequence[Sequence[str]]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a table is shown. columns: those that are left; same: what all rows have in common, told above;
    widths: of each column, for a line a row (None as wide as they are); lines: else its columns line by line.
    """

    columns: tuple[int, ...]
    same: str = ""
    widths: tuple[int, ...] | None = None
    lines: tuple[tuple[int, ...], ...] = ()


def plan(headers: Sequence[str], rows: Rows, numeric: Sequence[bool], *, room: int) -> Plan:
    """How a table is shown in ``room`` columns. numeric: columns whose cells stay whole."""
    everything = tuple(range(len(headers)))
    natural = [max(map(_width, [headers[at], *(row[at] for row in rows)])) for at in everything]
    if _taken(natural) <= room:
        return Plan(columns=everything)
    least = [_least(at, headers, rows, numeric, natural) for at in everything]
    if _taken(least) <= room:
        return Plan(columns=everything, widths=_shared(least, natural, room))
    columns, same = _without_same(headers, rows)
    few, most = [least[at] for at in columns], [natural[at] for at in columns]
    if _taken(few) <= room:
        return Plan(columns=columns, same=same, widths=_shared(few, most, room))
    return Plan(columns=columns, same=same, lines=_placed(columns, natural, room))


def flowed(
    headers: Sequence[str], rows: Rows, numeric: Sequence[bool], found: Plan, *, room: int, rule: str = "─"
) -> tuple[list[str], list[str]]:
    """The lines of a table whose rows take several: those of its heading with a rule, those of its rows."""
    natural = [max(map(_width, [headers[at], *(row[at] for row in rows)])) for at in range(len(headers))]
    head, *body = (_flat(row, found, natural, numeric, room) for row in [headers, *rows])
    widest = max(_width(line) for line in [*head, *chain.from_iterable(body)])
    return [*head, rule * widest], list(chain.from_iterable(body))


def lines(headers: Sequence[str], rows: Rows, numeric: Sequence[bool], *, room: int) -> list[str]:
    """A table as plain lines, without rich: a line a row, or several where it is wider than ``room``."""
    columns, same = tuple(range(len(headers))), ""
    natural = [max(map(_width, [headers[at], *(row[at] for row in rows)])) for at in columns]
    if sum(natural) + GAP * (len(natural) - 1) > room:
        columns, same = _without_same(headers, rows)
    found = Plan(columns=columns, same=same, lines=_placed(columns, natural, room))
    head, body = flowed(headers, rows, numeric, found, room=room)
    return [*wrapped(same and f"in all rows: {same}", room), *head, *body]


def wrapped(text: str, room: int) -> list[str]:
    """The lines of a text, which stays whole where it is of one."""
    return textwrap.wrap(text, max(1, room)) if _width(text) > room else [text] if text else []


def _flat(
    row: Sequence[str], found: Plan, natural: Sequence[int], numeric: Sequence[bool], room: int
) -> list[str]:
    """A row; a further line that holds nothing is left out."""
    return [
        line
        for number, columns in enumerate(found.lines)
        if not number or any(row[at] not in ("-", "") for at in columns)
        for line in _line(row, columns, natural, numeric, INDENT if number else 0, room)
    ]


def _line(
    row: Sequence[str], columns: Sequence[int], natural: Sequence[int], numeric: Sequence[bool], indent: int,
    room: int,
) -> list[str]:  # fmt: skip
    """The cells of a row that stand beside each other; a long text wraps."""
    widths = [min(natural[at], room - indent) for at in columns]
    wrapped = [
        textwrap.wrap(row[at], width) or [""] if _width(row[at]) > width else [row[at]]
        for at, width in zip(columns, widths, strict=True)
    ]
    lines = []
    for part in range(max(map(len, wrapped))):
        texts = [cell[part] if part < len(cell) else "" for cell in wrapped]
        cells = [
            _blank(width - _width(text)) + text if numeric[at] else text + _blank(width - _width(text))
            for at, text, width in zip(columns, texts, widths, strict=True)
        ]
        lines.append((_blank(indent) + _blank(GAP).join(cells)).rstrip())
    return lines


def _blank(count: int) -> str:
    return " " * max(0, count)


def _width(text: str) -> int:
    from rich.cells import cell_len

    return max(map(cell_len, text.splitlines()), default=0)


def _taken(widths: Sequence[int]) -> int:
    return sum(widths) + BETWEEN * max(0, len(widths) - 1) + EDGES


def _least(
    at: int, headers: Sequence[str], rows: Rows, numeric: Sequence[bool], natural: Sequence[int]
) -> int:
    """How narrow a column can be: its numbers whole, its heading's words whole, a text no less than TEXT."""
    if not numeric[at]:
        return min(natural[at], TEXT)
    words = max(map(_width, headers[at].split()), default=0)
    return max([words, *(_width(row[at]) for row in rows)])


def _shared(least: Sequence[int], natural: Sequence[int], room: int) -> tuple[int, ...]:
    """The room that is left goes to the columns that lack most."""
    widths = list(least)
    for _ in range(room - _taken(widths)):
        lacking = [want - has for want, has in zip(natural, widths, strict=True)]
        widths[lacking.index(max(lacking))] += 1
    return tuple(widths)


def _without_same(headers: Sequence[str], rows: Rows) -> tuple[tuple[int, ...], str]:
    """The columns that tell rows apart, and what the others hold."""
    columns = tuple(range(len(headers)))
    if len(rows) < 2:
        return columns, ""
    same = [at for at in columns if len({row[at] for row in rows}) == 1]
    left = tuple(at for at in columns if at not in same) or columns[:1]
    told = ", ".join(f"{headers[at]} {rows[0][at]}" for at in same if at not in left and rows[0][at] != "-")
    return left, told


def _placed(columns: Sequence[int], natural: Sequence[int], room: int) -> tuple[tuple[int, ...], ...]:
    """The columns line by line, in their order."""
    lines: list[list[int]] = []
    used = room
    for at in columns:
        if not lines or used + GAP + natural[at] > room:
            lines.append([])
            used = INDENT * (len(lines) > 1) - GAP
        lines[-1].append(at)
        used += GAP + natural[at]
    return tuple(map(tuple, lines))
