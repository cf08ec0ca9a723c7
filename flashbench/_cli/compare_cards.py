"""``flashbench compare --cards``: the cards of one kind beside each other, and which one stands apart."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from flashbench.errors import GateError

if TYPE_CHECKING:
    from flashbench.judge.cards import CardRatio


def show(
    texts: str, *, warn: float, fail: float, allowed: Collection[str], json: bool, csv: bool, quiet: bool
) -> None:
    """Print a row per card of the files. warn: what is no difference; fail: a card that stands apart and is
    slower by more raises GateError (shares). allowed: as of judge.load_side."""
    from flashbench import console, runfile
    from flashbench.console import Column
    from flashbench.judge import cards
    from flashbench.judge.formats import DAMAGED
    from flashbench.judge.sides import paths_of

    files = [runfile.load(path) for path in paths_of(texts, "BASE")]
    if DAMAGED not in allowed:
        files = [runfile.intact(file) for file in files]
    for text in () if quiet else (text for file in files for text in file.notes):
        console.warn(text)
    found = cards.across(files, warn)
    columns = [
        Column(name="card", header="card"),
        Column(name="uuid", header="uuid"),
        Column(name="cells", header="cells", justify="right"),
        Column(name="ratio", header="time / others'", format=lambda ratio: f"{ratio:.3f}", justify="right"),
        Column(name="sm_clock_mhz", header="SM clock", format=lambda mhz: f"{mhz:.0f} MHz", justify="right"),
        Column(name="slowest_ratio", header="worst", format=lambda ratio: f"{ratio:.3f}", justify="right"),
        Column(name="slowest", header="in"),
        Column(name="odd", header="stands apart", format=lambda odd: "yes" if odd else ""),
    ]
    rows = [{**vars(card), "card": card.name, "odd": card is found.odd} for card in found.cards]
    notes = [f"{len(found.cards)} cards differ by {found.spread:.1%}", _said(found.odd)]
    if len(found.cards) == 2:
        notes[1] = "with a third card it would show which of the two stands apart"
    console.show_table(
        columns, [{column.name: row[column.name] for column in columns} for row in rows], json=json, csv=csv,
        title=found.kind, notes=() if quiet else notes,
    )  # fmt: skip
    if found.odd and found.odd.ratio - 1 > fail:
        raise GateError(f"{_said(found.odd)}, more than {100 * fail:g}%")


def _said(odd: CardRatio | None) -> str:
    if odd is None:
        return "none stands apart"
    way = "slower" if odd.ratio > 1 else "faster"
    who = f"{odd.name} ({odd.uuid})" if odd.uuid else odd.name
    return f"{who} stands apart: {abs(odd.ratio - 1):.1%} {way} than the others"
