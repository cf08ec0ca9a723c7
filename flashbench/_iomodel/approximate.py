"""Attention that computes fewer scores: Linformer, Reformer (LSH), Longformer. Forward only.

Each is modelled as fused kernels with the query tile of FlashAttention-2; a step's ``read`` counts
every slice that its thread blocks load. Per (batch, head) unless said; Nq, Nk, d, dv, e as in
docs/io-model.md. Sums over tiles and chunks are closed forms.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from flashbench._iomodel.tensors import FP32, INT32, Sizes, sizes
from flashbench._iomodel.types import Step, Traffic
from flashbench.problem import Problem

BLOCK_Q = 128
"""Query rows of a tile, and rows of a projection's output."""

SORT_BITS = 8
"""Bits that one pass of a radix sort takes."""


def ceil_div(count: int, size: int) -> int:
    """⌈count / size⌉."""
    return -(-count // size)


@dataclass(frozen=True, kw_only=True)
class Linformer:
    """K and V projected along the sequence to ``rank`` rows, then attention over these.

    Source: Wang et al. 2020, arXiv:2006.04768, equation 7: K' = E·K, V' = F·V with E, F of
    rank x seqlen_k, here shared by the heads and the batch.
    """

    NAME: ClassVar[str] = "linformer"
    SUMMARY: ClassVar[str] = "K and V projected to a fixed number of rows, then attention"
    SOURCE: ClassVar[str] = "Wang et al. 2020, arXiv:2006.04768, equation 7"
    ASSUMPTIONS: ClassVar[str] = (
        "two kernels: projections in tiles of 128 rows, then FlashAttention-2 over rank keys; E and F are"
        " shared by heads and batch; the length is fixed by E and F"
    )

    rank: int = 256

    def refuses(self, problem: Problem) -> str | None:
        """Why it does not cover the problem, or None."""
        return (
            "no causal form: a projection along the sequence mixes later keys into earlier ones"
            if problem.causal
            else None
        )

    def steps(self, problem: Problem) -> tuple[Step, ...]:
        """project, attend."""
        p, s, k = problem, sizes(problem), self._rows(problem)
        e, d, dv, heads, kv_heads = p.dtype_bytes, p.head_dim, p.head_dim_v, *_heads(p)
        tiles = ceil_div(k, BLOCK_Q)
        streamed = heads * ceil_div(p.seqlen_q, BLOCK_Q) * k * e
        factor = kv_heads * k * p.seqlen_k * e
        return (
            Step(
                name="project", read={"k": tiles * s.k, "v": tiles * s.v, "e": factor, "f": factor},
                write={"k_projected": kv_heads * k * d * e, "v_projected": kv_heads * k * dv * e},
                flops=2 * kv_heads * k * p.seqlen_k * (d + dv),
            ),
            Step(
                name="attend", read={"q": s.q, "k_projected": streamed * d, "v_projected": streamed * dv},
                write={"o": s.o, "lse": s.lse}, flops=2 * heads * p.seqlen_q * k * (d + dv),
                exps=heads * p.seqlen_q * k,
            ),
        )  # fmt: skip

    def compulsory(self, problem: Problem) -> Traffic:
        """Reads q, k, v and the two projections; writes o, lse."""
        s, factor = sizes(problem), self._rows(problem) * problem.seqlen_k * problem.dtype_bytes
        return _least({"q": s.q, "k": s.k, "v": s.v, "e": factor, "f": factor}, s)

    def extra_bytes(self, problem: Problem) -> int:
        """o, lse, and the projected keys and values."""
        s, (_, kv_heads) = sizes(problem), _heads(problem)
        row = (problem.head_dim + problem.head_dim_v) * problem.dtype_bytes
        return s.o + s.lse + kv_heads * self._rows(problem) * row

    def _rows(self, problem: Problem) -> int:
        return min(self.rank, problem.seqlen_k)


@dataclass(frozen=True, kw_only=True)
class Reformer:
    """Queries hashed into buckets and sorted; a chunk attends itself and the chunk before, per round.

    Keys are the normalised queries. There are as many buckets as half chunks, hashed as two factors.
    Source: Kitaev et al. 2020, arXiv:2001.04451, section 2 and figure 2.
    """

    NAME: ClassVar[str] = "reformer"
    SUMMARY: ClassVar[str] = "locality-sensitive hashing: sorted chunks attend themselves and the one before"
    SOURCE: ClassVar[str] = "Kitaev et al. 2020, arXiv:2001.04451, section 2"
    ASSUMPTIONS: ClassVar[str] = (
        "keys are the queries; kernels: hash (two factors), radix sort of 8 bits a pass, attention that"
        " gathers and scatters by index, merge of the rounds; a mask saves nothing"
    )

    rounds: int = 4
    chunk: int = 64

    def refuses(self, problem: Problem) -> str | None:
        """Why it does not cover the problem, or None."""
        return _self_attention(problem) or (
            "no K/V heads shared by queries: its queries are its keys, one per head"
            if problem.group > 1
            else None
        )

    def steps(self, problem: Problem) -> tuple[Step, ...]:
        """hash, sort, attend, and with two rounds or more merge."""
        p, s, (heads, _) = problem, sizes(problem), _heads(problem)
        n, d, dv, e, r = p.seqlen_q, p.head_dim, p.head_dim_v, p.dtype_bytes, self.rounds
        buckets, factors = self.buckets(n)
        columns = sum(factors) // 2
        rows = r * heads * n
        passes = ceil_div((buckets - 1).bit_length(), SORT_BITS)
        seen = r * heads * self._key_rows(n)
        pairs = r * heads * self.pairs(n)
        parts, lses = ("o", "lse") if r == 1 else ("o_rounds", "lse_rounds")
        steps = [
            Step(
                name="hash", read={"q": r * s.q, "rotations": r * heads * d * columns * e},
                write={"buckets": rows * INT32}, flops=2 * rows * d * columns,
            ),
            Step(
                name="sort", read={"buckets": rows * INT32, "keys": passes * rows * 2 * INT32},
                write={"keys": passes * rows * 2 * INT32},
            ),
            Step(
                name="attend",
                read={"order": seen * INT32, "q": r * s.q, "k": seen * d * e, "v": seen * dv * e},
                write={parts: r * s.o, lses: rows * FP32}, flops=2 * pairs * (d + dv), exps=pairs,
            ),
        ]  # fmt: skip
        if r > 1:
            merged = {"o_rounds": r * s.o, "lse_rounds": rows * FP32}
            steps.append(Step(name="merge", read=merged, write={"o": s.o, "lse": s.lse}, exps=rows))
        return tuple(steps)

    def pairs(self, n: int) -> int:
        """Pairs that one round computes for one head: each chunk with itself and the one before, cyclic."""
        chunks, last = self._chunks(n)
        if chunks == 1:
            return n * n
        c = self.chunk
        return (chunks - 1) * c * c + last * last + (chunks - 2) * c * c + 2 * c * last

    def compulsory(self, problem: Problem) -> Traffic:
        """Reads q (which is k) and v; writes o, lse."""
        s = sizes(problem)
        return _least({"q": s.q, "v": s.v}, s)

    def extra_bytes(self, problem: Problem) -> int:
        """o, lse, the sorted keys (twice, as a sort is not in place), and each round's o and lse."""
        s, r = sizes(problem), self.rounds
        rows = r * _heads(problem)[0] * problem.seqlen_q
        return s.o + s.lse + rows * 4 * INT32 + (r * s.o + rows * FP32 if r > 1 else 0)

    def _chunks(self, n: int) -> tuple[int, int]:
        """How many chunks, and rows of the last."""
        chunks = ceil_div(n, self.chunk)
        return chunks, n - (chunks - 1) * self.chunk

    def _key_rows(self, n: int) -> int:
        """Rows of K that the chunks of one round read: each is seen by its own chunk and the next."""
        return n if self._chunks(n)[0] == 1 else 2 * n

    def buckets(self, n: int) -> tuple[int, tuple[int, int]]:
        """Buckets (chunks are twice the mean bucket), and their two even factors of similar size."""
        wanted = 2 * ceil_div(n, self.chunk)
        first = 2
        while first * first < wanted:
            first *= 2
        return wanted, (first, max(2, 2 * ceil_div(ceil_div(wanted, first), 2)))


@dataclass(frozen=True, kw_only=True)
class Longformer:
    """A sliding window of ``window`` keys beside the query's own, and ``globals`` tokens that see all.

    Without a causal mask half the window lies on either side. A global token attends every key with
    projections of its own, and every query attends the global tokens. Source: Beltagy et al. 2020,
    arXiv:2004.05150, section 3.1.
    """

    NAME: ClassVar[str] = "longformer"
    SUMMARY: ClassVar[str] = "a sliding window, and a few tokens that attend and are attended by all"
    SOURCE: ClassVar[str] = "Beltagy et al. 2020, arXiv:2004.05150, section 3.1"
    ASSUMPTIONS: ClassVar[str] = (
        "FlashAttention-2 over the rows that the window of a tile of 128 queries covers, and the global"
        " tokens beside them; global queries in a second kernel with K and V of their own"
    )

    window: int = 512
    globals: int = 0

    def refuses(self, problem: Problem) -> str | None:
        """Why it does not cover the problem, or None."""
        if problem.causal and self.globals:
            return "global tokens see later keys"
        return _self_attention(problem)

    def steps(self, problem: Problem) -> tuple[Step, ...]:
        """local, and with global tokens global."""
        p, s, g = problem, sizes(problem), min(self.globals, problem.seqlen_k)
        e, d, dv, (heads, _) = p.dtype_bytes, p.head_dim, p.head_dim_v, _heads(p)
        n, tiles = p.seqlen_q, ceil_div(p.seqlen_q, BLOCK_Q)
        rows, pairs = self.band(p, BLOCK_Q)
        streamed = heads * (rows + tiles * g) * e
        done = heads * (pairs + n * g)
        local = Step(
            name="local", read={"q": s.q, "k": streamed * d, "v": streamed * dv},
            write={"o": s.o, "lse": s.lse}, flops=2 * done * (d + dv), exps=done,
        )  # fmt: skip
        if not g:
            return (local,)
        again, done = heads * ceil_div(g, BLOCK_Q) * n * e, heads * g * n
        every = Step(
            name="global",
            read={"q_global": heads * g * d * e, "k_global": again * d, "v_global": again * dv},
            write={"o": heads * g * dv * e, "lse": heads * g * FP32},
            flops=2 * done * (d + dv), exps=done,
        )  # fmt: skip
        return local, every

    def band(self, problem: Problem, block_q: int) -> tuple[int, int]:
        """Per head: K rows that tiles of block_q queries stream, and pairs of their rows."""
        n, (left, right) = problem.seqlen_q, self._sides(problem)
        tiles = ceil_div(n, block_q)
        inner = min(tiles, max(0, (n - right - 1) // block_q))  # tiles whose window ends before the last key
        ends = block_q * inner * (inner + 1) // 2 + right * inner + (tiles - inner) * n
        first = min(tiles, left // block_q + 1)  # the first tile whose window starts after the first key
        count = tiles - first
        starts = block_q * (first + tiles - 1) * count // 2 - left * count
        last = n - max(0, (tiles - 1) * block_q - left)  # rows that the last tile streams
        spare = tiles * block_q - n  # rows that it lacks
        return ends - starts, block_q * (ends - starts) - spare * last

    def compulsory(self, problem: Problem) -> Traffic:
        """Reads q, k, v, and the global tokens' own projections; writes o, lse."""
        s, g, n = sizes(problem), min(self.globals, problem.seqlen_k), problem.seqlen_q
        more = {"q_global": s.q // n * g, "k_global": s.k_heads, "v_global": s.v_heads} if g else {}
        return _least({"q": s.q, "k": s.k, "v": s.v, **more}, s)

    def extra_bytes(self, problem: Problem) -> int:
        """o and lse."""
        s = sizes(problem)
        return s.o + s.lse

    def _sides(self, problem: Problem) -> tuple[int, int]:
        """Keys before and after the query's own."""
        return (self.window, 0) if problem.causal else (self.window // 2, self.window - self.window // 2)


@dataclass(frozen=True, kw_only=True)
class BlockSparse:
    """Attention of the 128 x 128 blocks of the block mask butterfly: numbers that differ in one binary digit.

    Source: Dao et al. 2022, arXiv:2205.14135, section 3.3; the mask of Dao et al. 2022, arXiv:2112.00029.
    """

    NAME: ClassVar[str] = "block-sparse"
    SUMMARY: ClassVar[str] = "the blocks of a butterfly: about log2(N/128) of N/128 in each row"
    SOURCE: ClassVar[str] = "Dao et al. 2022, arXiv:2205.14135, section 3.3"
    ASSUMPTIONS: ClassVar[str] = "FlashAttention-2 that visits no empty block of 128 queries and 128 keys"

    def refuses(self, problem: Problem) -> str | None:
        """Why it does not cover the problem, or None."""
        return _self_attention(problem) or ("it has a block mask of its own" if problem.block_mask else None)

    def steps(self, problem: Problem) -> tuple[Step, ...]:
        """attend."""
        p, s, (heads, _) = problem, sizes(problem), _heads(problem)
        rows, pairs = self._visited(p)
        streamed, done = heads * rows * p.dtype_bytes, heads * pairs
        read = {"q": s.q, "k": streamed * p.head_dim, "v": streamed * p.head_dim_v}
        flops = 2 * done * (p.head_dim + p.head_dim_v)
        return (Step(name="attend", read=read, write={"o": s.o, "lse": s.lse}, flops=flops, exps=done),)

    def compulsory(self, problem: Problem) -> Traffic:
        """Reads q, k, v; writes o, lse."""
        s = sizes(problem)
        return _least({"q": s.q, "k": s.k, "v": s.v}, s)

    def extra_bytes(self, problem: Problem) -> int:
        """o and lse."""
        s = sizes(problem)
        return s.o + s.lse

    def _visited(self, problem: Problem) -> tuple[int, int]:
        """Per head: rows of K that the tiles of queries stream, and pairs of the blocks, whole ones too."""
        last = problem.seqlen_q - 1
        blocks, rest = last // BLOCK_Q + 1, last % BLOCK_Q + 1
        rows = pairs = 0
        for query in range(blocks):
            met = {query, *(query ^ (1 << digit) for digit in range(blocks.bit_length()))}
            seen = [key for key in met if key < blocks and not (problem.causal and key > query)]
            keys = sum(rest if key == blocks - 1 else BLOCK_Q for key in seen)
            rows += keys
            pairs += keys * (rest if query == blocks - 1 else BLOCK_Q)
        return rows, pairs


def _heads(problem: Problem) -> tuple[int, int]:
    return problem.batch * problem.num_heads, problem.batch * problem.num_kv_heads


def _self_attention(problem: Problem) -> str | None:
    return None if problem.seqlen_q == problem.seqlen_k else "it attends one sequence: seqlen_q is seqlen_k"


def _least(read: dict[str, int], s: Sizes) -> Traffic:
    return Traffic(level="compulsory", read=read, write={"o": s.o, "lse": s.lse})
