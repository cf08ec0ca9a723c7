"""Which configurations are worth running, as the compiler tells: what does not fit or spills is dropped."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from flashbench._profilers import sass
from flashbench.kernels import Candidate, Target, _compile
from flashbench.tuning.cases import Case

WAITING, DROPPED, WRONG, TIMED = "waiting", "dropped", "wrong", "timed"


@dataclass
class Trial:
    """A candidate and what became of it.

    status: ``waiting`` (not tried: the reason says why), ``dropped`` (unfit, as compiled), ``wrong`` (a wrong
    result, or none) or ``timed``. own: whether it is the table's. registers per thread, spills: instructions
    that touch local memory; both None where no disassembler reads the code. time_s: median, of the whole
    pass with the table's configuration in its other kernels.
    """

    candidate: Candidate
    own: bool
    status: str = WAITING
    reason: str | None = None
    registers: int | None = None
    spills: int | None = None
    shared_bytes: int | None = None
    time_s: float | None = None

    def drop(self, reason: str) -> None:
        """Leave it out, saying why."""
        self.status, self.reason = DROPPED, reason

    def to_json(self) -> dict[str, Any]:
        """What the file says of it."""
        names = ("own", "status", "reason", "registers", "spills", "shared_bytes", "time_s")
        return {
            "kernel": self.candidate.kernel,
            "config": dict(self.candidate.tiles),
            **{name: getattr(self, name) for name in names},
        }


@dataclass
class Tried:
    """A case and the trials of its kernels, each kernel's own first, the nearest to it next."""

    case: Case
    of: dict[str, list[Trial]] = field(default_factory=dict)

    @property
    def ranked(self) -> list[Trial]:
        """All trials, the first of each kernel, then the second of each, …"""
        return [trial for rank in zip_longest(*self.of.values()) for trial in rank if trial is not None]


def trials(case: Case, target: Target, per_kernel: int) -> Tried:
    """The case's candidates, at most so many of each kernel that the card has the shared memory for."""
    tried, limit = Tried(case), target.smem_per_block_bytes
    for candidate in case.candidates(target):
        of_kernel = tried.of.setdefault(candidate.kernel, [])
        trial = Trial(candidate, own=not of_kernel)
        if limit is not None and candidate.shared_bytes > limit:
            trial.drop(f"needs {candidate.shared_bytes} B of shared memory per block, limit {limit} B")
        elif sum(one.status == WAITING for one in of_kernel) >= per_kernel:
            continue
        of_kernel.append(trial)
    return tried


def compile_trials(
    every: Sequence[Tried],
    target: Target,
    deadline: float = math.inf,
    on_progress: Callable[[int, int], None] = lambda *_: None,
) -> None:
    """Compile what waits, in parallel, each kernel once, the nearest to the tables first, until the deadline.

    deadline: of time.monotonic. What did not get its turn keeps waiting, with the reason.
    """
    groups: dict[tuple[Any, ...], list[tuple[Trial, list[Trial]]]] = {}
    tasks: dict[tuple[Any, ...], _compile.Task] = {}
    for rank in zip_longest(*(tried.ranked for tried in every)):
        for tried, trial in zip(every, rank, strict=True):
            if trial is not None and trial.status == WAITING:
                task = tried.case.task(trial.candidate, target)
                tasks.setdefault(key := _code(task), task)
                groups.setdefault(key, []).append((trial, tried.of[trial.candidate.kernel]))
    running = _compile.compile_each(tasks.values(), inspect=True)
    left = list(tasks)
    try:
        while left and time.monotonic() < deadline:
            on_progress(len(tasks) - len(left), len(tasks))
            done = next(running)
            for trial, of_kernel in groups[left.pop(0)]:
                _judge(trial, of_kernel[0], done, target)
    finally:
        running.close()
    for key in left:
        for trial, _ in groups[key]:
            if not trial.own:
                trial.reason = "not compiled: the time was spent"


def _code(task: _compile.Task) -> tuple[Any, ...]:
    """Equal for tasks of one compiled kernel; a guess, as what is missed is compiled at its first launch."""
    p = task.problem
    lengths = min(p.seqlen_q, 128), p.seqlen_q % 16 == 0, p.seqlen_k % 16 == 0
    cache = task.page_size, task.fp8_cache
    return (task.implementation, task.kernel, task.config, p.dtype, p.head_dim, p.head_dim_v, p.causal,
            p.group, *lengths, *cache)  # fmt: skip


def _judge(trial: Trial, own: Trial, done: _compile.Compiled, target: Target) -> None:
    """What the compiled code says of a trial; the table's own runs whatever it says."""
    if done.error:
        trial.reason = f"does not compile: {' '.join(done.error.split())[:200]}"
    else:
        trial.shared_bytes = done.shared_bytes
        if not done.unread:
            trial.registers = sass.usage(done.usage, done.sass).registers
            trial.spills = sass.count(done.sass).spills
        limit = target.smem_per_block_bytes
        if limit is not None and done.shared_bytes > limit:
            trial.reason = f"takes {done.shared_bytes} B of shared memory per block, limit {limit} B"
        elif (trial.spills or 0) > (own.spills or 0):
            trial.reason = f"spills registers: {trial.spills} instructions, the table's own {own.spills or 0}"
    if trial.reason is not None and not trial.own:
        trial.drop(trial.reason)
