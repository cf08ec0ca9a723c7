"""flash-v3's forward kernel, run on a CPU over a model of Hopper's threads, against fp64."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
CASES = {
    # changes to the tiles; heads, K/V heads, seqlen_q, seqlen_k, head_dim, head_dim_v
    "two": ("q_stages=1", (4, 2, 640, 769, 64, 64)),
    "three": ("warpgroups=3", (2, 2, 700, 901, 64, 40)),
    "three, ragged": ("warpgroups=3, q_stages=1", (2, 1, 500, 333, 56, 64)),
    "wide": ("block_k=64, q_stages=1, o_shared=True", (2, 2, 400, 433, 192, 256)),
    "wide, of two widths": ("block_k=64, q_stages=1", (1, 1, 200, 233, 256, 192)),
    "96": ("", (2, 2, 513, 300, 96, 96)),
    "two in turns": ("pingpong=True", (2, 2, 413, 401, 128, 128)),
    "three in turns": ("warpgroups=3, q_stages=1, pingpong=True", (2, 1, 500, 565, 64, 64)),
    "three at once": ("warpgroups=3, max3=True", (2, 1, 333, 400, 64, 64)),
    "emulated": ("max3=True, emulated=4", (2, 1, 333, 400, 64, 64)),
    "guarded": ("q_stages=1, pingpong=True, guarded=1", (4, 2, 640, 769, 128, 128)),
    "guarded, two": ("guarded=1", (2, 1, 400, 769, 96, 128)),
    "guarded, rows without keys": ("guarded=2", (2, 2, 513, 300, 128, 96)),
    "guarded, wide": ("block_k=64, q_stages=1, o_shared=True, guarded=1", (2, 1, 400, 433, 192, 256)),
    "guarded, three": ("warpgroups=3, guarded=2", (2, 2, 700, 901, 64, 40)),
    "guarded, three, two tiles of keys": ("warpgroups=3, guarded=2", (2, 1, 700, 200, 64, 64)),
    "guarded, three in turns": (
        "warpgroups=3, q_stages=1, pingpong=True, guarded=2", (2, 1, 500, 640, 56, 64),
    ),
    "guarded, three in turns, one tile of keys": (
        "warpgroups=3, q_stages=1, pingpong=True, guarded=2", (4, 2, 700, 120, 64, 64),
    ),
}  # fmt: skip
FAST = {
    ("three in turns", True), ("wide", True), ("emulated", True), ("guarded", False),
    ("guarded, three", True),
}  # fmt: skip


def every() -> list[object]:
    marks = {fast: () if fast else (pytest.mark.slow,) for fast in (False, True)}
    pairs = [(case, causal) for case in CASES for causal in (False, True)]
    return [pytest.param(*pair, marks=marks[pair in FAST]) for pair in pairs]


@pytest.mark.parametrize(("case", "causal"), every())
def test_no_barrier_is_waited_for_in_vain_and_outputs_are_those_of_fp64(case: str, causal: bool) -> None:
    """In a process of its own: it has a model in Triton's place."""
    tiles, shape = CASES[case]
    said = child(f"m.run({shape}, {causal}, dict({tiles}))")
    assert [float(error) < 2e-3 for error in said.split()] == [True] * 2, said


@pytest.mark.parametrize(
    "tiles",
    [
        "max3=True, emulated=4",
        "guarded=1",
        pytest.param("warpgroups=3, q_stages=1, guarded=2", marks=pytest.mark.slow),
        pytest.param("warpgroups=3, max3=True", marks=pytest.mark.slow),
        pytest.param("", marks=pytest.mark.slow),
    ],
)
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_of_q_and_k_no_others(tiles: str) -> None:
    child(f"m.poisoned(dict({tiles}))")


