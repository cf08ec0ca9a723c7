"""Many cells at once: the totals of every model and pass of a problem, without the tensors one by one.

The formulas are those of ``estimate``; what cells share (sizes, tiles, a pass that ``fwd+bwd`` repeats) is
done once, and nothing is kept that a table does not show.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from flashbench._iomodel.engine import Choice, check, choose, extra_bytes, find, tiles_fit, work
from flashbench._iomodel.tensors import compulsory, flops
from flashbench._iomodel.types import Model, Tiles, Work
from flashbench._iomodel.variant import Variant
from flashbench.problem import Problem

_DEFAULT = Choice()


class Totals(NamedTuple):
    """One cell as ``Estimate`` has it, its traffic summed over tensors; all bytes are integers.

    tiles: per kernel. Compulsory bytes are those of the cell's own variant (a block table counts).
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

    @property
    def requested_bytes(self) -> int:
        """Reads, writes and atomics together."""
        return self.read_bytes + self.write_bytes + self.atomic_bytes


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
    least: dict[object, tuple[int, int, int]] = {}
    rows: dict[str, list[Totals]] = {pass_: [] for pass_ in passes}
    for name in models:
        row = find(name)
        variant = choice.variant.only(row.takes)
        own = choice if variant is choice.variant else choice._replace(variant=variant)
        done: dict[str, _Pass] = {}
        for pass_ in passes:
            check(row, problem, pass_, variant)
            parts = []
            for kind in _KINDS[pass_]:
                if kind not in done:
                    done[kind] = _one(row, problem, kind, own)
                parts.append(done[kind])
            key = pass_, variant.page_size, variant.density, id(variant.blocks)
            if key not in least:
                needed = compulsory(problem, pass_, variant)
                least[key] = flops(problem, pass_, variant), needed.read_bytes, needed.write_bytes
            rows[pass_].append(_total(name, pass_, parts, least[key]))
    return [row for pass_ in passes for row in rows[pass_]]


_KINDS = {"fwd": ("fwd",), "bwd": ("bwd",), "fwd+bwd": ("fwd", "bwd")}


def _one(row: Model, problem: Problem, pass_: str, choice: Choice) -> _Pass:
    tiles, source = choose(row, problem, pass_, choice)
    variant = row.settle(problem, tiles, choice.variant, choice.device)
    fits = tiles_fit(row, problem, tiles, choice.elements(problem))
    done = work(row, problem, pass_, tiles, variant)
    flops = exps = read = write = atomic = 0
    for step in done.steps:
        flops += step.flops
        exps += step.exps
        read += sum(step.read.values())
        write += sum(step.write.values())
        if step.atomic:
            atomic += sum(step.atomic.values())
    return _Pass(tiles, source, fits, variant, done, flops, exps, read, write, atomic)


def _total(name: str, pass_: str, parts: list[_Pass], least: tuple[int, int, int]) -> Totals:
    one = parts[0]
    saved = one.work.saved_bytes
    if len(parts) > 1:
        two = parts[1]
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
    extra = extra_bytes([part.work for part in parts])
    return Totals(
        name, pass_, one.tiles, one.source, one.fits, one.variant, least[0], one.flops, one.exps,
        one.read, one.write, one.atomic, least[1], least[2], saved, extra,
    )  # fmt: skip
