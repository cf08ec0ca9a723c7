"""The markup that sections share: table rows, tables, status words."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from html import escape


def row_of(cells: Iterable[str], where: Mapping[str, str] | None = None) -> str:
    """A table row of cells that are HTML already; ``where``: the selection at which it is shown."""
    return f"<tr{_shown_at(where)}>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _shown_at(where: Mapping[str, str] | None) -> str:
    return f' data-where="{escape(json.dumps(where), quote=True)}"' if where is not None else ""


def table(head: Iterable[str], rows: Iterable[str], attributes: str = "") -> str:
    """A table that scrolls by itself where the page is narrow; head: plain text."""
    columns = "".join(f'<th scope="col">{escape(title)}</th>' for title in head)
    return (
        f'<div class="scroll" tabindex="0"><table{attributes}><thead><tr>{columns}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>"
    )


def status(name: str, reason: str | None = None) -> str:
    """A status word, with its reason as a tooltip."""
    title = f' title="{escape(reason, quote=True)}"' if reason else ""
    return f'<span class="status {escape(name, quote=True)}"{title}>{escape(name)}</span>'
