"""flash-v3-fp8's kernel, run on a CPU over a model of Hopper's threads; its keys in registers."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from torch import Tensor

HERE = Path(__file__).resolve().parent
CASES = {
    # changes to the tiles; heads, K/V heads, seqlen_q, seqlen_k, head_dim, head_dim_v; format; what shares
    "grouped": ("block_k=256, stages=3", (4, 2, 640, 769, 64, 64), "e4m3fn", "block"),
    "ragged": ("block_k=64, q_stages=1", (2, 1, 300, 433, 96, 48), "e5m2", "head"),
    "rows without keys": ("", (2, 2, 513, 300, 128, 128), "e4m3fn", "block"),
    "emulated": ("max3=True, emulated=4", (2, 1, 333, 300, 128, 128), "e4m3fn", "block"),
    "sums": ("stages=3, promote=2", (2, 2, 513, 1300, 128, 128), "e4m3fn", "block"),
    "one tile of keys": ("stages=3, q_stages=1, promote=1", (2, 1, 700, 96, 128, 128), "e5m2", "tensor"),
    "sums, emulated": ("stages=3, emulated=3, promote=8", (4, 2, 333, 300, 96, 128), "e4m3fn", "head"),
}
OTHERS = [
    ("grouped", True), ("ragged", True), ("ragged", False), ("sums", False), ("one tile of keys", False),
    ("sums, emulated", False),
]  # fmt: skip


P1, P2, P8 = "stages=2, q_stages=1, promote=1", "stages=2, q_stages=2, promote=2", "stages=3, promote=8"
SUMS = {
    # the same, and O's dtype: what each program has to do is in the name
    "one product": (P1, (1, 1, 128, 128, 64, 128), "e4m3fn", "block", "bfloat16"),
    "tiles of one product": (P1, (3, 1, 640, 100, 64, 64), "e5m2", "head", "float32"),
    "two and three products": (P2, (2, 2, 384, 384, 64, 128), "e4m3fn", "block", "bfloat16"),
    "more than are summed": (
        "stages=3, promote=4, emulated=3", (2, 1, 256, 1300, 128, 128), "e4m3fn", "block", "bfloat16",
    ),
    "a multiple of what is summed": (
        "stages=4, q_stages=1, promote=2", (1, 1, 640, 1024, 64, 128), "e4m3fn", "tensor", "float16",
    ),
    "rows and tiles without keys": (P8, (2, 2, 1100, 300, 64, 128), "e4m3fn", "block", "bfloat16"),
    "one row": (P8 + ", emulated=3", (4, 2, 1, 1537, 128, 48), "e5m2", "head", "float32"),
}  # fmt: skip
ORDERS = [
    *(
        (*first, *order, *last)
        for order, (first, last) in zip(
            itertools.permutations((0, 1, 2, -1)),
            itertools.cycle([((3, 4), ()), ((3,), (4,)), ((4,), (3,)), ((), (3, 4)), ((4, 3), ())]),
            strict=False,
        )
    ),
    *range(8),
]  # fmt: skip
"""Of two warpgroups, the warp that loads, the warps that wait for either, and TMA: who goes on first where
several can (``hopper_turns``)."""


def child(code: str) -> str:
    """What a process prints that has a model in Triton's place, or imports it compiled."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), str(HERE.parent)])}
    if "PYTHONPATH" in os.environ:
        environment["PYTHONPATH"] += os.pathsep + os.environ["PYTHONPATH"]
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment
    )
    assert not done.returncode, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("case", "causal"),
    [
        ("rows without keys", True),
        ("emulated", False),
        ("sums", True),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in OTHERS),
    ],
)
def test_no_barrier_is_waited_for_in_vain_and_outputs_are_of_the_written_arithmetic(
    case: str, causal: bool
) -> None:
    tiles, shape, cast, share = CASES[case]
    asked = f"{shape}, {causal}, dict({tiles}), {cast!r}, {share!r}"
    printed = child(f"import {Path(__file__).stem} as m; m.run({asked})")
    largest, mean, of_lse = map(float, printed.split())
    emulated = "emulated" in case  # half of P is up to 0.5 % off before it is rounded to steps of 6 to 12 %
    # a score's last bit may round a probability to the other side
    assert mean < (3e-3 if emulated else 1e-5)
    assert largest < 0.05
    assert of_lse < (6e-3 if emulated else 1e-5)  # of a row that is all one key's


