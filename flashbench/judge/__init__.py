"""Did it get worse? Two sides of runs, cell by cell: ratio, interval, verdict and the reason for it.

    base, new = load_side("base/*.jsonl", "BASE"), load_side("new.jsonl", "NEW")
    compare(base, new, MEASURES["time_s"], Rules()).cells[0].verdict  # "slower"

The spread of samples within one run says little about the next run, so it is not the yardstick: the
spread between runs is, measured where a side has several, else as stored for the device, else assumed.
"""

from flashbench.judge.fdr import false_discoveries
from flashbench.judge.formats import load_run, load_side
from flashbench.judge.groups import Group
from flashbench.judge.measures import MEASURES, Measure
from flashbench.judge.sides import Measured, Run, Side, unlike
from flashbench.judge.spread import Parts, Repeats, Spread, repeats, steadied
from flashbench.judge.statistics import Medians, Ratio, medians, ratio_of
from flashbench.judge.verdicts import VERDICTS, Comparison, Judged, Rules, compare

__all__ = ["MEASURES", "VERDICTS", "Comparison", "Group", "Judged", "Measure", "Measured", "Medians", "Parts",
           "Ratio", "Repeats", "Rules", "Run", "Side", "Spread", "compare", "false_discoveries", "load_run",
           "load_side", "medians", "ratio_of", "repeats", "steadied", "unlike"]  # fmt: skip
