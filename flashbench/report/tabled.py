"""Tables that the page, Markdown and a terminal show alike: what a section of tables is made of.

Texts are plain here; each form escapes by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from flashbench import fitted
from flashbench.report import words
from flashbench.report.html import row_of, status
from flashbench.report.html import table as html_table

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.report.sections import Section


@dataclass(frozen=True, kw_only=True)
class Mark:
    """A status word, and why; the page shows the reason as a tooltip."""

    status: str
    reason: str | None = None

    @property
    def text(self) -> str:
        """The word, and the reason if there is one."""
        return f"{self.status}: {self.reason}" if self.reason else self.status

    @property
    def html(self) -> str:
        """The word as the page marks it."""
        return status(self.status, self.reason)


@dataclass(frozen=True, kw_only=True)
class Aside:
    """A text, and what follows it in smaller letters."""

    first: str
    rest: str

    @property
    def text(self) -> str:
        """The rest in brackets."""
        return f"{self.first} ({self.rest})"

    @property
    def html(self) -> str:
        """The rest in brackets, small."""
        return f"{escape(self.first)} <small>({escape(self.rest)})</small>"


Cell = str | Mark | Aside


@dataclass(frozen=True, kw_only=True)
class Tabled:
    """One table. texts: so many columns are words, the others numbers; note: a sentence below."""

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    texts: int = 2
    note: str = ""


def mark(item: dict[str, Any]) -> Mark:
    """The status of a row."""
    reason = item["reason"]
    return Mark(status=str(item["status"]), reason=str(reason) if words.known(reason) and reason else None)


def values(item: dict[str, Any], shown: Iterable[tuple[str, Callable[[Any], str]]]) -> list[Cell]:
    """The texts of a row's fields, a dash for what is not known."""
    return [show(item[name]) if words.known(item[name]) else "–" for name, show in shown]


def page(section: Section, frame: DataFrame) -> str:
    """The body of a section that has tables."""
    assert section.tables is not None, section.key
    return "".join(map(_html, section.tables(frame)))


def _html(one: Tabled) -> str:
    lines = [row_of(escape(cell) if isinstance(cell, str) else cell.html for cell in row) for row in one.rows]
    note = f'<p class="about">{escape(one.note)}</p>' if one.note else ""
    return f"<h3>{escape(one.title)}</h3>{html_table(one.head, lines)}{note}"


def _text(cell: Cell) -> str:
    return cell if isinstance(cell, str) else cell.text


def markdown(one: Tabled) -> Iterator[str]:
    """Lines of GitHub's Markdown, safe as HTML."""
    yield from (f"#### {safe(one.title)}", "", pipes(map(safe, one.head)))
    yield pipes(["---"] * one.texts + ["--:"] * (len(one.head) - one.texts))
    for row in one.rows:
        yield pipes(safe(_text(cell)) for cell in row)
    yield from ("", safe(one.note)) if one.note else ()


def safe(text: str) -> str:
    """Text as a line of Markdown that is safe as HTML."""
    return escape(_flat(text), quote=False)


def pipes(cells: Iterable[str]) -> str:
    """A row of a Markdown table, of cells that are HTML already."""
    return "| " + " | ".join(_flat(cell).replace("|", "\\|") for cell in cells) + " |"


def _flat(text: str) -> str:
    return " ".join(text.splitlines())


def terminal(one: Tabled, width: int) -> Iterator[str]:
    """Plain lines of at most ``width`` columns; rows take several where a table is wider."""
    rows = [[_flat(_text(cell)) for cell in row] for row in one.rows]
    numeric = [at >= one.texts for at in range(len(one.head))]
    yield from fitted.wrapped(one.title, width)
    yield from fitted.lines(one.head, rows, numeric, room=width)
    yield from fitted.wrapped(one.note, width)
