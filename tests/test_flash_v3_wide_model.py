"""flash-v3's backward of wide heads, run on a CPU over a model of Hopper's threads, against fp64's."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CASES = {
    # heads, K/V heads, seqlen_q, seqlen_k, head_dim, head_dim_v
    "256": (2, 1, 200, 330, 256, 256),
    "192, 128": (2, 2, 130, 70, 192, 128),
    "64, 256": (4, 2, 70, 200, 64, 248),
    "192, 256": (2, 1, 200, 330, 192, 256),
    "256, 192": (1, 1, 130, 70, 256, 192),
    "one query": (1, 1, 1, 130, 136, 192),
}
FAST = {("256", True), ("192, 128", False)}


def every() -> list[object]:
    marks = {fast: () if fast else (pytest.mark.slow,) for fast in (False, True)}
    pairs = [(case, causal) for case in CASES for causal in (False, True)]
    return [pytest.param(*pair, marks=marks[pair in FAST]) for pair in pairs]


@pytest.mark.parametrize(("case", "causal"), every())
def test_gradients_are_those_of_fp64(case: str, causal: bool) -> None:
    """In a process of its own: it has a model in Triton's place."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    command = f"import {Path(__file__).stem} as m; m.run({CASES[case]}, {causal})"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False, env=environment
    )
    assert not done.returncode, done.stderr
    assert [float(error) < 2e-3 for error in done.stdout.split()] == [True] * 3, done.stdout


def run(shape: tuple[int, ...], causal: bool) -> None:
    """Print the errors of dq, dk and dv, relative to their largest element."""
    import hopper_threads as model
    import torch

    of_keys, of_queries = model.install("_hopper_wide_dkdv"), model.install("_hopper_wide_dq")
    from test_flash_v3_backward_model import exact_gradients

    from flashbench.hopper_configs import ROWS, WIDE_BLOCK_Q, pieces
    from flashbench.kernels import _hopper_schedule as schedule

    heads, kv_heads, seqlen_q, seqlen_k, dim, dim_v = shape
    group, scale, half = heads // kv_heads, dim**-0.5, torch.float16
    torch.manual_seed(0)
    q, k, v, do = (
        torch.randn(2, *sizes).to(half)
        for sizes in (
            (heads, seqlen_q, dim), (kv_heads, seqlen_k, dim), (kv_heads, seqlen_k, dim_v),
            (heads, seqlen_q, dim_v),
        )
    )  # fmt: skip
    lse, delta, exact = exact_gradients(q, k, v, do, scale, causal)
    rows = 2, heads, -(-seqlen_q // ROWS) * ROWS
    lse_2, sums = torch.full(rows, math.inf), torch.zeros(rows)
    lse_2[..., :seqlen_q] = (lse / math.log(2)).where(~lse.isinf(), math.inf)
    sums[..., :seqlen_q] = delta
    dq, dk, dv = (torch.full_like(x, math.nan) for x in (q, k, v))
    sizes = {"group": group, "seqlen_q": seqlen_q, "seqlen_k": seqlen_k, "causal": causal, "kv_bytes": 2**22}
    by_key = schedule.KeyShape(heads=2 * kv_heads, block_m=ROWS, block_n=ROWS, **sizes)
    by_query = schedule.Shape(heads=2 * heads, block_m=WIDE_BLOCK_Q, block_n=ROWS, **sizes)
    boxes = [model.Descriptor(x, [1, 1, ROWS, 256]) for x in (q, do, k, v, dq, dk, dv)]
    columns = *pieces(dim), *pieces(dim_v)
    numbers = group, seqlen_q, seqlen_k, scale * math.log2(math.e), scale, *columns
    table = schedule.table(by_key, 3)
    model.launch(
        of_keys.backward_dkdv, len(table[0]), *boxes[:4],
        *(model.Descriptor(x.view(-1), [ROWS]) for x in (lse_2, sums)), *boxes[5:],
        model.Pointer([entry for row in table for entry in row]), by_key.tiles, kv_heads, *numbers,
        causal, 240, 24,
    )  # fmt: skip
    table = schedule.table(by_query, 3)
    model.launch(
        of_queries.backward_dq, len(table[0]), *boxes[:4],
        *(model.Pointer(x.view(-1)) for x in (lse_2, sums)), boxes[4],
        model.Pointer([entry for row in table for entry in row]), by_query.tiles, heads, *numbers, causal,
        False, 240, 24,
    )  # fmt: skip
    for got, want in zip((dq, dk, dv), exact, strict=True):
        print(((got.double() - want).abs().max() / want.abs().max()).item())
