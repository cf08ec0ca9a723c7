"""flash-v2-atomic: FlashAttention-2 in portable Triton with the backward of its paper, one kernel.

The forward is flash-v2's. The backward multiplies five times a tile, not seven, and adds dQ atomically, in
no fixed order: dq differs in its last bits from run to run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call, Implementation, Target, _triton
from flashbench.kernels._kernels_of import Kernels, precompile
from flashbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

KERNELS = Kernels("flash-v2-atomic", {"fwd": "fwd"}, {"delta": "delta", "bwd": "atomic"}, {"bshd"})


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """Return the call that computes o; inputs as from ``make_inputs``, any strides.

    Raises UnavailableError where Triton is missing or was imported in the other mode.
    """
    return prepare_tiles(problem, inputs, {})


def prepare_tiles(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
    """As prepare, with the tiles of config (as ``describe`` gives them) for the kernels that it names."""
    q, k, v = inputs.q, inputs.k, inputs.v
    module = _triton.load(q.device.type, "_flash_v2_atomic")
    options = {
        "causal": problem.causal,
        "softmax_scale": problem.softmax_scale,
        "tf32": problem.dtype == "tf32",
        "configs": KERNELS.given(config),
    }

    def call() -> Tensor:
        output: Tensor = module.flash_attention(q, k, v, **options)
        return output

    return call


def why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
    """Why the kernels refuse the problem, one sentence, or None."""
    if problem.dtype == "tf32" and pass_ != "fwd":
        return "one kernel cannot correct its row sums first, which gradients in tf32 need; flash-v2 does"
    return KERNELS.why_unsupported(problem, pass_, target)


IMPLEMENTATIONS = (
    Implementation(
        name=KERNELS.name,
        summary="flash-v2 with a backward of one kernel (bundled): dQ by atomic additions, not deterministic",
        prepare=prepare,
        io_model=f"{KERNELS.name}-triton",
        why_unavailable=_triton.why_unavailable,
        why_unsupported=why_unsupported,
        describe=KERNELS.describe,
        interpreted=_triton.interpreted,
        precompile=precompile,
        prepare_tiles=prepare_tiles,
        on_card=KERNELS.on_card,
        deterministic=False,
    ),
)
