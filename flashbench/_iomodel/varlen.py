"""Packed batches: sequences of different lengths, each with its own tiles, in one launch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from flashbench._iomodel.tensors import INT32
from flashbench._iomodel.types import Step, Tiles, Work, merge
from flashbench._iomodel.variant import Variant
from flashbench.problem import Problem

LENGTH_BYTES = 4 * INT32
"""Cumulative lengths that a thread block reads: begin and end of its queries and of its keys."""


def work(
    pass_: Callable[[Problem, Mapping[str, Tiles], Variant], Work],
    problem: Problem,
    tiles: Mapping[str, Tiles],
    variant: Variant,
) -> Work:
    """The sum over the sequences, and the lengths that every thread block reads.

    Thread blocks beyond the end of their sequence read their lengths and stop.
    """
    total = summed(pass_, problem, tiles, variant)
    return total._replace(steps=tuple(_with_lengths(step) for step in total.steps))


def summed(
    pass_: Callable[[Problem, Mapping[str, Tiles], Variant], Work],
    problem: Problem,
    tiles: Mapping[str, Tiles],
    variant: Variant,
) -> Work:
    """The sum over the sequences; the grid is as large as if all were as long as the longest."""
    parts = [pass_(part, tiles, variant) for part in problem.parts()]
    grid = pass_(replace(problem, lengths=()), tiles, variant)
    steps = [
        _together([part.steps[index] for part in parts], launched.ctas)
        for index, launched in enumerate(grid.steps)
    ]
    return Work(
        steps=tuple(steps),
        extra_bytes=sum(part.extra_bytes for part in parts),
        saved_bytes=sum(part.saved_bytes for part in parts),
        held_bytes=sum(part.held_bytes for part in parts),
        kept=merge(*(part.kept for part in parts)),
    )


def _with_lengths(step: Step) -> Step:
    if not step.ctas:
        return step
    return step._replace(read={**step.read, "cu_seqlens": step.ctas * LENGTH_BYTES})


def _together(steps: list[Step], ctas: int) -> Step:
    return Step(
        name=steps[0].name,
        read=merge(*(step.read for step in steps)),
        write=merge(*(step.write for step in steps)),
        atomic=merge(*(step.atomic for step in steps)),
        flops=sum(step.flops for step in steps),
        exps=sum(step.exps for step in steps),
        ctas=ctas,
    )
