"""flash-linear-attention's chunked linear attention, with the feature map of ``linear-attention``, elu + 1.

Signatures: github.com/fla-org/flash-linear-attention, fla/ops/linear_attn/chunk.py of 0.2 to 0.6:
chunk_linear_attn(q, k, v, scale, initial_state, output_final_state, normalize, …) returns (o, state), tensors
(batch, rows, heads, columns) and causal; until 0.3 with head_first. It is no exact attention and held to its
own form; the feature map is no part of the package's operator and is computed in every call.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call, Implementation, Target
from flashbench.kernels._peer import Peer, copied_bytes, copied_rows, heads_first
from flashbench.problem import Problem
from flashbench.record import Accuracy

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs


def make(module: ModuleType, problem: Problem, inputs: Inputs) -> Call:
    """The call of chunk_linear_attn on rows before heads; inputs of another layout are copied, here."""
    from flashbench.kernels._alternatives import feature

    q, k, v = copied_rows(problem, inputs.q, inputs.k, inputs.v)
    function = module.chunk_linear_attn
    options: dict[str, Any] = {"scale": problem.softmax_scale, "normalize": True}
    if "head_first" in inspect.signature(function).parameters:
        options["head_first"] = False
    return lambda: heads_first(problem, function(feature(q), feature(k), v, **options))


def _why_unsupported(problem: Problem) -> str | None:
    p = problem
    if not p.causal:
        return "flash-linear-attention sees earlier positions only: causal"
    if p.seqlen_q != p.seqlen_k:
        return "flash-linear-attention mixes one sequence: seqlen_q is seqlen_k"
    if p.group > 1:
        return "flash-linear-attention's operator has as many K/V heads as query heads"
    if p.dtype_bytes > 2:
        return "flash-linear-attention is measured in fp16 and bf16: it multiplies fp32 in TF32"
    return None


def _check(
    problem: Problem, inputs: Inputs, o: Tensor, gradients: Sequence[Tensor] | None = None
) -> Accuracy:
    from flashbench.kernels._linear import check

    return check(problem, inputs, o, gradients)


def _prepared_bytes(problem: Problem, pass_: str, target: Target) -> int:
    return copied_bytes(problem)


PEER = Peer(
    name="fla-linear",
    package="flash-linear-attention",
    module="fla.ops.linear_attn",
    summary="not exact: flash-linear-attention's chunk_linear_attn of elu(x) + 1, normalised; causal",
    make=make,
    function="chunk_linear_attn",
    why_unsupported=_why_unsupported,
    prepared_bytes=_prepared_bytes,
)


def _row() -> Implementation:
    return replace(PEER.row(), io_model="linear-attention", own_check=_check)


IMPLEMENTATIONS = (_row(),)
