"""``flashbench profile --counters``: cells under Nsight Compute, predicted beside counted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flashbench._cli.run import RESULTS
from flashbench.errors import EXIT_INTERRUPTED, UnavailableError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.devices import Device
    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.record import Record

RAW = "counters"
"""Folder, below --out, of the profiler's own CSV files."""
COUNTED = "counted, not timed"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to count and show. detail: more counters. kernels: a row per kernel too. argv: as typed."""

    detail: bool = False
    kernels: bool = False
    seed: int = 0
    json: bool = False
    csv: bool = False
    quiet: bool = False
    argv: Sequence[str] = ()


def show(cells: Sequence[Cell], target: Target, out: Path, options: Options) -> None:
    """Count the cells, keep each as it is known, print predicted beside counted.

    Raises UnavailableError where nothing can be counted here.
    """
    from flashbench import console, counting, environment, runfile
    from flashbench._cli.interrupt import terminable

    if reason := counting.why_unavailable(target):
        raise UnavailableError(f"no counters: {reason}")
    about = environment.collect(target)
    head = runfile.header(argv=options.argv, options={}, environment=about, cells=cells)
    records: list[Record] = []
    try:
        with terminable(), runfile.create(out / RESULTS, head) as writer:
            _count(cells, target, out, options, (writer.append, records.append, about))
    except KeyboardInterrupt:
        records = list(runfile.load(out / RESULTS).records)  # the stop may have come before the list
        _show(records, target, options)
        console.warn(f"interrupted; {out / RESULTS} holds {len(records)} of {len(cells)} cells")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _show(records, target, options)
    if not options.quiet:
        for text in _reasons(records):
            console.note(text)
        console.note(f"results: {out / RESULTS}; the profiler's own files: {out / RAW}")
    if records and all("reason" in record.counters for record in records):
        raise UnavailableError(f"no cell was counted: {records[0].counters['reason']}")


def _count(
    cells: Sequence[Cell],
    target: Target,
    out: Path,
    options: Options,
    kept: tuple[Any, Any, Mapping[str, Any]],
) -> None:
    from flashbench import console, counting

    append, collect, about = kept
    with console.progress(len(cells), quiet=options.quiet) as tick:
        done = 0

        def keep(cell: Cell, counters: counting.Counters) -> None:
            nonlocal done
            done += 1
            tick(done, cell.key)
            record = _record(cell, counters, target, about)
            append(record)
            collect(record)

        tick(0, cells[0].key if cells else "")
        counting.count_cells(
            cells, target, folder=out / RAW, on_count=keep, detail=options.detail, seed=options.seed
        )


def _record(cell: Cell, counters: Mapping[str, Any], target: Target, about: Mapping[str, Any]) -> Record:
    from flashbench import environment, kernels
    from flashbench.record import Record

    implementation = kernels.get(cell.implementation)
    failed = str(counters.get("reason", ""))
    refused = failed.split(": ")[0] in ("unavailable", "unsupported")
    return Record(
        cell=cell,
        status=failed.split(": ")[0] if refused else "failed" if failed else "profiled",
        reason=failed or COUNTED,
        counters=counters,
        io_model=implementation.io_model,
        config={} if failed else implementation.describe(cell.problem, cell.pass_, target),
        environment=environment.row_fields(about),
        device_type=target.type,
    )


def rows(records: Sequence[Record], device: Device | None, *, kernels: bool) -> list[dict[str, Any]]:
    """Predicted beside counted, a row per cell and level; kernels: also one per kernel and level."""
    from flashbench import compared

    found: list[dict[str, Any]] = []
    for record in records:
        identity = {"cell": record.cell.key, "model": record.io_model}
        levels = compared.compare(record.cell, record.counters, record.io_model, record.config, device)
        found += [{**identity, **level.row()} for level in levels if kernels or not level.kernel]
    return found


def _show(records: Sequence[Record], target: Target, options: Options) -> None:
    from flashbench import console, devices

    if options.quiet and not (options.json or options.csv):
        return
    device = devices.match(target.name, sms=None, memory_bytes=target.total_bytes)
    table = rows(records, device, kernels=options.kernels or options.json or options.csv)
    console.show_table(
        _columns(kernels=options.kernels), table, json=options.json, csv=options.csv,
        title="Bytes predicted and counted (each kernel from a cold L2)",
    )  # fmt: skip


def _columns(*, kernels: bool) -> list[Column]:
    from flashbench import units
    from flashbench.console import Column

    def size(name: str, header: str) -> Column:
        return Column(name=name, header=header, format=units.format_bytes, justify="right")

    shown = [Column(name="cell", header="cell"), Column(name="model", header="model")]
    if kernels:
        shown.append(Column(name="kernel", header="kernel", format=lambda name: str(name)[:48] or "all"))
    return [
        *shown, Column(name="level", header="level"),
        size("low", "least"), size("value", "predicted"), size("high", "most"), size("counted", "counted"),
        Column(name="ratio", header="counted/predicted", format=lambda x: f"{x:.3f}", justify="right"),
        Column(name="within", header="in band", format=lambda x: "yes" if x else "NO"),
    ]  # fmt: skip


def _reasons(records: Sequence[Record]) -> list[str]:
    """Why cells were not counted, each reason once with how often."""
    from collections import Counter

    found = Counter(record.counters["reason"] for record in records if "reason" in record.counters)
    return [f"{count} cells were not counted: {reason}" for reason, count in found.items()]
