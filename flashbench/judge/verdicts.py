"""Cell by cell: slower, faster, same, undecided or incomparable, each with a reason in words."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from flashbench.judge import groups, sides
from flashbench.judge.fdr import false_discoveries
from flashbench.judge.groups import Group
from flashbench.judge.measures import Measure
from flashbench.judge.sides import Measured, Side
from flashbench.judge.spread import NONE, Parts, Repeats, repeats, steadied
from flashbench.judge.statistics import Medians, Ratio, medians, ratio_of

VERDICTS = ("slower", "failed", "missing", "incomparable", "undecided", "faster", "new", "same")
"""Worst first. slower and faster stand for worse and better, whatever the measure."""
MUCH = 1.5
"""So many times better is no tuning any more: the reason asks to check it."""
BAD = ("oom", "wrong", "failed", "timeout")
"""Statuses of a cell that was tried: where the base side has a value, the new side failed."""
FAULTS = ("wrong", "failed", "timeout")
"""Those that are no cell's nature, as not to fit in memory is: failed where neither side has a value."""

RATE = 0.01
"""Share of the verdicts that may be chance."""
CHANCE = "chance alone may do that; take more runs"


@dataclass(frozen=True, kw_only=True)
class Rules:
    """When a difference counts; all shares are relative.

    warn: below it nothing changed. fail: a worse cell above it fails the gate. noise: spread between runs
    where nothing was repeated. profile: what runs of this device were seen to do. rate: share of the
    verdicts that may be chance. floor: smallest absolute difference that counts, in the measure's unit;
    None for its own. allowed: conditions that may differ, and ``suspect``."""

    warn: float | None = None
    fail: float | None = None
    noise: float = 0.01
    profile: Repeats = field(default_factory=Repeats)
    rate: float = RATE
    floor: float | None = None
    allowed: frozenset[str] = frozenset()

    def of(self, measure: Measure) -> tuple[float, float, float]:
        """Warn, fail and floor of a measure; what repeats exactly has 0 of each by default.

        A gate below the usual warn lowers it, and a warn above the usual gate raises that.
        """
        usual_warn, usual_fail = (0.0, 0.0) if measure.repeats == "exact" else (0.02, 0.05)
        gate = usual_warn if self.fail is None else self.fail
        warn = min(usual_warn, gate) if self.warn is None else self.warn
        fail = max(usual_fail, warn) if self.fail is None else self.fail
        return warn, fail, measure.floor if self.floor is None else self.floor


