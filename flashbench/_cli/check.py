"""``flashbench check``: awkward shapes against the fp64 reference; nothing is timed."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import typer

from flashbench._cli import options
from flashbench.errors import EXIT_UNDECIDED, GateError, UnavailableError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.record import Record

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

TENSORS = ("o", "dq", "dk", "dv")
CORRECT = ("ok", "checked")
BAD = ("wrong", "failed")


def check(
    seqlens: options.Seqlens = None,
    seqlens_k: options.SeqlensK = None,
    head_dims: options.HeadDims = None,
    head_dims_v: options.HeadDimsV = None,
    dtypes: options.Dtypes = None,
    impls: options.Impls = None,
    causal: options.Causal = None,
    passes: options.Passes = None,
    batch: options.Batch = None,
    heads: options.Heads = None,
    kv_heads: options.KvHeads = None,
    device: options.Device = None,
    seed: options.Seed = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
    verbose: options.Verbose = False,
) -> None:
    """Check implementations against the fp64 reference over a grid of awkward shapes.

    The grid is dtype x head dim x length x causal x GQA, forward and backward: the full one on a
    GPU, a small one through Triton's interpreter on a CPU. Options narrow it. Nothing is timed.

    Exits 0 when all that ran is right, 5 if anything is wrong or failed, 3 or 6 if nothing ran.
    """
    given = options.given(locals())
    line = {name: text for name, text in given.items() if name not in {"json", "csv", "quiet", "verbose"}}
    options.one_format(json, csv)
    options.one_volume(quiet, verbose)
    cells, target, seed_ = resolve(line)
    records = _run(cells, target, seed_, quiet=quiet, verbose=verbose)
    _show(records, json=json, csv=csv, quiet=quiet)
    verdict(records)


def resolve(line: dict[str, str | bool]) -> tuple[tuple[Cell, ...], Target, int]:
    """The cells to check, where, and the seed. Bad input is found before torch is imported."""
    from flashbench import kernels, sweep

    known = kernels.registry()
    typed = sweep.parse(line, options.on_line, known)

    def cells(device_type: str) -> tuple[Cell, ...]:
        grid = dict(GRIDS[device_type])
        if "heads" in line:
            del grid["kv_heads"]
        return sweep.sweep_of(sweep.combine(typed, sweep.parse(grid, options.on_line, known))).cells()

    asked = typed.get("device")
    for device_type in [asked.split(":")[0]] if asked else list(GRIDS):
        cells(device_type)
    from flashbench import environment

    target = environment.target(asked)
    found = cells(target.type)
    options.settle({cell.implementation for cell in found}, target)
    return found, target, typed.get("seed", 0)


def _run(cells: Sequence[Cell], target: Target, seed: int, *, quiet: bool, verbose: bool) -> list[Record]:
    from flashbench import console, runner

    records: list[Record] = []
    console.listen(quiet=quiet)
    if not quiet:
        console.note(f"checking {len(cells)} cells on {target.name}")
    with console.progress(len(cells), quiet=quiet or verbose) as tick:

        def keep(record: Record) -> None:
            records.append(record)
            if verbose:
                console.note(f"[{len(records)}/{len(cells)}] {record.cell.key}: {record.status}")

        def begin(index: int, _: int, cell: Cell) -> None:
            tick(index, cell.key)

        runner.run_cells(cells, target, runner.RunOptions(seed=seed, time=False), keep, begin)
    return records


def _show(records: Sequence[Record], *, json: bool, csv: bool, quiet: bool) -> None:
    from flashbench import console
    from flashbench._cli.measure import outcome

    if json or csv:
        console.show_table(_raw_columns(), [_raw_row(record) for record in records], json=json, csv=csv)
    else:
        console.show_table(_summary_columns(), worst(records), title="worst error by dtype and tensor")
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


def ratio(record: Record, tensor: str) -> float | None:
    """Largest error over its budget; up to 1 is correct, None where the tensor was not compared."""
    accuracy = record.accuracy
    if accuracy is None or tensor not in accuracy.max_abs_error:
        return None
    error, budget = accuracy.max_abs_error[tensor], accuracy.budget[tensor]
    if budget > 0:
        return error / budget
    return 0.0 if error == 0 else float("inf")


def badness(record: Record, tensor: str) -> float:
    """The ratio as an order: a NaN is the worst of all."""
    value = ratio(record, tensor)
    return float("inf") if value is None or math.isnan(value) else value


def worst(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Per implementation, dtype and tensor: how many cells compared it, and the worst of them."""
    groups: dict[tuple[str, str, str], list[Record]] = {}
    for record in records:
        for tensor in TENSORS:
            if ratio(record, tensor) is not None:
                key = (record.cell.implementation, record.cell.problem.dtype, tensor)
                groups.setdefault(key, []).append(record)
    rows = []
    for (implementation, dtype, tensor), group in groups.items():
        at = max(group, key=partial(badness, tensor=tensor))
        accuracy = at.accuracy
        assert accuracy is not None
        rows.append({
            "implementation": implementation, "dtype": dtype, "tensor": tensor, "cells": len(group),
            "max_error_ratio": f"{ratio(at, tensor):.3g}",
            "max_abs_error": f"{accuracy.max_abs_error[tensor]:.2e}",
            "budget": f"{accuracy.budget[tensor]:.2e}", "at": f"{at.cell.pass_} {at.cell.problem.key}",
        })  # fmt: skip
    return rows


def _raw_row(record: Record) -> dict[str, Any]:
    ratios = [value for tensor in TENSORS if (value := ratio(record, tensor)) is not None]
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


def _summary_columns() -> list[Column]:
    from flashbench.console import Column

    return [
        Column(name="implementation", header="implementation"),
        Column(name="dtype", header="dtype"),
        Column(name="tensor", header="tensor"),
        Column(name="cells", header="cells", justify="right"),
        Column(name="max_error_ratio", header="error/budget", justify="right"),
        Column(name="max_abs_error", header="max |error|", justify="right"),
        Column(name="budget", header="budget", justify="right"),
        Column(name="at", header="at"),
    ]


def _failure_columns() -> list[Column]:
    from flashbench.console import Column

    return [
        Column(name="implementation", header="implementation"),
        Column(name="pass", header="pass"),
        Column(name="problem", header="problem"),
        Column(name="status", header="status"),
        Column(name="reason", header="reason"),
    ]
