"""What the compiler made of each bundled kernel: resources, machine code, occupancy. Needs no GPU.

A row is one kernel, compiled ahead of time for one architecture, dtype, head dim and mask, with the
tiles that it is launched with on a card of the given limits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from itertools import product
from typing import Any

from flashbench import kernels
from flashbench._profilers import sass
from flashbench._profilers.occupancy import WARP, Block, Limits, occupancy
from flashbench.kernels import Target, _compile, _triton
from flashbench.problem import Problem

OK, FAILED, UNSUPPORTED = "ok", "failed", "unsupported"
SHAPE: Mapping[str, Any] = {
    "batch": 1,
    "num_heads": 16,
    "num_kv_heads": 16,
    "seqlen_q": 4096,
    "seqlen_k": 4096,
}
"""The rest of the problem; the code depends on it only where a size is no multiple of 16."""

RESOURCES = ("registers", "shared_memory", "warps", "blocks", "tensor_memory")
_CODE: Mapping[str, None] = {
    "registers_per_thread": None, "stack_bytes_per_thread": None, "static_shared_bytes": None,
    **{f"{name}_instructions": None for name in sass.CLASSES},
    "spill_stored_bytes_per_thread": None, "spill_loaded_bytes_per_thread": None,
    "instructions": None, "code_bytes": None,
}  # fmt: skip
_OCCUPANCY: Mapping[str, None] = {
    "blocks_per_sm": None, "warps_per_sm": None, "occupancy_percent": None, "occupancy_limited_by": None,
    **{f"blocks_per_sm_by_{name}": None for name in RESOURCES},
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to compile. passes: of ``fwd`` and ``bwd``; limits: of the cards, by compute capability."""

    implementations: tuple[str, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    causal: tuple[bool, ...]
    passes: tuple[str, ...]
    limits: Mapping[tuple[int, int], Limits]


def why_unavailable() -> str | None:
    """Why nothing can be compiled here, one sentence, or None."""
    return _triton.why_missing()


def profile(*grids: Grid) -> list[dict[str, Any]]:
    """The rows of each grid in turn, sorted by what they are of, whatever the order of its axes.

    Keys carry their unit. A kernel that does not compile, or that its implementation refuses, is a
    row with a reason; so is one whose machine code could not be read, which has no counts.
    """
    asked = [
        (task, pass_, _refusal(task, pass_, grid), grid) for grid in grids for task, pass_ in _tasks(grid)
    ]
    compiled = iter(_compile.compile_all([task for task, _, no, _ in asked if not no], inspect=True))
    return [
        _row(_compile.Compiled(task) if no else next(compiled), pass_, no, grid)
        for task, pass_, no, grid in asked
    ]


def kernel_count(grid: Grid) -> int:
    """How many rows the grid has."""
    return len(_tasks(grid))


def _tasks(grid: Grid) -> list[tuple[_compile.Task, str]]:
    """Every kernel of the grid with its pass, in the order of the rows."""
    axes = product(
        sorted(grid.implementations), sorted(grid.limits), sorted(grid.dtypes), sorted(grid.head_dims),
        sorted(grid.causal),
    )  # fmt: skip
    tasks = []
    for implementation, capability, dtype, dim, causal in axes:
        problem = Problem(**SHAPE, head_dim=dim, head_dim_v=dim, dtype=dtype, causal=causal)
        limit = grid.limits[capability].smem_per_block_bytes
        whole = _compile.Task("", problem, capability, limit, implementation=implementation)
        for pass_, names in _compile.bundled(whole).kernels.items():
            if pass_ in grid.passes:
                tasks += [(replace(whole, kernel=name), pass_) for name in names]
    return tasks


def _refusal(task: _compile.Task, pass_: str, grid: Grid) -> str:
    """Why the implementation would not run the problem on such a card, or empty."""
    target = Target(
        device="cuda",
        name=grid.limits[task.capability].name,
        capability=task.capability,
        smem_per_block_bytes=task.limit,
    )
    return kernels.get(task.implementation).why_unsupported(task.problem, pass_, target) or ""


def _row(done: _compile.Compiled, pass_: str, refusal: str, grid: Grid) -> dict[str, Any]:
    task, limits = done.task, grid.limits[done.task.capability]
    compiled = not refusal and not done.error
    columns = done.tensor_memory_columns if compiled and limits.tensor_memory_columns else None
    row = {
        "implementation": task.implementation, "kernel": task.kernel, "pass": pass_,
        "arch": architecture(task.capability), "dtype": task.problem.dtype,
        "head_dim": task.problem.head_dim, "causal": task.problem.causal,
        "status": UNSUPPORTED if refusal else FAILED if done.error else OK,
        "reason": refusal or done.error or done.unread or None,
        "block_q": done.options.get("BLOCK_M"), "block_k": done.options.get("BLOCK_N"),
        "num_warps": done.options.get("num_warps"),
        "num_stages": done.options.get("num_stages", done.options.get("STAGES")),
        "dynamic_shared_bytes": done.shared_bytes if compiled else None,
        "tensor_memory_columns": columns,
        **_CODE, **_OCCUPANCY,
        "limits_of": limits.name, "limits_source": limits.source,
        "triton_version": metadata.version("triton"),
    }  # fmt: skip
    if compiled and not done.unread:
        row |= _read(done, limits)
    return row


def _read(done: _compile.Compiled, limits: Limits) -> dict[str, Any]:
    """The fields that need the machine code, or why it could not be understood."""
    try:
        code = sass.count(done.sass)
        usage = sass.usage(done.usage, done.sass)
    except ValueError as error:
        return {"reason": f"machine code not understood: {error}"}
    fit = occupancy(
        Block(
            threads=WARP * done.options["num_warps"],
            registers=usage.registers,
            shared_bytes=usage.static_shared_bytes + done.shared_bytes,
            tensor_memory_columns=done.tensor_memory_columns,
        ),
        limits,
    )
    return {
        "registers_per_thread": usage.registers, "stack_bytes_per_thread": usage.stack_bytes,
        "static_shared_bytes": usage.static_shared_bytes,
        **{f"{name}_instructions": number for name, number in code.counts.items()},
        "spill_stored_bytes_per_thread": code.spill_stored_bytes,
        "spill_loaded_bytes_per_thread": code.spill_loaded_bytes,
        "instructions": code.instructions, "code_bytes": code.code_bytes,
        "blocks_per_sm": fit.blocks_per_sm, "warps_per_sm": fit.blocks_per_sm * fit.warps_per_block,
        "occupancy_percent": 100 * fit.share, "occupancy_limited_by": list(fit.limited_by),
        **{f"blocks_per_sm_by_{name}": fit.blocks[name] for name in RESOURCES},
    }  # fmt: skip


def architecture(capability: tuple[int, int]) -> str:
    """sm_90 for (9, 0)."""
    return f"sm_{capability[0]}{capability[1]}"


def summary(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What is worth saying of the rows, a sentence each."""
    unread = {row["reason"] for row in rows if row["status"] == OK and row["reason"]}
    spilling = sum(bool(row["spill_store_instructions"] or row["spill_load_instructions"]) for row in rows)
    texts = [f"no counts: {reason}" for reason in sorted(unread)]
    if spilling:
        texts.append(f"{spilling} of {len(rows)} kernels spill registers to local memory")
    return texts
