"""Small problems and a plain fp64 attention that tests measure everything else against."""

from __future__ import annotations

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


def exact(p: Problem, inputs: Inputs) -> tuple[Tensor, ...]:
    """o, dq, dk, dv in fp64 from an explicit loop over query rows and autograd."""
    q, k, v = (tensor.detach().double().requires_grad_() for tensor in inputs.leaves)
    heads = [k[:, h // p.group] for h in range(p.num_heads)], [v[:, h // p.group] for h in range(p.num_heads)]
    all_k, all_v = (torch.stack(per_head, dim=1) for per_head in heads)
    rows = []
    for i in range(p.seqlen_q):
        seen = min(p.seqlen_k, i + 1 + p.seqlen_k - p.seqlen_q) if p.causal else p.seqlen_k
        if seen <= 0:
            rows.append(q.new_zeros(p.batch, p.num_heads, p.head_dim_v))
            continue
        scores = torch.einsum("bhd,bhjd->bhj", q[:, :, i], all_k[:, :, :seen]) / p.head_dim**0.5
        rows.append(torch.einsum("bhj,bhjd->bhd", scores.softmax(-1), all_v[:, :, :seen]))
    o = torch.stack(rows, dim=2)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), inputs.dout.double())


def run(row: Implementation, p: Problem, inputs: Inputs) -> tuple[Tensor, ...]:
    """o and the gradients of an implementation, on fresh leaves."""
    inputs = inputs.detached(grad=True)
    with row.context(p):
        o = row.prepare(p, inputs)()
        return o.detach(), *torch.autograd.grad(o, inputs.leaves, inputs.dout)
