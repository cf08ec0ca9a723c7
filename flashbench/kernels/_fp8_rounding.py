"""q, k and v rounded to fp8 with a scale per block by kernels: what _fp8.py does in torch's operations.

Each number is read once or, of a V that is to be without its mean, twice. Import through ``_triton.load``.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from triton import cdiv, next_power_of_2

from flashbench.kernels import _fp8
from flashbench.kernels import _fp8_rounding_kernels as kernels
from flashbench.kernels._call import INTERPRETED, Launch, on
from flashbench.kernels._fp8 import Columns, Quantised
from flashbench.kernels._layout import unit_stride

WARPS = 8
CHUNK = 16
"""Blocks that a program which has a head looks at together."""


def quantise(x: Tensor, dtype: torch.dtype, block: int) -> Quantised:
    """``_fp8.quantise`` with a scale per block."""
    return _quantised(x, dtype, block)


def interleaved(v: Tensor, dtype: torch.dtype, block: int) -> Quantised:
    """``_fp8.interleave`` of that. block: a multiple of ``_fp8.GROUP``."""
    return _quantised(v, dtype, block, turned=True)


def centred(v: Tensor, dtype: torch.dtype, block: int) -> tuple[Quantised, Tensor]:
    """``_fp8.interleave`` of ``_fp8.quantise_values`` of what ``_fp8.centred`` leaves; and the mean."""
    v = unit_stride(v.detach())
    batch, heads, rows, width = v.shape
    blocks = cdiv(rows, block)
    shape = batch, heads, blocks, width
    found = Columns(
        top=v.new_empty(shape, dtype=torch.float32), bottom=v.new_empty(shape, dtype=torch.float32),
        total=v.new_empty(shape, dtype=torch.float64), count=v.new_empty(shape, dtype=torch.int32),
    )  # fmt: skip
    options = _options(block, width)
    args = *(v, *found), *v.stride()[:3], heads, rows, blocks
    _launch("columns", kernels.columns, batch * heads * blocks, args, options)
    mean, taken = (v.new_empty((batch, heads, width), dtype=of) for of in (torch.float32, torch.bfloat16))
    scales, divisors = (v.new_empty((batch, heads, blocks), dtype=torch.float32) for _ in range(2))
    args = *found, mean, taken, scales, divisors, rows, blocks
    options = {**options, "LARGEST": int(torch.finfo(dtype).max), "CHUNK": CHUNK}
    _launch("means", kernels.means, batch * heads, args, options)
    values = _quantised(v, dtype, block, turned=True, given=(mean, divisors)).values
    return Quantised(values, scales, block), taken


def _quantised(
    x: Tensor,
    dtype: torch.dtype,
    block: int,
    *,
    turned: bool = False,
    given: tuple[Tensor | None, Tensor | None] = (None, None),
) -> Quantised:
    """given: (mean, scales) of each head and block."""
    x = unit_stride(x.detach())
    batch, heads, rows, width = x.shape
    blocks = cdiv(rows, block)
    wide = cdiv(rows, _fp8.GROUP) * _fp8.GROUP
    values = x.new_empty((batch, heads, *((width, wide) if turned else (rows, width))), dtype=dtype)
    mean, scales = given
    if scales is None:
        scales = x.new_empty((batch, heads, blocks), dtype=torch.float32)
    options = {
        **_options(block, width), "LARGEST": int(torch.finfo(dtype).max), "GIVEN": mean is not None,
        "TURNED": turned, "BY_HAND": INTERPRETED,
    }  # fmt: skip
    args = x, mean, values, scales, *x.stride()[:3], heads, rows, blocks, wide
    _launch("quantise", kernels.quantise, batch * heads * blocks, args, options)
    return Quantised(values, scales, block)


def _options(block: int, width: int) -> dict[str, Any]:
    return {
        "BLOCK": block,
        "WIDTH": width,
        "COLS": next_power_of_2(width),
        "num_warps": WARPS,
        "enable_fp_fusion": True,
    }


def _launch(name: str, kernel: Any, programs: int, args: tuple[Any, ...], options: dict[str, Any]) -> None:
    with on(args[0].device):
        Launch(name, kernel, programs, args, options).run()
