"""What the committed runs on an H100 say of masks and packing: the targets that the kernels were built to.

reports/h100-sxm/features has one folder for each run, all of one sitting on one card.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from flashbench import runfile

FEATURES = Path(__file__).resolve().parent.parent / "reports" / "h100-sxm" / "features"
DENSITIES = (0.1, 0.25, 0.5)


def times(run: str) -> dict[tuple[int, str, bool], float]:
    """Median seconds by head dim, pass and causal."""
    records = runfile.load(FEATURES / run / "results.jsonl").records
    assert records
    assert {record.status for record in records} == {"ok"}
    return {
        (one.cell.problem.head_dim, one.cell.pass_, one.cell.problem.causal): statistics.median(
            one.samples.samples_s
        )
        for one in records
    }


def ratios(one: str, other: str) -> dict[tuple[int, str, bool], float]:
    mine, theirs = times(one), times(other)
    shared = mine.keys() & theirs.keys()
    assert len(shared) == len(mine) == len(theirs) >= 4
    return {key: mine[key] / theirs[key] for key in shared}


def test_all_runs_are_of_one_card_and_one_sitting() -> None:
    headers = [runfile.load(path).header for path in FEATURES.glob("*/results.jsonl")]
    assert len(headers) == len(list(FEATURES.iterdir())) == 9
    assert len({header["environment"]["uuid"] for header in headers}) == 1
    assert len({header["created_at"][:13] for header in headers}) == 1


def test_a_window_of_1k_at_32k_is_8_times_faster_than_all_keys_before() -> None:
    assert min(ratios("causal-32k", "window-1k-32k").values()) >= 8


def test_packed_sequences_take_as_long_as_a_batch_within_10_percent() -> None:
    assert max(ratios("varlen-8x2k", "dense-8x2k").values()) <= 1.10


@pytest.mark.parametrize("density", DENSITIES)
def test_a_block_mask_takes_its_share_of_the_time_within_25_percent(density: float) -> None:
    found = ratios(f"random-{density}-16k", "random-1.0-16k")
    assert all(abs(ratio / density - 1) <= 0.25 for ratio in found.values()), found


def test_flash_v2_is_as_fast_as_torchs_flash_attention_2() -> None:
    """Geometric means over head dims 64 to 256, both masks, 1k to 16k keys: 1.0 forward, 0.9 backward."""
    found: dict[tuple[str, str, int, bool, int], float] = {}
    for record in runfile.load(FEATURES.parent / "family" / "results.jsonl").records:
        assert record.status == "ok"
        p = record.cell.problem
        key = record.cell.implementation, record.cell.pass_, p.head_dim, p.causal, p.seqlen_k
        found[key] = statistics.median(record.samples.samples_s)
    for pass_, bound in (("fwd", 1.0), ("bwd", 0.9)):
        mine = {key[2:]: s for key, s in found.items() if key[:2] == ("flash-v2", pass_)}
        assert len(mine) == 30
        ratios = [found["sdpa-flash", pass_, *key] / seconds for key, seconds in mine.items()]
        assert statistics.geometric_mean(ratios) >= bound
        assert all(mine[dim, True, 8192] <= 0.6 * mine[dim, False, 8192] for dim in (64, 128, 256))
