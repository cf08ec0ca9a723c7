"""Many cells at once: the totals of every model and pass of a problem, without the tensors one by one.

The formulas are those of ``estimate``; what cells share (sizes, tiles, a pass that ``fwd+bwd`` repeats) is
done once, and nothing is kept that a table does not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import reduce
from operator import add
from typing import NamedTuple

from flashbench._iomodel.engine import (
    Choice,
    check,
    choose,
    extra_bytes,
    find,
    joined,
    kinds,
    known,
    name_tiles,
    tiles_fit,
    work,
)
from flashbench._iomodel.tensors import compulsory, flops
from flashbench._iomodel.types import Estimate, Model, Step, Tiles, Traffic, Work, merge
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench.problem import Problem

_DEFAULT = Choice()


class Totals(NamedTuple):
    """One cell as ``Estimate`` has it, its traffic summed over tensors; all bytes are integers.

    tiles: per kernel. Compulsory bytes are those of the cell's own variant (a block table counts).
    steps, compulsory (of each single pass): what ``whole`` makes an Estimate of.
    """

    model: str
    pass_: str
    tiles: Mapping[str, Tiles]
    tile_source: str
    tiles_fit: bool | None
    variant: Variant
    flops: int
    done_flops: int
    exps: int
    read_bytes: int
    write_bytes: int
    atomic_bytes: int
    compulsory_read_bytes: int
    compulsory_write_bytes: int
    saved_bytes: int
    extra_bytes: int
    steps: tuple[Step, ...]
    compulsory: tuple[Traffic, ...]

    @property
    def requested_bytes(self) -> int:
        """Reads, writes and atomics together."""
        return self.read_bytes + self.write_bytes + self.atomic_bytes


class _Least(NamedTuple):
    """What is the same for all models: nominal FLOPs and compulsory traffic of a single pass."""

    flops: int
    read: int
    write: int
    moved: tuple[Traffic]


_Pass = tuple[Totals, Work]
"""A single pass of one model, and what ``fwd+bwd`` needs of it beside its totals."""


def totals(
    problem: Problem, models: Sequence[str], passes: Sequence[str], choice: Choice = _DEFAULT
) -> list[Totals]:
    """Every pass of every model, the model innermost. An option that a model does not have is left out of it.

    Raises as ``estimate`` does.
    """
    least: dict[object, _Least] = {}
    rows: dict[str, list[Totals]] = {pass_: [] for pass_ in passes}
    needs = [(pass_, kinds(pass_)) for pass_ in passes]
    for name in models:
        if not known(name):
            for pass_ in passes:
                rows[pass_].append(_alternative(name, problem, pass_))
            continue
        row = find(name)
        variant = choice.variant.only(row.takes)
        own = choice if variant is choice.variant else choice._replace(variant=variant)
        done: dict[str, _Pass] = {}
        check(row, problem, variant)
        for pass_, needed in needs:
            for kind in needed:
                if kind not in done:
                    done[kind] = _one(row, problem, kind, own, least)
            rows[pass_].append(done[pass_][0] if pass_ in done else _both(*(done[kind] for kind in needed)))
    return [row for pass_ in passes for row in rows[pass_]]


def requested_bytes(name: str, problem: Problem, passes: Sequence[str]) -> dict[str, int]:
    """Requested bytes of a model without tiles in every pass: what rows that do not show it compare with."""
    needs = {pass_: kinds(pass_) for pass_ in passes}
    single = {
        kind: sum(_sums(work(find(name), problem, kind, {}, DEFAULT).steps)[2:])
        for kind in {kind for needed in needs.values() for kind in needed}
    }
    return {pass_: sum(single[kind] for kind in needed) for pass_, needed in needs.items()}


def _one(row: Model, problem: Problem, pass_: str, choice: Choice, shared: dict[object, _Least]) -> _Pass:
    asked = variant = choice.variant
    fits = None
    tiles, source = choose(row, problem, pass_, choice)
    if tiles:
        variant = row.settle(problem, tiles, variant, choice.device)
        fits = tiles_fit(row, problem, tiles, choice.elements(problem))
    key = pass_, asked.page_size if pass_ == "fwd" else 0, asked.density, id(asked.blocks)
    if key not in shared:
        shared[key] = _least(problem, pass_, asked)
    least = shared[key]
    done = work(row, problem, pass_, tiles, variant)
    return Totals(
        row.name, pass_, tiles, source, fits, variant, least.flops, *_sums(done.steps), least.read,
        least.write, done.saved_bytes, done.extra_bytes, done.steps, least.moved,
    ), done  # fmt: skip


def _least(problem: Problem, pass_: str, variant: Variant) -> _Least:
    moved = compulsory(problem, pass_, variant)
    return _Least(flops(problem, pass_, variant), moved.read_bytes, moved.write_bytes, (moved,))


def _sums(steps: Sequence[Step]) -> tuple[int, int, int, int, int]:
    """FLOPs, exponentials, and bytes read, written and added atomically."""
    flops = exps = read = write = atomic = 0
    for _, reads, writes, atomics, products, powers, *_ in steps:
        flops += products
        exps += powers
        read += sum(reads.values())
        write += sum(writes.values())
        if atomics:
            atomic += sum(atomics.values())
    return flops, exps, read, write, atomic


def _both(forward: _Pass, backward: _Pass) -> Totals:
    (one, first), (two, second) = forward, backward
    kept, steps = 0, one.steps
    if first.kept:
        kept, steps = sum(first.kept.values()), joined([first, second])[0].steps
    return Totals(
        one.model,
        "fwd+bwd",
        {**one.tiles, **two.tiles},
        "given" if "given" in (one.tile_source, two.tile_source) else one.tile_source,
        None if one.tiles_fit is None else one.tiles_fit and bool(two.tiles_fit),
        one.variant,
        one.flops + two.flops,
        one.done_flops + two.done_flops,
        one.exps + two.exps,
        one.read_bytes + two.read_bytes,
        one.write_bytes + two.write_bytes + kept,
        one.atomic_bytes + two.atomic_bytes,
        one.compulsory_read_bytes + two.compulsory_read_bytes,
        one.compulsory_write_bytes + two.compulsory_write_bytes,
        one.saved_bytes,
        extra_bytes([first, second]),
        steps + two.steps,
        one.compulsory + two.compulsory,
    )


def _alternative(name: str, problem: Problem, pass_: str) -> Totals:
    """One that is not exact attention, of which nothing is shared."""
    from flashbench._iomodel import alternatives

    method = alternatives.covering(name, problem, pass_)
    steps, least = method.steps(problem), method.compulsory(problem)
    sums = _sums(steps)
    return Totals(
        name, pass_, {}, "", None, DEFAULT, sums[0], *sums, least.read_bytes, least.write_bytes, 0,
        method.extra_bytes(problem), steps, (least,),
    )  # fmt: skip


def whole(row: Totals, problem: Problem, choice: Choice) -> Estimate:
    """The Estimate of which the row is the totals; choice: as ``totals`` was given."""
    named = name_tiles(row.tiles)
    return Estimate(
        model=row.model,
        problem=problem,
        pass_=row.pass_,
        flops=row.flops,
        done_flops=row.done_flops,
        exps=row.exps,
        requested=Traffic(
            level="requested",
            read=merge(*(step.read for step in row.steps)),
            write=merge(*(step.write for step in row.steps)),
            atomic=merge(*(step.atomic for step in row.steps)),
        ),
        compulsory=reduce(add, row.compulsory),
        saved_bytes=row.saved_bytes,
        extra_bytes=row.extra_bytes,
        tiles=named,
        assumptions=find(row.model).assumptions,
        tile_source=row.tile_source,
        tiles_fit=row.tiles_fit,
        sram_elements=choice.elements(problem),
        steps=row.steps,
        variant=row.variant,
    )