def child(call: str) -> str:
    """What it prints in a process that has a model in Triton's place."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    done = subprocess.run(
        [sys.executable, "-c", f"import {Path(__file__).stem} as m; {call}"],
        capture_output=True, text=True, check=False, env=environment,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    return done.stdout


def run(shape: tuple[int, ...], causal: bool, changes: dict[str, int]) -> None:
    """Print the largest errors of o and lse."""
    import torch

    q, k, v = inputs(shape)
    o, lse = outputs(q, k, v, causal, changes)
    want, want_lse = exact(q, k, v, causal)
    assert torch.equal(lse.isinf(), want_lse.isinf())
    print((o.double() - want).abs().max().item(), (lse.double() - want_lse).nan_to_num().abs().max().item())


def poisoned(changes: dict[str, int]) -> None:
    """Hold o and lse to what follows from NaN in k and v, and from NaN and inf in q, a head each."""
    import torch

    q, k, v = inputs((3, 3, 200, 333, 64, 64))
    q[0, 0, 70], q[0, 0, 133, 5] = math.nan, math.inf
    k[1, 1, 300, 9] = v[1, 2, 290, 7] = math.nan
    o, lse = outputs(q, k, v, True, changes)
    nan, of_k, of_v = o.isnan().all(-1), 300 - 133, 290 - 133  # the first rows that see those keys
    want = torch.zeros(2, 3, 200, dtype=torch.bool)
    want[0, 0, [70, 133]] = want[1, 1, of_k:] = True
    assert torch.equal(nan, want)
    assert torch.equal(lse.isnan(), want)
    nan = o[1, 2].isnan()
    assert nan[of_v:, 7].all()
    assert not nan[:, :7].any()
    assert not o[0].isnan().any(-1)[~want[0]].any()


def inputs(shape: tuple[int, ...]):
    """q, k and v in fp16 of two sequences."""
    import torch

    heads, kv_heads, seqlen_q, seqlen_k, dim, dim_v = shape
    torch.manual_seed(0)
    return tuple(
        torch.randn(2, *sizes).half()
        for sizes in ((heads, seqlen_q, dim), (kv_heads, seqlen_k, dim), (kv_heads, seqlen_k, dim_v))
    )


def outputs(q, k, v, causal: bool, changes: dict[str, int]):
    """(o, lse) of the kernel."""
    import hopper_threads as model
    import torch

    kernels = model.install("_hopper_kernels")
    from flashbench import hopper_configs
    from flashbench.hopper_configs import ROWS, Tiles
    from flashbench.kernels import _hopper_schedule as schedule

    tiles, half = Tiles(**changes), torch.float16
    (_, heads, seqlen_q, dim), (_, kv_heads, seqlen_k, dim_v) = q.shape, v.shape
    group = heads // kv_heads
    o, lse = (
        torch.full((2, heads, seqlen_q, dim_v), math.nan, dtype=half),
        torch.full((2, heads, seqlen_q), math.nan),
    )
    walk = schedule.Shape(
        heads=2 * heads, group=group, seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_m=tiles.block_q,
        block_n=tiles.block_k, causal=causal, kv_bytes=2**22,
    )  # fmt: skip
    table = schedule.table(walk, 3)
    packed = schedule.packed(table, walk.tiles, heads)
    (d0, d1), (e0, e1) = hopper_configs.pieces(dim), hopper_configs.pieces(dim_v, of_v=True)
    cut = (q, ROWS, d0, d1), (k, tiles.block_k, d0, d1), (v, tiles.block_k, e0, e1), (o, ROWS, e0, e1)
    boxes = [
        model.Descriptor(x, [1, 1, rows, columns]) if columns else None
        for x, rows, *both in cut
        for columns in both
    ]
    model.launch(
        kernels.forward, len(table[0]), *boxes, model.Pointer(lse.view(-1)),
        model.Pointer([entry for row in packed for entry in row]), heads, group,
        seqlen_q, seqlen_k, dim**-0.5 * math.log2(math.e), tiles.block_q, tiles.block_k, d0, d1, e0, e1,
        tiles.stages, tiles.q_stages,
        tiles.o_shared, causal, tiles.pingpong, tiles.max3, tiles.emulated, tiles.guarded, *tiles.registers,
    )  # fmt: skip
    return o, lse


def exact(q, k, v, causal: bool):
    """(o, lse) in fp64."""
    import torch

    group = q.shape[1] // k.shape[1]
    k, v = (x.double().repeat_interleave(group, 1) for x in (k, v))
    s = q.double() @ k.mT * q.shape[-1] ** -0.5
    if causal:
        last = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        s = s.masked_fill(torch.arange(k.shape[2]) > last, -math.inf)
    lse = s.logsumexp(-1)
    return (s - lse.where(~lse.isinf(), 0.0)[..., None]).exp() @ v, lse
