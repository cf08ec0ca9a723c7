"""Cells to records: refuse, fit, prepare, check, measure memory, time. Nothing but a KeyboardInterrupt comes
out of a sweep. All of it happens in this process; ``isolation`` has it done in another one.

Implementations of the same work (one problem and pass) are made ready one by one and timed together, in
turns, where they fit in memory at once; their records come when they are done. Else each is timed alone.
"""

from __future__ import annotations

import gc
import itertools
import logging
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from flashbench import environment, plan, profilers, record_shape, tuned
from flashbench._runner import gates, leftover
from flashbench._runner.entry import Entry, How, Shared, does_not_fit
from flashbench._runner.outcomes import duration, what, why_wrong, with_source
from flashbench.errors import RAISED
from flashbench.kernels import Target
from flashbench.problem import Cell, Problem
from flashbench.record import LOADS, Record, Samples
from flashbench.record_json import record_to_json

__all__ = [
    "LOST", "OnProgress", "OnRecord", "RunOptions", "Session", "groups", "never", "over_budget", "precompile",
    "run_cells", "unworried", "what", "why_wrong",
]  # fmt: skip

log = logging.getLogger("flashbench")

OnRecord = Callable[[Record], None]
OnProgress = Callable[[int, int, Cell], None]
"""(cells done, cells in all, the cell that starts now)."""

LOST = "the device was lost"
"""How the reason of a cell begins that did not start because an earlier one broke the device."""


