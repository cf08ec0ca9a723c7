"""Cells to records: refuse, fit, prepare, check, measure memory, time. The only place that catches what
an implementation raises; nothing but a KeyboardInterrupt comes out of a sweep."""

from __future__ import annotations

import gc
import logging
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench import devices, environment, iomodel, plan, profilers, tuned, units
from flashbench.kernels import Implementation, Target
from flashbench.problem import Cell, Problem
from flashbench.record import Accuracy, Memory, Record

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs
    from flashbench.kernels._reference import Reference

log = logging.getLogger("flashbench")

INTERPRETED = "Triton's interpreter: correct, not timed"
NOT_TIMED = "checked only; timing was not asked for"

OnRecord = Callable[[Record], None]
OnProgress = Callable[[int, int, Cell], None]
"""(cells done, cells in all, the cell that starts now)."""


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """How to run a sweep.

    cache: ``cold`` or ``hot``. seed: of the random inputs. time: False checks and does not time.
    time_budget_s: cells that have not started by then are skipped. call_limit_s: a single call that
    takes longer is a ``timeout``. energy: also measure joules per call, a second or more per cell.
    environment: as from ``environment.collect``, collected if None. tuned: configurations in place of the
    tables'.
    """

    cache: str = "cold"
    seed: int = 0
    time: bool = True
    time_budget_s: float | None = None
    call_limit_s: float = 60.0
    energy: bool = False
    policy: profilers.Policy | None = None
    environment: Mapping[str, Any] | None = None
    tuned: tuned.Tuned | None = None


def run_cells(
    cells: Sequence[Cell],
    target: Target,
    options: RunOptions,
    on_record: OnRecord,
    on_progress: OnProgress = lambda *_: None,
) -> None:
    """Measure the cells in the order given; on_record gets each one's record before the next starts."""
    run = _Run(target, options)
    run.precompile(cells)
    with unworried():
        for index, cell in enumerate(cells):
            on_progress(index, len(cells), cell)
            on_record(run.record(cell))


@contextmanager
def unworried() -> Iterator[None]:
    """Inside, torch does not warn of what it repairs by itself."""
    with warnings.catch_warnings():
        # autograd's device thread meets cuBLAS before it has a context; torch sets it and carries on
        warnings.filterwarnings("ignore", message="Attempting to run cuBLAS, but there was no current CUDA")
        yield


class _Problem:
    """The inputs of one problem and its reference, shared by the cells that ask for it in a row."""

    def __init__(self, problem: Problem, device: str, seed: int) -> None:
        from flashbench.kernels._inputs import make_inputs
        from flashbench.kernels._reference import Reference

        self.problem = problem
        self.inputs: Inputs = make_inputs(problem, device, seed)
        self.reference: Reference = Reference(problem, self.inputs, seed=seed)


