"""Section data to HTML, and the page around it. Everything that comes from a file is escaped."""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any

from flashbench.report import words
from flashbench.report.data import FILTERS, KEYS, Results, not_begun
from flashbench.report.figures import DARK, LIGHT, Figure
from flashbench.report.grid import safe
from flashbench.report.html import row_of, status, table

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.report.sections import Section

LIBRARY = "vendor/plotly-cartesian.min.js"
"""plotly.js with the traces of a plane alone: a third of the whole."""

MOST_BOXES = 12
CPU_NOTICE = (
    "Times of a CPU say nothing about a GPU. A kernel that ran in Triton's interpreter was checked for"
    " correctness and not timed."
)


def document(results: Results, sections: Sequence[Section], bodies: Sequence[str]) -> str:
    """The whole page: template, style, script and plotly.js, each once."""
    devices = sorted({str(name) for name in results.table["device"].dropna()} or _of_headers(results))
    return shell(
        title="Attention on " + (", ".join(devices) or "an unnamed device"),
        commands=_commands(results),
        contents={s.key: s.title for s in sections},
        controls=_controls(results),
        bodies=[*bodies, _notes(results)],
    )


def _of_headers(results: Results) -> set[str]:
    """The devices that the files name, where they hold no cell."""
    found = {(header.get("environment") or {}).get("device_name") for header in results.headers.values()}
    return {str(name) for name in found if name}


def shell(
    *, title: str, commands: str, contents: Mapping[str, str], controls: str, bodies: Sequence[str]
) -> str:
    """A page of the report's design around sections of HTML. title, contents (titles by key): plain text."""
    return Template(text("page.html")).substitute(
        title=escape(title), palette=_palette(), style=text("style.css"), commands=commands,
        contents="".join(f'<a href="#{key}">{escape(name)}</a>' for key, name in contents.items()),
        controls=controls, sections="\n".join(bodies), plotly=text(LIBRARY), script=text("page.js"),
    )  # fmt: skip


def text(name: str) -> str:
    """A file of the page: template, style, script, library."""
    return files("flashbench.report").joinpath(name).read_text(encoding="utf-8")


def section(row: Section, results: Results) -> str:
    """One section: heading, what it shows, its body or why there is none."""
    frame = row.data(results)
    empty = "The results hold no cell." if results.table.empty else row.empty
    body = f'<p class="empty">{escape(empty)}</p>' if frame.empty else row.page(row, frame)
    about = f'<p class="about">{escape(row.about)}</p>' if row.about and not frame.empty else ""
    return f'<section id="{row.key}">{heading(row.key, row.title)}{about}{body}</section>'


def without(why: str, rows: Sequence[Section]) -> str:
    """One line that names the sections that have nothing to show, and why."""
    told = "; ".join(row.title for row in rows)
    return f'<p class="empty" id="without">{escape(why)} Without data: {escape(told)}.</p>'


def heading(key: str, title: str) -> str:
    """The heading of a section, with a link to itself."""
    link = f'<a class="anchor" href="#{key}" aria-label="Link to {escape(title, quote=True)}">#</a>'
    return f"<h2>{escape(title)} {link}</h2>"


def plot(row: Section, frame: DataFrame) -> str:
    """A figure, its text alternative and its numbers as a table."""
    numbers = f'<details class="numbers"><summary>Numbers of {escape(row.title)}</summary></details>'
    return figure(row, frame, numbers)


def figure(row: Section, frame: DataFrame, below: str = "") -> str:
    """A figure and its text alternative; ``below``: HTML under it."""
    assert row.figure is not None, row.key
    label = escape(f"{row.title}. {row.about} The same numbers stand in the table below.", quote=True)
    return (
        f'<figure><figcaption class="selection"></figcaption>'
        f'<div class="plot" id="plot-{row.key}" role="group" aria-label="{label}"></div>'
        f'<script type="application/json" class="plot-data" data-for="plot-{row.key}">'
        f"{script_json(row.figure(frame))}</script>{below}</figure>"
    )


def untimed(_: Section, frame: DataFrame) -> str:
    """One row per reason."""
    several = frame["run"].nunique() > 1
    rows = [
        [
            *([escape(str(item["run"]))] if several else []),
            escape(item["implementation"]), status(item["status"]),
            ", ".join(words.filter_label("pass", name) for name in item["passes"]),
            words.lengths(item["seqlens"]), str(item["cells"]), escape(str(item["reason"])),
        ]
        for item in frame.to_dict("records")
    ]  # fmt: skip
    head = ["implementation", "status", "passes", "lengths", "cells", "reason"]
    return table([*(["run"] if several else []), *head], map(row_of, rows))


def environment(_: Section, frame: DataFrame) -> str:
    """Each run's header as a list of terms."""
    parts = []
    for run, items in frame.groupby("run", sort=False):
        terms = "".join(
            f"<dt>{escape(str(item['item']))}</dt><dd>{_plain(item['item'], item['value'])}</dd>"
            for item in items.to_dict("records")
        )
        parts.append(f"<h3>{escape(str(run))}</h3><dl>{terms}</dl>")
    return "".join(parts)


