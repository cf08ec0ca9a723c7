"""``flashbench io-model``: what each algorithm moves, computes and needs, without a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import options
from flashbench.errors import SpecError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.devices import Device
    from flashbench.iomodel import Estimate
    from flashbench.problem import Problem

DEFAULTS = {
    "seqlens": "1k-64k",
    "head_dims": "128",
    "dtypes": "bf16",
    "causal": "no",
    "passes": "fwd",
    "tokens": "16k",
    "hidden": "2048",
}
"""What an axis is where the line does not say, as it would be typed; the papers' convention."""

_AXES = (*DEFAULTS, "seqlens_k", "head_dims_v", "batch", "heads", "kv_heads")
_MODEL, _OUTPUT = "Model", "Output"


def _models(incomplete: str) -> list[str]:
    from flashbench.iomodel import MODELS

    return options.complete_names(tuple(row.name for row in MODELS), incomplete)


def _gpus(incomplete: str) -> list[str]:
    from flashbench.devices import DEVICES

    return [row.name for row in DEVICES if row.name.startswith(incomplete)]


def io_model(
    seqlens: options.Seqlens = None,
    seqlens_k: options.SeqlensK = None,
    head_dims: options.HeadDims = None,
    head_dims_v: options.HeadDimsV = None,
    dtypes: options.Dtypes = None,
    causal: options.Causal = None,
    passes: options.Passes = None,
    batch: options.Batch = None,
    tokens: options.Tokens = None,
    heads: options.Heads = None,
    hidden: options.Hidden = None,
    kv_heads: options.KvHeads = None,
    models: Annotated[
        str | None,
        typer.Option(
            help="Algorithms, a comma list; 'flashbench list models' shows all.",
            metavar="NAMES",
            rich_help_panel=_MODEL,
            autocompletion=_models,
        ),
    ] = None,
    sram: Annotated[
        str | None,
        typer.Option(
            help="On-chip memory per SM, KB = 1024 bytes. Default: 192KB, or that of --gpu.",
            metavar="SIZE",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="Take the on-chip memory of this card; 'flashbench list devices' shows all.",
            metavar="NAME",
            rich_help_panel=_MODEL,
            autocompletion=_gpus,
        ),
    ] = None,
    block_q: Annotated[
        str | None,
        typer.Option(
            help="Rows of Q per tile. Default: derived from the on-chip memory.",
            metavar="N",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    block_k: Annotated[
        str | None,
        typer.Option(
            help="Rows of K/V per tile. Default: derived from the on-chip memory.",
            metavar="N",
            rich_help_panel=_MODEL,
        ),
    ] = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Predict FLOPs, memory traffic and extra memory by algorithm; needs no GPU.

    Defaults: --seqlens 1k-64k --head-dims 128 --dtypes bf16 --causal no --passes fwd --tokens 16k
    --hidden 2048 --models standard,flash-v1,flash-v2 --sram 192KB.
    """  # fmt: skip
    axes = {name: value for name, value in locals().items() if name in _AXES}
    from flashbench import console

    options.one_format(json, csv)
    device, sram_bytes = _memory(sram, gpu)
    tiles = _tiles(block_q, block_k)
    rows = _rows(axes, models, sram_bytes, tiles, device)
    raw = [column for column in _columns() if column.name not in _TEXT_ONLY]
    columns = raw if json or csv else _varying(_columns(), rows)
    notes = [] if quiet else _notes(rows, sram_bytes, tiles)
    console.show_table(columns, rows, json=json, csv=csv, title=_title(rows), notes=notes)


def _memory(sram: str | None, gpu: str | None) -> tuple[Device | None, int]:
    """The card, and M in bytes: --sram, else the card's, else the paper's."""
    from flashbench import devices, units
    from flashbench.iomodel import DEFAULT_SRAM_BYTES

    device = None
    if gpu is not None:
        device = devices.find(units.parse_choice(gpu, "--gpu", [row.name for row in devices.DEVICES]))
    if sram is not None:
        return device, units.parse_bytes(sram, "--sram")
    return device, device.smem_per_sm_bytes if device else DEFAULT_SRAM_BYTES


def _tiles(block_q: str | None, block_k: str | None) -> dict[str, int]:
    from flashbench import units

    given = {"block_q": block_q, "block_k": block_k}
    return {
        name: units.parse_int(text, options.on_line(name)) for name, text in given.items() if text is not None
    }


def _rows(
    axes: Mapping[str, str | None],
    models: str | None,
    sram_bytes: int,
    tiles: Mapping[str, int],
    device: Device | None,
) -> list[dict[str, Any]]:
    """One row per problem, pass and model, in that order, the model innermost."""
    from flashbench import units
    from flashbench.iomodel import MODELS, estimate

    shown = ",".join(row.name for row in MODELS if row.shown)
    names = units.parse_names(shown if models is None else models, "--models", [row.name for row in MODELS])
    rows = []
    for problem, pass_ in _cells(axes, len(names)):
        ask = partial(estimate, sram_bytes=sram_bytes, tiles=tiles, device=device)
        standard = ask("standard", problem, pass_).requested.total_bytes
        for name in names:
            row = ask(name, problem, pass_)
            rows.append(_row(row, sram_bytes) | {"standard_ratio": standard / row.requested.total_bytes})
    return rows


def _cells(axes: Mapping[str, str | None], models: int) -> Iterator[tuple[Problem, str]]:
    from flashbench import sweep

    given = sweep.parse(options.given(axes), options.on_line, ())
    joined = sweep.combine(given, sweep.parse(DEFAULTS, options.on_line, ()))
    problems = list(sweep.Sweep(impls=(), **joined).problems())
    count = len(problems) * len(joined["passes"]) * models
    if count > sweep.MAX_CELLS:
        raise SpecError(f"the axes multiply to {count} rows; accepted: at most {sweep.MAX_CELLS}")
    return ((problem, pass_) for problem in problems for pass_ in joined["passes"])


def _row(row: Estimate, sram_bytes: int) -> dict[str, Any]:
    p = row.problem
    return {
        "model": row.model, "pass": row.pass_, "dtype": p.dtype, "causal": p.causal, "batch": p.batch,
        "num_heads": p.num_heads, "num_kv_heads": p.num_kv_heads, "seqlen_q": p.seqlen_q,
        "seqlen_k": p.seqlen_k, "head_dim": p.head_dim, "head_dim_v": p.head_dim_v,
        "sram_bytes": sram_bytes, "sram_elements": row.sram_elements,
        "tile": _tile_text(row), "tiles": row.tiles or None, "tile_source": row.tile_source or None,
        "tiles_fit": row.tiles_fit,
        "flops": row.flops, "done_flops": row.done_flops, "exps": row.exps,
        "requested_read_bytes": row.requested.read_bytes, "requested_write_bytes": row.requested.write_bytes,
        "requested_atomic_bytes": row.requested.atomic_bytes,
        "compulsory_bytes": row.compulsory.total_bytes, "compulsory_read_bytes": row.compulsory.read_bytes,
        "compulsory_write_bytes": row.compulsory.write_bytes,
        "saved_bytes": row.saved_bytes, "extra_bytes": row.extra_bytes,
        "intensity_requested": row.intensity, "intensity_compulsory": row.intensity_compulsory,
    }  # fmt: skip


def _columns() -> list[Column]:
    """Every column; a person sees some of them."""
    from flashbench import units
    from flashbench.console import Column

    def number(name: str, header: str, format: Any) -> Column:
        return Column(name=name, header=header, format=format, justify="right")

    flop = partial(units.format_count, unit="FLOP")
    size = units.format_bytes
    return [
        number("seqlen_q", "seqlen", units.format_length),
        number("seqlen_k", "seqlen_k", units.format_length),
        number("head_dim", "d", str),
        number("head_dim_v", "dv", str),
        Column(name="dtype", header="dtype"),
        Column(name="causal", header="causal", format=lambda value: "yes" if value else "no"),
        number("batch", "batch", str),
        number("num_heads", "heads", str),
        number("num_kv_heads", "kv heads", str),
        Column(name="pass", header="pass"),
        Column(name="model", header="model"),
        number("sram_bytes", "M", partial(size, binary=True)),
        number("sram_elements", "M (elements)", str),
        Column(name="tile", header="tile q x k"),
        Column(name="tiles", header="tiles"),
        Column(name="tile_source", header="tiles from"),
        Column(name="tiles_fit", header="fits M"),
        number("flops", "FLOPs", flop),
        number("done_flops", "done", flop),
        number("exps", "exps", units.format_count),
        number("requested_read_bytes", "read", size),
        number("requested_write_bytes", "write", size),
        number("requested_atomic_bytes", "atomic", size),
        number("compulsory_bytes", "compulsory", size),
        number("compulsory_read_bytes", "compulsory read", size),
        number("compulsory_write_bytes", "compulsory write", size),
        number("saved_bytes", "saved", size),
        number("extra_bytes", "extra", size),
        number("intensity_requested", "FLOP/B", "{:.1f}".format),
        number("intensity_compulsory", "at most", "{:.0f}".format),
        number("standard_ratio", "standard/this", "{:.2f}x".format),
    ]


def _tile_text(row: Estimate) -> str | None:
    """ "384x1 (sram)", or kernel by kernel "dkdv 1x192, dq 256x1 (sram, does not fit)"."""
    kernels = [key.removesuffix("_block_q") for key in row.tiles if key.endswith("_block_q")]
    sizes = [f"{row.tiles[name + '_block_q']}x{row.tiles[name + '_block_k']}" for name in kernels]
    if not sizes:
        return None
    if len(sizes) > 1:
        sizes = [f"{name} {size}" for name, size in zip(kernels, sizes, strict=True)]
    marks = row.tile_source + (", does not fit" if row.tiles_fit is False else "")
    return f"{', '.join(sizes)} ({marks})"


_CONTEXT = ("seqlen_q", "head_dim", "dtype", "causal", "num_heads", "num_kv_heads", "pass")
_RAW_ONLY = (
    "sram_bytes", "sram_elements", "tiles", "tile_source", "tiles_fit", "done_flops", "exps", "saved_bytes",
    "compulsory_read_bytes", "compulsory_write_bytes", "intensity_compulsory",
)  # fmt: skip
_TEXT_ONLY = ("tile", "compulsory_bytes")
"""Shown to a person only: JSON and CSV hold their parts."""


def _varying(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]]) -> list[Column]:
    """What a person needs: columns that say something new; JSON and CSV have them all."""

    def needed(name: str) -> bool:
        if name in _RAW_ONLY:
            return False
        if name == "seqlen_k":
            return any(row[name] != row["seqlen_q"] for row in rows)
        if name == "head_dim_v":
            return any(row[name] != row["head_dim"] for row in rows)
        if name == "num_kv_heads":
            return any(row[name] != row["num_heads"] for row in rows)
        if name == "requested_atomic_bytes":
            return any(row[name] for row in rows)
        return name == "seqlen_q" or name not in _CONTEXT or len({row[name] for row in rows}) > 1

    return [column for column in columns if needed(column.name)]


def _title(rows: Sequence[Mapping[str, Any]]) -> str:
    """What all rows share, and M."""
    first = rows[0]
    shared = {name for name in _CONTEXT if len({row[name] for row in rows}) == 1}
    words = [
        text
        for name, text in (
            ("pass", f"pass {first['pass']}"),
            ("dtype", str(first["dtype"])),
            ("head_dim", f"d = {first['head_dim']}"),
            ("causal", "causal (bottom-right)" if first["causal"] else "no mask"),
            ("num_heads", f"{first['num_heads']} heads"),
        )
        if name in shared
    ]
    elements = {row["dtype"]: row["sram_elements"] for row in rows}
    memory = ", ".join(f"{count:,} elements of {dtype}" for dtype, count in elements.items())
    return f"{', '.join(words)}; M = {first['sram_bytes']:,} bytes = {memory}"


def _notes(rows: Sequence[Mapping[str, Any]], sram_bytes: int, tiles: Mapping[str, int]) -> list[str]:
    notes = [
        f"M is the on-chip memory of one SM: {sram_bytes:,} bytes; typed sizes take KB = 1024 bytes, lengths"
        " k = 1024; printed sizes are GB = 10^9 bytes",
        "read, write: requested bytes, which kernels load and store between SM and L2; compulsory: each"
        " tensor once; extra: predicted peak memory beyond the inputs, outputs included; FLOP/B: FLOPs over"
        " requested bytes; standard/this: how many times fewer requested bytes than standard",
    ]
    if not tiles and any(row["tile_source"] == "sram" for row in rows):
        notes.append(
            "tiles from M in elements: flash-v1 block_k = ceil(M/4d), block_q = min(block_k, d); flash-v2"
            " block_q = floor(M/2d) with K/V streamed (block_k 1)"
        )
    if any(row["tiles_fit"] is False for row in rows):
        notes.append("'does not fit': the tile needs more than M elements, so no such kernel can run")
    return notes
