"""What ``flashbench run`` does with a resolved request: measure, keep, report, summarise."""

from __future__ import annotations

import re
import shlex
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from flashbench._cli.report import write_page
from flashbench._cli.run import REPORT, RESULTS, Request, folder_of
from flashbench.errors import EXIT_INTERRUPTED, GateError, UnavailableError

if TYPE_CHECKING:
    from flashbench._cli.fleet import Cluster
    from flashbench.console import Column
    from flashbench.fleet import Local
    from flashbench.isolation import Bench
    from flashbench.problem import Cell
    from flashbench.record import Record
    from flashbench.runfile import RunFile, Writer
    from flashbench.runner import RunOptions


def measure(request: Request) -> None:
    """Measure what is missing, then write the report and print the summary.

    A finished sweep is a success whatever its rows say: they are the result, and ``check`` or --strict is
    the gate. Raises UnavailableError where nothing could run.
    """
    from flashbench import console

    console.listen(quiet=request.flag("quiet"))
    device = re.sub(r"[^a-z0-9]+", "-", request.target.name.lower()).strip("-")
    with folder_of(request.out, "cpu" if request.target.type == "cpu" else device) as out:
        _measured(request, out)


def _measured(request: Request, out: Path) -> None:
    from flashbench import console, environment, runfile
    from flashbench._cli import joined
    from flashbench._cli.interrupt import kept, terminable

    results = out / RESULTS
    about = dict(request.cluster.facts) if request.cluster else environment.collect(request.target)
    quiet = request.flag("quiet")
    try:
        with terminable(), sweep(request, results, about) as writer:
            if request.flag("counters"):
                _count(request, results, writer)
            if request.flag("trace"):
                _trace(request, results, writer)
    except KeyboardInterrupt:
        if results.exists():
            done = len(kept(results))
            console.warn(f"interrupted; {results} holds {done} of {len(request.cells)} cells")
            console.note(f"'flashbench run --resume --out {out}{_own(request)}' measures the rest")
        raise typer.Exit(EXIT_INTERRUPTED) from None
    found = runfile.load(results)
    write_page([found], out / REPORT)
    _show(request, found)
    asked = {cell.key for cell in request.cells}
    records = [record for record in found.records if record.cell.key in asked]
    if not quiet:
        joins = joined.notes(records, request.target) if _joins(request) else []
        for text in (*outcome(records), *joins, f"results: {results}", f"report: {out / REPORT}"):
            console.note(text)
    if wrong := joined.wrong(records):
        console.warn(f"{len(wrong)} traced cells are not as their model says, first: {wrong[0]}")
    verdict(records, strict=request.flag("strict"))


def _own(request: Request) -> str:
    """The options that a results file does not stand in for: which functions to import."""
    return "".join(f" --impl {shlex.quote(spec)}" for spec in request.values.get("impl", ()))


@contextmanager
def sweep(request: Request, results: Path, about: dict[str, Any]) -> Iterator[Writer]:
    """Measure what is missing into the file, and leave it open for what follows; the device is free then."""
    from flashbench import console
    from flashbench._cli import fleet

    bench = fleet.bench(request.target, _how(request, about), request.values, request.cluster, request.cells)
    with ExitStack() as stack:
        with bench:
            writer, missing = _open(request, results, about, bench)
            stack.enter_context(writer)
            if not request.flag("quiet"):
                console.note(f"{len(missing)} cells on {request.target.name}; results go to {results}")
            _run(request, bench, missing, writer)
        yield writer


def _open(
    request: Request, results: Path, about: dict[str, Any], bench: Bench | Local | Cluster
) -> tuple[Writer, Sequence[Cell]]:
    """The file to append to and the cells that it lacks."""
    from flashbench import ceilings, console, runfile

    if request.flag("resume") and results.exists():
        resumed = runfile.resume(results, request.cells, about, request.texts, _sources(request))
        if not request.flag("quiet"):
            for text in resumed.notes:
                console.note(text)
        return resumed.writer, resumed.missing
    if request.flag("resume") and not request.flag("quiet"):
        console.note(f"{results} does not exist yet: nothing to resume, a new sweep starts")
    known = ceilings.stored(str(about.get("device_name")), about.get("uuid"))
    head = runfile.header(
        calibration=known.document() if known else None,
        overheads=bench.overheads(cupti=request.values["timing"] == "cupti"),
        argv=["flashbench", *sys.argv[1:]],
        options=dict(request.texts),
        environment=about,
        cells=request.cells,
    )
    return runfile.create(results, head), request.cells


def _sources(request: Request) -> dict[str, str]:
    """The hash of the file of each function that is not flashbench's."""
    from flashbench import kernels, runfile

    rows = [kernels.get(name) for name in dict.fromkeys(cell.implementation for cell in request.cells)]
    able = [row for row in rows if row.origin and not row.why_unavailable(request.target)]
    return {row.name: row.origin.facts()[runfile.SOURCE_HASH] for row in able if row.origin}


