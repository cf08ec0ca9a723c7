"""The textbook op list in the tensors' dtype on the compared rows: how wrong the dtype alone makes it.

In tf32 that is the dtype's own arithmetic on every device: the operands of each product rounded to TF32
(``to_tf32``) and multiplied in fp32.
"""

from __future__ import annotations

from bisect import bisect_left

import torch
from torch import Tensor

from flashbench.kernels import _fp8
from flashbench.kernels._part import Part, per_head
from flashbench.kernels._precision import torch_dtype
from flashbench.kernels._terms import Where


def to_tf32(x: Tensor, *, cut: bool = False) -> Tensor:
    """fp32 x rounded to TF32's 10 mantissa bits: to nearest, ties away from zero, exponent range as fp32.

    cut: towards zero, which is what tensor cores make of an operand that was not rounded.
    Source: PTX ISA, cvt.rna.tf32.f32, and mma: the lower 13 bits of a .tf32 operand are ignored.
    """
    bits = x.view(torch.int32).add(0 if cut else 0x1000).bitwise_and_(-0x2000)
    return torch.where(x.isnan(), x, bits.view(torch.float32))  # a NaN's bits could wrap around


class Yardstick:
    """The op list in one dtype over a part; names and shapes of the results as in ``_exact``.

    cut: what the products of TF32 read is cut off and not rounded.
    """

    def __init__(self, part: Part, dtype: torch.dtype, *, cut: bool = False) -> None:
        self.part = part
        self.dtype = dtype
        self._cut = cut

    def rows(self, heads: slice, numbers: Tensor, *, gradients: bool, lse: bool = True) -> dict[str, Tensor]:
        """o and, unless it is not wanted, lse; or dq and dbias where it has rows; on some query rows."""
        p, terms = self.part.problem, self.part.terms
        q, dout = (x[heads].index_select(2, numbers).to(self.dtype) for x in (self.part.q, self.part.dout))
        k, v = self.part.k[heads].to(self.dtype), self.part.v[heads].to(self.dtype)
        at = self.part.where(heads, numbers, self.part.columns)
        probabilities, slope, sums = self._softmax(per_head(q * p.softmax_scale, k.mT, self._product), at)
        kept = terms.kept(at)
        if not gradients:
            weights = terms.drop(self._stored(probabilities[..., : p.seqlen_k]), kept)
            found = {"o": per_head(weights, v, self._product)}
            if lse and self.dtype.itemsize == 2:  # lse is fp32 whatever the inputs are
                scores = per_head(q.float() * p.softmax_scale, k.float().mT, self._product)
                sums = self._softmax(scores, at)[2]
            return {**found, "lse": sums} if lse else found
        dp = terms.drop(per_head(dout, v.mT, self._product), kept)
        ds = self._softmax_backward(dp, probabilities)[..., : p.seqlen_k]
        found = {"dbias": self.part.of_bias(ds)} if p.bias and p.bias[2] == "q" else {}
        if slope is not None:
            ds = ds * slope
        return {"dq": per_head(ds, k, self._product) * p.softmax_scale, **found}

    def columns(self, heads: slice) -> dict[str, Tensor]:
        """dk and dv on the compared key rows, and the sums over all queries.

        Softmax rows are complete, in chunks of rows; their compared columns are kept, so that the
        sum over all query rows is one product in the dtype, as in naive.
        """
        part, p, terms = self.part, self.part.problem, self.part.terms
        k, v = part.k[heads].to(self.dtype), part.v[heads].to(self.dtype)
        shape = (len(k), p.group, p.seqlen_q, len(part.key_rows))
        kept_p, kept_ds = k.new_zeros(shape), k.new_zeros(shape)
        before_cap = torch.zeros_like(kept_ds) if p.softcap and p.bias else kept_ds
        by_sink, by_row = k.new_zeros(shape[:3]), k.new_zeros(shape[:3])
        for chunk, seen in part.chunks(len(k)):
            q = part.q[heads, :, chunk].to(self.dtype) * p.softmax_scale
            at = part.where(heads, part.rows[chunk], part.columns[seen])
            scores = per_head(q, k[:, seen].mT, self._product)
            probabilities, slope, _ = self._softmax(scores, at)
            kept = terms.kept(at)
            dp = per_head(part.dout[heads, :, chunk].to(self.dtype), v[:, seen].mT, self._product)
            ds = self._softmax_backward(terms.drop(dp, kept), probabilities)
            if probabilities.shape[-1] > len(at.columns):
                by_sink[:, :, chunk] = ds[..., -1]
                probabilities, ds = probabilities[..., :-1], ds[..., :-1]
            weights = terms.drop(probabilities, kept)
            first, last = (bisect_left(part.compared_keys, edge) for edge in (seen.start, seen.stop))
            inside = part.key_rows[first:last] - seen.start
            kept_p[:, :, chunk, first:last] = weights.index_select(3, inside)
            by_row[:, :, chunk] = ds.sum(-1)
            before_cap[:, :, chunk, first:last] = ds.index_select(3, inside)
            if slope is not None:
                ds = ds * slope
            kept_ds[:, :, chunk, first:last] = ds.index_select(3, inside)
        q, dout = part.q[heads].to(self.dtype) * p.softmax_scale, part.dout[heads].to(self.dtype)
        found = {
            "dk": self._product(kept_ds.mT, q).sum(1),
            "dv": self._product(kept_p.mT, dout).sum(1),
        }
        if p.sinks:
            found["dsinks"] = by_sink
        if p.bias and p.bias[2] == "1":
            found["dbias"] = (
                before_cap.sum(2, keepdim=True) if p.bias[3] == "k" else by_row.sum(-1)[..., None, None]
            )
        return found

    def _stored(self, probabilities: Tensor) -> Tensor:
        """As a product reads them: of fp8 rounded, each row's largest to 256 (``_fp8.SHIFT``)."""
        if self.part.problem.dtype_bytes > 1 or not probabilities.numel():
            return probabilities
        unit = probabilities.amax(-1, keepdim=True).clamp_min(torch.finfo(self.dtype).tiny) / 2**_fp8.SHIFT
        return (probabilities / unit).to(torch_dtype(self.part.problem.dtype)).to(self.dtype) * unit

    def _softmax(self, scores: Tensor, at: Where) -> tuple[Tensor, Tensor | None, Tensor]:
        """(probabilities, a sink's in a last column; softcap's derivative; lse). Rows without keys are 0."""
        scores, slope, empty = self.part.terms.apply(scores, at)
        sink = self.part.terms.sinks(at.heads, scores.dtype)
        if sink is not None:
            scores = torch.cat((scores, sink.expand(*scores.shape[:3], 1)), dim=-1)
        probabilities = scores.softmax(-1)
        if empty is not None and sink is None:
            probabilities = probabilities.masked_fill_(empty[:, None], 0)
        return probabilities, slope, scores.logsumexp(-1)

    def _softmax_backward(self, gradient: Tensor, probabilities: Tensor) -> Tensor:
        """What autograd runs for softmax over the last dimension; a sink's column has no gradient."""
        missing = probabilities.shape[-1] - gradient.shape[-1]
        gradient = torch.nn.functional.pad(gradient, (0, missing)) if missing else gradient
        return torch._softmax_backward_data(gradient, probabilities, -1, probabilities.dtype)

    def _product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b as the problem's dtype multiplies."""
        if self.part.problem.dtype != "tf32":
            return a @ b
        return to_tf32(a, cut=self._cut) @ to_tf32(b, cut=self._cut)
