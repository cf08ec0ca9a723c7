"""How ``flashbench compare`` ends: what is refused before it judges, and the exit code after."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

import typer

from flashbench import judge
from flashbench.errors import EXIT_GATE, EXIT_OK, EXIT_UNDECIDED, UsageError
from flashbench.judge import MEASURES, Comparison, Rules, Side

HINTS = {
    "missing": "--allow missing passes them", "failed": "--allow failed passes them",
    "undecided": "more runs a side decide most",
}  # fmt: skip
NONE = "no cell that was measured"
_SHOWN = 8
"""Most metrics that an error lists of a side."""


def refuse_unlike(base: Side, new: Side, allowed: Collection[str]) -> None:
    """Runs under unlike conditions say nothing of each other. Exits 6, naming every field."""
    from flashbench import console

    if not set(base.keys) & set(new.keys):
        told = [text for side in (base, new) for run in side.runs for text in run.told]
        text = "; ".join(["the two sides have no cell in common", *told])
        console.error(UsageError(text, hint="compare runs of the same grid"))
        raise typer.Exit(EXIT_UNDECIDED)
    differ = {name: pair for name, pair in judge.unlike(base, new).items() if name not in allowed}
    if differ:
        said = "; ".join(
            f"{name} is {one} on the base side and {other} on the new one"
            for name, (one, other) in differ.items()
        )
        hint = f"--allow {','.join(differ)} compares them all the same"
        console.error(UsageError(f"the runs are unlike: {said}", hint=hint))
        raise typer.Exit(EXIT_UNDECIDED)


def outcome(
    comparisons: Sequence[Comparison], rules: Rules, failing: Collection[str]
) -> tuple[int, UsageError | None]:
    """Exit 5 for a gate that fails, 6 for what is missing or cannot be compared; and the error to show."""
    for found in (*_worse(comparisons, rules), *(_better(comparisons) if "changed" in failing else ())):
        return EXIT_GATE, found
    bad = ("failed", "missing", "incomparable", *(("undecided",) if "undecided" in failing else ()))
    for one in comparisons:
        for name in bad:
            cells = [cell for cell in one.cells if cell.verdict == name]
            if cells and name not in rules.allowed:
                first = f"{cells[0].cell}: {cells[0].reason}"
                text = f"{one.measure.name}: {len(cells)} cells are {name}, first: {first}"
                return EXIT_UNDECIDED, UsageError(text, hint=HINTS.get(name, ""))
    return EXIT_OK, None


def _worse(comparisons: Sequence[Comparison], rules: Rules) -> Iterator[UsageError]:
    for one in comparisons:
        if worse := one.failing:
            _, fail, _ = rules.of(one.measure)
            text = f"{len(worse)} of {len(one.cells)} cells are worse by more than {100 * fail:g}%"
            yield UsageError(f"{one.measure.name}: {text}, first: {worse[0].cell}: {worse[0].reason}")


def _better(comparisons: Sequence[Comparison]) -> Iterator[UsageError]:
    for one in comparisons:
        if better := [cell for cell in one.cells if cell.verdict in ("faster", "new")]:
            text = f"{len(better)} of {len(one.cells)} cells are better or new"
            yield UsageError(
                f"{one.measure.name}: {text}, first: {better[0].cell}: {better[0].reason}",
                hint="'flashbench baseline save' keeps the new numbers",
            )


def nothing(comparisons: Sequence[Comparison], base: Side, new: Side, *, every: bool) -> UsageError | None:
    """The error where no cell has a value on both sides: by any metric, or with ``every`` by one of them."""
    empty = [one.measure.name for one in comparisons if not one.compared]
    if not empty or (len(empty) < len(comparisons) and not every):
        return None
    has = [metrics(side) for side in (base, new)]
    said = (
        f"both sides have {has[0]}" if has[0] == has[1]
        else f"the base side has {has[0]}, the new side has {has[1]}"
    )  # fmt: skip
    hint = "" if NONE in has else "--metric takes what both sides have"
    text = f"{empty[0]}: the two sides have nothing in common: no cell has a value of it on both; {said}"
    return UsageError(text, hint=hint)


def metrics(side: Side) -> str:
    """What any cell of a side that was measured has a value of, the usual first, in words."""
    cells = [cell for key in side.keys for cell in side.of(key) if cell.ok]
    names = dict.fromkeys([*(name for run in side.runs for name in run.measures), *MEASURES])
    found = [name for name in names if any(cell.has(name) and cell.samples(name) for cell in cells)]
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more if found else NONE
