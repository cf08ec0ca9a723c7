"""``flashbench gate``: the numbers that repeat exactly, from one config, in a file to compare. No GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import check as check_
from flashbench._cli import grids, options, profile_static, profile_trace
from flashbench.errors import GateError, UsageError

if TYPE_CHECKING:
    from flashbench.gating import Plan

MODEL: Mapping[str, str] = {
    "seqlens": "4k", "head_dims": "64,128", "dtypes": "bf16", "causal": "both", "passes": "fwd,bwd",
    "batch": "1", "heads": "16", "impls": "flash",
}  # fmt: skip
"""What the part ``model`` looks at unless its table says otherwise, as it would be typed."""
TILES: Mapping[str, str] = {
    "seqlens": "512,1k,2k,4k,8k,16k", "head_dims": "64,67,96,128,192,256",
    "dtypes": "fp16,bf16,fp32,tf32,fp8", "causal": "both", "passes": "fwd,bwd",
}  # fmt: skip
"""The same of the part ``tiles``: each length class of the tables, their head dims and one between."""
ARCH = "arch"
STATIC = ("impls", "head_dims", "dtypes", "causal", "passes")


def gate(
    config: Annotated[
        str,
        typer.Option(
            help="TOML file with tables static, tiles, trace, model and check: the options of their grids.",
            metavar="FILE",
        ),
    ],
    out: Annotated[str, typer.Option(help="File to write, which 'compare' reads.", metavar="FILE")],
    quiet: options.Quiet = False,
) -> None:
    """Write down what repeats exactly: traced bytes, registers, spills, instructions, tiles, model, results.

    No GPU is needed. 'flashbench compare --baseline NAME FILE' judges the file: any change that is worse
    fails, and with --fail-on changed any change at all.

    Exits 5 when a result is wrong, a kernel moves other than its model says, or does not compile.
    """
    from flashbench import configfile, console

    path = options.out_file(out, [config])
    plan = plan_of(configfile.read_toml(config), f"--config {config!r}")
    from flashbench import environment, gating, kernels
    from flashbench._cli.interrupt import interrupted, interruptible
    from flashbench.kernels import Target

    for name in kernels.registry():
        kernels.get(name).why_unavailable(Target())
    environment.need_torch()
    with interruptible() as stop, console.progress(plan.steps, quiet=quiet) as tick:
        document = gating.document(plan, tick)
    if stop():
        raise interrupted(f"{path} is not written")
    options.write_out(path, text_of(document))
    if not quiet:
        said = ", ".join(f"{len(document[part])} of {part}" for part in gating.PARTS)
        console.note(f"{path}: rows: {said}; Triton {document['triton']}")
    _verdict(gating.bad(document))


def text_of(document: Mapping[str, Any]) -> str:
    """One JSON document, a row a line, so that a change is a line of a diff."""
    import json

    def line(value: Any) -> str:
        return json.dumps(value, allow_nan=False, ensure_ascii=False)

    parts = []
    for name, value in document.items():
        if isinstance(value, list) and value:
            rows = ",\n  ".join(line(row) for row in value)
            parts.append(f"{line(name)}: [\n  {rows}\n ]")
        else:
            parts.append(f"{line(name)}: {line(value)}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _verdict(bad: Sequence[tuple[str, Mapping[str, Any]]]) -> None:
    """Raise GateError where rows are wrong by themselves, naming the first."""
    if bad:
        part, row = bad[0]
        name = row.get("cell") or " ".join(
            str(row[key]) for key in ("implementation", "kernel", "arch", "dtype", "head_dim")
        )
        reason = " ".join(str(row["reason"]).split())
        raise GateError(f"{len(bad)} rows are wrong or failed, first: {part} {name}: {reason}")


def plan_of(document: Mapping[str, Any], where: str) -> Plan:
    """The plan of a config's tables; of a part there may be several ([[static]]). Raises UsageError."""
    from flashbench.gating import PARTS, Plan

    found: dict[str, list[Any]] = {part: [] for part in PARTS}
    for part, tables in document.items():
        if part not in PARTS:
            raise UsageError(f"{where}: {part!r} is not a part; accepted: tables {', '.join(PARTS)}")
        for table in tables if isinstance(tables, list) else [tables]:
            if not isinstance(table, dict):
                raise UsageError(f"{where}: {part} is no table; accepted: [{part}] or [[{part}]]")
            found[part] += _READERS[part](table, f"{where}: [{part}]")
    if not any(found.values()):
        raise UsageError(f"{where}: asks for nothing; accepted: tables {', '.join(PARTS)}")
    return Plan(**{part: tuple(items) for part, items in found.items()})


def _static(table: Mapping[str, Any], where: str) -> list[Any]:
    from flashbench import sweep

    rest, arches = _without_arch(table, where)
    return [profile_static.grid_of(sweep.options_of(rest, where, STATIC, (ARCH,)), arches)[0]]


def _tiles(table: Mapping[str, Any], where: str) -> list[Any]:
    from flashbench import launched, sweep
    from flashbench._profilers.occupancy import LIMITS
    from flashbench.kernels import _defaults

    rest, arches = _without_arch(table, where)
    line = {"impls": ",".join(_defaults.NAMES), **TILES}
    given = sweep.options_of(rest, where, tuple(line), (ARCH,))
    typed = sweep.parse(line | given, lambda name: f"{where}: {name}", _defaults.NAMES)
    if "top-left" in typed["causal"]:
        raise UsageError(f"{where}: causal 'top-left': tiles are those of causal; accepted: yes, no, both")
    return [launched.Grid(
        implementations=typed["impls"], seqlens=typed["seqlens"], head_dims=typed["head_dims"],
        dtypes=typed["dtypes"], causal=typed["causal"], passes=typed["passes"],
        capabilities=tuple(LIMITS) if arches is None else tuple(profile_static.arches_of(arches)),
    )]  # fmt: skip


def _model(table: Mapping[str, Any], where: str) -> list[Any]:
    rest, arches = _without_arch(table, where)
    return [
        (cell, capability)
        for capability in profile_static.arches_of(arches)
        for cell in grids.cells_of(rest, where, MODEL, more=(ARCH,))
    ]  # fmt: skip


def _without_arch(table: Mapping[str, Any], where: str) -> tuple[dict[str, Any], str | None]:
    """The table without its architectures, and those."""
    rest = dict(table)
    arch = rest.pop(ARCH, None)
    arch = ",".join(map(str, arch)) if isinstance(arch, list) else arch
    if arch is not None and not isinstance(arch, str):
        raise UsageError(f"{where}: {ARCH} = {arch!r} is no text; accepted: such as 'sm_80,sm_90'")
    return rest, arch


_READERS: Mapping[str, Callable[[Mapping[str, Any], str], Sequence[Any]]] = {
    "static": _static,
    "tiles": _tiles,
    "model": _model,
    "trace": lambda table, where: grids.cells_of(table, where, profile_trace.DEFAULTS),
    "check": lambda table, where: grids.cells_of(table, where, check_.GRIDS["cpu"]),
}
