"""Writes the README's figures from the committed results file, so that none is typed by hand.

python tools/readme_figures.py          print the block
python tools/readme_figures.py --write  put it between the markers in README.md
"""

from __future__ import annotations

import json
import statistics
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tools")]

import marked  # noqa: E402

from flashbench.iomodel import flops  # noqa: E402
from flashbench.problem import Problem  # noqa: E402

RESULTS = "reports/h200-sxm/results.jsonl"
"""The sweep that the README shows: a card's newest run of today's kernels takes its place here."""
IMPLEMENTATIONS = ("naive", "sdpa-flash", "sdpa-cudnn", "flash")


def tflops(record: dict) -> str:
    """TFLOP/s of the median sample, or the status of a cell that has none."""
    if record["status"] != "ok":
        return record["status"]
    problem = Problem(**record["cell"]["problem"])
    time_s = statistics.median(record["samples"]["samples_s"])
    return f"{flops(problem, record['cell']['pass']) / time_s / 1e12:.0f}"


def render(root: Path = ROOT, results: str = RESULTS) -> str:
    """The block between the markers: a table of TFLOP/s, d=128, causal, forward and backward."""
    lines = [json.loads(line) for line in (root / results).read_text(encoding="utf-8").splitlines()]
    records = [line for line in lines if line.get("type") == "record"]
    environment = records[0]["environment"]
    rows = {}
    for record in records:
        problem = record["cell"]["problem"]
        if problem["head_dim"] == 128 and problem["causal"]:
            key = (record["cell"]["pass"], problem["seqlen_q"])
            rows.setdefault(key, {})[record["cell"]["implementation"]] = tflops(record)
    out = [
        "<!-- figures -->",
        f"On one {environment['device_name']} (torch {environment['torch']}, Triton {environment['triton']}, "
        f"driver {environment['driver']}), bf16, head dim 128, causal, TFLOP/s:",
        "",
        "| pass | seqlen | " + " | ".join(f"`{name}`" for name in IMPLEMENTATIONS) + " |",
        "|---|---|" + "---|" * len(IMPLEMENTATIONS),
    ]
    for (pass_, seqlen), row in sorted(rows.items(), key=lambda item: (item[0][0] != "fwd", item[0][1])):
        cells = " | ".join(row.get(name, "") for name in IMPLEMENTATIONS)
        out.append(f"| {pass_} | {seqlen // 1024}k | {cells} |")
    out += _which(records)
    page = results.replace("results.jsonl", "report.html")
    beside = f"; the page beside it is [report.html]({page})" if (root / page).exists() else ""
    out += ["", f"(from [{results}]({results}){beside})"]
    out.append("<!-- /figures -->")
    return "\n".join(out)


def _which(records: list[dict]) -> list[str]:
    """Whose kernels ``flash`` ran, where a run says it: from flash-v3 on its rows name them."""
    ran = {record["backend"] for record in records if record["cell"]["implementation"] == "flash"} - {None}
    if not ran:
        return ["", "This run is older than `flash-v3`: its `flash` is `flash-v2`'s kernels in both passes."]
    return ["", f"`flash` ran the kernels of {' and '.join(f'`{name}`' for name in sorted(ran))}."]


if __name__ == "__main__":
    marked.main(__doc__, render, ROOT / "README.md")
