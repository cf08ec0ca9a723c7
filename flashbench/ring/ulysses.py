"""DeepSpeed-Ulysses: all rows of a few heads instead of a few rows of all heads.

One all-to-all turns shards of the sequence into shards of the heads, attention runs over whole sequences as
on one card, another turns o back; the backward does the same with do, dq, dk and dv. The query heads must be
divisible by the ranks; where there are more ranks than K/V heads, ranks that share one get a copy each, and
its gradients are added up where its rows live. Source: Jacobs et al. 2023, arXiv:2309.14509.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashbench._iomodel.across import kv_heads
from flashbench._iomodel.shards import length

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.ring.step import Forward, Rank


def forward(rank: Rank, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """As ``step.Algorithm``; keeps q, k, v, o and lse of all rows of the own heads."""
    own, shared = _query_heads(rank), _kv_heads(rank)
    all_q = _to_heads(rank, q, own)
    all_k, all_v = (_to_heads(rank, x, shared) for x in (k, v))
    all_o, lse = rank.step.forward(all_q, all_k, all_v, rank.problem.causal)
    return _to_rows(rank, all_o, own), (all_q, all_k, all_v, all_o, lse)


def backward(rank: Rank, saved: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``step.Algorithm``."""
    own, shared = _query_heads(rank), _kv_heads(rank)
    all_do = _to_heads(rank, do, own)
    dq, dk, dv = rank.step.backward((*saved, all_do), rank.problem.causal)
    return _to_rows(rank, dq, own), _to_rows(rank, dk, shared), _to_rows(rank, dv, shared)


def _query_heads(rank: Rank) -> list[range]:
    count = rank.problem.num_heads // rank.link.ranks
    return [range(other * count, (other + 1) * count) for other in range(rank.link.ranks)]


def _kv_heads(rank: Rank) -> list[range]:
    return [kv_heads(rank.problem, rank.link.ranks, other) for other in range(rank.link.ranks)]


def _to_heads(rank: Rank, x: Tensor, heads: Sequence[range]) -> Tensor:
    """(batch, all heads, own rows, d) → (batch, own heads, all rows, d)."""
    import torch

    parts = [x[:, own.start : own.stop] for own in heads]
    mine = len(heads[rank.link.rank])
    shapes = [(x.shape[0], mine, length(shard), x.shape[3]) for shard in rank.cut]
    return torch.cat(rank.link.exchange(parts, shapes), dim=2)


def _to_rows(rank: Rank, x: Tensor, heads: Sequence[range]) -> Tensor:
    """(batch, own heads, all rows, d) → (batch, all heads, own rows, d), heads that ranks share added up."""
    import torch

    parts = [x[:, :, start:stop] for ((start, stop),) in rank.cut]
    rows = length(rank.mine)
    shapes = [(x.shape[0], len(own), rows, x.shape[3]) for own in heads]
    found = rank.link.exchange(parts, shapes)
    if sum(map(len, heads)) == heads[-1].stop:
        return torch.cat(found, dim=1)
    total = x.new_zeros((x.shape[0], heads[-1].stop, rows, x.shape[3]), dtype=torch.float32)
    for own, part in zip(heads, found, strict=True):
        total[:, own.start : own.stop] += part
    return total.to(x.dtype)
