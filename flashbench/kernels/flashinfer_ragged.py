"""FlashInfer's prefill over ragged tensors: planned once, before anything is timed; no backward.

Signatures: github.com/flashinfer-ai/flashinfer, flashinfer/prefill.py, August 2026:
BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD"), its plan(…) and run(q, k, v) on (rows, heads,
columns) of all sequences one after the other.
"""

from __future__ import annotations

from types import ModuleType
from typing import TYPE_CHECKING

from flashbench.kernels import Call, Target
from flashbench.kernels._peer import Peer, copied_bytes
from flashbench.problem import UNLIMITED, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

WORKSPACE_BYTES = 128 * 2**20
"""As FlashInfer recommends."""


def make(module: ModuleType, problem: Problem, inputs: Inputs) -> Call:
    """run(q, k, v) of a wrapper that was planned; inputs of another layout are copied, here."""
    import torch

    p = problem
    device = inputs.q.device
    packed = inputs.cu_seqlens_q is not None

    def rows(x: Tensor) -> Tensor:
        return x.transpose(1, 2).flatten(0, 1).contiguous()

    def starts(rows: int) -> Tensor:
        return torch.arange(p.batch + 1, dtype=torch.int32, device=device) * rows

    workspace = torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)
    wrapper = module.BatchPrefillWithRaggedKVCacheWrapper(workspace, "NHD")
    q, k, v = (rows(x) for x in (inputs.q, inputs.k, inputs.v))
    wrapper.plan(
        inputs.cu_seqlens_q if packed else starts(p.seqlen_q),
        inputs.cu_seqlens_k if packed else starts(p.seqlen_k),
        p.num_heads,
        p.num_kv_heads,
        p.head_dim,
        head_dim_vo=p.head_dim_v,
        causal=p.causal or p.window[1] == 0,
        window_left=p.window[0],
        logits_soft_cap=p.softcap or None,
        sm_scale=p.softmax_scale,
        q_data_type=q.dtype,
    )
    shape = (1, -1) if packed else (p.batch, p.seqlen_q)
    return lambda: wrapper.run(q, k, v).unflatten(0, shape).transpose(1, 2)


def _why_unsupported(problem: Problem) -> str | None:
    p = problem
    if not p.causal and p.window[1] not in (0, UNLIMITED):
        return "flashinfer has a window to the left alone"
    return None


def _prepared_bytes(problem: Problem, pass_: str, target: Target) -> int:
    return WORKSPACE_BYTES + copied_bytes(problem)


PEER = Peer(
    name="flashinfer",
    package="flashinfer-python",
    module="flashinfer",
    summary="FlashInfer's ragged prefill, the backend that it picks; forward only",
    make=make,
    takes=frozenset({"bshd", "window", "softcap", "varlen"}),
    forward_only=True,
    why_unsupported=_why_unsupported,
    prepared_bytes=_prepared_bytes,
)
IMPLEMENTATIONS = (PEER.row(),)