def _how(request: Request, about: dict[str, Any]) -> RunOptions:
    from flashbench import runner

    return runner.RunOptions(
        cache=request.values["cache"],
        seed=request.values["seed"],
        time_budget_s=request.values.get("time_budget"),
        cell_timeout_s=request.values.get("cell_timeout"),
        timing=request.values["timing"],
        load=request.values["load"],
        energy=request.flag("energy"),
        environment=about,
        tuned=request.tuned,
    )


def _run(request: Request, bench: Bench | Local | Cluster, cells: Sequence[Cell], writer: Writer) -> None:
    """Measure the cells. Raises KeyboardInterrupt where it was stopped, once what was at work is kept."""
    from flashbench import console, units
    from flashbench._cli import live
    from flashbench._cli.interrupt import FIRST, stoppable

    done, quiet = 0, request.flag("quiet")
    rough = live.expected(
        cells, request.target, energy=request.flag("energy"), load=request.values["load"]
    )  # fmt: skip
    shown = live.board(rough, quiet=quiet or request.flag("verbose"))
    with shown as board, stoppable(FIRST, quiet=quiet) as stop:

        def keep(record: Record) -> None:
            nonlocal done
            writer.append(record)
            done += 1
            board.keep(record)
            if request.flag("verbose"):
                time = units.format_seconds(record.samples.median_s) if record.samples else record.reason
                console.note(f"[{done}/{len(cells)}] {record.cell.key}: {record.status}, {time}")

        spent = bench.run(cells, keep, lambda _, __, cell: board.begin(cell), stop)
    writer.put({"type": "timings", **spent})
    if stop() and done < len(cells):
        raise KeyboardInterrupt


def _count(request: Request, results: Path, writer: Writer) -> None:
    """Count the cells that are timed and not counted yet; without counters the sweep stands as it is."""
    from flashbench import console, counting, runfile, units
    from flashbench._cli.profile_counters import RAW

    asked = {cell.key for cell in request.cells}
    cells = [
        record.cell
        for record in runfile.load(results).records
        if record.cell.key in asked and record.status == "ok" and "total" not in record.counters
    ]
    quiet = request.flag("quiet")
    if reason := counting.why_unavailable(request.target):
        console.warn(f"no counters: {reason}")
        return
    refused: dict[str, int] = {}
    with console.progress(len(cells), quiet=quiet) as tick:
        done = 0

        def keep(cell: Cell, counters: Mapping[str, Any]) -> None:
            nonlocal done
            done += 1
            tick(done, cell.key)
            writer.attach(cell.key, "counters", counters)
            if reason := counters.get("reason"):
                refused[reason] = refused.get(reason, 0) + 1

        counting.count_cells(
            cells, request.target, folder=results.parent / RAW, on_count=keep, seed=request.values["seed"],
            tuned=request.tuned.path if request.tuned else None,
        )  # fmt: skip
    for reason, count in refused.items():
        console.warn(f"not counted: {count} of {units.many(len(cells), 'cell')}: {reason}")


def _trace(request: Request, results: Path, writer: Writer) -> None:
    """Trace the cells that ran and are not traced yet; a trace that fails leaves its row as it is."""
    from flashbench import runfile, tracing
    from flashbench._cli import joined

    asked = {cell.key for cell in request.cells}
    records = [record for record in runfile.load(results).records if record.cell.key in asked]
    joined.trace(
        records, writer, limit=tracing.LIMIT, seed=request.values["seed"], quiet=request.flag("quiet")
    )


def _joins(request: Request) -> bool:
    return request.flag("counters") or request.flag("trace")


def outcome(records: Sequence[Record], told: Sequence[str] = ()) -> list[str]:
    """What became of the cells, one line each: counts, then reasons of those that did not run.

    told: statuses whose reasons were shown already.
    """
    counts = Counter(record.status for record in records)
    lines = [f"{len(records)} cells: " + ", ".join(f"{count} {status}" for status, count in counts.items())]
    reasons = Counter(
        (record.cell.implementation, record.status, record.reason or "")
        for record in records
        if record.status not in {"ok", "checked", *told}
    )
    shown = list(reasons.items())[:MAX_REASONS]
    lines += [f"{name}: {count} {status}: {reason}" for (name, status, reason), count in shown]
    if len(reasons) > MAX_REASONS:
        lines.append(f"{len(reasons) - MAX_REASONS} more reasons stand in the report")
    flags = Counter(flag for record in records for flag in record.flags)
    lines += [f"flag {flag}: {count} cells" for flag, count in flags.items()]
    if counts["ok"] and records[0].device_type == "cpu":
        lines.append("these are times of a CPU; they say nothing about a GPU")
    if any(record.reason and "interpreter" in record.reason for record in records):
        lines.append(
            f"{counts['checked']} cells ran in Triton's interpreter for correctness only;"
            " interpreted time is never performance"
        )
    return lines


