"""``flashbench profile --counters``: cells under Nsight Compute, predicted beside counted and traced."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench._cli.run import RESULTS
from flashbench.errors import GateError, UnavailableError

if TYPE_CHECKING:
    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.record import Record
    from flashbench.runfile import Writer
    from flashbench.tuned import Tuned

RAW = "counters"
"""Folder, below --out, of the profiler's own CSV files."""
COUNTED = "counted, not timed"


@dataclass(frozen=True, kw_only=True)
class Options:
    """How to count and show. detail: more counters. kernels: a row per kernel too. argv: as typed.

    trace_limit: tile visits of a cell that is traced too; None traces none. tuned: of --tuned.
    """

    detail: bool = False
    trace_limit: int | None = None
    kernels: bool = False
    seed: int = 0
    json: bool = False
    csv: bool = False
    quiet: bool = False
    argv: Sequence[str] = ()
    tuned: Tuned | None = None


def show(cells: Sequence[Cell], target: Target, out: Path, options: Options) -> None:
    """Count the cells, keep each as it is known, trace them if asked to, print predicted beside counted.

    Raises UnavailableError where nothing can be counted here, GateError where a kernel moves or computes
    other than its model says, or raises, as traced.
    """
    from flashbench import console, counting, environment, runfile, units
    from flashbench._cli import joined
    from flashbench._cli.interrupt import interrupted, interruptible, kept

    if reason := counting.why_unavailable(target):
        raise UnavailableError(f"no counters: {reason}")
    about = environment.collect(target)
    head = runfile.header(argv=options.argv, options={}, environment=about, cells=cells)
    limit = options.trace_limit
    with interruptible() as stop, runfile.create(out / RESULTS, head) as writer:
        _count(cells, target, out, options, (writer, about))
        if limit is not None:
            counted = runfile.load(out / RESULTS).records
            joined.trace(counted, writer, limit=limit, seed=options.seed, quiet=options.quiet)
    records = kept(out / RESULTS) if stop() else runfile.load(out / RESULTS).records
    joined.show(
        records, target, kernels=options.kernels, detail=options.detail, json=options.json, csv=options.csv
    )
    if stop():
        raise interrupted(f"{out / RESULTS} holds {len(records)} of {units.many(len(cells), 'cell')}")
    if not options.quiet:
        refused = joined.reasons((record.counters.get("reason") for record in records), "counted")
        for text in (*joined.notes(records, target), *refused):
            console.note(text)
        console.note(f"results: {out / RESULTS}; the profiler's own files: {out / RAW}")
    _verdict(records, out / RESULTS)


def _verdict(records: Sequence[Record], results: Path) -> None:
    from flashbench import units
    from flashbench._cli import joined

    if records and all("reason" in record.counters for record in records):
        raise UnavailableError(f"no cell was counted: {records[0].counters['reason']}")
    if wrong := joined.wrong(records):
        raise GateError(
            f"not as their model says: {units.many(len(wrong), 'traced cell')}, first: {wrong[0]}",
            hint=f"{results} has it tensor by tensor",
        )


def _count(
    cells: Sequence[Cell],
    target: Target,
    out: Path,
    options: Options,
    kept: tuple[Writer, Mapping[str, Any]],
) -> None:
    from flashbench import console, counting, runner

    writer, about = kept
    runner.precompile(cells, target, options.tuned)  # the profiled process would, one after the other
    with console.progress(len(cells), quiet=options.quiet) as tick:
        done = 0

        def keep(cell: Cell, counters: counting.Counters) -> None:
            nonlocal done
            done += 1
            tick(done, cell.key)
            writer.append(_record(cell, counters, target, about, options.tuned))

        tick(0, cells[0].key if cells else "")
        counting.count_cells(
            cells, target, folder=out / RAW, on_count=keep, detail=options.detail, seed=options.seed,
            tuned=options.tuned.path if options.tuned else None,
        )  # fmt: skip


def _record(
    cell: Cell, counters: Mapping[str, Any], target: Target, about: Mapping[str, Any], found: Tuned | None
) -> Record:
    from flashbench import environment, tuned
    from flashbench.record import Record

    implementation = tuned.get(found, cell.implementation)
    failed = str(counters.get("reason", ""))
    refused = failed.split(": ")[0] in ("unavailable", "unsupported")
    return Record(
        cell=cell,
        status=failed.split(": ")[0] if refused else "failed" if failed else "profiled",
        reason=failed or COUNTED,
        counters={name: value for name, value in counters.items() if name != "clocks"},
        clocks=counters.get("clocks", {}),
        started_at=str(counters.get("started_at") or datetime.now(UTC).isoformat(timespec="seconds")),
        io_model=implementation.model(cell.problem, target),
        config={} if failed else implementation.describe(cell.problem, cell.pass_, target),
        tuned=found.source(cell) if found and not failed else {},
        environment=environment.row_fields(about),
        device_type=target.type,
    )
