"""xFormers' memory-efficient attention; which of its operators runs is its own choice.

Signatures: github.com/facebookresearch/xformers, xformers/ops/fmha/__init__.py and attn_bias.py of release
0.0.33: memory_efficient_attention(query, key, value, attn_bias, p, scale, *, op), tensors (batch, rows,
heads, columns), with groups of heads (batch, rows, groups, heads, columns), forward only.
"""

from __future__ import annotations

import importlib
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call
from flashbench.kernels._peer import Peer
from flashbench.problem import ALIGNMENTS, UNLIMITED, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

MASKS = "xformers.ops.fmha.attn_bias"


def make(module: ModuleType, problem: Problem, inputs: Inputs) -> Call:
    """The call of memory_efficient_attention on views of the inputs, its mask made once, here."""
    p = problem
    q, k, v = (x.transpose(1, 2) for x in (inputs.q, inputs.k, inputs.v))
    if p.group > 1:
        grouped = (p.num_kv_heads, p.group)
        q = q.unflatten(2, grouped)
        k, v = (x.unsqueeze(3).expand(*x.shape[:3], p.group, x.shape[3]) for x in (k, v))
    bias = _bias(p, inputs)
    function = module.memory_efficient_attention

    def call() -> Tensor:
        o: Tensor = function(q, k, v, attn_bias=bias, scale=p.softmax_scale)
        return (o.flatten(2, 3) if p.group > 1 else o).transpose(1, 2)

    return call


def _bias(p: Problem, inputs: Inputs) -> Any:
    """The mask in xFormers' words, or the problem's additive bias, whole."""
    if inputs.bias is not None:
        return inputs.bias.expand(p.batch, p.num_heads, p.seqlen_q, p.seqlen_k)
    masks = importlib.import_module(MASKS)
    if p.lengths:
        queries, keys = (list(side) for side in zip(*p.lengths, strict=True))
        packed = masks.BlockDiagonalMask.from_seqlens(queries, keys)
        return packed.make_causal_from_bottomright() if p.causal else packed
    if not p.masked:
        return None
    left, right = p.window[0], 0 if p.causal else p.window[1]
    if left == UNLIMITED and right == 0:
        top_left = p.alignment != ALIGNMENTS[0]
        return masks.LowerTriangularMask() if top_left else masks.LowerTriangularFromBottomRightMask()
    return masks.LocalAttentionFromBottomRightMask(
        window_left=p.seqlen_k if left == UNLIMITED else left,
        window_right=p.seqlen_q + p.seqlen_k if right == UNLIMITED else right,
    )


def _why_unsupported(problem: Problem) -> str | None:
    p = problem
    if p.bias and p.masked:
        return (
            "xformers takes a bias or a causal mask, not both; a sum of the two would be made in every call"
        )
    if p.bias and p.group > 1:
        return "xformers takes no bias with groups of heads"
    local = p.window != (UNLIMITED, UNLIMITED)
    if local and (p.lengths or p.alignment != ALIGNMENTS[0]):
        return "xformers has a window for sequences of one length, aligned at the last key"
    if p.lengths and p.causal and p.alignment != ALIGNMENTS[0]:
        return "xformers' packed causal mask is used aligned at the last key"
    return None


PEER = Peer(
    name="xformers",
    package="xformers",
    module="xformers.ops",
    summary="xFormers' memory_efficient_attention, the operator that it picks",
    make=make,
    takes=frozenset({"bshd", "top-left", "window", "bias", "varlen"}),
    why_unsupported=_why_unsupported,
)
IMPLEMENTATIONS = (PEER.row(),)
