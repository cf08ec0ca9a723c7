"""8-bit floats for attention, in torch: scales, rounding, Hadamard rotation, and the kernel's arithmetic.

An fp8 tensor is values times scales: x is about values * scale, with one fp32 scale for the whole tensor,
for each head, or for each block of rows of a head. A scale maps the largest magnitude that shares it to
the largest number of the format, so nothing overflows, and an outlier coarsens only what shares its scale.
``rotate`` spreads an outlier over its whole row before that, and leaves every q.k as it is.

Source: Shah et al. 2024, FlashAttention-3 (arXiv:2407.08608), section 3.3: block quantisation and
incoherent processing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from flashbench.kernels._inputs import Inputs
from flashbench.kernels._precision import torch_dtype
from flashbench.problem import FP8_SCALES, Problem

SHIFT = 8
"""Probabilities, in 0..1, are rounded to fp8 times 2**SHIFT: e4m3 reaches down to 2**-9 and up to 448."""

ALIGNMENT = 16
"""Keys of a turned V are padded to a multiple of this, for 16-byte loads along the keys."""

SMALLEST = torch.finfo(torch.float32).tiny
"""The smallest scale, of zeros."""

GROUP = 32
"""Keys that an interleaved V has in an order of their own: what one fp8 product of Hopper sums."""

GROWN = 1.25
"""By how much the largest number of a block may grow for the mean that V is without."""

LEAST_STEP = -100
"""log2 of the least step of that mean."""

SPREAD, LEAST = 2.0**-60, 2.0**-100
"""The least scale of V's, of the largest of its head and at all."""

DEFAULT_SHARE = "block"
"""What shares a scale where a problem does not say."""

BLOCK = 128
"""Rows of a block where no kernel says how many."""

SEED = 0
"""Of the rotation's signs: q and k must share them."""


@dataclass(frozen=True, eq=False)
class Quantised:
    """values: fp8 (batch, heads, rows, width). scales: fp32 (batch, heads, blocks), contiguous.

    Row r of a head is values[r] * scales[r // block]; where a whole head or tensor shares a scale, it
    stands there once for every block.
    """

    values: Tensor
    scales: Tensor
    block: int


def quantise(x: Tensor, dtype: torch.dtype, share: str, block: int) -> Quantised:
    """x (batch, heads, rows, width) as fp8 of that dtype, rounded to nearest, ties to even.

    share: of problem.FP8_SCALES. block: rows that have a scale. A scale is the largest magnitude of what
    shares it over the largest number of the format, and no smaller than fp32's smallest normal number. A
    NaN or an infinity makes NaNs of what shares its scale. Raises ValueError for another share.
    """
    x = x.detach().float()
    scales = _scales(_of_blocks(x, block).abs().amax((3, 4)), dtype, share)
    return Quantised(_divided(x, scales, dtype, block), scales, block)


def quantise_values(v: Tensor, dtype: torch.dtype, share: str, block: int) -> Quantised:
    """As ``quantise``, but for scales: the least powers of two that are no smaller, so that P may take them.

    No less than 2**-60 of the largest of a head, and than 2**-100; a block of zeros has the largest of its
    head. A NaN or an infinity leaves them finite.
    """
    v = v.detach().float()
    plain = _scales(_of_blocks(v, block).abs().amax((3, 4)), dtype, share)
    fine = plain.isfinite()
    part, exponent = torch.frexp(torch.where(fine, plain, SMALLEST))
    scales = torch.ldexp(torch.ones_like(plain), exponent - (part == 0.5).int())
    if scales.numel():
        largest = scales.amax(-1, keepdim=True)
        scales = torch.where(scales > SMALLEST, scales, largest)
        scales = scales.maximum(largest * SPREAD).clamp_min(LEAST).contiguous()
    return Quantised(_divided(v, torch.where(fine, scales, math.nan), dtype, block), scales, block)


def _scales(largest: Tensor, dtype: torch.dtype, share: str) -> Tensor:
    """The scales of ``quantise``, of the largest magnitude of each block, (batch, heads, blocks)."""
    if share not in FP8_SCALES:
        raise ValueError(f"an fp8 scale is shared by a {', '.join(FP8_SCALES)}; got {share!r}")
    if share != "block" and largest.numel():
        over = (0, 1, 2) if share == "tensor" else (2,)
        largest = largest.amax(over, keepdim=True).expand(largest.shape)
    # over a tensor: a number torch turns into its inverse on a GPU, and multiplies by that
    return (largest / largest.new_full((), torch.finfo(dtype).max)).clamp_min(SMALLEST).contiguous()


def _divided(x: Tensor, scales: Tensor, dtype: torch.dtype, block: int) -> Tensor:
    """x over its scales, rounded."""
    limit = torch.finfo(dtype).max
    # clamped: whether a cast beyond the range saturates or makes a NaN depends on torch's version
    return (x / _of_rows(scales, block, x.shape[2])).clamp(-limit, limit).to(dtype)


