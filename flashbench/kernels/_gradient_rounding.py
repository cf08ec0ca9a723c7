"""How far gradients may be off for what FlashAttention's backward has and naive's has not, as variances.

With P = exp(s - lse), delta = rowsum(dO * O) and dS = P * (dP - delta), naive's softmax is not computed again
and its delta is the sum of P * dP, which cancels dP to the last bit where one P is 1. Of the others

- delta comes from the o that was stored: each of its numbers was rounded to its dtype, u of itself at most,
  half its last digit, evenly spread: a variance of u^2 / 3. With b = delta's error dS is off by -P b: dq by
  -scale * b_i * (sum of P k), dk by -scale * (sum of P b_i q), dsink by P_sink b (Dao 2023, arXiv:2307.08691,
  section 3.1 and Algorithm 2, line 4). Where a row sees one key, dS is 0, which a kernel knows;
- in fp32 P is off by itself times d_i + e_ij: d_i of lse (``_lse_rounding``, each part's deviation in place
  of its most), e_ij of the exponential, 2^-22 by ex2.approx, and of three roundings of numbers as large as
  s (scale * log2(e), its product with q.k, that less lse), 2^-24 each; and dP and delta are sums of n
  products that do not cancel, each off by 2^-24 of what is summed so far, whose square is n / 2 of the
  products' by the mean. With a_ij the error of dP, dS is off by P a beside P b. dv is off by the sum of P
  (d + e) dO, dq by scale * (d_i dq + the sum of (dS e + P a) k), dk by scale * (the sum of (dS (d + e) + P
  a) q). In 16 bits and TF32 the scores of naive are off by 2^-12 to 2^-9 of themselves, and this is nothing
  beside it.

- in every dtype, a P_sink under 2^-126, fp32's smallest normal number, is 0 or held at about that.

All are independent from row to row, and e from key to key: their squares add up, and so they do with the
square of what naive's errors allow. Three deviations, as of all errors that are drawn (``_other_units``),
are the room: rowsum(dO * O) of n numbers is off by u / sqrt(3) of the root of their squares' sum, sqrt(n)
less than at most.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashbench.kernels import _lse_rounding
from flashbench.kernels._part import Part, per_head
from flashbench.kernels._precision import input_dtype
from flashbench.kernels._terms import Where

VARIANCE = "variance of "
"""Before a tensor's name: of each of its numbers, the variance that is described here."""

UNDERFLOW = 2.0**-125
"""A P of fp32 may be this much where it is less: 0, or twice the smallest number with all its digits."""

EVEN = 1 / 3
"""The variance of an error that is anywhere between -1 and 1."""

Tensors = dict[str, Tensor]


def of_rows(part: Part, heads: slice, at: Where, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor | None]:
    """(of the delta of a stored o, of lse in fp32), row by row. at: with every key that the rows see."""
    keys = _keys(part, at)
    info = torch.finfo(input_dtype(part.problem))
    half = o.abs().clamp_min(info.tiny).mul_(info.eps / 2)  # of the last digit, or more
    dout = part.dout[heads].index_select(2, at.rows).double()
    delta = half.mul_(dout).square_().sum(-1).mul_(EVEN)
    if part.problem.dtype == "fp32":  # half is 2^-24 of o: of the products' sum as much
        delta *= 1 + _of_sum(part.problem.head_dim_v)
    if not part.problem.sinks:
        delta.masked_fill_(keys <= 1, 0)  # dS of a row that sees one key is 0, and so is its delta's part
    if part.problem.dtype != "fp32":
        return delta, None
    size, most = finite(lse).abs(), (keys + 1).double().log()
    approximate, rounded = _lse_rounding.APPROXIMATE, _lse_rounding.ROUNDED
    squares = approximate**2 * (1 + most.square()) + 3 * (rounded * most).square()
    return delta, (4 * (rounded * (size + most)).square() + squares).mul_(EVEN)


def _keys(part: Part, at: Where) -> Tensor:
    """How many each row sees."""
    seen = part.terms.visible(at.rows, at.columns)
    return torch.full_like(at.rows, len(at.columns)) if seen is None else seen.sum(1)


def finite(lse: Tensor) -> Tensor:
    """0 for -inf, so that what is subtracted from hidden scores leaves them hidden."""
    return lse.masked_fill(lse == float("-inf"), 0)


def of_scores(part: Part, scores: Tensor) -> Tensor | None:
    """Of exp(s) to itself, for each score, in fp32; None in other arithmetic."""
    return of_exponentials(finite(scores)) if part.problem.dtype == "fp32" else None


def of_exponentials(scores: Tensor) -> Tensor:
    """Of exp(s) to itself, for each score in fp32. Writes over the scores, of which none is infinite."""
    factor = 3 * _lse_rounding.ROUNDED**2
    return scores.square_().mul_(factor).add_(_lse_rounding.APPROXIMATE**2).mul_(EVEN)