@dataclass(frozen=True, kw_only=True)
class Judged:
    """One cell. change: how much worse, relative (negative: better), None where it cannot be told.

    runs: of the base and the new side. groups: what the cell can be put together by.
    """

    cell: str
    verdict: str
    reason: str
    base: float | None = None
    new: float | None = None
    ratio: Ratio | None = None
    change: float | None = None
    fails: bool = False
    runs: tuple[int, int] = (0, 0)
    groups: Mapping[str, str] | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All cells by one measure, worst first, and the geometric mean of new over base by group, all of them
    first."""

    measure: Measure
    cells: tuple[Judged, ...]
    groups: tuple[Group, ...]
    spread: Repeats

    def count(self, verdict: str) -> int:
        """How many cells have that verdict."""
        return sum(cell.verdict == verdict for cell in self.cells)

    @property
    def compared(self) -> bool:
        """Whether any cell has a value on both sides that can be compared."""
        return any(
            cell.verdict != "incomparable" and cell.base is not None and cell.new is not None
            for cell in self.cells
        )

    @property
    def failing(self) -> tuple[Judged, ...]:
        """The cells that fail the gate."""
        return tuple(cell for cell in self.cells if cell.fails)


def compare(
    base: Side, new: Side, measure: Measure, rules: Rules, by: Sequence[str] = ("implementation", "pass")
) -> Comparison:
    """Judge every cell of either side that can have the measure, but for those that both sides measured
    without it."""
    keys = [
        key
        for key in dict.fromkeys([*base.keys, *new.keys])
        if _concerns(base.of(key), new.of(key), measure.name)
    ]
    judged: dict[str, Judged] = {}
    sampled: dict[str, tuple[Medians, Medians]] = {}
    for key in keys:
        found = _pair(key, base.of(key), new.of(key), measure, rules)
        if isinstance(found, Judged):
            judged[key] = found
        else:
            sampled[key] = found
    varies = measure.repeats == "varies"
    own = seen((base, new), measure.name, list(sampled)) if varies else Repeats()
    known = own.joined(rules.profile)
    spreads = steadied(known, list(sampled), rules.noise)
    for key, pair in sampled.items():
        judged[key] = _judge(key, pair, spreads[key] if varies else Parts(NONE), measure, rules)
    cells = _without_chance([_placed(judged[key], base, new) for key in keys], rules)
    order = {name: rank for rank, name in enumerate(VERDICTS)}
    cells.sort(key=lambda cell: (order[cell.verdict], not cell.fails, -(cell.change or 0.0)))
    means = tuple(
        _summed(mean, measure, rules)
        for mean in groups.means(cells, sampled, rules.profile, rules.noise if varies else 0.0, by)
    )
    return Comparison(measure=measure, cells=tuple(cells), groups=means, spread=own)


def _summed(mean: Group, measure: Measure, rules: Rules) -> Group:
    """With the verdict on its mean."""
    warn, fail, _ = rules.of(measure)
    verdict, reason, _ = weigh(mean.ratio, measure.better == "higher", warn, fail, rules.rate)
    return replace(mean, verdict=verdict, reason=reason)


def _concerns(base: list[Measured], new: list[Measured], measure: str) -> bool:
    """Whether a cell has something to say of a measure."""
    cells = [*base, *new]
    if not any(cell.has(measure) for cell in cells):
        return False
    one_side = not base or not new
    return one_side or any(not cell.ok or cell.samples(measure) for cell in cells)


def _placed(cell: Judged, base: Side, new: Side) -> Judged:
    found = base.of(cell.cell), new.of(cell.cell)
    return replace(cell, runs=(len(found[0]), len(found[1])), groups=(found[0] or found[1])[0].groups)


def seen(sides_: Sequence[Side], measure: str, keys: Sequence[str] | None = None) -> Repeats:
    """What the repeated runs of each side say of their spread; keys: of which cells, else of all."""

    def log(cell: Measured | None) -> float | None:
        found = cell.samples(measure) if cell else ()
        middle = statistics.median(found) if found else 0.0
        return math.log(middle) if math.isfinite(middle) and middle > 0 else None

    keys = list(dict.fromkeys(key for side in sides_ for key in side.keys)) if keys is None else keys
    return repeats({
        key: [[log(run.cells.get(key)) for run in side.runs] for side in sides_] for key in keys
    })  # fmt: skip


def _pair(
    key: str, base: list[Measured], new: list[Measured], measure: Measure, rules: Rules
) -> Judged | tuple[Medians, Medians]:
    """Both sides' medians, or the verdict where there is nothing to compare."""
    one, other = (
        [samples for cell in cells if (samples := list(cell.samples(measure.name)))] for cells in (base, new)
    )
    if not new:
        reason = "the new side does not have it"
        return Judged(cell=key, verdict="missing", reason=reason, base=_middle(one))
    if not base:
        return Judged(cell=key, verdict="new", reason="the base side does not have it", new=_middle(other))
    if not one or not other:
        return _without_value(key, (base, one), (new, other), measure)
    if measure.repeats == "exact":
        return _exact(
            key, (one, other), measure, rules, next((cell.reason for cell in new if cell.reason), "")
        )
    before, after = _middle(one), _middle(other)
    bad = [name for name, runs in (("base", one), ("new", other)) if not _positive(runs)]
    reason = sides.cell_unlike(base, new, rules.allowed)
    if bad:
        reason = f"{measure.name} is zero, negative or no number on the {' and the '.join(bad)} side"
    elif not reason and "suspect" not in rules.allowed and measure.name in ("time_s", "flops_per_s"):
        marked = [
            n for n, cells in (("base", base), ("new", new)) if any("suspect" in c.flags for c in cells)
        ]
        if marked:
            reason = f"suspect on the {' and the '.join(marked)} side: the time is not to be believed"
    if reason:
        return Judged(cell=key, verdict="incomparable", reason=reason, base=before, new=after)
    return medians(one), medians(other)


def _positive(runs: list[list[float]]) -> bool:
    return all(math.isfinite(value) and value > 0 for run in runs for value in run)


def _without_value(
    key: str,
    base: tuple[list[Measured], list[list[float]]],
    new: tuple[list[Measured], list[list[float]]],
    measure: Measure,
) -> Judged:
    """A cell that one side, or both, could not measure."""
    (before, found), (after, other) = base, new

    def why(cells: list[Measured]) -> str:
        worst = next((cell for cell in cells if cell.status != "ok"), None)
        return f"{worst.status}: {worst.reason}".rstrip(": ") if worst else f"no {measure.name}"

    if found:
        verdict = "failed" if any(cell.status in BAD for cell in after) else "missing"
        reason = f"the new side has no value ({why(after)})"
        return Judged(cell=key, verdict=verdict, reason=reason, base=_middle(found))
    if other:
        reason = f"the base side has no value ({why(before)})"
        return Judged(cell=key, verdict="new", reason=reason, new=_middle(other))
    at_fault = [cell for cell in (*after, *before) if cell.status in FAULTS]
    reason = f"neither side has a value ({why(at_fault or after)})"
    return Judged(cell=key, verdict="failed" if at_fault else "same", reason=reason)


