"""Whatever a kernel does to the card: every other cell is measured, the file is whole, and nothing stays."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import faults
import processes
import pytest

from flashbench import runfile

pytestmark = pytest.mark.gpu

EXPECTED = {
    "cuda-assert": ("failed", "device-side assert"),
    "cuda-illegal": ("failed", "an illegal memory access was encountered"),
    "cuda-hang": ("timeout", "no sign of life for 15s"),
    "cuda-exit": ("failed", "its process exited with code 7"),
    "late-cuda-illegal": ("failed", "an illegal memory access was encountered"),
    "late-segfault": ("failed", "its process was killed by SIGSEGV"),
    "oom-cuda": ("oom", "out of memory"),
    "overwrite": ("wrong", "it changes its input k"),
}
"""Status and a part of the reason."""


def used_bytes() -> int:
    """Of the whole card, whoever holds it."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return total - free


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sweep_outlives_it(name: str, tmp_path: Path) -> None:
    before = used_bytes()
    tag, surroundings = processes.tagged()
    run = subprocess.run(
        [
            sys.executable, faults.__file__, "run", "--impls", f"naive,{name},sdpa", "--seqlens", "256,512",
            "--head-dims", "64", "--dtypes", "fp16", "--heads", "2", "--batch", "1", "--causal", "no",
            "--passes", "fwd", "--device", "cuda:0", "--cell-timeout", "15s", "--out", str(tmp_path / "out"),
        ],
        env=surroundings, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    assert processes.left(tag) == []
    found = runfile.load(tmp_path / "out" / "results.jsonl")
    assert not found.notes, run.stderr
    rows = {(one.cell.implementation, one.cell.problem.seqlen_q): one for one in found.records}
    assert len(rows) == len(found.records) == 6, run.stderr
    for (implementation, _), row in rows.items():
        if implementation != name:
            assert row.status == "ok", row.reason
            assert row.accuracy is not None
            assert row.accuracy.ok
            assert row.samples is not None
        else:
            status, reason = EXPECTED[name]
            assert row.status == status, row.reason
            assert reason in (row.reason or "")
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else others use the card
        assert used_bytes() - before < 2**26