MAX_REASONS = 12


def verdict(records: Sequence[Record], *, strict: bool = False) -> None:
    """Warn of wrong or failed rows (strict: raise GateError); UnavailableError where all are unavailable."""
    from flashbench import console

    bad = [record for record in records if record.status in {"wrong", "failed"}]
    if bad:
        first = f"{bad[0].cell.key}: {bad[0].reason}"
        said = f"{len(bad)} of {len(records)} cells are wrong or failed, first: {first}"
        if strict:
            raise GateError(said)
        console.warn(said)
    if records and all(record.status == "unavailable" for record in records):
        raise UnavailableError(
            f"none of the {len(records)} cells can run here: {records[0].reason}",
            hint="'flashbench list implementations' says what can; 'flashbench doctor' says why not",
        )


def _show(request: Request, found: RunFile) -> None:
    """The table on stdout: everything for --json and --csv, a summary for people."""
    if request.flag("quiet") and not (request.flag("json") or request.flag("csv")):
        return
    from flashbench import console, table
    from flashbench._cli import joined

    if request.flag("json"):
        console.show_json(table.rows(table.build([found])))
    elif request.flag("csv"):
        console.show_text(table.to_csv(table.build([found])).rstrip("\n"))
    else:
        columns, rows, title = summary(table.rows(table.build([found])), cycles=request.flag("cycles"))
        console.show_table(columns, rows, title=title)
        if request.flag("timings"):
            _show_spending(found)
        if _joins(request):
            joined.show(found.records, request.target)


def _show_spending(found: RunFile) -> None:
    from flashbench import console, spending, units
    from flashbench.console import Column

    columns = [
        Column(name="name", header="wall time went to"),
        Column(name="seconds", header="time", format=units.format_seconds, justify="right"),
        Column(name="share", header="share", format=lambda share: f"{share:.1%}", justify="right"),
    ]
    console.show_table(columns, spending.rows(found.records, found.timings))
    ratio = spending.overhead(found.records, found.timings)
    if ratio is not None:
        console.note(f"wall time is {ratio:.2f} times that of warm-up, samples, flushes, checks, compiling")


def summary(
    cells: Sequence[dict[str, Any]], *, cycles: bool = False
) -> tuple[list[Column], list[dict[str, Any]], str]:
    """One row per problem and pass, one column per implementation: its rate, or what became of it.

    What is the same in all rows stands in the title instead of a column. cycles: in place of the rate.
    """
    from flashbench import units
    from flashbench.console import Column

    rows: dict[tuple[Any, ...], dict[str, Any]] = {}
    for cell in cells:
        shape = {header: text(cell) for header, text in _SHAPE.items()}
        row = rows.setdefault(tuple(shape.values()), shape)
        value, unit = (cell["cycles"], "cycles") if cycles else (cell["flops_per_s"], "FLOP/s")
        row[_header(cell)] = cell["status"] if value is None else units.format_count(value, unit)
    varies = [name for name in _SHAPE if len({row[name] for row in rows.values()}) > 1] or ["seqlen"]
    first = next(iter(rows.values()), {})
    fixed = [
        f"{name} {first[name]}"
        for name in first
        if name in _SHAPE and name not in (*varies, "card") and first[name] != "none"
    ]
    names = list(dict.fromkeys(map(_header, cells)))
    columns = [Column(name=name, header=name, justify="right") for name in (*varies, *names)]
    return columns, list(rows.values()), ", ".join(["SM cycles" if cycles else "nominal FLOP/s", *fixed])


def _header(cell: Mapping[str, Any]) -> str:
    """The implementation, marked where it is not exact attention: its rate is of its own FLOPs."""
    return f"{cell['implementation']}{'' if cell['exact'] else ' (not exact)'}"


def _pair(one: Any, other: Any, text: Any = str) -> str:
    return str(text(one)) if one == other else f"{text(one)}/{text(other)}"


def _length(value: int) -> str:
    from flashbench import units

    return units.format_length(value)


_SHAPE: Mapping[str, Callable[[dict[str, Any]], str]] = {
    "dtype": lambda c: c["dtype"],
    "head dim": lambda c: _pair(c["head_dim"], c["head_dim_v"]),
    "mask": lambda c: "causal" if c["causal"] else "full",
    "options": lambda c: c["options"] or "none",
    "batch": lambda c: str(c["batch"]),
    "heads": lambda c: _pair(c["num_heads"], c["num_kv_heads"]),
    "seqlen": lambda c: _pair(c["seqlen_q"], c["seqlen_k"], _length),
    "pass": lambda c: c["pass"],
    "card": lambda c: c.get("card") or "none",
}
