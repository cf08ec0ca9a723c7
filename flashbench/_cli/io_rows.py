"""The rows of ``flashbench io-model``: values in the order of NAMES, for a table, JSON and CSV alike."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from flashbench._iomodel.engine import name_tiles

if TYPE_CHECKING:
    from flashbench._cli.io_request import Request
    from flashbench.devices import Device
    from flashbench.iomodel import Choice, Estimate, Prediction, Totals
    from flashbench.problem import Problem

PROBLEM = (
    "dtype", "causal", "batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v",
    "window_left", "window_right", "alignment", "dropout_p", "sequences",
)  # fmt: skip
DEVICE = ("gpu", "sram_bytes", "sram_elements")
MODEL = (
    "tiles", "tile_source", "tiles_fit", "pack_gqa", "num_splits", "page_size", "density",
    "flops", "done_flops", "exps",
    "requested_read_bytes", "requested_write_bytes", "requested_atomic_bytes",
    "compulsory_read_bytes", "compulsory_write_bytes", "saved_bytes", "extra_bytes",
    "intensity_requested", "intensity_compulsory", "standard_ratio",
)  # fmt: skip
TIME = (
    "dram_read_bytes", "dram_write_bytes", "dram_low_bytes", "dram_high_bytes", "time_s", "limiting",
    "roof_percent", "calibrated",
)  # fmt: skip
"""Columns that need a card; absent without one."""


def names(request: Request) -> list[str]:
    """The names of a row's values, in order."""
    timed = TIME if request.choices[0].device else ()
    return ["model", "pass", *PROBLEM, *DEVICE, *MODEL, *timed]


def rows(request: Request) -> Iterator[list[Any]]:
    """One row per problem, pass, model and card, in that order, the card innermost."""
    for problem in request.problems:
        shape = _problem(problem)
        for choice, name, row, standard in _totals(problem, request):
            values = [name, row.pass_, *shape, *_card(problem, choice), *_model(row, standard)]
            yield values + _time(problem, row, request, choice) if choice.device else values


def csv_lines(request: Request) -> Iterator[str]:
    """The same as lines of CSV: what rows share is written once, so that 100,000 take seconds."""
    yield ",".join(names(request))
    for problem in request.problems:
        shape = ",".join(map(_word, _problem(problem)))
        cards = {id(choice): ",".join(map(_word, _card(problem, choice))) for choice in request.choices}
        for choice, name, row, standard in _totals(problem, request):
            variant = row.variant
            line = (
                f"{name},{row.pass_},{shape},{cards[id(choice)]},{_quoted(tuple(row.tiles.items()))},"
                f"{row.tile_source},{_WORDS[row.tiles_fit]},{_WORDS[variant.pack_gqa]},{variant.num_splits},"
                f"{variant.page_size or ''},{variant.density},{_NUMBERS % _numbers(row, standard)}"
            )
            if choice.device:
                line += "," + ",".join(map(_word, _time(problem, row, request, choice)))
            yield line


def _totals(problem: Problem, request: Request) -> Iterator[tuple[Choice, str, Totals, int]]:
    """(card, name, totals, standard's requested bytes) of every row of a problem, in order."""
    per_card = [list(_of_card(problem, request, choice)) for choice in request.choices]
    return (row for together in zip(*per_card, strict=True) for row in together)


def _problem(p: Problem) -> list[Any]:
    left, right = (None if side == -1 else side for side in p.window)
    return [
        p.dtype, p.causal, p.batch, p.num_heads, p.num_kv_heads, p.seqlen_q, p.seqlen_k, p.head_dim,
        p.head_dim_v, left, right, p.alignment if p.masked else None, p.dropout_p, len(p.lengths) or None,
    ]  # fmt: skip


def _card(problem: Problem, choice: Choice) -> list[Any]:
    return [choice.device.name if choice.device else None, choice.sram_bytes, choice.elements(problem)]


_WORDS = {True: "true", False: "false", None: ""}


def _word(value: Any) -> str:
    """A value as CSV writes it."""
    return _WORDS[value] if value is None or isinstance(value, bool) else str(value)


@lru_cache(maxsize=256)
def _quoted(tiles: tuple[tuple[str, Any], ...]) -> str:
    """Tiles as a JSON object in a cell of CSV."""
    text = ", ".join(f'""{name}"": {value}' for name, value in name_tiles(dict(tiles)).items())
    return f'"{{{text}}}"' if tiles else ""


