"""Least squares in log time of a family's constants over its numbers, published or measured.

``python tools/time_model.py --fit FAMILY`` calls it. A family's constants are few (three per kernel), the
same for every shape, mask and length; --hold-out says how well they predict numbers that they have not seen.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from typing import NamedTuple

import measured_times
from published import SERIES, Series

from flashbench._iomodel import constants
from flashbench._iomodel.constants import Family, Rates
from flashbench._iomodel.setting import setting
from flashbench._iomodel.time import KERNELS, predict
from flashbench.devices import Device, find
from flashbench.iomodel import Estimate, estimate

FITTED_ON = "h100-sxm"
"""The folder of the sweep that families are fitted to; those of other cards are predicted unseen."""

SWEPT = {"bundled": "flash-v2", "naive": "naive"}
"""Families that are fitted to that sweep, and the kernels whose cells are theirs."""

CONSTANTS = ("mma", "softmax", "fixed_clocks")
Key = tuple[str, str]
LOAD: Key = ("", "")
"""Stands among a family's constants for the share that sustained load leaves of the products' rate."""
_loads = {"sustained": measured_times.SUSTAINED}

GROUPS: dict[str, Callable[[Number], object]] = {
    "causal": lambda number: number.row.problem.causal,
    "length": lambda number: number.row.problem.seqlen_q,
    "head-dim": lambda number: number.row.problem.head_dim,
}
"""What --hold-out leaves out: the causal rows, or one length or head dim after the other."""


class Number(NamedTuple):
    """An estimate, its card, the seconds that were published or measured, and whether under load."""

    row: Estimate
    card: Device
    seconds: float
    loaded: measured_times.Time | None = None


def cells(series: Series) -> list[tuple[Estimate, float]]:
    """(estimate, published seconds) of every number of a row."""
    device = find(series.device)
    return [
        (estimate(series.model, problem, series.pass_, tiles=series.tiles, device=device), seconds)
        for problem, seconds in series.cells()
    ]


def numbers(family: str) -> list[Number]:
    """Every number that the family is fitted to."""
    if family in SWEPT:
        sweep = measured_times.sweeps()[FITTED_ON]
        return [_number(time) for time in sweep if time.kernels == SWEPT[family]]
    if family in MEASURED:
        measured = (time for times in MEASURED[family] for time in times())
        return [_number(time) for time in measured if measured_times.of_today(time)]
    return [
        Number(row, find(series.device), seconds)
        for series in SERIES
        if series.family == family
        for row, seconds in cells(series)
    ]


MEASURED = {"gluon": (measured_times.counted, measured_times.tuned), "gluon-fp8": (measured_times.tuned_fp8,)}
"""Families that are fitted to flash-v3's own measurements, of the kernels that its tables have today."""


def _number(time: measured_times.Time) -> Number:
    return Number(time.row, time.card, time.seconds, time if time.sustained else None)


def can_fit(family: str) -> bool:
    """Whether --fit knows its numbers and constants; shares of the bandwidth, as eager's, it does not."""
    known = constants.FAMILIES[family]
    published = bool(known.rates) and any(row.family == family for row in SERIES)
    return family in SWEPT or family in MEASURED or published


def fit(family: str, hold_out: str = "") -> tuple[float, float]:
    """Least squares in log time over the family's numbers; prints the constants and leaves them in use.

    hold_out: one of GROUPS; prints how well those left out are then predicted. Returns the rms in percent of
    the constants that were in use, and of those found from all that were not left out last.
    """
    every = numbers(family)
    known = constants.FAMILIES[family]
    if not hold_out:
        return _fit(family, every)
    of = GROUPS[hold_out]
    left_out = [True] if hold_out == "causal" else sorted({of(number) for number in every})  # type: ignore[type-var]
    errors, found = [], (0.0, 0.0)
    for group in left_out:
        constants.FAMILIES[family] = known
        data = [number for number in every if of(number) != group]
        seen = {kernels(number, family) for number in data}
        held = [number for number in every if of(number) == group and kernels(number, family) in seen]
        found = _fit(family, data)
        errors += [(abs(error(number, family)), number.row.problem.seqlen_q) for number in held]
    _print_held(hold_out, errors)
    return found


