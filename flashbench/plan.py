"""What a sweep will need before it starts: memory per cell, and a rough time."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

from flashbench import devices, iomodel, kernels
from flashbench.errors import FlashbenchError
from flashbench.kernels import Implementation, Target
from flashbench.problem import Cell, Problem
from flashbench.profilers import LEAD_S, LEAST_ROUNDS, SUSTAINED, Policy, policy_for
from flashbench.record import LOADS

CHECK_BYTES = {"cpu": 3 * 2**26, "cuda": 3 * 2**29}
"""Scratch of the fp64 check at most: three tensors of kernels/_reference.py's workspace."""

CELL_OVERHEAD_S = 0.1
"""Inputs, events, profiling of the backend, telemetry and an fsync, per cell."""

# Rough rates for the expected time only; nothing measured is compared with them.
FUSED_EFFICIENCY, NAIVE_EFFICIENCY = 0.4, 0.6
UNKNOWN_GPU_FLOPS_PER_S, UNKNOWN_GPU_BYTES_PER_S = 50e12, 1e12
FP64_FLOPS_SHARE, FP64_BYTES_PER_PAIR = 0.03, 60
CPU_FLOPS_PER_S_PER_CORE = 1e10
INTERPRETER_FLOPS_PER_S = 5e7
ENERGY_S = 1.2
"""What ``--energy`` adds to a cell: its loop and the changes of the counter around it."""


@dataclass(frozen=True, kw_only=True)
class PlannedCell:
    """A cell and what it is expected to need.

    needs_bytes: inputs, what prepare and the forward keep, the peak of the call or of its check,
    whichever is more. expected_s: rough. note: why it will not run (unavailable or unsupported), or
    what the numbers leave out; empty if there is nothing to say.
    """

    cell: Cell
    needs_bytes: int
    expected_s: float
    note: str = ""


def plan(
    cells: Sequence[Cell], target: Target, *, timed: bool = True, energy: bool = False, load: str = LOADS[0]
) -> list[PlannedCell]:
    """What each cell needs, in order. Cells that refuse cost nothing; the note says why."""
    planned: list[PlannedCell] = []
    checked: set[tuple[Problem, bool]] = set()
    for cell in cells:
        implementation = kernels.get(cell.implementation)
        refusal = refuses(implementation, cell, target)
        if refusal:
            planned.append(PlannedCell(cell=cell, needs_bytes=0, expected_s=0.0, note=refusal[1]))
            continue
        check = (cell.problem, cell.pass_ != "fwd")
        seconds = expected_s(
            cell, target, timed=timed, energy=energy, load=load, checked=check in checked
        )  # fmt: skip
        checked.add(check)
        note = "" if implementation.io_model else "scratch memory is not modelled"
        planned.append(
            PlannedCell(cell=cell, needs_bytes=needs_bytes(cell, target), expected_s=seconds, note=note)
        )
    return planned


def expected_s(
    cell: Cell,
    target: Target,
    *,
    timed: bool = True,
    energy: bool = False,
    load: str = LOADS[0],
    checked: bool = False,
) -> float:
    """Roughly how long a cell takes that is not refused, whether or not it is: nobody's code is asked.

    checked: its problem was, for another cell.
    """
    implementation = kernels.get(cell.implementation)
    seconds = _run_s(implementation, cell, target, timed)
    if not checked:
        seconds += _check_s(cell, target)
    if energy and not implementation.interpreted(target):
        seconds += ENERGY_S
    if load == SUSTAINED and timed and not implementation.interpreted(target):
        seconds += LEAST_ROUNDS * LEAD_S
    return seconds


def refuses(implementation: Implementation, cell: Cell, target: Target) -> tuple[str, str] | None:
    """(``unavailable`` or ``unsupported``, the reason), or None if the implementation takes the cell."""
    if reason := implementation.why_unavailable(target):
        return "unavailable", reason
    if reason := implementation.why_unsupported(cell.problem, cell.pass_, target):
        return "unsupported", reason
    return None


def resident_bytes(problem: Problem) -> int:
    """q, k, v and dout, which all cells of a problem share."""
    return _input_bytes(problem) + _output_bytes(problem)


def input_bytes(problem: Problem, pass_: str) -> int:
    """What a pass reads: q, k, v, and dout where there is a backward."""
    return _input_bytes(problem) + (_output_bytes(problem) if pass_ != "fwd" else 0)


def needs_bytes(cell: Cell, target: Target) -> int:
    """Most device memory alive while the cell is checked and measured, as far as it is modelled."""
    return together_bytes([cell], target)


