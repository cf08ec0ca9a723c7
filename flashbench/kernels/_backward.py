"""The timed calls of the three passes, made from a forward call.

Gradients come from ``torch.autograd.grad``: nothing accumulates into ``.grad``, so memory stays flat
over repetitions and no addition is timed. Pass ``fwd`` needs no function here: the runner times the
forward call itself under ``torch.no_grad()``, so that it keeps nothing for a backward, while the
forward inside ``fwd+bwd`` keeps what its backward needs.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from flashbench.kernels import Call

Gradients = tuple[Tensor, ...]
"""dq, dk, dv in the shapes and dtype of q, k, v."""


def backward_call(
    call: Call, inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor
) -> tuple[Callable[[], Gradients], Tensor]:
    """The backward alone, and o: runs the forward once and keeps its graph for every repetition.

    inputs: q, k, v that require grad; dout: gradient of the loss by o, in o's shape and dtype.
    """
    o = call()

    def backward() -> Gradients:
        return tuple(torch.autograd.grad(o, inputs, dout, retain_graph=True))

    return backward, o


def forward_backward_call(
    call: Call, inputs: tuple[Tensor, Tensor, Tensor], dout: Tensor
) -> Callable[[], Gradients]:
    """Forward with grad, then backward, which frees the graph."""

    def forward_backward() -> Gradients:
        return tuple(torch.autograd.grad(call(), inputs, dout))

    return forward_backward
