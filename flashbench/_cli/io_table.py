"""How ``flashbench io-model`` shows its rows: columns, title and notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from flashbench._cli.io_request import Request
    from flashbench.console import Column
    from flashbench.iomodel import PaperView
    from flashbench.problem import Problem

_CONTEXT = ("dtype", "causal", "num_heads", "num_kv_heads", "head_dim", "pass", "gpu", "sram_bytes")
"""In the title where all rows agree, else a column."""


def show(request: Request, *, json: bool, csv: bool, quiet: bool) -> None:
    """The table, JSON or CSV of every row, and the notes."""
    from flashbench import console
    from flashbench._cli import io_rows

    names = io_rows.names(request)
    if csv:
        console.show_lines(io_rows.csv_lines(request))
        found = [dict(zip(names, row, strict=True)) for row in islice(io_rows.rows(request), 200)]
        shown = found
    else:
        found = [dict(zip(names, row, strict=True)) for row in io_rows.rows(request)]
        shown = found if json else [row | _made(row) for row in found]
        columns = [_column(name) for name in names] if json else _columns(names, shown)
        console.show_table(columns, shown, json=json, title="" if json else _title(request, shown))
    if not quiet:
        for note in _notes(request, found):
            console.note(note)


def _made(row: Mapping[str, Any]) -> dict[str, Any]:
    """What a person reads in the place of several columns."""
    made = {"tile": _tile_text(row), "compulsory_bytes": None, "dram_bytes": None}
    made["compulsory_bytes"] = row["compulsory_read_bytes"] + row["compulsory_write_bytes"]
    if row.get("dram_read_bytes") is not None:
        made["dram_bytes"] = row["dram_read_bytes"] + row["dram_write_bytes"]
    return made


def _tile_text(row: Mapping[str, Any]) -> str | None:
    """ "384x1 (sram)", or kernel by kernel "dkdv 1x192, dq 256x1 (sram, does not fit)"."""
    tiles = row["tiles"]
    if not tiles:
        return None
    kernels = [key.removesuffix("_block_q") for key in tiles if key.endswith("_block_q")]
    sizes = [f"{tiles[name + '_block_q']}x{tiles[name + '_block_k']}" for name in kernels]
    if len(sizes) > 1:
        sizes = [f"{name} {size}" for name, size in zip(kernels, sizes, strict=True)]
    marks = [row["tile_source"], *(["does not fit"] if row["tiles_fit"] is False else [])]
    if row["num_splits"] > 1:
        marks.append(f"{row['num_splits']} splits")
    if row["pack_gqa"] and row["num_kv_heads"] < row["num_heads"]:
        marks.append("packed")
    return f"{', '.join(sizes)} ({', '.join(marks)})"


def _headers() -> dict[str, tuple[str, Any]]:
    """Header and format of the columns that have one of their own."""
    from flashbench import units

    size, flop = units.format_bytes, partial(units.format_count, unit="FLOP")
    return {
        "gpu": ("GPU", str), "sram_bytes": ("M", partial(size, binary=True)),
        "seqlen_q": ("seqlen", units.format_length), "seqlen_k": ("seqlen_k", units.format_length),
        "head_dim": ("d", str), "head_dim_v": ("dv", str),
        "causal": ("causal", lambda value: "yes" if value else "no"),
        "num_heads": ("heads", str), "num_kv_heads": ("kv heads", str), "tile": ("tile q x k", str),
        "flops": ("FLOPs", flop), "requested_read_bytes": ("read", size),
        "requested_write_bytes": ("write", size), "requested_atomic_bytes": ("atomic", size),
        "compulsory_bytes": ("compulsory", size), "extra_bytes": ("extra", size),
        "dram_bytes": ("DRAM", size), "intensity_requested": ("FLOP/B", "{:.1f}".format),
        "standard_ratio": ("standard/this", "{:.2f}x".format), "time_s": ("time", units.format_seconds),
        "limiting": ("limited by", str),
    }  # fmt: skip


_ORDER = (
    "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "dtype", "causal", "batch", "num_heads", "num_kv_heads",
    "pass", "model", "gpu", "sram_bytes", "tile", "flops", "requested_read_bytes", "requested_write_bytes",
    "requested_atomic_bytes", "compulsory_bytes", "dram_bytes", "extra_bytes", "intensity_requested",
    "standard_ratio", "time_s", "limiting",
)  # fmt: skip
_TEXT = ("dtype", "causal", "pass", "model", "gpu", "tile", "limiting")


def _column(name: str) -> Column:
    from flashbench.console import Column

    return Column(name=name, header=name)


def _columns(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """The columns that say something new, for a person."""
    from flashbench.console import Column

    headers = _headers()

    def differ(name: str, other: str) -> bool:
        return any(row[name] != row[other] for row in rows)

    def needed(name: str) -> bool:
        if name == "seqlen_k":
            return differ(name, "seqlen_q")
        if name == "head_dim_v":
            return differ(name, "head_dim")
        if name == "num_kv_heads":
            return differ(name, "num_heads")
        if name == "requested_atomic_bytes":
            return any(row[name] for row in rows)
        if name in ("dram_bytes", "time_s", "limiting"):
            return "time_s" in names
        return name not in _CONTEXT or len({row[name] for row in rows}) > 1

    return [
        Column(
            name=name,
            header=headers.get(name, (name, str))[0],
            format=headers.get(name, (name, str))[1],
            justify="left" if name in _TEXT else "right",
        )
        for name in _ORDER
        if needed(name)
    ]


def _title(request: Request, rows: Sequence[Mapping[str, Any]]) -> str:
    """What all rows share, and M."""
    first, problem = rows[0], request.problems[0]
    shared = {name for name in _CONTEXT if len({row[name] for row in rows}) == 1}
    words = [
        text
        for name, text in (
            ("pass", f"pass {first['pass']}"),
            ("dtype", str(first["dtype"])),
            ("head_dim", f"d = {first['head_dim']}"),
            ("causal", f"causal ({problem.alignment})" if first["causal"] else _unmasked(problem)),
            ("num_heads", f"{first['num_heads']} heads"),
            ("gpu", str(first["gpu"]) if first["gpu"] else ""),
        )
        if name in shared and text
    ]
    words += _extras(request, problem)
    sizes = dict.fromkeys((row["sram_bytes"], row["sram_elements"], row["dtype"]) for row in rows)
    if len({size for size, _, _ in sizes}) > 1:
        return f"{', '.join(words)}; M as in the rows"
    memory = ", ".join(f"{count:,} elements of {dtype}" for _, count, dtype in sizes)
    return f"{', '.join(words)}; M = {first['sram_bytes']:,} bytes = {memory}"


def _unmasked(problem: Problem) -> str:
    return f"window ({problem.alignment})" if problem.masked else "no mask"


def _extras(request: Request, problem: Problem) -> list[str]:
    """Options of problem and variant that are not at their defaults."""
    variant = request.choices[0].variant
    words = ["decode"] if request.mode == "decode" else []
    if problem.window != (-1, -1):
        words.append("window {} to {}".format(*(("any", side)[side != -1] for side in problem.window)))
    if problem.dropout_p:
        words.append(f"dropout {problem.dropout_p:g}")
    if problem.lengths:
        words.append(f"{len(problem.lengths)} packed sequences")
    if variant.page_size:
        words.append(f"pages of {variant.page_size}")
    if variant.density < 1:
        words.append(f"density {variant.density:g}")
    return words


def _notes(request: Request, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    from flashbench._cli import io_alternatives, io_effects

    first = rows[0]
    notes = [
        f"M is the on-chip memory of one SM: {first['sram_bytes']:,} bytes; typed sizes take KB = 1024 bytes,"
        " lengths k = 1024; printed sizes are GB = 10^9 bytes",
        "read, write: requested bytes, which kernels load and store between SM and L2; compulsory: each"
        " tensor once; extra: predicted peak memory beyond the inputs, outputs included; FLOP/B: FLOPs over"
        " requested bytes; standard/this: how many times fewer requested bytes than standard",
        "FLOPs: 2 pairs (d + dv) forward, 2 pairs (3d + 2dv) backward, over the pairs that the mask leaves"
        " visible (causal: N(N+1)/2, not N^2/2)",
    ]
    if not request.choices[0].tiles and any(row["tile_source"] == "sram" for row in rows):
        notes.append(
            "tiles from M in elements: flash-v1 block_k = ceil(M/4d), block_q = min(block_k, d); flash-v2"
            " block_q = floor(M/2d) with K/V streamed (block_k 1); 'shipped': those of the published code,"
            " 'kernel': those of the bundled kernel"
        )
    if any(row["tiles_fit"] is False for row in rows):
        notes.append("'does not fit': the tile needs more than M elements, so no such kernel can run")
    notes += io_effects.notes(request)
    if request.choices[0].device:
        notes.append(
            "DRAM and time are a model, not a count: docs/time-model.md; --json has their band. For flash-v2"
            " and later M is shared memory only; accumulators are in registers, which are not in M"
        )
        notes += _card_notes(request, rows)
    notes += [text for text in (request.printed, request.remark) if text]
    return [*notes, *_crossings(request), *io_alternatives.notes(request)]


def _card_notes(request: Request, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to know of DRAM and times, each once: doubts, constants of others, blanks and their reasons.

    From cards, models and dtypes, not from rows, of which ``--csv`` keeps only the first.
    """
    from flashbench._iomodel.explain import BELOW, why_blank
    from flashbench._iomodel.setting import setting

    cards = {choice.device.name: choice.device for choice in request.choices if choice.device}
    dtypes = dict.fromkeys(problem.dtype for problem in request.problems)
    doubts = [f"{name}: uncertain: {card.uncertain}" for name, card in cards.items() if card.uncertain]
    borrowed: dict[str, str] = {}
    blanks: dict[str, None] = {}
    explained = set()
    for name, card in cards.items():
        for row in request.names:
            model = request.kernels.get(row, row)
            for dtype in dtypes:
                if why := why_blank(model, card, dtype):
                    blanks[why] = None
                    explained.add((name, row, dtype))
                    continue
                on = setting(card, model, None, dtype)
                if not on.calibrated:
                    borrowed.setdefault(f"{row} on {name}", f"time not calibrated: {on.note}")
    if any(
        row["time_s"] is None and (row["gpu"], row["model"], row["dtype"]) not in explained for row in rows
    ):
        blanks["no DRAM and time where the time model does not cover the case"] = None
    timed = [row for row in rows if row["time_s"] is not None]
    notes = [BELOW] if timed else []
    if any(row["model"] == "flash-v2" and row["tile_source"] == "sram" for row in timed):
        notes.append(_HYPOTHETICAL)
    return [*notes, *doubts, *(f"{pair}: {text}" for pair, text in borrowed.items()), *blanks]


