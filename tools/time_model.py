"""Hold the time model against published tables and measured times: its residuals, and the fit of constants.

python tools/time_model.py             print the residuals
python tools/time_model.py --write     put them into docs/time-model.md
python tools/time_model.py --fit fa3   fit a family's constants to its published tables;
                                       bundled, naive: to the sweep in reports/h100-sxm
                                       gluon, gluon-fp8: to what was measured of flash-v3 there
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tools")]

import marked  # noqa: E402
import measured_times  # noqa: E402
import time_fit  # noqa: E402
from measured_times import Time  # noqa: E402
from published import SEQLENS, SERIES, Series  # noqa: E402
from time_fit import GROUPS, can_fit, cells, fit, kernels, numbers  # noqa: E402

from flashbench._iomodel import constants  # noqa: E402
from flashbench._iomodel.time import predict  # noqa: E402
from flashbench.devices import find  # noqa: E402

BEGIN_MEASURED = "<!-- measured: tools/time_model.py --write -->"
BEGIN_V3 = "<!-- flash-v3: tools/time_model.py --write -->"
BEGIN, END = "<!-- residuals: tools/time_model.py --write -->", "<!-- end of residuals -->"


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


def error(time: Time) -> float:
    """Predicted over measured time, less 1, by the constants of the kernels that ran."""
    return predict(time.row, time.on()).time_s / time.seconds - 1


Key = tuple[str, ...]


def swept() -> Iterator[tuple[Key, Time]]:
    """Every committed sweep's times, by (card's folder, implementation, whose kernels, pass, head dim)."""
    for card, times in measured_times.sweeps().items():
        for time in times:
            yield (card, time.name, time.kernels, time.row.pass_, str(time.row.problem.head_dim)), time


OF_V3 = {
    "counted, bf16": measured_times.counted,
    "tuning, fp16, sustained load": measured_times.tuned,
    "beside fp8, bf16: not fitted": measured_times.beside,
    "fp8 (`flash-v3-fp8`)": measured_times.tuned_fp8,
}
"""What was measured of flash-v3 outside a sweep, on an H100 SXM; tuned forwards, and fp8 at head dim 128 from
4k: an H200."""


def of_v3() -> Iterator[tuple[Key, Time]]:
    """Those, by (what, pass, head dim, mask)."""
    for what, times in OF_V3.items():
        for time in times():
            p = time.row.problem
            yield (what, time.row.pass_, str(p.head_dim), _mask(p.causal)), time


def measured() -> dict[Key, list[float]]:
    """Errors of every sweep's times that count, by their keys."""
    return _grouped(swept())


def measured_v3() -> dict[Key, list[float]]:
    """Errors of what was measured of flash-v3 outside a sweep and counts, by its keys."""
    return _grouped(of_v3())


def left_out(times: Iterable[tuple[Key, Time]]) -> Iterator[str]:
    """Lines: how many of them do not count, where ``of_today`` says so, of how many, and what ran there."""
    groups: dict[tuple[str, str, str], list[Time]] = {}
    for key, time in times:
        groups.setdefault((key[0], time.name, time.row.pass_), []).append(time)
    for (where, name, pass_), every in groups.items():
        forms = Counter(
            f"`{form}`" if (form := time.config.get("fwd_cut")) else "no form named"
            for time in every
            if not measured_times.of_today(time)
        )
        if forms:
            told = ", ".join(f"{form} {count}" for form, count in forms.items())
            yield f"- {where}, `{name}`, {pass_}: {forms.total()} of {len(every)} ({told})"


def _notes(times: Iterable[tuple[Key, Time]]) -> list[str]:
    lines = list(left_out(times))
    head = "Left out, as another kernel ran there than `flash-v3`'s tables have for the problem today:"
    return ["", head, "", *lines] if lines else []


def fitted(family: str) -> str:
    """Line: the numbers that a family is fitted to, and what its constants in use leave, also by kernel."""
    groups: dict[str, list[float]] = {}
    for number in numbers(family):
        kernel = "+".join(sorted(kernels(number, family)))
        groups.setdefault(kernel, []).append(time_fit.error(number, family))
    every = [error for errors in groups.values() for error in errors]
    apart = "; ".join(f"`{kernel}` {len(errors)}: {_left(errors)}" for kernel, errors in groups.items())
    return f"`{family}` is fitted to {len(every)} numbers: rms {_left(every)} ({apart})."


def _left(errors: Sequence[float]) -> str:
    rms = 100 * math.sqrt(statistics.fmean(math.log1p(error) ** 2 for error in errors))
    return f"{rms:.1f} %, at most {100 * max(map(abs, errors)):.1f} %"


def _mask(causal: bool) -> str:
    return "causal" if causal else "none"


def _grouped(times: Iterable[tuple[Key, Time]]) -> dict[Key, list[float]]:
    found: dict[Key, list[float]] = {}
    for key, time in times:
        if measured_times.of_today(time):
            found.setdefault(key, []).append(error(time))
    return found


def _numbers(errors: Sequence[float]) -> Iterator[str]:
    """Cells, and of |error| the median, what 9 of 10 are within, and the largest."""
    sizes = sorted(map(abs, errors))
    yield str(len(sizes))
    for size in (statistics.median(sizes), sizes[int(0.9 * len(sizes))], sizes[-1]):
        yield f"{100 * size:.1f}"


def _lines(heads: Sequence[str], groups: dict[Key, list[float]]) -> list[str]:
    columns = [*heads, "cells", "median", "9 of 10 within", "largest"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return lines + [f"| {' | '.join([*key, *_numbers(errors)])} |" for key, errors in groups.items()]


def measured_table() -> list[str]:
    """Markdown: one line per card, implementation, pass and head dim, and what was left out."""
    times = list(swept())
    return _lines(["card", "implementation", "kernels", "pass", "d"], _grouped(times)) + _notes(times)


def v3_table() -> list[str]:
    """Markdown: the same of what was measured of flash-v3 beside the sweeps, and how well its fits do."""
    times = list(of_v3())
    rows = _lines(["times", "pass", "d", "mask"], _grouped(times))
    return [*rows, *_notes(times), "", " ".join(map(fitted, time_fit.MEASURED))]


def write() -> None:
    """Put the tables between their marks in docs/time-model.md."""
    path = ROOT / "docs" / "time-model.md"
    for begin, lines in ((BEGIN, table()), (BEGIN_MEASURED, measured_table()), (BEGIN_V3, v3_table())):
        marked.put(path, "\n".join([begin, "", *lines, "", END]))


def main() -> None:
    """Parse and do."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--write", action="store_true", help="put the residuals into docs/time-model.md")
    able = [name for name in constants.FAMILIES if can_fit(name)]
    parser.add_argument("--fit", choices=able, help="fit a family's constants")
    parser.add_argument(
        "--hold-out", choices=list(GROUPS), nargs="?", const="causal", default="",
        help="keep the causal rows out of the fit, or one length or head dim after the other",
    )  # fmt: skip
    chosen = parser.parse_args()
    if chosen.fit:
        fit(chosen.fit, chosen.hold_out)
    elif chosen.write:
        write()
    else:
        print("\n".join(table()))


if __name__ == "__main__":
    main()
