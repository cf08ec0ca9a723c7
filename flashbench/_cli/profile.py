"""``flashbench profile``: what kernels move, by trace, by counters, and what the compiler made of them."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench import features as rows
from flashbench._cli import options
from flashbench._cli.feature_options import with_features
from flashbench._cli.gpu import target_of
from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.tuned import Tuned

COUNTED: Mapping[str, str] = {
    "seqlens": "4k", "head_dims": "64,128", "dtypes": "bf16", "causal": "both", "passes": "fwd,bwd",
    "tokens": "16k", "hidden": "2048", "impls": "flash,sdpa-flash,sdpa-cudnn",
}  # fmt: skip
"""What --counters and --timeline look at unless told otherwise, as it would be typed."""

_MODES = "What to look at (one of)"
_GRID = ("seqlens", "seqlens_k", "head_dims", "head_dims_v", "dtypes", "impls", "impl", "causal", "passes",
         "batch", "tokens", "heads", "hidden", "kv_heads", *rows.NAMES, "device", "seed", "tuned", "out",
         "config")  # fmt: skip
_STATIC = ("impls", "head_dims", "dtypes", "causal", "passes")


def _mode(help_: str) -> Any:
    return typer.Option(help=help_, rich_help_panel=_MODES)


@with_features
def profile(
    trace: Annotated[
        bool,
        _mode("Run Triton kernels in the interpreter (no GPU): bytes traced beside modelled, exact."),
    ] = False,
    static: Annotated[
        bool, _mode("Compile ahead of time (no GPU): registers, spills, instructions, occupancy.")
    ] = False,
    counters: Annotated[bool, _mode("Count with Nsight Compute: bytes predicted beside counted.")] = False,
    timeline: Annotated[bool, _mode("Kernels of each cell, their times and the gaps (CUPTI).")] = False,
    known: Annotated[
        bool, _mode("Count kernels of known traffic: how far counters go, and what L2 keeps.")
    ] = False,
    import_: Annotated[
        str | None,
        typer.Option(
            "--import", help="Read a CSV that 'ncu --csv' wrote.", metavar="FILE", rich_help_panel=_MODES
        ),
    ] = None,
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
    features: options.Features = None,
    device: options.Device = None,
    seed: options.Seed = None,
    tuned: options.Tuned = None,
    config: Annotated[
        str | None,
        typer.Option(
            help="TOML file of several grids, a table 'cells' each; options on the line win.",
            metavar="FILE",
        ),
    ] = None,
    arch: Annotated[
        str | None, typer.Option(help="--static: architectures, such as sm_80,sm_90.", metavar="NAMES")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option(
            help="--static: occupancy on this card. --trace: with the tiles of this card.", metavar="NAME"
        ),
    ] = None,
    trace_limit: Annotated[
        str | None, typer.Option(help="--trace: tile visits of a cell at most. Default: 2000.", metavar="N")
    ] = None,
    detail: Annotated[
        bool, typer.Option("--detail", help="--counters: more counters, at more passes over each kernel.")
    ] = False,
    by_kernel: Annotated[
        bool, typer.Option("--by-kernel", help="--counters: a row per kernel as well.")
    ] = False,
    out: Annotated[
        str | None,
        typer.Option(help="--counters, --known: folder for results and ncu's own files.", metavar="DIR"),
    ] = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Look inside: what kernels really move, where their time goes, what they were compiled to.

    Without a mode: --trace on a machine without GPU, --counters on one with. --counters --trace does
    both to the same cells, with one K/V head of one batch traced for all, and sets them side by side.

    Exits 0 when all is as modelled (--trace), compiled (--static) or counted, 5 where a trace differs from
    its model or a kernel does not compile, 3 where nothing can be looked at here.
    """
    line = options.given(locals())
    options.one_format(json, csv)
    shown = {"json": json, "csv": csv, "quiet": quiet}
    mode = _chosen(line)
    _only(mode, line)
    grid = {name: line[name] for name in _GRID if name in line}
    if mode == "import_":
        from flashbench._cli import profile_import

        profile_import.show(str(import_), **shown)
    elif mode == "static":
        from flashbench._cli import profile_static

        asked: dict[str, Any] = {name: grid.get(name) for name in _STATIC}
        profile_static.show(**asked, arches=arch, gpu=gpu, json=json, csv=csv, quiet=quiet)
    elif mode == "trace":
        _trace(grid, gpu, trace_limit, shown)
    elif mode == "timeline":
        from flashbench._cli import profile_timeline

        cells, target, number = _cells(grid, COUNTED, None)
        profile_timeline.show(cells, target, seed=number, tuned=_tuned(grid, target, quiet), **shown)
    elif mode == "known":
        from flashbench._cli import profile_known
        from flashbench._cli.run import folder_of

        folder = _out(grid)
        _, target, _ = _cells(grid, COUNTED, None)
        with folder_of(folder, "profile") as made:
            profile_known.show(target, made, **shown)
    else:
        limit = _limit(trace_limit) if trace else None
        _count(grid, {"detail": detail, "kernels": by_kernel, "trace_limit": limit, **shown})


