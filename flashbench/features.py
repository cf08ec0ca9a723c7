"""The options that say what attention computes beyond its shape: one row each, for every command.

``run``, ``check``, ``profile`` and ``io-model`` take them on the line, and ``run`` in a config file. A
row's value, parsed, goes into the field of Problem that it names; ``varlen`` makes a packed batch.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from flashbench import named_masks, units
from flashbench.errors import FlashbenchError, SpecError
from flashbench.problem import FP8_SCALES, LAYOUTS, UNLIMITED, Problem, packed

OFF = "none"
"""What turns an option off that a config file or a preset turned on."""


@dataclass(frozen=True, kw_only=True)
class Feature:
    """One option. parse(text, label) -> the field's value; a flag has none. metavar: of its help."""

    name: str
    field: str
    help: str
    accepted: str = "true or false"
    metavar: str = ""
    parse: Callable[[str, str], Any] | None = None


def parse_window(text: str, label: str = "--window") -> tuple[int, int]:
    """(left, right) of a window: "128,0", "128" (both sides), "tokens=128" (left 127, right 0), -1 none."""
    accepted = "keys beside the query's own as LEFT,RIGHT or one number for both (-1: unlimited), or tokens=N"
    if text.strip() == OFF:
        return UNLIMITED, UNLIMITED
    head, equals, count = text.partition("=")
    if equals and head.strip() == "tokens":
        return units.parse_int(count, f"{label} {units.quoted(text)}: tokens") - 1, 0
    sides = [side.strip() for side in text.split(",")]
    try:
        if len(sides) > 2 or equals:
            raise SpecError("")
        values = [-1 if side == "-1" else units.parse_int(side, "", minimum=0) for side in sides]
    except SpecError:
        raise SpecError(f"{label} {units.quoted(text)}: not a window; accepted: {accepted}") from None
    return values[0], values[-1]


_LENGTHS = re.compile(r"(?:[^*x]+\*)?[^*x]+(?:x[^*x]+)?")
"""What a number of each kind stands for is read from these parts."""


def parse_lengths(
    text: str, label: str = "--varlen", *, decode: bool = False, minimum: int = 0
) -> tuple[tuple[int, int], ...]:
    """Sequences of a packed batch: "512,1k,3k", queries x keys "1x512,1x3k", repeated "4*512"; k = 1024."""
    lengths: list[tuple[int, int]] = []
    for item in text.split(","):
        if not _LENGTHS.fullmatch(item):
            accepted = (
                "a length such as 512 or 64k, queries x keys such as 1x512, either repeated such as 4*512"
            )
            raise SpecError(
                f"{label} {units.quoted(text)}: {units.quoted(item)} is no length; accepted: {accepted}"
            )
        where = f"{label} {units.quoted(text)}:"
        count, star, shape = item.rpartition("*")
        queries, cross, keys = shape.partition("x")
        repeat = units.parse_int(count, where, maximum=2**20) if star else 1
        rows = units.parse_int(queries, where, minimum=minimum)
        lengths += [
            (rows, units.parse_int(keys, where, minimum=minimum)) if cross else (1 if decode else rows, rows)
        ] * repeat
    return tuple(lengths)


def parse_share(text: str, label: str, accepted: str, allowed: Callable[[float], bool]) -> float:
    """A decimal number within bounds. Raises SpecError."""
    try:
        value = float(text)
    except ValueError:
        raise SpecError(
            f"{label} {units.quoted(text)}: not a number; accepted: a number {accepted}"
        ) from None
    if not allowed(value):
        raise SpecError(f"{label} {units.quoted(text)}: out of range; accepted: a number {accepted}")
    return value


def _bias(text: str, label: str) -> str:
    shape = "" if text == OFF else text
    if shape and (len(shape) != 4 or any(x not in (y, "1") for x, y in zip(shape, "bhqk", strict=False))):
        raise SpecError(
            f"{label} {units.quoted(text)}: not a shape; accepted: bhqk with 1 for any of the letters,"
            f" such as 1hqk, or {OFF}"
        )
    return shape


def _block_mask(text: str, label: str) -> str:
    if text == OFF:
        return ""
    try:
        named_masks.check(text)
    except SpecError:
        raise SpecError(
            f"{label} {units.quoted(text)}: not a block mask; accepted: {', '.join(named_masks.NAMES)},"
            f" random:DENSITY, an .npz file or {OFF}"
        ) from None
    if named_masks.is_file(text) and not Path(text).is_file():
        raise SpecError(f"{label} {units.quoted(text, 400)}: no such file; accepted: an .npz file")
    return text


def _choice(known: Iterable[str], *, off: bool = False) -> Callable[[str, str], str]:
    names = (*known, *([OFF] if off else ()))

    def parse(text: str, label: str) -> str:
        value = units.parse_choice(text, label, names)
        return "" if value == OFF else value

    return parse


