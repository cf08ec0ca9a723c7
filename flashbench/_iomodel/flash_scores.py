"""What the bundled kernels move for scores and lengths beside q, k and v: slopes, bias, sinks, cu_seqlens."""

from __future__ import annotations

from flashbench._iomodel import sectors
from flashbench._iomodel.listed import looked_up
from flashbench._iomodel.tensors import FP32, INT32, bias_bytes
from flashbench._iomodel.types import Step, Tiles
from flashbench._iomodel.visits import Band, Visits, band_visits, visits
from flashbench.flash_configs import SUMMED_ROWS
from flashbench.problem import Problem

RESIDENT = 2
"""Programs of dbias, and of dkdv, that share an H100's SM: over 168 registers for each of 128 threads."""


def slopes(problem: Problem, loads: int) -> dict[str, int]:
    """ALiBi's slopes, so many of them read."""
    return {"slopes": loads * FP32} if problem.alibi else {}


def sinks(problem: Problem, loads: int) -> dict[str, int]:
    """The sinks, so many of them read."""
    return {"sinks": loads * FP32} if problem.sinks else {}


def lengths(problem: Problem, programs: int, names: tuple[str, ...] = ("cu_q", "cu_k")) -> dict[str, int]:
    """Of a packed batch, where its sequence begins and ends: two numbers for each program and side.

    Programs beyond a sequence's end read them too, and no row.
    """
    return dict.fromkeys(names, programs * 2 * INT32) if problem.lengths else {}


def bias(problem: Problem, tile: Tiles) -> dict[str, int]:
    """The bias, read with every tile of every query head that a kernel with that tile visits."""
    return _bias(problem, visits(problem, *tile)) if problem.bias else {}


def _bias(p: Problem, seen: Visits) -> dict[str, int]:
    """Of a tile, its rows x columns where the bias varies along both, else its rows, its columns, or one."""
    *_, rows, columns = p.bias_shape
    if rows > 1 and columns > 1:
        entries = seen.scores
    elif rows > 1:
        entries = seen.query_rows
    else:
        entries = seen.key_rows if columns > 1 else seen.tiles
    return {"bias": p.batch * p.num_heads * entries * p.dtype_bytes}


def dbias(problem: Problem, tile: Tiles, products: int, *, refined: bool) -> Step:
    """The gradient of the bias: every tile of every query head, whether or not the mask shows any of it.

    A program has a tile of the bias, or all tiles of queries where one row serves all, and goes over the
    batches and heads that share it. Q, K, V and dO go past the L1, which so keeps the bias for all turns but
    the first, and may answer for lse and delta of rows that programs of one SM, on neighbouring tiles, ask
    for. products: columns of head dim that are
    multiplied for each pair; refined: whether it reads the dq kernel's norm. A bias that all keys share has
    the sum of p_sink * delta instead.
    """
    p, e = problem, problem.dtype_bytes
    batches, bias_heads, rows, columns = p.bias_shape
    if columns == 1:
        return _dbias_of_rows(p)
    nq, nk = p.seqlen_q, p.seqlen_k
    heads, tiles_q, tiles_k = p.batch * p.num_heads, -(-nq // tile.block_q), -(-nk // tile.block_k)
    every = band_visits(Band(nq, nk, -nq, nk), tile.block_q, tile.block_k)
    queries, keys = heads * every.query_rows, heads * every.key_rows
    pairs = heads * every.tiles * tile.block_q * tile.block_k
    vectors = dict.fromkeys(("lse", "delta", *(("norm",) if refined else ())), queries * FP32)
    again = _bias(p, every)
    turns = batches * bias_heads / heads
    return Step(
        name="dbias",
        read={
            "q": queries * p.head_dim * e, "do": queries * p.head_dim_v * e, **vectors,
            "k": keys * p.head_dim * e, "v": keys * p.head_dim_v * e,
            **slopes(p, heads * every.tiles), **again, **looked_up(p, tile),
        },
        moved={"bias": round(again["bias"] * turns)},
        nearby=sum(vectors.values()) * (RESIDENT - 1) // RESIDENT,
        write={"dbias": bias_bytes(p)},
        flops=2 * pairs * products,
        exps=pairs,
        ctas=batches * bias_heads * (tiles_q if rows > 1 else 1) * tiles_k,
    )  # fmt: skip


def _dbias_of_rows(p: Problem) -> Step:
    batches, bias_heads, rows, _ = p.bias_shape
    heads, tiles = p.batch * p.num_heads, -(-p.seqlen_q // SUMMED_ROWS)
    vector = heads * p.seqlen_q * FP32
    return Step(
        name="dbias",
        read={"lse": vector, "delta": vector, **sinks(p, heads * tiles)},
        write={"dbias": bias_bytes(p)},
        ctas=batches * bias_heads * (tiles if rows > 1 else 1),
    )


def dsinks(problem: Problem, rows: int) -> Step:
    """The gradient of the sinks, one program per head; rows: bytes of lse."""
    read = {"lse": rows, "delta": rows, **sinks(problem, problem.num_heads)}
    number = sectors.alone(problem.num_heads)
    return Step(
        name="dsinks", read=read, write={"dsinks": problem.num_heads * FP32}, ctas=problem.num_heads,
        moved={"sinks": number, "dsinks": number},
    )  # fmt: skip
