"""Walks over tiles: what a simulated kernel loads and stores, tile by tile, without any formula.

A walk visits tiles as a kernel does, one by one, asks a brute-force mask whether a tile holds a
visible pair, and adds up what it loads and stores.
"""

from __future__ import annotations

from collections import Counter

from hypothesis import strategies as st

from flashbench import iomodel
from flashbench.iomodel import BlockMask
from flashbench.problem import ALIGNMENTS, DTYPES, Problem

small = st.integers(1, 13)
blocks = st.integers(1, 7)
either = st.booleans()


@st.composite
def problems(
    draw: st.DrawFn, causal: st.SearchStrategy[bool] = either, *, windows: bool = True, dtypes: str = ""
) -> Problem:
    """Small problems with every mask: causal, windows, both alignments; dtypes: names, default all."""
    sides = st.integers(-1, 9) if windows else st.just(-1)
    kv_heads, group = draw(st.integers(1, 2)), draw(st.integers(1, 3))
    return Problem(
        batch=draw(st.integers(1, 2)),
        num_heads=kv_heads * group,
        num_kv_heads=kv_heads,
        seqlen_q=draw(small),
        seqlen_k=draw(small),
        head_dim=draw(st.integers(1, 5)),
        head_dim_v=draw(st.integers(1, 5)),
        dtype=draw(st.sampled_from(dtypes.split() or sorted(DTYPES))),
        causal=draw(causal),
        window=(draw(sides), draw(sides)),
        alignment=draw(st.sampled_from(ALIGNMENTS if windows else ALIGNMENTS[:1])),
    )


def spans(length: int, block: int) -> list[range]:
    return [range(start, min(start + block, length)) for start in range(0, length, block)]


