"""flash-v3-fp8 on an sm_90 GPU: within the budget of fp8 on every shape, the same bits every run, no hang.

Every group runs in a process of its own with a time limit: a kernel whose mbarriers do not meet never ends.
"""

from __future__ import annotations

import itertools
import math
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import processes
import pytest
import torch

if TYPE_CHECKING:
    from flashbench.hopper_configs import Tiles

SILENT_S = 90
"""Long enough to compile what one step runs; each step says when it is done."""

SHAPES = [
    # batch, num_heads, num_kv_heads, seqlen_q, seqlen_k: whole tiles, ragged ones, rows without keys, groups
    (2, 4, 4, 512, 512), (2, 3, 3, 113, 257), (1, 4, 2, 1, 300), (2, 2, 2, 257, 113), (1, 8, 2, 640, 1537),
    (1, 1, 1, 1, 1), (2, 16, 4, 1536, 1536), (1, 2, 1, 2049, 2049), (40, 16, 16, 128, 96), (1, 2, 2, 700, 64),
]  # fmt: skip
WAYS = [("fp8", "block", True), ("fp8", "tensor", False), ("fp8-e5m2", "head", False)]
DIMS = [(64, 64), (128, 128), (112, 48)]


def shapes(dim: int, dim_v: int) -> None:
    """Every shape, format, scale and mask into outputs that are NaN before."""
    from attention import problem
    from fp8 import guarded

    from flashbench import hopper_configs
    from flashbench.kernels import _flash_v3_fp8 as flash
    from flashbench.kernels import _fp8, _hopper_fp8_kernels
    from flashbench.kernels._inputs import make_inputs
    from flashbench.kernels._precision import torch_dtype
    from flashbench.kernels._reference import Reference

    # the table's for few keys, and for many where that is another kernel
    both = sorted({hopper_configs.choose_fp8(dim, dim_v, True, n).promote > 0 for n in (512, 16384)})
    for shape, (cast, share, hadamard), causal, many in itertools.product(SHAPES, WAYS, (False, True), both):
        batch, heads, kv_heads, rows, keys = shape
        p = problem(
            batch=batch, num_heads=heads, num_kv_heads=kv_heads, seqlen_q=rows, seqlen_k=keys, head_dim=dim,
            head_dim_v=dim_v, dtype=cast, causal=causal, fp8_scale=share, hadamard=hadamard,
        )  # fmt: skip
        inputs, what = make_inputs(p, "cuda", 0), (shape, cast, share, causal)
        tiles = hopper_configs.choose_fp8(dim, dim_v, causal, 16384 if many else 512)
        options = {"dtype": torch_dtype(cast), "share": share, "hadamard": hadamard, "causal": causal}
        options["tiles"] = tiles
        x = flash.operands(inputs.q, inputs.k, inputs.v, **options)
        o, lse, launch = flash.forward_launch(x, causal=causal, scale=dim**-0.5, out_dtype=inputs.q.dtype)
        for one in (o, lse):
            one.fill_(math.nan)
        launch.run()
        # the budget is promised of what the table runs: that of few keys has less room for P's rounding
        assert tiles.promote or Reference(p, inputs).compare(o).ok, what
        v, _ = flash.quantised_values(inputs.v, options["dtype"], share, tiles)
        if tiles.promote:
            want, want_lse = guarded(x.q, x.k, v, causal=causal, scale=dim**-0.5, mean=x.mean)
        else:
            lag = float(_hopper_fp8_kernels.LAZY.value)
            want, want_lse = _fp8.attention(x.q, x.k, v, causal=causal, scale=dim**-0.5, lag=lag)
        assert torch.equal(lse.isinf(), want_lse.isinf()), what
        assert float((lse - want_lse).nan_to_num(0, 0, 0).abs().max()) < 1e-2, what
        assert float((o - want).norm() / want.norm().clamp(min=1e-30)) < 2e-2, what
        for _ in range(20):
            again = flash.flash_attention(x, causal=causal, out_dtype=o.dtype)
            assert all(torch.equal(one, other) for one, other in zip(again, (o, lse), strict=True)), what
        print(what, flush=True)


