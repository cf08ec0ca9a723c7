"""How much of a serial bound our kernels and torch's reach on an H100, from the committed results.

python tools/efficiency_table.py            print the table
python tools/efficiency_table.py --write    put it into docs/counters.md

The bound: every product at the tensor peak and, after that, every exponential: P / (1 + P / (4 d X)) FLOP/s
forward, 10 d in place of 4 d backward; P: dense peak, X: exponentials per second of the card's row.
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import marked  # noqa: E402

from flashbench import iomodel, runfile  # noqa: E402
from flashbench.devices import find  # noqa: E402
from flashbench.problem import Problem  # noqa: E402

REPORTS = ROOT / "reports" / "h100-sxm"
FILES = ("results.jsonl", "family/results.jsonl")
TUNED = {
    "fwd": ("flash-v3.json", "flash-v3-64.json"),
    "bwd": ("flash-v3-backward.json", "flash-v3-backward-2.json", "flash-v3-backward-wide.json"),
}
"""Tables of flash-v3's configurations, pass by pass: the fastest that was tried counts."""
PEERS = ("sdpa", "fa", "flash-v2")
"""How names in those tables begin that are no configuration of flash-v3."""
PAGE = ROOT / "docs" / "counters.md"
BEGIN, END = "<!-- efficiency: tools/efficiency_table.py --write -->", "<!-- end of efficiency -->"
DEVICE = find("h100-sxm")
PER_PAIR = {"fwd": 4, "bwd": 10}
SHOWN = ("flash-v3", "flash-v2", "sdpa-flash", "sdpa-cudnn")
LEAST = 4096
"""Keys and queries from which on a cell counts: below, launches and first tiles weigh in."""


Key = tuple[str, str, int, bool]
"""Implementation, pass, head dim, causal."""


def share(p: Problem, pass_: str, seconds: float) -> float:
    """Nominal FLOP/s of a call over the serial bound."""
    peak = DEVICE.peak_flops_per_s[p.dtype]
    bound = peak / (1 + peak / (PER_PAIR[pass_] * p.head_dim * DEVICE.exps_per_s))
    return iomodel.flops(p, pass_) / seconds / bound


def timed() -> dict[Key, list[float]]:
    """The share of each timed cell of LEAST queries and more."""
    found: dict[Key, list[float]] = {}
    records = [record for name in FILES for record in runfile.load(REPORTS / name).records]
    for record in records:
        cell, p = record.cell, record.cell.problem
        if record.samples is None or cell.implementation not in SHOWN or cell.pass_ not in PER_PAIR:
            continue
        if record.status == "ok" and p.seqlen_q == p.seqlen_k >= LEAST and not p.features:
            key = cell.implementation, cell.pass_, p.head_dim, p.causal
            found.setdefault(key, []).append(share(p, cell.pass_, record.samples.median_s))
    return found


def tuned() -> dict[Key, list[float]]:
    """The same of flash-v3, length by length, of the tables' 2048 columns and 16k tokens in fp16."""
    best: dict[tuple[Key, int], float] = {}
    for pass_, names in TUNED.items():
        rows = [row for name in names for row in json.loads((REPORTS / "tuning" / name).read_text())["rows"]]
        for row in rows:
            own = [ms for name, ms in row["samples_ms"].items() if not name.startswith(PEERS)]
            if row["seqlen"] < LEAST or not own:
                continue
            p = _problem(row["seqlen"], row["head_dim"], row["causal"])
            key = ("flash-v3", pass_, p.head_dim, p.causal), p.seqlen_q
            fastest = max(share(p, pass_, statistics.median(ms) / 1e3) for ms in own)
            best[key] = max(fastest, best.get(key, 0.0))
    found: dict[Key, list[float]] = {}
    for (key, _), value in best.items():
        found.setdefault(key, []).append(value)
    return found


def _problem(seqlen: int, dim: int, causal: bool) -> Problem:
    heads = 2048 // dim
    return Problem(
        batch=max(1, 16384 // seqlen), num_heads=heads, num_kv_heads=heads, seqlen_q=seqlen, seqlen_k=seqlen,
        head_dim=dim, head_dim_v=dim, dtype="fp16", causal=causal,
    )  # fmt: skip


def page() -> str:
    """The table, as it stands in the docs: the middle of each group's shares."""
    found = timed() | tuned()
    columns = [(dim, causal) for dim in (64, 128, 256) for causal in (False, True)]
    heads = " | ".join(f"d = {dim}, {'causal' if causal else 'no mask'}" for dim, causal in columns)
    lines = [BEGIN, "", f"| implementation | pass | {heads} |", "|---" * (2 + len(columns)) + "|"]
    for name in SHOWN:
        for pass_ in PER_PAIR:
            groups = [found.get((name, pass_, *column)) for column in columns]
            shown = (f"{statistics.median(group):.2f}" if group else "-" for group in groups)
            lines.append(f"| {name} | {pass_} | {' | '.join(shown)} |")
    return "\n".join([*lines, "", END])


if __name__ == "__main__":
    marked.main(__doc__, page, PAGE)