def of_products(part: Part, dout: Tensor, v: Tensor, kept: Tensor | None) -> Tensor | None:
    """Of each dP after dropout, in fp32; None in other arithmetic."""
    if part.problem.dtype != "fp32":
        return None
    drop = part.terms.drop
    return drop(drop(of_sums(dout, v), kept), kept)


def of_sums(x: Tensor, y: Tensor) -> Tensor:
    """Of each product of rows of x and y in fp32."""
    factor = _of_sum(x.shape[-1]) * EVEN * _lse_rounding.ROUNDED**2
    return per_head(x.square(), y.square().mT).mul_(factor)


def _of_sum(numbers: int) -> float:
    """A sum of so many products rounded to fp32, over the sum of their squares and a rounding's variance.

    Each product is rounded, and each sum on the way, whose square is half the last one's, by the mean.
    """
    return 1 + numbers / 2


@dataclass(frozen=True, kw_only=True)
class Wrong:
    """Variances over a block of scores: of delta (heads, group, rows).

    fp32: of P to itself by lse, (…, rows, 1), and by exponentials, and of dP after dropout, of each score.
    """

    part: Part
    delta: Tensor
    fp32: tuple[Tensor, Tensor, Tensor] | None

    @classmethod
    def of(cls, part: Part, delta: Tensor, lse: Tensor | None, *block: Tensor | None) -> Wrong:
        """block: exponentials and dP, None in other arithmetic than fp32."""
        exponentials, products = block
        if lse is None or exponentials is None or products is None:
            return cls(part=part, delta=delta, fp32=None)
        return cls(part=part, delta=delta, fp32=(lse[..., None], exponentials, products))

    def rows_by_delta(self, p: Tensor, slope: Tensor | None, k: Tensor) -> Tensors:
        """Of dq, and of dbias where it has rows, through delta. p: probabilities; slope: softcap's."""
        problem, found = self.part.problem, {}
        by_row = self.delta[..., None]
        if problem.bias and problem.bias[2] == "q":
            found["dbias"] = self.part.of_bias(p).square() * by_row
        moved = per_head(p if slope is None else p * slope, k) * problem.softmax_scale
        return {"dq": moved.square_().mul_(by_row), **found}

    def dk_by_delta(self, p: Tensor, slope: Tensor | None, q: Tensor) -> Tensor:
        """Of dk over scale, through delta."""
        squares = p.square() if slope is None else (p * slope).square_()
        return over_rows(squares.mul_(self.delta[..., None]), q.square())

    def dbias_by_delta(self, p: Tensor) -> Tensor:
        """Of dbias that is a sum over rows, (heads, group, 1, keys), through delta."""
        return p.square().mul_(self.delta[..., None]).sum(2, keepdim=True)

    def dv(self, weights: Tensor, dout: Tensor) -> Tensor | float:
        """weights: P after dropout."""
        if self.fp32 is None:
            return 0.0
        lse, exponentials, _ = self.fp32
        return over_rows(weights.square().mul_(exponentials + lse), dout.square())

    def ds_by_products(self, p: Tensor) -> Tensor | None:
        """Of dS, each by itself, through dP."""
        return None if self.fp32 is None else p.square().mul_(self.fp32[2])

    def of_ds(self, ds: Tensor, by_products: Tensor | None, *, rows: bool) -> Tensor | None:
        """Of dS, each by itself, through dP and exponentials; with rows through lse too, a row's own."""
        if self.fp32 is None or by_products is None:
            return None
        lse, exponentials, _ = self.fp32
        return by_products.add_(ds.square().mul_(exponentials + lse if rows else exponentials))

    def by_lse(self, x: Tensor) -> Tensor | float:
        """Of dq or of dbias with rows, (heads, group, rows, …), through lse."""
        return 0.0 if self.fp32 is None else x.square() * self.fp32[0]


def over_rows(x: Tensor, y: Tensor) -> Tensor:
    """The sum of x y over the rows of a K/V head's queries, (heads, keys, width)."""
    return x.flatten(1, 2).mT @ y.flatten(1, 2)


@dataclass(frozen=True, kw_only=True)
class ByRow:
    """Of every query, (heads, group, seqlen_q) fp64: lse, delta = rowsum(dout * o), and ``of_rows``."""

    lse: Tensor
    delta: Tensor
    of_delta: Tensor
    of_lse: Tensor | None

    def at(self, chunk: slice) -> ByRow:
        """Of some queries."""
        lse, delta, of_delta = (x[:, :, chunk] for x in (self.lse, self.delta, self.of_delta))
        of_lse = None if self.of_lse is None else self.of_lse[:, :, chunk]
        return ByRow(lse=lse, delta=delta, of_delta=of_delta, of_lse=of_lse)

    def of_sinks(self, part: Part, sink: Tensor) -> Tensor:
        """Of what each row adds to dsinks. sink: logits (heads, group, 1)."""
        weights = (sink - self.lse).exp()
        found, exponentials = weights.square() * self.of_delta, of_scores(part, sink)
        found.add_((UNDERFLOW * self.delta).square_())
        if self.of_lse is None or exponentials is None:
            return found
        return found.add_((weights * self.delta).square_().mul_(self.of_lse + exponentials))
