"""Attention of some queries to some of their keys: a rank's local step, whose results others complete.

``forward`` gives o over these keys and their lse, which ``kernels.merge`` joins with those over other keys.
``backward`` takes the lse, o and do of all keys, so that P = exp(S − lse) is this block's share of the whole
softmax; its dk and dv are whole, its dq is what these keys add. The bundled kernels run on a GPU, flash-v3's
where they take the tensors; torch's products in a wider dtype, rows at a time, on a CPU.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from flashbench import hopper_configs
from flashbench.kernels import _op, _triton
from flashbench.kernels._layout import unit_stride

SCORES = 2**22
"""Of a CPU at once."""


def forward(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """(o, lse) of q (batch, num_heads, rows, d) over k, v (batch, num_kv_heads, keys, d or dv).

    causal: bottom-right. o in q's dtype, lse (batch, num_heads, rows) fp32; of a row without keys 0 and -inf.
    """
    if q.device.type != "cpu":
        with torch.no_grad():
            found: tuple[Tensor, Tensor] = _op.attention(q, k, v, causal=causal, scale=scale, return_lse=True)
        return found
    o, lse = q.new_empty(*q.shape[:3], v.shape[3]), q.new_empty(q.shape[:3], dtype=torch.float32)
    for rows, scores in _scores(q, k, causal, scale):
        own = scores.logsumexp(-1)
        probabilities = (scores - own.where(own.isfinite(), 0.0)[..., None]).exp()
        o[:, :, rows] = _heads(probabilities @ wider(v[:, :, None])).to(o.dtype)
        lse[:, :, rows] = _heads(own)
    return o, lse


def backward(tensors: tuple[Tensor, ...], *, causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in q's dtype. tensors: q, k, v of the block; o, lse, do of its rows over all keys."""
    q, k, v, o, lse, do = tensors
    if q.device.type != "cpu":
        return by_kernels((q, k, v, o, lse.contiguous(), do), causal, scale)
    dq = torch.empty_like(q)
    dk, dv = (torch.zeros_like(wider(x)) for x in (k, v))
    for rows, scores in _scores(q, k, causal, scale):
        own, wide_do = _grouped(lse[:, :, rows], k), wider(_grouped(do[:, :, rows], k))
        probabilities = (scores - own.where(own.isfinite(), 0.0)[..., None]).exp()
        delta = (wide_do * wider(_grouped(o[:, :, rows], k))).sum(-1, keepdim=True)
        ds = probabilities * (wide_do @ wider(v[:, :, None]).mT - delta) * scale
        dq[:, :, rows] = _heads(ds @ wider(k[:, :, None])).to(q.dtype)
        dk += (ds.mT @ wider(_grouped(q[:, :, rows], k))).sum(2)
        dv += (probabilities.mT @ wide_do).sum(2)
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def runs(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, pass_: str) -> str:
    """What computes such a block: flash-v3, flash-v2 or torch."""
    if q.device.type == "cpu":
        return "torch"
    return "flash-v3" if _op._takes_v3(q, k, v, (None, None), _options(causal, scale), pass_) else "flash-v2"


def _options(causal: bool, scale: float) -> _op.Options:
    return _op.Options(causal, -1, -1, scale, 0.0, -1, -1)


def by_kernels(tensors: tuple[Tensor, ...], causal: bool, scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """The same by the bundled kernels. A gradient of lse, here 0, tells them that P's rows sum to less."""
    _triton.load(tensors[0].device.type)  # settles how Triton runs before it is imported
    from flashbench.kernels._call import Call
    from flashbench.kernels._launches import Saved

    q, k, v, o, lse, do = (unit_stride(x) for x in tensors)
    saved = Saved(q=q, k=k, v=v, o=o, lse=lse, do=do, dlse=torch.zeros_like(lse))
    call = Call(causal=causal, scale=scale)
    name = "_flash_v2"
    if runs(q, k, v, causal=causal, scale=scale, pass_="bwd") == "flash-v3":
        name = "_flash_v3_wide" if hopper_configs.wide(q.shape[3], v.shape[3]) else "_flash_v3_backward"
    work = _triton.load(q.device.type, name).backward_launches(saved, call)
    work.run(saved)
    return work.dq, work.dk, work.dv


def _scores(q: Tensor, k: Tensor, causal: bool, scale: float) -> Iterator[tuple[slice, Tensor]]:
    """Rows, and their scores (batch, num_kv_heads, group, rows, keys), hidden ones -inf."""
    step = max(1, SCORES // max(1, q.shape[0] * q.shape[1] * k.shape[2]))
    diagonal = k.shape[2] - q.shape[2]
    for start in range(0, q.shape[2], step):
        rows = slice(start, min(start + step, q.shape[2]))
        scores = (wider(_grouped(q[:, :, rows], k)) * scale) @ wider(k[:, :, None]).mT
        if causal:
            hidden = torch.ones(scores.shape[-2:], dtype=torch.bool).triu(diagonal + start + 1)
            scores.masked_fill_(hidden, float("-inf"))
        yield rows, scores


def wider(x: Tensor) -> Tensor:
    """fp32 of 16 bits, fp64 of fp32: what is rounded step by step must not show in the sum."""
    return x.to(torch.float64 if x.dtype == torch.float32 else torch.float32)


def _grouped(x: Tensor, k: Tensor) -> Tensor:
    """Query heads as (num_kv_heads, group)."""
    return x.unflatten(1, (k.shape[1], -1))


def _heads(x: Tensor) -> Tensor:
    return x.flatten(1, 2)
