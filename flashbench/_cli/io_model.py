"""``flashbench io-model``: what each algorithm moves, computes and needs, without a GPU."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Annotated, Any

import typer

from flashbench._cli import options
from flashbench._cli.feature_options import with_features
from flashbench.errors import UsageError

_PROBLEM, _MODEL, _WHAT_IF, _OUTPUT = "Problem", "Model", "What if", "Output"


def _models(incomplete: str) -> list[str]:
    from flashbench.iomodel import MODELS

    return options.complete_names(tuple(row.name for row in MODELS), incomplete)


def _dtypes(incomplete: str) -> list[str]:
    return options.complete_names(("fp16", "bf16", "fp32", "tf32", "fp8"), incomplete)


def _gpus(incomplete: str) -> list[str]:
    from flashbench.devices import DEVICES

    return options.complete_names(tuple(row.name for row in DEVICES), incomplete)


def _option(help_: str, metavar: str, panel: str, complete: Any = None) -> Any:
    return typer.Option(help=help_, metavar=metavar, rich_help_panel=panel, autocompletion=complete)


def _workloads(incomplete: str) -> list[str]:
    from flashbench.presets import WORKLOADS

    return [row.name for row in WORKLOADS if row.name.startswith(incomplete)]


@with_features
def io_model(
    seqlens: options.Seqlens = None,
    seqlens_k: options.SeqlensK = None,
    head_dims: options.HeadDims = None,
    head_dims_v: options.HeadDimsV = None,
    dtypes: Annotated[
        str | None,
        _option("fp16, bf16, fp32 (IEEE), tf32, fp8: a comma list.", "NAMES", _PROBLEM, _dtypes),
    ] = None,
    causal: options.Causal = None,
    passes: options.Passes = None,
    batch: options.Batch = None,
    tokens: options.Tokens = None,
    heads: options.Heads = None,
    hidden: options.Hidden = None,
    kv_heads: options.KvHeads = None,
    model: options.Model = None,
    preset: Annotated[
        str | None,
        _option("A published measurement's problem, such as fa1-fig2.", "NAME", _PROBLEM, _workloads),
    ] = None,
    mode: Annotated[
        str | None,
        _option(
            "prefill, or decode: one query per sequence; --seqlens are then the lengths of the cache, the"
            " batch is 1 and the query heads of a K/V head are packed, unless said otherwise.",
            "MODE",
            _PROBLEM,
        ),
    ] = None,
    alignment: Annotated[
        str | None,
        _option("Diagonal of a causal mask or window: bottom-right or top-left.", "CHOICE", _PROBLEM),
    ] = None,
    lengths: Annotated[
        str | None,
        _option(
            "The same as --varlen.",
            "LENGTHS",
            _PROBLEM,
        ),
    ] = None,
    features: options.Features = None,
    models: Annotated[
        str | None,
        _option(
            "Algorithms and bundled kernels, a comma list; 'flashbench list models' shows all.",
            "NAMES",
            _MODEL,
            _models,
        ),
    ] = None,
    sram: Annotated[
        str | None,
        _option("On-chip memory per SM, KB = 1024 bytes. Default: 192KB, or that of --gpu.", "SIZE", _MODEL),
    ] = None,
    gpu: Annotated[
        str | None,
        _option(
            "Cards, a comma list of one or several: their on-chip memory, DRAM traffic and time, side by"
            " side; 'flashbench list devices' shows all; auto: this machine's; or a TOML file.",
            "NAMES",
            _MODEL,
            _gpus,
        ),
    ] = None,
    block_q: Annotated[
        str | None,
        _option("Rows of Q per tile. Default: derived from the on-chip memory.", "N", _MODEL),
    ] = None,
    block_k: Annotated[
        str | None,
        _option("Rows of K/V per tile. Default: derived from the on-chip memory.", "N", _MODEL),
    ] = None,
    sweep_sram: Annotated[
        str | None,
        _option("What if: a row per size of M, '16KB-512KB' doubles. Excludes --sram.", "SIZES", _WHAT_IF),
    ] = None,
    sweep_block: Annotated[
        str | None,
        _option(
            "What if: a row per square tile, '16-256' doubles, '16-256+16' steps. Excludes --block-q and"
            " --block-k.",
            "ROWS",
            _WHAT_IF,
        ),
    ] = None,
    html: Annotated[
        str | None,
        _option(
            "Also write an interactive page: bytes over length, M and block size; with --gpu time, roofline"
            " and cards side by side.",
            "FILE",
            _WHAT_IF,
        ),
    ] = None,
    pack_gqa: Annotated[
        str | None,
        _option("Query heads of a K/V head share a tile: yes, no, auto (as published).", "CHOICE", _MODEL),
    ] = None,
    splits: Annotated[
        str | None,
        _option("Split K/V over N thread blocks, with a merge; auto: flash-attention's rule.", "N", _MODEL),
    ] = None,
    page_size: Annotated[str | None, _option("Rows of K/V per page of a paged cache.", "N", _MODEL)] = None,
    density: Annotated[
        str | None, _option("Block-sparse: share of the visible tiles that are computed.", "S", _MODEL)
    ] = None,
    world_size: Annotated[
        str | None,
        _option(
            "Instead: one sequence over N cards by ring, Ulysses or gathered K/V: bytes over the link, and"
            " with --gpu when compute hides them.",
            "N",
            _MODEL,
        ),
    ] = None,
    link: Annotated[
        str | None,
        _option("With --world-size: nvlink, pcie or network. Default: the card's fastest.", "NAME", _MODEL),
    ] = None,
    paper: Annotated[
        bool,
        typer.Option(
            "--paper",
            help="The papers' view instead: Θ forms, lower bound and crossovers, in elements per head.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    explain: Annotated[
        bool,
        typer.Option(
            "--explain",
            help="Text instead: every formula with its numbers, level, assumption and source.",
            rich_help_panel=_OUTPUT,
        ),
    ] = False,
    tensors: Annotated[
        bool,
        typer.Option("--tensors", help="A row per kernel and tensor instead.", rich_help_panel=_OUTPUT),
    ] = False,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Predict FLOPs, memory traffic and extra memory by algorithm; needs no GPU.

    Defaults: --seqlens 1k-64k --head-dims 128 --dtypes bf16 --causal no --passes fwd --tokens 16k
    --hidden 2048 --models standard,flash-v1,flash-v2 --sram 192KB.
    """  # fmt: skip
    line = {name: value for name, value in locals().items() if not isinstance(value, bool | dict)}
    across = world_size is not None
    views = {"--paper": paper, "--tensors": tensors, "--explain": explain, "--world-size": across}
    _one_view(views, json, csv)
    from flashbench._cli import io_effects, io_link, io_paper, io_request, io_sweep, io_table

    page = io_sweep.page_path(html, _named(gpu, features)) if html is not None else None
    request = io_request.read(line, features or {})
    if across:
        io_link.show(request, line, json=json, csv=csv, quiet=quiet)
        return
    io_link.refuse_link(line)
    io_effects.refuse(line, request, paper=paper and page is None)
    if page is not None:
        io_sweep.write_page(request, line, page, sys.argv[1:])
    if explain:
        io_table.show_explained(request)
    elif paper:
        io_paper.show(request, json=json, csv=csv, quiet=quiet)
    elif tensors:
        io_table.show_tensors(request, json=json, csv=csv)
    else:
        io_table.show(request, json=json, csv=csv, quiet=quiet)
    if page is not None and not quiet:
        io_table.say_page(page)


def _named(gpu: str | None, features: Mapping[str, Any] | None) -> list[str]:
    """What may name files that are read."""
    texts = [gpu, *(features or {}).values()]
    return [name for text in texts if isinstance(text, str) for name in text.split(",")]


def _one_view(views: dict[str, bool], json: bool, csv: bool) -> None:
    """Raise UsageError where the line asks for two outputs at once."""
    options.one_format(json, csv)
    asked = [name for name, wanted in views.items() if wanted]
    if views["--explain"] and (json or csv):
        asked.append("--json" if json else "--csv")
    if len(asked) > 1:
        raise UsageError(f"{asked[0]} and {asked[1]} exclude each other; accepted: one of the two")
