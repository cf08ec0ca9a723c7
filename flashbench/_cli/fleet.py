"""``flashbench run --executor``: one bench, or several cards of this host or of a cluster."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench.fleet import Local
    from flashbench.fleet.on_ray import OnRay
    from flashbench.fleet.on_slurm import OnSlurm
    from flashbench.isolation import Bench
    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.runner import RunOptions

    Cluster = OnRay | OnSlurm

_PANEL = "Fleet"

Executor = Annotated[
    str | None,
    typer.Option(
        help="Measure on several cards: local (of this host), ray or slurm (of a cluster).",
        metavar="NAME",
        rich_help_panel=_PANEL,
    ),
]
Devices = Annotated[
    str | None,
    typer.Option(
        help="With --executor local: 0,1,… or all (default), or cpu,cpu for two workers on the CPU.",
        metavar="DEVICES",
        rich_help_panel=_PANEL,
    ),
]
Address = Annotated[
    str | None,
    typer.Option(
        help="With --executor ray: auto or HOST:6379. Default: RAY_ADDRESS, else a cluster of this host.",
        metavar="ADDRESS",
        rich_help_panel=_PANEL,
    ),
]
AcceleratorType = Annotated[
    str | None,
    typer.Option(
        help="With --executor ray: cards of this kind alone, by Ray's name, such as H100.",
        metavar="KIND",
        rich_help_panel=_PANEL,
    ),
]
Jobs = Annotated[
    str | None,
    typer.Option(
        help="With --executor slurm: how many jobs, each with a card.", metavar="N", rich_help_panel=_PANEL
    ),
]
SlurmArgs = Annotated[
    str | None,
    typer.Option(
        help="With --executor slurm: options of sbatch, such as partition=gpu,time=2:00:00.",
        metavar="KEY=VALUE,…",
        rich_help_panel=_PANEL,
    ),
]

TOLD = ("executor", "devices", "accelerator_type", "jobs")
"""Options that a results file keeps for its readers; a resumed run does not take them over."""

_NEEDS = {
    "devices": "local", "address": "ray", "accelerator_type": "ray", "jobs": "slurm", "slurm_args": "slurm",
}  # fmt: skip


def check(values: Mapping[str, Any]) -> None:
    """Refuse options that do not go together. values: of the line and the config file. Raises UsageError."""
    executor = values.get("executor")
    for name, needed in _NEEDS.items():
        if name in values and executor != needed:
            option = f"--{name.replace('_', '-')}"
            raise UsageError(f"{option} {values[name]!r}: is of another; accepted: with --executor {needed}")
    if executor is None:
        return
    if executor == "local" and "device" in values:
        raise UsageError(f"--device {values['device']!r}: is of one card; accepted: --devices")
    if executor == "slurm":
        _check_slurm(values)
    for name in ("in_process", "counters"):
        if values.get(name):
            hint = "afterwards 'run --resume --counters --out DIR' counts on one card" * (name == "counters")
            raise UsageError(
                f"--{name.replace('_', '-')}: not with --executor; accepted: on one card", hint=hint
            )


def _check_slurm(values: Mapping[str, Any]) -> None:
    from flashbench.fleet import slurm_queue

    slurm_queue.parse(values.get("slurm_args", ""), "--slurm-args")
    if "jobs" not in values:
        raise UsageError("--executor 'slurm': how many cards is not said; accepted: with --jobs N")
    if values.get("dry_run"):
        raise UsageError("--dry-run: before a job runs no card is known; accepted: without --executor")


def devices(values: Mapping[str, Any]) -> tuple[str, ...]:
    """The devices of ``--executor local``, empty without it. Raises SpecError."""
    from flashbench.fleet import cards

    if values.get("executor") != "local":
        return ()
    return cards.parse(values.get("devices", "all"), "--devices")


def first(values: Mapping[str, Any]) -> str | None:
    """The device by which a sweep is planned, None where it is to be found. Raises SpecError."""
    asked = next(iter(devices(values)), values.get("device"))
    return "cuda" if asked == "all" else asked


def target(asked: str | None, values: Mapping[str, Any]) -> tuple[Target, Cluster | None]:
    """The first of the cards, and with an executor of clusters that, connected. Raises UnavailableError."""
    executor = values.get("executor")
    if executor not in ("ray", "slurm"):
        from flashbench import environment

        said = f"--devices {values.get('devices', 'all')!r}" if executor == "local" else None
        return environment.target(asked, said), None
    cluster = _on_slurm(asked, values) if executor == "slurm" else _on_ray(asked, values)
    return cluster.target, cluster


def _on_ray(asked: str | None, values: Mapping[str, Any]) -> OnRay:
    from flashbench.fleet.on_ray import OnRay

    return OnRay(
        target_type=asked.partition(":")[0] if asked else None, address=values.get("address"),
        accelerator_type=values.get("accelerator_type"),
    )  # fmt: skip


def _on_slurm(asked: str | None, values: Mapping[str, Any]) -> OnSlurm:
    """Jobs, of which one has a card; until then Ctrl-C and SIGTERM take them back."""
    from flashbench import console, units
    from flashbench._cli.interrupt import terminable
    from flashbench._cli.run import OUT
    from flashbench.fleet import slurm_queue
    from flashbench.fleet.on_slurm import OnSlurm

    name = f"{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    out = values.get("out")
    folder = out / "slurm" / name if out else Path(OUT) / f"slurm-{name}" / "slurm"
    if not values.get("quiet"):
        said = units.many(values["jobs"], "job")
        console.note(f"{said} for Slurm, by way of {folder}; waiting for the first card")
    with terminable():
        return OnSlurm(
            jobs=values["jobs"], folder=folder, target_type=(asked or "cuda").partition(":")[0],
            arguments=slurm_queue.parse(values.get("slurm_args", ""), "--slurm-args"),
        )  # fmt: skip


def bench(
    where: Target, options: RunOptions, values: Mapping[str, Any], cluster: Cluster | None,
    cells: Sequence[Cell],
) -> Bench | Local | Cluster:  # fmt: skip
    """Where the cells are measured."""
    from flashbench import fleet
    from flashbench.isolation import Bench

    here = values.get("in_process") is True or _only_here(cells)
    if values.get("executor") and here:
        raise UsageError("--executor: a function of this process alone; accepted: one in a file or module")
    if cluster is not None:
        cluster.options = options
        return cluster
    if names := devices(values):
        return fleet.Local(fleet.cards_of(names), options)
    return Bench(where, options, in_process=here)


def _only_here(cells: Sequence[Cell]) -> bool:
    """Whether one of them is of a function that no other process finds."""
    from flashbench import kernels

    origins = [kernels.get(name).origin for name in {cell.implementation for cell in cells}]
    return any(origin.here for origin in origins if origin)
