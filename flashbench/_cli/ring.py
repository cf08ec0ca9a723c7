"""``flashbench ring``: exact attention across cards, checked, timed and taken apart beside its model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import interrupt, options
from flashbench.errors import GateError, SpecError, UnavailableError, UsageError

if TYPE_CHECKING:
    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.ring.rows import Asked

_SHARED = {"causal": "yes", "batch": "1", "impls": "ring,ulysses,allgather"}
DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "cuda": {**_SHARED, "seqlens": "64k-1m", "head_dims": "128", "dtypes": "bf16", "passes": "fwd",
             "heads": "8"},
    "cpu": {**_SHARED, "seqlens": "256", "head_dims": "32", "dtypes": "fp32", "passes": "fwd,bwd",
            "heads": "4"},
}  # fmt: skip
"""The grid where the line does not say, by the kind of device."""

RESULTS = "results.jsonl"
MAX_RANKS = 1024
MAX_CPU_RANKS = 64
MAX_CELLS = 2000
CELL_TIMEOUT = "10m"


def _impls(incomplete: str) -> list[str]:
    from flashbench.ring.rows import IMPLEMENTATIONS

    return options.complete_names(IMPLEMENTATIONS, incomplete)


def ring(
    world_size: Annotated[
        str | None, typer.Option(help="Ranks, one to a card (or CPU processes). Default: 2.", metavar="N")
    ] = None,
    seqlens: options.Seqlens = None,
    impls: Annotated[
        str | None,
        typer.Option(
            help="ring, ulysses, allgather, torch-cp (torch's own): a comma list. Default: the first three.",
            metavar="NAMES",
            autocompletion=_impls,
        ),
    ] = None,
    head_dims: options.HeadDims = None,
    head_dims_v: options.HeadDimsV = None,
    dtypes: Annotated[
        str | None, typer.Option(help="fp16, bf16, fp32: a comma list.", metavar="NAMES")
    ] = None,
    causal: options.Causal = None,
    passes: options.Passes = None,
    batch: options.Batch = None,
    tokens: options.Tokens = None,
    heads: options.Heads = None,
    hidden: options.Hidden = None,
    kv_heads: options.KvHeads = None,
    link: Annotated[
        str | None,
        typer.Option(
            help="Of the model: nvlink, pcie, network. Default: the card's fastest.", metavar="NAME"
        ),
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="With --dry-run: the card whose times the model predicts; 'flashbench list devices'.",
            metavar="NAME",
            autocompletion=options.gpus,
        ),
    ] = None,
    device: Annotated[
        str | None,
        typer.Option(help="cuda or cpu. Default: cuda if there is a GPU, else cpu.", metavar="DEVICE"),
    ] = None,
    seed: options.Seed = None,
    cell_timeout: Annotated[
        str | None, typer.Option(help=f"Longest time of one cell. Default: {CELL_TIMEOUT}.", metavar="TIME")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="Compare with fp64 and time nothing.")] = False,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="The model's word on every cell; needs no torch, starts nothing."),
    ] = False,
    out: Annotated[
        str | None, typer.Option(help="Folder for results.jsonl, each row as it is done.", metavar="DIR")
    ] = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Run attention of one sequence on several cards: ring, Ulysses, gathered K/V; time, overlap, bytes.

    Each cell is checked against fp64 before it is timed. Defaults of a GPU: --seqlens 64k-1m --head-dims 128
    --dtypes bf16 --causal yes --passes fwd --heads 8 --batch 1. Exits 5 if a cell is wrong or failed or a
    rank died, 3 where there are too few GPUs.
    """
    given = {name: value for name, value in locals().items() if isinstance(value, str)}
    options.one_format(json, csv)
    ranks, limit_s = _ranks(given), _limit(given)
    form = {"json": json, "csv": csv, "quiet": quiet}
    if dry_run:
        if check:
            raise UsageError("--check and --dry-run exclude each other; accepted: one of the two")
        _predict(given, ranks, form)
        return
    if "gpu" in given:
        raise UsageError(f"--gpu {given['gpu']!r} is of --dry-run; accepted: both, or neither")
    path = None if out is None else _new_file(out)
    target, grids = _target(device, ranks, given)
    from flashbench import units
    from flashbench.ring.rows import Asked

    link = _link(given)
    if link and target.type == "cpu":
        raise UsageError(f"--link {link!r}: a CPU has no link in the model; accepted: with GPUs or --dry-run")
    asked = Asked(
        ranks=ranks, device_type=target.type, link=link, limit_s=limit_s, timed=not check,
        seed=units.parse_int(given.get("seed", "0"), "--seed", minimum=0),
    )  # fmt: skip
    cells = grids[target.type]
    rows, lost, stopped = _measure(cells, asked, target, path, given, quiet=quiet)
    from flashbench._cli import ring_table

    ring_table.show(rows, f"attention across {target.name}", **form)
    if stopped:
        raise interrupt.interrupted(f"{len(rows)} of {len(cells)} rows were measured")
    _verdict(rows, lost)


def _ranks(given: Mapping[str, str]) -> int:
    from flashbench import units

    return units.parse_int(given.get("world_size", "2"), "--world-size", maximum=MAX_RANKS)


def _limit(given: Mapping[str, str]) -> float:
    from flashbench import units

    return units.parse_duration(given.get("cell_timeout", CELL_TIMEOUT), "--cell-timeout")


