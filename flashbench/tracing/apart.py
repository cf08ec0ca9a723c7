"""A cell traced in a process of its own, beside GPU work: Triton interprets or compiles for a process's life.

    trace_apart(cell, config) -> {"tool": "triton 3.9.0, interpreted", "traced_as": {…}, "scaled_by": 64,
                                  "traced_share": 0.015625, "difference_bytes": 0, "total": {…}, …}

as a record holds it: what ``tracing.trace_cell`` says of one K/V head, counted for all. ``{"reason": …}``
where the cell was not traced or its process was lost, ``{"error": …}`` where its kernels raise. A cell
has a process of its own, so that one that hangs or dies costs no other.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from flashbench import environment, kernels, tracing
from flashbench.installed import version_of
from flashbench.kernels import _triton
from flashbench.problem import Cell

START_S, VISIT_S = 120.0, 0.25
"""A trace is given START_S and VISIT_S for each tile visit that is allowed before it counts as hung."""


def trace_apart(
    cell: Cell, config: Mapping[str, Any], *, limit: int = tracing.LIMIT, seed: int = 0
) -> dict[str, Any]:
    """Trace one cell with the tiles that it was run with; raises nothing for what becomes of the process.

    config: of the record. limit: tile visits at most. Starts nothing for a cell that is no Triton kernel of
    flashbench or too large, nor without Triton, and leaves this process's Triton alone.
    """
    if reason := tracing.why_no_triton(kernels.get(cell.implementation)):
        return {"reason": reason}
    if reason := _triton.why_missing():
        return {"reason": reason}
    if reason := tracing.why_not_interpreted(cell, config):
        return {"reason": reason}
    part = replace(cell, problem=tracing.part_of(cell.problem))
    if reason := tracing.why_too_large(part, config, limit):
        return {"reason": reason}
    asked = {"cell": cell.to_json(), "config": dict(config), "limit": limit, "seed": seed}
    found = _child(json.dumps(asked), START_S + VISIT_S * limit)
    return found if "reason" in found else {"tool": _tool(), **found}


def _child(asked: str, limit_s: float) -> dict[str, Any]:
    """What the child says of the cell, or why it said nothing."""
    command = [sys.executable, "-m", "flashbench.tracing.child"]
    # no GPU: the interpreter needs none, and a context would hold memory of the cells that are measured
    surroundings = environment.for_child(TRITON_INTERPRET="1", CUDA_VISIBLE_DEVICES="")
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, timeout=limit_s, env=surroundings,
            check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return {"reason": f"the trace took longer than {limit_s:.0f} s"}
    except OSError as error:
        return {"reason": f"the tracing process did not start: {error}"}
    try:
        found = json.loads(done.stdout.splitlines()[-1])
        return dict(found) if not done.returncode else _lost(done)
    except (IndexError, ValueError, TypeError):
        return _lost(done)


def _lost(done: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    said = (done.stderr.strip().splitlines() or ["without a word"])[-1][:300]
    return {"reason": f"the tracing process exited with {done.returncode}: {said}"}


def _tool() -> str:
    return f"triton {version_of('triton')}, interpreted"
