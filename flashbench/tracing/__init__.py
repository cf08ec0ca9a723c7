"""Traced beside modelled: a cell of a bundled Triton kernel, run in Triton's interpreter, load by load.

    trace_cell(cell) -> {"difference_bytes": 0, "difference_flops": 0, "total": {…}, "kernels": [{…}, …]}

Exact on both sides: any difference of bytes or of FLOPs is a mistake in the kernel or in its model. A cell's
mapping holds, per kernel, ``kernel``, ``step`` (of the model), ``programs``, ``flops``, ``modelled_flops``,
``exps``, ``modelled_exps``, ``masked_share`` and per tensor the bytes read, written and added, traced and
modelled. Exponentials are no difference: the model counts those of scores, whatever computes them.

Programs of different batches and K/V heads do the same at other addresses. So one K/V head of one batch can
stand for all (``one_head``): what it moves, times batch x num_kv_heads, is what the whole cell moves.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from flashbench import iomodel, kernels
from flashbench._profilers.trace import Launch, Moved, trace, why_unavailable
from flashbench.errors import RAISED, SpecError, in_words
from flashbench.iomodel import Estimate, Step
from flashbench.kernels import Implementation, Target, _hopper_row, _triton
from flashbench.problem import Cell, Problem

STEPS = {
    "forward": "forward", "delta_rows": "delta", "backward_dq": "dq", "backward_dkdv": "dkdv",
    "backward_dbias": "dbias", "backward_dbias_of_rows": "dbias", "backward_dsinks": "dsinks",
}  # fmt: skip
"""Kernel → step of its model, else that of its name. A tensor argument is the model's tensor in capitals."""

_TILES_OF = {
    "forward": "fwd", "decode": "fwd", "dq": "dq", "dbias": "dq", "dkdv": "dkdv", "backward": "bwd",
}  # fmt: skip
"""Step → the kernel whose tiles it visits."""

LIMIT = 2_000
"""Tile visits of a cell that are interpreted at most, unless told otherwise: a quarter to one and a half
minutes, at the 20 to 150 a second that a core does, by dtype and tile."""

KINDS = (("read", "loaded_bytes"), ("write", "stored_bytes"), ("atomic", "atomic_bytes"))
CPU = Target(device="cpu", capability=None)

_STANDS_FOR = {"bf16": "fp16", "tf32": "fp32"}
"""Dtypes that the interpreter does not have, and what moves the same bytes by the same kernels."""


def trace_cell(
    cell: Cell,
    config: Mapping[str, Any] | None = None,
    *,
    limit: int = LIMIT,
    seed: int = 0,
    one_head: bool = False,
) -> dict[str, Any]:
    """Trace one cell; ``{"reason": …}`` where it cannot be traced, ``{"error": …}`` where its kernels raise.

    config: tiles as a record holds them, such as those of a GPU; else the interpreter's. bf16 is traced
    as fp16 and tf32 as fp32, which move the same: the interpreter computes bf16 in fp32.

    one_head: run one K/V head of one batch and count it as often as there are, beside the model of the whole
    cell; the mapping then also holds ``traced_as`` (what ran), ``scaled_by`` and ``traced_share``.
    """
    cell = replace(cell, problem=_interpretable(cell.problem))
    implementation = kernels.get(cell.implementation)
    if reason := why_no_triton(implementation):
        return {"reason": reason}
    if reason := implementation.why_unavailable(CPU) or _triton.why_unavailable(CPU) or why_unavailable():
        return {"reason": reason}
    if reason := implementation.why_unsupported(cell.problem, cell.pass_, CPU):
        return {"reason": reason}
    config = config or implementation.describe(cell.problem, cell.pass_, CPU)
    if reason := why_not_interpreted(cell, config):
        return {"reason": reason}
    traced = replace(cell, problem=part_of(cell.problem)) if one_head else cell
    try:
        reason = why_too_large(traced, config, limit)
    except SpecError as error:  # nothing to hold it to
        return {"reason": str(error)}
    if reason:
        return {"reason": reason}
    try:
        launches = _launches(traced, config, seed)
    except RAISED as error:  # a kernel raises whatever it likes, and other cells go on
        return {"error": in_words(error)}
    if not launches and implementation.origin is not None:  # a bundled one may have nothing to do
        return {"reason": f"{cell.implementation} launched no Triton kernel: nothing to interpret"}
    if not one_head:
        return compare(launches, _estimate(cell, config))
    count = parts_of(cell.problem)
    few = _own(cell.problem), _own(traced.problem)
    changed = {
        name: value for name, value in asdict(traced.problem).items()
        if name in ("batch", "num_heads", "num_kv_heads", "dtype")
    }  # fmt: skip
    said = {"traced_as": changed, "scaled_by": count, "traced_share": 1 / count}
    return {**said, **compare([_times(launch, count, few) for launch in launches], _estimate(cell, config))}


