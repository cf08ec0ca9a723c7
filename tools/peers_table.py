"""How the bundled kernel stands to the fastest other, cell by cell, from a run of configs/h100-peers.toml.

python tools/peers_table.py reports/h100-sxm/peers/results.jsonl

FlashAttention-4's Hopper kernel is not in the run: its figure is its share of cuDNN's in REFERENCE, one run
of both on another H100 SXM, times cuDNN's here. Ratios are of TFLOP/s: above 1 the bundled kernel is faster.
"""

from __future__ import annotations

import math
import statistics
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent.parent)]

from flashbench import runfile  # noqa: E402
from flashbench.record import Record  # noqa: E402

LENGTHS = (512, 1024, 2048, 4096, 8192, 16384)
OURS, CUDNN, OTHERS = "flash", "sdpa-cudnn", ("sdpa-cudnn", "sdpa-flash")
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


def ratios(records: Iterable[Record]) -> dict[tuple[str, int, bool, int], tuple[float, str]]:
    """(ratio of the bundled kernel to the fastest other, that other) by pass, head dim, causal and length."""
    times: dict[tuple[str, int, bool, int], dict[str, float]] = {}
    for record in records:
        if record.status == "ok" and record.samples is not None:
            p = record.cell.problem
            key = record.cell.pass_, p.head_dim, p.causal, p.seqlen_q
            times.setdefault(key, {})[record.cell.implementation] = statistics.median(
                record.samples.samples_s
            )
    found = {}
    for (*of, seqlen), here in times.items():
        reference = REFERENCE.get(tuple(of))  # type: ignore[call-overload]
        if OURS not in here or CUDNN not in here or reference is None or seqlen not in LENGTHS:
            continue
        cudnn, fa4 = (row[LENGTHS.index(seqlen)] for row in reference)
        others = {name: here[name] for name in OTHERS if name in here}
        others["FlashAttention-4, scaled"] = here[CUDNN] * cudnn / fa4
        fastest = min(others, key=others.__getitem__)
        found[*of, seqlen] = others[fastest] / here[OURS], fastest
    return found  # type: ignore[return-value]


def render(found: Mapping[tuple[str, int, bool, int], tuple[float, str]]) -> str:
    """Markdown: a row per pass, head dim and mask, and the geometric mean and the least of each pass."""
    lines = [
        "| pass | head dim | mask | " + " | ".join(map(str, LENGTHS)) + " |",
        "|---" * (3 + len(LENGTHS)) + "|",
    ]
    for pass_, dim, causal in REFERENCE:
        row = [found.get((pass_, dim, causal, n)) for n in LENGTHS]
        if any(row):
            shown = " | ".join("–" if one is None else f"{one[0]:.2f}" for one in row)
            lines.append(f"| {pass_} | {dim} | {'causal' if causal else 'full'} | {shown} |")
    for pass_ in ("fwd", "bwd"):
        of = {key: ratio for key, (ratio, _) in found.items() if key[0] == pass_}
        if of:
            mean = math.exp(statistics.fmean(map(math.log, of.values())))
            _, dim, causal, n = min(of, key=of.__getitem__)
            where = f"least {min(of.values()):.3f} (d={dim} {'causal' if causal else 'full'} at {n})"
            lines.append(f"\n{pass_}: geometric mean {mean:.3f} of {len(of)} cells, {where}")
    return "\n".join(lines)


if __name__ == "__main__":
    print(render(ratios(runfile.load(sys.argv[1]).records)))
