"""What a gate can hold a change to without a GPU: numbers that repeat to the last unit, from one config.

    document(Plan(static=(grid,), trace=cells, …), tick) -> {"type": "gate", "schema": 1, "static": [{…}], …}

Five parts, a list of rows each: ``static``, what the compiler made of each kernel (``profile --static``);
``tiles``, what each kernel would be launched with; ``trace``, what each kernel moves of each tensor in the
interpreter (``profile --trace``); ``model``, what the IO model says; ``check``, whether results are right. No
row holds a time, a path or a machine, so that the same sources give the same document anywhere with one
version of Triton.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from flashbench import iomodel, kernels, launched
from flashbench.errors import FlashbenchError
from flashbench.kernels import Target
from flashbench.problem import Cell

if TYPE_CHECKING:
    from flashbench._profilers.static import Grid

SCHEMA = 1
PARTS = ("model", "tiles", "trace", "check", "static")
OK, WRONG, FAILED, UNSUPPORTED = "ok", "wrong", "failed", "unsupported"
CORRECT = (OK, "checked")
Tick = Callable[[int, str], None]


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What to measure. model: cells, each with the compute capability whose tiles it is modelled with."""

    static: tuple[Grid, ...] = ()
    tiles: tuple[launched.Grid, ...] = ()
    trace: tuple[Cell, ...] = ()
    model: tuple[tuple[Cell, tuple[int, int]], ...] = ()
    check: tuple[Cell, ...] = ()

    @property
    def steps(self) -> int:
        """How often ``document`` ticks."""
        return len(self.model) + len(self.tiles) + len(self.trace) + len(self.check) + bool(self.static)


def document(plan: Plan, tick: Tick) -> dict[str, Any]:
    """All rows of the plan. Raises UnavailableError where Triton is missing and there is work for it."""
    from flashbench import __version__
    from flashbench.installed import version_of

    done = _Counter(tick)
    return {
        "type": "gate", "schema": SCHEMA, "flashbench": __version__, "triton": version_of("triton"),
        "model": [_modelled(*one) for one in done.of(plan.model, lambda one: one[0].key)],
        "tiles": [row for grid in done.of(plan.tiles, lambda _: "tiles") for row in launched.rows(grid)],
        "trace": [row for cell in done.of(plan.trace, lambda one: one.key) for row in _traced(cell)],
        "check": _checked(plan.check, done),
        "static": _compiled(plan.static, done),
    }  # fmt: skip


def bad(rows: Mapping[str, Any]) -> list[tuple[str, Mapping[str, Any]]]:
    """Rows of a document that are wrong whatever a baseline says, with the part that they are of."""
    return [(part, row) for part in PARTS for row in rows[part] if row["status"] in (WRONG, FAILED)]


_Item = TypeVar("_Item")


class _Counter:
    """Ticks over several lists as if they were one."""

    def __init__(self, tick: Tick) -> None:
        self._tick = tick
        self._done = 0

    def of(self, items: Iterable[_Item], name: Callable[[_Item], str]) -> Iterator[_Item]:
        for item in items:
            self.next(name(item))
            yield item

    def next(self, text: str) -> None:
        self._tick(self._done, text)
        self._done += 1


def _modelled(cell: Cell, capability: tuple[int, int]) -> dict[str, Any]:
    """The model's traffic, with the tiles that the implementation has on such a card."""
    from flashbench._profilers.occupancy import LIMITS
    from flashbench._profilers.static import architecture

    implementation, limits = kernels.get(cell.implementation), LIMITS[capability]
    arch = architecture(capability)
    row: dict[str, Any] = {"cell": cell.key, "arch": arch, "status": OK, "reason": None}
    card = Target(
        device="cuda", name=arch, capability=capability,
        smem_per_block_bytes=limits.smem_per_block_bytes,
    )  # fmt: skip
    reason = implementation.why_unsupported(cell.problem, cell.pass_, card)
    runs = implementation.runs(cell.problem, card)  # there, whatever interprets here
    model = kernels.get(runs or cell.implementation).io_model
    if reason or model is None:
        return row | {"status": UNSUPPORTED, "reason": reason or f"{cell.implementation} has no IO model"}
    tiles = implementation.on_card(cell.problem, cell.pass_, card)
    try:
        found = iomodel.estimate(model, cell.problem, cell.pass_, tiles=tiles)
    except FlashbenchError as error:
        return row | {"status": UNSUPPORTED, "reason": str(error)}
    return row | {
        "requested_read_bytes": found.requested.read_bytes,
        "requested_write_bytes": found.requested.write_bytes,
        "requested_atomic_bytes": found.requested.atomic_bytes,
        "compulsory_bytes": found.compulsory.total_bytes,
        "done_flops": found.done_flops, "exps": found.exps, "extra_bytes": found.extra_bytes,
    }  # fmt: skip


def _traced(cell: Cell) -> Iterator[dict[str, Any]]:
    """A row for the cell, one for each kernel and one for each of its tensors."""
    from flashbench import tracing

    found = tracing.trace_cell(cell)
    row: dict[str, Any] = {
        "cell": cell.key, "kernel": None, "tensor": None, "status": OK, "reason": None,
    }  # fmt: skip
    if "reason" in found or "error" in found:
        status = UNSUPPORTED if "reason" in found else FAILED
        yield row | {"status": status, "reason": found.get("reason") or found["error"]}
        return
    apart = found["difference_bytes"], found["difference_flops"]
    if any(apart):
        yield row | {
            "status": WRONG,
            "reason": f"{apart[0]} B and {apart[1]} FLOPs apart from its model; 'flashbench profile --trace'"
            " says where",
        }
    for kernel in found["kernels"]:
        named = row | {"kernel": kernel["kernel"] or kernel["step"]}
        yield named | {name: kernel[name] for name in ("programs", "flops", "exps")}
        for tensor in kernel["tensors"]:
            moved = {name: tensor[name] for name in ("read_bytes", "write_bytes", "atomic_bytes")}
            yield named | {"tensor": tensor["tensor"], **moved}


def _checked(cells: Sequence[Cell], done: _Counter) -> list[dict[str, Any]]:
    """Each cell's status. Errors stand in a reason only: their last digits are the processor's."""
    if not cells:
        return []
    from flashbench import environment, runner

    rows: list[dict[str, Any]] = []
    runner.run_cells(
        cells,
        environment.target("cpu"),
        runner.RunOptions(time=False, cache="hot"),
        lambda record: rows.append(
            {"cell": record.cell.key, "status": OK, "reason": None} if record.status in CORRECT
            else {"cell": record.cell.key, "status": record.status, "reason": record.reason}
        ),
        lambda _, __, cell: done.next(cell.key),
    )  # fmt: skip
    return rows


def _compiled(grids: Sequence[Grid], done: _Counter) -> list[dict[str, Any]]:
    """Every grid in one go: what takes long is to start the processes that compile."""
    if not grids:
        return []
    from flashbench._profilers import static
    from flashbench.errors import UnavailableError

    reason = static.why_unavailable()
    if reason is not None:
        raise UnavailableError(f"static: {reason}")
    done.next("compiling")
    return static.profile(*grids)