def outliers(dim: int, dim_v: int) -> None:
    """N = 4096, 16 heads, from the unrounded inputs: no more than the written arithmetic; d = 128 bounded."""
    from fp8 import E4M3, exact, rmse, with_outliers

    from flashbench.kernels import _flash_v3_fp8 as flash
    from flashbench.kernels import _fp8

    widths = dim, dim, dim_v
    q, k, v = (with_outliers(1, 16, 4096, width, seed=n, device="cuda") for n, width in enumerate(widths))
    ref, _ = exact(q, k, v)
    for share, hadamard in (("block", True), ("tensor", False)):
        x = flash.operands(q, k, v, dtype=E4M3, share=share, hadamard=hadamard, causal=False)
        o, _ = flash.flash_attention(x, causal=False)
        straight = _fp8.quantise(v, E4M3, share, x.tiles.block_k)
        written, _ = _fp8.attention(x.q, x.k, straight, causal=False, scale=dim**-0.5)
        assert rmse(o, ref) <= 1.05 * rmse(written, ref), (share, hadamard)
        if (share, dim) == ("block", 128):
            assert rmse(o, ref) <= 1.1e-2
        print(share, hadamard, flush=True)


def guards(dim: int, dim_v: int) -> None:
    """Rows that row sums are to guard, ragged and grouped: each block no further off than P's rounding is."""
    from fp8 import E4M3, HARD, exact, guarded, hard

    from flashbench.kernels import _flash_v3_fp8 as flash
    from flashbench.kernels import _fp8

    for case, causal, (rows, keys) in itertools.product(HARD, (False, True), [(512, 4224), (300, 4500)]):
        q, k, v = hard(case, queries=rows, keys=keys, device="cuda")
        tiles = hopper_configs_of(dim, dim_v, causal)
        x = flash.operands(q, k[:, :1], v[:, :1], dtype=E4M3, causal=causal, tiles=tiles)
        o, lse = flash.flash_attention(x, causal=causal, out_dtype=torch.float32)
        own, mean = flash.quantised_values(v[:, :1], E4M3, "block", tiles)
        ref, ref_lse = exact(*(_fp8.dequantise(one, torch.float64) for one in (x.q, x.k, own)), causal=causal)
        ref += mean[:, :, None].double()  # no row is without keys
        written, _ = guarded(x.q, x.k, own, causal=causal, scale=dim**-0.5, mean=mean)
        # tensor cores cut the products of scores to some 13 bits of the sum so far
        norms = [float(_fp8.dequantise(one).norm(dim=-1).amax()) for one in (x.q, x.k)]
        assert float((lse - ref_lse).abs().max()) < 1e-2 + 2**-9 * math.prod(norms) * dim**-0.5, (
            case,
            causal,
        )
        for name, other in (("fp64", ref), ("written", written)):
            off = torch.nn.functional.pad(o - other, (0, 0, 0, -rows % 64)).unflatten(2, (-1, 64))
            size = torch.nn.functional.pad(other, (0, 0, 0, -rows % 64)).unflatten(2, (-1, 64))
            worst = float((off.norm(dim=(-2, -1)) / size.norm(dim=(-2, -1))).max())
            assert worst < (2e-2 if "key" in case else 5e-2), (case, causal, rows, name, worst)
        print(case, causal, rows, flush=True)


def hopper_configs_of(dim: int, dim_v: int, causal: bool) -> Tiles:
    """The table's tiles for many keys."""
    from flashbench import hopper_configs

    return hopper_configs.choose_fp8(dim, dim_v, causal, 16384)


def many(dim: int, dim_v: int) -> None:
    """Several tiles of queries for each program, tails, groups: every row is the written arithmetic's."""
    from fp8 import E4M3, guarded

    from flashbench.kernels import _flash_v3_fp8 as flash

    shapes = [(1, 8, 2, 4096, 4096), (1, 6, 3, 2500, 5003), (2, 16, 16, 4096, 4096), (1, 2, 1, 4300, 16384)]
    for (batch, heads, kv_heads, rows, keys), causal in itertools.product(shapes, (False, True)):
        sizes = (heads, rows, dim), (kv_heads, keys, dim), (kv_heads, keys, dim_v)
        q, k, v = (torch.randn(batch, *size, device="cuda") for size in sizes)
        x = flash.operands(q, k, v, dtype=E4M3, causal=causal)
        o, lse, launch = flash.forward_launch(x, causal=causal, scale=dim**-0.5, out_dtype=torch.bfloat16)
        o.fill_(math.nan)
        lse.fill_(math.nan)
        launch.run()
        own, mean = flash.quantised_values(v, E4M3, "block", x.tiles)
        want, want_lse = guarded(x.q, x.k, own, causal=causal, scale=dim**-0.5, mean=mean)
        off = (o - want).norm(dim=-1) / want.norm(dim=-1)
        assert float(off.max()) < 0.1, (rows, keys, causal, off.flatten().topk(8))
        assert float(off.square().mean().sqrt()) < 2e-2
        assert float((lse - want_lse).abs().max()) < 1e-2
        for _ in range(10):
            again = flash.flash_attention(x, causal=causal, out_dtype=o.dtype)
            assert all(torch.equal(one, other) for one, other in zip(again, (o, lse), strict=True))
        print(batch, heads, rows, keys, causal, flush=True)


