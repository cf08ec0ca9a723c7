"""What flash-v3 is as an implementation: refusals, configuration, the timed call; flash runs it, too."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashbench import hopper_configs
from flashbench.kernels import Call, Target, _triton, unsupported_features
from flashbench.kernels._kernels_of import Kernels, why_unfit
from flashbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

TAKEN = {"bshd", "deterministic"}
"""Features (``unsupported_features``) that the kernel takes."""

IO_MODEL = "flash-v3-gluon"
"""Of iomodel.MODELS."""

BACKWARD = Kernels(
    name="flash-v3",
    module="_flash_v3",
    fwd={},
    bwd={"delta": "delta", "dkdv": "dkdv", "dq": "dq"},
    taken=TAKEN,
)
"""flash-v2's kernels."""


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """Return the call that computes o; inputs as from ``make_inputs``, any strides.

    Raises UnavailableError where Triton is missing or was imported as an interpreter.
    """
    q, k, v = inputs.q, inputs.k, inputs.v
    flash = _triton.load(q.device.type, "_flash_v3")

    def call() -> Tensor:
        output: Tensor = flash.flash_attention(
            q, k, v, causal=problem.causal, softmax_scale=problem.softmax_scale
        )
        return output

    return call


def why_unavailable(target: Target) -> str | None:
    """Why the kernel cannot run on the target, one sentence, or None."""
    return _why_other(target) or _triton.why_unavailable(target)


def why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
    """Why the kernels refuse the problem, one sentence, or None."""
    p = problem
    if reason := unsupported_features(p, TAKEN) or _why_other(target):
        return reason
    if p.dtype not in ("fp16", "bf16"):
        return f"it takes fp16 and bf16, not {p.dtype}"
    if reason := why_unfit(p, target):
        return reason
    if dims := [dim for dim in (p.head_dim, p.head_dim_v) if dim % 8]:
        return f"head_dim {dims[0]} is not a multiple of 8, as TMA wants"
    return None if pass_ == "fwd" else BACKWARD.why_unsupported(p, "bwd", target)


def _why_other(target: Target) -> str | None:
    if target.capability == hopper_configs.CAPABILITY:
        return "it has no form that Triton interprets" if _triton.interpreted(target) else None
    capability = target.capability
    found = "a CPU" if capability is None else f"sm{capability[0]}{capability[1]}"
    return f"it needs an sm90 GPU (H100, H200), this is {found}"


def on_card(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """Tiles, warps and stages of each kernel of the pass: ``fwd_block_q``, … and which kernels they are."""
    p = problem
    config: dict[str, Any] = {}
    if pass_ != "bwd":
        tiles = hopper_configs.choose(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
        config |= {
            "fwd_block_q": tiles.block_q, "fwd_block_k": tiles.block_k, "fwd_num_warps": tiles.num_warps,
            "fwd_num_stages": tiles.stages, "fwd_q_stages": tiles.q_stages,
        }  # fmt: skip
    if pass_ != "fwd":
        config |= {**BACKWARD.on_card(p, "bwd", target), "bwd_kernels": "flash-v2"}
    return config
