"""``flashbench kv-cache``: what a decoder caches, how much fits on the cards, the bound on decode time."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import kv_cache_table, options
from flashbench.errors import SpecError, UsageError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.devices import Device
    from flashbench.kvcache import CacheEstimate, Serving
    from flashbench.presets import Preset

SEQLENS = "1k-128k"
"""Lengths where --seqlens is not given."""

_SHAPE, _CARD, _OUTPUT = "Model", "Cards", "Output"
_BY_HAND = ("layers", "heads", "kv_heads", "head_dim", "head_dim_v", "window", "windowed_layers",
            "latent_dim", "rope_dim")  # fmt: skip


def _dtypes(incomplete: str) -> list[str]:
    from flashbench.kvcache import CACHE_BITS

    return options.complete_names(tuple(CACHE_BITS), incomplete)


def _shape(help_: str, *names: str) -> Any:
    return typer.Option(*names, help=help_, metavar="N", rich_help_panel=_SHAPE)


def _card(help_: str, metavar: str, complete: Any = None) -> Any:
    return typer.Option(help=help_, metavar=metavar, rich_help_panel=_CARD, autocompletion=complete)


def kv_cache(
    model: Annotated[
        str | None,
        typer.Option(
            help="Published models, a comma list; 'flashbench list presets' shows all.",
            metavar="NAMES",
            rich_help_panel=_SHAPE,
            autocompletion=options.models,
        ),
    ] = None,
    layers: Annotated[str | None, _shape("Layers, for a model given by hand.")] = None,
    heads: Annotated[str | None, _shape("Query heads, for FLOPs.")] = None,
    kv_heads: Annotated[str | None, _shape("K/V heads.")] = None,
    head_dim: Annotated[str | None, _shape("Head dim of Q and K.", "--head-dim", "--head-dims")] = None,
    head_dim_v: Annotated[
        str | None, _shape("Head dim of V. Default: as --head-dim.", "--head-dim-v", "--head-dims-v")
    ] = None,
    window: Annotated[str | None, _shape("Tokens that a windowed layer keeps.")] = None,
    windowed_layers: Annotated[str | None, _shape("Layers with the window. Default: all.")] = None,
    latent_dim: Annotated[str | None, _shape("MLA: numbers of the latent per token and layer.")] = None,
    rope_dim: Annotated[str | None, _shape("MLA: numbers of the rotary key beside it.")] = None,
    seqlens: Annotated[
        str | None, typer.Option(help=f"Tokens per sequence. Default: {SEQLENS}.", metavar="LENGTHS")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Sequences. Default: 1.", metavar="N")] = None,
    dtypes: Annotated[
        str | None,
        typer.Option(
            "--dtypes",
            "--dtype",
            help="bf16, fp16, fp32, fp8, int8, fp4, int4: a comma list. Default: bf16.",
            metavar="NAMES",
            autocompletion=_dtypes,
        ),
    ] = None,
    page_size: Annotated[
        str | None, typer.Option(help="Tokens per page of one layer. Default: 16.", metavar="N")
    ] = None,
    scale_bytes: Annotated[
        str | None,
        typer.Option(
            help="Bytes of scales per token, layer, K/V head and tensor. Default: 0 (scales per tensor).",
            metavar="N",
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        _card(
            "Cards, a comma list; 'flashbench list devices' shows all; auto: this machine's; or a TOML file.",
            "NAMES",
            options.gpus,
        ),
    ] = None,
    tp: Annotated[str | None, _card("Cards that share the K/V heads. Default: 1.", "N")] = None,
    cp: Annotated[
        str | None,
        _card(
            "Groups of --tp cards that share each sequence's tokens (split-KV across cards). Default: 1.", "N"
        ),
    ] = None,
    link: Annotated[
        str | None, _card("With --cp: nvlink, pcie or network. Default: the card's fastest.", "NAME")
    ] = None,
    weights: Annotated[
        str | None,
        _card("Size of the weights, such as 141GB or 0. Default: the published checkpoint.", "SIZE"),
    ] = None,
    memory_fraction: Annotated[
        str | None, _card("Share of the memory for weights and cache. Default: 0.9.", "X")
    ] = None,
    html: options.Html = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes.", rich_help_panel=_OUTPUT)] = False,
) -> None:
    """Size the KV cache of a model: per token, per sequence, on the cards; needs no GPU.

    Either --model, or --layers, --kv-heads and --head-dim (MLA: --layers, --latent-dim, --rope-dim,
    --heads).
    """  # fmt: skip
    given = options.given({name: value for name, value in locals().items() if isinstance(value, str)})
    from flashbench import console
    from flashbench._cli import io_sweep

    options.one_format(json, csv)
    page = io_sweep.page_path(str(given.pop("html"))) if "html" in given else None
    rows = _estimates(given)
    columns, cells = kv_cache_table.columns(), [kv_cache_table.row(row) for row in rows]
    if page is not None:
        _write(page, rows, columns, cells)
    if not (json or csv):
        columns = kv_cache_table.needed(columns, rows)
    notes = [] if quiet else kv_cache_table.notes(rows)
    console.show_table(columns, cells, json=json, csv=csv, title=kv_cache_table.title(rows), notes=notes)


def _write(
    page: Path, rows: Sequence[CacheEstimate], columns: Sequence[Column], cells: Sequence[dict[str, Any]]
) -> None:
    from flashbench._cli import io_sweep
    from flashbench.report import kv_page

    command = shlex.join(["flashbench", *sys.argv[1:]])
    notes = kv_cache_table.notes(rows)
    io_sweep.put(page, kv_page.build(rows, columns, cells, command=command, notes=notes))


def _estimates(given: Mapping[str, Any]) -> list[CacheEstimate]:
    """One row per model, dtype, card and length, the length innermost."""
    from flashbench import kvcache, units
    from flashbench.problem import MAX_SEQLEN
    from flashbench.sweep import MAX_CELLS

    models = _models(given)
    dtypes = units.parse_names(given.get("dtypes", "bf16"), "--dtypes", kvcache.CACHE_BITS)
    seqlens = units.parse_axis(given.get("seqlens", SEQLENS), "--seqlens", maximum=MAX_SEQLEN)
    batch = units.parse_int(given.get("batch", "1"), "--batch")
    served = _serving(given)
    sizes = {"--seqlens": len(seqlens), "--model": len(models), "--dtypes": len(dtypes),
             "--gpu and other axes of cards": len(served)}  # fmt: skip
    units.limit(sizes, MAX_CELLS, "rows")
    try:
        return [
            kvcache.estimate(model, seqlen=seqlen, batch=batch, dtype=dtype, serving=how)
            for model in models for dtype in dtypes for how in served for seqlen in seqlens
        ]  # fmt: skip
    except SpecError as problem:
        name, value, rest = str(problem).split(" ", 2)
        rest = rest.replace("; it must", "; accepted: it must")
        raise SpecError(f"{options.on_line(name)} '{value}': {rest}") from None


def _models(given: Mapping[str, Any]) -> list[Preset]:
    from flashbench import presets, units

    typed = [name for name in _BY_HAND if name in given]
    if "model" in given:
        if typed:
            option = options.on_line(typed[0])
            raise UsageError(
                f"--model {units.quoted(given['model'])} and {option} {units.quoted(given[typed[0]])} exclude"
                " each other; accepted: one of the two"
            )
        known = [row.name for row in presets.PRESETS]
        return [presets.find(name) for name in units.parse_names(given["model"], "--model", known)]
    mla = "latent_dim" in given
    if mla and (
        other := next((name for name in ("kv_heads", "head_dim", "head_dim_v") if name in given), None)
    ):
        raise UsageError(
            f"--latent-dim {units.quoted(given['latent_dim'])} and {options.on_line(other)}"
            f" {units.quoted(given[other])} exclude each other; accepted: one of them (MLA caches a latent)"
        )
    wanted = ("layers", "latent_dim") if mla else ("layers", "kv_heads", "head_dim")
    missing = [options.on_line(name) for name in wanted if name not in given]
    if missing:
        raise UsageError(
            f"{', '.join(missing)} not given; accepted: --model NAME, or --layers, --kv-heads and --head-dim",
            hint="'flashbench list presets' shows the models",
        )
    return [_by_hand({name: units.parse_int(given[name], options.on_line(name)) for name in typed})]


def _by_hand(shape: Mapping[str, int]) -> Preset:
    """A model from its dims. Raises SpecError where they contradict each other."""
    from flashbench.presets import Preset

    layers, kv_heads = shape["layers"], shape.get("kv_heads", 1)
    heads = shape.get("heads", 0)
    if heads % kv_heads:
        raise SpecError(
            f"--kv-heads '{kv_heads}': {heads} query heads are not divisible by {kv_heads};"
            f" accepted: a divisor of {heads}"
        )
    windowed = shape.get("windowed_layers", layers if "window" in shape else 0)
    if windowed > layers:
        raise SpecError(f"--windowed-layers '{windowed}': out of range; accepted: 0 to {layers}")
    if windowed and "window" not in shape:
        raise SpecError(f"--windowed-layers '{windowed}' needs --window; accepted: the tokens that they keep")
    if "rope_dim" in shape and "latent_dim" not in shape:
        raise SpecError(f"--rope-dim '{shape['rope_dim']}' needs --latent-dim; accepted: both, for MLA")
    return Preset(
        name="by hand", layers=layers, num_heads=heads, num_kv_heads=kv_heads,
        head_dim=shape.get("head_dim", shape.get("latent_dim", 0) + shape.get("rope_dim", 0)),
        head_dim_v=shape.get("head_dim_v", 0), window=shape.get("window"), windowed_layers=windowed,
        latent_dim=shape.get("latent_dim", 0), rope_dim=shape.get("rope_dim", 0), weights_bytes=0,
        weights="not given", source="the command line",
    )  # fmt: skip


def _serving(given: Mapping[str, Any]) -> list[Serving]:
    """How it is served, once per card."""
    from flashbench import links, units
    from flashbench._cli import gpu as gpu_
    from flashbench.kvcache import MEMORY_FRACTION, PAGE_SIZE, Serving

    cards: Sequence[Device | None] = [None]
    if "gpu" in given:
        cards = gpu_.choose(given["gpu"])
    else:
        for name in ("weights", "memory_fraction"):
            if name in given:
                raise UsageError(
                    f"{options.on_line(name)} {units.quoted(given[name])} needs --gpu; accepted: a card"
                )
    cp, link = units.parse_int(given.get("cp", "1"), "--cp", maximum=65536), given.get("link", "")
    if link:
        units.parse_choice(link, "--link", links.KINDS)
        if cp == 1 or "gpu" not in given:
            raise UsageError(f"--link {units.quoted(link)} needs --cp and --gpu; accepted: all three")
    for card in cards if cp > 1 else ():
        if card is not None:
            found = links.of(card.name)
            found.rate(link or found.fastest)
    share = MEMORY_FRACTION
    if "memory_fraction" in given:
        share = options.fraction(given["memory_fraction"], "--memory-fraction")
    weights = given.get("weights")
    size = 0 if weights == "0" else None if weights is None else units.parse_bytes(weights, "--weights")
    return [
        Serving(
            page_size=units.parse_int(given.get("page_size", str(PAGE_SIZE)), "--page-size"),
            device=card, tp=units.parse_int(given.get("tp", "1"), "--tp", maximum=65536),
            cp=cp, link=link, weights_bytes=size, memory_fraction=share,
            scale_bytes=units.parse_int(given.get("scale_bytes", "0"), "--scale-bytes", minimum=0),
        )
        for card in cards
    ]  # fmt: skip