def budget(dim: int, dim_v: int) -> None:
    """4096 keys, as the table runs them: every row within the budget of fp8."""
    from attention import problem

    from flashbench.kernels import _flash_v3_fp8 as flash
    from flashbench.kernels._inputs import make_inputs
    from flashbench.kernels._reference import Reference

    for seed, causal in itertools.product(range(3), (False, True)):
        p = problem(
            batch=1, num_heads=4, num_kv_heads=2, seqlen_q=4096, seqlen_k=4096, head_dim=dim,
            head_dim_v=dim_v, dtype="fp8", causal=causal, fp8_scale="block", hadamard=True,
        )  # fmt: skip
        inputs = make_inputs(p, "cuda", seed)
        options = {"dtype": torch.float8_e4m3fn, "hadamard": True, "causal": causal}
        x = flash.operands(inputs.q, inputs.k, inputs.v, **options)
        o, _ = flash.flash_attention(x, causal=causal, out_dtype=inputs.q.dtype)
        assert Reference(p, inputs, all_rows=True).compare(o).ok, (seed, causal)
        print(seed, causal, flush=True)


def long(dim: int, dim_v: int) -> None:
    """64k keys with V of one sign: what tensor cores cut off would go one way."""
    from fp8 import E4M3, exact

    from flashbench.kernels import _flash_v3_fp8 as flash

    sizes = (1024, dim), (2**16, dim), (2**16, dim_v)
    q, k, v = (torch.randn(1, 1, *size, device="cuda") for size in sizes)
    for sign in (1, -1):
        x = flash.operands(q, k, sign * v.abs(), dtype=E4M3, causal=False)
        o, _ = flash.flash_attention(x, causal=False, out_dtype=torch.float32)
        ref, _ = exact(q, k, sign * v.abs())
        assert abs(float((o.double() / ref).mean()) - 1) < 4e-3
        print(sign, flush=True)


def nans(dim: int, dim_v: int) -> None:
    """A NaN of q, k or v makes NaN of what it is of, and of nothing else."""
    from fp8 import E4M3

    from flashbench.kernels import _flash_v3_fp8 as flash

    for which, causal in itertools.product(range(3), (False, True)):
        inputs = [torch.randn(1, 2, 640, 128, device="cuda") for _ in range(3)]
        inputs[which][0, 1, 300, 7] = math.nan
        x = flash.operands(*inputs, dtype=E4M3, causal=causal, tiles=hopper_configs_of(dim, dim_v, causal))
        o, lse = flash.flash_attention(x, causal=causal)
        # a scale is of 128 rows or keys; whoever sees one of those keys has it, of V even where P is 0
        rows = slice(256, 384) if which == 0 else slice(256 if causal else 0, 640)
        assert bool(o[0, 1, rows].isnan().any(-1).all()), which
        assert bool(o[0, 0].isfinite().all()), which
        assert bool(lse[0, 0].isfinite().all()), which
        assert bool(o[0, 1, : rows.start].isfinite().all()), which
        assert bool(lse[0, 1, rows].isnan().all() if which < 2 else lse[0, 1].isfinite().all()), which
        print(which, causal, flush=True)


GROUPS = [
    *(f"{name} 128 128" for name in ("guards", "many", "budget", "long", "nans")),
    *(f"shapes {dim} {dim_v}" for dim, dim_v in DIMS),
    *(f"outliers {dim} {dim}" for dim in (64, 128)),
]


@pytest.mark.gpu
@pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs sm_90"
)
@pytest.mark.parametrize("group", GROUPS)
def test_in_a_process_of_its_own(group: str) -> None:
    root = Path(__file__).resolve().parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])}
    environment.pop("TRITON_INTERPRET", None)
    code, said = processes.watched([sys.executable, __file__, *group.split()], environment, SILENT_S)
    assert code is not None, f"{group} did not get on for {SILENT_S} s: it hangs\n{said[-2000:]}"
    assert code == 0, said[-6000:]


if __name__ == "__main__":
    torch.manual_seed(0)
    globals()[sys.argv[1]](*map(int, sys.argv[2:]))
    torch.cuda.synchronize()
