"""Small caches, contiguous and in pages, and a plain fp64 decode that the kernels are measured against."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashbench.kernels import _triton

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
decode: Any = _triton.load(DEVICE, "_flash_decode")
_decode_reference: Any = _triton.load(DEVICE, "_decode_reference")


def lengths(*values: int) -> Tensor:
    """seqused_k or a block table's row."""
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


def normal(*shape: int, dtype: torch.dtype = torch.float16, seed: int = 0) -> Tensor:
    """Standard normal numbers."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(DEVICE)


def make(
    used: Tensor, *, heads: tuple[int, int] = (4, 2), seqlen_q: int = 1, dims: tuple[int, int] = (16, 16),
    dtype: torch.dtype = torch.float16, capacity: int = 0,
):  # fmt: skip
    """(q, contiguous cache) for sequences of these lengths; rows past a length are NaN."""
    batch, room = len(used), capacity or max(1, int(used.max()))
    q = normal(batch, heads[0], seqlen_q, dims[0], dtype=dtype)
    k = normal(batch, heads[1], room, dims[0], dtype=dtype, seed=1)
    v = normal(batch, heads[1], room, dims[1], dtype=dtype, seed=2)
    for b, n in enumerate(used.tolist()):
        k[b, :, n:] = v[b, :, n:] = float("nan")
    return q, decode.Cache(k=k, v=v, seqused_k=used)


def paged(cache: Any, page_size: int) -> Any:
    """The same cache in shuffled pages; unused pages are NaN, table entries past the end garbage."""
    (k, v), table = _decode_reference.paged(
        (cache.k, cache.v), cache.seqused_k.tolist(), page_size, spare=3
    )  # fmt: skip
    return replace(cache, k=k, v=v, block_table=table)


def exact(q: Tensor, cache: Any, causal: bool = True) -> tuple[Tensor, Tensor]:
    """(o, lse) of a contiguous cache in fp64, row by row."""
    group, (batch, heads, rows, dim) = q.shape[1] // cache.k.shape[1], q.shape
    o = torch.zeros(batch, heads, rows, cache.v.shape[3], dtype=torch.double, device=q.device)
    lse = torch.full((batch, heads, rows), -math.inf, dtype=torch.double, device=q.device)
    scales = [torch.ones(1) if x is None else x for x in (cache.k_descale, cache.v_descale)]
    scale_k, scale_v = (x.double().to(q.device).expand(cache.k.shape[1]) for x in scales)
    for b, n in enumerate(cache.seqused_k.tolist()):
        for h in range(heads):
            own = h // group
            k = cache.k[b, own, :n].double() * scale_k[own]
            v = cache.v[b, own, :n].double() * scale_v[own]
            for i in range(rows):
                seen = max(0, min(n, i + 1 + n - rows)) if causal else n
                if seen:
                    scores = k[:seen] @ q[b, h, i].double() * dim**-0.5
                    o[b, h, i], lse[b, h, i] = scores.softmax(0) @ v[:seen], scores.logsumexp(0)
    return o, lse


def bound(dtype: torch.dtype, o: Tensor) -> float:
    """What rounding p and o to a dtype may do to o: two units in the last place of its largest number."""
    return 2 * torch.finfo(dtype).eps * max(1.0, float(o.abs().max())) if o.numel() else 0.0
