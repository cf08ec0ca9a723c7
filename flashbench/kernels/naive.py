"""Attention as the textbook writes it: S = QK^T and P = softmax(S) stand whole in memory."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import TYPE_CHECKING

from flashbench.kernels import Call, Implementation, Target, unsupported_features
from flashbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs


TAKEN = {"bshd"}
"""Features (``unsupported_features``) that it takes."""


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """The call that computes softmax(QK^T * softmax_scale)V op by op in the tensors' dtype.

    q (batch, num_heads, seqlen_q, head_dim), k and v (batch, num_kv_heads, seqlen_k, head_dim or
    head_dim_v); returns (batch, num_heads, seqlen_q, head_dim_v) in q's dtype. At its peak S and P
    are allocated; of the two, autograd keeps P. Causal is bottom-right aligned; rows without keys
    return 0 and take no gradient.
    """
    import torch

    q, k, v = inputs.q, inputs.k, inputs.v
    group, scale, without_keys = problem.group, problem.softmax_scale, problem.rows_without_keys
    rows = q[:, :, without_keys:]
    hidden = None
    if problem.causal:
        visible_ahead = problem.seqlen_k - problem.seqlen_q + without_keys
        # one mask, (seqlen_q, seqlen_k) bytes, for every batch and head
        hidden = torch.ones(rows.shape[2], problem.seqlen_k, dtype=torch.bool, device=q.device)
        hidden.triu_(visible_ahead + 1)

    def call() -> Tensor:
        all_k, all_v = k, v
        if group > 1:
            all_k, all_v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = (rows * scale) @ all_k.transpose(-2, -1)  # (batch, num_heads, seqlen_q, seqlen_k)
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        probabilities = scores.softmax(dim=-1)
        del scores
        o = probabilities @ all_v
        if without_keys:
            o = torch.cat((o.new_zeros(*o.shape[:2], without_keys, o.shape[3]), o), dim=2)
        return o

    return call


def _why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
    if reason := unsupported_features(problem, TAKEN):
        return reason
    if problem.dtype == "tf32" and target.type != "cuda":
        return "TF32 products exist on NVIDIA GPUs only; fp32 runs here"
    return None


def _context(problem: Problem) -> AbstractContextManager[object]:
    from flashbench.kernels._precision import precision

    return precision(problem)


def _mask_bytes(problem: Problem, pass_: str, target: Target) -> int:
    return (problem.seqlen_q - problem.rows_without_keys) * problem.seqlen_k if problem.causal else 0


IMPLEMENTATIONS = (
    Implementation(
        name="naive",
        summary="softmax(QK^T)V op by op, S and P in memory",
        prepare=prepare,
        io_model="standard",
        why_unsupported=_why_unsupported,
        context=_context,
        prepared_bytes=_mask_bytes,
    ),
)
