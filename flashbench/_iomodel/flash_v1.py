"""FlashAttention-1: K/V outside, Q inside; O (or dQ) and the row statistics travel once per K/V tile.

Two countings: the paper's Algorithms 2 and 4, and what the CUDA code of release 1.0 loads and
stores (fp32 scratch, first pass does not read O, non-causal).
"""

from __future__ import annotations

from collections.abc import Mapping

from flashbench._iomodel.tensors import FP32, Sizes, sizes
from flashbench._iomodel.types import Step, Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench._iomodel.visits import visits
from flashbench.problem import Problem

ASSUMPTIONS = "every tile comes from memory, no reuse in L2; o and dq accumulate in the input dtype"
CUDA_ASSUMPTIONS = "release 1.0 of the CUDA code; fp32 scratch where there is more than one K/V tile"
STATS = 2 * FP32
"""Bytes per query row of the paper's running sum and maximum."""


def forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """Algorithm 2: for each K/V tile, Q and O and ℓ, m are read, O and ℓ, m written back.

    O, ℓ, m are initialised in memory. Source: FlashAttention (arXiv:2205.14135), Algorithm 2.
    """
    p, s, tile = problem, sizes(problem), tiles["fwd"]
    seen = visits(p, tile.block_q, tile.block_k, variant)
    heads, e = p.batch * p.num_heads, p.dtype_bytes
    passes = heads * seen.query_rows
    pairs = heads * seen.tiles * tile.block_q * tile.block_k
    step = Step(
        name="forward",
        read={"k": s.k_heads, "v": s.v_heads, "q": passes * p.head_dim * e, "o": passes * p.head_dim_v * e,
              "l, m": passes * STATS},
        write={"o": s.o + passes * p.head_dim_v * e, "l, m": 2 * s.lse + passes * STATS},
        flops=2 * pairs * (p.head_dim + p.head_dim_v),
        exps=pairs,
        ctas=p.batch * p.num_heads,
    )  # fmt: skip
    kept = s.o + 2 * s.lse
    return Work(steps=(step,), extra_bytes=kept, saved_bytes=kept, held_bytes=kept)


def backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """Algorithm 4: for each K/V tile, Q, O, dO, dQ, ℓ, m are read and dQ written back.

    dQ, dK, dV are initialised in memory. Source: FlashAttention (arXiv:2205.14135), Algorithm 4.
    """
    p, s, tile = problem, sizes(problem), tiles["bwd"]
    seen = visits(p, tile.block_q, tile.block_k, variant)
    heads, e = p.batch * p.num_heads, p.dtype_bytes
    q = heads * seen.query_rows * p.head_dim * e
    o = heads * seen.query_rows * p.head_dim_v * e
    dk, dv = ("dk", "dv") if p.group == 1 else ("dk_heads", "dv_heads")
    pairs = heads * seen.tiles * tile.block_q * tile.block_k
    step = Step(
        name="backward",
        read={"k": s.k_heads, "v": s.v_heads, "q": q, "o": o, "do": o, "dq": q,
              "l, m": heads * seen.query_rows * STATS},
        write={"dq": s.q + q, dk: 2 * s.k_heads, dv: 2 * s.v_heads},
        flops=2 * pairs * (3 * p.head_dim + 2 * p.head_dim_v),
        exps=pairs,
        ctas=p.batch * p.num_heads,
    )  # fmt: skip
    return Work(steps=(step, *sum_groups(p, s)), extra_bytes=gradients(p, s))


