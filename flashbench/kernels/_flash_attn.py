"""flash-attention's interfaces, which name the same options a little differently from version to version."""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call
from flashbench.kernels._peer import heads_first, rows_first
from flashbench.problem import UNLIMITED, Problem

if TYPE_CHECKING:
    from flashbench.kernels._inputs import Inputs

FUNCTION, PACKED = "flash_attn_func", "flash_attn_varlen_func"


def make(unlimited: int | None, module: ModuleType, problem: Problem, inputs: Inputs) -> Call:
    """The call of flash_attn_func, or of a packed batch of flash_attn_varlen_func.

    unlimited: what a side of window_size is that hides nothing. Tensors are (batch, rows, heads, columns),
    views of the inputs: the kernels take any strides with a unit last one.
    """
    p = problem
    q, k, v = rows_first(p, inputs.q, inputs.k, inputs.v)
    options: dict[str, Any] = {"softmax_scale": p.softmax_scale, "causal": p.causal}
    if p.window != (UNLIMITED, UNLIMITED):
        options["window_size"] = tuple(unlimited if side == UNLIMITED else side for side in p.window)
    if p.softcap:
        options["softcap"] = p.softcap
    if inputs.alibi_slopes is not None:
        options["alibi_slopes"] = inputs.alibi_slopes
    if p.deterministic and inputs.q.requires_grad:
        options["deterministic"] = True
    name = FUNCTION
    if p.lengths:
        name = PACKED
        options |= {
            "cu_seqlens_q": inputs.cu_seqlens_q, "cu_seqlens_k": inputs.cu_seqlens_k,
            "max_seqlen_q": p.seqlen_q, "max_seqlen_k": p.seqlen_k,
        }  # fmt: skip
    function = getattr(module, name)
    return lambda: heads_first(p, function(q, k, v, **options))
