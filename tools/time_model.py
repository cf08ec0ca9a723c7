"""Hold the time model against the published tables: its residuals, and the fit of its constants.

python tools/time_model.py             print the residuals
python tools/time_model.py --write     put them into docs/time-model.md
python tools/time_model.py --fit fa3   fit a family's constants to its published tables;
                                       bundled, naive: to the sweep in reports/h100-sxm
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from published import SEQLENS, SERIES, Series  # noqa: E402

from flashbench import kernels, runfile  # noqa: E402
from flashbench._iomodel import constants  # noqa: E402
from flashbench._iomodel.constants import Family, Rates  # noqa: E402
from flashbench._iomodel.time import predict  # noqa: E402
from flashbench.devices import Device, find  # noqa: E402
from flashbench.iomodel import Estimate, estimate  # noqa: E402

BEGIN_MEASURED = "<!-- measured: tools/time_model.py --write -->"
SWEEP = ROOT / "reports" / "h100-sxm" / "results.jsonl"
BEGIN, END = "<!-- residuals: tools/time_model.py --write -->", "<!-- end of residuals -->"


def cells(series: Series) -> list[tuple[Estimate, float]]:
    """(estimate, published seconds) of every number of a row."""
    device = find(series.device)
    return [
        (estimate(series.model, problem, series.pass_, tiles=series.tiles, device=device), seconds)
        for problem, seconds in series.cells()
    ]


def residuals(series: Series) -> list[float]:
    """Predicted over published time, less 1, for every number of a row."""
    device = find(series.device)
    return [predict(row, device, series.family).time_s / seconds - 1 for row, seconds in cells(series)]


def summary(rows: Sequence[Series]) -> tuple[float, float, float]:
    """Median and largest |residual| of all numbers, and of those at N >= 1k."""
    every = [(abs(r), n) for row in rows for r, n in zip(residuals(row), SEQLENS, strict=False)]
    return (
        statistics.median(r for r, _ in every),
        max(r for r, _ in every),
        max(r for r, n in every if n >= 1024),
    )


def table() -> list[str]:
    """Markdown: one line per published row, and one per family."""
    lines = [
        "| family | card | pass | d | mask | " + " | ".join(map(str, SEQLENS)) + " |",
        "|---|---|---|---|---|" + "---|" * len(SEQLENS),
    ]
    for row in SERIES:
        numbers = [f"{100 * value:+.1f}" for value in residuals(row)]
        numbers += ["–"] * (len(SEQLENS) - len(numbers))
        mask = "causal" if row.causal else "none"
        lines.append(
            f"| {row.family} | {row.device} | {row.pass_} | {row.head_dim} | {mask} | "
            + " | ".join(numbers)
            + " |"
        )
    lines += ["", "| family | numbers | median | largest | largest at N ≥ 1k |", "|---|---|---|---|---|"]
    for family in dict.fromkeys(row.family for row in SERIES):
        rows = [row for row in SERIES if row.family == family]
        count = sum(len(list(row.cells())) for row in rows)
        lines.append(f"| {family} | {count} | " + " | ".join(f"{100 * s:.1f}" for s in summary(rows)) + " |")
    return lines


def swept() -> Iterator[tuple[str, Estimate, float]]:
    """(implementation, estimate, measured median seconds) of the sweep on an H100, at N >= 1k."""
    for record in runfile.load(SWEEP).records:
        cell, model = record.cell, kernels.get(record.cell.implementation).io_model
        if record.samples is None or model is None or cell.problem.seqlen_q < 1024:
            continue
        row = estimate(model, cell.problem, cell.pass_, tiles=dict(record.config) or None)
        yield cell.implementation, row, record.samples.median_s


def measured() -> dict[tuple[str, str], list[float]]:
    """Predicted over measured median time, less 1, by (implementation, pass)."""
    device = find("h100-sxm")
    found: dict[tuple[str, str], list[float]] = {}
    for name, row, seconds in swept():
        found.setdefault((name, row.pass_), []).append(predict(row, device).time_s / seconds - 1)
    return found


def measured_table() -> list[str]:
    """Markdown: one line per implementation and pass."""
    lines = [
        "| implementation | pass | cells | median | 9 of 10 within | largest |",
        "|---|---|---|---|---|---|",
    ]
    for (name, pass_), errors in measured().items():
        sizes = sorted(map(abs, errors))
        shown = (statistics.median(sizes), sizes[int(0.9 * len(sizes))], sizes[-1])
        numbers = " | ".join(f"{100 * size:.1f}" for size in shown)
        lines.append(f"| {name} | {pass_} | {len(sizes)} | {numbers} |")
    return lines


def write() -> None:
    """Put the tables between their marks in docs/time-model.md."""
    path = ROOT / "docs" / "time-model.md"
    text = path.read_text(encoding="utf-8")
    for begin, lines in ((BEGIN, table()), (BEGIN_MEASURED, measured_table())):
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(END)
        text = "\n".join([f"{before}{begin}", "", *lines, "", f"{END}{after}"])
    path.write_text(text, encoding="utf-8")


SWEPT = {"bundled": "flash", "naive": "naive"}
"""Families that are fitted to the sweep, and the implementation whose cells are theirs."""

Number = tuple[Estimate, Device, float]


def numbers(family: str) -> list[Number]:
    """(estimate, card, seconds) of every number that the family is fitted to, published or swept."""
    if family in SWEPT:
        card = find("h100-sxm")
        return [(row, card, seconds) for name, row, seconds in swept() if name == SWEPT[family]]
    return [
        (row, find(series.device), seconds)
        for series in SERIES
        if series.family == family
        for row, seconds in cells(series)
    ]


def can_fit(family: str) -> bool:
    """Whether --fit knows its numbers and constants; shares of the bandwidth, as eager's, it does not."""
    known = constants.FAMILIES[family]
    return family in SWEPT or (bool(known.rates) and any(row.family == family for row in SERIES))


