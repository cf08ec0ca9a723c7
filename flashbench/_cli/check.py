"""``flashbench check``: awkward shapes against the fp64 reference; nothing is timed."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import check_pairs, options, worst
from flashbench._cli.feature_options import with_features
from flashbench._cli.run import RESULTS, TimeBudget, check_out
from flashbench._cli.worst import Checked
from flashbench.errors import EXIT_INTERRUPTED, EXIT_UNDECIDED, GateError, UnavailableError, UsageError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.record import Record
    from flashbench.tuned import Tuned

GRIDS: Mapping[str, Mapping[str, str]] = {
    "cuda": {
        "seqlens": "1,7,63,64,65,127,129,1021",
        "head_dims": "16,40,64,80,96,128,192,256",
        "dtypes": "fp16,bf16,fp32",
        "causal": "both",
        "passes": "fwd,bwd",
        "batch": "2",
        "heads": "6",
        "kv_heads": "2,6",
        "impls": "flash",
    },
    "cpu": {
        "seqlens": "1,7,65",
        "head_dims": "16,40",
        "dtypes": "fp16,bf16,fp32",
        "causal": "both",
        "passes": "fwd,bwd",
        "batch": "1",
        "heads": "2",
        "kv_heads": "1,2",
        "impls": "flash",
    },
}
"""The default grid of each kind of device, as it would be typed."""

TENSORS = ("o", "lse", "dq", "dk", "dv", "dbias", "dsinks")
CORRECT = ("ok", "checked")
BAD = ("wrong", "failed")


@with_features
def check(
    seqlens: options.Seqlens = None,
    seqlens_k: options.SeqlensK = None,
    head_dims: options.HeadDims = None,
    head_dims_v: options.HeadDimsV = None,
    dtypes: options.Dtypes = None,
    impls: options.Impls = None,
    impl: options.Impl = None,
    causal: options.Causal = None,
    passes: options.Passes = None,
    batch: options.Batch = None,
    heads: options.Heads = None,
    kv_heads: options.KvHeads = None,
    features: options.Features = None,
    device: options.Device = None,
    seed: options.Seed = None,
    tuned: options.Tuned = None,
    out: Annotated[
        str | None,
        typer.Option(
            help=f"Folder for {RESULTS}: a row per cell as it is checked. With --numerics the file itself.",
            metavar="PATH",
        ),
    ] = None,
    time_budget: TimeBudget = None,
    pairs: Annotated[
        bool,
        typer.Option("--pairs", help="Instead of a grid, every feature alone and every pair of features."),
    ] = False,
    numerics: Annotated[
        bool,
        typer.Option("--numerics", help="Instead, measure errors against fp64 by dtype, length and range."),
    ] = False,
    ranges: Annotated[
        str | None,
        typer.Option(help="With --numerics: plain, outliers, large: a comma list.", metavar="NAMES"),
    ] = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Check implementations against the fp64 reference over a grid of awkward shapes.

    The grid is dtype x head dim x length x causal x GQA, forward and backward: the full one on a
    GPU, a small one through Triton's interpreter on a CPU. Options narrow it. Nothing is timed.

    Exits 0 when all that ran is right, 5 if anything is wrong or failed, 3 or 6 if nothing ran,
    130 when stopped (Ctrl-C, SIGTERM), after the summary of what was checked.

    With --pairs every mask, option, dtype and kind of shape that an implementation takes is checked alone
    and with every other, at three points on a GPU and one on a CPU.

    With --numerics nothing is judged: the RMSE and the largest error against fp64 of the unrounded inputs,
    by dtype, number of keys and range of scores.
    """
    given = options.given(locals())
    if not given["pairs"]:
        del given["pairs"]
    if given.pop("numerics"):
        from flashbench._cli import check_numerics

        check_numerics.show(given)
        return
    if ranges is not None:
        raise UsageError("--ranges: is of --numerics; accepted: --numerics beside it")
    shown = {"json", "csv", "quiet", "verbose", "pairs"}
    line = {name: text for name, text in given.items() if name not in shown}
    options.one_format(json, csv)
    options.one_volume(quiet, verbose)
    request = resolve(line, pairs=pairs, quiet=quiet)
    records: list[Record] = []
    try:
        _run(request, records, quiet=quiet, verbose=verbose)
    except KeyboardInterrupt:
        if request.out is not None and (request.out / RESULTS).exists():
            from flashbench._cli.interrupt import kept

            # the stop may have come between the file and the list
            records = list(kept(request.out / RESULTS)) or records
        _interrupted(request, records, json=json, csv=csv, quiet=quiet)
        raise typer.Exit(EXIT_INTERRUPTED) from None
    _show(records, json=json, csv=csv, quiet=quiet)
    _say_where(request, quiet=quiet)
    verdict(records)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A resolved command line: what is checked and where; texts: the options as they would be typed."""

    cells: tuple[Cell, ...]
    target: Target
    seed: int
    time_budget_s: float | None
    out: Path | None
    texts: Mapping[str, str | bool]
    tuned: Tuned | None = None


def resolve(line: dict[str, str | bool], *, pairs: bool = False, quiet: bool = False) -> Request:
    """What to check and where: a grid, or with pairs a covering array.

    Bad input is found before torch is imported.

    Raises UsageError, SpecError, UnknownName; UnavailableError for a device that is not here.
    """
    from flashbench import kernels, sweep

    if pairs:
        check_pairs.refuse_others(line)
    known = kernels.registry()
    typed = sweep.parse(line, options.on_line, known)
    options.own(typed.get("impl", ()))
    out = check_out(typed.get("out"), resume=False, hint="name another folder")

    def grid_of(device_type: str) -> dict[str, str]:
        grid = dict(GRIDS[device_type])
        if "heads" in line:
            del grid["kv_heads"]
        if "impl" in line:
            del grid["impls"]
        return grid

    def cells(device_type: str) -> tuple[Cell, ...]:
        grid = grid_of(device_type)
        return sweep.sweep_of(sweep.combine(typed, sweep.parse(grid, options.on_line, known))).cells()

    asked = typed.get("device")
    for device_type in [asked.split(":")[0]] if asked else list(GRIDS):
        cells(device_type)
    from flashbench import environment

    target = environment.target(asked)
    found = cells(target.type)
    impls = {cell.implementation: None for cell in found}
    options.settle(impls, target)
    defaults: dict[str, str | bool] = {**grid_of(target.type)}
    if pairs:
        found = check_pairs.cells(impls, typed.get("dtypes"), target)
        defaults = {"impls": ",".join(impls), "pairs": True}
    texts = sweep.combine(line, defaults, {"seed": "0"})
    return Request(
        cells=found,
        target=target,
        seed=typed.get("seed", 0),
        time_budget_s=typed.get("time_budget"),
        out=out,
        texts={name: text for name, text in texts.items() if name not in {"device", "out"}},
        tuned=options.tuned(typed.get("tuned"), target, quiet=quiet),
    )


def _run(request: Request, records: list[Record], *, quiet: bool, verbose: bool) -> None:
    """Check the cells; each record is in the results file, if one is asked for, then in records."""
    from flashbench import console, environment, runfile, runner
    from flashbench._cli.interrupt import FIRST, stoppable
    from flashbench.isolation import Bench

    cells = request.cells
    console.listen(quiet=quiet)
    about = environment.collect(request.target)
    writer = None
    if request.out is not None:
        head = runfile.header(
            argv=["flashbench", *sys.argv[1:]], options=request.texts, environment=about, cells=cells
        )
        writer = runfile.create(request.out / RESULTS, head)
    if not quiet:
        goal = f"; results go to {writer.path}" if writer else ""
        console.note(f"checking {len(cells)} cells on {request.target.name}{goal}")
    asked = runner.RunOptions(
        seed=request.seed, time=False, time_budget_s=request.time_budget_s, environment=about,
        tuned=request.tuned,
    )  # fmt: skip
    # in the interpreter nothing crashes, and a start would take longer than most checks
    bench = Bench(request.target, asked, in_process=request.target.type == "cpu")
    progress = console.progress(len(cells), quiet=quiet or verbose)
    with bench, writer or nullcontext(), progress as tick, stoppable(FIRST, quiet=quiet) as stop:

        def keep(record: Record) -> None:
            if writer is not None:
                writer.append(record)
            records.append(record)
            if verbose:
                console.note(f"[{len(records)}/{len(cells)}] {record.cell.key}: {record.status}")

        def begin(index: int, _: int, cell: Cell) -> None:
            tick(index, cell.key)

        bench.run(cells, keep, begin, stop)
    if stop() and len(records) < len(cells):
        raise KeyboardInterrupt


def _interrupted(request: Request, records: Sequence[Record], *, json: bool, csv: bool, quiet: bool) -> None:
    """Show what was checked before the stop."""
    from flashbench import console

    if records or json or csv:
        _show(records, json=json, csv=csv, quiet=quiet or not records)
    bad = sum(record.status in BAD for record in records)
    console.warn(
        f"interrupted; {len(records)} of {len(request.cells)} cells were checked, {bad} are wrong or failed"
    )
    _say_where(request, quiet=quiet)


def _say_where(request: Request, *, quiet: bool) -> None:
    from flashbench import console

    if request.out is not None and not quiet:
        console.note(f"results: {request.out / RESULTS}")


def _show(records: Sequence[Record], *, json: bool, csv: bool, quiet: bool) -> None:
    from flashbench import console
    from flashbench._cli.measure import outcome

    if json or csv:
        console.show_table(_raw_columns(), [_raw_row(record) for record in records], json=json, csv=csv)
    else:
        rows = worst.by_tensor(map(compared, records), TENSORS)
        console.show_table(worst.columns(), rows, title=worst.TITLE)
        bad = [_raw_row(record) for record in records if record.status in BAD]
        if bad:
            console.show_table(_failure_columns(), bad, title="wrong or failed")
    if not quiet:
        for text in outcome(records, told=BAD):
            console.note(text)


def verdict(records: Sequence[Record]) -> None:
    """Raise GateError where anything is wrong; leave with 3 or 6 where nothing was checked."""
    from flashbench import console

    bad = [record for record in records if record.status in BAD]
    if bad:
        raise GateError(f"{len(bad)} of {len(records)} cells are wrong or failed")
    if any(record.status in CORRECT for record in records):
        return
    text = f"none of the {len(records)} cells was checked: {records[0].reason}"
    if all(record.status == "unavailable" for record in records):
        raise UnavailableError(text, hint="'flashbench doctor' says what this machine lacks")
    console.error(GateError(text))
    raise typer.Exit(EXIT_UNDECIDED)


def compared(record: Record) -> Checked:
    """As the table of the worst errors takes it."""
    accuracy, cell = record.accuracy, record.cell
    return Checked(
        implementation=cell.implementation,
        dtype=cell.problem.dtype,
        at=f"{cell.pass_} {cell.problem.key}",
        max_abs_error=accuracy.max_abs_error if accuracy else {},
        budget=accuracy.budget if accuracy else {},
    )


def _raw_row(record: Record) -> dict[str, Any]:
    ratios = [value for tensor in TENSORS if (value := compared(record).ratio(tensor)) is not None]
    row = {
        "implementation": record.cell.implementation,
        "pass": record.cell.pass_,
        **asdict(record.cell.problem),
        "problem": record.cell.problem.key,
        "status": record.status,
        "reason": record.reason,
        "max_error_ratio": max(ratios) if ratios else None,
    }
    for tensor in TENSORS:
        row[f"max_abs_error_{tensor}"] = record.accuracy and record.accuracy.max_abs_error.get(tensor)
        row[f"budget_{tensor}"] = record.accuracy and record.accuracy.budget.get(tensor)
    return row


def _raw_columns() -> list[Column]:
    from flashbench.console import Column
    from flashbench.problem import Problem

    names = ["implementation", "pass", *Problem.__dataclass_fields__, "status", "reason", "max_error_ratio"]
    names += [f"{what}_{tensor}" for tensor in TENSORS for what in ("max_abs_error", "budget")]
    return [Column(name=name, header=name) for name in names]


def _failure_columns() -> list[Column]:
    from flashbench.console import Column

    return [
        Column(name="implementation", header="implementation"),
        Column(name="pass", header="pass"),
        Column(name="problem", header="problem"),
        Column(name="status", header="status"),
        Column(name="reason", header="reason"),
    ]