def never() -> bool:
    """Nobody asks for a stop."""
    return False


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a sweep.

    cache: ``cold`` or ``hot``. seed: of the random inputs. time: False checks and does not time.
    time_budget_s: cells that have not started by then are skipped. call_limit_s: a single call that
    takes longer is a ``timeout``. cell_timeout_s: in a worker, a cell that gives no sign of life for so long
    is one too; None leaves it to the time that is expected. energy: also measure joules per call, a second or
    more per cell.
    timing: one of record.TIMINGS. load: ``burst`` or ``sustained``. seed is that of the rounds' order too.
    environment: as from ``environment.collect``, collected if None. tuned: configurations in place of the
    tables'.
    """

    cache: str = "cold"
    seed: int = 0
    time: bool = True
    time_budget_s: float | None = None
    call_limit_s: float = 60.0
    cell_timeout_s: float | None = None
    energy: bool = False
    timing: str = "auto"
    load: str = LOADS[0]
    policy: profilers.Policy | None = None
    environment: Mapping[str, Any] | None = None
    tuned: tuned.Tuned | None = None


def over_budget(options: RunOptions, elapsed_s: float) -> dict[str, Any] | None:
    """What becomes of a cell that would start now, the time budget being spent; None before that is so."""
    budget = options.time_budget_s
    if budget is None or elapsed_s <= budget:
        return None
    return {"status": "skipped", "reason": f"time budget of {duration(budget)} spent"}


def run_cells(
    cells: Sequence[Cell],
    target: Target,
    options: RunOptions,
    on_record: OnRecord,
    on_progress: OnProgress = lambda *_: None,
    stop: Callable[[], bool] = never,
) -> dict[str, float]:
    """Measure the cells in the order given, neighbours of the same work together.

    on_record gets the records of a group, in order, before the next group starts; none starts once ``stop``
    says so. Returns wall_s of it all and of it precompile_s; what each cell took is in its record.
    """
    start = time.perf_counter()
    session = Session(target, options)
    compiling = time.perf_counter()
    precompile(cells, target, options.tuned)
    precompile_s = time.perf_counter() - compiling
    started = itertools.count()

    def begin(cell: Cell) -> None:
        on_progress(next(started), len(cells), cell)

    with unworried():
        for group in groups(cells):
            if stop():
                break
            for record in session.records(group, begin):
                on_record(record)
    return {"wall_s": time.perf_counter() - start, "precompile_s": precompile_s}


def groups(cells: Sequence[Cell]) -> list[list[Cell]]:
    """Neighbours of the same work, a problem and a pass: what is measured together."""
    return [list(group) for _, group in itertools.groupby(cells, lambda cell: (cell.problem, cell.pass_))]


def precompile(cells: Sequence[Cell], target: Target, found: tuned.Tuned | None = None) -> None:
    """Let each implementation compile in parallel what its cells need; on a GPU only. found: of --tuned."""
    if target.type != "cuda":
        return
    for name in dict.fromkeys(cell.implementation for cell in cells):
        implementation = tuned.get(found, name)
        own = [cell for cell in cells if cell.implementation == name]
        try:
            own = [cell for cell in own if not plan.refuses(implementation, cell, target)]
            implementation.precompile(own, target)
        except Exception as error:  # each cell will fail, or compile, by itself
            log.warning("%s did not precompile: %s", name, what(error))


@contextmanager
def unworried() -> Iterator[None]:
    """Inside, torch does not warn of what it repairs by itself."""
    with warnings.catch_warnings():
        # autograd's device thread meets cuBLAS before it has a context; torch sets it and carries on
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA")
        yield


class Session:
    """What the cells of a sweep share in the process that measures them.

    elapsed_s: of the sweep, before this. at: called with a cell before anything is done for it, and again
    before each of its turns while it is timed. times: of cells that another process measured.
    """

    def __init__(
        self, target: Target, options: RunOptions, *, elapsed_s: float = 0.0,
        at: Callable[[Cell], None] = lambda _: None, times: Mapping[Cell, Samples] | None = None,
    ) -> None:  # fmt: skip
        self.target = target
        self.options = options
        self.lost: str | None = None
        self._started = time.monotonic() - elapsed_s
        self._shared: Shared | None = None
        self._times: dict[Cell, Samples] = {**(times or {})}
        facts = environment.collect(target) if options.environment is None else options.environment
        self._facts = environment.row_fields(facts)
        self._usual = leftover.held_bytes(target)
        self._clocks = profilers.open_clocks(target.device) if options.time else None
        self._patience = profilers.Patience()
        self._how = How(
            target=target, timed=options.time, call_limit_s=options.call_limit_s, at=at,
            tuned=lambda cell: options.tuned.source(cell) if options.tuned else {},
        )  # fmt: skip

    def records(
        self, cells: Sequence[Cell], begin: Callable[[Cell], None], alone: str | None = None
    ) -> Iterator[Record]:
        """What became of cells of the same work, in order; raises nothing but KeyboardInterrupt and the like.

        begin: called with each cell as it starts. alone: why a cell is not timed with others of its work.
        """
        alone = alone or self._not_together(cells)
        for group in [cells] if alone is None else [[cell] for cell in cells]:
            yield from self._group(group, begin, alone)

    def _not_together(self, cells: Sequence[Cell]) -> str | None:
        """Why the cells have to be timed one after the other, or None."""
        if len(cells) < 2 or not self.options.time:
            return None
        able = []
        for cell in cells:
            entry = self._entry(cell)
            if not entry.attempt(lambda entry=entry: entry.refuse(self._shared)) and not entry.outcome:  # type: ignore[misc]
                able.append(cell)
        return does_not_fit(able, self.target, self._shared) if able else None

    def _group(
        self, cells: Sequence[Cell], begin: Callable[[Cell], None], alone: str | None
    ) -> Iterator[Record]:
        """Make ready, then time in turns; where that runs out of memory, or somebody wrote to the inputs that
        several share, once more one by one.
        """
        entries = list[Entry]()
        crowded, written = False, list[str]()
        for cell in cells:
            begin(cell)
            others_wait = any(not entry.outcome for entry in entries)
            entries.append(self._ready(cell))
            if crowded := others_wait and entries[-1].ran_out:
                break
        else:
            ready = [entry for entry in entries if not entry.outcome]
            written = self._written(ready) if len(ready) < len(entries) else []
            if not written:
                self._time(ready, alone)
                crowded = len(ready) > 1 and any(entry.ran_out for entry in ready)
                written = self._written(ready) if len(ready) > 1 else []
        if not crowded and not written:
            yield from map(self._record, entries)
            return
        why = f"one of them changed its input {written[0]}" if written else "together they ran out of memory"
        for entry in entries:
            entry.drop()
        self._recover(cells[0])
        for number, cell in enumerate(cells):
            told = begin if number >= len(entries) else lambda _: None
            yield from self._group([cell], told, why)

    def _entry(self, cell: Cell) -> Entry:
        implementation = tuned.get(self.options.tuned, cell.implementation)
        return Entry(cell=cell, implementation=implementation, how=self._how)

    def _ready(self, cell: Cell) -> Entry:
        """The cell's entry, settled or ready to be timed."""
        self._how.at(cell)
        entry = self._entry(cell)
        entry.outcome = self._not_started()
        if not entry.outcome and entry.attempt(lambda: self._prepare(entry)):
            self._recover(cell)
        return entry

    def _prepare(self, entry: Entry) -> dict[str, Any] | None:
        if outcome := entry.refuse(self._shared):
            return outcome
        with entry.spending("inputs_s"):
            shared = self._of(entry.cell.problem)
        return entry.check(shared)

    def _time(self, entries: Sequence[Entry], alone: str | None) -> None:
        """Time what is ready, in turns; settles every entry."""
        if not entries:
            return
        options, device = self.options, self.target.device
        if self.lost is not None:
            for entry in entries:
                entry.outcome = self._not_started()
            return
        setting = profilers.Setting(
            policy=options.policy or profilers.policy_for(device), cache=options.cache, clocks=self._clocks,
            load=options.load, patience=self._patience,
            seed=f"{options.seed} {entries[0].cell.problem.key} {entries[0].cell.pass_}",
        )  # fmt: skip
        try:
            found = profilers.time_together(
                [one.candidate for one in entries], device, options.timing, setting
            )
        except RAISED as error:  # before any of them was timed
            found = [error] * len(entries)
        if any(isinstance(one, profilers.Timing) and "method_refused" in one.how for one in found):
            self._recover(entries[0].cell)  # what was refused may have cost the device
        told = {"schedule": "interleaved" if len(entries) > 1 else "alone"}
        if alone is not None:
            told["alone_because"] = alone
        unfinished, failed = list[Entry](), list[Cell]()
        for entry, timing in zip(entries, found, strict=True):
            if isinstance(timing, profilers.DeviceLost):
                unfinished.append(entry)
            elif entry.attempt(lambda entry=entry, timing=timing: self._settle(entry, timing, told)):  # type: ignore[misc]
                failed.append(entry.cell)
        del found  # its errors keep frames, and those the cells' tensors
        if failed:
            self._recover(failed[0])
        if unfinished and self.lost is None:  # though it answers again
            self.lost = f"{LOST} in {failed[0].key}"
        for entry in unfinished:
            entry.outcome = self._not_started()
        for entry in entries:
            if self.lost is None and entry.attempt(entry.recheck):
                self._recover(entry.cell)
            if entry.outcome and entry.outcome["status"] != "ok":
                self._times.pop(entry.cell, None)

    def _settle(
        self, entry: Entry, timing: profilers.Timing | BaseException, told: Mapping[str, Any]
    ) -> dict[str, Any]:
        """The outcome of one that was timed; raises what its call raised."""
        if isinstance(timing, BaseException):
            raise timing
        cell, how = entry.cell, {**timing.how, **told}
        entry.spent |= how.pop("spent")
        fields = entry.timed(timing)
        if fields["status"] != "ok":
            return fields
        model = entry.implementation.model(cell.problem, self.target)
        if entry.implementation.exact and (
            doubts := gates.doubts(cell, timing.samples, self.target, model, self._times)
        ):
            fields["flags"] = ("suspect", *timing.flags)
            how["doubts"] = doubts
        if self.options.energy:
            with entry.spending("energy_s"), entry.turn():
                fields["energy"] = self._energy(cell, entry.candidate.call)
        entry.unchanged(alone=told["schedule"] == "alone")
        self._times[cell] = timing.samples
        return fields | {"timing": how}

    def _written(self, entries: Sequence[Entry]) -> list[str]:
        """Names of the inputs that the entries share and that somebody has written to."""
        if self.lost is not None:
            return []
        try:
            return [name for entry in entries for name in entry.written()]
        except Exception:  # a kernel's fault that shows only now
            self._recover(entries[0].cell)
            return []

    def _record(self, entry: Entry) -> Record:
        spent, outcome = dict(entry.spent), entry.outcome or {}
        entry.drop()
        try:
            found = self._row(entry, spent, outcome)
            record_shape.check(record_to_json(found))
        except Exception as error:  # an implementation says what no file could give back
            return self._row(entry, spent, {"status": "failed", "reason": what(error)})
        return found

    def _row(self, entry: Entry, spent: Mapping[str, float], outcome: Mapping[str, Any]) -> Record:
        wall_s = sum(seconds for name, seconds in spent.items() if name not in OF_OTHERS)
        return Record(
            cell=entry.cell,
            io_model=entry.implementation.model(entry.cell.problem, self.target),
            exact=entry.implementation.exact,
            environment=self._facts,
            device_type=self.target.type,
            started_at=entry.started_at,
            wall_s=wall_s,
            spent=spent,
            **with_source(outcome, entry.implementation),
        )

    def _not_started(self) -> dict[str, Any] | None:
        """Why no further cell starts; reasons begin as runfile.NOT_STARTED says."""
        if self.lost is not None:
            return {"status": "skipped", "reason": self.lost}
        return over_budget(self.options, time.monotonic() - self._started)

    def _recover(self, cell: Cell) -> None:
        gc.collect()
        if self.target.type != "cuda":
            return
        import torch

        try:
            torch.cuda.synchronize(self.target.device)
            torch.cuda.empty_cache()
        except Exception as error:  # an illegal access poisons the context for good
            self.lost = f"{LOST} in {cell.key}: {what(error)}"
            self._shared = None

    def left_behind(self, before: Problem | None = None) -> int:
        """Bytes that are still allocated here although no cell is at work; 0 where it is no more than usual.

        before: the problem that is next; while it is still the same one, its inputs stay and nothing is said.
        """
        if self._shared is None or self._shared.problem == before:
            return 0
        self._shared = None
        gc.collect()
        held = leftover.held_bytes(self.target)
        usual = self._usual if self._usual is not None else held
        return 0 if held is None or usual is None or held - usual < leftover.WORTH else held - usual

    def _of(self, problem: Problem) -> Shared:
        if self._shared is None or self._shared.problem != problem or self._shared.changed():
            self._shared = None  # before the next one's tensors are made
            self._shared = Shared(problem, self.target.device, self.options.seed)
        return self._shared

    def _energy(self, cell: Cell, call: Callable[[], object]) -> Mapping[str, Any]:
        """Joules of the call, or why there are none: whatever happens here, the cell was timed."""
        try:
            return profilers.measure_energy(call, device=self.target.device, clocks=self._clocks)
        except RAISED as error:
            reason = what(error)
        self._recover(cell)
        return {"reason": reason}


OF_OTHERS = ("samples_s", "flushes_s", "compile_s")
"""Of what a row spent, the parts that ``rounds_s`` and ``prepare_s`` hold."""
