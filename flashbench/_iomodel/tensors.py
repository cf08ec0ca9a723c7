"""Sizes of the tensors, FLOPs, and the traffic that no algorithm can avoid."""

from __future__ import annotations

import math
from typing import NamedTuple

from flashbench._iomodel import listed
from flashbench._iomodel.types import Traffic
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench._iomodel.visits import seen_rows, visible_pairs
from flashbench.errors import UnknownName
from flashbench.problem import PASSES, UNLIMITED, Problem

FP32 = 4
"""Bytes of lse, delta and fp32 accumulators."""

FP16 = 2
"""Bytes of an element of fp16 or bf16."""

INT32 = 4
"""Bytes of an entry of a block table, a list of blocks or cumulative lengths."""


class Sizes(NamedTuple):
    """Bytes of whole tensors: dq, dk, dv are as large as q, k, v, and do as o.

    lse is one fp32 row vector (delta is as large); k_heads, v_heads are k and v once per query head.
    """

    q: int
    k: int
    v: int
    o: int
    lse: int
    k_heads: int
    v_heads: int


_latest: tuple[Problem | None, Sizes] = (None, Sizes(0, 0, 0, 0, 0, 0, 0))
"""The last problem and its sizes: the models of one problem ask for them in a row."""


def sizes(problem: Problem) -> Sizes:
    """Bytes of every tensor of the problem, in its dtype."""
    global _latest
    known, latest = _latest
    if known is problem:
        return latest
    p, e = problem, problem.dtype_bytes
    heads, kv_heads = p.batch * p.num_heads, p.batch * p.num_kv_heads
    k, v = p.seqlen_k * p.head_dim * e, p.seqlen_k * p.head_dim_v * e
    latest = Sizes(
        q=heads * p.seqlen_q * p.head_dim * e,
        k=kv_heads * k,
        v=kv_heads * v,
        o=heads * p.seqlen_q * p.head_dim_v * e,
        lse=heads * p.seqlen_q * FP32,
        k_heads=heads * k,
        v_heads=heads * v,
    )
    _latest = (problem, latest)
    return latest


def bias_bytes(problem: Problem) -> int:
    """Bytes of the bias, and of its gradient; 0 without one."""
    return math.prod(problem.bias_shape) * problem.dtype_bytes if problem.bias else 0


def compulsory(problem: Problem, pass_: str, variant: Variant = DEFAULT) -> Traffic:
    """Bytes that any algorithm moves: each tensor once, and of a paged cache its block table.

    Forward: reads q, k, v; writes o, lse. Backward: reads q, k, v, o, do, lse; writes dq, dk, dv.
    Query rows without keys, and key rows without queries, need not be read. A density is taken to
    leave no row out. Of a bias, the entries that a visible pair has, of a block mask a number per block and
    bits; they, slopes and sinks in each pass; the backward writes the gradients of bias and sinks.
    """
    parts = [_compulsory(part, pass_, variant) for part in problem.parts()]
    total = parts[0]
    for part in parts[1:]:
        total += part
    if problem.bias or problem.alibi or problem.sinks or problem.block_mask:
        for kind in ("fwd", "bwd") if pass_ == "fwd+bwd" else (pass_,):
            total += _of_scores(problem, kind)
    return total


def _of_scores(problem: Problem, pass_: str) -> Traffic:
    """What scores take beside q and k, once, and in the backward its gradients."""
    p, per_head = problem, problem.num_heads * FP32
    read = {"slopes": per_head} if p.alibi else {}
    read |= {"sinks": per_head} if p.sinks else {}
    read |= listed.once(p) if p.block_mask else {}
    write = {"dsinks": per_head} if p.sinks else {}
    if p.bias:
        batches, heads, rows, columns = p.bias_shape
        nq, nk = seen_rows(p)
        pairs = visible_pairs(p) // (p.batch * p.num_heads)
        entries = pairs if rows > 1 < columns else nq if rows > 1 else nk if columns > 1 else min(1, pairs)
        read["bias"] = batches * heads * entries * p.dtype_bytes
        write["dbias"] = bias_bytes(p)
    return Traffic(level="compulsory", read=read, write=write if pass_ == "bwd" else {})


def _compulsory(problem: Problem, pass_: str, variant: Variant) -> Traffic:
    s = sizes(problem)
    q, o, lse, k, v = s.q, s.o, s.lse, s.k, s.v
    if variant.cache_bytes:
        k, v = (x // problem.dtype_bytes * variant.cache_bytes for x in (k, v))
    nq, nk = problem.seqlen_q, problem.seqlen_k
    if not (nq and nk):
        q = o = lse = k = v = 0
    elif problem.masked or problem.block_mask or variant.blocks is not None:
        rows, keys = seen_rows(problem, variant)
        q, o, lse = q // nq * rows, o // nq * rows, lse // nq * rows
        k, v = k // nk * keys, v // nk * keys
    if pass_ == "bwd":
        read = {"q": q, "k": k, "v": v, "o": o, "do": o, "lse": lse}
        return Traffic(level="compulsory", read=read, write={"dq": s.q, "dk": s.k, "dv": s.v})
    read = {"q": q, "k": k, "v": v}
    if variant.page_size:
        read["block_table"] = problem.batch * -(-problem.seqlen_k // variant.page_size) * INT32
    forward = Traffic(level="compulsory", read=read, write={"o": s.o, "lse": s.lse})
    return forward if pass_ == "fwd" else forward + _compulsory(problem, "bwd", variant)


def flops(problem: Problem, pass_: str, variant: Variant = DEFAULT) -> int:
    """Nominal matrix FLOPs over visible pairs, the same for every implementation of a cell.

    Forward 2·pairs·(d + dv): S = QKᵀ and O = PV. Backward 2·pairs·(3d + 2dv): S, dQ, dK over d;
    dP, dV over dv. Raises UnknownName for an unknown pass.
    """
    return _flops(problem, pass_, visible_pairs(problem, variant))


def flops_materialised(problem: Problem, pass_: str) -> int:
    """The same where the backward does not compute S again: 2·pairs·(2d + 2dv), twice the forward's."""
    pairs = problem.visible_pairs
    again = 2 * pairs * problem.head_dim if pass_ != "fwd" else 0
    return _flops(problem, pass_, pairs) - again


def flops_half_convention(problem: Problem, pass_: str) -> int:
    """FLOPs as papers count them: causal is exactly half of full, whatever the mask leaves visible.

    With a window or sequences of different lengths there is no such convention: visible pairs.
    Source: FlashAttention-2 (arXiv:2307.08691), section 4.1.
    """
    if problem.lengths or problem.window != (UNLIMITED, UNLIMITED):
        return _flops(problem, pass_, problem.visible_pairs)
    pairs = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    return _flops(problem, pass_, pairs) // (2 if problem.causal else 1)


def _flops(problem: Problem, pass_: str, pairs: int) -> int:
    if pass_ not in PASSES:
        raise UnknownName("pass", pass_, PASSES)
    d, dv = problem.head_dim, problem.head_dim_v
    forward, backward = 2 * pairs * (d + dv), 2 * pairs * (3 * d + 2 * dv)
    return {"fwd": forward, "bwd": backward}.get(pass_, forward + backward)
