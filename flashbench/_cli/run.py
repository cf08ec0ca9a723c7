"""``flashbench run``: what was asked, from the line, a config file and the defaults, then measured."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import fleet, options
from flashbench._cli.feature_options import with_features
from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench._cli.fleet import Cluster
    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.tuned import Tuned as TunedFile

RESULTS = "results.jsonl"
REPORT = "report.html"
OUT = "flashbench-out"
"""Folder, below the current one, that holds a folder per run where --out is not given."""

_PANEL = "Run"

TimeBudget = Annotated[
    str | None,
    typer.Option(
        help="Stop starting cells after this time, such as 5m; the rest are rows 'skipped'.",
        metavar="TIME",
        rich_help_panel=_PANEL,
    ),
]

CellTimeout = Annotated[
    str | None,
    typer.Option(
        help="End a cell that gives no sign of life for this time. Default: 5m, or 10 times the expected.",
        metavar="TIME",
        rich_help_panel=_PANEL,
    ),
]


@with_features
def run(
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
    tokens: options.Tokens = None,
    heads: options.Heads = None,
    hidden: options.Hidden = None,
    kv_heads: options.KvHeads = None,
    model: options.Model = None,
    features: options.Features = None,
    device: options.Device = None,
    cache: Annotated[
        str | None,
        typer.Option(
            help="L2 before each sample: cold (flushed; default on a GPU) or hot.", metavar="CHOICE"
        ),
    ] = None,
    timing: Annotated[
        str | None,
        typer.Option(
            help="auto (default: events, and graph where launching is the limit), events, graph or cupti; one"
            " for all implementations of a cell.",
            metavar="CHOICE",
        ),
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(
            help="burst (default: a chip that no cap holds back) or sustained (its clock settled under the"
            " call's own load).",
            metavar="CHOICE",
        ),
    ] = None,
    seed: options.Seed = None,
    tuned: options.Tuned = None,
    config: Annotated[
        str | None,
        typer.Option(help="TOML file with any of these options; options on the line win.", metavar="FILE"),
    ] = None,
    allow_impl: Annotated[
        bool, typer.Option("--allow-impl", help="Import the functions that --config names as 'impl'.")
    ] = False,
    energy: Annotated[
        bool | None,
        options.flag(
            "Also measure joules per call: a second or more per cell.", "--energy/--no-energy", panel=_PANEL
        ),
    ] = None,
    cycles: Annotated[
        bool | None,
        options.flag(
            "Show SM cycles per call, by the clock of each round, in place of FLOP/s.",
            "--cycles/--no-cycles",
            panel=_PANEL,
        ),
    ] = None,
    timings: Annotated[
        bool | None,
        options.flag("Say where the wall time went.", "--timings/--no-timings", panel=_PANEL),
    ] = None,
    counters: Annotated[
        bool | None,
        options.flag(
            "Afterwards count each cell's memory traffic with Nsight Compute.",
            "--counters/--no-counters",
            panel=_PANEL,
        ),
    ] = None,
    trace: Annotated[
        bool | None,
        options.flag(
            "Afterwards trace each Triton cell in the interpreter, one K/V head, beside the model.",
            "--trace/--no-trace",
            panel=_PANEL,
        ),
    ] = None,
    out: Annotated[
        str | None,
        typer.Option(
            help=f"Folder for {RESULTS} and {REPORT}. Default: a new one in ./{OUT}.",
            metavar="DIR",
            rich_help_panel=_PANEL,
        ),
    ] = None,
    resume: Annotated[
        bool | None,
        options.flag(
            "Measure only what the results in --out lack; other options default to that run's.",
            "--resume/--no-resume",
            panel=_PANEL,
        ),
    ] = None,
    time_budget: TimeBudget = None,
    cell_timeout: CellTimeout = None,
    executor: fleet.Executor = None,
    devices: fleet.Devices = None,
    address: fleet.Address = None,
    accelerator_type: fleet.AcceleratorType = None,
    jobs: fleet.Jobs = None,
    slurm_args: fleet.SlurmArgs = None,
    in_process: Annotated[
        bool | None,
        options.flag(
            "Measure in this process, for a debugger: a cell that crashes ends the sweep.",
            "--in-process/--no-in-process",
            panel=_PANEL,
        ),
    ] = None,
    dry_run: Annotated[
        bool | None,
        options.flag(
            "Print the cells, the memory each needs and the expected time; run nothing.",
            "--dry-run/--no-dry-run",
            panel=_PANEL,
        ),
    ] = None,
    strict: Annotated[
        bool | None,
        options.flag("Exit 5 if a cell is wrong or failed.", "--strict/--no-strict", panel=_PANEL),
    ] = None,
    json: Annotated[bool | None, options.flag("Print the whole table as JSON.", "--json/--no-json")] = None,
    csv: Annotated[bool | None, options.flag("Print the whole table as CSV.", "--csv/--no-csv")] = None,
    quiet: Annotated[
        bool | None, options.flag("No notes, no progress, no table.", "--quiet/--no-quiet", "-q")
    ] = None,
    verbose: Annotated[
        bool | None, options.flag("One line per finished cell on stderr.", "--verbose/--no-verbose", "-v")
    ] = None,
) -> None:
    """Measure a grid of attention cells, check each against fp64, write results and a report.

    Axes multiply into cells. What an option's default is depends on the device: on a GPU the
    papers' grid (1k-64k, bf16, 16k tokens, hidden 2048), on a CPU a small one.

    Cells run in a process of their own; one that crashes or hangs is a row, and the others are measured.
    Ctrl-C and SIGTERM stop after the cells at work, a second one at once; --resume measures the rest.

    Exits 0 when every cell ended with a status, 5 with --strict if one is wrong or failed, 3 if nothing can
    run here, 130 when interrupted.
    """
    given = options.given(locals())
    allowed = given.pop("allow_impl") is True
    request = resolve(given, str(given.pop("config")) if "config" in given else None, allow_impl=allowed)
    if isinstance(model, str) and not request.flag("quiet"):
        _remark(model)
    if request.flag("dry_run"):
        from flashbench._cli.dry_run import show

        show(request)
    else:
        from flashbench._cli.measure import measure

        measure(request)


def _remark(model: str) -> None:
    """Say what a preset's heads do not say of it."""
    from flashbench import console, presets

    if text := presets.remark(presets.find(model)):
        console.note(text)


