"""Every feature and every pair of features, as checked on cards: reports/*/check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from flashbench import runfile
from flashbench.kernels import _triton

REPORTS = Path(__file__).resolve().parent.parent / "reports"
CARDS = {"h100-sxm": "NVIDIA H100 80GB HBM3", "h200-sxm": "NVIDIA H200"}
ARRAY = """
import json, sys
from flashbench._cli import check_pairs
from flashbench.kernels import Target
card = Target(device="cuda:0", capability=(9, 0), smem_per_block_bytes=232_448)
print(json.dumps([cell.key for cell in check_pairs.cells(sys.argv[1].split("+"), None, card)]))
"""


DECODES = """
import json
from flashbench import decode_cases, decoding
from flashbench.kernels import Target
card = Target(device="cuda:0", capability=(9, 0), smem_per_block_bytes=232_448)
found = decode_cases.array(lambda case: decoding.why_not(case, card) is None, decode_cases.SCALES["cuda"])
covered = sorted(" + ".join(sorted(one)) for one in found.covered)
print(json.dumps([[case.key for case in found.problems], covered]))
"""


def compiled(program: str, *args: str) -> Any:
    """What the program prints, in a process without the interpreter, which does not take all a card does."""
    env = {name: value for name, value in os.environ.items() if name != _triton.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", program, *args], capture_output=True, text=True, check=True, env=env
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ("card", "run"),
    [
        *(
            ("h100-sxm", run)
            for run in ("flash-v2", "flash-v1+flash-v2-atomic", "flash-decode", "flash-v2-fp8")
        ),
        *((card, run) for card in CARDS for run in ("flash-v3", "flash-v3-fp8")),
    ],
)
def test_the_covering_array_of_today_was_checked_and_is_right(card: str, run: str) -> None:
    found = runfile.load(REPORTS / card / "check" / run / "results.jsonl")
    assert found.header["environment"]["device_name"] == CARDS[card]
    assert {record.status for record in found.records} == {"checked"}
    assert {record.cell.key for record in found.records} == set(compiled(ARRAY, run))


def test_the_covering_array_of_decodes_of_today_was_checked_and_is_right() -> None:
    file = REPORTS / "h200-sxm" / "check" / "decode-pairs" / "results.json"
    found = json.loads(file.read_text(encoding="utf-8"))
    assert found["environment"]["device_name"] == CARDS["h200-sxm"]
    assert {row["status"] for row in found["rows"]} == {"ok"}
    keys, covered = compiled(DECODES)
    assert [row["case"] for row in found["rows"]] == keys
    assert (found["covered"], found["points"]) == (covered, 3)


@pytest.mark.parametrize(
    ("dtype", "scale", "bound"), [("fp16", "", 2.0e-4), ("fp8", "block", 1.1e-2)], ids=["fp16", "fp8"]
)
def test_outliers_cost_no_more_than_flash_attention_3_says(dtype: str, scale: str, bound: float) -> None:
    """RMSE against fp64 of the unrounded inputs, N = 4096, d = 128, 16 heads (FlashAttention-3, table 3)."""
    lines = map(json.loads, (REPORTS / "h200-sxm" / "numerics.jsonl").read_text().splitlines())
    wanted = {"range": "outliers", "dtype": dtype, "fp8_scale": scale, "seqlen_k": 4096, "head_dim": 128,
              "num_heads": 16}  # fmt: skip
    found = {
        one["implementation"]: one["rmse"] for one in lines if all(one.get(k) == v for k, v in wanted.items())
    }
    assert 0 < found["flash-fp8" if scale else "flash"] <= bound
