"""Requested bytes over on-chip memory and over block size: the paper's figures, for the cells of the run."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from flashbench import devices, iomodel, whatif
from flashbench import table as tables
from flashbench.errors import FlashbenchError
from flashbench.problem import Problem
from flashbench.report import words
from flashbench.report.data import KEYS, Results
from flashbench.report.figures import Figure, captions
from flashbench.report.io_data import memory_tick
from flashbench.report.io_figures import Chart, Line, draw, slots, symbol
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame

SIZES = tuple(kib * 1024 for kib in (16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512))
BLOCKS = (16, 32, 48, 64, 96, 128, 192, 256)
COLUMNS = [*KEYS, "model", "seqlen", "x", "value", "tile", "fits", "smem_bytes"]


def by_memory(results: Results) -> DataFrame:
    """Requested bytes (``value``) with the tiles that M (``x``, bytes) gives, at the longest length.

    fits: whether the tile fits M. smem_bytes: shared memory of one SM of the card, NaN where not known.
    """
    return _data(results, whatif.STUDIED, SIZES, lambda size: {"sram_bytes": size})


def by_block(results: Results) -> DataFrame:
    """The same over the rows of a square tile (``x``)."""
    names = [name for name in whatif.STUDIED if name != "standard"]
    return _data(results, names, BLOCKS, lambda rows: {"tiles": {"block_q": rows, "block_k": rows}})


def _data(results: Results, names: Any, points: Any, options: Callable[[int], dict[str, Any]]) -> DataFrame:
    import pandas as pd

    plain = results.labelled[results.table["options"].isna()]
    longest = plain.sort_values("seqlen", kind="stable").drop_duplicates(KEYS, keep="last").sort_index()
    rows: list[dict[str, Any]] = []
    for item in longest.to_dict("records"):
        problem = Problem(**{name: item[name] for name in tables.PROBLEM_COLUMNS})
        card = devices.match(item["device"]) if words.known(item["device"]) else None
        same = {key: item[key] for key in (*KEYS, "seqlen")}
        same["smem_bytes"] = float(card.smem_per_sm_bytes) if card else float("nan")
        for name in names:
            for x in points:
                try:
                    one = iomodel.estimate(name, problem, item["pass"], **options(x))
                except FlashbenchError:
                    continue
                tile = "×".join(str(value) for key, value in one.tiles.items() if "_block_" in key)
                rows.append({
                    **same, "model": name, "x": x, "value": float(one.requested.total_bytes), "tile": tile,
                    "fits": one.tiles_fit is not False,
                })  # fmt: skip
    return pd.DataFrame(rows, columns=COLUMNS)


def memory_figure(frame: DataFrame) -> Figure:
    """A line per algorithm; hollow where the tile does not fit; the card's shared memory as a line up."""
    ticks = {size: str(size // 1024) for size in SIZES if size & (size - 1) == 0}
    return _figure(frame, "on-chip memory M per SM (KiB)", ticks)


def block_figure(frame: DataFrame) -> Figure:
    """A line per algorithm."""
    return _figure(frame, "rows of a square tile", {rows: str(rows) for rows in BLOCKS})


def _figure(frame: DataFrame, title: str, ticks: Mapping[int, str]) -> Figure:
    colour = slots(frame["model"])
    lines = []
    for (name, *where), rows in frame.groupby(["model", *KEYS], sort=False):
        slot = colour[str(name)]
        lines.append(Line(
            where=dict(zip(KEYS, where, strict=True)), name=str(name), x=rows["x"].tolist(),
            y=rows["value"].tolist(), slot=slot, symbol=symbol(slot) if name != "standard" else "",
            open=[not fits for fits in rows["fits"]], notes=list(map(words.bytes_text, rows["value"])),
        ))  # fmt: skip
    said = [
        (one["where"], f"{one['text']}, {format_length(int(rows['seqlen'].iloc[0]))} keys")
        for one, (_, rows) in zip(captions(frame), frame.groupby(KEYS, sort=False), strict=True)
    ]
    chart = Chart(
        x_title=title, y_title="requested bytes (GB = 1e9)", y_tick=words.bytes_tick, captions=said,
        x_ticks={float(x): text for x, text in ticks.items()},
    )  # fmt: skip
    return draw(chart, [*lines, *(_cards(frame) if "KiB" in title else ())])


def _cards(frame: DataFrame) -> Iterator[Line]:
    """The shared memory of one SM, as a line up through the plot."""
    known = frame[frame["smem_bytes"].notna()]
    for (size, *where), rows in known.groupby(["smem_bytes", *KEYS], sort=False):
        yield Line(
            where=dict(zip(KEYS, where, strict=True)), name=f"shared memory of one SM, {memory_tick(size)}",
            x=[size, size], y=[rows["value"].min(), rows["value"].max()], notes=(), slot="ink",
            dash="longdash",
        )  # fmt: skip
