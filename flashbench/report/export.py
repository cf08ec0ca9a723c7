"""Each figure alone, for papers and slides: plotly.js' JSON, the data behind it, and pictures."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench import paths
from flashbench.errors import UnavailableError, UnknownName, UsageError
from flashbench.report.data import KEYS, Results
from flashbench.report.figures import LIGHT, Figure

if TYPE_CHECKING:
    from pandas import DataFrame

PICTURES = ("svg", "png", "pdf")
STYLES: Mapping[str, Mapping[str, Any]] = {
    "paper": {
        "width": 480,
        "height": 320,
        "font": {"family": "Liberation Sans, Arial, sans-serif", "size": 10},
    },
    "slide": {
        "width": 1120,
        "height": 630,
        "font": {"family": "Liberation Sans, Arial, sans-serif", "size": 20},
    },
}
"""Sizes in CSS pixels, of which 96 are an inch: a column of a page, a slide of 16 to 9."""


def write(
    results: Results, folder: Path, *, formats: Sequence[str], names: Sequence[str], style: str
) -> list[Path]:
    """Write every figure of every selection, or those of the sections named; returns the files, in order.

    ``<section>-<selection>.json`` is the figure, ``.csv`` its data; the same results give the same bytes.
    Raises UsageError and UnknownName for what is asked for, UnavailableError without a package for pictures.
    """
    from flashbench.report.sections import SECTIONS

    sections = {row.key: row for row in SECTIONS if row.figure is not None}
    for name in names:
        if name not in sections:
            raise UnknownName("--figure", name, sections)
    for name in formats:
        if name not in PICTURES:
            raise UsageError(f"--format {name!r}: not known; accepted: {', '.join(PICTURES)}")
    if style not in STYLES:
        raise UsageError(f"--style {style!r}: not known; accepted: {', '.join(STYLES)}")
    if formats:
        _picture_maker(formats[0])  # before anything is written
    written: list[Path] = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _one_browser(formats):
            for key in names or sections:
                frame = sections[key].data(results)
                if frame.empty:
                    continue
                figure = sections[key].figure
                assert figure is not None
                for where, alone in panels(figure(frame)):
                    stem = folder / _stem(key, where)
                    written += _files(stem, styled(alone, style), _of(frame, where), formats)
    except OSError as error:
        raise UsageError(
            f"--figures {str(folder)!r}: {error.strerror or error}; accepted: a folder that can be written"
        ) from None
    return written


def _picture_maker(end: str) -> Any:
    """The package that draws. Raises UnavailableError without it."""
    try:
        return import_module("kaleido")
    except ImportError as error:
        raise UnavailableError(
            f"--format {end}: needs the package kaleido",
            hint="pip install 'flashbench[figures]', and install Chromium or Chrome",
        ) from error


@contextmanager
def _one_browser(formats: Sequence[str]) -> Iterator[None]:
    """One browser for all pictures: to start one takes longer than to draw."""
    maker = _picture_maker(formats[0]) if formats else None
    start, stop = (getattr(maker, f"{verb}_sync_server", None) for verb in ("start", "stop"))
    if start is None or stop is None:  # a kaleido that starts one for each
        yield
        return
    try:
        start(silence_warnings=True, mathjax=False)  # which would come from the network
    except Exception:  # no browser: the first picture says so in a line
        yield
        return
    try:
        yield
    finally:
        stop(silence_warnings=True)


def panels(figure: Figure) -> Iterator[tuple[dict[str, str], Figure]]:
    """The figure of each selection, with the traces that the page would show."""
    for caption in figure.layout["meta"]["captions"]:
        where = caption["where"]
        data = [
            trace for trace in figure.data
            if all(where.get(key) == value for key, value in trace["meta"]["where"].items())
        ]  # fmt: skip
        yield where, replace(figure, data=data)


def styled(figure: Figure, style: str) -> Figure:
    """As it prints: black on white, a size and a font, the reasons of cells without a time below."""
    lanes = [trace for trace in figure.data if "lane" in trace["meta"]]
    size = STYLES[style]["font"]["size"]
    count = len({trace["meta"]["lane"] for trace in lanes})
    share = min(0.4, 3.6 * size * count / (STYLES[style]["height"] - 10 * size))
    grid = {"gridcolor": "#dde2e9", "linecolor": "#566072", "ticks": "outside", "showline": True}
    layout = {name: value for name, value in figure.layout.items() if name != "meta"}
    layout |= {**STYLES[style], "paper_bgcolor": "white", "plot_bgcolor": "white"}
    layout["xaxis"] = {**layout["xaxis"], **grid, "anchor": "y2" if lanes else "y"}
    layout["yaxis"] = {**refined(figure), **grid, "domain": [share + 0.02 if lanes else 0, 1]}
    if lanes:
        rows = max(trace["meta"]["lane"] for trace in lanes)
        layout["yaxis2"] = {**layout["yaxis2"], "domain": [0, share], "range": [rows + 0.7, -0.7]}
    data = [
        {name: value for name, value in trace.items() if name not in ("meta", "customdata", "hovertemplate")}
        for trace in figure.data
    ]  # fmt: skip
    for trace, old in zip(data, figure.data, strict=True):
        slot = old["meta"].get("slot")
        if "lane" in old["meta"]:
            trace["textfont"] = {"size": 0.9 * size}
        if isinstance(slot, int):
            trace["marker"] = {**trace.get("marker", {}), "color": LIGHT[slot]}
    return Figure(data=data, layout=layout)


def refined(figure: Figure) -> dict[str, Any]:
    """The value axis, with finer ticks where fewer than three fall among the values, as in the page."""
    axis, fine = figure.layout["yaxis"], figure.layout["meta"].get("fine")
    shown = [y for trace in figure.data if "lane" not in trace["meta"] for y in trace["y"]]
    values = [y for y in shown if isinstance(y, int | float) and y > 0]
    if not fine or not values or "range" in axis:
        return dict(axis)
    low, high = min(values) / 1.1, max(values) * 1.1
    if sum(low <= tick <= high for tick in axis["tickvals"]) > 2:
        return dict(axis)
    places = [at for at, tick in enumerate(fine["tickvals"]) if low <= tick <= high]
    some = places[:: -(-len(places) // 7)] if places else []
    if len(some) < 2:
        return dict(axis)
    return {**axis, **{name: [fine[name][at] for at in some] for name in ("tickvals", "ticktext")}}


def _files(stem: Path, figure: Figure, data: DataFrame, formats: Sequence[str]) -> list[Path]:
    plain = {"data": figure.data, "layout": figure.layout}
    files = [stem.with_name(f"{stem.name}.{end}") for end in ("json", "csv", *formats)]
    paths.put(files[0], json.dumps(plain, allow_nan=False, indent=1) + "\n")
    paths.put(files[1], data.to_csv(index=False, lineterminator="\n"))
    for path in files[2:]:
        paths.put(path, picture(figure, path.suffix[1:]))
    return files


def picture(figure: Figure, end: str) -> bytes:
    """The figure as svg, png (twice the pixels) or pdf. Raises UnavailableError without kaleido, Chromium."""
    import warnings

    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="The kopts argument")  # said by plotly of itself
            found = bytes(figure.plotly().to_image(format=end, scale=2 if end == "png" else 1))
    except (ImportError, ValueError, RuntimeError) as error:
        said = str(error).strip().splitlines() or ["it gives no picture"]
        raise UnavailableError(
            f"--format {end}: kaleido: {said[0]}",
            hint="pip install 'flashbench[figures]', and install Chromium or Chrome",
        ) from error
    return {"svg": _same, "pdf": _undated}.get(end, bytes)(found)


def _undated(pdf: bytes) -> bytes:
    """Without the time at which it was made: digits of as many bytes, so that every offset holds."""
    return re.sub(rb"/(?:Creation|Mod)Date \(D:[^)]*\)", lambda match: re.sub(rb"[0-9]", b"0", match[0]), pdf)


def _same(svg: bytes) -> bytes:
    """Without the random names that plotly.js gives a drawing's parts."""
    names = dict.fromkeys(re.findall(rb"(?:clip|topdefs-|legend|defs-|trace)[0-9a-f]{6}", svg))
    for at, name in enumerate(names):
        svg = svg.replace(name, re.sub(rb"[0-9a-f]{6}$", b"%06d" % at, name))
    return svg


def _of(frame: DataFrame, where: Mapping[str, str]) -> DataFrame:
    found = frame
    for key, value in where.items():
        found = found[found[key] == value]
    return found.drop(columns="cell", errors="ignore")


def _stem(key: str, where: Mapping[str, str]) -> str:
    usual = {"options": "none", "queries": "same", "kv": "MHA", "level": "compulsory"}
    names = [*KEYS, *(name for name in where if name not in KEYS)]
    parts = [value for name in names if (value := where.get(name)) and usual.get(name) != value]
    return re.sub(r"[^A-Za-z0-9.+_-]+", "-", "-".join([key, *parts]))
