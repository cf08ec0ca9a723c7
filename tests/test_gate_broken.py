"""The exact gate catches what it is there for: code is broken in a copy, and the committed baseline tells
by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from gates import BASELINE, copy_of_the_package, gate, with_baseline
from judging import run

from flashbench.errors import EXIT_GATE

pytestmark = with_baseline

STATIC = """
[static]
head-dims = 64
causal = true
passes = "fwd"
arch = "sm_80"
"""
TRACE = """
[trace]
seqlens = 150
dtypes = "fp16"
causal = true
passes = "fwd"
"""
"""Of configs/ci-static.toml as little as shows it."""
KERNEL = "kernels/_flash_kernels.py"
LOAD = "        k = tiles.load(tiles.at(K, start_n, k_n), k_n, more, BLOCK_N, DIM, WIDEST, True, WIDE)\n"
PRODUCT = """        s = tiles.dot_t(q, k, PRECISION)
        if SCORED:
            s, _ = scores"""
BEFORE = "    unit = 1.0 if SCORED else scale  # what"
AFTER = "    some = total != 0.0  #"
"""Texts of the forward alone."""
SPILL = {
    BEFORE: f"    low = tl.full([BLOCK_M, BLOCK_N], 1.0, tl.float32)\n{BEFORE}",
    PRODUCT: PRODUCT.replace("\n", "\n        low = tl.minimum(low, s)\n", 1),
    AFTER: f"    total += tl.where(tl.max(low, 1) > 2.0, 1.0, 0.0)\n{AFTER}",
}
"""A tile of numbers more that lives as long as the loop."""


@pytest.mark.parametrize(
    ("part", "file", "changes", "says"),
    [
        pytest.param(
            "static", KERNEL, SPILL,
            "spill_stored_bytes_per_thread: 1 of N cells are worse by more than 0%,"
            " first: static flash fwd fwd sm_80 bf16 d64 causal: 0, now ",
            id="one more spill", marks=pytest.mark.slow,
        ),
        pytest.param(
            "trace", KERNEL, {PRODUCT: LOAD + PRODUCT},
            "traced_read_bytes: 1 of N cells are worse by more than 0%,"
            " first: trace flash fwd b1 h2/1 n150 d40 fp16 causal forward k: ",
            id="one more K load",
        ),
        pytest.param(
            "trace", "kernels/_scores.py", {"end = _held(last + high + 1, seqlen_k)": "end = seqlen_k"},
            "traced_read_bytes: 2 of N cells are worse by more than 0%,"
            " first: trace flash fwd b1 h2/1 n150 d40 fp16 causal forward ",
            id="no tile clamp", marks=pytest.mark.slow,
        ),
        pytest.param(
            "static", "flash_configs.py",
            {'Row("fwd", "any", "half", 64, (_C(128, 64,': 'Row("fwd", "any", "half", 64, (_C(128, 32,'},
            "block_k: 1 of N cells are worse by more than 0%, first: static flash fwd fwd sm_80 bf16 d64"
            " causal: 64, now 32; it must not change unseen",
            id="another tile", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_what_makes_a_kernel_worse_fails_by_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], part: str, file: str, changes: dict[str, str],
    says: str,
) -> None:  # fmt: skip
    package = copy_of_the_package(tmp_path, file, changes)
    out = tmp_path / "new.json"
    gate(package, STATIC if part == "static" else TRACE, out)
    metric = says.split(":")[0]
    code, _, err = run(capsys, str(out), "--baseline", str(BASELINE), "--metric", metric, "-q")
    assert code == EXIT_GATE, err
    assert says in re.sub(r"of \d+ cells", "of N cells", err)
    assert run(capsys, str(out), "--baseline", str(BASELINE), "-q")[0] == EXIT_GATE
