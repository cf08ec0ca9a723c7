"""One claim of the literature, what was seen of it, and the verdict: the words of ``VERDICTS`` alone."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

VERDICTS = {
    "holds": "every cell is within the bounds",
    "holds in n of m cells": "some are",
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
    seen, which may refute it and never shows it.
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
    seen: Mapping[str, Any]

    @property
    def of_cells(self) -> bool:
        """Whether it is about cells, and not data sheets or arithmetic."""
        return not {"device", "product"} & set(self.seen)

    def holds(self, value: float) -> bool:
        """Whether a number is within the bounds."""
        return self.at_least <= value <= self.at_most

    def told_by(self, one: Seen) -> bool:
        """Whether a number is farther from the bounds than its spread is wide."""
        distance = min(abs(one.value - bound) for bound in (self.at_least, self.at_most))
        return abs(one.value) * one.spread <= distance


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A claim and what the results say of it. left_out: cells whose flags keep them from deciding it."""

    claim: Claim
    found: tuple[Seen, ...]
    left_out: tuple[Seen, ...] = ()

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
        return _counted("holds", within, len(values))

    @property
    def cells_measured(self) -> bool:
        """Whether a card's cells say something of it, and not data sheets, arithmetic or a compiler alone."""
        return any(one.card for one in (*self.found, *self.left_out)) and self.claim.of_cells

    @property
    def cards(self) -> tuple[str, ...]:
        """The cards on which it was measured."""
        return tuple(sorted({one.card for one in (*self.found, *self.left_out)} - {""}))

    @property
    def shown(self) -> str:
        """The numbers in one line: one, or the least, the median and the most, and the largest spread; how
        many cells were left out.
        """
        claim = self.claim
        if not self.found:
            return claim.untestable or "; ".join([*self._why_left_out, f"measured by `{claim.command}`"])
        values = sorted(one.value for one in self.found)
        if len(values) == 1:
            text = f"{values[0]:.4g}"
        else:
            text = f"{values[0]:.3g} to {values[-1]:.3g}, median {median(values):.3g} of {len(values)} cells"
        spread = max(one.spread for one in self.found)
        spreads = [f"spread ≤ {100 * spread:.1f} %"] if spread else []
        return "; ".join([text, *spreads, *self._why_left_out])

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
        lines.append(f"| {claim.says} | {where} | {one.shown} | {one.verdict} |")
    return "\n".join(lines)
