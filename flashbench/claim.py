"""One claim of the literature, what was seen of it, and the verdict: the words of ``VERDICTS`` alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

from flashbench.units import format_bytes

VERDICTS = {
    "holds": "every cell is within the bounds",
    "holds in n of m cells": "some are",
    "holds, by n of m cells": "of a claim that says some: so many are within the bounds, and one suffices",
    "does not hold": "none is",
    "more than claimed": "of a range: the median lies above its upper end; `in n of m cells`: so many do",
    "less than claimed": "of a range: the median lies below its lower end; `in n of m cells`: so many do",
    "not refuted": "what is seen is necessary and does not suffice, and every cell is within the bounds",
    "refuted in n of m cells": "what is seen is necessary for the claim, and some cells are outside",
    "too noisy to tell": "the spread of every cell is wider than its distance from the nearest bound",
    "…; n of m cells too noisy to tell": "that of some is: the verdict is that of the others",
    "not measured": "there is no cell, or none but those that are left out",
    "can't be tested here": "it says why",
}
"""Every verdict and when it is given."""

NOISY = "too noisy to tell"

UNITS = ("", "bytes")
"""Of what is seen: a number, or bytes, which are shown as "20.0 GB"."""

NOT_OF_THE_GPU = ("launch-bound", "suspect")
"""Flags of a time that decides nothing on speed: it is partly the host's, or no kernel can be so fast."""


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One number that bears on a claim: of which cell on which card, and its spread (interquartile range over
    median). flags: why it decides nothing.
    """

    cell: str
    value: float
    spread: float = 0.0
    card: str = ""
    flags: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Claim:
    """A claim, where it stands, under which conditions it was made, and the bounds within which it holds.

    command: what measures it. untestable: why nothing here can, or empty. seen: one of claims.SEEN, what it
    takes. range: the bounds are the ends of how much is claimed. necessary: the claim says more than what is
    seen, which may refute it and never shows it. some: the claim is that there are such cells. unit: one of
    UNITS, of what is seen.
    """

    name: str
    says: str
    source: str
    conditions: str
    command: str = ""
    untestable: str = ""
    at_least: float = -math.inf
    at_most: float = math.inf
    range: bool = False
    necessary: bool = False
    some: bool = False
    unit: str = ""
    seen: Mapping[str, Any]

    @property
    def of_cells(self) -> bool:
        """Whether it is about cells, and not data sheets, arithmetic or what no benchmark can tell."""
        return bool(self.seen) and not {"device", "product"} & set(self.seen)

    def holds(self, value: float) -> bool:
        """Whether a number is within the bounds."""
        return self.at_least <= value <= self.at_most

    def told_by(self, one: Seen) -> bool:
        """Whether a number is farther from the bounds than its spread is wide."""
        distance = min(abs(one.value - bound) for bound in (self.at_least, self.at_most))
        return abs(one.value) * one.spread <= distance


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim and what the results say of it. left_out: cells whose flags keep them from deciding it;
    not_begun: what was never begun of its cells, in words; lacks: the files of which there are no results, or
    no such cells, in words.
    """

    claim: Claim
    found: tuple[Seen, ...]
    left_out: tuple[Seen, ...] = ()
    not_begun: tuple[str, ...] = ()
    lacks: str = ""

    @property
    def verdict(self) -> str:
        """One of VERDICTS."""
        told, count = [one.value for one in self.found if self.claim.told_by(one)], len(self.found)
        if self.claim.untestable:
            return "can't be tested here"
        if not count:
            return "not measured"
        if not told:
            return NOISY
        noisy = f"; {count - len(told)} of {count} cells {NOISY}" if len(told) < count else ""
        return self._of(told) + noisy

    def _of(self, values: list[float]) -> str:
        """The verdict on the numbers that can tell."""
        claim = self.claim
        if claim.range and (middle := median(values)) > claim.at_most:
            return _counted("more than claimed", sum(value > claim.at_most for value in values), len(values))
        if claim.range and middle < claim.at_least:
            return _counted("less than claimed", sum(value < claim.at_least for value in values), len(values))
        within = sum(map(claim.holds, values))
        if not within:
            return "does not hold"
        if claim.necessary:
            outside = len(values) - within
            return _counted("refuted", outside, len(values)) if outside else "not refuted"
        if claim.some:
            return f"holds, by {within} of {len(values)} cells"
        return _counted("holds", within, len(values))

    @property
    def of_a_card(self) -> bool:
        """Whether cells of a card say something of it, or could: not data sheets, arithmetic or a compiler
        alone.
        """
        seen = (*self.found, *self.left_out)
        return self.claim.of_cells and (not seen or any(one.card for one in seen))

    @property
    def cards(self) -> tuple[str, ...]:
        """The cards on which it was measured."""
        return tuple(sorted({one.card for one in (*self.found, *self.left_out)} - {""}))

    @property
    def shown(self) -> str:
        """The numbers in one line: one, or the least, the median and the most, and the largest spread; how
        many cells were left out, and which were not begun. Without any: why, and what makes them.
        """
        claim = self.claim
        if not self.found:
            command = f"`{claim.command}`"
            gone = self.lacks and not (self.left_out or self.not_begun)
            made = f"{self.lacks}: {command}" if gone else f"measured by {command}"
            return claim.untestable or "; ".join([*self._why_left_out, *self.not_begun, made])
        values = sorted(one.value for one in self.found)
        if len(values) == 1:
            text = self._said(values[0], ".4g")
        else:
            least, middle, most = (self._said(x, ".3g") for x in (values[0], median(values), values[-1]))
            text = f"{least} to {most}, median {middle} of {len(values)} cells"
        spread = max(one.spread for one in self.found)
        spreads = [f"spread ≤ {100 * spread:.1f} %"] if spread else []
        return "; ".join([text, *spreads, *self._why_left_out, *self.not_begun])

    def _said(self, value: float, digits: str) -> str:
        if self.claim.unit == "bytes":
            return ("-" if value < 0 else "") + format_bytes(abs(value))
        return f"{value:{digits}}"

    @property
    def _why_left_out(self) -> list[str]:
        count = len(self.left_out)
        flags = Counter(flag for one in self.left_out for flag in set(one.flags))
        which = " or ".join(sorted(flags))
        if not count:
            return []
        if not self.found:
            return [f"{'the only cell is' if count == 1 else f'all {count} cells are'} flagged {which}"]
        return [f"{count} cell{'s' * (count > 1)} left out, flagged {which}"]

    def row(self) -> dict[str, Any]:
        """For JSON."""
        claim = self.claim
        return {
            "name": claim.name, "says": claim.says, "source": claim.source, "conditions": claim.conditions,
            "command": claim.command, "verdict": self.verdict, "shown": self.shown, "cards": list(self.cards),
            "cells": [
                {"cell": one.cell, "value": one.value, "spread": one.spread, "tells": claim.told_by(one)}
                for one in self.found
            ],
            "left_out": [{"cell": one.cell, "flags": list(one.flags)} for one in self.left_out],
            "not_begun": list(self.not_begun),
        }  # fmt: skip


def _counted(word: str, count: int, of: int) -> str:
    """A verdict, with how many of the cells it is of where that is not all."""
    return word if count == of else f"{word} in {count} of {of} cells"


def markdown(judged: Iterable[Judged]) -> str:
    """A table of claims, and below it what was measured of each."""
    lines = ["| claim | source and conditions | what is seen here | verdict |", "|---|---|---|---|"]
    for one in judged:
        claim = one.claim
        where = f"{claim.source}; {claim.conditions}"
        cells = (text.replace("|", "\\|") for text in (claim.says, where, one.shown, one.verdict))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)
