"""How often ``compare`` errs on the runs of tools/noise_study.py: false alarms, and slow calls it misses.

python tools/noise_table.py reports/h200-sxm/noise [--write]

- A/A: every pair of runs that are not slowed is compared with the default rules, one run a side. A false
  alarm is a cell that is neither the same nor undecided, or a mean of the summary that is slower or faster.
  Pairs of one card and of two are told apart.
- A/B: in each sitting, three blocks in a row are a repeat: its three runs that are not slowed against its
  three that are. A cell is detected where its verdict is slower.

The same files give the same table; --write keeps it as table.json and README.md beside them.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from flashbench import judge, runfile  # noqa: E402
from flashbench.judge import MEASURES, Comparison, Rules, Run, Side  # noqa: E402
from flashbench.judge.verdicts import weigh  # noqa: E402

A_SIDE = 3
"""Runs a side of A/B."""
TABLE, PAGE = "table.json", "README.md"
TIME = MEASURES["time_s"]


@dataclass(frozen=True, kw_only=True)
class One:
    """A run of a sitting. share: by how much its calls are slower on purpose. card: its UUID. device: its
    name."""

    path: Path
    share: float
    card: str
    device: str
    run: Run


def read(folder: Path) -> tuple[list[list[One]], list[str]]:
    """The finished runs by sitting, in the order in which they were made, and the names of the others."""
    sittings: dict[Path, list[One]] = {}
    unfinished = []
    for path in sorted(folder.glob("*/*/")):
        variant = path / "variant.json"
        if not variant.is_file():  # written last
            unfinished.append(str(path.relative_to(folder)))
            continue
        results = path / "results.jsonl"
        about = runfile.load(results).header["environment"]
        card, device = (about.get(name) or "unknown" for name in ("uuid", "device_name"))
        share = float(json.loads(variant.read_text(encoding="utf-8"))["share"])
        one = One(path=path, share=share, card=card, device=device, run=judge.load_run(results))
        sittings.setdefault(path.parent, []).append(one)
    return list(sittings.values()), unfinished


def repeats(sitting: Sequence[One]) -> Iterator[Mapping[float, Sequence[One]]]:
    """A_SIDE blocks in a row each, by share; a block is as many runs as there are shares, one of each."""
    shares = sorted({one.share for one in sitting})
    size = A_SIDE * len(shares)
    for start in range(0, len(sitting) - size + 1, size):
        some = sitting[start : start + size]
        yield {share: [one for one in some if one.share == share] for share in shares}


def compared(base: Sequence[One], new: Sequence[One]) -> Comparison | None:
    """By the default rules, without a noise profile; None for unlike runs, which ``compare`` refuses."""
    sides = (Side(name="BASE", runs=tuple(one.run for one in base)),
             Side(name="NEW", runs=tuple(one.run for one in new)))  # fmt: skip
    if judge.unlike(*sides):
        return None
    return judge.compare(*sides, TIME, Rules())


def summary_alarms(comparison: Comparison) -> int:
    """Means of the summary that are over the default threshold and whose interval holds no 1."""
    warn, fail, _ = Rules().of(TIME)
    return sum(
        weigh(group.ratio, higher=False, warn=warn, fail=fail)[0] in ("slower", "faster")
        for group in comparison.groups
    )


def false_alarms(same: Sequence[One], *, one_card: bool) -> dict[str, Any]:
    """Of every pair of these runs on one card, or on two."""
    pairs = [pair for pair in itertools.combinations(same, 2) if (pair[0].card == pair[1].card) is one_card]
    found = [comparison for one, other in pairs if (comparison := compared([one], [other]))]
    cells = [cell for comparison in found for cell in comparison.cells]
    alarms = [cell for cell in cells if cell.verdict not in ("same", "undecided")]
    return {
        "pairs": len(found),
        "refused": len(pairs) - len(found),
        "verdicts": len(cells),
        "undecided": sum(cell.verdict == "undecided" for cell in cells),
        "false": len(alarms),
        "false_share": len(alarms) / len(cells) if cells else None,
        "false_on_summary": sum(map(summary_alarms, found)),
        "largest_change": max((abs(cell.change or 0.0) for cell in cells), default=None),
        "cells": {
            key: sum(cell.cell == key for cell in alarms)
            for key in sorted({cell.cell for cell in alarms})
        },
    }  # fmt: skip


def detection(sittings: Sequence[Sequence[One]], share: float) -> dict[str, Any]:
    """Of the runs whose calls are slower by that share, over the repeats of all sittings."""
    found = [
        comparison
        for sitting in sittings
        for repeat in repeats(sitting)
        if {0.0, share} <= repeat.keys() and (comparison := compared(repeat[0.0], repeat[share]))
    ]
    cells = [cell for comparison in found for cell in comparison.cells]
    detected = [cell for cell in cells if cell.verdict == "slower"]
    changes = [cell.change for cell in cells if cell.change is not None]
    missed = [cell for cell in cells if cell.verdict != "slower"]
    return {
        "share": share,
        "repeats": len(found),
        "verdicts": len(cells),
        "detected": len(detected),
        "rate": len(detected) / len(cells) if cells else None,
        "median_change": statistics.median(changes) if changes else None,
        "missed": [f"{cell.cell}: {cell.verdict}, {cell.reason}" for cell in missed],
    }


def table(folder: Path) -> dict[str, Any]:
    """What the runs below the folder say, JSON-able."""
    sittings, unfinished = read(folder)
    runs = [one for sitting in sittings for one in sitting]
    same = [one for one in runs if one.share == 0]
    return {
        "type": "noise-study",
        "sittings": len(sittings),
        "cards": len({one.card for one in runs}),
        "devices": sorted({one.device for one in runs}),
        "runs": {f"{share:g}": sum(one.share == share for one in runs)
                 for share in sorted({one.share for one in runs})},
        "unfinished": unfinished,
        "cells": sorted({key for one in runs for key in one.run.cells}),
        "same_card": false_alarms(same, one_card=True),
        "other_card": false_alarms(same, one_card=False),
        "slower": [detection(sittings, share) for share in sorted({one.share for one in runs if one.share})],
    }  # fmt: skip


def page(found: Mapping[str, Any]) -> str:
    """The table in Markdown."""

    def percent(value: float | None, digits: int = 1) -> str:
        return "" if value is None else f"{100 * value:.{digits}f} %"

    counts = ", ".join(f"{count} {'as they are' if share == '0' else f'slower by {percent(float(share), 0)}'}"
                       for share, count in found["runs"].items())  # fmt: skip
    lines = [
        f"# How often `compare` errs on {' and '.join(found['devices'])}",
        "",
        "Runs of [configs/noise.toml](../../../configs/noise.toml) by `tools/noise_study.py`, judged by"
        " `python tools/noise_table.py FOLDER --write`, which wrote this page. What is"
        " counted, and how calls are slowed on purpose, those scripts say.",
        "",
        f"{found['sittings']} sittings, {found['cards']} cards, {len(found['cells'])} cells; runs: {counts}.",
        "",
        "| the same, one run a side | pairs | verdicts | undecided | false | share | false on the summary |"
        " largest change |",
        "|---|---|---|---|---|---|---|---|",
        *(
            f"| {name} | {row['pairs']} | {row['verdicts']} | {row['undecided']} | {row['false']} |"
            f" {percent(row['false_share'], 2)} | {row['false_on_summary']} |"
            f" {percent(row['largest_change'])} |"
            for name, row in (("one card", found["same_card"]), ("two cards", found["other_card"]))
        ),
        "",
        f"| slower on purpose, {A_SIDE} runs a side | repeats | verdicts | detected | rate | median change |",
        "|---|---|---|---|---|---|",
        *(
            f"| {percent(row['share'], 0)} | {row['repeats']} | {row['verdicts']} | {row['detected']} |"
            f" {percent(row['rate'])} | {percent(row['median_change'])} |"
            for row in found["slower"]
        ),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="with the folders of the sittings")
    parser.add_argument("--write", action="store_true", help=f"keep {TABLE} and {PAGE} in the folder")
    given = parser.parse_args()
    found = table(given.folder)
    if given.write:
        (given.folder / TABLE).write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
        (given.folder / PAGE).write_text(page(found), encoding="utf-8")
    print(page(found), end="")


if __name__ == "__main__":
    main()
