"""Did it get worse? Two sides of runs, cell by cell: ratio, interval, verdict and the reason for it.

    comparison = compare(load_side("base/*.jsonl"), load_side("new.jsonl"), Rules())
    comparison.cells[0].verdict  # "slower"

The spread of samples within one run says little about the next run, so it is not the yardstick: the
spread between runs is, measured where a side has several and assumed (``Rules.noise``) where it has one.
"""

from flashbench.judge.sides import Side, load_side, unlike
from flashbench.judge.statistics import Ratio, false_discoveries, ratio_of
from flashbench.judge.verdicts import Comparison, Judged, Rules, compare

__all__ = ["Comparison", "Judged", "Ratio", "Rules", "Side", "compare", "false_discoveries", "load_side",
           "ratio_of", "unlike"]  # fmt: skip
