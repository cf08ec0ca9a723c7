"""Small problems and a plain fp64 attention that tests measure everything else against."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashbench.kernels import Implementation
from flashbench.kernels._inputs import Inputs
from flashbench.problem import Problem

SHAPES: dict[str, dict[str, Any]] = {
    "square": {},
    "one row": {"seqlen_q": 1, "seqlen_k": 1},
    "ragged": {"seqlen_q": 37, "seqlen_k": 37, "head_dim": 40, "head_dim_v": 40},
    "gqa": {"num_kv_heads": 2},
    "mqa": {"num_kv_heads": 1},
    "fewer queries": {"seqlen_q": 5, "seqlen_k": 19},
    "more queries": {"seqlen_q": 19, "seqlen_k": 5, "num_kv_heads": 2},
    "narrow values": {"head_dim_v": 4},
    "wide values": {"head_dim_v": 24},
}
"""What differs from the default of ``problem``, by name."""


def problem(**changes: Any) -> Problem:
    """A small problem: batch 2, 4 heads, 16 x 16, head dim 8, fp32, causal, with changes."""
    values: dict[str, Any] = {
        "batch": 2, "num_heads": 4, "num_kv_heads": 4, "seqlen_q": 16, "seqlen_k": 16,
        "head_dim": 8, "head_dim_v": 8, "dtype": "fp32", "causal": True,
    }  # fmt: skip
    return Problem(**{**values, **changes})


FEATURES: dict[str, dict[str, Any]] = {
    "window": {"window": (3, 2)},
    "top-left": {"alignment": "top-left", "window": (2, 0)},
    "softcap": {"softcap": 1.5},
    "alibi": {"alibi": True},
    "bias": {"bias": "bhqk"},
    "sinks": {"sinks": True},
    "dropout": {"dropout_p": 0.3},
    "block-mask": {"block_mask": "document"},
    "varlen": {"batch": 5, "lengths": ((5, 9), (0, 3), (16, 16), (4, 0), (1, 3))},
    "bshd": {"layout": "bshd"},
    "deterministic": {"deterministic": True},
}
"""What turns each feature of an implementation on, by name."""


def featured(*names: str, **changes: Any) -> Problem:
    """A small problem with those features. Raises SpecError for a pair that excludes each other."""
    return problem(**{key: value for name in names for key, value in FEATURES[name].items()}, **changes)


def exact(p: Problem, inputs: Inputs) -> tuple[Tensor, ...]:
    """o and the gradients in fp64 from an explicit loop over query rows and autograd."""
    leaves = {name: x.detach().double().requires_grad_() for name, x in inputs.differentiable().items()}
    o, _ = _packed_loop(p, replace(inputs, **leaves))
    return o.detach(), *torch.autograd.grad(o, tuple(leaves.values()), inputs.dout.double())


def exact_lse(p: Problem, inputs: Inputs) -> Tensor:
    """The natural-log log-sum-exp of every row in fp64, from the same loop."""
    doubled = {name: x.detach().double() for name, x in inputs.differentiable().items()}
    return _packed_loop(p, replace(inputs, **doubled))[1]


def _packed_loop(p: Problem, inputs: Inputs) -> tuple[Tensor, Tensor]:
    if not p.lengths:
        return _loop(p, inputs, 0)
    found, row, key = [], 0, 0
    for number, (queries, keys) in enumerate(p.lengths):
        alone = replace(p, batch=1, seqlen_q=queries, seqlen_k=keys, lengths=())
        q = inputs.q[:, :, row : row + queries]
        k, v = inputs.k[:, :, key : key + keys], inputs.v[:, :, key : key + keys]
        if queries:
            found.append(_loop(alone, replace(inputs, q=q, k=k, v=v), number))
        row, key = row + queries, key + keys
    return torch.cat([o for o, _ in found], 2), torch.cat([lse for _, lse in found], 2)


def _loop(p: Problem, inputs: Inputs, first_batch: int) -> tuple[Tensor, Tensor]:
    rows = [_row(p, inputs, i, first_batch) for i in range(p.seqlen_q)]
    return torch.stack([o for o, _ in rows], 2), torch.stack([lse for _, lse in rows], 2)


def _row(p: Problem, inputs: Inputs, i: int, first_batch: int) -> tuple[Tensor, Tensor]:
    """(o, lse) of one query row of every head, by the definitions in Problem's docstring."""
    at = i + (p.seqlen_k - p.seqlen_q if p.alignment == "bottom-right" else 0)
    first = max(0, at - p.window[0]) if p.window[0] >= 0 else 0
    end = min(p.seqlen_k, at + 1 + p.window[1]) if p.window[1] >= 0 else p.seqlen_k
    seen = list(range(first, min(end, at + 1) if p.causal else end))
    if inputs.block_mask is not None:
        row = inputs.block_mask.dense(torch.tensor([i]))[0]
        seen = [j for j in seen if row[j]]
    heads = [h // p.group for h in range(p.num_heads)]
    k, v = inputs.k[:, heads][:, :, seen], inputs.v[:, heads][:, :, seen]
    s = torch.einsum("bhd,bhjd->bhj", inputs.q[:, :, i], k) / p.head_dim**0.5
    if p.softcap:
        s = p.softcap * torch.tanh(s / p.softcap)
    if inputs.alibi_slopes is not None:
        s = s - inputs.alibi_slopes.double()[:, None] * torch.tensor([abs(at - j) for j in seen])
    if inputs.bias is not None:
        s = s + inputs.bias.expand(p.batch, p.num_heads, p.seqlen_q, p.seqlen_k)[:, :, i, seen]
    logits = s
    if inputs.sinks is not None:
        logits = torch.cat((s, inputs.sinks[None, :, None].expand(p.batch, -1, 1)), -1)
    if not logits.shape[-1]:
        return v.sum(2), s.new_full(s.shape[:2], float("-inf"))
    lse = logits.logsumexp(-1)
    weights = (s - lse[..., None]).exp()
    if p.dropout_p:
        weights = weights * _kept(p, inputs.seed, i, seen, first_batch) / (1 - p.dropout_p)
    return torch.einsum("bhj,bhjd->bhd", weights, v), lse


def _kept(p: Problem, seed: int, i: int, seen: list[int], first_batch: int) -> Tensor:
    """Which probabilities of a row dropout keeps: (batch, num_heads, seen)."""
    numbers = range(first_batch * p.num_heads, (first_batch + p.batch) * p.num_heads)
    words = [[_philox(seed, (j, i, number)) for j in seen] for number in numbers]
    return (torch.tensor(words) >= round(p.dropout_p * 2**32)).view(p.batch, p.num_heads, -1)


def _philox(seed: int, counter: tuple[int, int, int]) -> int:
    """The first word of Philox4x32-10, in whole numbers."""
    c0, c1, c2, c3 = *counter, 0
    k0, k1 = seed % 2**32, seed >> 32
    for _ in range(10):
        one, two = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = two >> 32 ^ c1 ^ k0, two % 2**32, one >> 32 ^ c3 ^ k1, one % 2**32
        k0, k1 = (k0 + 0x9E3779B9) % 2**32, (k1 + 0xBB67AE85) % 2**32
    return c0


def run(row: Implementation, p: Problem, inputs: Inputs) -> tuple[Tensor, ...]:
    """o and the gradients of an implementation, on fresh leaves."""
    inputs = inputs.detached(grad=True)
    with row.context(p):
        o = row.prepare(p, inputs)()
        return o.detach(), *torch.autograd.grad(o, inputs.leaves, inputs.dout)
