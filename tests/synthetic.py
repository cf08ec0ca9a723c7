"""Made-up results for the tests of table and report: plausible shapes, not measurements.

Times follow from a formula (FLOPs over an assumed rate plus an overhead), so tests can compute
what they expect. Nothing here ran anywhere; the header says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from flashbench import compared, devices, iomodel
from flashbench.problem import Cell, Problem
from flashbench.record import Accuracy, Memory, Record, Samples
from flashbench.runfile import RunFile

H100 = "NVIDIA H100 80GB HBM3"
LENGTHS = tuple(1024 * 2**power for power in range(7))
RATES = {"naive": 45e12, "sdpa": 560e12, "sdpa-flash": 420e12, "sdpa-cudnn": 570e12, "flash": 500e12}
"""Assumed nominal FLOP/s of long sequences, by implementation."""
OVERHEAD_S = 12e-6


def problem(seqlen: int = 1024, **changes: Any) -> Problem:
    """16k tokens of hidden size 2048, as the default sweep has them."""
    head_dim = changes.pop("head_dim", 128)
    values: dict[str, Any] = {
        "batch": max(1, 16384 // seqlen), "num_heads": 2048 // head_dim, "num_kv_heads": 2048 // head_dim,
        "seqlen_q": seqlen, "seqlen_k": seqlen, "head_dim": head_dim, "head_dim_v": head_dim,
        "dtype": "bf16", "causal": False,
    }  # fmt: skip
    return Problem(**{**values, **changes})


def made_up_time_s(cell: Cell) -> float:
    """Seconds that the formula gives a cell. naive gains nothing from the causal mask."""
    flops = iomodel.flops(cell.problem, cell.pass_)
    work = flops / RATES[cell.implementation] * (0.8 if cell.pass_ == "fwd" else 1.1)
    if cell.implementation == "naive" and cell.problem.causal:
        work *= 2
    return work + OVERHEAD_S


def record(implementation: str = "flash", seqlen: int = 1024, pass_: str = "fwd", **changes: Any) -> Record:
    """A record; keywords are the record's own (status, reason, …), the rest go to the problem."""
    own = {name: changes.pop(name) for name in list(changes) if name in Record.__dataclass_fields__}
    cell = Cell(implementation=implementation, problem=problem(seqlen, **changes), pass_=pass_)
    model = "standard" if implementation == "naive" else "flash-v2"
    values: dict[str, Any] = {
        "status": "ok",
        "io_model": model,
        "environment": {"device_name": H100},
    }
    if own.get("status", "ok") == "ok":
        time_s = made_up_time_s(cell)
        samples = tuple(time_s * (1 + 0.01 * ((3 * index) % 5 - 2)) for index in range(20))
        row = iomodel.estimate(model, cell.problem, pass_)
        extra = row.extra_bytes
        values |= {
            "samples": Samples(samples_s=samples, cache="cold", method="events"),
            "memory": Memory(
                inputs_bytes=1000, outputs_bytes=500, peak_extra_bytes=extra, reserved_bytes=2 * extra
            ),
            "counters": {"total": made_up_counters(row), "kernels": []},
            "trace": made_up_trace(row, cell) if implementation == "flash" else None,
            "accuracy": Accuracy(max_abs_error={"o": 0.004}, budget={"o": 0.01}, query_rows=64, key_rows=0),
        }
    return Record(cell=cell, **{**values, **own})


def made_up_counters(row: iomodel.Estimate) -> dict[str, int]:
    """What a profiler might have counted: the model, and a thousandth more of what is read."""
    card = devices.find("h100-sxm")
    alone = iomodel.kernels_alone(row, card)
    return {
        "l2_read_bytes": row.requested.read_bytes * 1001 // 1000,
        "l2_write_bytes": row.requested.write_bytes,
        "l2_atomic_bytes": 0,
        "dram_read_bytes": sum(one.read.value for one in alone) * 1001 // 1000,
        "dram_write_bytes": sum(
            one.write.value + compared.left_by_the_profiler(one, card).value for one in alone
        ),
    }


def made_up_trace(row: iomodel.Estimate, cell: Cell) -> dict[str, Any]:
    """What Triton's interpreter might have seen: the model, from one K/V head of one batch."""
    moved = {
        kind: getattr(row.requested, f"{kind}_bytes") for kind in ("read", "write", "atomic")
    }  # fmt: skip
    share = 1 / (cell.problem.batch * cell.problem.num_kv_heads)
    total = {f"{kind}_bytes": count for kind, count in moved.items()}
    return {"traced_share": share, "difference_bytes": 0, "total": total, "kernels": []}


def sweep(
    implementations: Iterable[str] = RATES,
    lengths: Iterable[int] = LENGTHS,
    head_dims: Iterable[int] = (64, 128),
    passes: Iterable[str] = ("fwd", "bwd"),
) -> list[Record]:
    """A grid as the default run has it; naive does not fit at the two longest lengths."""
    records = []
    for head_dim in head_dims:
        for causal in (False, True):
            for seqlen in lengths:
                for pass_ in passes:
                    for name in implementations:
                        shape = {"head_dim": head_dim, "causal": causal}
                        if name == "naive" and seqlen >= 32768:
                            shape |= {"status": "skipped", "reason": _too_big(seqlen, head_dim)}
                        if name == "sdpa":
                            shape |= {"backend": "cudnn"}
                        records.append(record(name, seqlen, pass_, **shape))
    return records


def _too_big(seqlen: int, head_dim: int) -> str:
    needs = 2 * 2 * (2048 // head_dim) * seqlen**2
    return f"needs {needs / 1e9:.0f} GB; the device has 85 GB"


def run_file(records: Iterable[Record], path: str | Path = "synthetic.jsonl", **header: Any) -> RunFile:
    """Records as a results file that was read."""
    records = tuple(records)
    values = {
        "type": "header", "schema": 1, "created_at": "2000-01-01T00:00:00+00:00",
        "argv": ["flashbench", "run", "--seqlens", "1k-64k"], "options": {},
        "environment": {"device_name": H100, "note": "synthetic: made by tests/synthetic.py, never measured"},
        "cells": [item.cell.key for item in records],
    }  # fmt: skip
    return RunFile(path=Path(path), header={**values, **header}, records=records)
