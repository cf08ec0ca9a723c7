"""The timed calls of the three passes, made from a forward call.

Graphs are kept from one repetition to the next, which a function that torch compiles must be told first:
whoever prepares, calls and repeats does so inside of ``kept_graphs``, so that entering it is never timed.

Gradients come from ``torch.autograd.grad``: nothing accumulates into ``.grad``, so memory stays flat
over repetitions and no addition is timed. Pass ``fwd`` needs no function here: the runner times the
forward call itself under ``torch.no_grad()``, so that it keeps nothing for a backward, while the
forward inside ``fwd+bwd`` keeps what its backward needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from flashbench.kernels import Call
from flashbench.kernels._inputs import Inputs

Gradients = tuple[Tensor, ...]
"""Of ``Inputs.leaves``, in their order, shapes and dtypes: dq, dk, dv, then dbias and dsinks."""


def timed_call(
    pass_: str, call: Call, inputs: Inputs
) -> tuple[Callable[[], object], Tensor, Gradients | None]:
    """What is timed of the pass, and from a first run o and the gradients to check."""
    if pass_ == "fwd":
        return call, call(), None
    backward, o = backward_call(call, inputs)
    gradients = backward()
    return backward if pass_ == "bwd" else forward_backward_call(call, inputs), o, gradients


def backward_call(call: Call, inputs: Inputs) -> tuple[Callable[[], Gradients], Tensor]:
    """The backward alone, and o: runs the forward once and keeps its graph for every repetition.

    inputs: those that the call was prepared with; their leaves require grad.
    """
    o, leaves = call(), inputs.leaves

    def backward() -> Gradients:
        return tuple(torch.autograd.grad(o, leaves, inputs.dout, retain_graph=True))

    return backward, o


def forward_backward_call(call: Call, inputs: Inputs) -> Callable[[], Gradients]:
    """Forward with grad, then backward, which frees the graph; inputs as ``backward_call`` has them."""
    leaves = inputs.leaves

    def forward_backward() -> Gradients:
        return tuple(torch.autograd.grad(call(), leaves, inputs.dout))

    return forward_backward


@contextmanager
def kept_graphs() -> Iterator[None]:
    """Inside, what ``torch.compile`` makes of a function has a backward that may run again and again.

    Else that takes what the forward has kept as scratch (donated buffers), and torch refuses to keep its
    graph. The switch belongs to the key of torch's caches on disk, so that no other process' backward is
    found there.
    """
    from torch._functorch import config

    with config.patch(donated_buffer=False), _of_every_thread(config, "donated_buffer"):
        yield


@contextmanager
def _of_every_thread(config: Any, name: str) -> Iterator[None]:
    """The present value of a switch of torch, for other threads, too: from torch 2.13 on each has its own,
    and a GPU's backward runs in a thread of torch's.
    """
    entry: Any = getattr(config, "_config", {}).get(name)
    if not hasattr(entry, "default"):
        yield
        return
    before, entry.default = entry.default, getattr(config, name)
    try:
        yield
    finally:
        entry.default = before