class _Run:
    def __init__(self, target: Target, options: RunOptions) -> None:
        self.target = target
        self.options = options
        self._started = time.monotonic()
        self._problem: _Problem | None = None
        self._lost: str | None = None
        facts = environment.collect(target) if options.environment is None else options.environment
        self._facts = environment.row_fields(facts)
        self._clocks = profilers.open_clocks(target.device) if options.time else None

    def precompile(self, cells: Sequence[Cell]) -> None:
        """Let each implementation compile in parallel what its cells need; on a GPU only."""
        if self.target.type != "cuda":
            return
        for name in dict.fromkeys(cell.implementation for cell in cells):
            implementation = tuned.get(self.options.tuned, name)
            own = [cell for cell in cells if cell.implementation == name]
            try:
                own = [cell for cell in own if not plan.refuses(implementation, cell, self.target)]
                implementation.precompile(own, self.target)
            except Exception as error:  # each cell will fail, or compile, by itself
                log.warning("%s did not precompile: %s", name, what(error))

    def record(self, cell: Cell) -> Record:
        """What became of the cell; raises nothing but KeyboardInterrupt and the like."""
        started_at, start = datetime.now(UTC).isoformat(timespec="milliseconds"), time.monotonic()
        outcome = self._not_started() or self._attempt(cell)
        return Record(
            cell=cell,
            io_model=tuned.get(self.options.tuned, cell.implementation).model(cell.problem, self.target),
            environment=self._facts,
            device_type=self.target.type,
            started_at=started_at,
            wall_s=time.monotonic() - start,
            **outcome,
        )

    def _not_started(self) -> dict[str, Any] | None:
        """Why no further cell starts; reasons begin as runfile.NOT_STARTED says."""
        if self._lost is not None:
            return {"status": "skipped", "reason": self._lost}
        budget = self.options.time_budget_s
        if budget is not None and time.monotonic() - self._started > budget:
            return {"status": "skipped", "reason": f"time budget of {_duration(budget)} spent"}
        return None

    def _attempt(self, cell: Cell) -> dict[str, Any]:
        try:
            return self._measure(cell)
        except Exception as error:
            outcome = _failure(error)
        # out here the exception is gone, and with it the frames that kept the cell's tensors alive
        self._recover(cell)
        return outcome

    def _recover(self, cell: Cell) -> None:
        gc.collect()
        if self.target.type != "cuda":
            return
        import torch

        try:
            torch.cuda.synchronize(self.target.device)
            torch.cuda.empty_cache()
        except Exception as error:  # an illegal access poisons the context for good
            self._lost = f"the device was lost in {cell.key}: {what(error)}"
            self._problem = None

    def _measure(self, cell: Cell) -> dict[str, Any]:
        implementation = tuned.get(self.options.tuned, cell.implementation)
        refusal = plan.refuses(implementation, cell, self.target)
        if refusal:
            return {"status": refusal[0], "reason": refusal[1]}
        if reason := self._does_not_fit(cell):
            return {"status": "skipped", "reason": reason}
        state = self._state(cell.problem)
        from torch import set_grad_enabled

        try:
            state.reference.prepare(gradients=cell.pass_ != "fwd")
        except Exception as error:
            raise _ReferenceFailed(error) from error
        self._make_room(cell)
        with implementation.context(cell.problem), set_grad_enabled(cell.pass_ != "fwd"):
            return _Measurement(self, implementation, cell, state).run()

    def _does_not_fit(self, cell: Cell) -> str | None:
        free = environment.free_bytes(self.target)
        if free is None:
            return None
        needs = plan.needs_bytes(cell, self.target)
        if self._problem is not None:  # its inputs are either the cell's own or freed for it
            free += plan.resident_bytes(self._problem.problem)
        if needs <= free:
            return None
        memory = "device memory" if self.target.type == "cuda" else "memory"
        return f"needs {units.format_bytes(needs)} of {memory}, {units.format_bytes(free)} free"

    def _make_room(self, cell: Cell) -> None:
        """Give cached scratch back to the driver where its fragments could make a large cell fail."""
        total = self.target.total_bytes
        if self.target.type == "cuda" and total and plan.needs_bytes(cell, self.target) > total // 4:
            import torch

            torch.cuda.empty_cache()

    def _state(self, problem: Problem) -> _Problem:
        if self._problem is None or self._problem.problem != problem:
            self._problem = None  # before the next one's tensors are made
            self._problem = _Problem(problem, self.target.device, self.options.seed)
        return self._problem