def _plain(item: str, value: Any) -> str:
    if item == "argv" and isinstance(value, list | tuple):
        return f"<code>{escape(shlex.join(map(str, value)))}</code>"
    if isinstance(value, list | tuple):
        return escape(", ".join(map(str, value)) or "none")
    return escape(str(value))


def _palette() -> str:
    def block(selector: str, colours: Sequence[str]) -> str:
        return selector + "{" + "".join(f"--s{slot}:{colour};" for slot, colour in enumerate(colours)) + "}"

    dark = block(":root:not(.light)", DARK)
    return f"{block(':root', LIGHT)}@media screen and (prefers-color-scheme:dark){{{dark}}}"


def _commands(results: Results) -> str:
    lines = []
    for run, header in results.headers.items():
        argv = header.get("argv")
        command = shlex.join(map(str, argv)) if isinstance(argv, list | tuple) else "command not recorded"
        date = escape(str(header.get("created_at") or ""))
        lines.append(f"<p><b>{escape(run)}</b> <time>{date}</time><code>{escape(command)}</code></p>")
    kinds = {(header.get("environment") or {}).get("device_type") for header in results.headers.values()}
    lines += [f'<p class="notice">{escape(said)}.</p>' for said in not_begun(results)]
    if "cpu" in kinds:
        lines.append(f'<p class="notice">{escape(CPU_NOTICE)}</p>')
    return "".join(lines)


def _controls(results: Results) -> str:
    """A group of radio buttons per filter that has a choice; the rest as hidden fields."""
    frame = results.labelled
    if frame.empty:
        return ""
    best = frame.assign(timed=frame["status"] == "ok").groupby(KEYS, sort=False)["timed"].sum().idxmax()
    parts = []
    for row, chosen in zip(FILTERS, best, strict=True):
        values = list(dict.fromkeys(frame[row.key]))
        parts.append(radios(row.key, row.title, values, chosen, row.names))
    return "".join([*parts, _series(frame), _baselines(frame), _levels(results)])


def _levels(results: Results) -> str:
    """Which bytes the roofline is over."""
    from flashbench.report import roofline

    levels = list(dict.fromkeys(roofline.data(results)[roofline.CHOICE]))
    names = {"compulsory": "compulsory", "dram": "DRAM", "requested": "requested"}
    return radios(roofline.CHOICE, "Roofline by bytes", levels, levels[0], names) if levels else ""


def radios(key: str, title: str, values: Sequence[str], chosen: str, names: Mapping[str, str]) -> str:
    """A choice of the control bar; one of a single value is a hidden field. names: how values read, plain."""
    if len(values) == 1:
        return f'<input type="hidden" name="{key}" value="{escape(values[0], quote=True)}">'
    buttons = "".join(
        f'<label><input type="radio" name="{key}" value="{escape(value, quote=True)}"'
        f"{' checked' if value == chosen else ''}>"
        f"<span>{escape(names.get(value, value))}</span></label>"
        for value in values
    )
    return f"<fieldset><legend>{escape(title)}</legend>{buttons}</fieldset>"


def _series(frame: DataFrame) -> str:
    """A box to tick for each implementation, which shows or hides it in every figure."""
    names = list(dict.fromkeys(frame["series"]))
    if not 1 < len(names) <= MOST_BOXES:  # the legends do the same
        return ""
    boxes = "".join(
        f'<label><input type="checkbox" data-series="{escape(name, quote=True)}" checked>'
        f"<span>{escape(name)}</span></label>"
        for name in names
    )
    return f'<fieldset class="series"><legend>Show</legend>{boxes}</fieldset>'


def _baselines(frame: DataFrame) -> str:
    """What speed-ups are over."""
    names = list(dict.fromkeys(frame["implementation"][frame["status"] == "ok"]))
    if len(names) < 2:
        return ""
    chosen = "naive" if "naive" in names else names[0]
    options = "".join(
        f'<option value="{escape(name, quote=True)}"{" selected" if name == chosen else ""}>{escape(name)}'
        "</option>"
        for name in names
    )
    return f'<label class="baseline">Speed-up over <select name="baseline">{options}</select></label>'


def script_json(figure: Figure) -> str:
    """The figure as JSON that cannot end its script element."""
    return safe(str(figure.to_json()))


def _notes(results: Results) -> str:
    """What hover texts say of each cell beside the figure's own value: each text once."""
    texts: dict[str, int] = {}
    of = [texts.setdefault(words.cell_note(row), len(texts)) for row in results.table.itertuples(index=False)]
    content = safe(json.dumps({"texts": list(texts), "of": of}, ensure_ascii=False, separators=(",", ":")))
    return f'<script type="application/json" id="cell-notes">{content}</script>'