_HYPOTHETICAL = (
    "times of rows marked (sram) are of a kernel with that tile, which nobody ships;"
    " --models flash, sdpa-flash, flash-v3 have shipped tiles"
)


def _crossings(request: Request) -> list[str]:
    """Where flash starts to move less than standard, for the longest problem of each head dim."""
    from flashbench.iomodel import paper_view

    longest: dict[tuple[int, str, bool], Problem] = {}
    for problem in request.problems:
        if problem.seqlen_q > 1 and not problem.lengths:
            key = problem.head_dim, problem.dtype, problem.causal
            if key not in longest or problem.seqlen_k > longest[key].seqlen_k:
                longest[key] = problem
    notes = []
    for problem in islice(longest.values(), 4):
        view = paper_view(problem, request.choices[0].sram_bytes or 1)
        parts = [
            f"{name} from M = {_elements(found, problem)} on{_limit(view, name)}"
            for name, found in view.crossovers.items()
        ]
        if not view.limits:
            parts[-1] += f" ({_NO_LIMITS})"
        notes.append(
            f"forward, d = {problem.head_dim}, N = {problem.seqlen_q} {problem.dtype}"
            f"{' causal' if problem.causal else ''}: fewer requested bytes than standard: {', '.join(parts)};"
            f" lower bound {view.bound:.3g} elements per head ({view.regime})"
        )
    return notes


