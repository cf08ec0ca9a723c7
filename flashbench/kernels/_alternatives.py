"""The alternatives that are operators of torch, each beside the plain form that its check computes in fp64.

A plain form is written from the method's definition, score by score or position by position, on a few rows;
the timed form is chunked, sorted or factored. The bound is the reference's: twice the plain form's error in
the dtype (a scan's in fp32, as its state is), and twice the rounding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional

from flashbench._iomodel.approximate import Linformer, Reformer
from flashbench._iomodel.recurrent import LinearAttention, Mamba
from flashbench.kernels import Call
from flashbench.kernels._inputs import Inputs
from flashbench.kernels._reference import Reference, rounding
from flashbench.problem import Problem
from flashbench.record import Accuracy

ROWS, ALL_PAIRS = 48, 2**21
"""Query rows that are compared of each head, and up to how many pairs in all every row is."""

SCAN_CHUNK, SCAN_CHANNELS = 128, 64
"""Positions that a scan combines at a time, and channels of the first sequence that its check follows."""

ALONE = -1e5
"""Added to a query's score with itself where queries are keys: it attends itself only if it sees no other."""


Plain = Callable[[Problem, Inputs, Tensor, torch.dtype], Tensor]


@dataclass(frozen=True, kw_only=True)
class Method:
    """prepare(problem, inputs): the call. plain(problem, inputs, rows, dtype): o at those rows of the first
    sequences and heads that it covers, computed in that dtype. yardstick: dtype of the plain form that stands
    for the rounding that is allowed, None for the problem's.
    """

    prepare: Callable[[Problem, Inputs], Call]
    plain: Plain
    yardstick: torch.dtype | None = None


def check(name: str, problem: Problem, inputs: Inputs, o: Tensor) -> Accuracy:
    """Largest error of o against the fp64 form of one of METHODS; raises as ``judged``."""
    return judged(METHODS[name].plain, METHODS[name].yardstick, problem, inputs, o)


def judged(
    plain: Plain, yardstick: torch.dtype | None, problem: Problem, inputs: Inputs, o: Tensor
) -> Accuracy:
    """Largest error of o against plain in fp64; plain, yardstick: as of Method.

    Raises ValueError for another shape or dtype.
    """
    if o.shape != inputs.dout.shape or o.dtype != inputs.dout.dtype:
        raise ValueError(
            f"o is {o.dtype} {tuple(o.shape)}; {inputs.dout.dtype} {tuple(inputs.dout.shape)} is wanted"
        )
    n = problem.seqlen_q
    every = problem.batch * problem.num_heads * n * problem.seqlen_k <= ALL_PAIRS
    count = n if every else min(n, ROWS)
    rows = torch.linspace(0, n - 1, count, device=o.device, dtype=torch.float64).round().long()
    ref = plain(problem, inputs, rows, torch.float64)
    naive = plain(problem, inputs, rows, yardstick or o.dtype).to(o.dtype)
    found = o.detach()[: ref.shape[0], : ref.shape[1], :, : ref.shape[3]].index_select(2, rows)
    error = float((found.double() - ref).abs().max()) if bool(o.isfinite().all()) else float("nan")
    budget = 2 * float((naive.double() - ref).abs().max()) + 2 * rounding(ref, o.dtype)
    return Accuracy(max_abs_error={"o": error}, budget={"o": budget}, query_rows=count, key_rows=0)


def compared(problem: Problem, inputs: Inputs, o: Tensor) -> Accuracy:
    """The same of exact attention of a problem with a window or a block mask."""
    return Reference(problem, inputs, seed=inputs.seed).compare(o)


def of_heads(problem: Problem, x: Tensor) -> Tensor:
    """K or V with a head for each query head."""
    return x if problem.group == 1 else x.repeat_interleave(problem.group, dim=1)


def _generator(inputs: Inputs) -> torch.Generator:
    return torch.Generator(device=inputs.q.device).manual_seed(inputs.seed + 1)