def cuda_forward(problem: Problem, tiles: Mapping[str, Tiles], _: Variant = DEFAULT) -> Work:
    """Release 1.0's fmha forward: one CTA per head, O kept in fp32 scratch between K/V tiles.

    Source: flash-attention 1.0, fmha_fprop_kernel_1xN.h.
    """
    p, s, tile = problem, sizes(problem), tiles["fwd"]
    passes = -(-p.seqlen_k // tile.block_k)
    scratch = p.batch * p.num_heads * p.seqlen_q * p.head_dim_v * FP32
    pairs = p.batch * p.num_heads * -(-p.seqlen_q // tile.block_q) * passes * tile.block_q * tile.block_k
    step = Step(
        name="forward",
        read={"k": s.k_heads, "v": s.v_heads, "q": passes * s.q, "o_tmp": (passes - 1) * scratch,
              "lse": (passes - 1) * s.lse},
        write={"o_tmp": (passes - 1) * scratch, "o": s.o, "lse": passes * s.lse},
        flops=2 * pairs * (p.head_dim + p.head_dim_v),
        exps=pairs,
        ctas=p.batch * p.num_heads,
    )  # fmt: skip
    kept = s.o + s.lse
    extra = kept + (scratch if passes > 1 else 0)
    return Work(steps=(step,), extra_bytes=extra, saved_bytes=kept, held_bytes=kept)


def cuda_backward(problem: Problem, tiles: Mapping[str, Tiles], _: Variant = DEFAULT) -> Work:
    """Release 1.0's fmha backward: dQ in fp32 scratch, O read once, delta kept after the first pass.

    Source: flash-attention 1.0, fmha_dgrad_kernel_1xN_loop.h.
    """
    p, s, tile = problem, sizes(problem), tiles["bwd"]
    passes = -(-p.seqlen_k // tile.block_k)
    scratch = p.batch * p.num_heads * p.seqlen_q * p.head_dim * FP32
    dk, dv = ("dk", "dv") if p.group == 1 else ("dk_heads", "dv_heads")
    pairs = p.batch * p.num_heads * -(-p.seqlen_q // tile.block_q) * passes * tile.block_q * tile.block_k
    step = Step(
        name="backward",
        read={"k": s.k_heads, "v": s.v_heads, "q": passes * s.q, "do": passes * s.o, "lse": passes * s.lse,
              "o": s.o, "dq_tmp": (passes - 1) * scratch, "delta": (passes - 1) * s.lse},
        write={"dq_tmp": (passes - 1) * scratch, "dq": s.q, dk: s.k_heads, dv: s.v_heads, "delta": s.lse},
        flops=2 * pairs * (3 * p.head_dim + 2 * p.head_dim_v),
        exps=pairs,
        ctas=p.batch * p.num_heads,
    )  # fmt: skip
    extra = gradients(p, s) + s.lse + (scratch if passes > 1 else 0)
    return Work(steps=(step, *sum_groups(p, s)), extra_bytes=extra)


def cuda_refuses(problem: Problem) -> str | None:
    """The counting is known without a mask only, and of queries that have keys."""
    if any(queries and not keys for queries, keys in problem.lengths):
        return "its counting of queries without keys is not known"
    return "its causal counting is not known; use causal no" if problem.masked else None


def gradients(problem: Problem, s: Sizes) -> int:
    """Bytes of dq, dk, dv, and of dk, dv per query head where a group shares K/V."""
    return s.q + s.k + s.v + (0 if problem.group == 1 else s.k_heads + s.v_heads)


def sum_groups(problem: Problem, s: Sizes) -> tuple[Step, ...]:
    """The step that adds dk, dv per query head over the heads that share K/V; none for MHA."""
    if problem.group == 1:
        return ()
    read = {"dk_heads": s.k_heads, "dv_heads": s.v_heads}
    return (Step(name="sum dk, dv", read=read, write={"dk": s.k, "dv": s.v}),)


def sram_tiles(problem: Problem, _: str, elements: int) -> Tiles:
    """block_k = ⌈M/4d⌉, block_q = min(block_k, d), M in elements; cut to the lengths.

    Q, K, V, O tiles share M; for head_dim ≠ head_dim_v, 4d is 2(d + dv) and d is the larger one.
    Source: FlashAttention (arXiv:2205.14135), Algorithm 1, line 1.
    """
    d, dv = problem.head_dim, problem.head_dim_v
    block_k = max(1, -(-elements // (2 * (d + dv))))
    block_q = min(block_k, max(d, dv))
    return Tiles(min(block_q, problem.seqlen_q), min(block_k, problem.seqlen_k))


def shipped_tiles(problem: Problem, _: str, __: object) -> Tiles:
    """Release 1.0's: 16 query rows; 256 K/V rows, 128 for head dims above 64."""
    return Tiles(16, 128 if max(problem.head_dim, problem.head_dim_v) > 64 else 256)


def footprint(problem: Problem, _: str, tiles: Tiles) -> int:
    """Elements of the Q, O, K, V tiles, the paper's accounting for both passes."""
    return (tiles.block_q + tiles.block_k) * (problem.head_dim + problem.head_dim_v)