def why_not_interpreted(cell: Cell, config: Mapping[str, Any]) -> str | None:
    """Why Triton's interpreter does not run the kernels that the configuration is of, or None."""
    runs = config.get("kernels", cell.implementation)
    if runs == _hopper_row.NAME and cell.pass_ != "bwd":  # whose kernels are flash-v2's
        return f"{runs} is written in Gluon, which Triton's interpreter does not run; flash-v2 can be traced"
    return None


def why_no_triton(implementation: Implementation) -> str | None:
    """Why the implementation cannot hold Triton kernels, before anything of it is imported; or None."""
    if implementation.prepare_tiles is None and implementation.origin is None:
        return f"{implementation.name} is no Triton kernel of flashbench: nothing to interpret"
    return None


def _interpretable(problem: Problem) -> Problem:
    return replace(problem, dtype=_STANDS_FOR.get(problem.dtype, problem.dtype))


def part_of(problem: Problem) -> Problem:
    """Batch 1 and one K/V head with its query heads: what every other part of the problem repeats.

    A packed batch keeps all its sequences, as they differ.
    """
    batch = problem.batch if problem.lengths else 1
    return replace(problem, batch=batch, num_heads=problem.group, num_kv_heads=1)


def parts_of(problem: Problem) -> int:
    """How often the problem repeats ``part_of`` it."""
    return problem.num_kv_heads * (1 if problem.lengths else problem.batch)


def _own(problem: Problem) -> dict[str, int]:
    """Programs, but for tiles, of the kernels that sum over what shares an entry: of bias and sinks."""
    batches, heads = problem.bias_shape[:2] if problem.bias else (1, 1)
    bias = dict.fromkeys(("backward_dbias", "backward_dbias_of_rows"), batches * heads)
    return {**bias, "backward_dsinks": problem.num_heads}


def why_too_large(cell: Cell, config: Mapping[str, Any], limit: int) -> str | None:
    """Why the cell would take too long to interpret, or None; needs no Triton.

    Nobody knows of a function of somebody's own.
    """
    estimate = _estimate(cell, config)
    visits = tile_visits(estimate) if estimate else 0
    return f"{visits} tile visits are too many to interpret; the limit is {limit}" if visits > limit else None


def _estimate(cell: Cell, config: Mapping[str, Any]) -> Estimate | None:
    """What the bundled kernels should move, to the byte; None of a function of somebody's own."""
    implementation = kernels.get(cell.implementation)
    if implementation.origin is not None:
        return None
    model = implementation.io_model
    assert model is not None, cell.implementation
    return iomodel.estimate(model, cell.problem, cell.pass_, tiles=config)


def _times(launch: Launch, count: int, own: tuple[dict[str, int], dict[str, int]]) -> Launch:
    """A launch that does so many times as much, each part the same.

    own: of the whole problem and of the part, programs of kernels that have one for what several parts share;
    they do not grow with the parts, nor does what each of them moves once.
    """
    whole, part = (kind.get(launch.kernel, 0) for kind in own)
    programs = launch.programs * whole // part if part else count * launch.programs
    arguments = {}
    for name, moved in launch.arguments.items():
        times = whole // part if part and name in _ONCE[launch.kernel] else count
        arguments[name] = Moved(**{what: times * number for what, number in asdict(moved).items()})
    return Launch(
        launch.kernel, arguments, flops=count * launch.flops, exps=count * launch.exps, programs=programs
    )


_ONCE = {
    "backward_dbias": ("DBIAS",),
    "backward_dbias_of_rows": ("DBIAS",),
    "backward_dsinks": ("SINKS", "DSINKS"),
}
"""Kernel → arguments that a program of it moves once, however long it loops."""


