"""``flashbench check --pairs``: the cells of a covering array of features, and what it covers."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from flashbench._cli import options
from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench.covering import Array
    from flashbench.kernels import Implementation, Target
    from flashbench.problem import Cell, Problem

TAKES = ("impls", "dtypes", "impl", "device", "seed", "out", "time_budget", "tuned")
"""Options of ``check`` that mean something here."""


def refuse_others(line: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that has no meaning beside --pairs."""
    for name in line:
        if name not in TAKES:
            accepted = ", ".join(options.on_line(one) for one in TAKES)
            raise UsageError(f"{options.on_line(name)}: has no meaning with --pairs; accepted: {accepted}")


def cells(impls: Iterable[str], dtypes: Iterable[str] | None, target: Target) -> tuple[Cell, ...]:
    """Those of every implementation's array on the target; each is told on stderr.

    The pass is the backward, whose check takes in o and lse, or the forward of what has no other.
    """
    from flashbench import console, kernels
    from flashbench.problem import Cell

    found = []
    for name in impls:
        implementation = kernels.get(name)
        pass_ = "bwd" if _array(implementation, "bwd", dtypes, target).problems else "fwd"
        array = _array(implementation, pass_, dtypes, target)
        console.note(f"{name}: {array.words}")
        found += [Cell(implementation=name, problem=problem, pass_=pass_) for problem in array.problems]
    if not found:
        raise UsageError("--pairs: no implementation takes any of these dtypes; accepted: another --dtypes")
    return tuple(found)


def _array(
    implementation: Implementation, pass_: str, dtypes: Iterable[str] | None, target: Target
) -> Array[Problem]:
    from flashbench import covering
    from flashbench.problem import DTYPES

    def takes(problem: Problem) -> bool:
        return implementation.why_unsupported(problem, pass_, target) is None

    return covering.array(takes, covering.SCALES[target.type], tuple(dtypes or DTYPES))