class _Measurement:
    """One cell that is allowed to run: check, then memory, then time."""

    def __init__(self, run: _Run, implementation: Implementation, cell: Cell, state: _Problem) -> None:
        self.run_ = run
        self.implementation = implementation
        self.cell = cell
        self.state = state

    def run(self) -> dict[str, Any]:
        """The fields of the record that the measurement decides."""
        from flashbench.kernels._backward import timed_call

        target, options, cell = self.run_.target, self.run_.options, self.cell
        inputs = self.state.inputs.detached(grad=cell.pass_ != "fwd")
        call = self.implementation.prepare(cell.problem, inputs)
        fields: dict[str, Any] = {
            "config": self.implementation.describe(cell.problem, cell.pass_, target),
            "backend": self.implementation.backend(call),
            "tuned": options.tuned.source(cell) if options.tuned else {},
        }
        timed, o, gradients = timed_call(cell.pass_, call, inputs)
        try:
            accuracy = self.state.reference.compare(o, gradients, self._lse(inputs))
        except ValueError as error:
            return {**fields, "status": "wrong", "reason": str(error)}
        del o, gradients, call
        fields["accuracy"] = accuracy
        if not accuracy.ok:
            return {**fields, "status": "wrong", "reason": why_wrong(accuracy)}
        if self.implementation.interpreted(target):
            return {**fields, "status": "checked", "reason": INTERPRETED}
        if not options.time:
            return {**fields, "status": "checked", "reason": NOT_TIMED}
        return fields | self._timing(timed)

    def _lse(self, inputs: Inputs) -> Tensor | None:
        """What a check compares beside o, where the implementation gives it."""
        prepare = self.implementation.prepare_lse
        if self.run_.options.time or prepare is None:
            return None
        return prepare(self.cell.problem, inputs, {})()[1]

    def _timing(self, timed: Callable[[], object]) -> dict[str, Any]:
        target, options, cell = self.run_.target, self.run_.options, self.cell
        start = time.perf_counter()
        usage = profilers.measure_memory(timed, target.device)
        if (took := time.perf_counter() - start) > options.call_limit_s:
            limit = units.format_seconds(options.call_limit_s)
            return {
                "status": "timeout",
                "reason": f"one call took {units.format_seconds(took)}; limit {limit}",
            }
        timing = profilers.measure_time(
            timed,
            device=target.device,
            cache=options.cache,
            policy=options.policy,
            clocks=self.run_._clocks,
        )
        flags = timing.flags
        if impossible(cell, target, timing.samples.median_s):
            flags = ("suspect", *flags)
        memory = Memory(
            inputs_bytes=plan.input_bytes(cell.problem, cell.pass_),
            outputs_bytes=usage.outputs_bytes,
            peak_extra_bytes=usage.peak_extra_bytes,
            reserved_bytes=usage.reserved_bytes,
        )
        return {
            "status": "ok",
            "flags": flags,
            "samples": timing.samples,
            "memory": memory,
            "clocks": timing.clocks,
            "energy": self._energy(timed) if options.energy else {},
        }

    def _energy(self, timed: Callable[[], object]) -> Mapping[str, Any]:
        """Joules of the call, or why there are none: whatever happens here, the cell was timed."""
        device, clocks = self.run_.target.device, self.run_._clocks
        try:
            return profilers.measure_energy(timed, device=device, clocks=clocks)
        except Exception as error:
            reason = what(error)
        self.run_._recover(self.cell)
        return {"reason": reason}


class _ReferenceFailed(Exception):
    """The fp64 check itself could not be computed; the cause is chained."""


def impossible(cell: Cell, target: Target, seconds: float) -> bool:
    """True if the nominal FLOPs in that time would pass the device's dense peak, or the time is 0."""
    if seconds <= 0:
        return True
    device = devices.match(target.name) if target.type == "cuda" else None
    peak = device.peak_flops_per_s.get(cell.problem.dtype) if device else None
    return peak is not None and iomodel.flops(cell.problem, cell.pass_) / peak > seconds


def _failure(error: Exception) -> dict[str, Any]:
    where = ""
    cause: BaseException = error
    if isinstance(error, _ReferenceFailed) and error.__cause__ is not None:
        where, cause = "the fp64 reference: ", error.__cause__
    status = "oom" if _is_out_of_memory(cause) else "failed"
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return {"status": status, "reason": f"{where}{what(cause)}{place if status == 'failed' else ''}"}


def _is_out_of_memory(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}  # torch's class without importing torch
    if names & {"OutOfMemoryError", "MemoryError"}:
        return True
    said = str(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in said or "can't allocate memory" in said or "not enough memory" in said
    )


def what(error: BaseException) -> str:
    """Type and first line of the message, at most 300 characters."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def why_wrong(accuracy: Accuracy) -> str:
    """Each tensor that is off, by how much, and what it may be."""
    parts = [
        f"{name} is off by {error:.3g}, allowed {accuracy.budget[name]:.3g}"
        for name, error in accuracy.max_abs_error.items()
        if not error <= accuracy.budget[name]
    ]
    return "; ".join(parts)


def _duration(seconds: float) -> str:
    """A time as it is typed: 300 -> "5m"."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    parts = [f"{hours}h" * bool(hours), f"{minutes}m" * bool(minutes), f"{left}s" * bool(left)]
    return "".join(parts) or f"{seconds:g}s"