def _link(given: Mapping[str, str]) -> str:
    from flashbench import links, units

    return units.parse_choice(given["link"], "--link", links.KINDS) if "link" in given else ""


def cells_of(given: Mapping[str, str], kind: str) -> tuple[Cell, ...]:
    """The grid of a line, completed by the defaults of a kind of device. Raises SpecError, UsageError."""
    from flashbench import sweep
    from flashbench.ring.rows import IMPLEMENTATIONS

    typed = {name: text for name, text in given.items() if name in sweep.AXES}
    layers = [sweep.parse(layer, options.on_line, IMPLEMENTATIONS) for layer in (typed, DEFAULTS[kind])]
    cells = sweep.sweep_of(sweep.combine(*layers)).cells()
    if len(cells) > MAX_CELLS:
        raise SpecError(f"--seqlens and other axes multiply to {len(cells)} cells; accepted: {MAX_CELLS}")
    for cell in cells:
        if cell.problem.alignment == "top-left":
            raise SpecError("--causal 'top-left': accepted: yes, no or both")
        if cell.problem.dtype not in ("fp16", "bf16", "fp32"):
            raise SpecError(f"--dtypes {cell.problem.dtype!r}: accepted: fp16, bf16, fp32")
    return cells


def _predict(given: Mapping[str, str], ranks: int, form: Mapping[str, bool]) -> None:
    """The model's rows, without torch."""
    from flashbench._cli import gpu as gpu_
    from flashbench._cli import ring_table
    from flashbench.ring import rows

    for name in ("device", "seed", "cell_timeout", "out"):
        if name in given:
            option = options.on_line(name)
            raise UsageError(f"{option} {given[name]!r} has no meaning with --dry-run; accepted: without it")
    cards: Sequence[Any] = gpu_.choose(given["gpu"]) if "gpu" in given else [None]
    if (link := _link(given)) and "gpu" not in given:
        raise UsageError(f"--link {link!r} needs a card; accepted: with --gpu")
    found = []
    for cell in cells_of(given, "cuda"):
        refusal = rows.why_unsupported(cell, ranks, "cuda") or rows.why_not_modelled(cell)
        for card in cards:
            row = rows.modelled(cell, ranks, card, link)
            found.append(row | {"gpu": card.name if card else None, "reason": refusal})
    ring_table.show_model(found, **form)


def _new_file(out: str) -> Path:
    """The results file in a folder that has none. Raises UsageError."""
    from flashbench._cli.run import check_out

    folder = check_out(
        Path(options.path(out, "--out", "the path of a folder")), resume=False, hint="name another folder"
    )
    assert folder is not None
    return folder / RESULTS


def _target(
    device: str | None, ranks: int, given: Mapping[str, str]
) -> tuple[Target, dict[str, tuple[Cell, ...]]]:
    """Where ranks run, and the grid of each kind of device, so that a bad line is told first."""
    if device not in (None, "cpu", "cuda"):
        raise SpecError(f"--device {device!r}: accepted: cuda (a card to each rank) or cpu")
    grids = {kind: cells_of(given, kind) for kind in DEFAULTS}
    from flashbench import environment

    target = environment.target(device)
    if target.type == "cpu" and ranks > MAX_CPU_RANKS:
        raise SpecError(f"--world-size '{ranks}': accepted on a CPU: 1 to {MAX_CPU_RANKS}")
    if target.type == "cuda":
        import torch

        count = torch.cuda.device_count()
        if count < ranks:
            raise UnavailableError(
                f"--world-size {ranks} needs {ranks} GPUs, this machine has {count}",
                hint="pass a smaller --world-size, or --device cpu to check without timing",
            )
    return target, grids


def _measure(
    cells: Sequence[Cell], asked: Asked, target: Target, path: Path | None, given: Mapping[str, str], *,
    quiet: bool,
) -> tuple[list[dict[str, Any]], str | None, bool]:  # fmt: skip
    """The rows, how a rank was lost, if one was, and whether it was stopped before all were there."""
    from flashbench import console
    from flashbench._cli.rows_file import kept
    from flashbench.ring.group import RankLost
    from flashbench.ring.rows import measured

    found: list[dict[str, Any]] = []
    about = partial(_environment, target, asked.ranks)
    with (
        interrupt.interruptible() as stop,
        kept(found, path, "ring", about=about, texts=given, planned=len(cells)) as keep,
        console.progress(len(cells), quiet=quiet) as tick,
    ):
        tick(0, f"{asked.ranks} ranks")
        try:
            for row in measured(cells, asked, target):
                keep(row)
                tick(len(found), f"{row['implementation']} {row['pass']} {row['seqlen']}")
        except RankLost as lost:
            skipped = sum(row["status"] == "skipped" for row in found)
            return found, f"{lost}; {skipped} of {len(cells)} cells were not started", False
    return found, None, stop()


def _environment(target: Target, ranks: int) -> dict[str, Any]:
    from flashbench import environment

    about = environment.collect(target)
    if target.type == "cuda":
        about["ranks"] = environment.cards(ranks)
    return about


def _verdict(rows: list[dict[str, Any]], lost: str | None) -> None:
    """Raise GateError where a row is wrong or failed or a rank was lost."""
    if lost is not None:
        raise GateError(lost)
    bad = [row for row in rows if row["status"] in ("wrong", "failed")]
    if bad:
        raise GateError(f"{len(bad)} of {len(rows)} rows: {bad[0]['status']}, {bad[0]['reason']}")
