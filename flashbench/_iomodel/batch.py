"""Many cells at once: the totals of every model and pass of a problem, without the tensors one by one.

The formulas are those of ``estimate``; what cells share (sizes, tiles, a pass that ``fwd+bwd`` repeats) is
done once, and nothing is kept that a table does not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flashbench._iomodel.engine import (
    Choice,
    check,
    choose,
    extra_bytes,
    find,
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
    steps, compulsory: what ``whole`` makes an Estimate of.
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
    compulsory: Traffic

    @property
    def requested_bytes(self) -> int:
        """Reads, writes and atomics together."""
        return self.read_bytes + self.write_bytes + self.atomic_bytes


class _Least(NamedTuple):
    """What is the same for all models: nominal FLOPs and compulsory traffic."""

    flops: int
    read: int
    write: int
    moved: Traffic


class _Pass(NamedTuple):
    """One pass of one model: what is decided for it, and its work in sums."""

    tiles: dict[str, Tiles]
    source: str
    fits: bool | None
    variant: Variant
    work: Work
    flops: int
    exps: int
    read: int
    write: int
    atomic: int


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
                    done[kind] = _one(row, problem, kind, own)
            key: object = pass_
            if variant is not DEFAULT:
                key = pass_, variant.page_size, variant.density, id(variant.blocks)
            if key not in least:
                moved = compulsory(problem, pass_, variant)
                least[key] = _Least(
                    flops(problem, pass_, variant), moved.read_bytes, moved.write_bytes, moved
                )
            rows[pass_].append(_total(name, pass_, [done[kind] for kind in needed], least[key]))
    return [row for pass_ in passes for row in rows[pass_]]


def _one(row: Model, problem: Problem, pass_: str, choice: Choice) -> _Pass:
    variant, fits = choice.variant, None
    tiles, source = choose(row, problem, pass_, choice)
    if tiles:
        variant = row.settle(problem, tiles, variant, choice.device)
        fits = tiles_fit(row, problem, tiles, choice.elements(problem))
    done = work(row, problem, pass_, tiles, variant)
    flops = exps = read = write = atomic = 0
    for _, reads, writes, atomics, products, powers, _ in done.steps:
        flops += products
        exps += powers
        read += sum(reads.values())
        write += sum(writes.values())
        if atomics:
            atomic += sum(atomics.values())
    return _Pass(tiles, source, fits, variant, done, flops, exps, read, write, atomic)


def _total(name: str, pass_: str, parts: list[_Pass], least: _Least) -> Totals:
    one = parts[0]
    steps = one.work.steps
    saved = one.work.saved_bytes
    if len(parts) > 1:
        two = parts[1]
        steps += two.work.steps
        one = _Pass(
            one.tiles | two.tiles,
            "given" if "given" in (one.source, two.source) else one.source,
            None if one.fits is None else one.fits and bool(two.fits),
            one.variant,
            one.work,
            one.flops + two.flops,
            one.exps + two.exps,
            one.read + two.read,
            one.write + two.write,
            one.atomic + two.atomic,
        )
    extra = one.work.extra_bytes if len(parts) == 1 else extra_bytes([part.work for part in parts])
    return Totals(
        name, pass_, one.tiles, one.source, one.fits, one.variant, least.flops, one.flops, one.exps,
        one.read, one.write, one.atomic, least.read, least.write, saved, extra, steps, least.moved,
    )  # fmt: skip


def _alternative(name: str, problem: Problem, pass_: str) -> Totals:
    """One that is not exact attention, of which nothing is shared."""
    from flashbench._iomodel import alternatives

    row = alternatives.estimate(name, problem, pass_)
    read, least = row.requested, row.compulsory
    return Totals(
        name, pass_, {}, "", None, DEFAULT, row.flops, row.done_flops, row.exps, read.read_bytes,
        read.write_bytes, read.atomic_bytes, least.read_bytes, least.write_bytes, row.saved_bytes,
        row.extra_bytes, row.steps, least,
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
        compulsory=row.compulsory,
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
