"""One cell on its way: refused or skipped, else prepared, checked and its memory measured, ready to be timed.

An entry that is ready keeps its call, and with it the memory that the call holds, until it is dropped.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from flashbench import environment, plan, profilers, units
from flashbench._runner import again
from flashbench._runner.outcomes import ReferenceFailed, failure, why_wrong
from flashbench.errors import RAISED, message
from flashbench.kernels import RENEW, SPENT, WATCH, WRITES, Implementation, Misbehaviour, Target, _interpreter
from flashbench.problem import Cell, Problem
from flashbench.profilers import Candidate, Timing
from flashbench.record import Accuracy, Memory

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels import Call
    from flashbench.kernels._inputs import Inputs
    from flashbench.kernels._reference import Reference

INTERPRETED = "Triton's interpreter: correct, not timed"
NOT_TIMED = "checked only; timing was not asked for"


class Shared:
    """The inputs of one problem and its reference, shared by the cells that ask for it in a row."""

    def __init__(self, problem: Problem, device: str, seed: int) -> None:
        from flashbench.kernels._inputs import make_inputs
        from flashbench.kernels._reference import Reference

        self.problem = problem
        self.inputs: Inputs = make_inputs(problem, device, seed)
        self.reference: Reference = Reference(problem, self.inputs, seed=seed)
        self.others = again.Others(problem, self.inputs, seed)
        self._sums = _sums(self.inputs)

    def changed(self) -> list[str]:
        """Names of the inputs that somebody has written to."""
        now = _sums(self.inputs)
        return [name for name, before in self._sums.items() if now[name] != before]


def _sums(inputs: Inputs) -> dict[str, int]:
    """A checksum of each tensor's bits, by name."""
    import torch

    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    found = {}
    for field_ in fields(inputs):
        x = getattr(inputs, field_.name)
        if isinstance(x, torch.Tensor):
            found[field_.name] = x.detach().view(integers[x.element_size()]).sum(dtype=torch.int64)
    return {name: int(total) for name, total in found.items()}


def _nothing() -> None:
    return


@dataclass(frozen=True, kw_only=True)
class How:
    """What an entry needs to know of its run.

    timed: False checks only. call_limit_s: of a single call. at: told of the cell before it does anything.
    """

    target: Target
    timed: bool
    call_limit_s: float
    tuned: Callable[[Cell], Mapping[str, Any]]
    at: Callable[[Cell], None]


