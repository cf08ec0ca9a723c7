"""torch's own context parallel as the peer: SDPA inside ``context_parallel``, zigzag shards like ours.

It is a prototype of torch's: what it refuses, it refuses in its own words. Its traffic is not counted.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from flashbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.ring.step import Forward, Rank

NAME = "torch-cp"


def why_unsupported(problem: Problem, ranks: int, device_type: str) -> str | None:
    """Why it does not run, one sentence, or None."""
    if device_type == "cpu":
        return "torch's context parallel has rings for the GPU's attention only"
    if problem.seqlen_q % (2 * ranks):
        return f"{problem.seqlen_q} rows are not divisible by twice {ranks} ranks"
    return None


def entered(problem: Problem, ranks: int, device: str) -> AbstractContextManager[None]:
    """In which SDPA takes and returns shards. It wants a buffer to shard; ours are sharded already."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.experimental import context_parallel

    mesh = init_device_mesh(torch.device(device).type, (ranks,))
    buffer = torch.zeros(1, problem.seqlen_q, device=device)
    found: AbstractContextManager[None] = context_parallel(mesh, buffers=[buffer], buffer_seq_dims=[1])
    return found


def forward(rank: Rank, q: Tensor, k: Tensor, v: Tensor) -> Forward:
    """As ``step.Algorithm``, inside ``entered``; keeps the graph if gradients are on."""
    import torch
    from torch.nn import functional

    leaves = [x.detach().requires_grad_(torch.is_grad_enabled()) for x in (q, k, v)]
    p = rank.problem
    gqa = {"enable_gqa": True} if p.group > 1 else {}
    o = functional.scaled_dot_product_attention(*leaves, is_causal=p.causal, **gqa)
    return o.detach(), (leaves, o)


def backward(rank: Rank, saved: Any, do: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As ``step.Algorithm``."""
    import torch

    leaves, o = saved
    dq, dk, dv = torch.autograd.grad(o, leaves, do, retain_graph=True)
    return dq, dk, dv
