"""FlashAttention's backward in torch, with a card's roundings, or with a mistake."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flashbench.kernels._inputs import Inputs
from flashbench.kernels._part import Part, per_head
from flashbench.kernels._yardstick import to_tf32
from flashbench.problem import Problem

ALL = slice(None)


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """What a kernel does where kernels differ, and what it does wrong.

    exact: exponentials by fp32's own instructions, and each row's P and dS made to sum to what they must, as
    the bundled ones do in fp32 and TF32; else powers of two as wrong as PTX allows.
    cut: in TF32 products read the upper bits of their operands, as tensor cores do of what nobody rounded.
    """

    exact: bool = False
    cut: bool = False
    mistake: str = ""

    def __call__(self, p: Problem, x: Inputs, seed: int = 0) -> tuple[Tensor, list[Tensor]]:
        """(o, gradients) of a problem without bias."""
        return _Rows(p, x, self, seed).results()


class _Rows:
    def __init__(self, p: Problem, x: Inputs, kernel: Kernel, seed: int) -> None:
        self.p, self.kernel, self.dtype = p, kernel, x.q.dtype
        self.part = part = Part(p, x, seed=0, all_rows=True)
        self.q, self.k, self.v, self.dout = (t.float() for t in (part.q, part.k, part.v, part.dout))
        self.at = part.where(ALL, part.rows, part.columns)
        self.kept = part.terms.kept(self.at)
        self.generator = torch.Generator().manual_seed(seed)

    def results(self) -> tuple[Tensor, list[Tensor]]:
        p, is_ = self.p, self.kernel.mistake.__eq__
        s = self.product(self.q, self.k.mT) * torch.tensor(p.softmax_scale)
        unmasked = s.clone()
        s, slope, _ = self.part.terms.apply(s, self.at)
        sink = self.part.terms.sinks(self.at.heads, torch.float32)
        o, lse = self.forward(s, sink)
        if is_("mask forgotten"):
            s = unmasked
        weights = self.exp(s, lse.masked_fill(lse == -math.inf, math.inf))
        delta = (o.float() * self.dout).sum(-1, keepdim=True) * (not is_("no delta"))
        dp = self.drop(self.product(self.dout, self.v.mT), is_("dP not dropped"), is_("dP not scaled"))
        p_sink = torch.zeros_like(lse) if sink is None else (sink - lse).exp()
        ds, norm, moved = weights * (dp - delta), torch.ones_like(lse), 0.0
        if self.kernel.exact:
            total = weights.sum(-1, keepdim=True) + p_sink
            norm = torch.where(total > 0, 1 / total.where(total > 0, 1.0), 1.0)
            moved = ds.sum(-1, keepdim=True) - p_sink * delta
        chain = 1.0 if slope is None else slope
        dq = self.product(self.stored(ds * chain), self.k) - self.product(weights * chain, self.k) * moved
        weights, delta = weights * norm, delta + moved
        ds = weights * (dp - delta) * chain
        alone = torch.isfinite(s).sum(-1, keepdim=True) <= 1 if sink is None else torch.zeros_like(lse) > 0
        dq, ds = (dq * norm).masked_fill(alone, 0), ds.masked_fill(alone, 0)
        scale = 1.0 if is_("no scale") else p.softmax_scale
        dk = self.over_rows(ds, self.q) * scale
        if is_("a key's dk lost"):
            dk[-1, p.seqlen_k // 2] = 0
        if is_("a query lost in dk"):
            ds[..., p.seqlen_q // 2, :] = 0
            dk = self.over_rows(ds, self.q) * scale
        dv = self.over_rows(self.drop(weights), self.dout)
        heads = (p.num_heads, p.num_kv_heads, p.num_kv_heads)
        found = [self.shaped(t, n) for t, n in zip((dq * scale, dk, dv), heads, strict=True)]
        if sink is not None:
            by_row = (p_sink * delta).reshape(p.batch, p.num_heads, -1)
            found.append(by_row.sum((0, 2)) * (1 if is_("sink's sign") else -1))
        return self.shaped(o, p.num_heads), found

    def forward(self, s: Tensor, sink: Tensor | None) -> tuple[Tensor, Tensor]:
        """o as it is stored, and lse (…, 1)."""
        logits = s if sink is None else torch.cat((s, sink.expand(*s.shape[:3], 1)), -1)
        top = logits.amax(-1, keepdim=True)
        weights = self.exp(logits, top.masked_fill(top == -math.inf, 0))
        total = weights.sum(-1, keepdim=True)
        o = self.product(self.stored(self.drop(weights[..., : self.p.seqlen_k])), self.v)
        return (o / total.where(total != 0, 1.0)).to(self.dtype), top + total.log()

    def exp(self, s: Tensor, base: Tensor) -> Tensor:
        """exp(s - base): a multiply-add of s, whose base's product was rounded to fp32 before."""
        if self.kernel.exact:
            return (s - base).exp()
        unit = torch.tensor(math.log2(math.e))
        found = (s.double() * unit - base * unit).float().exp2().double()
        wrong = 2 * torch.rand(s.shape, generator=self.generator, dtype=torch.float64) - 1
        return (found * (1 + wrong * 2.0**-22)).float()

    def product(self, a: Tensor, b: Tensor) -> Tensor:
        """a @ b, of each query head or of each K/V head."""
        if self.p.dtype == "tf32":
            a, b = to_tf32(a, cut=self.kernel.cut), to_tf32(b, cut=self.kernel.cut)
        return per_head(a, b) if a.dim() == 4 else a @ b

    def over_rows(self, x: Tensor, y: Tensor) -> Tensor:
        return self.product(self.stored(x).flatten(1, 2).mT.contiguous(), y.flatten(1, 2))

    def stored(self, x: Tensor) -> Tensor:
        return x.to(self.dtype).float()

    def drop(self, x: Tensor, all_: bool = False, unscaled: bool = False) -> Tensor:
        if self.kept is None or all_:
            return x
        return x * self.kept if unscaled else self.part.terms.drop(x, self.kept)

    def shaped(self, x: Tensor, heads: int) -> Tensor:
        return x.reshape(self.p.batch, heads, -1, x.shape[-1]).to(self.dtype)
