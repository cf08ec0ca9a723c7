"""Attention as the textbook writes it: S = QK^T and P = softmax(S) stand whole in memory."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import TYPE_CHECKING

from flashbench.kernels import Call, Implementation, Target, unsupported_features
from flashbench.problem import FEATURES, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs
    from flashbench.kernels._terms import Terms, Where

TAKEN = set(FEATURES.values())
"""Features (``unsupported_features``) that it takes: all but fp8."""


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """The call that computes softmax(QK^T * softmax_scale)V op by op in the tensors' dtype.

    Inputs as from ``make_inputs``; returns o (batch, num_heads, seqlen_q, head_dim_v) in q's dtype, or
    of a packed batch (1, num_heads, total_q, head_dim_v), computed sequence by sequence. At its peak S
    and P are allocated; of the two, autograd keeps P. Masks, ALiBi's distances and the dropout mask
    are made once, here. Rows without keys return 0 and take no gradient.
    """
    if not problem.lengths:
        return _dense(problem, inputs, 0)
    import torch

    calls, row, key = [], 0, 0
    for number, (queries, keys) in enumerate(problem.lengths):
        alone = replace(problem, batch=1, seqlen_q=queries, seqlen_k=keys, lengths=())
        q = inputs.q[:, :, row : row + queries]
        k, v = inputs.k[:, :, key : key + keys], inputs.v[:, :, key : key + keys]
        calls.append(_dense(alone, replace(inputs, q=q, k=k, v=v), number))
        row, key = row + queries, key + keys
    return lambda: torch.cat([call() for call in calls], dim=2)


def _dense(problem: Problem, inputs: Inputs, first_batch: int) -> Call:
    """The call of sequences of one length; first_batch: number of the first, for dropout."""
    import torch

    q, k, v = inputs.q, inputs.k, inputs.v
    group, scale, without_keys = problem.group, problem.softmax_scale, _rows_left_out(problem)
    rows = q[:, :, without_keys:]
    softmax = _softmax(problem, inputs, first_batch)

    def call() -> Tensor:
        all_k, all_v = k, v
        if group > 1:
            all_k, all_v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = (rows * scale) @ all_k.transpose(-2, -1)  # (batch, num_heads, seqlen_q, seqlen_k)
        probabilities = softmax(scores)
        del scores
        o = probabilities @ all_v
        if without_keys:
            o = torch.cat((o.new_zeros(*o.shape[:2], without_keys, o.shape[3]), o), dim=2)
        return o

    return call


def _softmax(problem: Problem, inputs: Inputs, first_batch: int) -> Callable[[Tensor], Tensor]:
    """What makes probabilities of scores, with every term in Problem's order."""
    import torch

    from flashbench.kernels._terms import Terms, Where

    p, terms, device = problem, Terms(problem, inputs, first_batch), inputs.q.device
    at = Where(
        heads=torch.arange(p.batch * p.num_kv_heads, device=device),
        rows=torch.arange(_rows_left_out(p), p.seqlen_q, device=device),
        columns=torch.arange(p.seqlen_k, device=device),
    )
    seen = terms.visible(at.rows, at.columns)
    # one mask, (seqlen_q, seqlen_k) bytes, for every batch and head
    hidden = None if seen is None else ~seen
    empty = None if hidden is None or not hidden.all(1).any() else hidden.all(1)[:, None]
    del seen
    alibi = None if inputs.alibi_slopes is None else _distances(p, terms, at).to(inputs.q.dtype)
    kept = _kept(p, terms, at)
    bias, sinks, cap = inputs.bias, inputs.sinks, p.softcap

    def softmax(scores: Tensor) -> Tensor:
        if cap:
            scores = (scores / cap).tanh() * cap
        if alibi is not None:
            scores = scores + alibi
        if bias is not None:
            scores = scores + bias
        if hidden is not None:
            scores.masked_fill_(hidden, float("-inf"))
        if sinks is not None:
            column = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
            scores = torch.cat((scores, column), dim=-1)
        probabilities = scores.softmax(dim=-1)
        if sinks is not None:
            probabilities = probabilities[..., :-1]
        elif empty is not None:
            probabilities = probabilities.masked_fill(empty, 0)
        return terms.drop(probabilities, kept)

    return softmax


def _kept(problem: Problem, terms: Terms, at: Where) -> Tensor | None:
    """Dropout's mask, (batch, num_heads, rows, columns) of a byte each, or None."""
    import torch

    if not problem.dropout_p:
        return None
    # the random words are of 8 bytes, so a K/V head at a time
    parts = [terms.kept(replace(at, heads=one)) for one in at.heads.split(1)]
    found = torch.cat([part for part in parts if part is not None])
    return found.flatten(0, 1).unflatten(0, (problem.batch, problem.num_heads))


def _distances(problem: Problem, terms: Terms, at: Where) -> Tensor:
    """ALiBi's term, (num_heads, rows, columns), the same for every sequence."""
    first = replace(at, heads=at.heads[: problem.num_kv_heads])
    return terms.alibi(first).flatten(0, 1)


def _rows_left_out(problem: Problem) -> int:
    """First rows that a plain causal mask leaves without keys: they are not computed at all."""
    plain = problem.features <= {"bshd", "deterministic"}
    return problem.rows_without_keys if plain else 0


def _why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
    if reason := unsupported_features(problem, TAKEN):
        return reason
    if problem.dtype == "tf32" and target.type != "cuda":
        return "TF32 products exist on NVIDIA GPUs only; fp32 runs here"
    return None


def _context(problem: Problem) -> AbstractContextManager[object]:
    from flashbench.kernels._precision import precision

    return precision(problem)


def _prepared_bytes(problem: Problem, pass_: str, target: Target) -> int:
    """Masks of a byte per score of one head, ALiBi's term of one sequence, dropout's mask of all."""
    p, total = problem, 0
    for part in p.parts():
        pairs = (part.seqlen_q - _rows_left_out(part)) * part.seqlen_k
        masked, count = part.masked or bool(p.block_mask), part.batch if p.lengths else 1
        total += pairs * count * (masked + p.alibi * p.num_heads * p.dtype_bytes)
        total += pairs * part.batch * p.num_heads * bool(p.dropout_p)
    return total


IMPLEMENTATIONS = (
    Implementation(
        name="naive",
        summary="softmax(QK^T)V op by op, S and P in memory",
        prepare=prepare,
        io_model="standard",
        why_unsupported=_why_unsupported,
        context=_context,
        prepared_bytes=_prepared_bytes,
    ),
)
