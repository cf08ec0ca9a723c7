"""What ranks send each other, over NCCL or Gloo, with every byte that leaves a rank counted.

``Link`` moves tensors; ``Still`` has its interface and moves nothing, so that compute can be timed alone;
``replay`` sends what a link has sent once more, without the compute.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from torch import Tensor

Shape = tuple[int, ...]


class Message(NamedTuple):
    """One call of a link: its method, what was sent (shape and dtype of each) and the shapes that came."""

    kind: str
    sent: tuple[tuple[Shape, Any], ...]
    coming: tuple[Shape, ...]


class Shift:
    """Tensors on their way round the ring. What is sent must not change before ``wait``."""

    def __init__(self, works: Sequence[Any], sent: Sequence[Tensor], coming: tuple[Tensor, ...]) -> None:
        self._works, self._sent, self._coming = works, sent, coming

    def wait(self) -> tuple[Tensor, ...]:
        """What came; on a GPU the stream waits, not the host."""
        for work in self._works:
            work.wait()
        return self._coming


class Link:
    """One rank's end. sent_bytes: what it has sent to others so far, in messages."""

    def __init__(self, rank: int, ranks: int) -> None:
        self.rank, self.ranks = rank, ranks
        self.sent_bytes = 0
        self.messages: list[Message] = []

    def forget(self) -> None:
        """Begin to count anew."""
        self.sent_bytes, self.messages = 0, []

    def shift(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> Shift:
        """Begin to send tensors to the next rank, and to receive such of these shapes from the one before."""
        import torch.distributed as dist

        sent = [x.contiguous() for x in tensors]
        coming = tuple(x.new_empty(shape) for x, shape in zip(tensors, shapes, strict=True))
        ahead, behind = (self.rank + 1) % self.ranks, (self.rank - 1) % self.ranks
        works = dist.batch_isend_irecv([
            *(dist.P2POp(dist.isend, x, ahead) for x in sent),
            *(dist.P2POp(dist.irecv, x, behind) for x in coming),
        ])  # fmt: skip
        self._count("shift", tensors, shapes, sent)
        return Shift(works, sent, coming)

    def gather(self, x: Tensor) -> list[Tensor]:
        """The tensor of every rank, all of one shape."""
        import torch.distributed as dist

        whole = x.new_empty((self.ranks, *x.shape))
        # torch 2.13 warns of the old name, and what a rank said last is told when it dies
        gathered = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        gathered(whole.flatten(), x.contiguous().flatten())
        self._count("gather", [x], (), [x] * (self.ranks - 1))
        return list(whole)

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """Send the i-th part to rank i; what came from each, of these shapes."""
        import torch
        import torch.distributed as dist

        sizes = [math.prod(shape) for shape in shapes]
        coming = parts[0].new_empty(sum(sizes))
        sent = torch.cat([x.flatten() for x in parts])
        dist.all_to_all_single(coming, sent, sizes, [x.numel() for x in parts])
        others = [x for rank, x in enumerate(parts) if rank != self.rank]
        self._count("exchange", parts, shapes, others)
        return [x.view(shape) for x, shape in zip(coming.split(sizes), shapes, strict=True)]

    def _count(
        self, kind: str, given: Sequence[Tensor], coming: Sequence[Shape], sent: Sequence[Tensor]
    ) -> None:
        """sent: what leaves for other ranks, a tensor for each time."""
        self.sent_bytes += sum(x.numel() * x.element_size() for x in sent)
        shapes = tuple((tuple(x.shape), x.dtype) for x in given)
        self.messages.append(Message(kind, shapes, tuple(coming)))


class Still(Link):
    """A link that moves nothing: what comes is one's own where it fits, else zeros."""

    def shift(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> Shift:
        """As Link."""
        coming = tuple(_fitting(x, shape) for x, shape in zip(tensors, shapes, strict=True))
        return Shift((), tensors, coming)

    def gather(self, x: Tensor) -> list[Tensor]:
        """As Link."""
        return [x] * self.ranks

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        """As Link."""
        return [_fitting(x, shape) for x, shape in zip(parts, shapes, strict=True)]


def _fitting(x: Tensor, shape: Shape) -> Tensor:
    return x if x.shape == shape else x.new_zeros(shape)


def replay(link: Link, messages: Sequence[Message], device: str) -> None:
    """Send tensors of the same shapes in the same order, each message once the one before has come."""
    import torch

    for message in messages:
        sent = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in message.sent]
        if message.kind == "shift":
            link.shift(sent, message.coming).wait()
        elif message.kind == "gather":
            link.gather(sent[0])
        else:
            link.exchange(sent, message.coming)
