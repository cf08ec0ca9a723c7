"""Attention in fp64 on the compared rows of a problem: o, lse and every gradient.

dk, dv and the gradients that are sums over queries need the log-sum-exp and delta = rowsum(dout * o)
of every query row; both are streamed. With P the probabilities and Z the dropout mask over 1 - p:

    dP = Z * (dout V^T)    dS = P * (dP - delta)    dq, dk from dS * softcap' * scale
    dbias = dS, summed over the places where the bias is 1    dsink = -sum over rows of P_sink * delta

A row of dS sums to P_sink * delta, as that of the whole softmax, sink included, sums to 0. Source:
Dao 2022 (arXiv:2205.14135), appendix B.2.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashbench.kernels import _gradient_rounding as rounding
from flashbench.kernels import _output_rounding as output_rounding
from flashbench.kernels._gradient_rounding import VARIANCE, ByRow, finite
from flashbench.kernels._part import Part, per_head

LARGEST_EXPONENT = 600.0
"""exp(±600) is far inside fp64's range: scores below that need no running maximum."""


def rows(part: Part, heads: slice, numbers: Tensor, *, gradients: bool) -> dict[str, Tensor]:
    """On some query rows, (heads, group, rows, …) fp64: o and lse, or dq and dbias where it has rows.

    Beside o and each gradient stands its ``VARIANCE``.
    """
    p, terms = part.problem, part.terms
    q, dout = (x[heads].index_select(2, numbers).double() for x in (part.q, part.dout))
    k, v = part.k[heads].double(), part.v[heads].double()
    at = part.where(heads, numbers, part.columns)
    q = q * p.softmax_scale
    scores, slope, _ = terms.apply(per_head(q, k.mT), at)
    lse = with_sink(part, heads, scores.logsumexp(-1))
    wrong_p = None if gradients else output_rounding.of_scores(part, q, k, scores)
    exponentials = rounding.of_scores(part, scores) if gradients else None
    probabilities = scores.sub_(finite(lse)[..., None]).exp_()
    kept = terms.kept(at)
    weights = terms.drop(probabilities, kept)
    o = per_head(weights, v)
    if not gradients:
        of_o = output_rounding.of_o(part, wrong_p, probabilities, weights, v, o)
        return {"o": o, "lse": lse, VARIANCE + "o": of_o}
    del weights
    of_delta, of_lse = rounding.of_rows(part, heads, at, o, lse)
    wrong = rounding.Wrong.of(part, of_delta, of_lse, exponentials, rounding.of_products(part, dout, v, kept))
    by_products = wrong.ds_by_products(probabilities)
    variances = wrong.rows_by_delta(probabilities, slope, k)
    delta = (o * dout).sum(-1, keepdim=True)
    ds = probabilities.mul_(terms.drop(per_head(dout, v.mT), kept).sub_(delta))
    of_ds = wrong.of_ds(ds, by_products, rows=False)
    found = {}
    if p.bias and p.bias[2] == "q":
        found["dbias"] = part.of_bias(ds)
        variances["dbias"] += wrong.by_lse(found["dbias"])
        variances["dbias"] += part.of_bias(of_ds) if of_ds is not None else 0.0
    if slope is not None:
        ds *= slope
    found["dq"] = per_head(ds, k) * p.softmax_scale
    variances["dq"] += wrong.by_lse(found["dq"])
    if of_ds is not None:
        of_ds = of_ds if slope is None else of_ds.mul_(slope).mul_(slope)
        variances["dq"] += per_head(of_ds, k.square()).mul_(p.softmax_scale**2)
    return found | {VARIANCE + name: x for name, x in variances.items()}


def columns(part: Part, heads: slice) -> dict[str, Tensor]:
    """On the compared key rows, fp64: dk, dv (heads, keys, width), and the sums over all queries.

    Those are dsinks (heads, group, rows), of each query what it adds, and dbias (heads, group, 1, keys
    or 1) of a bias without rows. Beside each stands its ``VARIANCE``.
    """
    p = part.problem
    by_row = lse_and_delta(part, heads)
    sums = _sums_over_rows(part, heads, by_row)
    found = {"dv": sums["dv"], "dk": sums["dk"] * p.softmax_scale}
    variances = {"dv": sums[VARIANCE + "dv"], "dk": sums[VARIANCE + "dk"] * p.softmax_scale**2}
    sink = part.terms.sinks(part.where(heads, part.rows, part.key_rows).heads, torch.float64)
    by_sink = torch.zeros_like(by_row.lse)
    if sink is not None:
        by_sink = (sink[..., 0] - by_row.lse).exp() * by_row.delta
        found["dsinks"] = -by_sink
        variances["dsinks"] = by_row.of_sinks(part, sink[..., 0])
    if p.bias and p.bias[2] == "1":
        one = p.bias[3] == "1"  # a sum of whole rows of dS, off by delta's error times the sum of P
        found["dbias"] = by_sink.sum(-1)[..., None, None] if one else sums["dbias"]
        variances["dbias"] = by_row.of_delta.sum(-1)[..., None, None] if one else sums[VARIANCE + "dbias"]
    return found | {VARIANCE + name: x for name, x in variances.items()}


