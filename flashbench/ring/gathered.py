"""K and V gathered by every rank: one collective, then the own queries against all the keys that they see.

Each chunk of queries takes the keys up to its own last row, which for a causal mask is bottom-right attention
of the two as they stand. The backward gathers K and V again, so that no rank keeps them, and each sends the
others their rows of dK and dV. Memory grows with the whole sequence's K and V, which GQA makes small. Source:
Llama 3, arXiv:2407.21783, section 3.3.2.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from flashbench._iomodel.shards import longest
from flashbench.ring.step import padded, rows_of, whole

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.ring.step import Forward, Rank


def forward(rank: Rank, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """As ``step.Algorithm``; keeps the own q, k, v, o and lse."""
    import torch

    all_k, all_v = _all(rank, k), _all(rank, v)
    found = [
        rank.step.forward(q[:, :, rows], all_k[:, :, keys], all_v[:, :, keys], rank.problem.causal)
        for rows, keys in _seen(rank)
    ]
    o, lse = (torch.cat(parts, dim=2) for parts in zip(*found, strict=True))
    return o, (q, k, v, o, lse)


def backward(rank: Rank, saved: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``step.Algorithm``."""
    import torch

    q, k, v, o, lse = saved
    all_k, all_v = _all(rank, k), _all(rank, v)
    sums = [torch.zeros_like(x, dtype=torch.float32) for x in (all_k, all_v)]
    parts = []
    for rows, keys in _seen(rank):
        here = (x[:, :, rows] for x in (o, lse, do))
        block = (q[:, :, rows], all_k[:, :, keys], all_v[:, :, keys], *here)
        part, *grads = rank.step.backward(block, rank.problem.causal)
        parts.append(part)
        for total, grad in zip(sums, grads, strict=True):
            total[:, :, keys] += grad
    dk, dv = (_home(rank, total, like) for total, like in zip(sums, (k, v), strict=True))
    return torch.cat(parts, dim=2), dk, dv


def _all(rank: Rank, x: Tensor) -> Tensor:
    """The whole sequence of which x is the own shard; shards travel as long as the longest."""
    return whole(rank.link.gather(padded(x, longest(rank.cut))), rank.cut)


def _seen(rank: Rank) -> Iterator[tuple[slice, slice]]:
    """Own rows of each chunk, as they lie here, and the keys that they may see."""
    at = 0
    for start, stop in rank.mine:
        yield slice(at, at + stop - start), slice(0, stop if rank.problem.causal else None)
        at += stop - start


def _home(rank: Rank, sums: Tensor, like: Tensor) -> Tensor:
    """The sum over ranks of the own rows."""
    parts = [rows_of(sums, shard) for shard in rank.cut]
    total = sum(rank.link.exchange(parts, [tuple(like.shape)] * rank.link.ranks))
    return total.to(like.dtype)  # type: ignore[union-attr]