def _count(grid: dict[str, str | bool], asked: Mapping[str, Any]) -> None:
    from flashbench._cli import profile_counters
    from flashbench._cli.run import folder_of

    folder = _out(grid)
    cells, target, number = _cells(grid, COUNTED, None)
    found = _tuned(grid, target, asked["quiet"])
    options_ = profile_counters.Options(seed=number, argv=("flashbench", *sys.argv[1:]), tuned=found, **asked)
    with folder_of(folder, "profile") as out:
        profile_counters.show(cells, target, out, options_)


def _trace(
    grid: dict[str, str | bool], gpu: str | None, limit: str | None, shown: Mapping[str, bool]
) -> None:
    from flashbench import kernels
    from flashbench._cli import profile_trace

    wanted = _limit(limit)
    cells, _, number = _cells(grid, profile_trace.DEFAULTS, "cpu")
    config: dict[str, Mapping[str, Any]] = {}
    if gpu is not None:
        target = target_of(gpu)
        for cell in cells:
            implementation = kernels.get(cell.implementation)
            if implementation.prepare_tiles is not None:
                config[cell.key] = implementation.on_card(cell.problem, cell.pass_, target)
    profile_trace.show(cells, config=config, limit=wanted, seed=number, **shown)


MODES = ("trace", "static", "counters", "timeline", "known", "import_")
BOTH = "counters --trace"
"""What --counters and --trace are together; any other two modes exclude each other."""
TAKES: Mapping[str, tuple[str, ...]] = {
    "trace": (*(name for name in _GRID if name not in ("device", "tuned", "out")), "gpu", "trace_limit"),
    "static": (*_STATIC, "arch", "gpu"),
    "counters": (*_GRID, "detail", "by_kernel"),
    BOTH: (*_GRID, "detail", "by_kernel", "trace_limit"),
    "timeline": tuple(name for name in _GRID if name != "out"),
    "known": ("device", "out"),
    "import_": (),
}
"""The options of each mode, beside those of the output."""


def _chosen(line: Mapping[str, Any]) -> str:
    """The mode that was asked for, or what this machine can do."""
    found = [name for name in MODES if line.get(name, False) is not False]  # an empty name is one, too
    if found == ["trace", "counters"]:
        return BOTH
    if len(found) > 1:
        names = " and ".join(map(_typed, found[:2]))
        raise UsageError(f"{names} exclude each other; accepted: one of {', '.join(map(_typed, MODES))}")
    if found:
        return found[0]
    from flashbench import environment

    return "counters" if environment.gpu_status().kind == "ok" else "trace"


def _only(mode: str, line: Mapping[str, Any]) -> None:
    """Refuse an option that the mode would ignore. Raises UsageError."""
    for name, value in line.items():
        if name in ("json", "csv", "quiet", *MODES) or value is False:
            continue
        if name not in TAKES[mode]:
            fits = [_typed(other) for other in MODES if name in TAKES[other]]
            raise UsageError(
                f"{options.on_line(name)} does nothing with {_typed(mode)}; accepted with {', '.join(fits)}"
            )


def _typed(mode: str) -> str:
    return options.on_line(mode.rstrip("_"))


def _cells(
    grid: dict[str, str | bool], defaults: Mapping[str, str], device: str | None
) -> tuple[tuple[Cell, ...], Target, int]:
    """The cells, where they run, and the seed. Bad input is found before torch is imported."""
    from flashbench import kernels, sweep
    from flashbench._cli import grids

    asked = {name: text for name, text in grid.items() if name not in ("out", "config")}
    typed = sweep.parse(asked, options.on_line, kernels.registry())
    options.own(typed.get("impl", ()))
    if "config" in grid:
        cells = grids.read(str(grid["config"]), defaults, typed)
    else:
        cells = sweep.sweep_of(sweep.combine(typed, grids.usual(defaults, set(grid)))).cells()
    from flashbench import environment

    target = environment.target(device or typed.get("device"))
    options.settle({cell.implementation for cell in cells}, target)
    return cells, target, typed.get("seed", 0)


def _tuned(grid: Mapping[str, str | bool], target: Target, quiet: bool) -> Tuned | None:
    path = Path(str(grid["tuned"])) if "tuned" in grid else None
    return options.tuned(path, target, quiet=quiet)


def _limit(text: str | None) -> int:
    from flashbench import tracing

    if text is None:
        return tracing.LIMIT
    if not text.strip().isdigit() or not int(text):
        raise UsageError(f"--trace-limit {text!r}: not a number of visits; accepted: a whole number above 0")
    return int(text)


def _out(grid: dict[str, str | bool]) -> Path | None:
    from flashbench._cli.run import check_out

    text = grid.pop("out", None)
    return check_out(None if text is None else Path(str(text)), resume=False, hint="name another folder")