def together_bytes(cells: Sequence[Cell], target: Target) -> int:
    """The same of cells of one problem that are all kept ready while they are timed in turns."""
    problem = cells[0].problem
    parts = [_call_bytes(cell, target) for cell in cells]
    held, extra = [one for one, _ in parts], [other for _, other in parts]
    pairs = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    check = min(CHECK_BYTES[target.type], 3 * 8 * pairs)
    # the check of the last one runs beside what the others hold
    return resident_bytes(problem) + max(sum(held) + max(extra), sum(held[:-1]) + check)


def _call_bytes(cell: Cell, target: Target) -> tuple[int, int]:
    """What prepare and the forward keep for a call, and what one call needs beside."""
    problem, pass_ = cell.problem, cell.pass_
    implementation = kernels.get(cell.implementation)
    inputs, output = _input_bytes(problem), _output_bytes(problem)
    held, extra = 0, output
    forward = _estimate(implementation, problem, "fwd", target)
    if pass_ == "fwd":
        extra = forward.extra_bytes if forward else output
    else:
        backward = _estimate(implementation, problem, "bwd", target)
        held = output + (forward.saved_bytes if forward else 0)
        extra = backward.extra_bytes if backward else inputs
    return held + implementation.prepared_bytes(problem, pass_, target), extra


def _estimate(
    implementation: Implementation, problem: Problem, pass_: str, target: Target
) -> iomodel.Estimate | None:
    model = implementation.model(problem, target)
    if model is None:
        return None
    plain = replace(problem, softcap=0.0, alibi=False, bias="", sinks=False, block_mask="")
    for one in dict.fromkeys((problem, plain)):  # what the model does not count needs more, if anything
        try:
            return iomodel.estimate(model, one, pass_)
        except FlashbenchError:  # the model does not cover this problem
            continue
    return None


def _input_bytes(p: Problem) -> int:
    """q, k, v, a bias and the sinks; the few bytes of slopes, lengths and block lists are left out."""
    queries, keys = p.rows
    elements = p.num_heads * queries * p.head_dim + p.num_kv_heads * keys * (p.head_dim + p.head_dim_v)
    elements += math.prod(p.bias_shape) if p.bias else 0
    return elements * p.dtype_bytes + 4 * p.num_heads * p.sinks


def _output_bytes(p: Problem) -> int:
    return p.rows[0] * p.num_heads * p.head_dim_v * p.dtype_bytes


def _rates(problem: Problem, target: Target) -> tuple[float, float]:
    """Nominal FLOP/s of the dtype and bytes/s of the target, guessed where unknown."""
    if target.type == "cpu":
        return CPU_FLOPS_PER_S_PER_CORE * (os.cpu_count() or 1), 2e10
    device = devices.match(target.name)
    if device is None:
        return UNKNOWN_GPU_FLOPS_PER_S, UNKNOWN_GPU_BYTES_PER_S
    return device.peak_flops_per_s.get(problem.dtype) or UNKNOWN_GPU_FLOPS_PER_S, device.hbm_bytes_per_s


def _call_s(implementation: Implementation, cell: Cell, target: Target) -> float:
    flops = iomodel.flops(cell.problem, cell.pass_)
    if implementation.interpreted(target):
        return flops / INTERPRETER_FLOPS_PER_S
    flops_per_s, bytes_per_s = _rates(cell.problem, target)
    estimate = _estimate(implementation, cell.problem, cell.pass_, target)
    if estimate is not None and estimate.model == "standard":
        compute_s = estimate.done_flops / (NAIVE_EFFICIENCY * flops_per_s)
        return max(compute_s, estimate.requested.total_bytes / (NAIVE_EFFICIENCY * bytes_per_s))
    return flops / (FUSED_EFFICIENCY * flops_per_s)


def _run_s(implementation: Implementation, cell: Cell, target: Target, timed: bool) -> float:
    call_s = _call_s(implementation, cell, target)
    if not timed or implementation.interpreted(target):
        return CELL_OVERHEAD_S + call_s
    policy: Policy = policy_for(target.device)
    return CELL_OVERHEAD_S + (policy.samples(call_s) + policy.warmup + 4) * call_s


def _check_s(cell: Cell, target: Target) -> float:
    """The fp64 reference, once per problem: forward on some rows, or a full stream for gradients."""
    problem = cell.problem
    flops_per_s, bytes_per_s = _rates(problem, target)
    pairs = problem.visible_pairs
    if cell.pass_ == "fwd":
        pairs = min(pairs, problem.batch * problem.num_heads * 96 * problem.seqlen_k)
    rate = flops_per_s / 4 if target.type == "cpu" else FP64_FLOPS_SHARE * flops_per_s
    flops = 2 * pairs * (problem.head_dim + problem.head_dim_v)
    return flops / rate + pairs * FP64_BYTES_PER_PAIR / (NAIVE_EFFICIENCY * bytes_per_s)
