"""The page of ``kv-cache --html``: bytes on each card, what fits, the bound on a decode step, by length.

    kv_page.build(rows, columns, table, command="flashbench kv-cache …", notes=["…"])

Data (``lines``) → figure (``io_figures.draw``) → page.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, Any

from flashbench.report import words
from flashbench.report.figures import length_ticks
from flashbench.report.html import row_of, table
from flashbench.report.io_figures import Chart, Line, draw, symbol
from flashbench.report.page import radios
from flashbench.report.parts import Part, document, figure, grid
from flashbench.units import format_length

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.kvcache import CacheEstimate

TITLES = {"dtype": "Dtype", "gpu": "Card"}
"""The choices of the control bar."""
NO_CARD = "none"
SCREEN = {
    "attention", "layers", "num_heads", "num_kv_heads", "head_dim", "head_dim_v", "latent_dim", "rope_dim",
    "window", "windowed_layers", "total_bytes", "total_gib", "window_saved_bytes", "page_size", "pages",
    "page_bytes", "batch", "tp", "cp", "weights_bytes", "decode_read_bytes", "decode_flops",
    "decode_link_bytes", "decode_link_s",
}  # fmt: skip
"""Columns of the table of all rows that paper has no room for."""


def build(
    rows: Sequence[CacheEstimate], columns: Sequence[Column], cells: Sequence[Mapping[str, Any]], *,
    command: str, notes: Iterable[str] = (),
) -> str:  # fmt: skip
    """The page as text. columns, cells: the table as the terminal would show it, with raw values."""
    said = "".join(f"<li>{escape(text)}</li>" for text in notes)
    parts = (
        Part(
            key="summary", title="At a glance", body=_summary(rows),
            about="Per model, card and dtype, at the longest length; computed, not measured.",
        ),
        Part(
            key="length", title="Cache against length", body=_drawn("length", "bytes on each card", rows),
            about="What the batch takes on each card, in whole pages. Dashed: the room that the card has for"
            " it beside the weights.",
        ),
        Part(
            key="fits", title="Sequences that fit", body=_drawn("fits", "sequences that fit", rows),
            about="Whole sequences of that length in the room of the cards.",
        ),
        Part(
            key="decode", title="Decode step", body=_drawn("decode", "time of a step, at least", rows),
            about="The least time of one token for every sequence, its attention alone: bytes of the cache"
            " over the card's bandwidth or FLOPs over its dense peak, whichever is larger.",
        ),
        Part(
            key="models", title="Models", body=_models(rows),
            about="What one token adds in all layers while no window is full, and where the dims are from.",
        ),
        Part(
            key="cells", title="All rows", about="Saved files hold bytes and seconds.",
            body=grid("cells-table", "All rows", columns, cells, SCREEN),
        ),
        Part(key="notes", title="How it is counted", about="", body=f"<ul>{said}</ul>" if said else ""),
    )  # fmt: skip
    models = ", ".join(dict.fromkeys(row.preset.name for row in rows))
    return document(parts, title=f"KV cache of {models}", command=command, controls=_controls(rows))


SHOWN: Mapping[str, tuple[Callable[[CacheEstimate], Any], Callable[[float], str]]] = {
    "length": (lambda row: row.card_bytes, words.bytes_text),
    "fits": (lambda row: row.sequences, "{:,.0f} sequences".format),
    "decode": (lambda row: row.decode_s, words.seconds),
}
"""What each figure draws of a row, and how a value reads. Nothing without a card but the first."""
TICKS = {"length": words.bytes_tick, "fits": "{:,.0f}".format, "decode": words.seconds_tick}


def _summary(rows: Sequence[CacheEstimate]) -> str:
    """A sentence per model and selection: what the batch takes, what fits, how fast a step can be."""
    groups: dict[tuple[str, ...], CacheEstimate] = {}
    for row in rows:
        key = (row.preset.name, *where_of(row).values())
        if key not in groups or row.seqlen > groups[key].seqlen:
            groups[key] = row
    items = [f"<li>{_sentence(row)}</li>" for row in groups.values()]
    return f'<ul class="regimes">{"".join(items)}</ul>' if items else ""


def _sentence(row: CacheEstimate) -> str:
    card, how = row.serving.device, row.serving
    place = [row.preset.name, row.dtype, *([card.name] if card else [])]
    text = (
        f"<b>{escape(', '.join(place))}</b>: <em>{row.token_bytes:,} B</em> a token; {row.batch}"
        f" sequence{'s' if row.batch > 1 else ''} of {format_length(row.seqlen)} tokens"
        f" take{'' if row.batch > 1 else 's'} {words.bytes_text(row.total_bytes)}"
    )
    if card is None:
        return text + "."
    cards = how.tp * how.cp
    text += f", {words.bytes_text(row.card_bytes)} on each of {cards} cards" if cards > 1 else ""
    if row.room_bytes is not None and row.room_bytes <= 0:
        return text + "; the weights alone leave no room for a cache."
    if row.sequences is not None:
        fit = "no such sequence fits" if row.sequences < 1 else f"at most {row.sequences:,} of them fit"
        text += f"; <em>{fit}</em> beside the weights"
    if row.decode_s is not None:
        text += f"; a decode step takes at least <em>{words.seconds(row.decode_s)}</em> (limit: {row.limit})"
    return text + "."


def where_of(row: CacheEstimate) -> dict[str, str]:
    """The selection at which a row is shown."""
    return {"dtype": row.dtype, "gpu": row.serving.device.name if row.serving.device else NO_CARD}


def lines(key: str, rows: Sequence[CacheEstimate]) -> list[Line]:
    """A line per model and selection over the length; with a card, its room beside the bytes, dashed."""
    value, text = SHOWN[key]
    names = list(dict.fromkeys(row.preset.name for row in rows))
    groups: dict[tuple[str, ...], list[CacheEstimate]] = {}
    for row in rows:
        groups.setdefault((row.preset.name, *where_of(row).values()), []).append(row)
    found = []
    for (name, *_), mine in groups.items():
        slot, x = names.index(name) % 8 + 1, [row.seqlen for row in mine]
        y = [float(value(row)) if value(row) else None for row in mine]  # none on a log axis
        where = where_of(mine[0])
        if any(one is not None for one in y):
            notes = [
                text(value(row)) + (f", limited by {row.limit}" if key == "decode" else "")
                if value(row) is not None else "" for row in mine
            ]  # fmt: skip
            found.append(Line(where=where, name=name, x=x, y=y, notes=notes, slot=slot, symbol=symbol(slot)))
        room = mine[0].room_bytes
        if key == "length" and room is not None and room > 0:
            found.append(Line(
                where=where, name=f"{name}, room", group=name, x=x, y=[float(room)] * len(x), slot=slot,
                notes=[f"{words.bytes_text(room)} of room"] * len(x), dash="dash", legend=False,
            ))  # fmt: skip
    return found


def _drawn(key: str, title: str, rows: Sequence[CacheEstimate]) -> str:
    found = lines(key, rows)
    if not found:
        return ""
    ticks = length_ticks(row.seqlen for row in rows)
    wheres = {tuple(line.where.items()): line.where for line in found}.values()
    how = rows[0].serving
    batch = f"batch {rows[0].batch}, {how.tp} card{'s' if how.tp > 1 else ''}"
    chart = Chart(
        x_title="tokens per sequence", y_title=title, x_ticks={tick: format_length(tick) for tick in ticks},
        y_tick=TICKS[key], captions=[(where, _caption(where, batch)) for where in wheres],
    )  # fmt: skip
    return figure(key, f"{title} over the tokens per sequence", draw(chart, found))


def _caption(where: Mapping[str, str], batch: str) -> str:
    card = where["gpu"]
    return ", ".join([where["dtype"], *([card] if card != NO_CARD else []), batch])


def _models(rows: Sequence[CacheEstimate]) -> str:
    tokens: dict[str, dict[str, int]] = {}
    for row in rows:
        tokens.setdefault(row.preset.name, {})[row.dtype] = row.token_bytes
    body = []
    for name, by_dtype in tokens.items():
        one = next(row.preset for row in rows if row.preset.name == name)
        said = ", ".join(f"{count:,} B ({dtype})" for dtype, count in by_dtype.items())
        about = "; ".join(filter(None, [one.source, one.uncertain]))
        cells = (one.name, one.kind or "–", str(one.layers), said, about)
        body.append(row_of(map(escape, cells)))
    return table(["model", "kind", "layers", "per token", "source"], body, ' class="texts"')


def _controls(rows: Sequence[CacheEstimate]) -> str:
    parts = []
    for key, title in TITLES.items():
        values = list(dict.fromkeys(where_of(row)[key] for row in rows))
        parts.append(radios(key, title, values, values[0], {}))
    return "".join(parts)