_NO_LIMITS = (
    "the papers' limits 3d^2 and d^2 are for the unmasked forward with Nq = Nk and d = dv,"
    " without window and dropout"
)


def _limit(view: PaperView, name: str) -> str:
    if name not in view.limits:
        return ""
    form = "3d^2" if name == "flash-v1" else "d^2"
    return f" (limit for long sequences {form} = {view.limits[name]:,})"


def _elements(count: int | None, problem: Problem) -> str:
    if count is None:
        return "never"
    return f"{count:,} elements ({count * problem.dtype_bytes:,} bytes)"


def show_paper(request: Request, *, json: bool, csv: bool, quiet: bool) -> None:
    """The papers' view: a row per problem, in elements per query head."""
    from flashbench import console
    from flashbench.console import Column
    from flashbench.iomodel import paper_view

    rows = []
    for problem in request.problems:
        for choice in request.choices:
            view = paper_view(problem, choice.sram_bytes or 1)
            rows.append({
                "seqlen_q": problem.seqlen_q, "seqlen_k": problem.seqlen_k, "head_dim": problem.head_dim,
                "dtype": problem.dtype, "causal": problem.causal, "sram_bytes": choice.sram_bytes,
                "sram_elements": view.sram_elements, "block_q": view.block_q, "block_k": view.block_k,
                "passes": view.passes, "standard_elements": view.standard,
                "flash_v1_elements": view.flash_v1, "flash_v2_elements": view.flash_v2,
                "paper_v1_elements": view.paper_v1, "bound_elements": view.bound, "regime": view.regime,
                "covered": view.covered, "crossover_v1_elements": view.crossovers["flash-v1"],
                "limit_v1_elements": view.limits.get("flash-v1"),
                "crossover_v2_elements": view.crossovers["flash-v2"],
                "limit_v2_elements": view.limits.get("flash-v2"),
            })  # fmt: skip
    headers = {
        "seqlen_q": "N", "seqlen_k": "Nk", "head_dim": "d", "sram_bytes": "M (bytes)", "sram_elements": "M",
        "block_q": "B_r", "block_k": "B_c", "passes": "T_c", "standard_elements": "4N^2+4Nd",
        "flash_v1_elements": "12N^2d^2/M+2Nd", "flash_v2_elements": "4N^2d^2/M+2Nd",
        "paper_v1_elements": "paper's v1", "bound_elements": "bound", "covered": "d<=M<=Nd",
        "crossover_v1_elements": "v1 from M", "limit_v1_elements": "3d^2",
        "crossover_v2_elements": "v2 from M", "limit_v2_elements": "d^2",
    }  # fmt: skip
    columns = [
        Column(name=name, header=headers.get(name, name), format=_number, justify="right") for name in rows[0]
    ]
    console.show_table(columns, rows, json=json, csv=csv, title="" if json or csv else "accesses in elements")
    if not quiet:
        for text in (*_PAPER_NOTES, *_not_the_papers(rows)):
            console.note(text)


