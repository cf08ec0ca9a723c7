"""How far cards of one kind differ, by cells that several of them measured, and which one stands apart.

A card's ratio is the median over its cells of its time over the median time of the other cards that measured
the cell: 1.03 is 3 % slower than they are. No time is put beside one of another kind of card.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from flashbench.errors import UsageError
from flashbench.record import Record
from flashbench.runfile import RunFile

APART = 3.0
"""A card stands apart if it is so many times as far from 1 as the cards are usually."""
TO_SIGMA = 1.4826
"""From a median absolute deviation to the standard deviation of normal numbers."""


@dataclass(frozen=True, kw_only=True)
class CardRatio:
    """One card beside the others. name: host and device; ratio: of its times to theirs; cells: how many told.

    slowest: the cell with the highest ratio, and slowest_ratio. sm_clock_mhz: median over its rounds, None
    where it was not read."""

    name: str
    uuid: str | None
    cells: int
    ratio: float
    slowest: str
    slowest_ratio: float
    sm_clock_mhz: float | None


@dataclass(frozen=True, kw_only=True)
class Cards:
    """All of them, the slowest first. spread: highest over lowest ratio, less 1; odd: the one that stands
    apart, where there are three or more and one does."""

    kind: str
    cards: tuple[CardRatio, ...]
    spread: float
    odd: CardRatio | None


def across(files: Sequence[RunFile], least: float) -> Cards:
    """Compare the cards of the files' rows. least: what is no difference, a share.

    Raises UsageError where they are of several kinds, or no cell was measured on two cards.
    """
    times: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    rows: dict[str, list[Record]] = defaultdict(list)
    for file in files:
        for record in file.records:
            if record.samples and "suspect" not in record.flags and record.samples.median_s > 0:
                card = _identity(record, file.header.get("environment") or {})
                times[_cell(record)][card].append(record.samples.median_s)
                rows[card].append(record)
    kind = _one_kind([record for card in rows.values() for record in card], files)
    ratios: dict[str, dict[str, float]] = defaultdict(dict)
    for cell, by_card in times.items():
        medians = {card: statistics.median(found) for card, found in by_card.items()}
        for card, own in medians.items():
            if others := [time for other, time in medians.items() if other != card]:
                ratios[card][cell] = own / statistics.median(others)
    if not ratios:
        raise UsageError(
            f"--cards: no cell was timed on two cards; the files have {len(rows)}",
            hint="measure the same grid on each card, with an --out of its own",
        )
    found = tuple(
        sorted((_card(card, ratios[card], rows[card]) for card in ratios), key=lambda card: -card.ratio)
    )
    spread = found[0].ratio / found[-1].ratio - 1
    return Cards(kind=kind, cards=found, spread=spread, odd=_odd(found, least))


def _identity(record: Record, machine: Mapping[str, object]) -> str:
    """A text per card: its uuid, or where it has none its host and number."""
    own = record.environment
    if uuid := own.get("uuid"):
        return str(uuid)
    return f"{own.get('host') or machine.get('host')} {own.get('device') or machine.get('device')}"


def _cell(record: Record) -> str:
    """The cell with how it was timed, as other ways give other times."""
    samples = record.samples
    assert samples is not None
    return f"{record.cell.key} {samples.cache} {samples.method} {samples.load}"


def _one_kind(records: Sequence[Record], files: Sequence[RunFile]) -> str:
    about = files[0].header.get("environment") or {} if files else {}
    names = {str(one.environment.get("device_name") or about.get("device_name")) for one in records}
    if len(names) > 1:
        raise UsageError(
            f"--cards: cards of several kinds: {', '.join(sorted(names))}; accepted: files of one kind"
        )
    return names.pop() if names else ""


def _card(card: str, ratios: Mapping[str, float], rows: Sequence[Record]) -> CardRatio:
    about = rows[-1].environment
    slowest = max(ratios, key=lambda cell: ratios[cell])
    clocks = [
        round_["sm_clock_mhz"]
        for record in rows
        for round_ in record.timing.get("rounds") or ()
        if round_.get("sm_clock_mhz")
    ]
    place = f"{about.get('host')} {about.get('device')}"
    return CardRatio(
        name=place if about.get("host") and about.get("device") else card, uuid=about.get("uuid"),
        cells=len(ratios), ratio=statistics.median(ratios.values()), slowest=slowest,
        slowest_ratio=ratios[slowest], sm_clock_mhz=statistics.median(clocks) if clocks else None,
    )  # fmt: skip


def _odd(cards: Sequence[CardRatio], least: float) -> CardRatio | None:
    """The one that is furthest from the others, if it is further than chance and least. Two say nothing."""
    if len(cards) < 3:
        return None
    first = max(cards, key=lambda card: abs(card.ratio - 1))
    usual = statistics.median(abs(card.ratio - 1) for card in cards if card is not first) * TO_SIGMA
    return first if abs(first.ratio - 1) > max(least, APART * usual) else None