@dataclass(kw_only=True)
class Entry:
    """A cell and what became of it so far. outcome: fields of its record once it is settled, else None."""

    cell: Cell
    implementation: Implementation
    how: How
    started_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="milliseconds"))
    outcome: dict[str, Any] | None = None
    spent: dict[str, float] = field(default_factory=dict)
    _fields: dict[str, Any] = field(default_factory=dict)
    _call: Callable[[], object] | None = None
    _again: Callable[[], Callable[[], object]] | None = None
    _first: Callable[[], tuple[Tensor, Sequence[Tensor] | None]] | None = None
    _renew: Callable[[], None] = _nothing
    _shared: Shared | None = None
    _watches: list[Callable[[], list[str]]] = field(default_factory=list)

    @contextmanager
    def spending(self, name: str) -> Iterator[None]:
        """Counts the seconds of the block under that name."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] = self.spent.get(name, 0.0) + time.perf_counter() - start

    def attempt(self, step: Callable[[], dict[str, Any] | None]) -> bool:
        """Do a step, which settles the entry if it gives an outcome or raises; True if it raised."""
        try:
            self.outcome = step()
        except RAISED as error:
            self.outcome = failure(error)
        else:
            return False
        # out here the exception is gone, and with it the frames that kept the cell's tensors alive
        self.drop()
        return True

    @property
    def ran_out(self) -> bool:
        """Whether it ended for want of memory."""
        return self.outcome is not None and self.outcome["status"] == "oom"

    def refuse(self, shared: Shared | None) -> dict[str, Any] | None:
        """Why the cell does not start here, if it does not."""
        refusal = plan.refuses(self.implementation, self.cell, self.how.target)
        if refusal:
            return {"status": refusal[0], "reason": refusal[1]}
        if reason := does_not_fit([self.cell], self.how.target, shared):
            return {"status": "skipped", "reason": reason}
        return None

    @contextmanager
    def switches(self) -> Iterator[None]:
        """The torch switches that the call is made and run under."""
        from torch import set_grad_enabled

        from flashbench.kernels._backward import kept_graphs

        backward = self.cell.pass_ != "fwd"
        with (
            self.implementation.context(self.cell.problem),
            set_grad_enabled(backward),
            kept_graphs() if backward else nullcontext(),
        ):
            yield

    @contextmanager
    def turn(self) -> Iterator[None]:
        """The same, once it is told whose turn it is; nothing of it is timed."""
        self.how.at(self.cell)
        with self.switches():
            yield

    def check(self, shared: Shared) -> dict[str, Any] | None:
        """Prepare, compare with fp64 and measure memory; None leaves the entry ready to be timed."""
        with self.spending("reference_s"):
            try:
                shared.reference.prepare(gradients=self.cell.pass_ != "fwd", lse=self._gives_lse)
            except Exception as error:
                raise ReferenceFailed(error) from error
        self._make_room()
        self._shared = shared
        with self.switches():
            outcome = self._checked(shared) or self._measure_memory()
        if outcome is None:
            self.unchanged()  # by the calls whose memory was measured
        return outcome

    def unchanged(self, *, alone: bool = True) -> None:
        """Raises Misbehaviour where its calls wrote to their inputs; not alone: to its own copies of them."""
        if names := [name for watch in self._watches for name in watch()] or (
            self.written() if alone else []
        ):
            raise Misbehaviour(WRITES.format(names[0]))

    def written(self) -> list[str]:
        """Names of the inputs that it shares with others and that somebody has written to."""
        return self._shared.changed() if self._shared else []

    def _make_room(self) -> None:
        """Give cached scratch back to the driver where its fragments could make a large cell fail."""
        target = self.how.target
        total = target.total_bytes
        if target.type == "cuda" and total and plan.needs_bytes(self.cell, target) > total // 4:
            import torch

            torch.cuda.empty_cache()

    def _checked(self, shared: Shared) -> dict[str, Any] | None:
        from flashbench.kernels._backward import timed_call

        cell, implementation, target = self.cell, self.implementation, self.how.target
        inputs = shared.inputs.detached(grad=cell.pass_ != "fwd")
        with self.spending("prepare_s"), _interpreter.noticing() as interpreted:
            call = self._prepared(inputs)
            self._renew = getattr(call, RENEW, self._renew)
            self.spent |= getattr(call, SPENT, {})
            self._fields = {
                "config": implementation.describe(cell.problem, cell.pass_, target),
                "backend": implementation.backend(call),
                "tuned": self.how.tuned(cell),
                "stated": implementation.stated(cell.problem, cell.pass_),
            }
            timed, o, gradients = timed_call(cell.pass_, call, inputs)
        with self.spending("check_s"):
            try:
                accuracy = self._accuracy(shared, o, gradients)
            except ValueError as error:
                return {**self._fields, "status": "wrong", "reason": message(error)}
            self.unchanged()
        self._fields["accuracy"] = accuracy
        if not accuracy.ok:
            hint = implementation.origin.hint() if implementation.origin else ""
            return {**self._fields, "status": "wrong", "reason": why_wrong(accuracy, hint)}
        if _interpreter.computed(implementation, target, ran=interpreted()):
            return {**self._fields, "status": "checked", "reason": INTERPRETED}
        if not self.how.timed:
            return {**self._fields, "status": "checked", "reason": NOT_TIMED}

        def anew() -> Callable[[], object]:
            # leaves of its own: autograd binds a leaf to the stream of its first use, outside of the capture
            fresh = inputs.detached(grad=cell.pass_ != "fwd")
            return timed_call(cell.pass_, self._prepared(fresh), fresh)[0]

        self._call, self._again = timed, anew
        self._first = lambda: timed_call(cell.pass_, call, inputs)[1:]
        return None

    def _prepared(self, inputs: Inputs) -> Call:
        call = self.implementation.prepare(self.cell.problem, inputs)
        if watch := getattr(call, WATCH, None):
            self._watches.append(watch)
        return call

    def _accuracy(self, shared: Shared, o: Tensor, gradients: Sequence[Tensor] | None) -> Accuracy:
        """Against exact attention; of what is none against its own form, and how far it is from attention."""
        own = self.implementation.own_check
        if own is None:
            within = self.implementation.exponentials_within(self.cell.problem, self.how.target)
            return shared.reference.compare(
                o, gradients, self._lse(shared.inputs), exponentials_within=within
            )
        found = own(self.cell.problem, shared.inputs, o, gradients)
        self._fields["apart"] = shared.reference.apart(o)
        return found

    @property
    def _gives_lse(self) -> bool:
        return not self.how.timed and self.implementation.prepare_lse is not None

    def _lse(self, inputs: Inputs) -> Tensor | None:
        """What a check compares beside o, where the implementation gives it."""
        prepare = self.implementation.prepare_lse
        if prepare is None or not self._gives_lse:
            return None
        return prepare(self.cell.problem, inputs, {})()[1]

    def _measure_memory(self) -> dict[str, Any] | None:
        assert self._call is not None
        start = time.perf_counter()
        with self.spending("memory_s"):
            usage = profilers.measure_memory(self._call, self.how.target.device)
        if (took := time.perf_counter() - start) > self.how.call_limit_s:
            limit = units.format_seconds(self.how.call_limit_s)
            reason = f"one call took {units.format_seconds(took)}; limit {limit}"
            return {**self._fields, "status": "timeout", "reason": reason}
        self._fields["memory"] = Memory(
            inputs_bytes=plan.input_bytes(self.cell.problem, self.cell.pass_),
            outputs_bytes=usage.outputs_bytes,
            peak_extra_bytes=usage.peak_extra_bytes,
            reserved_bytes=usage.reserved_bytes,
        )
        return None

    @property
    def candidate(self) -> Candidate:
        """The call as it is timed, of an entry that is ready."""
        assert self._call is not None
        return Candidate(name=self.cell.implementation, call=self._call, again=self._again, context=self.turn)

    def timed(self, timing: Timing) -> dict[str, Any]:
        """The fields of a cell that was timed; ``wrong`` where the graph that was timed gives other gradients
        than at first.
        """
        if self.implementation.origin is not None and self.cell.pass_ == "bwd":
            assert self._shared is not None
            self.unchanged(alone=False)
            if self.written():  # by whom shows when each is timed alone
                return {**self._fields, "status": "wrong", "reason": WRITES.format(self.written()[0])}
            with self.spending("check_s"), self.turn():
                found = self._shared.reference.compare(None, self._call())  # type: ignore[misc,arg-type]
            if wrong := self._wrong_again(found, again.LATE):
                return wrong
        return {
            **self._fields, "status": "ok", "flags": timing.flags, "samples": timing.samples,
            "clocks": timing.clocks, "timing": timing.how,
        }  # fmt: skip

    def recheck(self) -> dict[str, Any] | None:
        """The outcome; of somebody else's call that was timed ``wrong`` where it does not compute other
        values in the same tensors, which have them meanwhile: nobody else may be timed or checked then.
        """
        first, shared = self._first, self._shared
        timed = self.outcome is not None and self.outcome["status"] == "ok"
        if not timed or self.implementation.origin is None or first is None or shared is None:
            return self.outcome
        self._call = self._again = None  # and the graph that they hold
        with self.spending("check_s"), self.turn():
            with shared.others.values(self._renew):
                found = shared.others.compare(*first())
            stale = self._wrong_again(found, again.STALE)
            if stale is None:
                return self.outcome
            return self._wrong_again(shared.reference.compare(*first()), again.LATE) or stale

    def _wrong_again(self, found: Accuracy, said: str) -> dict[str, Any] | None:
        """The outcome where what a later call gave is not right, else None."""
        found = again.allowed(found, self._fields["accuracy"])
        if found.ok:
            return None
        return {
            **self._fields, "status": "wrong", "accuracy": found, "reason": said.format(why_wrong(found)),
        }  # fmt: skip

    def drop(self) -> None:
        """Let go of the call and what it holds; a settled entry needs neither."""
        self._call = self._again = self._first = self._shared = None
        self._renew = _nothing
        self._watches = []
        self._fields = {}


def does_not_fit(cells: list[Cell], target: Target, shared: Shared | None) -> str | None:
    """Why the cells of one problem cannot all be ready at once, or None if they can or nobody knows."""
    free = environment.free_bytes(target)
    if free is None:
        return None
    needs = plan.together_bytes(cells, target)
    if shared is not None:  # its inputs are either the cells' own or freed for them
        free += plan.resident_bytes(shared.problem)
    if needs <= free:
        return None
    memory = "device memory" if target.type == "cuda" else "memory"
    return f"needs {units.format_bytes(needs)} of {memory}, {units.format_bytes(free)} free"
