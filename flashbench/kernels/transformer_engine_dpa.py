"""Transformer Engine's DotProductAttention; which of its backends runs is its own choice, and in the row.

Signatures: github.com/NVIDIA/TransformerEngine,
transformer_engine/pytorch/attention/dot_product_attention/dot_product_attention.py of 2.20; tensors
(batch, rows, heads, columns) or of a packed batch (rows, heads, columns), o (…, heads * columns).
"""

from __future__ import annotations

import importlib
from contextlib import AbstractContextManager
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call, Implementation, Target
from flashbench.kernels._peer import Peer, copied_bytes, copied_rows, heads_first
from flashbench.problem import ALIGNMENTS, UNLIMITED, Problem

if TYPE_CHECKING:
    from flashbench.kernels._inputs import Inputs

CHOICES = "transformer_engine.pytorch.attention.dot_product_attention"
"""Where its last choice of a backend stands, ``_attention_backends``."""

RAN = "ran"
"""Attribute of the call: what it ran."""


def make(module: ModuleType, problem: Problem, inputs: Inputs) -> Call:
    """The module's call; it takes contiguous tensors, so inputs of another layout are copied, here."""
    p = problem
    q, k, v = copied_rows(p, inputs.q, inputs.k, inputs.v)
    same = p.head_dim == p.head_dim_v
    attention = module.DotProductAttention(
        p.num_heads,
        p.head_dim if same else (p.head_dim, p.head_dim_v),
        num_gqa_groups=p.num_kv_heads,
        attention_dropout=0.0,
        qkv_format="thd" if p.lengths else "bshd",
        attention_type="self" if _square(p) else "cross",
        softmax_scale=p.softmax_scale,
        **_mask(p),
        **({"softcap": p.softcap} if p.softcap else {}),
    )
    attention.train(inputs.q.requires_grad)
    options: dict[str, Any] = {}
    if inputs.alibi_slopes is not None:
        options |= {"core_attention_bias_type": "alibi", "alibi_slopes": inputs.alibi_slopes}
    if p.lengths:
        options |= {
            "cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_kv": inputs.cu_seqlens_k,
            "max_seqlen_q": p.seqlen_q, "max_seqlen_kv": p.seqlen_k,
        }  # fmt: skip
    heads = (p.num_heads, p.head_dim_v)
    return lambda: heads_first(p, attention(q, k, v, **options).unflatten(-1, heads))


def _square(p: Problem) -> bool:
    """Whether every sequence has as many queries as keys, so that both alignments are one."""
    return all(queries == keys for queries, keys in p.lengths or ((p.seqlen_q, p.seqlen_k),))


def _mask(p: Problem) -> dict[str, Any]:
    """attn_mask_type and window_size; a side without a limit beside one that has it reaches over all rows."""
    (left, right), top_left = p.window, p.alignment != ALIGNMENTS[0]
    padding = ["padding"] if p.lengths else []
    if p.causal or right == 0:
        aligned = [] if top_left or _square(p) else ["bottom_right"]
        return {"attn_mask_type": "_".join([*padding, "causal", *aligned]), "window_size": (left, 0)}
    if (left, right) != (UNLIMITED, UNLIMITED):
        far = p.seqlen_q + p.seqlen_k
        left, right = (far if side == UNLIMITED else side for side in (left, right))
    found = {"attn_mask_type": "".join(padding) or "no_mask", "window_size": (left, right)}
    return found | ({"bottom_right_diagonal": False} if "top-left" in p.features else {})


class _TransformerEngine(Peer):
    """A peer that is asked which backend it chose, right after its first call."""

    def prepare(self, problem: Problem, inputs: Inputs) -> Call:
        """As any peer's, with RAN."""
        call = super().prepare(problem, inputs)
        setattr(call, RAN, chosen())
        return call


def chosen() -> str | None:
    """The backend of its last call in its own words; None where this version does not say."""
    try:
        choices = importlib.import_module(CHOICES)._attention_backends
    except (ImportError, AttributeError):
        return None
    if choices.get("use_flash_attention"):
        version = choices.get("flash_attention_backend")
        return "FlashAttention" + ("" if version is None else f" {version}")
    if choices.get("use_fused_attention"):
        kind = choices.get("fused_attention_backend")
        return "FusedAttention" + ("" if kind is None else f" sub-backend {int(kind)}")
    return "UnfusedDotProductAttention" if choices.get("use_unfused_attention") else None


def _why_unsupported(problem: Problem) -> str | None:
    if problem.alibi and problem.lengths:
        return "transformer-engine is asked for ALiBi in sequences of one length"
    return None


def _prepared_bytes(problem: Problem, pass_: str, target: Target) -> int:
    return copied_bytes(problem)


def _context(problem: Problem) -> AbstractContextManager[object]:
    from flashbench.kernels._precision import precision

    return precision(problem)


PEER = _TransformerEngine(
    name="transformer-engine",
    package="transformer-engine",
    module="transformer_engine.pytorch",
    summary="Transformer Engine's DotProductAttention, the backend that it picks",
    make=make,
    function="DotProductAttention",
    takes=frozenset({"bshd", "top-left", "alibi", "varlen"}),
    why_unsupported=_why_unsupported,
    prepared_bytes=_prepared_bytes,
    install="pip install --no-build-isolation transformer-engine[pytorch]",
)


def _row() -> Implementation:
    return replace(PEER.row(), context=_context, backend=lambda call: getattr(call, RAN, None))


IMPLEMENTATIONS = (_row(),)
