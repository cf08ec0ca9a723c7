"""How fast ``flash`` is beside cuDNN and beside what torch picks, from the sweep that the README shows.

python tools/speed_table.py            print the table
python tools/speed_table.py --write    put it into docs/kernels.md
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import marked  # noqa: E402
from readme_figures import RESULTS  # noqa: E402

from flashbench import runfile, units  # noqa: E402
from flashbench.record import Record  # noqa: E402

PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- speed: tools/speed_table.py --write -->", "<!-- end of speed -->"
OURS = "flash"
OTHERS = {"sdpa-cudnn": "cuDNN", "sdpa": "torch's choice"}
PASSES = {"fwd": "forward", "bwd": "backward"}

Key = tuple[int, bool, str, str]
"""Head dim, causal, pass and whom ``flash`` is beside."""


def speeds(records: Iterable[Record]) -> dict[Key, dict[int, float]]:
    """``flash``'s speed over the others', by length, where both have a time that can be believed."""
    times: dict[tuple[int, bool, str, int], dict[str, float]] = {}
    for record in records:
        p = record.cell.problem
        if record.samples is not None and record.status == "ok" and "suspect" not in record.flags:
            cell = times.setdefault((p.head_dim, p.causal, record.cell.pass_, p.seqlen_q), {})
            cell[record.cell.implementation] = record.samples.median_s
    found: dict[Key, dict[int, float]] = {}
    for (dim, causal, pass_, seqlen), cell in sorted(times.items()):
        for other in OTHERS:
            if pass_ in PASSES and {OURS, other} <= cell.keys():
                found.setdefault((dim, causal, pass_, other), {})[seqlen] = cell[other] / cell[OURS]
    return found


def part(results: Path = ROOT / RESULTS) -> str:
    """The table, as it stands in the docs, and what it is of."""
    records = runfile.load(results).records
    found = speeds(records)
    columns = [(pass_, other) for pass_ in PASSES for other in OTHERS]
    heads = " | ".join(f"{PASSES[pass_]}, over {OTHERS[other]}" for pass_, other in columns)
    lines = [f"| | {heads} |", "|---" * (1 + len(columns)) + "|"]
    for dim, causal in dict.fromkeys(key[:2] for key in found):
        cells = (_shown(found.get((dim, causal, *column), {})) for column in columns)
        lines.append(f"| head dim {dim}{', causal' if causal else ''} | {' | '.join(cells)} |")
    return "\n".join([BEGIN, "", _about(records, results.relative_to(ROOT), found), "", *lines, "", END])


def _shown(by_length: dict[int, float]) -> str:
    values = by_length.values()
    if not values:
        return "-"
    return f"{statistics.geometric_mean(values):.2f} ({min(values):.2f} to {max(values):.2f})"


def _about(records: Sequence[Record], results: Path, found: dict[Key, dict[int, float]]) -> str:
    on = records[0].environment
    dtypes = " and ".join(sorted({record.cell.problem.dtype for record in records}))
    lengths = sorted({n for by_length in found.values() for n in by_length})
    span = f"{units.format_length(lengths[0])} to {units.format_length(lengths[-1])}"
    return (
        f"On one {on['device_name']} ([{results}](../{results}): {dtypes}, {span}, in turns in one process)"
        f" `{OURS}` ran {_ran(records, OURS)}. Its speed over cuDNN {on['cudnn']} and over what torch"
        f" {on['torch']} picks (`sdpa`, which ran {_ran(records, 'sdpa')}): the geometric mean over the"
        " lengths, and least to most."
    )


def _ran(records: Iterable[Record], name: str) -> str:
    ran = sorted({str(r.backend) for r in records if r.cell.implementation == name and r.status == "ok"})
    return f"`{ran[0]}` in every cell" if len(ran) == 1 else " or ".join(f"`{one}`" for one in ran)


if __name__ == "__main__":
    marked.main(__doc__, part, PAGE)
