"""What the model's page draws: rows of a Study as lines with the selection at which each is shown."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING

from flashbench.report import words
from flashbench.report.data import PASS_NAMES
from flashbench.report.io_figures import Line, slots, symbol
from flashbench.units import format_bytes, format_length

if TYPE_CHECKING:
    from flashbench.problem import Problem
    from flashbench.whatif import IoRow, Study

TITLES = {"pass": "Pass", "mask": "Mask", "dtype": "Dtype", "dims": "Head dim", "kv": "K/V heads",
          "queries": "Queries", "gpu": "Card", "length": "Length"}  # fmt: skip
"""The choices of the control bar, in order."""
NAMES = {**PASS_NAMES, "full": "non-causal", "same": "as keys"}
"""How values of choices read, where not as they are."""


def dims(problem: Problem) -> str:
    """64, or 192/128 where V has another head dim."""
    same = problem.head_dim == problem.head_dim_v
    return f"{problem.head_dim}" if same else f"{problem.head_dim}/{problem.head_dim_v}"


def mask(problem: Problem) -> str:
    """full, causal or a window."""
    if problem.window != (-1, -1):
        left, right = ("all" if side == -1 else str(side) for side in problem.window)
        return f"window {left},{right}"
    return "causal" if problem.causal else "full"


def shape(problem: Problem) -> dict[str, str]:
    """The choices that a problem belongs to, its length and pass apart."""
    group = problem.group
    kv = "MHA" if group == 1 else "MQA" if problem.num_kv_heads == 1 else f"GQA {group}:1"
    same = problem.seqlen_q == problem.seqlen_k
    queries = "same" if same else format_length(problem.seqlen_q)
    return {
        "mask": mask(problem),
        "dtype": problem.dtype,
        "dims": dims(problem),
        "kv": kv,
        "queries": queries,
    }


def panel(row: IoRow) -> dict[str, str]:
    """The choices that a row belongs to, card and length apart."""
    return {"pass": row.estimate.pass_, **shape(row.estimate.problem)}


def length_of(row: IoRow) -> int:
    """Keys per sequence."""
    return row.estimate.problem.seqlen_k


def caption(where: Mapping[str, str]) -> str:
    """forward, non-causal, bf16, head dim 128, GQA 4:1, h100-sxm, at 8k."""
    said = [NAMES.get(where[key], where[key]) for key in ("pass", "mask", "dtype") if key in where]
    said += [f"head dim {where['dims']}"] if "dims" in where else []
    said += [where["kv"]] if where.get("kv", "MHA") != "MHA" else []
    if (queries := where.get("queries", "same")) != "same":
        said.append("1 query" if queries == "1" else f"{queries} queries")
    said += [where["gpu"]] if "gpu" in where else []
    said += [f"at {where['length']}"] if "length" in where else []
    return ", ".join(said)


def groups(rows: Iterable[IoRow], *, gpu: bool = False, length: bool = False) -> list[
    tuple[dict[str, str], list[IoRow]]
]:  # fmt: skip
    """Rows by the selection at which they are shown."""
    found: dict[tuple[tuple[str, str], ...], list[IoRow]] = {}
    for row in rows:
        where = panel(row)
        if gpu and row.device:
            where["gpu"] = row.device.name
        if length:
            where["length"] = format_length(length_of(row))
        found.setdefault(tuple(where.items()), []).append(row)
    return [(dict(key), items) for key, items in found.items()]


def by_model(rows: Iterable[IoRow]) -> Iterator[tuple[str, list[IoRow]]]:
    """Rows of each model."""
    found: dict[str, list[IoRow]] = {}
    for row in rows:
        found.setdefault(row.estimate.model, []).append(row)
    yield from found.items()


def tile(row: IoRow) -> str:
    """The forward's (or first kernel's) tile, "128x64"."""
    tiles = row.estimate.tiles
    kernel = next((key.removesuffix("_block_q") for key in tiles if key.endswith("_block_q")), None)
    return f"{tiles[f'{kernel}_block_q']}×{tiles[f'{kernel}_block_k']}" if kernel else ""


def level_lines(study: Study) -> list[Line]:
    """Bytes over the length: requested, DRAM (with a card), compulsory."""
    colour = slots(study.models)
    lines: list[Line] = []
    for where, rows in groups(study.by_length, gpu=True):
        for name, mine in by_model(rows):
            x = [length_of(row) for row in mine]
            requested = [row.estimate.requested.total_bytes for row in mine]
            lines.append(Line(
                where=where, name=name, x=x, y=requested, slot=colour[name], symbol=symbol(colour[name]),
                notes=[f"{words.bytes_text(value)} requested, tile {tile(row) or 'none'}"
                       for row, value in zip(mine, requested, strict=True)],
            ))  # fmt: skip
            timed = [row for row in mine if row.prediction]
            if timed:
                dram = [row.prediction.dram for row in timed if row.prediction]
                lines.append(Line(
                    where=where, name=f"{name}, DRAM", group=name, x=[length_of(row) for row in timed],
                    y=[band.value for band in dram], slot=colour[name], dash="dash", legend=False,
                    notes=[f"{words.bytes_text(band.value)} from DRAM ({words.bytes_text(band.low)} to"
                           f" {words.bytes_text(band.high)})" for band in dram],
                ))  # fmt: skip
        name, floor = next(by_model(rows))
        lines.append(Line(
            where=where, name="compulsory (attention)" if name in study.models else name,
            x=[length_of(row) for row in floor], y=[row.estimate.compulsory.total_bytes for row in floor],
            slot="ink", dash="dot",
            notes=[words.bytes_text(row.estimate.compulsory.total_bytes) for row in floor],
        ))  # fmt: skip
    return lines


def shown_lengths(rows: Iterable[IoRow]) -> list[int]:
    """The lengths that the control bar offers."""
    return sorted({length_of(row) for row in rows})


def sram_lines(study: Study) -> list[Line]:
    """Requested bytes over M, with tiles that M gives, and the lower bound."""
    from flashbench.iomodel import lower_bound

    colour, lines = slots(study.models), list[Line]()
    for where, rows in groups(study.by_sram, length=True):
        for name, mine in by_model(rows):
            requested = [row.estimate.requested.total_bytes for row in mine]
            lines.append(Line(
                where=where, name=name, x=[row.sram_bytes or 0 for row in mine], y=requested,
                slot=colour.get(name, 2), symbol=symbol(colour.get(name, 2)) if name != "standard" else "",
                open=[row.estimate.tiles_fit is False for row in mine],
                notes=[f"{words.bytes_text(value)}{_tile_note(row)}"
                       for row, value in zip(mine, requested, strict=True)],
            ))  # fmt: skip
        if where["pass"] != "fwd":
            continue
        _, mine = next(by_model(rows))
        p = mine[0].estimate.problem
        heads = p.batch * p.num_heads * p.dtype_bytes
        bound = [heads * lower_bound(p, (row.sram_bytes or 0) // p.dtype_bytes) for row in mine]
        lines.append(Line(
            where=where, name="lower bound, up to a constant", x=[row.sram_bytes or 0 for row in mine],
            y=bound, slot="ink", dash="dot", notes=[words.bytes_text(value) for value in bound],
        ))  # fmt: skip
    return lines


def block_lines(study: Study) -> list[Line]:
    """Requested bytes over the rows of a square tile."""
    colour, lines = slots(study.models), list[Line]()
    for where, rows in groups(study.by_block, length=True):
        for name, mine in by_model(rows):
            requested = [row.estimate.requested.total_bytes for row in mine]
            lines.append(Line(
                where=where, name=name, x=[row.block or 0 for row in mine], y=requested,
                slot=colour.get(name, 2), symbol=symbol(colour.get(name, 2)),
                notes=[f"{words.bytes_text(value)}, tile {tile(row)}"
                       for row, value in zip(mine, requested, strict=True)],
            ))  # fmt: skip
    return lines


def time_lines(study: Study) -> list[Line]:
    """Predicted seconds over the length, a dash per card."""
    from flashbench.report.figures import DASHES

    colour, lines = slots(study.models), list[Line]()
    dash = {card.name: DASHES[index % len(DASHES)] for index, card in enumerate(study.devices)}
    for where, rows in groups(study.by_length, gpu=True):
        card = where.pop("gpu", "")
        for name, mine in by_model(rows):
            timed = [(length_of(row), row.prediction) for row in mine if row.prediction]
            if not timed:
                continue
            several = f", {card}" if len(dash) > 1 else ""
            lines.append(Line(
                where=where, name=name + several, x=[x for x, _ in timed],
                y=[said.time_s for _, said in timed], slot=colour[name],
                symbol=symbol(colour[name]), dash=dash[card],
                notes=[f"{words.seconds(said.time_s)}, limited by {escape(said.limiting)}"
                       + ("" if said.calibrated else ", constants of another card") for _, said in timed],
            ))  # fmt: skip
    return lines


def roof_lines(study: Study) -> tuple[list[Line], list[Line]]:
    """FLOP/s over FLOPs per byte, of DRAM (filled) and of L2 (open); and the two roofs of each card."""
    colour, lines = slots(study.models), list[Line]()
    for where, rows in groups(study.by_length, gpu=True):
        for name, mine in by_model(rows):
            timed = [(row, row.prediction) for row in mine if row.prediction]
            for level, hollow in (("DRAM", False), ("L2", True)):
                x = [row.estimate.flops / max(1, said.dram.value if level == "DRAM" else
                     row.estimate.requested.total_bytes) for row, said in timed]  # fmt: skip
                y = [row.estimate.flops / said.time_s for row, said in timed]
                if timed:
                    lines.append(Line(
                        where=where, name=name if level == "DRAM" else f"{name}, L2", group=name, x=x, y=y,
                        slot=colour[name], symbol=symbol(colour[name]), open=[hollow] * len(x),
                        dash="dot" if hollow else "solid", legend=level == "DRAM",
                        notes=[f"{escape(name)} at {format_length(length_of(row))}: {words.rate(rate)},"
                               f" {at:.3g} FLOP per byte of {level}"
                               for (row, _), at, rate in zip(timed, x, y, strict=True)],
                    ))  # fmt: skip
    return lines, list(_roofs(study, [value for line in lines for value in line.x]))


def _roofs(study: Study, intensities: Sequence[float]) -> Iterator[Line]:
    from flashbench._iomodel.roofline import roofs
    from flashbench.errors import SpecError

    if not intensities:
        return
    low, high = min(intensities) / 2, max(intensities) * 2
    for card in study.devices:
        for dtype in dict.fromkeys(row.estimate.problem.dtype for row in study.by_length):
            try:
                roof = roofs(card, dtype)
            except SpecError:
                continue
            for level, speed, dash in (("DRAM", roof.dram, "solid"), ("L2", roof.l2, "dash")):
                at = sorted({low, min(max(roof.flops / speed, low), high), high})
                yield Line(
                    where={"gpu": card.name, "dtype": dtype}, name=f"roof of {card.name}, {level}", x=at,
                    y=[min(roof.flops, x * speed) for x in at], notes=(), slot="ink", dash=dash,
                )  # fmt: skip


def _tile_note(row: IoRow) -> str:
    if not row.estimate.tiles:
        return ""
    fits = ", does not fit" if row.estimate.tiles_fit is False else ""
    return f", tile {tile(row)}{fits}"


def memory_tick(value: float) -> str:
    """A tick of M, "192 KiB"."""
    return format_bytes(value, binary=True).replace(".00", "").replace(".0 ", " ")
