"""SageAttention: Q and K rounded to 8 bits within the call, as its authors ship it; forward only.

Signatures: github.com/thu-ml/SageAttention, sageattention/core.py of 1.0.6 and 2.2: sageattn(q, k, v,
tensor_layout, is_causal, sm_scale, …), tensors "HND" (batch, heads, rows, columns); further options are
swallowed, so none is passed. It is no exact attention: ``_sage`` says what it is held to.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from flashbench.kernels import Call, Implementation, Target
from flashbench.kernels._peer import Peer
from flashbench.problem import Problem
from flashbench.record import Accuracy

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs


def make(module: ModuleType, problem: Problem, inputs: Inputs) -> Call:
    """The call of sageattn on views of q and v and a copy of k, whose mean 1.0 subtracts in place."""
    p, function, k = problem, module.sageattn, inputs.k.clone()

    def call() -> Tensor:
        o: Tensor = function(
            inputs.q, k, inputs.v, tensor_layout="HND", is_causal=p.causal, sm_scale=p.softmax_scale
        )
        return o

    return call


def _why_unsupported(problem: Problem) -> str | None:
    p = problem
    if p.causal and p.seqlen_q != p.seqlen_k:
        return "sageattention's causal mask is of queries and keys of one length"
    if p.head_dim != p.head_dim_v:
        return "sageattention's values are as wide as its keys"
    return None


def _prepared_bytes(problem: Problem, pass_: str, target: Target) -> int:
    return problem.num_kv_heads * problem.rows[1] * problem.head_dim * problem.dtype_bytes


def _check(
    problem: Problem, inputs: Inputs, o: Tensor, gradients: Sequence[Tensor] | None = None
) -> Accuracy:
    from flashbench.kernels._sage import check

    return check(problem, inputs, o)


PEER = Peer(
    name="sageattention",
    package="sageattention",
    module="sageattention",
    summary="not exact: SageAttention, Q and K rounded to 8 bits in every call; forward only",
    make=make,
    function="sageattn",
    forward_only=True,
    why_unsupported=_why_unsupported,
    prepared_bytes=_prepared_bytes,
)


def _row() -> Implementation:
    return replace(PEER.row(), own_check=_check)


IMPLEMENTATIONS = (_row(),)
