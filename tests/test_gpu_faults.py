"""Whatever a kernel does to the card: every other cell is measured, the file is whole, and nothing stays."""

from __future__ import annotations

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Sweep:
    """What a sweep with a fault in it left behind."""

    folder: Path
    said: str
    living: list[str]


def used_bytes() -> int:
    """Of the whole card, whoever holds it."""
    import torch

    free, total = torch.cuda.mem_get_info(0)
    return int(total - free)


def sweep(name: str, folder: Path) -> Sweep:
    tag, surroundings = processes.tagged()
    run = subprocess.run(
        [
            sys.executable, faults.__file__, "run", "--impls", f"naive,{name},sdpa", "--seqlens", "256,512",
            "--head-dims", "64", "--dtypes", "fp16", "--heads", "2", "--batch", "1", "--causal", "no",
            "--passes", "fwd", "--device", "cuda:0", "--cell-timeout", "15s", "--out", str(folder),
        ],
        env=surroundings, capture_output=True, text=True, timeout=240, check=False,
    )  # fmt: skip
    return Sweep(folder, run.stderr, processes.left(tag))


@pytest.fixture(scope="module")
def sweeps(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Sweep], int]:
    """All of them at once on one card, and by how many bytes more of it are used after them."""
    before = used_bytes()
    folder = tmp_path_factory.mktemp("sweeps")
    with ThreadPoolExecutor(len(EXPECTED)) as pool:
        found = pool.map(lambda name: sweep(name, folder / name), EXPECTED)
        done = dict(zip(EXPECTED, found, strict=True))
    return done, used_bytes() - before


@pytest.mark.parametrize("name", EXPECTED)
def test_a_sweep_outlives_it(name: str, sweeps: tuple[dict[str, Sweep], int]) -> None:
    own = sweeps[0][name]
    assert own.living == []
    found = runfile.load(own.folder / "results.jsonl")
    assert not found.notes, own.said
    rows = {(one.cell.implementation, one.cell.problem.seqlen_q): one for one in found.records}
    assert len(rows) == len(found.records) == 6, own.said
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


def test_the_card_has_its_memory_back(sweeps: tuple[dict[str, Sweep], int]) -> None:
    assert sweeps[1] < 2**26
