"""flash-v3's backward kernel, run on a CPU over a model of Hopper's threads, against fp64 gradients."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashbench import hopper_configs
from flashbench.hopper_configs import KEYS, ROWS, BackwardTiles
from flashbench.kernels import _triton

HERE = Path(__file__).resolve().parent
SHAPES = {
    # heads, K/V heads, seqlen_q, seqlen_k, head_dim, head_dim_v
    64: [(2, 1, 300, 200, 56, 64), (2, 2, 200, 300, 64, 64)],
    128: [(4, 2, 200, 300, 128, 120), (2, 2, 1, 200, 96, 128)],
}


def cases() -> list[object]:
    """Every configuration of the table, each shape under one of the masks; one of each width is fast."""
    tiles = list(dict.fromkeys(row.tiles for row in hopper_configs.BACKWARD_TABLE))
    found = [(one, causal) for one in tiles for causal in (False, True)]
    fast = [next(case for case in found if case[0].width == width) for width in SHAPES]
    return [
        pytest.param(one, SHAPES[one.width][(n + causal) % 2], causal,
                     marks=() if (one, causal) in fast else (pytest.mark.slow,),
                     id=f"{one.width}-{one.name}-{'causal' if causal else 'full'}")
        for n, one in enumerate(tiles) for causal in (False, True)
    ]  # fmt: skip


@pytest.mark.parametrize(("tiles", "shape", "causal"), cases())
def test_gradients_are_those_of_fp64(tiles: BackwardTiles, shape: tuple[int, ...], causal: bool) -> None:
    """In a process of its own: it has a model in Triton's place."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    command = f"import {Path(__file__).stem} as m; m.run(m.{tiles!r}, {shape}, {causal})"
    done = subprocess.run(
        [sys.executable, "-c", command], capture_output=True, text=True, check=False, env=environment
    )
    assert not done.returncode, done.stderr
    assert [float(error) < 2e-3 for error in done.stdout.split()] == [True] * 3, done.stdout


ROWS_SHAPES = [(2, 3, 130, 90, 40), (1, 2, 70, 200, 128), (1, 1, 5, 1, 64)]
"""batch, heads, seqlen_q, seqlen_k, head_dim"""


