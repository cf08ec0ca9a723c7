"""Sizes of the tensors, FLOPs, and the traffic that no algorithm can avoid."""

from __future__ import annotations

from typing import NamedTuple

from flashbench._iomodel.types import Traffic
from flashbench.errors import UnknownName
from flashbench.problem import PASSES, Problem

FP32 = 4
"""Bytes of lse, delta and fp32 accumulators."""


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


def sizes(problem: Problem) -> Sizes:
    """Bytes of every tensor of the problem, in its dtype."""
    p, e = problem, problem.dtype_bytes
    heads, kv_heads = p.batch * p.num_heads, p.batch * p.num_kv_heads
    k, v = p.seqlen_k * p.head_dim * e, p.seqlen_k * p.head_dim_v * e
    return Sizes(
        q=heads * p.seqlen_q * p.head_dim * e,
        k=kv_heads * k,
        v=kv_heads * v,
        o=heads * p.seqlen_q * p.head_dim_v * e,
        lse=heads * p.seqlen_q * FP32,
        k_heads=heads * k,
        v_heads=heads * v,
    )


def compulsory(problem: Problem, pass_: str) -> Traffic:
    """Bytes that any algorithm moves: each tensor once. Query rows without keys need not be read.

    Forward: reads q, k, v; writes o, lse. Backward: reads q, k, v, o, do, lse; writes dq, dk, dv.
    """
    s = sizes(problem)
    seen = problem.seqlen_q - problem.rows_without_keys
    q, o, lse = (size // problem.seqlen_q * seen for size in (s.q, s.o, s.lse))
    parts = []
    if pass_ != "bwd":
        parts.append(
            Traffic(level="compulsory", read={"q": q, "k": s.k, "v": s.v}, write={"o": s.o, "lse": s.lse})
        )
    if pass_ != "fwd":
        read = {"q": q, "k": s.k, "v": s.v, "o": o, "do": o, "lse": lse}
        parts.append(Traffic(level="compulsory", read=read, write={"dq": s.q, "dk": s.k, "dv": s.v}))
    return parts[0] if len(parts) == 1 else parts[0] + parts[1]


def flops(problem: Problem, pass_: str) -> int:
    """Nominal matrix FLOPs over visible pairs, the same for every implementation of a cell.

    Forward 2·pairs·(d + dv): S = QKᵀ and O = PV. Backward 2·pairs·(3d + 2dv): S, dQ, dK over d;
    dP, dV over dv. Raises UnknownName for an unknown pass.
    """
    return _flops(problem, pass_, problem.visible_pairs)


def flops_half_convention(problem: Problem, pass_: str) -> int:
    """FLOPs as papers count them: causal is exactly half of full, whatever the mask leaves visible.

    Source: FlashAttention-2 (arXiv:2307.08691), section 4.1.
    """
    pairs = problem.batch * problem.num_heads * problem.seqlen_q * problem.seqlen_k
    return _flops(problem, pass_, pairs) // (2 if problem.causal else 1)


def _flops(problem: Problem, pass_: str, pairs: int) -> int:
    if pass_ not in PASSES:
        raise UnknownName("pass", pass_, PASSES)
    d, dv = problem.head_dim, problem.head_dim_v
    forward, backward = 2 * pairs * (d + dv), 2 * pairs * (3 * d + 2 * dv)
    return {"fwd": forward, "bwd": backward}.get(pass_, forward + backward)
