"""``flashbench run --dry-run``: the cells, what each needs and how long it should take."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashbench._cli.run import Request
    from flashbench.plan import PlannedCell


def show(request: Request) -> None:
    """Print the plan to stdout; run nothing."""
    from flashbench import console, plan, units
    from flashbench.console import Column
    from flashbench.problem import Problem

    planned = plan.plan(
        request.cells, request.target, energy=request.flag("energy"), load=request.values["load"]
    )
    raw = request.flag("json") or request.flag("csv")
    shape = [Column(name=name, header=name) for name in Problem.__dataclass_fields__]
    columns = [
        Column(name="implementation", header="implementation"),
        Column(name="pass", header="pass"),
        *(shape if raw else [Column(name="problem", header="problem")]),
        Column(name="needs_bytes", header="needs", format=units.format_bytes, justify="right"),
        Column(name="expected_s", header="expected", format=units.format_seconds, justify="right"),
        Column(name="note", header="note"),
    ]
    total = sum(cell.expected_s or 0.0 for cell in planned)
    console.show_table(
        columns,
        [_row(cell) for cell in planned],
        json=request.flag("json"),
        csv=request.flag("csv"),
        title=f"{len(planned)} cells on {request.target.name}",
        notes=()
        if request.flag("quiet")
        else (f"{len(planned)} cells, about {units.format_seconds(total)} in all; nothing was run",),
    )


def _row(planned: PlannedCell) -> dict[str, Any]:
    problem = planned.cell.problem
    return {
        "implementation": planned.cell.implementation,
        "pass": planned.cell.pass_,
        "problem": problem.key,
        **asdict(problem),
        "needs_bytes": planned.needs_bytes,
        "expected_s": planned.expected_s,
        "note": planned.note or None,
    }