def _sums_over_rows(part: Part, heads: slice, by_row: ByRow) -> dict[str, Tensor]:
    """dk over scale, dv and dbias (heads, group, 1, keys) with their variances."""
    p, terms = part.problem, part.terms
    k, v = (x[heads].index_select(1, part.key_rows).double() for x in (part.k, part.v))
    like = {"dk": k, "dv": v, "dbias": k.new_zeros(len(k), p.group, 1, len(part.key_rows))}
    found = {of + name: torch.zeros_like(x) for name, x in like.items() for of in ("", VARIANCE)}
    step = max(1, part.elements // max(1, len(k) * p.group * len(part.key_rows)))
    for numbers in part.rows.split(step) if p.seqlen_q else ():
        chunk = slice(int(numbers[0]), int(numbers[-1]) + 1)
        q, dout = part.q[heads, :, chunk].double(), part.dout[heads, :, chunk].double()
        own = by_row.at(chunk)
        at = part.where(heads, numbers, part.key_rows)
        scores, slope, _ = terms.apply(per_head(q, k.mT).mul_(p.softmax_scale), at)
        kept = terms.kept(at)
        wrong = rounding.Wrong.of(
            part, own.of_delta, own.of_lse, rounding.of_scores(part, scores),
            rounding.of_products(part, dout, v, kept),
        )  # fmt: skip
        probabilities = scores.sub_(finite(own.lse)[..., None]).exp_()
        weights = terms.drop(probabilities, kept)
        found["dv"] += rounding.over_rows(weights, dout)
        found[VARIANCE + "dv"] += wrong.dv(weights, dout)
        del weights
        found[VARIANCE + "dk"] += wrong.dk_by_delta(probabilities, slope, q)
        found[VARIANCE + "dbias"] += wrong.dbias_by_delta(probabilities) if p.bias else 0.0
        by_products = wrong.ds_by_products(probabilities)
        ds = probabilities.mul_(terms.drop(per_head(dout, v.mT), kept).sub_(own.delta[..., None]))
        found["dbias"] += ds.sum(2, keepdim=True)
        of_ds = wrong.of_ds(ds, by_products, rows=True)
        if of_ds is not None:
            found[VARIANCE + "dbias"] += of_ds.sum(2, keepdim=True)
            of_ds = of_ds if slope is None else of_ds.mul_(slope).mul_(slope)
            found[VARIANCE + "dk"] += rounding.over_rows(of_ds, q.square())
        if slope is not None:
            ds *= slope
        found["dk"] += rounding.over_rows(ds, q)
    return found


def lse_and_delta(part: Part, heads: slice) -> ByRow:
    """log-sum-exp and rowsum(dout * o) of every query row.

    No maximum is subtracted unless the scores could be large.
    """
    p, terms = part.problem, part.terms
    k, v = part.k[heads].double(), part.v[heads].double()
    lse = with_sink(part, heads, k.new_full((len(k), p.group, p.seqlen_q), float("-inf")))
    delta, of_delta = torch.zeros_like(lse), torch.zeros_like(lse)
    of_lse = torch.zeros_like(lse) if p.dtype == "fp32" else None
    longest_k = k.norm(dim=-1).amax() if p.seqlen_k else k.new_zeros(())
    for chunk, seen in part.chunks(len(k)):
        q = part.q[heads, :, chunk].double() * p.softmax_scale
        at = part.where(heads, part.rows[chunk], part.columns[seen])
        scores, _, _ = terms.apply(per_head(q, k[:, seen].mT), at)
        top = lse.new_zeros(())
        if p.bias or p.alibi or q.norm(dim=-1).max() * longest_k > LARGEST_EXPONENT:
            top = finite(scores.amax(-1))
            scores.sub_(top[..., None])
        weights = scores.exp_()
        own = with_sink(part, heads, weights.sum(-1).log() + top)
        weighted = per_head(terms.drop(weights, terms.kept(at)), v[:, seen])
        o = weighted * (top - finite(own)).exp()[..., None]
        lse[:, :, chunk] = own
        delta[:, :, chunk] = (o * part.dout[heads, :, chunk].double()).sum(-1)
        of_delta[:, :, chunk], found = rounding.of_rows(part, heads, at, o, own)
        if of_lse is not None:
            of_lse[:, :, chunk] = found
    return ByRow(lse=lse, delta=delta, of_delta=of_delta, of_lse=of_lse)


def with_sink(part: Part, heads: slice, lse: Tensor) -> Tensor:
    """lse (heads, group, rows) with the sinks' share."""
    sink = part.terms.sinks(part.where(heads, part.rows, part.columns).heads, lse.dtype)
    return lse if sink is None else torch.logaddexp(lse, sink[..., 0])