def centred(v: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """(v less about its mean over the keys, in fp32; what it is less, bf16 (batch, heads, width)).

    block: keys that share a scale. To a multiple of 2**-7 of the power of two that a head's largest magnitude
    has: bf16 has that whole, and what is left of bf16's numbers is as far from where fp8 rounds up or down as
    they were. Off it by a part of the distance of two of them, more would be rounded up than down, or fewer:
    a bias, the same in each row. Nothing is taken off a column where some block's largest would grow by more
    than ``GROWN`` for it, as a mean does that is of other keys: whoever sees only that block, as causal rows
    do, would be rounded by those. The mean is of finite numbers: a NaN or an infinity stays alone.
    """
    v = v.detach().float()
    if not v.numel():
        return v, v.new_zeros(*v.shape[:2], v.shape[3], dtype=torch.bfloat16)
    mean = Columns.of(v, block).mean()
    return v - mean, mean.to(torch.bfloat16).squeeze(2).contiguous()


class Columns(NamedTuple):
    """Of the finite numbers of each column of a block, (batch, heads, blocks, width).

    top, bottom: the largest and the least, fp32, -inf and inf where there are none; total: their sum, fp64;
    count: how many they are.
    """

    top: Tensor
    bottom: Tensor
    total: Tensor
    count: Tensor

    @classmethod
    def of(cls, v: Tensor, block: int) -> Columns:
        """Of v, fp32 (batch, heads, rows, width)."""
        tall, exists = _of_blocks(v, block), _of_blocks(v.isfinite(), block)

        def where(missing: float) -> Tensor:
            return torch.where(exists, tall, missing)

        return cls(
            where(-math.inf).amax(3), where(math.inf).amin(3), where(0.0).double().sum(3), exists.sum(3)
        )

    def mean(self) -> Tensor:
        """What ``centred`` takes off, fp32 (batch, heads, 1, width)."""
        count = self.count.sum(2, keepdim=True).clamp_min(1)
        mean = (self.total.sum(2, keepdim=True) / count).float()
        before = self.top.maximum(-self.bottom).clamp_min(0.0)
        _, exponent = torch.frexp(before.amax((2, 3), keepdim=True))
        step = torch.ldexp(torch.ones_like(mean), (exponent - 8).clamp_min(LEAST_STEP))
        mean = (mean / step).round() * step + 0.0  # no -0
        kept = (self._without(mean) * (1 / GROWN) <= before).all(2, keepdim=True)
        return torch.where(kept, mean, 0.0)

    def _without(self, mean: Tensor) -> Tensor:
        """The largest magnitude of each column without the mean."""
        return (self.top - mean).maximum(mean - self.bottom).clamp_min(0.0)


def _of_blocks(x: Tensor, block: int) -> Tensor:
    """x's rows in blocks, (batch, heads, blocks, block, width), 0 behind the last one."""
    return torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % block)).unflatten(2, (-1, block))


def dequantise(x: Quantised, dtype: torch.dtype = torch.float32) -> Tensor:
    """values * scales in that dtype, (batch, heads, rows, width)."""
    rows = x.values.shape[2]
    return x.values.to(dtype) * _of_rows(x.scales, x.block, rows).to(dtype)


def _of_rows(scales: Tensor, block: int, rows: int) -> Tensor:
    """The scale of each row, (batch, heads, rows, 1)."""
    return scales.repeat_interleave(block, 2)[:, :, :rows, None]