def _exact(
    key: str, sides_: tuple[list[list[float]], list[list[float]]], measure: Measure, rules: Rules, said: str
) -> Judged:
    """What repeats exactly: any difference counts, and 0 is a value. said: what the new side says of it."""
    one, other = ({value for run in runs for value in run} for runs in sides_)
    if len(one) > 1 or len(other) > 1:
        reason = f"{measure.name} repeats exactly, and the runs of one side differ"
        return Judged(cell=key, verdict="incomparable", reason=reason)
    before, after = one.pop(), other.pop()
    warn, fail, floor = rules.of(measure)
    worse = after - before if measure.better != "higher" else before - after
    worse = abs(worse) if measure.better == "same" else worse
    change = worse / abs(before) if before else math.copysign(math.inf, worse) if worse else 0.0
    least = min(abs(before), abs(after))  # of the smaller, whichever side it is on
    share = abs(worse) / least if least else math.inf
    reason = f"{before:.15g}, now {after:.15g} {measure.unit}".rstrip()
    if worse == 0 or abs(worse) < floor or share <= warn:
        verdict, reason = "same", "equal" if worse == 0 else reason
    else:
        verdict = "slower" if worse > 0 else "faster"
    if verdict == "slower" and measure.better == "same":
        reason += "; it must not change unseen"
    if verdict == "slower" and said:
        reason += f" ({said})"
    shown = change if math.isfinite(change) else None
    return Judged(
        cell=key, verdict=verdict, reason=reason, base=before, new=after, change=shown,
        fails=verdict == "slower" and change > fail,
    )  # fmt: skip


def _judge(key: str, pair: tuple[Medians, Medians], parts: Parts, measure: Measure, rules: Rules) -> Judged:
    base, new = (math.exp(side.log) for side in pair)
    ratio = ratio_of(*pair, *parts)
    warn, fail, floor = rules.of(measure)
    verdict, reason, change = weigh(ratio, measure.better == "higher", warn, fail, rules.rate)
    if abs(new - base) < floor and (verdict != "undecided" or _reaches(pair, ratio) < floor):
        verdict, reason = "same", f"{reason.split(':')[0]}; less than {floor:g} {measure.unit} apart"
    if verdict == "faster" and max(ratio.value, 1 / ratio.value) > MUCH:
        reason = f"{reason}; so much better: check that it still does the same work"
    return Judged(
        cell=key, verdict=verdict, reason=reason, base=base, new=new, ratio=ratio, change=change,
        fails=verdict == "slower" and change > fail,
    )  # fmt: skip


def _reaches(pair: tuple[Medians, Medians], ratio: Ratio) -> float:
    """How far apart the sides may be by either end of the interval, in the measure's unit.

    A ratio r of sides whose geometric mean is g is of values g·√r and g/√r, so that swapped sides are as far
    apart.
    """
    middle = math.exp(sum(side.log for side in pair) / 2)
    return max(abs(2 * middle * math.sinh(math.log(end) / 2)) for end in (ratio.low, ratio.high))


def weigh(ratio: Ratio, higher: bool, warn: float, fail: float, rate: float = RATE) -> tuple[str, str, float]:
    """Verdict, reason and how much worse (relative) of a ratio, where ``higher`` values are better.

    rate: chance of a verdict where nothing changed, below what a 95 % interval that holds no 1 leaves.

    Swapping the sides turns slower into faster: the thresholds are of the larger over the smaller.
    """
    sign = -1 if higher else 1
    change = sign * (ratio.value - 1)
    least, most = sorted(sign * (bound - 1) for bound in (ratio.low, ratio.high))
    log, low, high = (sign * math.log(one) for one in (ratio.value, ratio.low, ratio.high))
    low, high = min(low, high), max(low, high)
    said = f"{change:+.1%}, 95 % between {least:+.1%} and {most:+.1%}"
    trouble = f" ({ratio.trouble})" if ratio.trouble else ""
    if abs(log) <= math.log1p(warn):
        if max(high, -low) > math.log1p(fail):
            reason = f"{said}: it may be over {fail:.0%}; take more samples or runs{trouble}"
            return "undecided", reason, change
        return "same", said, change
    if low <= 0 <= high and ratio.error + ratio.extra > 0:
        reason = f"{said}: the interval holds no change; take more samples or runs{trouble}"
        return "undecided", reason, change
    if ratio.p > rate:
        return "undecided", f"{said}: {CHANCE}{trouble}", change
    return "slower" if log > 0 else "faster", said, change


def _without_chance(cells: list[Judged], rules: Rules) -> list[Judged]:
    """Verdicts that chance would give among so many cells become undecided."""
    tested = [(index, cell.ratio) for index, cell in enumerate(cells) if cell.ratio is not None]
    stands = false_discoveries([ratio.p for _, ratio in tested], rules.rate)
    for (index, _), stand in zip(tested, stands, strict=True):
        cell = cells[index]
        if cell.verdict in ("slower", "faster") and not stand:
            among = f"among {len(tested)} cells " if len(tested) > 1 else ""
            reason = f"{cell.reason}: {among}{CHANCE}"
            cells[index] = replace(cell, verdict="undecided", reason=reason, fails=False)
    return cells


def _middle(runs: list[list[float]]) -> float | None:
    """The median of the runs' medians, None where there is none that is a number."""
    middle = statistics.median(statistics.median(run) for run in runs) if runs else math.nan
    return middle if math.isfinite(middle) else None