@dataclass(frozen=True, kw_only=True)
class Request:
    """A resolved command line: every option's value, where it runs and what. cluster: of Ray, of Slurm."""

    values: Mapping[str, Any]
    texts: Mapping[str, str | bool]
    target: Target
    cells: tuple[Cell, ...]
    out: Path | None
    tuned: TunedFile | None = None
    cluster: Cluster | None = None

    def flag(self, name: str) -> bool:
        """True where the flag is on."""
        return self.values.get(name) is True


def resolve(line: dict[str, str | bool], config: str | None, *, allow_impl: bool = False) -> Request:
    """Join the line, the config file, the run to resume and the device's defaults.

    allow_impl: whether functions that the config file names are imported.

    Bad input is found before torch is imported wherever it does not depend on the device.
    Raises UsageError, SpecError, UnknownName; UnavailableError for a device that is not here.
    """
    from flashbench import kernels, presets, runfile, sweep

    def in_file(name: str) -> str:
        return f"--config {config!r}: {name}"

    known = kernels.registry()
    line = presets.expand(line, options.on_line)
    file = presets.expand(sweep.load_config(config), in_file) if config is not None else {}
    typed = sweep.parse(line, options.on_line, known)
    filed = sweep.parse(file, in_file, known)
    if not allow_impl and "impl" not in typed:
        options.refuse_own(filed.get("impl", ()), f"--config {config!r}", ", or --allow-impl")
    joined = sweep.combine(typed, filed)
    fleet.check(joined)
    options.own(joined.get("impl", ()))
    out = check_out(joined.get("out"), resume=joined.get("resume") is True)
    before = _earlier(out / RESULTS, joined) if out and joined.get("resume") else {}
    earlier = sweep.parse(before, lambda name: f"{name} in the header of {out}", known)

    def complete(device_type: str) -> tuple[dict[str, Any], tuple[Cell, ...]]:
        values = sweep.combine(typed, filed, earlier, sweep.defaults(device_type))
        if device_type == "cpu" and values["cache"] == "cold":
            raise UsageError("--cache 'cold': the caches of a CPU are not flushed; accepted on a CPU: hot")
        if device_type == "cpu" and values["timing"] in ("graph", "cupti"):
            raise UsageError(
                f"--timing {values['timing']!r}: a CPU has neither; accepted on a CPU: auto, events"
            )
        if device_type == "cpu" and values.get("cycles"):
            raise UsageError("--cycles: a CPU's clock is not read; accepted with a GPU")
        if device_type == "cpu" and values.get("energy"):
            raise UsageError("--energy: a CPU's energy is not measured; accepted with a GPU")
        return values, sweep.sweep_of(values).cells()

    asked = fleet.first(joined)
    if asked is not None:
        complete(asked.split(":")[0])
    target, cluster = fleet.target(asked, joined)
    values, cells = complete(target.type)
    options.settle(dict.fromkeys(cell.implementation for cell in cells), target)
    texts = sweep.combine(line, file, before, sweep.DEFAULTS[target.type])
    kept = (*sweep.ASKED, *runfile.CONDITIONS, "time_budget", *KEPT, *fleet.TOLD)
    return Request(
        values=values,
        texts={name: texts[name] for name in kept if name in texts},
        target=target,
        cells=cells,
        cluster=cluster,
        out=out,
        tuned=options.tuned(values.get("tuned"), target, quiet=values.get("quiet") is True),
    )


