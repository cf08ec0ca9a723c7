"""What the raw samples of one run say: the error of their median, and what makes it no error bar.

Samples of one run follow each other, so they are resampled in blocks. Sources: Efron and Tibshirani, An
Introduction to the Bootstrap (1993), chapter 6 (error of a median); Politis and Romano, A circular
block-resampling procedure (1992).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from flashbench._profilers.steadiness import levels_apart, split

RESAMPLES = 400
FEW = 20
"""Fewer samples have no shape that can be told; how far they lie apart must do."""
PERMUTATIONS = 200
"""Drift is told by putting the samples in random order: a steady run passes for drifting once in so many."""
LEAST = 0.01
"""Smallest drift or range of few samples that counts, a share: timers count in steps."""
RARE = 0.03
"""Share of the samples from which a second level counts where the other side's median lies at it."""
SHAPES = {"drift": "drift apart by", "two levels": "have two levels apart by", "few": "are few and apart by"}
"""What can be wrong with the samples of a run, and how it is said."""


class Shape(NamedTuple):
    """Why a run's median may not be the cell's, by the names of SHAPES, and by how much, in logarithms.

    quarters: of a run that drifts, its quarters' medians over its own.
    """

    name: str
    size: float
    quarters: tuple[float, ...] = (0.0,) * 4


def median_error(samples: Sequence[float], found: Shape | None = None, seed: int = 0) -> float:
    """Standard error of the logarithm of the samples' median, by the bootstrap; 0 for one sample.

    found: their shape. A drift is not scatter: it is taken out, quarter by quarter.
    """
    if len(samples) < 2 or min(samples) == max(samples):
        return 0.0
    import numpy as np

    values = np.log(np.asarray(samples, dtype=float))
    if found is not None and found.name == "drift":
        quarters = np.array_split(values, 4)
        values = np.concatenate([one - shift for one, shift in zip(quarters, found.quarters, strict=True)])
    count = len(values)
    block = max(1, round(count ** (1 / 3)))
    starts = np.random.default_rng(seed).integers(0, count, (RESAMPLES, -(-count // block), 1))
    picks = ((starts + np.arange(block)) % count).reshape(RESAMPLES, -1)[:, :count]
    return float(_medians(values[picks]).std(ddof=1))


def shape(samples: Sequence[float]) -> Shape | None:
    """What is wrong with the samples, the larger of two; None where they scatter around one level."""
    if len(samples) < 2 or min(samples) == max(samples):
        return None
    import numpy as np

    values = np.log(np.asarray(samples, dtype=float))
    if len(values) < FEW:
        size = float(values.max() - values.min())
        return Shape("few", size) if size > LEAST else None
    found = [one for one in (_drift(values), _levels(values)) if one]
    return max(found, key=lambda one: one.size, default=None)


def rare_level(samples: Sequence[float]) -> float:
    """How far from the run's own level a second one lies, in logarithms, that few samples are at; else 0."""
    if len(samples) < FEW or min(samples) == max(samples):
        return 0.0
    import numpy as np

    return split(np.log(np.asarray(samples, dtype=float)), RARE) or 0.0


def _medians(rows: Any) -> Any:
    """The median of each row; a sort is faster than numpy's median on short rows."""
    import numpy as np

    count = rows.shape[1]
    ordered = np.sort(rows, axis=1)
    return (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2


def _drift(values: Any) -> Shape | None:
    """How far the medians of the run's quarters lie apart, where the order of the samples matters."""
    import numpy as np

    def quarters(rows: Any) -> Any:
        return np.stack([_medians(quarter) for quarter in np.array_split(rows, 4, axis=1)])

    found = quarters(values[None])[:, 0]
    size = float(np.ptp(found))
    if size <= LEAST:
        return None
    shuffled = np.random.default_rng(0).permuted(np.tile(values, (PERMUTATIONS, 1)), axis=1)
    if size <= np.ptp(quarters(shuffled), axis=0).max():
        return None
    return Shape("drift", size, tuple(float(one) for one in found - np.median(values)))


def _levels(values: Any) -> Shape | None:
    """How far two levels lie apart, where there are two."""
    gap = levels_apart(values)
    return None if gap is None else Shape("two levels", gap)
