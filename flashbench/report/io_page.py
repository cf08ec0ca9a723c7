"""The model's page: bytes by level over length, memory and block size, roofline, crossovers, cards.

    io_page.build(whatif.study(problems, passes, models, devices), command="flashbench io-model …")

One self-contained file in the report's design: the same style, script and control bar.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from flashbench.report import io_data as data
from flashbench.report import tensors, words
from flashbench.report.figures import length_ticks, value_ticks
from flashbench.report.grid import Column, Grid
from flashbench.report.grid import html as grid_html
from flashbench.report.html import row_of, table
from flashbench.report.io_figures import Chart, Line, draw
from flashbench.report.page import radios
from flashbench.report.parts import Part, document, figure
from flashbench.units import format_length

if TYPE_CHECKING:
    from flashbench.whatif import IoRow, Study


def build(study: Study, *, command: str = "") -> str:
    """The page as text: opens offline from disk. command: what made it, shown at the top."""
    cards = " and ".join(card.name for card in study.devices)
    title = "Attention in the model" + (f" of {cards}" if cards else "")
    return document(_parts(study), title=title, command=command, controls=_controls(study))


def _parts(study: Study) -> Iterable[Part]:
    levels = data.level_lines(study)
    yield Part(
        key="summary", title="What the model says", body=_summary(study),
        about="Requested: what kernels load and store between SM and L2. DRAM: what of it the L2 does not"
        " hold, a value with a band. Compulsory: each tensor once. All of it is predicted, nothing measured.",
    )  # fmt: skip
    yield Part(
        key="length", title="Bytes against length", body=_figure("length", _lengths(levels, study), levels),
        about="Solid: requested, with the tiles that the published code ships (flash-v1: those that the"
        " on-chip memory gives). Dashed: DRAM, with a card. Dotted: compulsory.",
    )  # fmt: skip
    memory = data.sram_lines(study)
    yield Part(
        key="memory", title="Bytes against on-chip memory", body=_figure("memory", _memory(memory), memory),
        about="Requested bytes with the tiles that M gives (flash-v1: block_k = M/4d, flash-v2: block_q ="
        " M/2d); KiB = 1024 bytes. Hollow: the tile does not fit. Dotted: min(N²d²/M, N²d/√M), which no exact"
        " algorithm undercuts but for a constant.",
    )  # fmt: skip
    blocks = data.block_lines(study)
    yield Part(
        key="block", title="Bytes against block size", body=_figure("block", _blocks(blocks), blocks),
        about="Requested bytes with square tiles of so many rows of Q and of K/V in every kernel.",
    )  # fmt: skip
    yield Part(
        key="tensors", title="Bytes by tensor", body=_tensors(study),
        about="What of the requested bytes is of which tensor, in all kernels of the pass, at the length that"
        " is chosen at the top.",
    )  # fmt: skip
    times = data.time_lines(study)
    yield Part(
        key="time", title="Time against length", body=_figure("time", _times(times, study), times),
        about="Predicted time of one pass, a dash per card; hover for what limits it.",
    )  # fmt: skip
    points, roofs = data.roof_lines(study)
    yield Part(
        key="roofline", title="Roofline", body=_figure("roofline", _roofline(points, roofs), points),
        about="Nominal FLOP/s in the predicted time over FLOPs per byte: filled points by bytes from DRAM"
        " under the solid roof, hollow points by requested bytes under the dashed roof of the L2.",
    )  # fmt: skip
    yield Part(
        key="crossovers", title="Crossovers", body=_crossovers(study),
        about="The least on-chip memory with which flash requests fewer bytes than standard in a forward,"
        " found by bisection in the exact model; 3d² and d² are its limits for long sequences without mask,"
        " window and dropout, with as many queries as keys, in elements.",
    )  # fmt: skip
    yield Part(
        key="cards", title="Cards side by side", body=_cards(study),
        about="Predicted time of the same pass on each card, what limits it, and its speed to the first's.",
    )  # fmt: skip
    yield Part(
        key="assumptions", title="Assumptions and sources", body=_assumptions(study),
        about="What each count takes for granted, and where the numbers of the cards come from.",
    )  # fmt: skip


def _controls(study: Study) -> str:
    """A group of radio buttons per choice; a choice of one is a hidden field."""
    values: dict[str, dict[str, None]] = {key: {} for key in data.TITLES}
    for row in study.by_length:
        where = data.panel(row) | ({"gpu": row.device.name} if row.device else {})
        for key, value in where.items():
            values[key][value] = None
    lengths = data.shown_lengths([*study.by_sram, *study.by_block])
    values["length"] = {format_length(length): None for length in lengths}
    middle = max((length for length in lengths if length <= 8192), default=lengths[0] if lengths else 0)
    parts = []
    for key, title in data.TITLES.items():
        names = list(values[key])
        chosen = format_length(middle) if key == "length" else next(iter(names), "")
        parts.append(radios(key, title, names or [chosen], chosen, data.NAMES))
    return "".join(parts)


def _figure(key: str, chart: Chart | None, lines: Sequence[Line]) -> str:
    """A figure, its text alternative and its numbers as a table; nothing where there are no lines."""
    if chart is None or not lines:
        return ""
    return figure(key, f"{chart.y_title} over {chart.x_title}", draw(chart, lines))


def _captions(lines: Iterable[Line]) -> list[tuple[Mapping[str, str], str]]:
    found = {tuple(line.where.items()): line.where for line in lines}
    return [(where, data.caption(where)) for where in found.values()]


def _length_axis(study: Study) -> dict[float, str]:
    ticks = length_ticks(data.length_of(row) for row in study.by_length)
    return {tick: format_length(tick) for tick in ticks}


def _lengths(lines: Sequence[Line], study: Study) -> Chart:
    return Chart(
        x_title="sequence length (keys)", y_title="bytes of one pass (GB = 1e9)", x_ticks=_length_axis(study),
        y_tick=words.bytes_tick, captions=_captions(lines),
    )  # fmt: skip


def _memory(lines: Sequence[Line]) -> Chart:
    sizes = sorted({int(x) for line in lines for x in line.x})
    ticks = length_ticks(size for size in sizes if size & (size - 1) == 0) if sizes else []
    return Chart(
        x_title="on-chip memory M per SM (KiB)", y_title="requested bytes (GB = 1e9)",
        x_ticks={tick: f"{tick / 1024:g}" for tick in ticks or sizes}, y_tick=words.bytes_tick,
        captions=_captions(lines),
    )  # fmt: skip


def _blocks(lines: Sequence[Line]) -> Chart:
    rows = length_ticks((int(x) for line in lines for x in line.x), most=9)
    return Chart(
        x_title="rows of a square tile", y_title="requested bytes (GB = 1e9)",
        x_ticks={row: str(row) for row in rows}, y_tick=words.bytes_tick, captions=_captions(lines),
    )  # fmt: skip


def _times(lines: Sequence[Line], study: Study) -> Chart:
    return Chart(
        x_title="sequence length (keys)", y_title="predicted time of one pass", x_ticks=_length_axis(study),
        y_tick=words.seconds_tick, captions=_captions(lines),
    )  # fmt: skip


def _roofline(points: Sequence[Line], roofs: Sequence[Line]) -> Chart | None:
    if not points:
        return None
    ticks = value_ticks([x for line in points for x in line.x])
    rates = [y for line in points for y in line.y if y]
    top = max(y for line in roofs for y in line.y if y)
    return Chart(
        x_title="FLOP per byte", y_title="FLOP/s", x_ticks={tick: f"{tick:g}" for tick in ticks},
        y_tick=words.rate_tick, captions=_captions(points), hover="closest",
        y_range=(math.log10(min(rates) / 1.5), math.log10(top * 1.3)), marks=roofs,
    )  # fmt: skip


def _tensors(study: Study) -> str:
    """A row per selection, model and tensor."""
    rows, where = [], []
    for one in study.by_length:
        at = data.panel(one) | ({"gpu": one.device.name} if one.device else {})
        for tensor, moved in tensors.of_steps(one.estimate.steps).items():
            length = data.length_of(one)
            rows.append((one.estimate.model, length, tensor, moved))
            where.append({**at, "length": format_length(length)})
    if not rows:
        return ""
    columns = [
        Column(name="model", title="model", texts=[model for model, *_ in rows]),
        Column(name="seqlen_k", title="keys", texts=[format_length(row[1]) for row in rows],
               values=[row[1] for row in rows]),
        Column(name="tensor", title="tensor", texts=[row[2] for row in rows]),
        *(
            Column(name=f"{part}_bytes", title=title, values=[row[3][part] for row in rows],
                   texts=[words.bytes_text(row[3][part]) if row[3][part] else "" for row in rows])
            for part, title in zip(tensors.PARTS, ("read", "written", "added atomically"), strict=True)
        ),
    ]  # fmt: skip
    return grid_html(Grid(
        key="tensors-table", label="Bytes by tensor", columns=columns, where=where, tools=True
    ))  # fmt: skip


def _summary(study: Study) -> str:
    """A sentence per selection: how much less flash moves at the longest length, and how much faster."""
    items = []
    for where, rows in data.groups(study.by_length, gpu=True):
        longest = max(map(data.length_of, rows))
        at = {row.estimate.model: row for row in rows if data.length_of(row) == longest}
        base = at.get("standard")
        others = [row for name, row in at.items() if name != "standard"]
        if base is None or not others:
            continue
        said = [_saving(row, base) for row in others]
        head = f"{escape(data.caption(where))}, {format_length(longest)}"
        place = escape(json.dumps(where), quote=True)
        items.append(
            f'<li data-where="{place}"><b>{head}</b>: compared with standard, {"; ".join(said)}.</li>'
        )
    return f'<ul class="regimes">{"".join(items)}</ul>' if items else ""


def _saving(row: IoRow, base: IoRow) -> str:
    ratio = base.estimate.requested.total_bytes / row.estimate.requested.total_bytes
    text = f"<em>{escape(row.estimate.model)}</em> requests {_fewer(ratio)} bytes"
    if row.prediction and base.prediction:
        dram = base.prediction.dram.value / max(1, row.prediction.dram.value)
        speed = base.prediction.time_s / row.prediction.time_s
        faster = f"{words.times(speed)} as fast" if speed >= 1 else f"{words.times(1 / speed)} as slow"
        text += (
            f", moves {_fewer(dram)} through DRAM and is {faster} (limit: {escape(row.prediction.limiting)})"
        )
    return text


def _fewer(ratio: float) -> str:
    return f"{words.times(ratio)} fewer" if ratio >= 1 else f"{words.times(1 / ratio)} more"


def _crossovers(study: Study) -> str:
    rows = []
    for view in study.views:
        p = view.problem
        for name, found in view.crossovers.items():
            limit, form = view.limits.get(name), "3d²" if name == "flash-v1" else "d²"
            exact = "none" if found is None else f"{found:,} elements, {_kib(found * p.dtype_bytes)}"
            rows.append(row_of(
                [escape(name), format_length(p.seqlen_k), escape(data.caption(data.shape(p))), exact,
                 f"{limit:,} elements, {_kib(limit * p.dtype_bytes)} ({form})" if limit else "-"],
                where=data.shape(p),
            ))  # fmt: skip
    head = ["model", "length", "selection", "M from which it requests less", "limit for long sequences"]
    text = table(head, rows) if rows else ""
    if study.lengths:
        text += "<h3>Alternatives against flash-v2, by length</h3>"
        text += table(
            ["model", "against", "quantity", "fewer from length"],
            (
                row_of([escape(row.model), escape(row.against), row.quantity,
                        "never" if row.seqlen is None else f"{row.seqlen:,}"])
                for row in study.lengths
            ),
        )  # fmt: skip
    return text


def _kib(size: int) -> str:
    return f"{size / 1024:,.4g} KiB"


def _cards(study: Study) -> str:
    """A row per model and length, a column per card; nothing with fewer than two cards."""
    if len(study.devices) < 2:
        return ""
    cards = [card.name for card in study.devices]
    rows = []
    for where, found in data.groups(study.by_length):
        cells: dict[tuple[str, int], dict[str, IoRow]] = {}
        for row in found:
            if row.device:
                cells.setdefault((row.estimate.model, data.length_of(row)), {})[row.device.name] = row
        for (model, length), by_card in cells.items():
            said = {name: row.prediction for name, row in by_card.items()}
            first = said[cards[0]]
            texts = []
            for name in cards:
                one = said[name]
                text = (
                    "–"
                    if one is None
                    else f"{words.seconds(one.time_s)} <small>{escape(one.limiting)}</small>"
                )
                if one and first and name != cards[0]:
                    text += f" <small>({words.times(first.time_s / one.time_s)})</small>"
                texts.append(text)
            rows.append(row_of(
                [escape(model), escape(data.caption(where)), format_length(length), *texts], where=where
            ))  # fmt: skip
    return table(["model", "selection", "length", *cards], rows)


def _assumptions(study: Study) -> str:
    from flashbench import iomodel
    from flashbench._iomodel import alternatives

    rows = []
    for name in study.models:
        row = iomodel.find(name) if iomodel.known(name) else alternatives.find(name)
        rows.append(row_of([escape(text) for text in (name, row.summary, row.assumptions, row.source)]))
    text = table(["model", "what it is", "assumptions", "source"], rows, ' class="texts"')
    cards = [
        row_of([escape(card.name), escape(card.roofs), escape(card.uncertain or "–")])
        for card in study.devices
    ]
    if cards:
        text += "<h3>Cards</h3>" + table(["card", "roofs", "uncertain"], cards, ' class="texts"')
    notes = dict.fromkeys(
        row.prediction.note.partition("; roofs: ")[0] for row in study.by_length if row.prediction
    )  # the roofs stand with the cards
    if notes:
        text += "<h3>Time</h3><ul>" + "".join(f"<li>{escape(note)}</li>" for note in notes) + "</ul>"
    return text
