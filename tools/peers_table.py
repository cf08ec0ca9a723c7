"""How the bundled kernel stands to the fastest other, cell by cell, from a run of configs/h100-peers.toml.

python tools/peers_table.py RESULTS    print the table of a run
python tools/peers_table.py --write    put that of the committed one into docs/peers.md

FlashAttention-4's figure is the run's own where its cell has an ok row of fa4. Elsewhere it is scaled: its
share of cuDNN's in REFERENCE, one run of both on another H100 SXM, times cuDNN's here; such cells have a *.
Ratios are of TFLOP/s: above 1 the bundled kernel is faster. Each pass is held to its BARS. A file that is not
as it was written is refused, but for a last line that was torn off, which is said.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import marked  # noqa: E402

from flashbench import runfile  # noqa: E402
from flashbench.errors import EXIT_USAGE, FlashbenchError, UsageError  # noqa: E402
from flashbench.record import Record  # noqa: E402
from flashbench.runfile import RunFile  # noqa: E402

PAGE = ROOT / "docs" / "peers.md"
RESULTS = ROOT / "reports" / "h200-sxm" / "peers" / "results.jsonl"
"""The run that the docs show."""
BEGIN, END = "<!-- peers: tools/peers_table.py --write -->", "<!-- end of peers -->"
LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
OURS, CUDNN, FA4 = "flash", "sdpa-cudnn", "fa4"
OTHERS = CUDNN, "sdpa-flash", "fa3", FA4
SCALED = "fa4 (scaled)"
REFERENCE = {
    ("fwd", 64, False): ((383, 420, 471, 458, 455, 451), (324, 407, 489, 480, 537, 530)),
    ("fwd", 64, True): ((256, 331, 389, 402, 434, 477), (176, 256, 362, 426, 461, 493)),
    ("fwd", 128, False): ((499, 567, 610, 644, 611, 648), (439, 535, 586, 606, 629, 671)),
    ("fwd", 128, True): ((314, 419, 495, 544, 591, 597), (161, 380, 515, 565, 580, 603)),
    ("fwd", 256, False): ((495, 596, 653, 697, 673, 669), (477, 583, 651, 655, 668, 731)),
    ("fwd", 256, True): ((306, 435, 522, 575, 614, 636), (258, 411, 559, 614, 658, 669)),
    ("bwd", 64, False): ((248, 339, 412, 428, 441, 424), (306, 387, 449, 479, 512, 527)),
    ("bwd", 64, True): ((150, 230, 311, 370, 411, 420), (182, 291, 371, 443, 481, 517)),
    ("bwd", 128, False): ((294, 410, 486, 497, 515, 517), (312, 408, 511, 551, 593, 613)),
    ("bwd", 128, True): ((170, 284, 383, 449, 478, 503), (184, 315, 417, 489, 533, 602)),
    ("bwd", 256, False): ((215, 287, 334, 354, 349, 357), (216, 259, 292, 308, 310, 312)),
    ("bwd", 256, True): ((155, 235, 299, 331, 364, 362), (145, 210, 259, 291, 310, 317)),
}
"""TFLOP/s of (cuDNN 9.19, FlashAttention-4's Hopper kernel) over LENGTHS, fp16, by pass, head dim, causal."""
GRID = f"head dims 64, 128 and 256, {LENGTHS[0]} to {LENGTHS[-1]} queries in powers of two"


Key = tuple[str, int, bool, int]
"""Pass, head dim, causal and length."""


class Ratio(NamedTuple):
    """Of the bundled kernel to the fastest other. scaled: FlashAttention-4's figure is not this run's."""

    value: float
    fastest: str
    scaled: bool


class Bars(NamedTuple):
    """What the ratios of a pass have to reach: their geometric mean, and each from 1k on and below."""

    mean: float
    long: float = 0.0
    short: float = 0.0

    def of(self, seqlen: int) -> float:
        """The bar of a cell."""
        return self.long if seqlen >= 1024 else self.short


BARS = {"fwd": Bars(1.02, 0.95, 0.88), "bwd": Bars(0.92)}


def ratios(records: Iterable[Record]) -> dict[Key, Ratio]:
    """The ratio of each cell of the grid that has the bundled kernel's time and cuDNN's."""
    times: dict[Key, dict[str, float]] = {}
    for record in records:
        if record.status == "ok" and record.samples is not None:
            p = record.cell.problem
            key = record.cell.pass_, p.head_dim, p.causal, p.seqlen_q
            median = statistics.median(record.samples.samples_s)
            times.setdefault(key, {})[record.cell.implementation] = median
    found = {}
    for key, here in times.items():
        reference = REFERENCE.get(key[:3])
        if OURS not in here or CUDNN not in here or reference is None or key[3] not in LENGTHS:
            continue
        others = {name: here[name] for name in OTHERS if name in here}
        if FA4 not in here:
            cudnn, fa4 = (row[LENGTHS.index(key[3])] for row in reference)
            others[SCALED] = here[CUDNN] * cudnn / fa4
        fastest = min(others, key=others.__getitem__)
        found[key] = Ratio(others[fastest] / here[OURS], fastest, SCALED in others)
    return found


def render(found: Mapping[Key, Ratio]) -> str:
    """Markdown: a row per pass, head dim and mask; each pass beside its bars, and which figures it has."""
    lines = [
        "| pass | head dim | mask | " + " | ".join(map(str, LENGTHS)) + " |",
        "|---" * (3 + len(LENGTHS)) + "|",
    ]
    for of in REFERENCE:
        row = [found.get((*of, n)) for n in LENGTHS]
        if any(row):
            shown = " | ".join("–" if one is None else f"{one.value:.2f}{'*' * one.scaled}" for one in row)
            lines.append(f"| {of[0]} | {of[1]} | {_mask(of[2])} | {shown} |")
    for pass_, bars in BARS.items():
        of_pass = {key: ratio for key, ratio in found.items() if key[0] == pass_}
        if of_pass:
            lines += ["", *_verdict(pass_, bars, of_pass)]
    return "\n".join(lines)


def _verdict(pass_: str, bars: Bars, found: Mapping[Key, Ratio]) -> list[str]:
    scaled = sum(ratio.scaled for ratio in found.values())
    fastest = Counter(ratio.fastest for ratio in found.values()).most_common()
    mean = statistics.geometric_mean(ratio.value for ratio in found.values())
    least = min(found, key=lambda key: found[key].value)
    under = [key for key, ratio in found.items() if ratio.value < bars.of(key[3])]
    grid = len(LENGTHS) * sum(of[0] == pass_ for of in REFERENCE)
    reached = ("reached" if mean >= bars.mean else "missed") + _by_scaled(scaled, len(found))
    verdict = reached if len(found) == grid else f"not judged by {len(found)} of {grid}"
    lines = [
        f"{pass_}: geometric mean {mean:.4f} of {len(found)} cells, "
        f"least {_cells([least], found)}; bar {bars.mean}: {verdict}",
        f"- FlashAttention-4: measured in {len(found) - scaled} cells, scaled by cuDNN (*) in {scaled}",
        "- the fastest other: " + ", ".join(f"{name} in {count}" for name, count in fastest),
    ]
    if bars.long or bars.short:
        bar = f"{bars.long} from 1k on, {bars.short} below"
        lines.append(f"- cells under their bar ({bar}): {_cells(sorted(under), found) or 'none'}")
    return lines


def _by_scaled(scaled: int, cells: int) -> str:
    """What a verdict rests on that this run did not measure."""
    if not scaled:
        return ""
    return " by scaled figures" + f" in {scaled} of {cells}" * (scaled < cells)


def _cells(keys: Sequence[Key], found: Mapping[Key, Ratio]) -> str:
    return ", ".join(f"{found[key].value:.4f} (d={key[1]} {_mask(key[2])} at {key[3]})" for key in keys)


def _mask(causal: bool) -> str:
    return "causal" if causal else "full"


def untimed(records: Iterable[Record]) -> list[str]:
    """Rows that have no time, by implementation and status: what the table lacks, and where fa4 is scaled."""
    rows = Counter((r.cell.implementation, r.status) for r in records if r.status != "ok")
    return [f"- rows of {name} that are {status}: {count}" for (name, status), count in sorted(rows.items())]


def flagged(records: Iterable[Record]) -> str:
    """How many rows with a time have a flag, and how many have which; a row may have several."""
    timed = [r for r in records if r.status == "ok" and r.samples is not None]
    flags = Counter(flag for r in timed for flag in r.flags)
    some = sum(bool(r.flags) for r in timed)
    named = ", ".join(f"{count} {flag}" for flag, count in sorted(flags.items()))
    return f"- rows with a time that are flagged: {some} of {len(timed)}" + f" ({named})" * bool(flags)


def read(results: Path) -> RunFile:
    """The run. Raises FlashbenchError for a file that cannot be read or has a line that is not as written."""
    return runfile.intact(runfile.load(results))


def told(file: RunFile) -> str:
    """The table of a run, what it lacks, how its rows are flagged, and what of the file was overlooked.

    Raises UsageError where there is no cell to show.
    """
    rows = file.records
    found = ratios(rows)
    if not found:
        raise UsageError(f"{file.path}: {_why_none(rows)}")
    notes = [f"- {note}" for note in file.notes]
    return "\n".join([render(found), "", *untimed(rows), flagged(rows), *notes])


def _why_none(rows: Sequence[Record]) -> str:
    have = {r.cell.implementation for r in rows}
    if lacks := [name for name in (OURS, CUDNN) if name not in have]:
        return f"no row of {' or '.join(lacks)}, of whose times each cell of the table is made"
    return f"no cell of the grid has times of {OURS} and {CUDNN}: {GRID}"


def part() -> str:
    """The committed run's, as it stands in the docs."""
    file = read(RESULTS)
    records = file.records
    on, where = records[0].environment, RESULTS.relative_to(ROOT)
    fa4 = next(str(r.config["package"]) for r in records if r.cell.implementation == FA4 and r.config)
    about = (
        f"Of one {on['device_name']} ([{where}](../{where}): torch {on['torch']}, Triton {on['triton']},"
        f" cuDNN {on['cudnn']}, {fa4}, in turns under sustained load, clocks not locked; above 1 `{OURS}` is"
        " faster):"
    )
    return "\n".join([BEGIN, "", about, "", told(file), "", END])


def main() -> None:
    """Print the table of a run, or write that of the docs; what cannot be read has a line and exit code 2."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("results", type=Path, nargs="?", metavar="RESULTS", help="a results file")
    parser.add_argument("--write", action="store_true", help=f"put the committed one's into {PAGE.name}")
    asked = parser.parse_args()
    if asked.write == (asked.results is not None):
        parser.error("it takes RESULTS or --write")
    try:
        if asked.write:
            marked.put(PAGE, part())
        else:
            print(told(read(asked.results)))
    except FlashbenchError as error:
        print(error, file=sys.stderr)
        sys.exit(EXIT_USAGE)


if __name__ == "__main__":
    main()
