"""What was run on a card for robustness is committed whole, and clean."""

from __future__ import annotations

import ast
import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import sanitize  # noqa: E402
import sanitizer_cases  # noqa: E402

CHECK = ROOT / "reports" / "h200-sxm" / "check"


def test_thousands_of_random_problems_were_within_the_bound() -> None:
    text = (CHECK / "random.txt").read_text("utf-8")
    for seed in (1, 2):
        counts = re.findall(rf"^(\d+) random problems of \S+, seed {seed}$", text, re.M)
        assert sum(map(int, counts)) >= 2000
    assert re.findall(r"^(\d+) passed: \1 tests$", text, re.M) == ["81", "81"]
    assert "failed" not in text


def test_sweeps_outlived_every_fault_of_a_card() -> None:
    text = (CHECK / "faults.txt").read_text("utf-8")
    asked = re.findall(r"test_a_sweep_outlives_it\[([\w-]+)\] PASSED", text)
    assert {"cuda-illegal", "cuda-assert", "cuda-hang", "oom-cuda"} <= set(asked)
    assert f"{len(asked)} passed" in text


def test_a_hundred_thousand_launches_kept_nothing() -> None:
    told = ast.literal_eval(re.findall(r"^{.*}$", (CHECK / "soak.txt").read_text("utf-8"), re.M)[0])
    assert told["launches"] >= 100_000
    assert told["tensor_bytes"] == told["card_bytes"] == 0


def test_every_kernel_was_clean_under_every_sanitizer() -> None:
    """Broken kernels were found; what is put aside was reported of kernels that are right, too."""
    lines = (CHECK / "sanitizer" / "sanitizer.jsonl").read_text("utf-8").splitlines()
    head, *rows = map(json.loads, lines)
    assert head["wrong"] == []
    assert not any(row["errors"] for row in rows if row["group"] != sanitize.CONTROL and not row["right"])
    for tool in sanitize.TOOLS:
        ran = {row["group"] for row in rows if row["tool"] == tool and row["status"] == "ran"}
        assert {one.group for one in sanitizer_cases.CASES} <= ran
