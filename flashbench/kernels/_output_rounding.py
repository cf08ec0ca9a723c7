"""How far o may be off for what FlashAttention's softmax has and naive's has not, as variances.

FlashAttention's P is 2^(x - base) of x = s · log2(e), and o = the sum of P v over l, the sum of P. Where s is
large, three roundings of numbers as large as s (``_gradient_rounding``) leave P off by itself times some e:
2^-24 of 4,000 is more than half a last digit of fp16. naive's P may have nothing of this: of a row that sees
one key it is 1, as FlashAttention's is with small scores, whose base is x to the last bit. So

- with Z the dropout mask over 1 - p, o is off by the sum of e P (Z v - o);
- P is stored in the inputs' dtype for its product with V, l is summed before: what was 1 and is 1 + e is
  rounded, by itself times the smaller of e and u, half a last digit. o is off by the sum of that times P Z v.

All are independent from key to key. But in fp32, in which naive has no more than this, scores below ``LARGE``
are not asked: either is far below what naive has.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashbench.kernels import _gradient_rounding as gradient
from flashbench.kernels._part import Part, per_head
from flashbench.kernels._precision import input_dtype

LARGE = 256.0
"""2^-24 of this is 2^-16, a sixteenth of half a last digit of fp16 after log2(e) and three roundings."""


def of_scores(part: Part, q: Tensor, k: Tensor, scores: Tensor) -> Tensor | None:
    """The variance of e for each score, or None where it is not asked. q: scaled."""
    sizes = gradient.finite(scores)
    if part.problem.dtype != "fp32" and not bool((sizes.abs() > LARGE).any()):
        return None
    return gradient.of_exponentials(sizes).add_(gradient.of_sums(q, k))


def of_o(part: Part, wrong: Tensor | None, p: Tensor, weights: Tensor, v: Tensor, o: Tensor) -> Tensor:
    """The variance of each number of o. p, weights: probabilities before and after dropout."""
    if wrong is None:
        return torch.zeros_like(o)
    half = torch.finfo(input_dtype(part.problem)).eps / 2
    stored = wrong.clamp_max(half**2 * gradient.EVEN) if part.problem.dtype_bytes == 2 else 0.0
    squares = per_head(weights.square().mul_(wrong + stored), v.square())
    mixed = per_head((weights * p).mul_(wrong), v)
    own = p.square().mul_(wrong).sum(-1, keepdim=True)
    return squares.sub_(mixed.mul_(o).mul_(2)).add_(own.mul(o.square())).clamp_min_(0)
