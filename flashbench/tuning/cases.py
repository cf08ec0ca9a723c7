"""What can be tuned: a pass of an implementation on a problem, or a decode step over a cache.

Both are a ``Case``, and the search knows no more of them than that. An implementation is tuned by what it
says of itself: ``candidates``, ``prepare_tiles``, ``on_card`` and its row of ``_compile.BUNDLED``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Protocol

from flashbench import kernels, plan, tuned
from flashbench.decoding import Step, graphed, too_large
from flashbench.kernels import Candidate, Target
from flashbench.kernels._compile import Task
from flashbench.problem import Cell, Problem
from flashbench.runner import what, why_wrong

Config = Mapping[str, Any]
"""A configuration in the words of ``describe``."""

RAGGED = 233, 381
"""seqlen_q and seqlen_k of the small problem that each candidate must get right too: no tile's multiple."""


class WrongResult(Exception):
    """A candidate computed something else than the fp64 reference, beyond its bound; or did not run."""


Attempt = Callable[[Config], Callable[[], object]]
"""Runs a configuration, checks it, and returns the call to time. Raises WrongResult."""


class Case(Protocol):
    """One thing to tune."""

    @property
    def cell(self) -> Cell:
        """The implementation, the problem and the pass."""

    @property
    def name(self) -> str:
        """Stable text that tells it from others."""

    @property
    def shape(self) -> dict[str, Any]:
        """As ``tuned.shape_of``."""

    def why_not(self, target: Target) -> str | None:
        """Why it cannot be tuned there, one sentence, or None."""

    def candidates(self, target: Target) -> Sequence[Candidate]:
        """As ``Implementation.candidates``."""

    def task(self, candidate: Candidate, target: Target) -> Task:
        """The candidate to compile."""

    def opened(self, target: Target, seed: int) -> AbstractContextManager[Attempt]:
        """Its inputs and its reference, on the target, as long as the context lasts."""


@dataclass(frozen=True)
class CellCase:
    """A pass, fwd or bwd, of an implementation on a problem of the grid."""

    cell: Cell

    @property
    def name(self) -> str:
        """The cell's key."""
        return self.cell.key

    @property
    def shape(self) -> dict[str, Any]:
        """As ``tuned.shape_of``."""
        return tuned.shape_of(self.cell.implementation, self.cell.pass_, self.cell.problem)

    def why_not(self, target: Target) -> str | None:
        """Why it cannot be tuned there, one sentence, or None."""
        implementation, cell = kernels.get(self.cell.implementation), self.cell
        if reason := implementation.why_unsupported(cell.problem, cell.pass_, target):
            return reason
        return None if self.candidates(target) else "it has no configurations to choose from"

    def candidates(self, target: Target) -> Sequence[Candidate]:
        """As ``Implementation.candidates``."""
        implementation = kernels.get(self.cell.implementation)
        return implementation.candidates(self.cell.problem, self.cell.pass_, target)

    def task(self, candidate: Candidate, target: Target) -> Task:
        """The candidate to compile."""
        assert target.capability is not None
        return Task(
            candidate.compiled, self.cell.problem, target.capability, target.smem_per_block_bytes,
            candidate.config, self.cell.implementation,
        )  # fmt: skip

    @contextmanager
    def opened(self, target: Target, seed: int) -> Iterator[Attempt]:
        """Two problems are checked, the case's own and a small ragged one; the first one's call is timed."""
        from torch import set_grad_enabled

        from flashbench.environment import free_bytes

        free, needs = free_bytes(target), plan.needs_bytes(self.cell, target)
        if free is not None and needs > free:
            raise MemoryError(f"needs {needs / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free")
        implementation = kernels.get(self.cell.implementation)
        with ExitStack() as stack:
            stack.enter_context(set_grad_enabled(self.cell.pass_ != "fwd"))
            stack.enter_context(implementation.context(self.cell.problem))
            own, ragged = (_Checked(p, self.cell, target, seed) for p in self._problems())

            def attempt(config: Config) -> Callable[[], object]:
                ragged(config)
                return own(config)

            yield attempt

    def _problems(self) -> tuple[Problem, Problem]:
        p = self.cell.problem
        heads = min(2, p.num_kv_heads)
        rows, keys = RAGGED
        return p, replace(
            p, batch=1, num_heads=heads * p.group, num_kv_heads=heads, seqlen_q=rows, seqlen_k=keys
        )