ROWS = (
    Feature(
        name="window", field="window", metavar="KEYS", parse=parse_window,
        help="Keys beside the query's own that it sees: LEFT,RIGHT, or one number for both, -1 unlimited;"
        " or tokens=N, N keys with its own (left N-1); or none.",
        accepted="a window such as '128,0'",
    ),
    Feature(
        name="softcap", field="softcap", metavar="CAP",
        parse=lambda t, label: parse_share(t, label, "of 0 (off) or above", lambda cap: 0 <= cap < math.inf),
        help="Scores become CAP * tanh(score / CAP); 0 turns it off.",
        accepted="a number such as 30",
    ),
    Feature(name="alibi", field="alibi", help="ALiBi: each head's slope times the distance is subtracted."),
    Feature(
        name="bias", field="bias", metavar="SHAPE", parse=_bias,
        help="Add a bias of that shape, with its gradient: bhqk, 1 for any place it is shared over, or none.",
        accepted="a shape such as '1hqk'",
    ),
    Feature(name="sinks", field="sinks", help="An attention sink per head: a logit without a value."),
    Feature(
        name="dropout", field="dropout_p", metavar="P",
        parse=lambda t, label: parse_share(t, label, "at least 0 and below 1", lambda p: 0 <= p < 1),
        help="Share of the probabilities that are dropped.",
        accepted="a number such as 0.1",
    ),
    Feature(
        name="block_mask", field="block_mask", metavar="MASK", parse=_block_mask,
        help="Hide blocks of 128 x 128: causal, window, butterfly, document, random:DENSITY, an .npz file"
        " with a boolean matrix of blocks or elements, or none.",
        accepted="a block mask such as 'random:0.5'",
    ),
    Feature(
        name="varlen", field="lengths", metavar="LENGTHS", parse=parse_lengths,
        help="A packed batch: '512,1k,3k', queries x keys '1x512', repeated '8*1k'. Sets batch and lengths.",
        accepted="lengths such as '1k,2k,512'",
    ),
    Feature(
        name="layout", field="layout", metavar="CHOICE", parse=_choice(LAYOUTS),
        help="Order of the dimensions in memory: bhsd (batch, heads, rows, columns) or bshd.",
        accepted="'bhsd' or 'bshd'",
    ),
    Feature(
        name="fp8_scale", field="fp8_scale", metavar="CHOICE", parse=_choice(FP8_SCALES, off=True),
        help="What shares a scale of an fp8 input: tensor, head, block, or none.",
        accepted="'tensor', 'head' or 'block'",
    ),
    Feature(name="hadamard", field="hadamard", help="Rotate Q and K before they are rounded to fp8."),
    Feature(
        name="deterministic", field="deterministic",
        help="Every repeat the same bits: what adds with atomics is refused.",
    ),
)  # fmt: skip

NAMES = tuple(row.name for row in ROWS)


def apply(problem: Problem, parsed: Mapping[str, Any], label: Callable[[str], str] = str) -> Problem:
    """The problem with the parsed options of ROWS, by option name; other names are passed over.

    Raises SpecError in terms of the options where they do not go together, and where a file of a block mask
    cannot be read or is of another shape.
    """
    if not parsed:
        return problem
    changes = {row.field: parsed[row.name] for row in ROWS if row.name in parsed and row.name != "varlen"}
    try:
        problem = replace(problem, **changes) if changes else problem
        problem = packed(problem, parsed["varlen"]) if parsed.get("varlen") else problem
        if named_masks.is_file(problem.block_mask):
            named_masks.of(problem)  # read it once before any cell starts
        return problem
    except FlashbenchError as error:
        given = ", ".join(label(row.name) for row in ROWS if parsed.get(row.name))
        raise SpecError(f"{given}: {error}") from None


def check_not_empty(
    problems: Iterable[Problem], label: Callable[[str], str], given: Mapping[str, Any]
) -> None:
    """Raise SpecError for a problem without queries or keys, for whoever has nothing to say of one.

    given: the options that stand, by name; those that say lengths are named.
    """
    for problem in problems:
        if problem.seqlen_q and problem.seqlen_k:
            continue
        texts = {name: given.get(name) for name in ("seqlens", "seqlens_k", "lengths", "varlen")}
        said = ", ".join(f"{label(name)} {str(text)!r}" for name, text in texts.items() if text is not None)
        raise SpecError(
            f"{said or 'lengths'}: without queries or without keys there is nothing to model or tune"
            f" ({problem.key}); accepted: 1 or more of both"
        )


def parse_all(line: Mapping[str, Any], label: Callable[[str], str]) -> dict[str, Any]:
    """Parsed values of the options of ROWS that stand on a line, by option name."""
    return {
        row.name: line[row.name] if row.parse is None else row.parse(str(line[row.name]), label(row.name))
        for row in ROWS
        if line.get(row.name) is not None
    }