@pytest.mark.parametrize(
    ("case", "causal", "orders"),
    [
        ("two and three products", True, "::7"),
        *(
            pytest.param(*both, ":", marks=pytest.mark.slow)
            for both in itertools.product(SUMS, (False, True))
        ),
    ],
)
def test_whoever_is_ahead_no_buffer_is_read_or_written_too_soon(case: str, causal: bool, orders: str) -> None:
    tiles, shape, cast, share, out = SUMS[case]
    asked = f"m.ORDERS[{orders}], {shape}, {causal}, dict({tiles}), {cast!r}, {share!r}, {out!r}"
    printed = child(f"import {Path(__file__).stem} as m; m.run_in_order({asked})")
    largest, mean, of_lse, differ = map(float, printed.split())
    emulated = "emulated" in tiles
    rounded = {"float32": 0, "bfloat16": 2e-3, "float16": 3e-4}[out]
    assert mean < (3e-3 if emulated else 1e-5) + rounded
    assert largest < 0.05 + 4 * rounded
    assert of_lse < (6e-3 if emulated else 1e-5)
    assert differ == 0


def run(shape: tuple[int, ...], causal: bool, changes: dict[str, int], cast: str, share: str) -> None:
    """Print the largest and the mean difference of o to the written arithmetic, and the largest of lse."""
    launch, o, lse, want, want_lse = made(shape, causal, changes, cast, share)
    launch()
    print(*apart(o, lse, want, want_lse))


def run_in_order(orders: list[Any], *asked: Any) -> None:
    """Print the same of the first of the orders, and how many numbers any other gave otherwise."""
    import hopper_threads as model
    import torch

    launch, o, lse, want, want_lse = made(*asked)
    differ, first = 0, None
    for order in orders:
        model.ORDER[0] = order
        o.fill_(math.nan)
        lse.fill_(math.nan)
        launch()
        first = first or (o.clone(), lse.clone())
        differ += sum(
            int((~torch.isclose(x, y, rtol=0, atol=0, equal_nan=True)).sum())
            for x, y in zip((o, lse), first, strict=True)
        )
    print(*apart(*first, want, want_lse), differ)


def apart(o: Tensor, lse: Tensor, want: Tensor, want_lse: Tensor) -> tuple[float, float, float]:
    """The largest and the mean difference of o, and the largest of lse."""
    import torch

    assert torch.equal(lse.isinf(), want_lse.isinf())
    error = (o.float() - want).abs()
    return error.max().item(), error.mean().item(), (lse - want_lse).nan_to_num().abs().max().item()