def _normal(generator: torch.Generator, like: Tensor, *shape: int) -> Tensor:
    return torch.randn(shape, generator=generator, device=like.device, dtype=torch.float32)


def _projections(problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    """Linformer's E and F (rank, seqlen_k), of variance 1/rank, in the problem's dtype."""
    rank, generator = min(Linformer().rank, problem.seqlen_k), _generator(inputs)
    one, other = (_normal(generator, inputs.q, rank, problem.seqlen_k) / rank**0.5 for _ in range(2))
    return one.to(inputs.q.dtype), other.to(inputs.q.dtype)


def linformer(problem: Problem, inputs: Inputs) -> Call:
    """softmax(Q(EK)ᵀ)(FV)."""
    e, f = _projections(problem, inputs)
    q, k, v = inputs.q, inputs.k, inputs.v

    def call() -> Tensor:
        keys, values = of_heads(problem, e @ k), of_heads(problem, f @ v)
        return functional.scaled_dot_product_attention(q, keys, values, scale=problem.softmax_scale)

    return call


def _plain_linformer(p: Problem, inputs: Inputs, rows: Tensor, dtype: torch.dtype) -> Tensor:
    e, f = (x.to(dtype) for x in _projections(p, inputs))
    keys, values = (of_heads(p, a @ x.to(dtype)) for a, x in ((e, inputs.k), (f, inputs.v)))
    scores = inputs.q[:, :, rows].to(dtype) @ keys.mT * p.softmax_scale
    return scores.softmax(-1) @ values


def feature(x: Tensor) -> Tensor:
    """φ of linear attention, elu + 1."""
    return functional.elu(x) + 1


def linear_attention(problem: Problem, inputs: Inputs) -> Call:
    """φ(Q)(φ(K)ᵀV) over φ(Q)Σφ(K), φ = elu + 1; causal in chunks with an fp32 state between them."""
    q, size = inputs.q, LinearAttention().chunk
    k, v = (of_heads(problem, x) for x in (inputs.k, inputs.v))

    def whole() -> Tensor:
        fq, fk = feature(q), feature(k)
        fq, fk = fq.float(), fk.float()  # sums over a sequence do not fit fp16
        return ((fq @ (fk.mT @ v.float())) / (fq @ fk.sum(2)[..., None])).to(q.dtype)

    def causal() -> Tensor:
        fq, fk, values = (_chunked(x, size) for x in (feature(q), feature(k), v))
        states = (fk.float().mT @ values.float()).cumsum(2).roll(1, 2)
        sums = fk.float().sum(3).cumsum(2).roll(1, 2)
        states[:, :, 0], sums[:, :, 0] = 0, 0
        within = (fq @ fk.mT).tril()
        top = (within @ values).float() + fq.float() @ states
        o = top / (within.float().sum(-1) + (fq.float() @ sums[..., None])[..., 0])[..., None]
        return o.flatten(2, 3)[:, :, : problem.seqlen_q].to(q.dtype)

    return causal if problem.causal else whole


def _chunked(x: Tensor, size: int) -> Tensor:
    """(batch, heads, chunks, size, columns), the last chunk filled with zeros."""
    return functional.pad(x, (0, 0, 0, -x.shape[2] % size)).unflatten(2, (-1, size))


def _plain_linear(p: Problem, inputs: Inputs, rows: Tensor, dtype: torch.dtype) -> Tensor:
    fq, fk = feature(inputs.q[:, :, rows].to(dtype)), of_heads(p, feature(inputs.k.to(dtype)))
    weights = fq @ fk.mT
    if p.causal:
        weights = weights * (torch.arange(p.seqlen_k, device=rows.device) <= rows[:, None])
    # a row's sum leaves fp16's range, its shares do not
    total = weights.sum(-1, keepdim=True, dtype=torch.promote_types(dtype, torch.float32))
    return (weights / total).to(dtype) @ of_heads(p, inputs.v.to(dtype))


def _order(problem: Problem, inputs: Inputs) -> Callable[[], Tensor]:
    """Positions of each head in the order of their buckets, one round after the other, int64
    (rounds, batch, num_heads, seqlen_q); the random rotations are drawn once.
    """
    method, q = Reformer(), inputs.q
    _, factors = method.buckets(problem.seqlen_q)
    generator = _generator(inputs)
    shape = (method.rounds, 1, problem.num_heads, problem.head_dim)
    turns = [_normal(generator, q, *shape, size // 2) for size in factors]

    def order() -> Tensor:
        hashes = []
        for turn in turns:
            turned = q.float() @ turn
            hashes.append(torch.cat((turned, -turned), -1).argmax(-1))
        bucket = hashes[0] * factors[1] + hashes[1]
        return bucket.argsort(dim=-1, stable=True)

    return order


def reformer(problem: Problem, inputs: Inputs) -> Call:
    """Sorted chunks of queries attend themselves and the chunk before; rounds are weighted by their lse.

    A key that a query meets in several rounds counts once in each.
    """
    order, size, q, v = _order(problem, inputs), Reformer().chunk, inputs.q, inputs.v

    def gathered(x: Tensor, at: Tensor) -> Tensor:
        return x.gather(2, at[..., None].expand(*at.shape, x.shape[-1])).unflatten(2, (-1, size))

    def beside(x: Tensor) -> Tensor:
        return torch.cat((x.roll(1, 2), x), 3) if x.shape[2] > 1 else x

    def a_round(at: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
        places = at.unflatten(2, (-1, size))[..., None]
        seen = beside(places).mT
        scores = (gathered(q, at) @ beside(gathered(keys, at)).mT).float() * problem.softmax_scale
        scores = scores + ALONE * (places == seen)
        if problem.causal:
            scores = scores.masked_fill(seen > places, float("-inf"))
        lse = scores.logsumexp(-1, keepdim=True)
        o = (scores - lse).exp().to(v.dtype) @ beside(gathered(v, at))
        back = at.argsort(-1)[..., None]
        return o.flatten(2, 3).gather(2, back.expand(*at.shape, v.shape[-1])), lse.flatten(2, 3).gather(
            2, back
        )

    def call() -> Tensor:
        keys = functional.normalize(q.float(), dim=-1).to(q.dtype)
        outputs, lses = zip(*(a_round(at, keys) for at in order()), strict=True)
        weights = torch.stack(lses).softmax(0)
        o = sum(weight * o.float() for weight, o in zip(weights, outputs, strict=True))
        assert isinstance(o, Tensor)
        return o.to(q.dtype)

    return call


def _plain_reformer(p: Problem, inputs: Inputs, rows: Tensor, dtype: torch.dtype) -> Tensor:
    order, size, n = _order(p, inputs)(), Reformer().chunk, p.seqlen_q
    chunk_of = order.argsort(-1) // size  # the chunk of each position
    keys = functional.normalize(inputs.q.float(), dim=-1).to(inputs.q.dtype).to(dtype)
    columns = torch.arange(n, device=rows.device)
    heads = []
    for head in range(p.num_heads):  # one at a time: every row's scores stand whole
        scores = inputs.q[:, head, rows].to(dtype) @ keys[:, head].mT * p.softmax_scale
        scores = scores.to(torch.promote_types(dtype, torch.float32)) + ALONE * (columns == rows[:, None])
        if p.causal:
            scores = scores.masked_fill(columns > rows[:, None], float("-inf"))
        mine = chunk_of[:, :, head].unsqueeze(2)  # (rounds, batch, 1, n)
        own = mine[..., rows].mT
        met = ((mine == own) | (mine == (own - 1) % (n // size))).sum(0)  # in how many rounds
        top = scores.masked_fill(met == 0, float("-inf")).amax(-1, keepdim=True)
        weights = met * (scores - top).exp().where(met > 0, 0)
        heads.append((weights / weights.sum(-1, keepdim=True)).to(dtype) @ inputs.v[:, head].to(dtype))
    return torch.stack(heads, 1)


@dataclass(frozen=True, kw_only=True, eq=False)
class Scan:
    """The inputs of a selective scan as the layer's projections would give them, in the problem's dtype.

    u, delta, z: (batch, channels, seqlen); b, c: (batch, states, seqlen); a: fp32 (states,), negative.
    """

    u: Tensor
    delta: Tensor
    z: Tensor
    b: Tensor
    c: Tensor
    a: Tensor


def _scan(problem: Problem, inputs: Inputs) -> Scan:
    p, generator, states = problem, _generator(inputs), Mamba().state
    u = of_heads(p, inputs.v).transpose(2, 3).flatten(1, 2)
    delta = functional.softplus(_normal(generator, u, *u.shape) - 4)
    z = _normal(generator, u, *u.shape)
    b, c = (_normal(generator, u, p.batch, states, p.seqlen_k) for _ in range(2))
    a = -torch.arange(1, states + 1, device=u.device, dtype=torch.float32)
    delta, z, b, c = (x.to(u.dtype) for x in (delta, z, b, c))
    return Scan(u=u.contiguous(), delta=delta, z=z, b=b, c=c, a=a)


def mamba(problem: Problem, inputs: Inputs) -> Call:
    """y = (C·h + u)·silu(z) with h ← exp(ΔA)h + ΔBu: chunks one after the other, each by doubling steps."""
    s, shape = _scan(problem, inputs), inputs.dout.shape

    def call() -> Tensor:
        batch, channels, length = s.u.shape
        state = s.u.new_zeros(batch, channels, len(s.a), dtype=torch.float32)
        y = torch.empty_like(s.u)
        for start in range(0, length, SCAN_CHUNK):
            at = slice(start, start + SCAN_CHUNK)
            delta, u, z = (x[..., at].float() for x in (s.delta, s.u, s.z))
            decay = (delta[..., None] * s.a).exp()  # (batch, channels, positions, states)
            h = (delta * u)[..., None] * s.b[..., at].float().mT[:, None]
            step = 1
            while step < decay.shape[2]:
                h = torch.cat((h[:, :, :step], h[:, :, step:] + decay[:, :, step:] * h[:, :, :-step]), 2)
                decay = torch.cat((decay[:, :, :step], decay[:, :, step:] * decay[:, :, :-step]), 2)
                step *= 2
            h = h + decay * state[:, :, None]
            state = h[:, :, -1]
            seen = (h * s.c[..., at].float().mT[:, None]).sum(-1)
            y[..., at] = ((seen + u) * functional.silu(z)).to(y.dtype)
        return y.unflatten(1, (shape[1], shape[3])).transpose(2, 3)

    return call


def _plain_mamba(p: Problem, inputs: Inputs, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """The recurrence, position by position, of some channels of the first sequence's first head."""
    s, wide = _scan(p, inputs), min(SCAN_CHANNELS, p.head_dim_v)
    delta, u, z = (x[0, :wide].to(dtype).T for x in (s.delta, s.u, s.z))  # (positions, channels)
    b, c = (x[0].to(dtype).T for x in (s.b, s.c))
    a, state, found = s.a.to(dtype), torch.zeros(wide, len(s.a), device=u.device, dtype=dtype), []
    for t in range(p.seqlen_k):
        state = (delta[t, :, None] * a).exp() * state + (delta[t] * u[t])[:, None] * b[t]
        found.append(state @ c[t])
    y = (torch.stack(found) + u) * functional.silu(z)
    return y[rows][None, None]


METHODS = {
    "linformer": Method(prepare=linformer, plain=_plain_linformer),
    "linear-attention": Method(prepare=linear_attention, plain=_plain_linear),
    "reformer": Method(prepare=reformer, plain=_plain_reformer),
    "mamba": Method(prepare=mamba, plain=_plain_mamba, yardstick=torch.float32),
}