KEPT = ("energy", "counters", "trace", "tuned")
"""Beside conditions, what a resumed run takes over."""


def _earlier(path: Path, joined: Mapping[str, Any]) -> dict[str, str | bool]:
    """The options that an earlier run's header holds, as they were typed; {} where there is none yet.

    joined: of the line and the config file. Functions to import are theirs alone to name, as a results file
    may come from anybody: raises UsageError where the header names some and they none.
    """
    from flashbench import runfile, sweep, units

    if not path.exists():
        return {}
    found = runfile.load(path, damaged=True).header["options"]
    names = (*sweep.ASKED, *runfile.CONDITIONS, *KEPT)
    before = {name: found[name] for name in names if isinstance(found.get(name), str | bool)}
    own = before.pop("impl", None)
    if own and "impl" not in joined and "impls" not in joined:
        raise UsageError(
            f"--resume: {path} measured {units.quoted(own, 400)}, which is not imported on a file's word;"
            " accepted: --impl SPEC once more, or --impls NAMES for the others alone"
        )
    return before


def check_out(
    out: Path | None, *, resume: bool, hint: str = "pass --resume to complete it, or name another folder"
) -> Path | None:
    """Refuse a folder that cannot take results, before anything is measured. Raises UsageError.

    hint: what to do about one that holds results.
    """
    from flashbench import paths, runfile, units

    if out is None:
        if resume:
            raise UsageError(
                "--resume needs --out DIR; accepted: the folder of the run to complete", hint=_latest_hint()
            )
        return None
    label = f"--out {units.quoted(out, 400)}"
    if reason := paths.why_no_folder(out):
        raise UsageError(f"{label}: {reason}; accepted: a folder that can be written")
    if (out / RESULTS).exists() and not resume and not runfile.rowless(out / RESULTS):
        raise UsageError(f"{label}: holds {RESULTS} already; accepted: a folder without results", hint=hint)
    return out


@contextmanager
def folder_of(out: Path | None, name: str) -> Iterator[Path]:
    """The folder of --out, or a new one of this run alone, named by the time, which stays if it holds
    anything. Raises OSError where none can be made.
    """
    if out is not None:
        yield out
        return
    base = Path(OUT) / f"{datetime.now():%Y%m%d-%H%M%S}-{name}"
    base.parent.mkdir(parents=True, exist_ok=True)
    for count in itertools.count(1):
        path = base if count == 1 else base.with_name(f"{base.name}-{count}")
        with suppress(FileExistsError):  # of a run that began in the same second
            path.mkdir()
            break
    try:
        yield path
    finally:
        with suppress(OSError):
            path.rmdir()


def _latest_hint() -> str:
    found = dict[Path, int]()
    for path in Path(OUT).glob(f"*/{RESULTS}"):
        with suppress(OSError):  # taken away meanwhile
            found[path] = path.stat().st_mtime_ns
    return f"the latest here is --out {max(found, key=lambda path: found[path]).parent}" if found else ""
