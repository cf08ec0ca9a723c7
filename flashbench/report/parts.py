"""Pages of parts in the report's design: the model's, a plan's of a cache, a history's."""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from flashbench.report.figures import Figure
from flashbench.report.grid import Column, Grid
from flashbench.report.grid import html as grid_html
from flashbench.report.page import heading, script_json, shell

if TYPE_CHECKING:
    from flashbench.console import Column as Shown


@dataclass(frozen=True, kw_only=True)
class Part:
    """A section of the page: its anchor, title, what it shows (plain text) and its body (HTML)."""

    key: str
    title: str
    about: str
    body: str


def document(parts: Iterable[Part], *, title: str, command: str, controls: str = "") -> str:
    """The page of the parts that have a body. command: what made it, shown at the top."""
    shown = [part for part in parts if part.body]
    bodies = [
        f'<section id="{part.key}">{heading(part.key, part.title)}'
        f'<p class="about">{escape(part.about)}</p>{part.body}</section>'
        for part in shown
    ]
    return shell(
        title=title,
        commands=f"<p><code>{escape(command)}</code></p>" if command else "",
        contents={part.key: part.title for part in shown},
        controls=controls,
        bodies=bodies,
    )


def figure(key: str, label: str, drawn: Figure) -> str:
    """A figure, its text alternative (plain text) and its numbers as a table."""
    text = escape(f"{label}. The same numbers stand in the table.", quote=True)
    return (
        f'<figure><figcaption class="selection"></figcaption>'
        f'<div class="plot" id="plot-{key}" role="group" aria-label="{text}"></div>'
        f'<script type="application/json" class="plot-data" data-for="plot-{key}">'
        f"{script_json(drawn)}</script>"
        f'<details class="numbers"><summary>Numbers</summary></details></figure>'
    )


def grid(
    key: str, label: str, columns: Sequence[Shown], rows: Sequence[Mapping[str, Any]],
    screen: Container[str] = (),
) -> str:  # fmt: skip
    """A table that the terminal shows as well: a column without any value is left out.

    screen: columns that paper has no room for.
    """
    found = []
    for one in columns:
        values = [row.get(one.name) for row in rows]
        known = [value for value in values if value is not None]
        if not known:
            continue
        number = all(isinstance(value, int | float) and not isinstance(value, bool) for value in known)
        found.append(Column(
            name=one.name, title=one.header, values=values if number else None,
            texts=["" if value is None else one.format(value) for value in values],
            printed=one.name not in screen,
        ))  # fmt: skip
    return grid_html(Grid(key=key, label=label, columns=found, tools=True)) if found else ""