def sees(p: Problem, i: int, j: int, mask: BlockMask | None = None) -> bool:
    if mask is not None and not mask.rows[i // mask.block_q][j // mask.block_k]:
        return False
    ahead = j - i - (p.seqlen_k - p.seqlen_q if p.alignment == "bottom-right" else 0)
    left, right = p.window
    return (ahead <= 0 or not p.causal) and (left == -1 or ahead >= -left) and (right == -1 or ahead <= right)


def holds_a_pair(p: Problem, rows: range, columns: range, mask: BlockMask | None = None) -> bool:
    return any(sees(p, i, j, mask) for i in rows for j in columns)


class Walk:
    """What a simulated kernel has loaded, stored, added atomically, multiplied and exponentiated."""

    def __init__(self, problem: Problem) -> None:
        self.p = problem
        self.read: Counter[str] = Counter()
        self.write: Counter[str] = Counter()
        self.atomic: Counter[str] = Counter()
        self.flops = self.exps = 0

    @property
    def heads(self) -> range:
        return range(self.p.batch * self.p.num_heads)

    def width(self, tensor: str) -> int:
        """Bytes per row of a tensor."""
        base = tensor.removesuffix("_heads")
        d, dv, e = self.p.head_dim, self.p.head_dim_v, self.p.dtype_bytes
        return {
            "q": d * e, "k": d * e, "dq": d * e, "dk": d * e, "v": dv * e, "o": dv * e, "do": dv * e,
            "dv": dv * e, "lse": 4, "delta": 4, "l, m": 8, "dq_acc": 4 * d, "dq_tmp": 4 * d, "o_tmp": 4 * dv,
            "o_part": 4 * dv, "lse_part": 4, "lse_log2": 4, "dk_acc": 4 * d, "dv_acc": 4 * dv,
        }[base]  # fmt: skip

    def load(self, rows: range, *tensors: str) -> None:
        for tensor in tensors:
            self.read[tensor] += len(rows) * self.width(tensor)

    def store(self, rows: range, *tensors: str) -> None:
        for tensor in tensors:
            self.write[tensor] += len(rows) * self.width(tensor)

    def multiply(self, block_q: int, block_k: int, d_products: int, dv_products: int) -> None:
        """Matrix products and one exponential per element of a whole tile, ragged or not."""
        self.flops += 2 * block_q * block_k * (d_products * self.p.head_dim + dv_products * self.p.head_dim_v)
        self.exps += block_q * block_k

    def per_head(self, tensor: str) -> str:
        return tensor if self.p.group == 1 else f"{tensor}_heads"

    def sum_over_groups(self) -> None:
        if self.p.group > 1:
            for _ in self.heads:
                self.load(range(self.p.seqlen_k), "dk_heads", "dv_heads")
            for _ in range(self.p.batch * self.p.num_kv_heads):
                self.store(range(self.p.seqlen_k), "dk", "dv")

    def same_as(self, row: iomodel.Estimate) -> bool:
        got = row.requested
        found = (+Counter(got.read), +Counter(got.write), +Counter(got.atomic), row.done_flops, row.exps)
        walked = (+self.read, +self.write, +self.atomic, self.flops, self.exps)
        assert found == walked
        return True


def walk_v2_forward(p: Problem, block_q: int, block_k: int) -> Walk:
    walk = Walk(p)
    for _ in walk.heads:
        for rows in spans(p.seqlen_q, block_q):
            walk.load(rows, "q")
            for columns in spans(p.seqlen_k, block_k):
                if holds_a_pair(p, rows, columns):
                    walk.load(columns, "k", "v")
                    walk.multiply(block_q, block_k, 1, 1)
            walk.store(rows, "o", "lse")
    return walk


def walk_v2_backward(
    p: Problem, dkdv: tuple[int, int], dq: tuple[int, int], mask: BlockMask | None = None
) -> Walk:
    walk = Walk(p)
    for _ in walk.heads:
        walk.load(range(p.seqlen_q), "o", "do")
        walk.store(range(p.seqlen_q), "delta")
    for _ in range(p.batch * p.num_kv_heads):
        for columns in spans(p.seqlen_k, dkdv[1]):
            walk.load(columns, "k", "v")
            for _ in range(p.group):
                for rows in spans(p.seqlen_q, dkdv[0]):
                    if holds_a_pair(p, rows, columns, mask):
                        walk.load(rows, "q", "do", "lse", "delta")
                        walk.multiply(*dkdv, 2, 2)
            walk.store(columns, "dk", "dv")
    for _ in walk.heads:
        for rows in spans(p.seqlen_q, dq[0]):
            walk.load(rows, "q", "do", "lse", "delta")
            for columns in spans(p.seqlen_k, dq[1]):
                if holds_a_pair(p, rows, columns, mask):
                    walk.load(columns, "k", "v")
                    walk.multiply(*dq, 2, 1)
            walk.store(rows, "dq")
    return walk


def walk_v2_atomic(p: Problem, block_q: int, block_k: int, mask: BlockMask | None = None) -> Walk:
    walk = Walk(p)
    for _ in walk.heads:
        walk.load(range(p.seqlen_q), "o", "do")
        walk.store(range(p.seqlen_q), "delta", "dq_acc")
        for columns in spans(p.seqlen_k, block_k):
            walk.load(columns, "k", "v")
            for rows in spans(p.seqlen_q, block_q):
                if holds_a_pair(p, rows, columns, mask):
                    walk.load(rows, "q", "do", "lse", "delta")
                    walk.multiply(block_q, block_k, 3, 2)
                    walk.atomic["dq_acc"] += len(rows) * walk.width("dq_acc")
            walk.store(columns, walk.per_head("dk"), walk.per_head("dv"))
        walk.load(range(p.seqlen_q), "dq_acc")
        walk.store(range(p.seqlen_q), "dq")
    walk.sum_over_groups()
    return walk


def walk_v1(p: Problem, block_q: int, block_k: int, *, backward: bool) -> Walk:
    walk = Walk(p)
    everything_q, everything_k = range(p.seqlen_q), range(p.seqlen_k)
    for _ in walk.heads:
        if backward:
            walk.store(everything_q, "dq")
            walk.store(everything_k, walk.per_head("dk"), walk.per_head("dv"))
        else:
            walk.store(everything_q, "o", "l, m")
        for columns in spans(p.seqlen_k, block_k):
            walk.load(columns, "k", "v")
            for rows in spans(p.seqlen_q, block_q):
                if not holds_a_pair(p, rows, columns):
                    continue
                if backward:
                    walk.load(rows, "q", "o", "do", "dq", "l, m")
                    walk.store(rows, "dq")
                    walk.multiply(block_q, block_k, 3, 2)
                else:
                    walk.load(rows, "q", "o", "l, m")
                    walk.store(rows, "o", "l, m")
                    walk.multiply(block_q, block_k, 1, 1)
            if backward:
                walk.store(columns, walk.per_head("dk"), walk.per_head("dv"))
    if backward:
        walk.sum_over_groups()
    return walk


def walk_v1_cuda(p: Problem, block_q: int, block_k: int, *, backward: bool) -> Walk:
    walk = Walk(p)
    tiles = spans(p.seqlen_k, block_k)
    for _ in walk.heads:
        for index, columns in enumerate(tiles):
            first, last = index == 0, index == len(tiles) - 1
            walk.load(columns, "k", "v")
            for rows in spans(p.seqlen_q, block_q):
                walk.multiply(block_q, block_k, *((3, 2) if backward else (1, 1)))
                if backward:
                    walk.load(rows, "q", "do", "lse")
                    walk.load(rows, *(["o"] if first else ["dq_tmp", "delta"]))
                    walk.store(rows, "dq" if last else "dq_tmp", *(["delta"] if first else []))
                else:
                    walk.load(rows, "q", *([] if first else ["o_tmp", "lse"]))
                    walk.store(rows, "o" if last else "o_tmp", "lse")
            if backward:
                walk.store(columns, walk.per_head("dk"), walk.per_head("dv"))
    if backward:
        walk.sum_over_groups()
    return walk