def _of_card(problem: Problem, request: Request, choice: Choice) -> list[tuple[Choice, str, Totals, int]]:
    """The rows of one problem on one card: every model of a pass, then the next pass."""
    from flashbench._iomodel.batch import requested_bytes, totals

    wanted = request.names
    counted = [name for name in wanted if name not in request.kernels]
    found = {(row.pass_, row.model): row for row in totals(problem, counted, request.passes, choice)}
    for name, model in request.kernels.items():
        for row in totals(problem, [model], request.passes, _own_tiles(choice)):
            found[row.pass_, name] = row._replace(model=name)
    if "standard" in wanted:
        standard = {pass_: found[pass_, "standard"].requested_bytes for pass_ in request.passes}
    else:
        standard = requested_bytes("standard", problem, request.passes)
    return [
        (choice, name, found[pass_, name], standard[pass_]) for pass_ in request.passes for name in wanted
    ]


def _own_tiles(choice: Choice) -> Choice:
    """An implementation runs with the tiles of its code, whatever M and tiles the other rows have."""
    return choice._replace(tiles=None, sram_bytes=None)


def _model(row: Totals, standard: int) -> list[Any]:
    variant = row.variant
    return [
        name_tiles(row.tiles) or None, row.tile_source, row.tiles_fit, variant.pack_gqa, variant.num_splits,
        variant.page_size or None, variant.density, *_numbers(row, standard),
    ]  # fmt: skip


def _numbers(row: Totals, standard: int) -> tuple[int | float, ...]:
    """The values of MODEL from flops on."""
    (
        *_, flops, done_flops, exps, read, write, atomic, least_read, least_write, saved, extra, _, _,
    ) = row  # fmt: skip
    requested = read + write + atomic
    return (
        flops, done_flops, exps, read, write, atomic, least_read, least_write, saved, extra,
        flops / requested, flops / (least_read + least_write), standard / requested,
    )  # fmt: skip


_NUMBERS = ",".join(["%r"] * len(MODEL[MODEL.index("flops") :]))


def estimates(request: Request) -> Iterator[tuple[str, Choice, Estimate]]:
    """(name, card, estimate) of every row, in order, with all its tensors."""
    from flashbench.iomodel import estimate, find, known

    for problem in request.problems:
        for pass_ in request.passes:
            for name in request.names:
                for choice in request.choices:
                    own = _own_tiles(choice) if name in request.kernels else choice
                    model = request.kernels.get(name, name)
                    takes = find(model).takes if known(model) else ()
                    yield name, choice, estimate(
                        model, problem, pass_, sram_bytes=own.sram_bytes, tiles=own.tiles,
                        device=choice.device, variant=choice.variant.only(takes),
                    )  # fmt: skip


def prediction(estimate: Estimate, device: Device | None) -> Prediction | None:
    """What the card makes of it; None without one, and where the time model does not cover the case."""
    from flashbench.errors import FlashbenchError
    from flashbench.iomodel import known, predict

    if device is None or not known(estimate.model):
        return None
    try:
        return predict(estimate, device)
    except FlashbenchError:
        return None


def _time(problem: Problem, row: Totals, request: Request, choice: Choice) -> list[Any]:
    """What the card makes of the row; empty where the time model does not cover it."""
    from flashbench.iomodel import known, whole

    model = request.kernels.get(row.model, row.model)
    said = None
    if known(model):
        said = prediction(whole(row._replace(model=model), problem, choice), choice.device)
    if said is None:
        return [None] * len(TIME)
    dram = said.dram
    share = said.roofs.get(said.limiting)
    return [
        said.dram_read.value, said.dram_write.value, dram.low, dram.high, said.time_s, said.limiting,
        None if share is None else 100 * share, said.calibrated,
    ]  # fmt: skip


def tensors(request: Request) -> Iterator[Mapping[str, Any]]:
    """One row per kernel or op and tensor of every estimate, then one per compulsory tensor."""
    for name, choice, whole in estimates(request):
        head = {
            "model": name, "pass": whole.pass_, "problem": whole.problem.key,
            "gpu": choice.device.name if choice.device else None, "sram_bytes": choice.sram_bytes,
        }  # fmt: skip
        for step in whole.steps:
            yield from _by_tensor(head, step.name, "requested", (step.read, step.write, step.atomic))
        least = whole.compulsory
        yield from _by_tensor(head, None, least.level, (least.read, least.write, least.atomic))


def _by_tensor(
    head: Mapping[str, Any], kernel: str | None, level: str, moved: Sequence[Mapping[str, int]]
) -> Iterator[Mapping[str, Any]]:
    for tensor in dict.fromkeys(name for part in moved for name in part):
        read, write, atomic = (part.get(tensor, 0) for part in moved)
        yield {
            **head, "kernel": kernel, "tensor": tensor, "level": level, "read_bytes": read,
            "write_bytes": write, "atomic_bytes": atomic,
        }  # fmt: skip
