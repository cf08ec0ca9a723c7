"""Kernels round q, k and v to the numbers that torch's operations give; here in the interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import json
import math
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fp8 import E4M3, E5M2, with_outliers
from tiers import tiers

from flashbench._profilers import sass
from flashbench.kernels import _fp8, _triton

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
_triton.load(DEVICE)
rounding = importlib.import_module("flashbench.kernels._fp8_rounding")
DTYPES = torch.float16, torch.bfloat16, torch.float32
SHAPES = [(1, 2, 64, 32), (2, 1, 75, 48), (1, 1, 1, 16), (1, 2, 96, 5), (2, 3, 257, 16), (1, 1, 1100, 8)]


def same(found: _fp8.Quantised, wanted: _fp8.Quantised) -> None:
    """Equal as numbers, which a zero's sign is no part of; of NaNs that they are."""
    assert (found.block, found.values.dtype, found.values.shape) == (
        wanted.block, wanted.values.dtype, wanted.values.shape,
    )  # fmt: skip
    torch.testing.assert_close(found.scales, wanted.scales, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(found.values.double(), wanted.values.double(), rtol=0, atol=0, equal_nan=True)
    assert found.scales.is_contiguous()
    assert found.values.is_contiguous()


def numbers(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """With outliers and a mean, zeros in a column, halves between two numbers of a format, tiny ones."""
    x = with_outliers(*shape, seed=seed, device=DEVICE) + 0.75
    x[..., 0] = 0.0
    x[0, 0, ::3] = (x[0, 0, ::3] * 8).round() / 8
    x[-1, -1, :2] *= 2.0**-14
    return x.to(dtype)


def check(x: torch.Tensor, dtype: torch.dtype, block: int) -> None:
    """q's and k's, v's without a mean to take off, and v's with."""
    plain = _fp8.quantise(x, dtype, "block", block)
    same(rounding.quantise(x, dtype, block), plain)
    same(rounding.interleaved(x, dtype, block), _fp8.interleave(plain))
    rest, mean = _fp8.centred(x, block)
    found, taken = rounding.centred(x, dtype, block)
    same(found, _fp8.interleave(_fp8.quantise_values(rest, dtype, "block", block)))
    assert torch.equal(taken, mean)


@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize(("of", "dtype"), [*((of, E4M3) for of in DTYPES), (torch.float16, E5M2)])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_kernels_round_as_torch_does(shape: tuple[int, ...], of: torch.dtype, dtype: torch.dtype) -> None:
    check(numbers(*shape, dtype=of), dtype, 32)


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("of", DTYPES)
@pytest.mark.parametrize(
    ("shape", "block"),
    [
        ((2, 4, 4100, 128), 128),
        ((1, 3, 1000, 64), 256),
        ((1, 2, 333, 96), 128),
        ((1, 1, 1, 64), 128),
        ((1, 1, 1, 128), 256),
        ((1, 2, 2, 32), 128),
        ((1, 2, 16, 48), 256),
    ],
)
def test_blocks_of_flash_v3_fp8_are_rounded_so_on_a_gpu(
    shape: tuple[int, ...], block: int, of: torch.dtype, dtype: torch.dtype
) -> None:
    check(numbers(*shape, dtype=of), dtype, block)


@pytest.mark.parametrize("odd", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_where_torch_has_them(odd: float) -> None:
    x = numbers(1, 2, 96, 16, dtype=torch.float32)
    x[0, 1, 40, 3] = odd
    x[0, 0, :, 5] = odd
    check(x, E4M3, 32)


@pytest.mark.parametrize("largest", [3e38, torch.finfo(torch.float32).max, 1e-42, 0.0])
def test_the_largest_and_the_smallest_numbers_are_rounded_alike(largest: float) -> None:
    x = torch.full((1, 1, 70, 4), largest, device=DEVICE)
    x[..., 1] *= -1
    x[0, 0, 5:, 2] = -largest
    check(x, E4M3, 32)


@pytest.mark.parametrize("lie", [lambda x: x.transpose(1, 2), lambda x: x.mT, lambda x: x[..., 8:24]])
def test_any_strides_will_do(lie: Callable[[torch.Tensor], torch.Tensor]) -> None:
    check(lie(numbers(2, 40, 4, 48, dtype=torch.float16)), E4M3, 32)


@pytest.mark.parametrize(
    ("dtype", "width", "block"), tiers([("float8_e4m3fn", 128, 128)], [("float8_e5m2", 64, 256)])
)
def test_the_kernels_compile_for_hopper_without_a_spill_and_write_16_bytes_at_once(
    dtype: str, width: int, block: int
) -> None:
    script = Path(__file__).with_name("compiled_rounding.py")
    told = subprocess.run(
        [sys.executable, str(script), dtype, str(width), str(block)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert told.returncode == 0, told.stderr[-2000:]
    found = [json.loads(line) for line in told.stdout.splitlines()]
    assert [one["name"] for one in found] == ["quantise", "quantise", "columns", "means", "quantise"]
    assert not any(sass.count(one["sass"]).spills for one in found)
    assert all("LDG.E.128" in one["sass"] for one in found if one["name"] != "means")
    assert all("STG.E.128" in one["sass"] for one in found if one["name"] == "quantise")