def made(
    shape: tuple[int, ...], causal: bool, changes: dict[str, int], cast: str, share: str, out: str = "float32"
) -> tuple[Any, ...]:
    """(what fills them, o, lse, both as the written arithmetic has them) over the model, two batches."""
    import hopper_threads as model
    import torch

    promote = changes.get("promote")
    kernels = model.install("_hopper_fp8_sums" if promote else "_hopper_fp8_kernels")
    from fp8 import guarded

    from flashbench import hopper_configs
    from flashbench.hopper_configs import ROWS, Tiles
    from flashbench.kernels import _fp8
    from flashbench.kernels import _hopper_schedule as schedule

    tiles, dtype = Tiles(**changes), getattr(torch, f"float8_{cast}")
    heads, kv_heads, seqlen_q, seqlen_k, dim, dim_v = shape
    scale = dim**-0.5
    torch.manual_seed(0)
    q, k, v = (
        torch.randn(2, *sizes)
        for sizes in ((heads, seqlen_q, dim), (kv_heads, seqlen_k, dim), (kv_heads, seqlen_k, dim_v))
    )
    mean = None
    if promote:  # bases of the first tiles are too low, V's scales differ by powers of two, its means too
        k *= 1.4
        k[:, :, :150] *= 0.1
        v *= torch.exp2(-(torch.arange(seqlen_k) // 100 % 7))[:, None]
        v += torch.linspace(-1, 2, dim_v) * torch.arange(1.0, kv_heads + 1)[:, None, None]
        v, mean = _fp8.centred(v, tiles.block_k)
    else:
        k *= torch.linspace(0.2, 2, seqlen_k)[:, None]  # scales differ by block
    sizes = tiles.block_q, tiles.block_k, tiles.block_k
    of_v = _fp8.quantise_values if promote else _fp8.quantise
    rounded = [
        quantise(x, dtype, share, size)
        for quantise, x, size in zip((_fp8.quantise, _fp8.quantise, of_v), (q, k, v), sizes, strict=True)
    ]
    values = [*(x.values for x in rounded[:2]), _fp8.interleave(rounded[2]).values]
    o = torch.full((2, heads, seqlen_q, dim_v), math.nan, dtype=getattr(torch, out))
    lse = torch.full((2, heads, seqlen_q), math.nan)
    walk = schedule.Shape(
        heads=2 * heads, group=heads // kv_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        block_m=tiles.block_q, block_n=tiles.block_k, causal=causal, kv_bytes=2**22,
    )  # fmt: skip
    table = schedule.packed(schedule.table(walk, 3), walk.tiles, heads)
    d, e = hopper_configs.width(dim, dim), hopper_configs.width(dim_v, dim_v)
    height = tiles.block_q if promote else ROWS
    boxes = [height, d], [tiles.block_k, d], [e, tiles.block_k], [height, e]
    means = () if mean is None else (torch.nn.functional.pad(mean, (0, e - dim_v)).view(-1),)
    args = (
        *(model.Descriptor(x, [1, 1, *box]) for x, box in zip((*values, o), boxes, strict=True)),
        *map(model.Pointer, (*(x.scales.view(-1) for x in rounded), *means, lse.view(-1))),
        model.Pointer([entry for row in table for entry in row]), walk.tiles, heads, heads // kv_heads,
        seqlen_q, seqlen_k, scale * math.log2(math.e), *(() if promote else (tiles.block_q,)),
        tiles.block_k, d, e, tiles.stages, tiles.q_stages, causal,
        *((tiles.emulated, promote, 4 // o.itemsize) if promote else (tiles.max3, tiles.emulated)),
        *(tiles.registers[1:] if promote else tiles.registers),
    )  # fmt: skip
    if promote:
        want, want_lse = guarded(*rounded, causal=causal, scale=scale, mean=mean)
    else:
        want, want_lse = _fp8.attention(*rounded, causal=causal, scale=scale, lag=kernels.LAZY)
    warpgroups = tiles.warpgroups if promote else 1  # of the kernel's first role
    launch = partial(model.launch, kernels.forward, len(table[0]), *args, warpgroups=warpgroups)
    return launch, o, lse, want, want_lse


def layouts() -> None:
    """Print the columns by register of each lane of a warp's first row, of S and of P as an operand."""
    from triton._C.libtriton import gluon_ir, ir
    from triton.experimental.gluon import language as gl

    context = ir.context()
    ir.load_dialects(context)
    builder = gluon_ir.GluonOpBuilder(context)
    scores, product = (gl.NVMMADistributedLayout([3, 0], [4, 1], [16, n, 32]) for n in (128, 64))
    for layout in (scores, gl.DotOperandLayout(0, parent=product, k_width=4)):
        linear = builder.to_linear_layout(layout._to_ir(builder), [64, 128])
        for bases in (linear.reg_bases, linear.lane_bases):
            print(bases)


def test_a_thread_gives_the_columns_of_p_that_it_has() -> None:
    """By the layouts that Triton itself reports: V's keys in their order, register for register."""
    import torch

    from flashbench.kernels import _fp8

    printed = child(f"import {Path(__file__).stem} as m; m.layouts()")
    read = [json.loads(line) for line in printed.splitlines()]
    (scores, lanes), (operand, operand_lanes) = read[:2], read[2:]

    def columns(bases: list[list[int]], number: int) -> tuple[int, int]:
        row = column = 0
        for bit, (r, c) in enumerate(bases):
            if number >> bit & 1:
                row, column = row ^ r, column ^ c
        return row, column

    keys = torch.arange(128.0).reshape(1, 1, 128, 1)
    order = _fp8.interleave(_fp8.quantise(keys, torch.float8_e4m3fn, "tensor", 128))
    assert order.values.shape == (1, 1, 1, 128)
    place = torch.arange(128).reshape(4, 2, 2, 4, 2).transpose(2, 3).reshape(128).tolist()
    exact = keys.to(torch.float8_e4m3fn)  # the same numbers, though not all are told apart
    marked = _fp8.interleave(_fp8.Quantised(exact, torch.ones(1, 1, 1), 128)).values
    assert torch.equal(marked.flatten().float(), exact.flatten()[place].float())
    for lane in range(32):
        base, operand_base = columns(lanes, lane), columns(operand_lanes, lane)
        has = {(base[0] ^ r, base[1] ^ c) for n in range(64) for r, c in [columns(scores, n)]}
        gives = [
            (operand_base[0] ^ r, place[operand_base[1] ^ c])
            for r, c in (columns(operand, n) for n in range(64))
        ]
        assert set(gives) == has
        # of a word's four bytes, two and two are neighbours in S, as four() packs them
        for word in range(16):
            four = gives[4 * word : 4 * word + 4]
            assert [c - four[0][1] for _, c in four] == [0, 1, 8, 9]
            assert len({r for r, _ in four}) == 1