def fit(family: str, hold_out: bool = False) -> tuple[float, float]:
    """Least squares in log time over the family's numbers; prints the constants and leaves them in use.

    hold_out: over those without a mask only; prints how well the others are then predicted. Returns the
    rms in percent of the constants that were in use, and of those found.
    """
    every = numbers(family)
    data = [number for number in every if not (hold_out and number[0].problem.causal)]
    known = constants.FAMILIES[family]
    used = [key for key in known.rates if any(_uses(number, key) for number in data)]
    free = [
        (key, name)
        for key in used
        for name in ("mma", "softmax", "fixed_clocks")
        if not _shared(used, key, name) and (family, key, name) not in FIXED
    ]

    def tried(logs: Sequence[float]) -> Family:
        if not free:
            return known._replace(mask=min(math.exp(logs[0]), 1.0))
        return known._replace(rates=_rates(known.rates, free, logs))

    def loss(logs: Sequence[float]) -> float:
        constants.FAMILIES[family] = tried(logs)
        return sum(math.log1p(_error(number, family)) ** 2 for number in data)

    start = [math.log(max(getattr(known.rates[key], name), 0.05)) for key, name in free]
    start = start or [math.log(known.mask)]

    def rms(logs: Sequence[float]) -> float:
        return 100 * math.sqrt(loss(logs) / len(data))

    now = rms(start)
    best = minimise(loss, start)
    for key in used:
        rates = tried(best).rates[key]
        print(family, *key, f"mma {rates.mma:.3f} softmax {rates.softmax:.3f} fixed {rates.fixed_clocks:.0f}")
    if not free:
        print(family, f"mask {tried(best).mask:.3f}")
    least = rms(best)  # leaves the best in use
    print(f"rms {least:.2f} %; of the constants in use {now:.2f} %")
    held = [number for number in every if number not in data]
    if held:
        _print_held(family, held)
    return now, least


def _print_held(family: str, held: list[Number]) -> None:
    """How well numbers that the fit has not seen are predicted."""
    errors = [(abs(_error(number, family)), number[0].problem.seqlen_q) for number in held]
    median, most = statistics.median(e for e, _ in errors), max(errors)[0]
    most_long = max(e for e, n in errors if n >= 1024)
    print(
        f"causal, held out: median {100 * median:.1f} %, largest {100 * most:.1f} %,"
        f" at N >= 1k {100 * most_long:.1f} %"
    )


def _error(number: Number, family: str) -> float:
    row, device, seconds = number
    return predict(row, device, family).time_s / seconds - 1


FIXED = {("fa2", ("fwd", "sm80"), "mma")}
"""Not fitted here: the source gives it (the forward's own figure on an A100)."""


def _uses(number: Number, key: tuple[str, str]) -> bool:
    return key[0] in number[0].pass_.split("+") and key[1] == number[1].arch


def _shared(used: list[tuple[str, str]], key: tuple[str, str], name: str) -> bool:
    """Clocks and exponentials are the code's, not the card's: fitted once for all generations."""
    first = next(other for other in used if other[0] == key[0])
    return name != "mma" and key != first


def _rates(
    known: dict[tuple[str, str], Rates], free: list[tuple[tuple[str, str], str]], logs: Sequence[float]
) -> dict[tuple[str, str], Rates]:
    rates = dict(known)
    for (key, name), log in zip(free, logs, strict=True):
        value = min(math.exp(log), 1.0) if name == "mma" else math.exp(log)
        for other in [key] if name == "mma" else [k for k in rates if k[0] == key[0]]:
            rates[other] = rates[other]._replace(**{name: value})
    return rates


def minimise(loss: Callable[[Sequence[float]], float], start: list[float], rounds: int = 600) -> list[float]:
    """Nelder-Mead. Source: Nelder and Mead, A simplex method for function minimization, 1965."""
    n = len(start)
    points = [(loss(start), start)]
    for i in range(n):
        moved = [x + (0.3 if i == j else 0.0) for j, x in enumerate(start)]
        points.append((loss(moved), moved))
    for _ in range(rounds):
        points.sort(key=lambda point: point[0])
        centre = [sum(point[1][i] for point in points[:-1]) / n for i in range(n)]

        def along(step: float) -> tuple[float, list[float]]:
            moved = [c + step * (c - w) for c, w in zip(centre, points[-1][1], strict=True)]  # noqa: B023
            return loss(moved), moved

        reflected = along(1.0)
        if reflected[0] < points[0][0]:
            points[-1] = min(reflected, along(2.0))
        elif reflected[0] < points[-2][0]:
            points[-1] = reflected
        else:
            inside = along(-0.5)
            if inside[0] < points[-1][0]:
                points[-1] = inside
            else:
                best = points[0][1]
                halved = [[(a + b) / 2 for a, b in zip(best, point[1], strict=True)] for point in points[1:]]
                points[1:] = [(loss(point), point) for point in halved]
    return min(points)[1]


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the residuals into docs/time-model.md")
    able = [name for name in constants.FAMILIES if can_fit(name)]
    parser.add_argument("--fit", choices=able, help="fit a family's constants")
    parser.add_argument("--hold-out", action="store_true", help="keep causal rows out of the fit")
    chosen = parser.parse_args()
    if chosen.fit:
        fit(chosen.fit, chosen.hold_out)
    elif chosen.write:
        write()
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