def tile_visits(row: Estimate) -> int:
    """How many tiles the tiled kernels of an estimate visit."""
    areas = {
        step: row.tiles.get(f"{kernel}_block_q", 0) * row.tiles.get(f"{kernel}_block_k", 0)
        for step, kernel in _TILES_OF.items()
    }
    return sum(step.exps // areas[step.name] for step in row.steps if areas.get(step.name))


def _launches(cell: Cell, config: Mapping[str, Any], seed: int) -> tuple[Launch, ...]:
    """The launches of the cell's pass alone, on the CPU."""
    import torch

    from flashbench.aside import stdout_to_stderr
    from flashbench.kernels._backward import backward_call, forward_backward_call, kept_graphs
    from flashbench.kernels._inputs import make_inputs

    inputs = make_inputs(cell.problem, "cpu", seed).detached(grad=cell.pass_ != "fwd")
    implementation = kernels.get(cell.implementation)
    prepare = implementation.prepare_tiles or (
        lambda problem, inputs, _: implementation.prepare(problem, inputs)
    )
    with torch.set_grad_enabled(cell.pass_ != "fwd"), stdout_to_stderr(), kept_graphs():
        call = prepare(cell.problem, inputs, config)
        if cell.pass_ == "bwd":
            return trace(backward_call(call, inputs)[0])
        return trace(call if cell.pass_ == "fwd" else forward_backward_call(call, inputs))


def compare(launches: Sequence[Launch], row: Estimate | None) -> dict[str, Any]:
    """The launches beside the steps of the estimate, by name; one without the other counts in full.

    Without an estimate nothing is modelled, and there is no difference.
    """
    if row is None:
        return _traced_alone(launches)
    steps = list(row.steps)
    found = []
    for launch in launches:
        name = STEPS.get(launch.kernel, launch.kernel)
        step = next((step for step in steps if step.name == name), None)
        if step is not None:
            steps.remove(step)
        found.append(_kernel(launch, step))
    found += [_kernel(Launch(""), step) for step in steps]
    difference = sum(
        abs(tensor[f"{kind}_bytes"] - tensor[f"modelled_{kind}_bytes"])
        for kernel in found
        for tensor in kernel["tensors"]
        for kind, _ in KINDS
    )
    flops = sum(abs(kernel["flops"] - kernel["modelled_flops"]) for kernel in found)
    total = {
        name: sum(kernel[name] for kernel in found)
        for name in ("programs", "flops", "modelled_flops", "exps", "modelled_exps")
    }
    for kind, _ in KINDS:
        for prefix in ("", "modelled_"):
            key = f"{prefix}{kind}_bytes"
            total[key] = sum(tensor[key] for kernel in found for tensor in kernel["tensors"])
    return {"difference_bytes": difference, "difference_flops": flops, "total": total, "kernels": found}


def _traced_alone(launches: Sequence[Launch]) -> dict[str, Any]:
    found = [_without_model(_kernel(launch, None)) for launch in launches]
    for kernel in found:
        kernel["tensors"] = [_without_model(tensor) for tensor in kernel["tensors"]]
    total = {name: sum(kernel[name] for kernel in found) for name in ("programs", "flops", "exps")}
    for kind, _ in KINDS:
        key = f"{kind}_bytes"
        total[key] = sum(tensor[key] for kernel in found for tensor in kernel["tensors"])
    return {"difference_bytes": None, "difference_flops": None, "total": total, "kernels": found}


def _without_model(values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in values.items() if not name.startswith("modelled_")}


def _kernel(launch: Launch, step: Step | None) -> dict[str, Any]:
    moved = {name.lower(): argument for name, argument in launch.arguments.items()}
    parts = {kind: dict(getattr(step, kind)) if step else {} for kind, _ in KINDS}
    tensors = []
    for name in dict.fromkeys([*moved, *(name for part in parts.values() for name in part)]):
        tensor: dict[str, Any] = {"tensor": name or "out of bounds"}
        for kind, counted in KINDS:
            tensor[f"{kind}_bytes"] = getattr(moved[name], counted) if name in moved else 0
            tensor[f"modelled_{kind}_bytes"] = parts[kind].get(name, 0)
        tensor["masked_share"] = moved[name].masked_share if name in moved else 0.0
        if any(tensor[key] for key in tensor if key.endswith("_bytes")):
            tensors.append(tensor)
    lanes = sum(one.loaded + one.stored + one.atomic + one.masked for one in moved.values())
    masked = sum(one.masked for one in moved.values())
    return {
        "kernel": launch.kernel,
        "step": step.name if step else None,
        "programs": launch.programs,
        "flops": launch.flops,
        "modelled_flops": step.flops if step else 0,
        "exps": launch.exps,
        "modelled_exps": step.exps if step else 0,
        "masked_share": masked / lanes if lanes else 0.0,
        "tensors": tensors,
    }
