"""flash-v3's tables of configurations have, for what was measured on an H100, what was fastest there."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import pytest

from flashbench import hopper_configs
from flashbench.hopper_configs import BackwardTiles, Tiles

TUNING = Path(__file__).resolve().parent.parent / "reports" / "h100-sxm" / "tuning"
CHOICES: dict[str, Callable[[int, int, bool, int], Tiles | BackwardTiles]] = {
    "flash-v3": hopper_configs.choose,
    "flash-v3-backward": hopper_configs.choose_backward,
    "flash-v3-fp8": hopper_configs.choose_fp8,
}

OTHERS = "sdpa-cudnn", "flash-v2", "flash-v3 bf16", "flash-v2-fp8"
WIDE = "scores-first"
"""The form of the backward of head dims over 128 that was kept."""


def measured() -> Iterator[Any]:
    for name in CHOICES:
        for row in json.loads((TUNING / f"{name}.json").read_text(encoding="utf-8"))["rows"]:
            mask = "causal" if row["causal"] else "full"
            if not set(row["tflops"]) <= set(OTHERS):  # fp8's of head dim 256 has its neighbours only
                yield pytest.param(name, row, id=f"{name} d{row['head_dim']} {mask} {row['seqlen']}")


@pytest.mark.parametrize(("name", "row"), list(measured()))
def test_the_table_has_what_was_measured_to_be_fastest_within_2_percent(
    name: str, row: dict[str, Any]
) -> None:
    dim = row["head_dim"]
    chosen = CHOICES[name](dim, dim, row["causal"], row["seqlen"]).name
    ours = {tiles: speed for tiles, speed in row["tflops"].items() if tiles not in OTHERS}
    assert ours[chosen] >= 0.98 * max(ours.values()), ours


def test_the_one_form_for_wide_heads_was_the_fastest_within_2_percent_over_all_cells() -> None:
    path = TUNING / "flash-v3-backward-wide.json"
    rows = [row["tflops"] for row in json.loads(path.read_text(encoding="utf-8"))["rows"]]
    rows = [row for row in rows if WIDE in row]
    assert len(rows) == 12
    forms = [name for name in rows[0] if name not in OTHERS]
    speed = {name: geometric_mean(row[name] for row in rows) for name in forms}
    assert speed[WIDE] >= 0.98 * max(speed.values()), speed
    assert all(row[WIDE] > max(row[name] for name in OTHERS if name in row) for row in rows)