def _fit(family: str, data: list[Number]) -> tuple[float, float]:
    known, load = constants.FAMILIES[family], _loads["sustained"]
    used = [key for key in known.rates if any(_uses(number, family, key) for number in data)]
    free = [
        (key, name)
        for key in used
        for name in CONSTANTS
        if not _shared(used, key, name) and (family, key, name) not in FIXED
    ]
    free += [(LOAD, "share")] if any(number.loaded for number in data) else []

    def tried(logs: Sequence[float]) -> Family:
        if not free:
            return known._replace(paces={**known.paces, **dict.fromkeys(_MASKS, _pace(logs[0]))})
        if free[-1][0] == LOAD:
            _loads["sustained"] = _share(logs[-1])
        return known._replace(rates=_rates(known.rates, free, logs))

    def loss(logs: Sequence[float]) -> float:
        constants.FAMILIES[family] = tried(logs)
        return sum(math.log1p(error(number, family)) ** 2 for number in data)

    start = [
        math.log(load if key == LOAD else max(getattr(known.rates[key], name), 0.05)) for key, name in free
    ]
    start = start or [math.log(known.paces[_MASKS[0]][0][1])]

    def rms(logs: Sequence[float]) -> float:
        return 100 * math.sqrt(loss(logs) / len(data))

    now = rms(start)
    best = minimise(loss, start)
    for key in used:
        rates = tried(best).rates[key]
        print(family, *key, f"mma {rates.mma:.3f} softmax {rates.softmax:.3f} fixed {rates.fixed_clocks:.0f}")
    if not free:
        print(family, f"mask {tried(best).paces[_MASKS[0]][0][1]:.2f} bytes per clock and SM")
    elif free[-1][0] == LOAD:
        print(family, f"products under sustained load {_loads['sustained']:.3f}")
    least = rms(best)  # leaves the best in use
    print(f"rms {least:.2f} %; of the constants in use {now:.2f} %")
    return now, least


_MASKS = (("mask", "sm90"), ("mask backward: fill", "sm90"))
"""What of ``naive`` is fitted: the pace of the op that applies a mask."""


def _pace(log: float) -> constants.Pace:
    return ((math.inf, math.exp(log)),)


def reset_load() -> None:
    """Take back what a fit made of the share that sustained load leaves."""
    _loads["sustained"] = measured_times.SUSTAINED


def _print_held(hold_out: str, errors: list[tuple[float, int]]) -> None:
    """How well numbers that the fit has not seen are predicted."""
    median, most = statistics.median(e for e, _ in errors), max(errors)[0]
    most_long = max(e for e, n in errors if n >= 1024)
    print(
        f"{hold_out}, held out: median {100 * median:.1f} %, largest {100 * most:.1f} %,"
        f" at N >= 1k {100 * most_long:.1f} %"
    )


def error(number: Number, family: str) -> float:
    """Predicted over measured time, less 1."""
    card = number.card if number.loaded is None else number.loaded.on(_loads["sustained"])
    return predict(number.row, card, family).time_s / number.seconds - 1


FIXED = {
    ("fa2", ("fwd", "sm80"), "mma"),
    ("gluon", ("apart", "sm90"), "softmax"),
    ("gluon-fp8", ("fwd", "sm90"), "mma"),
    ("gluon-fp8", ("sums", "sm90"), "mma"),
}
"""Not fitted here: the source gives it (the forward's own figure on an A100), or nothing tells it from the
others: one head dim was timed, or exponentials hide the products."""


def kernels(number: Number, family: str) -> frozenset[str]:
    """The kernels whose constants it takes, as the family's rates name them."""
    row = number.row
    on = setting(number.card, row.model, family, row.problem.dtype)
    return frozenset(on.kernel(step) for step in row.steps if step.name in KERNELS)


def _uses(number: Number, family: str, key: Key) -> bool:
    return key[0] in kernels(number, family) and key[1] == number.card.arch


def _shared(used: list[Key], key: Key, name: str) -> bool:
    """Clocks and exponentials are the code's, not the card's: fitted once for all generations."""
    first = next(other for other in used if other[0] == key[0])
    return name != "mma" and key != first


def _rates(known: dict[Key, Rates], free: list[tuple[Key, str]], logs: Sequence[float]) -> dict[Key, Rates]:
    rates = dict(known)
    for (key, name), log in zip(free, logs, strict=True):
        value = _share(log) if name == "mma" else math.exp(log)
        same = [] if key == LOAD else [key] if name == "mma" else [k for k in rates if k[0] == key[0]]
        for other in same:
            rates[other] = rates[other]._replace(**{name: value})
    return rates


def _share(log: float) -> float:
    """At most 1: folded back there, as a loss that is flat beyond it would hold a simplex that came there."""
    return math.exp(-abs(log))


SETTLED = 1e-8
"""Of the least loss, what the corners of a simplex that has come to rest differ by."""


def minimise(loss: Callable[[Sequence[float]], float], start: list[float], rounds: int = 600) -> list[float]:
    """Nelder-Mead. Source: Nelder and Mead, A simplex method for function minimization, 1965."""
    n = len(start)
    points = [(loss(start), start)]
    for i in range(n):
        moved = [x + (0.3 if i == j else 0.0) for j, x in enumerate(start)]
        points.append((loss(moved), moved))
    for _ in range(rounds):
        points.sort(key=lambda point: point[0])
        if points[-1][0] - points[0][0] < SETTLED * points[0][0]:
            break
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