@pytest.mark.parametrize("shape", ROWS_SHAPES)
@pytest.mark.parametrize("causal", [False, True])
def test_the_accumulator_is_put_in_order_and_rows_of_one_key_have_no_gradient(shape, causal: bool) -> None:
    import torch

    rows_kernels = _triton.load("cpu", "_hopper_gradient_kernels")
    batch, heads, seqlen_q, seqlen_k, dim = shape
    width = 64 if dim <= 64 else 128
    block = 8192 // width
    tiles = -(-seqlen_q // block)
    acc = torch.randn(batch * heads * tiles * block * width // 32, 32)
    dq = torch.full((batch, heads, seqlen_q, dim), math.nan, dtype=torch.float16)
    numbers = *dq.stride()[:3], heads, seqlen_q, tiles, seqlen_k, 0.5
    for alone in (False, True):
        grid = (2 * batch * heads * tiles,)
        constants = {"BLOCK_M": block, "COLUMNS": dim, "CAUSAL": causal, "ALONE": alone}
        rows_kernels.convert[grid](acc, dq, *numbers, **constants)
        want = in_order(acc, (batch, heads, tiles * block), width)[:, :, :seqlen_q, :dim] * 0.5
        keys = torch.full((seqlen_q,), seqlen_k)
        if causal:
            keys = keys.minimum(torch.arange(seqlen_q) + 1 + seqlen_k - seqlen_q)
        if alone:
            want[:, :, keys == 1] = 0
        assert torch.equal(dq, want.half())


@pytest.mark.parametrize("shape", ROWS_SHAPES)
def test_rows_are_prepared_tile_after_tile(shape) -> None:
    import torch

    rows_kernels = _triton.load("cpu", "_hopper_gradient_kernels")
    batch, heads, seqlen_q, _, dim = shape
    width = 64 if dim <= 64 else 128
    block = 8192 // width
    tiles = -(-seqlen_q // block)
    o, do = torch.randn(2, batch, heads, seqlen_q, dim).half()
    lse, dlse = torch.randn(2, batch, heads, seqlen_q)
    lse[..., 0] = -math.inf
    lse_2, delta = torch.full((2, batch, heads, tiles * block), math.nan)
    acc = torch.full((lse_2.numel() * width // 32, 32), math.nan)
    strides = *o.stride()[:3], *do.stride()[:3]
    constants = {"BLOCK_M": block, "DIM": width, "DIM_V": dim, "WIDEST": 128, "WIDE": False}
    rows_kernels.prepare[(batch * heads * tiles,)](
        o, do, lse, dlse, lse_2, delta, acc, *strides, heads, seqlen_q, tiles, **constants
    )
    assert not acc.any()
    assert bool((lse_2[..., seqlen_q:] == math.inf).all())
    assert bool((lse_2[..., 0] == math.inf).all())
    assert torch.allclose(lse_2[..., 1:seqlen_q], lse[..., 1:] / math.log(2), rtol=1e-6, atol=1e-6)
    want = (o.double() * do.double()).sum(-1) - dlse
    assert torch.allclose(delta[..., :seqlen_q].double(), want, rtol=0, atol=1e-4)


def run(tiles: BackwardTiles, shape: tuple[int, ...], causal: bool) -> None:
    """Print the errors of dq, dk and dv, relative to their largest element."""
    import hopper_threads as model
    import torch

    kernels = model.install("_hopper_backward")
    from flashbench.kernels import _hopper_schedule as schedule

    width = tiles.width
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
    count = -(-seqlen_q // tiles.block_q)
    rows = 2, heads, count * tiles.block_q
    lse_2, sums = torch.full(rows, math.inf), torch.zeros(rows)
    lse_2[..., :seqlen_q] = (lse / math.log(2)).where(~lse.isinf(), math.inf)
    sums[..., :seqlen_q] = delta
    acc = torch.zeros(2 * heads * count * tiles.block_q * width // 32, 32)
    dk, dv = torch.full_like(k, math.nan), torch.full_like(v, math.nan)
    walk = schedule.KeyShape(
        heads=2 * kv_heads, group=group, seqlen_q=seqlen_q, seqlen_k=seqlen_k, block_m=tiles.block_q,
        block_n=KEYS, causal=causal, kv_bytes=2**22,
    )  # fmt: skip
    table = schedule.table(walk, 3)
    boxes = [model.Descriptor(x, [1, 1, ROWS, width]) for x in (q, do, k, v, dk, dv)]
    model.launch(
        kernels.backward, len(table[0]), *boxes[:4],
        *(model.Descriptor(x.view(-1), [ROWS]) for x in (lse_2, sums)), model.Descriptor(acc, [128, 32]),
        *boxes[4:], model.Pointer([entry for row in table for entry in row]), walk.tiles, kv_heads, group,
        seqlen_q, seqlen_k, len(acc), scale * math.log2(math.e), scale,
        tiles.block_q, KEYS, width, tiles.stages, tiles.ds_stages,
        tiles.lag, causal, True, tiles.early_dv, tiles.rotate, tiles.held, 240, 24,
    )  # fmt: skip
    dq = in_order(acc, rows, width)[..., :seqlen_q, :dim] * scale
    for got, want in zip((dq, dk, dv), exact, strict=True):
        print(((got.double() - want).abs().max() / want.abs().max()).item())


def exact_gradients(q, k, v, do, scale: float, causal: bool):
    """(lse, rowsum(dO * O), (dq, dk, dv)) in fp64."""
    import torch

    q, k, v = (x.double().requires_grad_() for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    s = q @ k.repeat_interleave(group, 1).mT * scale
    if causal:
        last = torch.arange(q.shape[2])[:, None] + k.shape[2] - q.shape[2]
        s = s.masked_fill(torch.arange(k.shape[2]) > last, -math.inf)
    lse = s.logsumexp(-1)
    p = s.softmax(-1).where(~lse.isinf()[..., None], 0.0)
    o = p @ v.repeat_interleave(group, 1)
    gradients = torch.autograd.grad(o, (q, k, v), do.double())
    gradients = [x.nan_to_num(0.0) for x in gradients]
    return lse.detach(), (o * do).sum(-1).detach(), gradients


def in_order(acc, rows: tuple[int, ...], width: int):
    """dQ's accumulator as a matrix per head, from what ``add_dq`` says of its order."""
    import torch

    row, column = torch.arange(64)[:, None], torch.arange(64)
    line = row // 8 * 16 + column // 16 * 4 + row % 8 // 2
    number = row % 2 * 16 + column % 8 // 2 * 4 + column // 8 % 2 * 2 + column % 2
    blocks = acc.view(-1, 128, 32)[:, line, number]
    if width == 64:
        return blocks.reshape(*rows, 64)
    return blocks.view(-1, 2, 64, 64).transpose(1, 2).reshape(*rows, 128)
