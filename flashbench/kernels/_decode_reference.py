"""Decoding in fp64, and how far a kernel may be from it; random caches to decode from. Never timed.

The bound is the one of ``_reference``: 2·max|naive − ref| + 2·max|((ref + 0.3) − 0.3 in the dtype) − ref|,
naive being the textbook op list in q's dtype over the dequantised cache.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flashbench.kernels._flash_decode import FP8, Cache
from flashbench.kernels._precision import torch_dtype
from flashbench.problem import Problem

Inputs = tuple[Tensor, Cache]


def make(problem: Problem, page_size: int, is_fp8: bool, device: str, seed: int) -> Inputs:
    """(q, cache) of standard normal numbers, every sequence seqlen_k long.

    page_size 0 is a contiguous cache; else the pages of all sequences are shuffled. An fp8 cache comes with
    scales of 1/2 for K and V.
    """
    p = problem
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=device, dtype=torch_dtype(p.dtype))

    q = normal(p.batch, p.num_heads, p.seqlen_q, p.head_dim)
    table = None
    if page_size:
        pages = -(-p.seqlen_k // page_size)
        order = torch.randperm(p.batch * pages, generator=generator, device=device)
        table = order.to(torch.int32).view(p.batch, pages)
        shape = p.batch * pages, page_size, p.num_kv_heads
    else:
        shape = p.batch, p.num_kv_heads, p.seqlen_k
    k, v = (normal(*shape, dim) for dim in (p.head_dim, p.head_dim_v))
    if is_fp8:
        k, v = k.to(FP8), v.to(FP8)
    used = torch.full((p.batch,), p.seqlen_k, dtype=torch.int32, device=device)
    scale = torch.full((1,), 0.5, device=device) if is_fp8 else None
    return q, Cache(
        k=k, v=v, seqused_k=used, block_table=table, k_descale=scale, v_descale=scale,
        max_seqlen_k=p.seqlen_k,
    )  # fmt: skip


def paged(
    rows: Sequence[Tensor], lengths: Sequence[int], page_size: int, *, spare: int = 0, seed: int = 0,
    garbage: int = 2**31 - 1,
) -> tuple[tuple[Tensor, ...], Tensor]:  # fmt: skip
    """Contiguous caches (batch, heads, capacity, dim) in shuffled pages, and their block table.

    Rows past a sequence's length and ``spare`` pages that none uses are NaN, table entries past its end
    garbage.
    """
    device, needed = rows[0].device, [-(-n // page_size) for n in lengths]
    order = torch.randperm(sum(needed) + spare, generator=torch.Generator().manual_seed(seed % 2**63))
    wide = max(1, -(-rows[0].shape[2] // page_size))
    table = torch.full((len(lengths), wide), garbage, dtype=torch.int32)

    def empty(pages: int, x: Tensor) -> Tensor:
        shape = pages, page_size, x.shape[1], x.shape[3]
        return torch.full(shape, float("nan"), device=device).to(x.dtype)

    found = tuple(empty(len(order), x) for x in rows)
    first = 0
    for b, (n, pages) in enumerate(zip(lengths, needed, strict=True)):
        own = order[first : first + pages]
        table[b, :pages], first = own, first + pages
        for x, to in zip(rows, found, strict=True):
            filled = empty(pages, x)
            filled.flatten(0, 1)[:n] = x[b, :, :n].transpose(0, 1)
            # as bytes: not every dtype can be put in places
            to.view(torch.uint8)[own.to(device)] = filled.view(torch.uint8)
    return found, table.to(device)


def compare(problem: Problem, inputs: Inputs, o: Tensor) -> tuple[float, float]:
    """(largest error of o, bound), causal; a NaN makes the error NaN."""
    ref, bound = expected(problem, inputs)
    return error(o, ref), bound


def error(o: Tensor, ref: Tensor) -> float:
    """The largest error of o, NaN for a NaN in it."""
    return float((o.double() - ref).abs().max())


def expected(problem: Problem, inputs: Inputs) -> tuple[Tensor, float]:
    """(o in fp64, bound), causal, sequence by sequence."""
    q, cache = inputs
    refs, naive, rounding = [], 0.0, 0.0
    for b in range(problem.batch):
        k, v = _sequence(problem, cache, b)
        ref = _attention(problem, q[b].double(), k.double(), v.double())
        plain = _attention(problem, q[b], k.to(q.dtype), v.to(q.dtype)).double()
        back = ((ref.to(q.dtype) + 0.3) - 0.3).double()
        naive = max(naive, float((plain - ref).abs().max()))
        rounding = max(rounding, float((back - ref).abs().max()))
        refs.append(ref)
    return torch.stack(refs), 2 * naive + 2 * rounding


def _sequence(problem: Problem, cache: Cache, b: int) -> tuple[Tensor, Tensor]:
    """K and V of one sequence, (num_kv_heads, seqlen_k, dim), dequantised in fp64 where they are fp8."""
    found = []
    for x, scale in ((cache.k, cache.k_descale), (cache.v, cache.v_descale)):
        if cache.block_table is None:
            rows = x[b]
        else:
            rows = x[cache.block_table[b].long()].flatten(0, 1)[: problem.seqlen_k].transpose(0, 1)
        found.append(rows if scale is None else rows.double() * scale.double())
    return found[0], found[1]


def _attention(p: Problem, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Textbook attention of one sequence in the tensors' dtype; bottom-right causal."""
    grouped = q.reshape(p.num_kv_heads, p.group * p.seqlen_q, p.head_dim)
    scores = (grouped @ k.transpose(1, 2)) * p.softmax_scale
    query = torch.arange(p.seqlen_q, device=q.device).repeat(p.group)
    keys = torch.arange(p.seqlen_k, device=q.device)
    hidden = keys > (query + p.seqlen_k - p.seqlen_q)[:, None]
    weights = scores.masked_fill_(hidden, float("-inf")).softmax(-1).nan_to_num(0.0)
    return (weights @ v).reshape(p.num_heads, p.seqlen_q, p.head_dim_v)
