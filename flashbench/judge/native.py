"""A results file of ``flashbench run`` as a run to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from flashbench import iomodel, table
from flashbench.judge.sides import Measured, Run
from flashbench.record import Record
from flashbench.runfile import RunFile

VERSIONS = ("driver", "cuda", "cudnn", "torch", "triton", "python", "flashbench", "source_hash")
"""What may differ, and is told."""
UNKNOWN = "unknown"


def run_of(file: RunFile) -> Run:
    """The run that a file holds; its metrics are worked out when they are asked for."""
    about = dict(file.header.get("environment") or {})
    kinds = {record.environment.get("device_name") for record in file.records} - {None}
    several = len(kinds) > 1
    if several:  # each cell says its own
        about |= {"device_name": None, "power_limit_w": None}
    value_of = table.values_of(file)
    return Run(
        path=file.path,
        kind="flashbench",
        cells={record.cell.key: _measured(record, value_of, several) for record in file.records},
        conditions=_conditions(about, file.header.get("options") or {}),
        versions={name: str(about[name]) for name in VERSIONS if about.get(name) is not None},
        notes=file.notes,
        commit=str(about.get("git_commit") or ""),
        created_at=str(file.header.get("created_at") or ""),
    )


def _conditions(about: Mapping[str, Any], options: Mapping[str, Any]) -> dict[str, str]:
    found = {"estimator": str(options.get("estimator") or "median")}
    if about.get("device_name"):
        found["device"] = str(about["device_name"])
    if isinstance(limit := about.get("power_limit_w"), int | float):
        found["power_limit"] = f"{limit:g} W"
    if options.get("seed") is not None:
        found["inputs"] = f"seed {options['seed']}"
    return found


def _measured(record: Record, value_of: Callable[[Record, str], float | None], several: bool) -> Measured:
    """A cell. several: the file is of several kinds of card."""
    samples = record.samples
    told = {name: getattr(samples, name, None) for name in ("cache", "flush", "method", "load")}
    if several:
        told["device"] = record.environment.get("device_name")
    problem = record.cell.problem
    return Measured(
        samples=partial(_samples, record, value_of),
        status=record.status,
        reason=record.reason or "",
        flags=record.flags,
        conditions={name: str(value) for name, value in told.items() if value and value != UNKNOWN},
        groups={
            "implementation": record.cell.implementation, "pass": record.cell.pass_, "dtype": problem.dtype,
            "head_dim": str(problem.head_dim), "mask": "causal" if problem.causal else "full",
            "seqlen": str(problem.seqlen_q),
        },
    )  # fmt: skip


def _samples(
    record: Record, value_of: Callable[[Record, str], float | None], measure: str
) -> Sequence[float]:
    """All samples of a time or a rate, else the one number that a run has; a wrong row has none."""
    if record.samples and measure == "time_s":
        return record.samples.samples_s
    if record.samples and measure == "flops_per_s" and min(record.samples.samples_s) > 0:
        work = iomodel.flops(record.cell.problem, record.cell.pass_)
        return [work / time for time in record.samples.samples_s]
    value = None if record.status == "wrong" else value_of(record, measure)
    return () if value is None else (float(value),)
