"""What causal linear attention is held to, with its gradients: its plain form, pair by pair, in fp64.

With φ = elu + 1, w_ij = φ(q_i)·φ(k_j) for j <= i, W_i their sum, P = w / W and o = P V:

    dP = dout V^T    dw = (dP - rowsum(dout * o)) / W    dq = φ'(q) dw φ(K)    dk = φ'(k) dw^T φ(Q)
    dv = P^T dout

Gradients are compared whole, of the first heads; the bound is the forward's: twice the plain form's error in
the dtype and twice the rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashbench.kernels import _alternatives
from flashbench.kernels._alternatives import feature
from flashbench.kernels._inputs import Inputs
from flashbench.kernels._reference import rounding
from flashbench.problem import Problem
from flashbench.record import Accuracy

PAIRS, AT_ONCE = 2**28, 2**26
"""Pairs whose gradients are compared, at least those of one head; and of how many a matrix stands at a time."""


def check(problem: Problem, inputs: Inputs, o: Tensor, gradients: Sequence[Tensor] | None = None) -> Accuracy:
    """Largest errors of o and the gradients; raises ValueError for another shape or dtype than theirs."""
    found = _alternatives.check("linear-attention", problem, inputs, o)
    if gradients is None:
        return found
    heads = min(problem.batch * problem.num_heads, max(1, PAIRS // max(1, problem.seqlen_q**2)))
    refs, naive = (_plain(inputs, heads, dtype) for dtype in (torch.float64, o.dtype))
    errors, budgets = dict(found.max_abs_error), dict(found.budget)
    for (name, like), x in zip(inputs.differentiable().items(), gradients, strict=True):
        if x.shape != like.shape or x.dtype != like.dtype:
            raise ValueError(
                f"d{name} is {x.dtype} {tuple(x.shape)}; {like.dtype} {tuple(like.shape)} is wanted"
            )
        ref = refs[name]
        error = float((_first(x, heads).double() - ref).abs().max())
        errors[f"d{name}"] = error if bool(x.isfinite().all()) else float("nan")
        yardstick = float((naive[name].to(x.dtype).double() - ref).abs().max())
        budgets[f"d{name}"] = 2 * yardstick + 2 * rounding(ref, x.dtype)
    return replace(found, max_abs_error=errors, budget=budgets, key_rows=problem.seqlen_k)


def _first(x: Tensor, heads: int) -> Tensor:
    """The first heads of x (batch, heads, …), those of the first sequence before the next one's."""
    sequences = -(-heads // x.shape[1])
    return x.detach()[:sequences].flatten(0, 1)[:heads]


def _plain(inputs: Inputs, heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Gradients of the first heads by name of the input, products of dtype, sums of fp32 or wider."""
    q, k, v, dout = (_first(x, heads).to(dtype) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    sums, n = torch.promote_types(dtype, torch.float32), q.shape[1]
    fq, fk = feature(q), feature(k)
    dq, dk, dv = (torch.zeros_like(x, dtype=sums) for x in (q, k, v))
    step = max(1, AT_ONCE // max(1, heads * n))
    for start in range(0, n, step):
        rows, seen = slice(start, start + step), slice(0, min(n, start + step))
        weights = (fq[:, rows] @ fk[:, seen].mT).tril(start)
        total = weights.sum(-1, keepdim=True, dtype=sums)
        shares = (weights / total).to(dtype)
        delta = ((shares @ v[:, seen]) * dout[:, rows]).sum(-1, keepdim=True, dtype=sums)
        dw = (((dout[:, rows] @ v[:, seen].mT - delta) / total).tril(start)).to(dtype)
        dq[:, rows] = (dw @ fk[:, seen]).to(sums)
        dk[:, seen] += dw.mT @ fq[:, rows]
        dv[:, seen] += shares.mT @ dout[:, rows]
    slopes = (torch.where(x > 0, 1.0, x.to(sums).exp()) for x in (q, k))
    return dict(zip("qkv", (dq * next(slopes), dk * next(slopes), dv), strict=True))
