"""The study of repeated runs: its runs are slowed by what they say, and its table is what they give."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from judging import cell, written

from flashbench import runfile

ROOT = Path(__file__).resolve().parent.parent
NOISE = ROOT / "reports" / "h200-sxm" / "noise"
sys.path.insert(0, str(ROOT / "tools"))
import noise_study  # noqa: E402
import noise_table  # noqa: E402

TINY = """
seqlens = 128
head_dims = 64
dtypes = ["fp32"]
impls = ["sdpa"]
causal = false
passes = ["fwd"]
"""


def test_each_block_has_one_run_of_each_variant_and_begins_with_another() -> None:
    runs = list(itertools.islice(noise_study.order((0.0, 0.02, 0.03)), 12))
    assert [number for number, _ in runs] == list(range(12))
    blocks = [[share for _, share in runs[start : start + 3]] for start in range(0, 12, 3)]
    assert [block[0] for block in blocks] == [0.0, 0.02, 0.03, 0.0]
    assert all(sorted(block) == [0.0, 0.02, 0.03] for block in blocks)
    assert [noise_study.name_of(share) for share in (0.0, 0.02, 0.055)] == ["same", "slower-2", "slower-5.5"]


@pytest.mark.slow
def test_a_sitting_leaves_runs_that_say_what_they_are(tmp_path: Path) -> None:
    """On a CPU, with calls that take twice as long; the second sitting adds to the first."""
    config = tmp_path / "tiny.toml"
    config.write_text(TINY, encoding="utf-8")
    code = (
        "import sys, pathlib; sys.path.insert(0, 'tools'); import noise_study;"
        f"noise_study.sitting(pathlib.Path({str(tmp_path)!r}), {{'device': 'cpu', 'quiet': True}},"
        f" {str(config)!r}, 60.0, shares=(0.0, 1.0), most=2)"
    )
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (sitting,), unfinished = noise_table.read(tmp_path)
    assert unfinished == []
    assert [(one.path.name, one.share) for one in sitting] == [("000-same", 0.0), ("001-slower-100", 1.0)]
    files = [runfile.load(one.path / "results.jsonl") for one in sitting]
    assert ["slower by 100%" in file.header["argv"][-1] for file in files] == [False, True]
    times = [min(file.records[0].samples.samples_s) for file in files]  # type: ignore[union-attr]
    assert 1.3 < times[1] / times[0] < 4  # other processes share the machine
    (work,) = json.loads((sitting[1].path.parent / "work.json").read_text(encoding="utf-8"))
    assert (work["pass"], work["unit"]) == ("fwd", "s")
    assert work["call_s"] == pytest.approx(times[0], rel=0.5)
    assert work["per_second"] == pytest.approx(1.0, abs=0.5)
    assert sorted(path.name for path in sitting[1].path.parent.iterdir()) == [
        "000-same",
        "001-slower-100",
        "work.json",
    ]
    assert files[0].timings


def study(folder: Path, blocks: int, *, realised: float = 1.0, between: float = 0.003) -> None:
    """Made-up runs of one sitting on one card; calls are slower by ``realised`` times their share."""
    random = np.random.default_rng(7)
    for number, share in itertools.islice(noise_study.order(noise_study.SHARES), 4 * blocks):
        level = np.exp(random.normal(0, between)) * (1 + realised * share)
        path = folder / "20260101-000000" / f"{number:03d}-{noise_study.name_of(share)}"
        path.mkdir(parents=True)
        records = [cell(1e-3 * level * np.exp(random.normal(0, between)), n) for n in (1024, 2048, 4096)]
        written(path / "results.jsonl", records, uuid="GPU-1")
        (path / "variant.json").write_text(json.dumps({"share": share}), encoding="utf-8")


def test_the_table_counts_what_is_there(tmp_path: Path) -> None:
    study(tmp_path, 7)
    found = noise_table.table(tmp_path)
    assert found["runs"] == {"0": 7, "0.02": 7, "0.03": 7, "0.05": 7}
    assert (found["sittings"], found["cards"], len(found["cells"])) == (1, 1, 3)
    assert (found["same_card"]["pairs"], found["same_card"]["verdicts"]) == (21, 63)
    assert found["same_card"]["false"] == found["same_card"]["false_on_summary"] == 0
    assert found["other_card"]["pairs"] == 0
    assert found["other_card"]["false_share"] is None
    assert [(row["share"], row["repeats"], row["verdicts"]) for row in found["slower"]] == [
        (0.02, 2, 6), (0.03, 2, 6), (0.05, 2, 6)
    ]  # fmt: skip
    assert [row["rate"] for row in found["slower"][1:]] == [1.0, 1.0]
    for row in found["slower"]:
        assert row["median_change"] == pytest.approx(row["share"], abs=0.005)
        assert len(row["missed"]) == row["verdicts"] - row["detected"]
    assert found == noise_table.table(tmp_path)
    assert "| 3 % | 2 | 6 | 6 | 100.0 % | " in noise_table.page(found)


def test_calls_that_are_not_slower_are_not_detected_and_runs_that_differ_are_false_alarms(
    tmp_path: Path,
) -> None:
    study(tmp_path / "not", 3, realised=0.0)
    assert [row["detected"] for row in noise_table.table(tmp_path / "not")["slower"]] == [0, 0, 0]
    study(tmp_path / "wild", 4, between=0.05)
    assert noise_table.table(tmp_path / "wild")["same_card"]["false"] > 0
    assert noise_table.table(tmp_path / "wild")["same_card"]["false_on_summary"] > 0


def test_a_run_that_was_cut_short_is_named_and_left_out(tmp_path: Path) -> None:
    study(tmp_path, 3)
    cut = tmp_path / "20260101-000000" / "012-same"
    cut.mkdir()
    written(cut / "results.jsonl", [cell(9e-3)], uuid="GPU-1")
    found = noise_table.table(tmp_path)
    assert found["unfinished"] == ["20260101-000000/012-same"]
    assert found["runs"]["0"] == 3


def test_another_card_is_told_apart_and_unlike_runs_are_not_compared(tmp_path: Path) -> None:
    study(tmp_path, 3)
    path = tmp_path / "20260102-000000" / "000-same"
    path.mkdir(parents=True)
    (path / "variant.json").write_text('{"share": 0.0}', encoding="utf-8")
    rows = [cell(1e-3, n) for n in (1024, 2048, 4096)]
    written(path / "results.jsonl", rows, uuid="GPU-2")
    found = noise_table.table(tmp_path)
    assert (found["same_card"]["pairs"], found["other_card"]["pairs"], found["cards"]) == (3, 3, 2)
    (path / "results.jsonl").unlink()
    written(path / "results.jsonl", rows, uuid="GPU-2", power_limit_w=500.0)
    other = tmp_path / "20260101-000000" / "000-same" / "results.jsonl"
    other.unlink()
    written(other, rows, uuid="GPU-1", power_limit_w=700.0)
    found = noise_table.table(tmp_path)
    assert (found["other_card"]["pairs"], found["other_card"]["refused"]) == (2, 1)


@pytest.mark.skipif(not NOISE.is_dir(), reason="no runs are committed yet")
def test_the_committed_table_is_what_the_committed_runs_give() -> None:
    found = noise_table.table(NOISE)
    assert json.loads((NOISE / "table.json").read_text(encoding="utf-8")) == json.loads(json.dumps(found))
    assert (NOISE / "README.md").read_text(encoding="utf-8") == noise_table.page(found)


@pytest.mark.skipif(not NOISE.is_dir(), reason="no runs are committed yet")
def test_a_card_gives_few_false_alarms_and_three_percent_are_found() -> None:
    found = json.loads((NOISE / "table.json").read_text(encoding="utf-8"))
    assert found["runs"]["0"] >= 10
    for row in (found["same_card"], found["other_card"]):
        assert row["false"] <= 0.01 * row["verdicts"]
        assert row["false_on_summary"] == 0
    for row in found["slower"]:
        assert row["repeats"] >= 1
        assert row["share"] < 0.03 or row["rate"] >= 0.95, row["missed"]
