"""``flashbench tune``: search configurations of the bundled kernels, check them, write what is fastest.

    cases = cases_of(cells)                       # what is to be tuned
    tune(cases, target, document, Options(), on_change=save)

What is tried comes from the implementations (``Implementation.candidates``), declared beside their tables.
Nothing is timed that was not right first, against fp64, within the bound of every check of the tool.
"""

from __future__ import annotations

import gc
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from flashbench import environment, kernels, tuned
from flashbench.decoding import Step
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.runner import unworried, what
from flashbench.tuning.cases import Case, CellCase, StepCase
from flashbench.tuning.compiling import Trial, Tried, compile_trials, trials
from flashbench.tuning.search import DeviceLost, Search, entry

__all__ = ["Case", "CellCase", "Options", "StepCase", "Trial", "Tried", "candidates", "cases_of", "document",
           "steps_of", "tunable", "tune"]  # fmt: skip

COMPILING = 0.5
"""Of the budget, at most."""

PER_KERNEL = 16
"""Candidates of a kernel, unless told otherwise."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """seed: of the inputs. budget_s: for everything, compilation too. per_kernel: candidates of each."""

    seed: int = 0
    budget_s: float | None = None
    per_kernel: int = PER_KERNEL


def tunable() -> list[str]:
    """The implementations that have candidates."""
    return [name for name, row in kernels.registry().items() if row.candidates is not _NONE]


_NONE = kernels.Implementation.__dataclass_fields__["candidates"].default


def cases_of(cells: Iterable[Cell]) -> list[Case]:
    """A case for each forward and each backward of the cells; of ``fwd+bwd`` one for either."""
    parts = (replace(cell, pass_=one) for cell in cells for one in tuned.OF_A_PASS[cell.pass_])
    return [CellCase(cell) for cell in dict.fromkeys(parts)]


def steps_of(steps: Iterable[Step]) -> list[Case]:
    """A case for each step of a decode."""
    return [StepCase(step) for step in steps]


def document(target: Target, argv: Sequence[str]) -> dict[str, Any]:
    """An empty file for the target, as ``tuned.read`` reads it."""
    return {
        "type": "tuned",
        "schema": tuned.SCHEMA,
        "created_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "key": tuned.key_of(target),
        "argv": list(argv),
        "environment": environment.collect(target),
        "cases": [],
    }


def candidates(
    cases: Sequence[Case],
    target: Target,
    options: Options,
    deadline: float = math.inf,
    on_progress: Callable[[int, int, str], None] = lambda *_: None,
) -> list[Tried]:
    """The cases' trials, compiled and judged; a case that cannot be tuned there has none."""
    every = [
        Tried(case) if case.why_not(target) else trials(case, target, options.per_kernel) for case in cases
    ]
    compile_trials(
        every, target, deadline, lambda done, total: on_progress(done, total, "compiling candidates")
    )
    return every


def tune(
    cases: Sequence[Case],
    target: Target,
    found: dict[str, Any],
    options: Options,
    on_change: Callable[[], None],
    on_progress: Callable[[int, int, str], None] = lambda *_: None,
) -> None:
    """Search every case in turn and add it to ``found``, a ``document``; on_change follows each measurement.

    Raises nothing for what a candidate or a case does; the reason stands in its entry.
    """
    start = time.monotonic()
    budget = math.inf if options.budget_s is None else options.budget_s
    every = candidates(cases, target, options, start + COMPILING * budget, on_progress)
    for index, tried in enumerate(every):
        on_progress(index, len(every), tried.case.name)
        found["cases"].append(case := entry(tried))
        now = time.monotonic()
        share = now + (start + budget - now) / (len(every) - index)
        try:
            case["reason"] = tried.case.why_not(target) or _spent(now - start, budget)
            if case["reason"] is None:
                with unworried(), tried.case.opened(target, options.seed) as attempt:
                    Search(tried, target, case, on_change).run(attempt, share)
        except DeviceLost as error:
            case["reason"] = str(error)
            break
        except Exception as error:  # out of memory, or the reference itself
            case["reason"] = what(error)
        finally:
            _tidy(target)
            on_change()


def _spent(seconds: float, budget: float) -> str | None:
    return None if seconds < budget else f"not tried: the budget of {budget:g} s was spent"


def _tidy(target: Target) -> None:
    gc.collect()
    if target.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def outcome(found: Mapping[str, Any]) -> list[dict[str, Any]]:
    """A row per case: the winner and the table's own, their times, how many candidates became what."""
    return [_row(case) for case in found["cases"]]


def _row(case: Mapping[str, Any]) -> dict[str, Any]:
    winner, table = case["winner"] or {}, case["table"] or {}
    counts = [trial["status"] for trial in case["trials"]]
    return {
        "case": case["case"], "gain": winner.get("gain"), "time_s": winner.get("time_s"),
        "table_s": table.get("time_s"), "config": winner.get("config"), "table": table.get("config"),
        **{name: counts.count(name) for name in ("timed", "wrong", "dropped", "waiting")},
        "reason": case["reason"],
    }  # fmt: skip
