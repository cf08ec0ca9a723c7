"""What a problem does to scores between the product and the softmax, op by op in torch.

For any query rows, key columns and heads, so that naive, the fp64 oracle and its yardstick share one
definition of softcap, ALiBi, bias, masks, sinks and dropout. Order: Problem's docstring.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flashbench.kernels._inputs import Inputs
from flashbench.kernels._philox import keep_mask
from flashbench.problem import Problem


@dataclass(frozen=True, kw_only=True, eq=False)
class Where:
    """A block of scores (heads, group, rows, columns); a K/V head's number is batch * num_kv_heads + head."""

    heads: Tensor
    rows: Tensor
    columns: Tensor


class Terms:
    """The terms of one dense problem; first_batch: number of its first sequence, for dropout."""

    def __init__(self, problem: Problem, inputs: Inputs, first_batch: int = 0) -> None:
        self.problem = problem
        self._inputs = inputs
        self._first_batch = first_batch

    def visible(self, rows: Tensor, columns: Tensor) -> Tensor | None:
        """Boolean (rows, columns), True where a query sees a key; None where nothing is hidden."""
        p, mask = self.problem, self._inputs.block_mask
        seen = mask.dense(rows, columns) if mask is not None else None
        if p.masked:
            low, high = p.band
            inside = columns[None, :] <= (rows + high)[:, None]
            inside &= columns[None, :] >= (rows + low)[:, None]
            seen = inside if seen is None else seen & inside
        return seen

    def apply(self, scores: Tensor, at: Where) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """(scores with every term, the softcap's derivative or None, (rows,) True without keys or None).

        scores: scale * q.k, (heads, group, rows, columns) in any dtype; overwritten.
        """
        scores, slope = self._capped(scores)
        if self._inputs.alibi_slopes is not None:
            scores += self.alibi(at).to(scores.dtype)
        if self._inputs.bias is not None:
            scores += self._bias(at).to(scores.dtype)
        seen = self.visible(at.rows, at.columns)
        if seen is None:
            return scores, slope, None
        return scores.masked_fill_(~seen, float("-inf")), slope, ~seen.any(1)

    def sinks(self, heads: Tensor, dtype: torch.dtype) -> Tensor | None:
        """The logits of the sinks (heads, group, 1, 1) in the dtype, or None."""
        if self._inputs.sinks is None:
            return None
        return self._per_head(self._inputs.sinks.detach(), heads).to(dtype)

    def kept(self, at: Where) -> Tensor | None:
        """True where dropout keeps a probability, (heads, group, rows, columns), or None without dropout."""
        p = self.problem
        if not p.dropout_p:
            return None
        query_heads = at.heads[:, None] * p.group + torch.arange(p.group, device=at.heads.device)
        numbers = query_heads.flatten() + self._first_batch * p.num_heads
        mask = keep_mask(self._inputs.seed, p.dropout_p, numbers, at.rows, at.columns)
        return mask.unflatten(0, query_heads.shape)

    def drop(self, x: Tensor, kept: Tensor | None) -> Tensor:
        """x where it is kept, over 1 - dropout_p; x itself without dropout."""
        return x if kept is None else x * kept * (1 / (1 - self.problem.dropout_p))

    def _capped(self, scores: Tensor) -> tuple[Tensor, Tensor | None]:
        cap = self.problem.softcap
        if not cap:
            return scores, None
        tanh = scores.div_(cap).tanh_()
        return tanh * cap, 1 - tanh * tanh

    def alibi(self, at: Where) -> Tensor:
        """-slope * |distance from the diagonal|, (heads, group, rows, columns) fp32."""
        distance = (at.rows[:, None] + self.problem.diagonal - at.columns[None, :]).abs()
        slopes = self._inputs.alibi_slopes
        assert slopes is not None
        return -self._per_head(slopes, at.heads) * distance

    def _per_head(self, values: Tensor, heads: Tensor) -> Tensor:
        """(num_heads,) as (heads, group, 1, 1) of the K/V heads of a block."""
        p = self.problem
        return values.view(p.num_kv_heads, p.group)[heads % p.num_kv_heads][:, :, None, None]

    def _bias(self, at: Where) -> Tensor:
        bias, p = self._inputs.bias, self.problem
        assert bias is not None
        full = bias.detach().unflatten(1, (p.num_kv_heads, p.group) if bias.shape[1] > 1 else (1, 1))

        def number(of: Tensor, dim: int) -> Tensor:
            return of if full.shape[dim] > 1 else of.new_zeros(1)

        batch, head = number(at.heads // p.num_kv_heads, 0), number(at.heads % p.num_kv_heads, 1)
        rows, columns = number(at.rows, 3), number(at.columns, 4)
        # a slice between indices comes last: (heads, rows, columns, group)
        found = full[batch[:, None, None], head[:, None, None], :, rows[None, :, None], columns[None, None]]
        return found.permute(0, 3, 1, 2)
