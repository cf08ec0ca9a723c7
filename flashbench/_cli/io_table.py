"""How ``flashbench io-model`` shows its rows: columns and title; notes are in io_notes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

    from flashbench._cli.io_request import Request
    from flashbench.console import Column
    from flashbench.problem import Problem

_CONTEXT = ("dtype", "causal", "num_heads", "num_kv_heads", "head_dim", "pass", "gpu", "sram_bytes")
"""In the title where all rows agree, else a column."""


def show(request: Request, *, json: bool, csv: bool, quiet: bool) -> None:
    """The table, JSON or CSV of every row, and the notes."""
    from flashbench import console
    from flashbench._cli import io_notes, io_rows

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
        for note in io_notes.notes(request, found):
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
    if problem.masked:
        return f"window ({problem.alignment})"
    return "" if problem.block_mask else "no mask"


def _extras(request: Request, problem: Problem) -> list[str]:
    """Options of problem and variant that are not at their defaults."""
    variant = request.choices[0].variant
    words = ["decode"] if request.mode == "decode" else []
    if problem.window != (-1, -1):
        words.append("window {} to {}".format(*(("any", side)[side != -1] for side in problem.window)))
    if problem.dropout_p:
        words.append(f"dropout {problem.dropout_p:g}")
    if problem.block_mask:
        words.append(f"block mask {problem.block_mask}")
    if problem.lengths:
        words.append(f"{len(problem.lengths)} packed sequences")
    if variant.page_size:
        words.append(f"pages of {variant.page_size}")
    if variant.density < 1:
        words.append(f"density {variant.density:g}")
    return words


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