def turn(v: Quantised, alignment: int = ALIGNMENT) -> Quantised:
    """v with the keys of a column side by side: values (batch, heads, width, padded keys), 0 in the padding.

    Hopper's fp8 products read both operands along the sum's index, which of P.V is the key.
    """
    rows = v.values.shape[2]
    padded = -(-rows // alignment) * alignment
    bytes_ = torch.nn.functional.pad(v.values.view(torch.uint8).transpose(2, 3), (0, padded - rows))
    return replace(v, values=bytes_.contiguous().view(v.values.dtype))


def interleave(v: Quantised) -> Quantised:
    """As ``turn``, with the keys of every 32 in the order in which a thread of a warpgroup holds P's columns.

    Key 16a + 8b + 2t + c of them lies at 16a + 4t + 2b + c (a, b, c: 0, 1; t: 0 to 3), so that a thread's
    columns of an fp32 product are, as they are, its columns of an fp8 first operand (PTX ISA, wgmma,
    fragments of D and A). Keys are padded to a multiple of 32.
    """
    turned = turn(v, GROUP)
    batch, heads, width, keys = turned.values.shape
    bytes_ = turned.values.view(torch.uint8).reshape(batch, heads, width, keys // GROUP, 2, 2, 4, 2)
    bytes_ = bytes_.transpose(5, 6).reshape(batch, heads, width, keys)
    return replace(turned, values=bytes_.view(v.values.dtype))


def rotate(x: Tensor, seed: int = SEED) -> Tensor:
    """x times a random orthogonal matrix along its last dimension, in fp32 (fp64 stays fp64).

    Signs drawn from the seed, then a Hadamard transform over sqrt of its length. A width that is no power
    of two is cut into powers of two, largest first (96 = 64 + 32), each rotated in itself: an outlier
    spreads over its piece only. Two tensors rotated with one seed keep their products q.k.
    """
    x = x.double() if x.dtype == torch.float64 else x.float()
    width = x.shape[-1]
    generator = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (width,), generator=generator).mul_(2).sub_(1)
    pieces, start = [], 0
    x = x * signs.to(x)
    while start < width:
        length = 1 << ((width - start).bit_length() - 1)
        pieces.append(_hadamard(x[..., start : start + length]))
        start += length
    return torch.cat(pieces, -1)


def _hadamard(x: Tensor) -> Tensor:
    """The orthonormal Walsh-Hadamard transform of the last dimension, a power of two long: O(n log n)."""
    length, shape = x.shape[-1], x.shape
    step = 1
    while step < length:
        pairs = x.reshape(*shape[:-1], length // (2 * step), 2, step)
        a, b = pairs.unbind(-2)
        x = torch.stack((a + b, a - b), -2).reshape(shape)
        step *= 2
    return x / math.sqrt(length)


def rounded(problem: Problem, inputs: Inputs) -> Inputs:
    """q, k, v in fp32 as fp8 holds them by the problem's scale and rotation: q and k stay rotated.

    Blocks have BLOCK rows, as the kernel's tiles on most cards.
    """
    dtype, share = torch_dtype(problem.dtype), problem.fp8_scale or DEFAULT_SHARE
    q, k = (rotate(x) if problem.hadamard else x for x in (inputs.q, inputs.k))
    q, k, v = (dequantise(quantise(x, dtype, share, BLOCK)) for x in (q, k, inputs.v))
    return replace(inputs, q=q, k=k, v=v)


def attention(
    q: Quantised, k: Quantised, v: Quantised, *, causal: bool, scale: float, lag: float | None = None
) -> tuple[Tensor, Tensor]:
    """(o, lse) in fp32, by the kernels' own arithmetic in torch's operations, tile by tile of keys.

    Products of fp8 numbers are summed in fp32. p = exp(s - m), m the largest score so far, is rounded to
    fp8 times 2**SHIFT for P.V, and summed unrounded for the denominator. v is not turned.
    causal: bottom-right. lag: as the kernel for Hopper, which takes the last tile first and lets m lag behind
    the largest score by so much in log2. o is 0 and lse -inf for a row without keys.
    """
    batch, heads, seqlen_q, _ = q.values.shape
    group, seqlen_k = heads // k.values.shape[1], k.values.shape[2]
    width = v.values.shape[3]

    def heads_of(x: Tensor) -> Tensor:
        return x.repeat_interleave(group, 1)

    queries = q.values.float()
    row_scale = _of_rows(q.scales, q.block, seqlen_q) * (scale * math.log2(math.e))
    acc = queries.new_zeros(batch, heads, seqlen_q, width)
    total = queries.new_zeros(batch, heads, seqlen_q, 1)
    top = torch.full_like(total, -math.inf)
    rows = torch.arange(seqlen_q, device=acc.device)[:, None] + (seqlen_k - seqlen_q)
    tiles = list(enumerate(range(0, seqlen_k, k.block)))
    for tile, start in tiles if lag is None else reversed(tiles):
        keys = slice(start, min(start + k.block, seqlen_k))
        s = queries @ heads_of(k.values[:, :, keys].float()).mT
        s *= row_scale * heads_of(k.scales[:, :, tile, None, None])
        if causal:
            s.masked_fill_(torch.arange(keys.start, keys.stop, device=s.device) > rows, -math.inf)
        new_top = torch.maximum(top, s.amax(-1, keepdim=True))
        if lag:
            new_top = torch.where(new_top - top > lag, new_top, top)
        base = torch.where(new_top == -math.inf, 0.0, new_top)
        p = torch.exp2(s.sub_(base - SHIFT))
        shrink = torch.exp2(top - base)
        total = total * shrink + p.sum(-1, keepdim=True)
        values = heads_of(v.values[:, :, keys].float())
        product = p.to(v.values.dtype).float() @ values
        acc = acc * shrink + product * heads_of(v.scales[:, :, tile, None, None])
        top = new_top
    o = torch.where(total != 0, acc / total, 0.0)
    return o, ((top + total.log2() - SHIFT) * math.log(2)).squeeze(-1)
