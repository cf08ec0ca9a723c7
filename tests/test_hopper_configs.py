"""flash-v3's table of configurations has, for what was measured on an H100, what was fastest there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from flashbench import hopper_configs

MEASURED = Path(__file__).resolve().parent.parent / "reports" / "h100-sxm" / "tuning" / "flash-v3.json"
ROWS = json.loads(MEASURED.read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", ROWS, ids=lambda row: f"d{row['head_dim']} {row['causal']} {row['seqlen']}")
def test_the_table_has_what_was_measured_to_be_fastest_within_2_percent(row: dict[str, Any]) -> None:
    dim = row["head_dim"]
    chosen = hopper_configs.choose(dim, dim, row["causal"], row["seqlen"]).name
    ours = {name: speed for name, speed in row["tflops"].items() if name != "sdpa-cudnn"}
    assert ours[chosen] >= 0.98 * max(ours.values()), ours