def _not_the_papers(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What the papers' forms take for granted and some row does not have."""
    if all(row["limit_v1_elements"] is not None for row in rows):
        return []
    found = [f"no limit beside some rows: {_NO_LIMITS}; v1, v2 from M are exact there too"]
    if any(row["seqlen_q"] != row["seqlen_k"] for row in rows):
        found.append(
            "the formulas assume Nq = Nk: where Nq differs from Nk (a decode step, say) they are evaluated"
            " with Nq Nk for N^2 and Nq + Nk for 2N; no theorem of the papers covers them"
        )
    if any(row["seqlen_q"] == row["seqlen_k"] for row in rows if row["limit_v1_elements"] is None):
        found.append(
            "a mask, a window, dropout and a dv beside d are in v1, v2 from M only: the formulas are without"
        )
    return found


_PAPER_NOTES = (
    "elements per query head of one forward; M in elements. 4N^2+4Nd is Theta(Nd+N^2), 12N^2d^2/M+2Nd and"
    " 4N^2d^2/M+2Nd are Theta(N^2 d^2/M) with the constants of the algorithms for long sequences; paper's v1:"
    " 2Nd + T_c(3Nd+4N), with l and m as the paper counts them (FlashAttention, arXiv:2205.14135, Theorem 2)",
    "bound: min(N^2 d^2/M, N^2 d/sqrt(M)), up to a constant, the switch at M = d^2 (Saha and Ye 2024,"
    " arXiv:2402.07443)",
    "v1, v2 from M: the least M from which the exact model requests fewer bytes than standard, found by"
    " bisection; 3d^2 and d^2 are their limits for long unmasked sequences without row statistics",
)


def _number(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) else "-" if value is None else str(value)


def show_tensors(request: Request, *, json: bool, csv: bool) -> None:
    """A row per kernel and tensor."""
    from flashbench import console, units
    from flashbench._cli import io_rows
    from flashbench.console import Column

    sizes = ("read_bytes", "write_bytes", "atomic_bytes")
    found = list(io_rows.tensors(request))
    names = [name for name in found[0] if json or csv or any(row[name] != found[0][name] for row in found)]
    columns = [
        Column(
            name=name,
            header=name.removesuffix("_bytes"),
            format=units.format_bytes if name in sizes else str,
            justify="right" if name in sizes else "left",
        )
        for name in names
    ]
    console.show_table(columns, found, json=json, csv=csv)


def show_explained(request: Request) -> None:
    """Every number of every row with its formula."""
    from flashbench import console
    from flashbench._cli import io_rows
    from flashbench.iomodel import explain

    for index, (_, choice, whole) in enumerate(io_rows.estimates(request)):
        text = explain(whole, io_rows.prediction(whole, choice.device), choice.device)
        console.show_text(f"\n{text}" if index else text)


def say_page(page: Path) -> None:
    """Where the page is, on stderr: stdout holds the table."""
    from flashbench import console

    console.note(f"page: {page}")
