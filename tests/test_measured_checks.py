"""Every feature and every pair of features, as checked on an H100: reports/h100-sxm/check."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashbench import runfile
from flashbench.kernels import _triton

CHECKS = Path(__file__).resolve().parent.parent / "reports" / "h100-sxm" / "check"
ARRAY = """
import json, sys
from flashbench._cli import check_pairs
from flashbench.kernels import Target
card = Target(device="cuda:0", capability=(9, 0), smem_per_block_bytes=232_448)
print(json.dumps([cell.key for cell in check_pairs.cells(sys.argv[1].split("+"), None, card)]))
"""


@pytest.mark.parametrize(
    "run",
    ["flash-v2", "flash-v3", "flash-v1+flash-v2-atomic", "flash-decode", "flash-v2-fp8", "flash-v3-fp8"],
)
def test_the_covering_array_of_today_was_checked_and_is_right(run: str) -> None:
    """In a process without the interpreter, which does not take all that a card does."""
    compiled = {name: value for name, value in os.environ.items() if name != _triton.VARIABLE}
    wanted = json.loads(
        subprocess.run(
            [sys.executable, "-c", ARRAY, run], capture_output=True, text=True, check=True, env=compiled
        ).stdout
    )
    found = runfile.load(CHECKS / run / "results.jsonl")
    assert found.header["environment"]["device_name"] == "NVIDIA H100 80GB HBM3"
    assert {record.status for record in found.records} == {"checked"}
    assert {record.cell.key for record in found.records} == set(wanted)


@pytest.mark.parametrize(
    ("dtype", "scale", "bound"), [("fp16", "", 2.0e-4), ("fp8", "block", 1.1e-2)], ids=["fp16", "fp8"]
)
def test_outliers_cost_no_more_than_flash_attention_3_says(dtype: str, scale: str, bound: float) -> None:
    """RMSE against fp64 of the unrounded inputs, N = 4096, d = 128, 16 heads (FlashAttention-3, table 3)."""
    lines = map(json.loads, (CHECKS.parent / "numerics.jsonl").read_text().splitlines())
    wanted = {"range": "outliers", "dtype": dtype, "fp8_scale": scale, "seqlen_k": 4096, "head_dim": 128,
              "num_heads": 16}  # fmt: skip
    found = {
        one["implementation"]: one["rmse"] for one in lines if all(one.get(k) == v for k, v in wanted.items())
    }
    assert 0 < found["flash-fp8" if scale else "flash"] <= bound
