"""FlashAttention-3's forward of fp8 tensors on sm_90: operands and launch. Import through ``_triton.load``.

As in _flash_v3.py the kernel (_hopper_fp8_kernels.py, or _hopper_fp8_sums.py for tiles with ``promote``) is
made ready once for tensors of one layout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from flashbench import hopper_configs
from flashbench.hopper_configs import ROWS, Tiles
from flashbench.kernels import _fp8
from flashbench.kernels import _fp8_rounding as rounding
from flashbench.kernels import _hopper_fp8_kernels as kernels
from flashbench.kernels import _hopper_fp8_sums as sums
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.kernels._call import Launch, check_devices, check_scale, check_shapes, on
from flashbench.kernels._flash_fp8 import FORMATS
from flashbench.kernels._fp8 import Quantised
from flashbench.kernels._hopper_plan import Laid, descriptor, programs
from flashbench.kernels._hopper_ready import Ready


@dataclass(frozen=True, kw_only=True, eq=False)
class Operands:
    """What the kernel reads: q, k and v with a scale per tile; v is turned, its keys interleaved.

    keys: how many of v's are no padding. mean: of tiles with ``promote``, what v's columns are less, bf16
    (batch, num_kv_heads, columns that the kernel runs head_dim_v in).
    """

    q: Quantised
    k: Quantised
    v: Quantised
    keys: int
    tiles: Tiles
    mean: Tensor | None = None


def operands(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    dtype: torch.dtype,
    causal: bool,
    share: str = "block",
    hadamard: bool = False,
    tiles: Tiles | None = None,
) -> Operands:
    """q, k (batch, heads, rows, head_dim) and v (…, head_dim_v) of any float dtype, rounded to fp8.

    Head dims: multiples of 16 up to 128. dtype: e4m3fn or e5m2. causal: what the call will be asked for.
    share: what shares a scale, of problem.FP8_SCALES. hadamard: rotate q and k first (``_fp8.rotate``).
    tiles: in place of the table's. Raises ValueError for what does not fit.
    """
    check_shapes(q, k, v)
    check_devices(q=q, k=k, v=v)
    if dtype not in FORMATS:
        raise ValueError(f"fp8 is {' or '.join(map(str, FORMATS))}; got {dtype}")
    if reason := hopper_configs.why_not_fp8(q.shape[3], v.shape[3]):
        raise ValueError(reason)
    tiles = tiles or hopper_configs.choose_fp8(q.shape[3], v.shape[3], causal, k.shape[2])
    if hadamard:
        q, k = _fp8.rotate(q), _fp8.rotate(k)
    if share == "block" and q.is_cuda and q.numel() and k.numel():
        values, mean = rounded_values(v, dtype, tiles)
        quantise = partial(rounding.quantise, dtype=dtype)
    else:
        values, mean = quantised_values(v, dtype, share, tiles)
        values, quantise = _fp8.interleave(values), partial(_fp8.quantise, dtype=dtype, share=share)
    return Operands(
        q=quantise(q, block=tiles.block_q),
        k=quantise(k, block=tiles.block_k),
        v=values,
        keys=k.shape[2],
        tiles=tiles,
        mean=mean,
    )


def quantised_values(
    v: Tensor, dtype: torch.dtype, share: str, tiles: Tiles
) -> tuple[Quantised, Tensor | None]:
    """(v rounded to fp8 as the kernel of the tiles reads it, but not turned; ``Operands.mean``)."""
    if not tiles.promote:
        return _fp8.quantise(v, dtype, share, tiles.block_k), None
    rest, mean = _fp8.centred(v, tiles.block_k)
    return _fp8.quantise_values(rest, dtype, share, tiles.block_k), _padded(mean)


def rounded_values(v: Tensor, dtype: torch.dtype, tiles: Tiles) -> tuple[Quantised, Tensor | None]:
    """``quantised_values`` by kernels, with a scale per block, and turned (``_fp8.interleave``)."""
    if not tiles.promote:
        return rounding.interleaved(v, dtype, tiles.block_k), None
    values, mean = rounding.centred(v, dtype, tiles.block_k)
    return values, _padded(mean)


def _padded(mean: Tensor) -> Tensor:
    width = mean.shape[2]
    return torch.nn.functional.pad(mean, (0, hopper_configs.width(width, width) - width))


def flash_attention(
    x: Operands, *, causal: bool, softmax_scale: float | None = None, out_dtype: torch.dtype = torch.float16
) -> tuple[Tensor, Tensor]:
    """(o, lse): softmax(q kᵀ · softmax_scale) v in fp8 products, forward only, on an sm_90 GPU.

    causal: bottom-right aligned. softmax_scale: head_dim**-0.5 by default, more than 0. o: contiguous
    (batch, num_heads, seqlen_q, head_dim_v) in out_dtype, fp16, bf16 or fp32. lse: (batch, num_heads,
    seqlen_q) fp32, natural logarithm. Rows without keys: o = 0, lse = -inf. Raises ValueError for a scale
    out of range.
    """
    q = x.q.values
    scale = q.shape[3] ** -0.5 if softmax_scale is None else softmax_scale
    check_scale(scale)
    if not (q.numel() and x.keys):
        o = q.new_zeros(*q.shape[:3], x.v.values.shape[2], dtype=out_dtype)
        return o, q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    o, lse, launch = forward_launch(x, causal=causal, scale=scale, out_dtype=out_dtype)
    with on(lse.device):
        launch.run()
    return o, lse


def forward_launch(
    x: Operands, *, causal: bool, scale: float, out_dtype: torch.dtype
) -> tuple[Tensor, Tensor, Launch]:
    """(o, lse, the launch that fills them)."""
    q, k, v = x.q.values, x.k.values, x.v.values
    o = torch.empty((*q.shape[:3], v.shape[2]), dtype=out_dtype, device=q.device)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    laid = tuple(Laid(one.shape, one.stride()) for one in (q, k, v, o))
    own = plan(laid, (q.dtype, out_dtype), q.device, causal, x.tiles)
    means = () if x.mean is None else (x.mean,)
    tensors = q, k, v, o, x.q.scales, x.k.scales, x.v.scales, *means, lse
    return o, lse, own.launch(tensors, scale * math.log2(math.e))


@lru_cache(maxsize=256)
def plan(
    laid: tuple[Laid, ...], dtypes: tuple[torch.dtype, torch.dtype], device: torch.device, causal: bool,
    tiles: Tiles,
) -> Ready:  # fmt: skip
    """The kernel made ready for q, k, v and o laid out so; dtypes: of the operands and of o."""
    q, k, v, _ = laid
    (batch, heads, seqlen_q, dim), (_, kv_heads, seqlen_k, _), dim_v = q.shape, k.shape, v.shape[2]
    shape = schedule.Shape(
        heads=batch * heads, group=heads // kv_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
        block_m=tiles.block_q, block_n=tiles.block_k, causal=causal, kv_bytes=seqlen_k * (dim + dim_v),
    )  # fmt: skip
    rows = schedule.table(shape, programs(device))
    table = torch.tensor(schedule.packed(rows, shape.tiles, heads), device=device)
    d, e = hopper_configs.width(dim, dim), hopper_configs.width(dim_v, dim_v)
    fp8, out = dtypes
    height = tiles.block_q if tiles.promote else ROWS
    cuts = [height, d], [tiles.block_k, d], [e, tiles.block_k], [height, e]
    boxes = tuple(
        descriptor(one, [1, 1, *cut], dtype)
        for one, cut, dtype in zip(laid, cuts, (fp8, fp8, fp8, out), strict=True)
    )
    fixed = table, shape.tiles, heads, shape.group, seqlen_q, seqlen_k
    common = {
        "BLOCK_N": tiles.block_k, "D": d, "E": e, "STAGES": tiles.stages, "Q_STAGES": tiles.q_stages,
        "CAUSAL": causal,
    }  # fmt: skip
    own, others = tiles.registers
    if tiles.promote:
        forward, warps = sums.forward, sums.WARPS.value
        constants = {
            **common, "EMULATED": tiles.emulated, "PROMOTE": tiles.promote, "O_BOXES": 4 // out.itemsize,
            "OTHER_REGISTERS": others,
        }  # fmt: skip
    else:
        forward, warps = kernels.forward, 4
        constants = {
            "BLOCK_M": tiles.block_q, **common, "MAX3": tiles.max3, "EMULATED": tiles.emulated,
            "REGISTERS": own, "PRODUCER_REGISTERS": others,
        }  # fmt: skip
    plain = 5 if tiles.promote else 4  # scales, the mean of v, lse
    return Ready("v3_fp8", forward, len(rows[0]), (*boxes, *[None] * plain), fixed, constants, warps)
