"""Cells measured in a worker process, so that no cell can take the sweep, or another cell, with it.

    with Bench(target, options) as bench:
        bench.run(cells, on_record, on_progress)

The worker owns the device and has torch imported; this process owns the file, the screen and the clock. One
worker serves all groups (cells of one problem and pass, which are timed in turns) until it

- dies (a segmentation fault, an abort, ``os._exit``, the kernel's killer) or says what cannot be: the cell
  whose turn it was is tried once more, alone in a new worker, after the others of its group; a second time
  it is ``failed``;
- hangs: the cell whose turn it was is a ``timeout``, and not tried again, as that takes the time once more;
- loses its device (a sticky CUDA error): the cell has its row, those that did not start are measured;
- keeps memory that no cell holds: the next problem starts in a new worker.

In each case the others of the group are measured together in a new worker. Where no worker starts, the rest
is ``skipped``, as where a device is lost, and ``--resume`` measures it.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from flashbench import environment, plan, runner, tuned, units
from flashbench._runner.outcomes import duration, with_source
from flashbench.aside import stdout_to_stderr
from flashbench.isolation import death, protocol
from flashbench.isolation.supply import Supply
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.record import Record
from flashbench.runner import LOST, OnProgress, OnRecord, RunOptions

__all__ = ["Bench"]

log = logging.getLogger("flashbench")

LEAST_S, TIMES_EXPECTED = 300.0, 10.0
"""A cell may give no sign of life for the longer of LEAST_S and so many times the time that is expected."""
COMPILE_S = 60.0
"""Compiling ahead may take LEAST_S and so much for each cell."""


@dataclass(kw_only=True)
class _Batch:
    """Cells of one work to be measured together. alone: why one of them is measured apart from the others."""

    cells: Sequence[Cell]
    alone: str | None = None
    measured: set[Cell] = field(default_factory=set)

    @property
    def rest(self) -> list[Cell]:
        """What has no record yet."""
        return [cell for cell in self.cells if cell not in self.measured]


@dataclass(frozen=True, kw_only=True)
class _Blame:
    """The cell that ended a batch early, and what its record would say. again: it may be tried once more."""

    cell: Cell
    outcome: Mapping[str, Any]
    again: bool = False


class Bench:
    """Where cells are measured.

    in_process: in this process instead, for a debugger and for what cannot crash. command: starts a worker,
    for tests. surroundings: environment variables that the worker has beside this process's.
    """

    def __init__(
        self, target: Target, options: RunOptions, *, in_process: bool = False,
        command: Sequence[str] | None = None, surroundings: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        self.target = target
        self.options = options
        self._in_process = in_process
        self._dropped = False
        self._supply = Supply(self._setup, command, surroundings)
        self._names: Sequence[str] = ()
        self._timed: list[Record] = []
        self._began = time.monotonic()
        self._begin: Callable[[Cell], None] = lambda _: None
        self._keep: OnRecord = lambda _: None

    def __enter__(self) -> Self:
        self._dropped = False
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.drop()

    def drop(self) -> None:
        """End the worker for good, from any thread: a cell that is at work has no row."""
        self._dropped = True
        self._supply.drop()

    def ready(self) -> None:
        """Start the worker ahead of its work; where it does not start, that is told then."""
        with suppress(death.Ended):
            self._supply.get()

    def overheads(self, *, cupti: bool) -> dict[str, Any]:
        """What timing itself costs, as profilers.measure_overheads; {} on a CPU and where it fails."""
        if self.target.type != "cuda":
            return {}
        if self._in_process:
            from flashbench import profilers

            return dict(profilers.measure_overheads(self.target.device, cupti=cupti))
        found = self._supply.ask({"do": "overheads", "cupti": cupti}, LEAST_S)
        return found if isinstance(found, dict) else {}

    def run(
        self,
        cells: Sequence[Cell],
        on_record: OnRecord,
        on_progress: OnProgress = lambda *_: None,
        stop: Callable[[], bool] = runner.never,
        *,
        groups: Iterable[Sequence[Cell]] | None = None,
        ahead: Sequence[Cell] | None = None,
    ) -> dict[str, float]:
        """Measure the cells as runner.run_cells does; of what it returns starting_s is that of workers.

        A record comes as soon as it is there: where a worker was lost, not in the order of the cells.
        groups: those of the cells that are measured here, of which the next is asked for once the one before
        is done. ahead: of the cells, those that are compiled before; both are all where not given.
        """
        if self._in_process:
            with stdout_to_stderr():
                return runner.run_cells(cells, self.target, self.options, on_record, on_progress, stop)
        start = self._began = time.monotonic()
        self._names = list(dict.fromkeys(cell.implementation for cell in cells))
        self._keep, self._begin = on_record, _once(on_progress, len(cells))
        compiled_s = self._precompile(cells if ahead is None else ahead)
        for group in runner.groups(cells) if groups is None else groups:
            self._group(group, stop)
        wall_s = time.monotonic() - start
        return {"wall_s": wall_s, "precompile_s": compiled_s, "starting_s": self._supply.starting_s}

    def _precompile(self, cells: Sequence[Cell]) -> float:
        """Have a worker compile ahead, on a GPU; the seconds that it took."""
        if self.target.type != "cuda" or not cells:
            return 0.0
        before, start = self._supply.starting_s, time.monotonic()
        message = {"do": "precompile", "cells": [cell.to_json() for cell in cells]}
        self._supply.ask(message, LEAST_S + COMPILE_S * len(cells))  # else each cell compiles by itself
        return time.monotonic() - start - (self._supply.starting_s - before)

    def _group(self, cells: Sequence[Cell], stop: Callable[[], bool]) -> None:
        """Cells of one work: together; where one ends that, the others together, then that one."""
        batches = [_Batch(cells=cells)]
        while batches and not (self._dropped or stop()):
            batch = batches.pop(0)
            if batch.alone is not None:
                self._supply.drop()  # it has served the others meanwhile
            blame = self._measure(batch)
            if blame is not None:
                batch.measured.add(blame.cell)
                reason = blame.outcome["reason"]
                if blame.again and batch.alone is None:
                    log.warning("%s: %s; once more, alone in a new process", blame.cell.key, reason)
                    batches.append(_Batch(cells=[blame.cell], alone=f"its first try failed: {reason}"))
                else:
                    log.warning("%s: %s; a new process takes over", blame.cell.key, reason)
                    self._keep(self.row(blame.cell, blame.outcome))
            if batch.rest:
                batches.insert(0, _Batch(cells=batch.rest, alone=batch.alone))

    def _measure(self, batch: _Batch) -> _Blame | None:
        """Have a worker measure the batch as far as it gets; who is to blame if it gets no further."""
        try:
            serving = self._supply.get()
        except death.Ended as error:
            outcome = {"status": "skipped", "reason": f"{LOST}: no process to measure in: {error}"}
            for cell in () if self._dropped else batch.rest:
                self._begin(cell)
                self._keep(self.row(cell, outcome))
                batch.measured.add(cell)
            return None
        cells = [cell.to_json() for cell in batch.cells]
        serving.send({"do": "cells", "cells": cells, "alone": batch.alone})
        current = batch.cells[0]
        while True:
            try:
                message = self._supply.heard(self._limit_s(current))
                told = protocol.told(message, batch.cells, batch.measured)
            except death.Ended as error:
                self._supply.drop()
                outcome = {"status": error.status, "reason": str(error)}
                # between two cells nobody is to blame
                return (
                    None
                    if current in batch.measured or self._dropped
                    else _Blame(cell=current, outcome=outcome, again=True)
                )
            except death.Silent:
                reason = f"no sign of life for {duration(self._limit_s(current))}{self._supply.where()}"
                self._supply.drop()
                return _Blame(cell=current, outcome={"status": "timeout", "reason": reason})
            if isinstance(told, Cell):
                current = told
                self._begin(current)
            elif isinstance(told, Record):
                self._take(told, batch)
            else:
                return self._last(message, current, batch)

    def _take(self, record: Record, batch: _Batch) -> None:
        batch.measured.add(record.cell)
        self._timed.append(record)
        self._begin(record.cell)
        self._keep(record)

    def _last(self, message: Mapping[str, Any], current: Cell, batch: _Batch) -> _Blame | None:
        """What the worker's last message of a batch means."""
        if message.keys() == {"done"}:
            return None
        self._supply.drop()
        if "left" in message:
            size = units.format_bytes(message["left"])
            log.warning("%s stayed allocated after %s; a new process takes over", size, self._latest())
            return None
        reason = message.get("raised") or message["lost"]
        if current in batch.measured and batch.rest:  # it ended where it was to tell of the next
            current = batch.rest[0]
        if current not in batch.measured and ("raised" in message or not batch.measured):
            return _Blame(cell=current, outcome={"status": "failed", "reason": reason})
        log.warning("%s; a new process takes over", reason)
        return None

    def _latest(self) -> str:
        return self._timed[-1].cell.problem.key if self._timed else "nothing"

    def _limit_s(self, cell: Cell) -> float:
        """How long the cell may give no sign of life, seconds."""
        options = self.options
        if options.cell_timeout_s is not None:
            return options.cell_timeout_s
        expected_s = plan.expected_s(
            cell, self.target, timed=options.time, energy=options.energy, load=options.load
        )
        return max(LEAST_S, TIMES_EXPECTED * expected_s)

    def _setup(self) -> dict[str, Any]:
        elapsed_s = time.monotonic() - self._began
        return protocol.setup_to_json(
            self.target, self.options, elapsed_s=elapsed_s, timed=self._timed, names=self._names
        )

    def row(self, cell: Cell, outcome: Mapping[str, Any]) -> Record:
        """The row of a cell that no worker told of. outcome: its status and reason."""
        implementation = tuned.get(self.options.tuned, cell.implementation)
        return Record(
            cell=cell,
            io_model=implementation.model(cell.problem, self.target),
            environment=environment.row_fields(self.options.environment or {}),
            device_type=self.target.type,
            started_at=datetime.now(UTC).isoformat(timespec="milliseconds"),
            **with_source(outcome, implementation),
        )


def _once(on_progress: OnProgress, total: int) -> Callable[[Cell], None]:
    """Tells of each cell when it begins for the first time."""
    begun, count = set[Cell](), itertools.count()

    def begin(cell: Cell) -> None:
        if cell not in begun:
            begun.add(cell)
            on_progress(next(count), total, cell)

    return begin
