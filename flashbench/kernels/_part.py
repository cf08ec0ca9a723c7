"""One dense problem as the oracle walks over it: slices of heads and rows that fit a bounded workspace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cached_property

import torch
from torch import Tensor

from flashbench.kernels._inputs import Inputs
from flashbench.kernels._terms import Terms, Where
from flashbench.problem import Problem

SAMPLED_ROWS = 96
"""Query rows, and key rows, compared in a larger problem: ends, tile edges, then random ones."""

WORKSPACE_BYTES = {"cpu": 2**26, "cuda": 2**29}
"""Size of the largest scratch tensor; in all, about three of them are alive."""

BATCHED_BYTES = {"cpu": 2**23, "cuda": 2**28}
"""K/V heads go together up to this scratch tensor: few launches on a GPU, warm caches on a CPU."""

Slices = Callable[[slice, Tensor], dict[str, Tensor]]
"""compute(K/V heads, query rows) → tensors by name, (heads, group, rows, …)."""


class Part:
    """The tensors of one dense problem, with one leading index per K/V head, and what is compared.

    q, dout: (batch * num_kv_heads, group, seqlen_q, width); k, v: (batch * num_kv_heads, seqlen_k,
    width). query_rows, key_rows: the compared ones, ascending.
    """

    def __init__(
        self, problem: Problem, inputs: Inputs, *, seed: int, all_rows: bool, first_batch: int = 0
    ) -> None:
        p, device = problem, inputs.q.device
        self.problem = p
        self.terms = Terms(p, inputs, first_batch)
        self.q = inputs.q.detach().reshape(p.batch * p.num_kv_heads, p.group, p.seqlen_q, p.head_dim)
        self.k = inputs.k.detach().reshape(p.batch * p.num_kv_heads, p.seqlen_k, p.head_dim)
        self.v = inputs.v.detach().reshape(p.batch * p.num_kv_heads, p.seqlen_k, p.head_dim_v)
        self.dout = inputs.dout.detach().reshape(p.batch * p.num_kv_heads, p.group, p.seqlen_q, p.head_dim_v)
        rows_q = range(p.seqlen_q) if all_rows else sample_rows(p.seqlen_q, seed)
        rows_k = range(p.seqlen_k) if all_rows else sample_rows(p.seqlen_k, seed + 1)
        self.query_rows = torch.tensor(list(rows_q), dtype=torch.int64, device=device)
        self.key_rows = torch.tensor(list(rows_k), dtype=torch.int64, device=device)
        self.compared_keys = list(rows_k)
        # terms make copies of the scores: masks, distances, random words
        share = 8 * (4 if p.features - {"bshd", "deterministic", "window", "top-left"} else 1)
        self.elements = WORKSPACE_BYTES[device.type] // share
        self._batched = min(WORKSPACE_BYTES[device.type], BATCHED_BYTES[device.type]) // share

    def where(self, heads: slice, rows: Tensor, columns: Tensor) -> Where:
        """That block of scores."""
        return Where(heads=self._heads[heads], rows=rows, columns=columns)

    @cached_property
    def _heads(self) -> Tensor:
        return torch.arange(len(self.k), device=self.k.device)

    @cached_property
    def columns(self) -> Tensor:
        """Every key's number."""
        return torch.arange(self.problem.seqlen_k, device=self.k.device)

    @cached_property
    def rows(self) -> Tensor:
        """Every query's number."""
        return torch.arange(self.problem.seqlen_q, device=self.k.device)

    def of_bias(self, ds: Tensor) -> Tensor:
        """Of dS (heads, group, rows, seqlen_k) the compared keys, or the sum where the bias has one key."""
        if self.problem.bias[3] == "k":
            return ds.index_select(3, self.key_rows)
        return ds.sum(3, keepdim=True)

    def in_slices(self, compute: Slices) -> dict[str, Tensor]:
        """Run over slices of K/V heads and compared query rows whose scores fit the workspace; join."""
        per_row = self.problem.group * self.problem.seqlen_k
        parts = self.query_rows.split(max(1, self.elements // max(1, per_row)))
        by_heads = [
            joined([compute(heads, rows) for rows in parts], dim=2)
            for heads in self.head_slices(per_row * len(parts[0]))
        ]
        return joined(by_heads, dim=0)

    def head_slices(self, elements: int) -> list[slice]:
        """Some K/V heads at a time, at least one; elements: the scratch tensor of one."""
        count, step = len(self.k), max(1, self._batched // max(1, elements))
        return [slice(start, min(start + step, count)) for start in range(0, count, step)]

    def chunks(self, heads: int) -> Iterator[tuple[slice, slice]]:
        """Query rows whose scores fit the workspace, and the keys that the band shows to any of them."""
        p = self.problem
        step = max(1, self.elements // max(1, heads * p.group * p.seqlen_k))
        low, high = p.band
        for start in range(0, p.seqlen_q, step):
            end = min(start + step, p.seqlen_q)
            first, last = max(0, start + low), min(p.seqlen_k, end + high)
            if first < last:
                yield slice(start, end), slice(first, last)


def joined(parts: list[dict[str, Tensor]], dim: int) -> dict[str, Tensor]:
    """Tensors by name, joined along a dimension."""
    return {name: torch.cat([part[name] for part in parts], dim=dim) for name in parts[0]}


def per_head(x: Tensor, y: Tensor, product: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> Tensor:
    """x (heads, group, rows, n) times y (heads, n, m): one product for each head, y not copied."""
    return product(x.flatten(1, 2), y).unflatten(1, x.shape[1:3])


def sample_rows(rows: int, seed: int) -> list[int]:
    """SAMPLED_ROWS row numbers below rows, ascending: both ends, tile edges, random ones."""
    if not rows:
        return []
    edges = [edge + step for edge in (64, 128, 192, 256) for step in (-1, 0)]
    middle = rows // 2 // 128 * 128
    wanted = [0, 1, 2, rows - 1, rows - 2, *edges, *(rows - 1 - edge for edge in edges), middle - 1, middle]
    chosen = dict.fromkeys(row for row in wanted if 0 <= row < rows)
    generator = torch.Generator().manual_seed(seed)
    for row in torch.randint(0, rows, (4 * SAMPLED_ROWS,), generator=generator).tolist():
        if len(chosen) >= min(SAMPLED_ROWS, rows):
            break
        chosen[row] = None
    return sorted(chosen)
