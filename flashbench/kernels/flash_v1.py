"""flash-v1: FlashAttention-1's loop order in portable Triton, forward and backward.

K/V outside, Q inside, so that Q, O and the row statistics travel once per K/V tile: what FlashAttention-2
did away with, here to be seen, traced and counted. One thread block per head; slow by nature.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call, Implementation, _triton
from flashbench.kernels._kernels_of import Kernels, precompile
from flashbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

KERNELS = Kernels("flash-v1", {"fwd": "v1_fwd"}, {"bwd": "v1_bwd"}, {"bshd", "deterministic"})


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """Return the call that computes o; inputs as from ``make_inputs``, any strides.

    Raises UnavailableError where Triton is missing or was imported in the other mode.
    """
    return prepare_tiles(problem, inputs, {})


def prepare_tiles(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
    """As prepare, with the tiles of config (as ``describe`` gives them) for the kernels that it names."""
    q, k, v = inputs.q, inputs.k, inputs.v
    module = _triton.load(q.device.type, "_flash_v1")
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


IMPLEMENTATIONS = (
    Implementation(
        name=KERNELS.name,
        summary="FlashAttention-1 in Triton (bundled): K/V outer, O through memory once per K/V tile",
        prepare=prepare,
        io_model=f"{KERNELS.name}-triton",
        why_unavailable=_triton.why_unavailable,
        why_unsupported=KERNELS.why_unsupported,
        describe=KERNELS.describe,
        interpreted=_triton.interpreted,
        precompile=precompile,
        prepare_tiles=prepare_tiles,
        on_card=KERNELS.on_card,
    ),
)
