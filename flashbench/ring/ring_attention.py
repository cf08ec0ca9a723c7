"""Ring Attention: queries stay, keys and values go round, and each is computed on while the next travels.

Rank r begins with its own K and V. In step s it has those of rank r − s, starts to send them on to r + 1 and
to receive the next from r − 1, and meanwhile computes its queries' block against what it has; the merge of
(o, lse) makes the blocks one softmax. After P steps every query has met every key.

In the backward K and V go round once more, and sums of dK and dV follow one step behind: rank r + 1 begins
those of shard r, every rank adds its block's and sends them on, and after P − 1 hops they are home, where the
own block's wait. Source: Liu, Zaharia, Abbeel 2023, arXiv:2310.01889; the zigzag is ``_iomodel/shards.py``.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from flashbench._iomodel import shards

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.ring.step import Forward, Rank


class Merged:
    """o and lse of the own rows over the keys that were met so far, in a wider dtype than the inputs'."""

    def __init__(self, o: Tensor, lse: Tensor) -> None:
        self.o, self.lse = o, lse

    def add(self, first: int, o: Tensor, lse: Tensor) -> None:
        """Take in other keys' (o, lse) of the rows from ``first`` on."""
        from flashbench.kernels import merge
        from flashbench.kernels._local import wider

        if self.o.dtype == o.dtype:
            self.o = wider(self.o)
            self.lse = self.lse.to(self.o.dtype)
        rows = slice(first, None)
        both = merge((self.o[:, :, rows], o), (self.lse[:, :, rows], lse))
        if not first:
            self.o, self.lse = both
        else:
            self.o[:, :, rows], self.lse[:, :, rows] = both


def forward(rank: Rank, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """As ``step.Algorithm``; keeps the own q, k, v, o and lse."""
    link, causal, kv = rank.link, rank.problem.causal, (k, v)
    merged: Merged | None = None
    for number in range(link.ranks):
        owner = (link.rank - number) % link.ranks
        coming = None
        if number + 1 < link.ranks:
            coming = link.shift(kv, rank.kv_shapes((owner - 1) % link.ranks))
        block = shards.block(rank.mine, rank.cut[owner], causal=causal)
        rows, keys = slice(*block.rows), slice(*block.keys)
        found = rank.step.forward(q[:, :, rows], kv[0][:, :, keys], kv[1][:, :, keys], block.causal)
        if merged is None:
            merged = Merged(*found)
        else:
            merged.add(block.rows[0], *found)
        if coming is not None:
            kv = coming.wait()
    assert merged is not None
    o = merged.o.to(q.dtype)
    return o, (q, k, v, o, merged.lse.float())


def backward(rank: Rank, saved: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``step.Algorithm``."""
    from flashbench.kernels._local import wider

    q, k, v, o, lse = saved
    link, kv, sums = rank.link, (k, v), None
    dq, home = q.new_zeros(()), (k, v)
    for number in range(link.ranks):
        owner = (link.rank - number) % link.ranks
        before = (owner - 1) % link.ranks
        coming = link.shift(kv, rank.kv_shapes(before)) if number + 1 < link.ranks else None
        block = shards.block(rank.mine, rank.cut[owner], causal=rank.problem.causal)
        rows, keys = slice(*block.rows), slice(*block.keys)
        there = (x[:, :, keys] for x in kv)
        here = (x[:, :, rows] for x in (o, lse, do))
        part, *grads = rank.step.backward((q[:, :, rows], *there, *here), block.causal)
        if not number:
            dq, home = wider(part), (wider(grads[0]), wider(grads[1]))
        else:
            dq[:, :, rows] += part
            arrived = sums.wait() if sums is not None else tuple(_zeros(x) for x in kv)
            for total, grad in zip(arrived, grads, strict=True):
                total[:, :, keys] += grad
            sums = link.shift(arrived, rank.kv_shapes(before))
        kv = coming.wait() if coming is not None else kv
    dk, dv = home
    if sums is not None:
        dk, dv = (own + rest for own, rest in zip(home, sums.wait(), strict=True))
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _zeros(x: Tensor) -> Tensor:
    import torch

    return torch.zeros_like(x, dtype=torch.float32)
