"""What causal linear attention is held to, with its gradients: its plain form, pair by pair, in fp64.

With φ = elu + 1, w_ij = φ(q_i)·φ(k_j) for j <= i, and o the numerator N = w V over the denominator D = Σ w:

    dN = dout / D    dD = -rowsum(dout * N) / D²    dw = dN Vᵀ + dD    dV = wᵀ dN
    dq = φ'(q) dw φ(K)    dk = φ'(k) dwᵀ φ(Q)

The bound is twice the error of the same steps with each result rounded to the dtype's digits, and twice the
rounding. N and D grow with the sequence: an operator that keeps them in fp16 leaves its range and is wrong,
so the yardstick has fp16's digits and not its range. Gradients are compared whole, of the first heads.

Source: Katharopoulos et al. 2020, arXiv:2006.16236, equations 4 to 9.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from flashbench.kernels._alternatives import feature, judged
from flashbench.kernels._inputs import Inputs
from flashbench.kernels._reference import rounding
from flashbench.problem import Problem
from flashbench.record import Accuracy

PAIRS, AT_ONCE = 2**28, 2**26
"""Pairs whose gradients are compared, at least those of one head; how many are held at a time."""


def check(problem: Problem, inputs: Inputs, o: Tensor, gradients: Sequence[Tensor] | None = None) -> Accuracy:
    """Largest errors of o and the gradients; raises ValueError for another shape or dtype than theirs."""
    found = judged(_rows, None, problem, inputs, o)
    if gradients is None:
        return found
    heads = min(problem.batch * problem.num_heads, max(1, PAIRS // max(1, problem.seqlen_q**2)))
    refs, naive = (plain_gradients(inputs, heads, dtype) for dtype in (torch.float64, o.dtype))
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


def _digits(dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """x in fp32 rounded to the digits of the dtype, whatever its range; of fp64 x itself."""
    if dtype == torch.float64:
        return lambda x: x
    scale = 1 / torch.finfo(dtype).eps

    def rounded(x: Tensor) -> Tensor:
        mantissa, exponent = torch.frexp(x)
        return torch.ldexp((2 * scale * mantissa).round() / (2 * scale), exponent)

    return rounded


def _rows(p: Problem, inputs: Inputs, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """o at those rows."""
    rounded, wide = _digits(dtype), torch.promote_types(dtype, torch.float32)
    q, k, v = (x.to(wide) for x in (inputs.q[:, :, rows], inputs.k, inputs.v))
    weights = rounded(feature(q)) @ rounded(feature(k)).mT
    weights = rounded(weights) * (torch.arange(p.seqlen_k, device=rows.device) <= rows[:, None])
    return rounded(weights @ v) / rounded(weights.sum(-1, keepdim=True))


def _first(x: Tensor, heads: int) -> Tensor:
    """The first heads of x (batch, heads, …), those of the first sequence before the next one's."""
    sequences = -(-heads // x.shape[1])
    return x.detach()[:sequences].flatten(0, 1)[:heads]


def plain_gradients(inputs: Inputs, heads: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """Of the first heads by name of the input: in fp64, or in fp32 with every result rounded to the dtype."""
    rounded, wide = _digits(dtype), torch.promote_types(dtype, torch.float32)
    q, k, v, dout = (_first(x, heads).to(wide) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
    n, fq, fk = q.shape[1], rounded(feature(q)), rounded(feature(k))
    dq, dk, dv = (torch.zeros_like(x) for x in (q, k, v))
    sums, step = rounded(fk.cumsum(1)), max(1, AT_ONCE // max(1, heads * n))
    for start in range(0, n, step):
        rows, seen = slice(start, start + step), slice(0, min(n, start + step))
        weights = rounded((fq[:, rows] @ fk[:, seen].mT).tril(start))
        top, bottom = rounded(weights @ v[:, seen]), rounded(weights.sum(-1, keepdim=True))
        dtop = rounded(dout[:, rows] / bottom)
        dbottom = rounded(-(dout[:, rows] * top).sum(-1, keepdim=True) / bottom**2)
        dw = rounded((dtop @ v[:, seen].mT).tril(start))
        dq[:, rows] = rounded(dw @ fk[:, seen]) + rounded(dbottom * sums[:, rows])
        dk[:, seen] += dw.mT @ fq[:, rows]
        dk[:, seen] += torch.ones_like(weights).tril(start).mT @ rounded(dbottom * fq[:, rows])
        dv[:, seen] += weights.mT @ dtop
    slopes = (torch.where(x > 0, 1.0, x.exp()) for x in (q, k))
    return dict(zip("qkv", (rounded(dq) * next(slopes), rounded(dk) * next(slopes), dv), strict=True))
