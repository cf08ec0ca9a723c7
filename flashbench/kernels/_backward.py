"""The timed calls of the three passes, made from a forward call.

Gradients come from ``torch.autograd.grad``: nothing accumulates into ``.grad``, so memory stays flat
over repetitions and no addition is timed. The forward of pass ``fwd`` runs without grad and keeps
nothing for a backward; that of ``fwd+bwd`` keeps what its backward needs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashbench.kernels import Call

Gradients = tuple[Tensor, ...]
"""dq, dk, dv in the shapes and dtype of q, k, v."""


def forward_call(call: Call) -> Call:
    """The forward alone, without grad."""

    def forward() -> Tensor:
        with torch.no_grad():
            return call()

    return forward


def backward_call(
    call: Call, inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor
) -> tuple[Callable[[], Gradients], Tensor]:
    """The backward alone, and o: runs the forward once and keeps its graph for every repetition.

    inputs: q, k, v that require grad; dout: gradient of the loss by o, in o's shape and dtype.
    """
    o = call()

    def backward() -> Gradients:
        return torch.autograd.grad(o, inputs, dout, retain_graph=True)

    return backward, o


def forward_backward_call(
    call: Call, inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor
) -> Callable[[], Gradients]:
    """Forward with grad, then backward, which frees the graph."""

    def forward_backward() -> Gradients:
        return torch.autograd.grad(call(), inputs, dout)

    return forward_backward
