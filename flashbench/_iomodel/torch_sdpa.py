"""torch's scaled_dot_product_attention as its wrappers launch it: FlashAttention-2 with copies, and cuDNN.

Both backwards are flash-v2-atomic's: delta and a zeroed fp32 dQ, one kernel with K/V outside that adds to
it, a conversion. What is cuDNN's own is not published: its tiles are read off counters (an H100, cuDNN
9.19, torch 2.11; docs/counters.md): its TMA loads are those of 128 query rows a tile forward and of 128
key rows backward, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashbench._iomodel import flash_v2
from flashbench._iomodel.tensors import sizes
from flashbench._iomodel.types import Step, Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

FLASH_ASSUMPTIONS = (
    f"{flash_v2.ASSUMPTIONS}; o and do are copied into rows of all heads first, as torch's wrapper makes"
    " them contiguous; registers that the kernels spill are not counted"
)
CUDNN_ASSUMPTIONS = f"{flash_v2.ASSUMPTIONS}; tiles read off counters of cuDNN 9.19 on an H100"


def flash_backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """flash-v2-atomic's backward after copies of do and o.

    torch gives the kernel (batch, seqlen, head, dim) views of (batch, head, seqlen, dim) tensors, and makes
    o and do contiguous in that order.
    """
    s = sizes(problem)
    work = flash_v2.atomic_backward(problem, tiles, variant)
    copies = (
        Step(name="copy do", read={"do": s.o}, write={"do_rows": s.o}),
        Step(name="copy o", read={"o": s.o}, write={"o_rows": s.o}),
    )
    return work._replace(steps=copies + work.steps, extra_bytes=work.extra_bytes + 2 * s.o)


def cudnn_forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """flash-v2's forward without its LSE, which cuDNN leaves out where nothing needs a gradient."""
    work, lse = flash_v2.forward(problem, tiles, variant), sizes(problem).lse
    steps = tuple(
        step._replace(write={name: size for name, size in step.write.items() if name != "lse"})
        for step in work.steps
    )
    return work._replace(steps=steps, extra_bytes=work.extra_bytes - lse)


def cudnn_tiles(problem: Problem, kernel: str, device: Device | None) -> Tiles:
    """128 rows of what stays, forward and backward."""
    return Tiles(128, 128) if kernel == "fwd" else Tiles(64, 128)