class _Checked:
    """One problem's inputs and reference, for any configuration."""

    def __init__(self, problem: Problem, cell: Cell, target: Target, seed: int) -> None:
        from flashbench.kernels._inputs import make_inputs
        from flashbench.kernels._reference import Reference

        self.cell = replace(cell, problem=problem)
        self.inputs = make_inputs(problem, target.device, seed)
        self.reference = Reference(problem, self.inputs, seed=seed)
        self.reference.prepare(gradients=cell.pass_ != "fwd", lse=False)

    def __call__(self, config: Config) -> Callable[[], object]:
        from flashbench.kernels._backward import timed_call

        cell, prepare = self.cell, kernels.get(self.cell.implementation).prepare_tiles
        assert prepare is not None
        try:
            inputs = self.inputs.detached(grad=cell.pass_ != "fwd")
            timed, o, gradients = timed_call(cell.pass_, prepare(cell.problem, inputs, config), inputs)
            accuracy = self.reference.compare(o, gradients)
        except Exception as error:  # a compiler or a driver raises what it likes
            reason = what(error)
        else:
            if accuracy.ok:
                return timed
            reason = f"{cell.problem.key}: {why_wrong(accuracy)}"
        raise WrongResult(reason)


@dataclass(frozen=True)
class StepCase:
    """A step of ``flashbench decode``: one layer's attention over a cache, contiguous or in pages."""

    step: Step

    @property
    def cell(self) -> Cell:
        """flash-decode's forward of the step."""
        return Cell(implementation="flash-decode", problem=self.step.problem, pass_="fwd")

    @property
    def name(self) -> str:
        """The cell's key, and the cache."""
        pages = f" pages of {self.step.page_size}" if self.step.page_size else ""
        return f"{self.cell.key} {self.step.dtype} cache{pages}"

    @property
    def shape(self) -> dict[str, Any]:
        """As ``decoding.shape_of``."""
        return tuned.shape_of_step(self.step)

    def why_not(self, target: Target) -> str | None:
        """Why it cannot be tuned there, one sentence, or None."""
        return kernels.get("flash-decode").why_unsupported(self.step.problem, "fwd", target)

    def candidates(self, target: Target) -> Sequence[Candidate]:
        """As ``Implementation.candidates``, of the step's cache."""
        from flashbench.kernels.flash_decode import tried

        return tried(self.step.shape, target)

    def task(self, candidate: Candidate, target: Target) -> Task:
        """The candidate to compile."""
        assert target.capability is not None
        return Task(
            candidate.compiled, self.step.problem, target.capability, target.smem_per_block_bytes,
            candidate.config, "flash-decode", self.step.page_size, self.step.dtype == "fp8",
        )  # fmt: skip

    @contextmanager
    def opened(self, target: Target, seed: int) -> Iterator[Attempt]:
        """On a GPU the call that is timed is a CUDA graph, as ``flashbench decode`` times it."""
        import torch

        from flashbench.kernels import _decode_reference as reference
        from flashbench.kernels import _triton

        if reason := too_large(self.step, target):
            raise MemoryError(reason)
        decode = _triton.load(target.type, "_flash_decode")
        step, p = self.step, self.step.problem
        q, cache = reference.make(p, step.page_size, step.dtype == "fp8", target.device, seed)
        with torch.no_grad():
            wanted, bound = reference.expected(p, (q, cache))

        def attempt(config: Config) -> Callable[[], object]:
            how = decode.Call(
                causal=True, scale=p.softmax_scale, num_splits=step.splits, config=tuned.decode_config(config)
            )

            def call() -> object:
                return decode.run(q, cache, how)

            try:
                with torch.no_grad():
                    error = reference.error(decode.run(q, cache, how), wanted)
                    timed = graphed(call, target.device) if target.type == "cuda" else call
            except Exception as problem:  # as above
                raise WrongResult(what(problem)) from None
            if not error <= bound:
                raise WrongResult(f"o is off by {error:.3g}, allowed {bound:.3g}")
            return timed

        yield attempt
