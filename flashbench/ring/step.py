"""The local step of every algorithm, and what an algorithm is: forward and backward of one rank's shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from flashbench._iomodel.shards import Shard, length
from flashbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.ring.link import Link


@dataclass(frozen=True)
class Step:
    """Attention of a block by the bundled kernels, or by torch on a CPU (``kernels/_local.py``)."""

    scale: float

    def forward(self, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> tuple[Tensor, Tensor]:
        """(o, lse) over these keys."""
        from flashbench.kernels import _local

        return _local.forward(q, k, v, causal=causal, scale=self.scale)

    def backward(self, tensors: tuple[Tensor, ...], causal: bool) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) of q, k, v, o, lse, do, the last three over all keys."""
        from flashbench.kernels import _local

        return _local.backward(tensors, causal=causal, scale=self.scale)


@dataclass(frozen=True, kw_only=True)
class Rank:
    """What an algorithm has: the problem, all shards, its end of the link, the local step."""

    problem: Problem
    cut: tuple[Shard, ...]
    link: Link
    step: Step

    @property
    def mine(self) -> Shard:
        """The rows of this rank."""
        return self.cut[self.link.rank]

    def kv_shapes(self, owner: int) -> list[tuple[int, ...]]:
        """Shapes of k and v of a rank's shard."""
        p = self.problem
        head = (p.batch, p.num_kv_heads, length(self.cut[owner]))
        return [(*head, p.head_dim), (*head, p.head_dim_v)]


Forward = tuple["Tensor", Any]
"""o of the own rows, and what the backward needs."""


class Algorithm(Protocol):
    """A module with the two passes; q, k, v, o and gradients are of the own rows, in the shard's order."""

    def forward(self, rank: Rank, q: Tensor, k: Tensor, v: Tensor) -> Forward:
        """(o in q's dtype, what is kept)."""

    def backward(self, rank: Rank, saved: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(dq, dk, dv) in q's dtype."""


def rows_of(x: Tensor, shard: Shard) -> Tensor:
    """The rows of a shard out of a whole sequence, (batch, heads, rows, …)."""
    import torch

    return torch.cat([x[:, :, start:stop] for start, stop in shard], dim=2)


def whole(parts: Sequence[Tensor], cut: Sequence[Shard]) -> Tensor:
    """The sequence of which each part has the rows of its shard, perhaps more at its end."""
    rows = sum(map(length, cut))
    out = parts[0].new_empty(*parts[0].shape[:2], rows, *parts[0].shape[3:])
    for part, shard in zip(parts, cut, strict=True):
        at = 0
        for start, stop in shard:
            out[:, :, start:stop] = part[:, :, at : at + stop - start]
            at += stop - start
    return out


def padded(x: Tensor, rows: int) -> Tensor:
    """With zeros after its rows, so that there are so many."""
    import torch

    more = rows - x.shape[2]
    return x if not more else torch.cat([x, x.new_zeros(*x.shape[:2], more, *x.shape[3:])], dim=2)
