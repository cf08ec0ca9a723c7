"""What launches of flash-v3's kernels are made of: TMA descriptors, and kernels compiled once per layout.

Import through ``_triton.load``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashbench import hopper_configs
from flashbench.kernels._call import Launch
from flashbench.kernels._hopper_again import Again, possible

ALIGNMENT = 8
"""Elements of 16 bits to which TMA wants addresses and strides aligned."""


class Made:
    """A kernel for compile-time constants, in the order of its parameters; it is compiled once."""

    def __init__(self, constants: dict[str, Any]) -> None:
        self.constants = constants
        self.options = {**constants, "num_warps": 4, "enable_fp_fusion": True}
        self.again: Again | None = None
        self._compiled: Any = None

    def compiled(self, launch: Launch) -> Any:
        """The compiled kernel, looked up once: Triton's own look-up costs as much as all else of a call."""
        if self._compiled is None:
            self._compiled = launch.compile()
            self.again = Again(self._compiled, launch.programs) if possible(self._compiled) else None
        return self._compiled


@dataclass(frozen=True)
class PlannedLaunch(Launch):
    """A launch of a kernel that is made ready for its layout.

    place: the addresses and numbers that tell it from the kernel's other launches; () of one that is not to
    be kept.
    """

    made: Made
    place: tuple[float, ...] = ()

    def start(self) -> None:
        """Launch on the current device, which is the tensors', and stream."""
        compiled, again = self.made.compiled(self), self.made.again
        args = *self.args, *self.made.constants.values()
        if self.place and again:
            addresses = tuple(x.data_ptr() if isinstance(x, Tensor) else x for x in args)
            if again.keep(self.place, addresses):
                return
        compiled[(self.programs, 1, 1)](*args)


class Laid(NamedTuple):
    """Where the elements of a tensor are, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


def bound(descriptors: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> Iterator[Any]:
    """The descriptors, each of its tensor; copied, as a cached one must not keep a tensor alive."""
    for descriptor, x in zip(descriptors, tensors, strict=True):
        if descriptor is None:
            yield None
            continue
        own = object.__new__(TensorDescriptor)
        own.__dict__.update(descriptor.__dict__, base=x)
        yield own


def descriptor(laid: Laid, block: list[int], dtype: torch.dtype) -> TensorDescriptor:
    """Of boxes of a tensor, whose last dimension has unit stride; outside is 0, and is not fetched."""
    strides = [s if n > 1 else 16 for n, s in zip(laid.shape[:-1], laid.strides, strict=False)]
    nowhere = torch.empty(0, dtype=dtype, device="meta")
    layout = gl.NVMMASharedLayout.get_default_for(block, _GLUON[dtype])
    return TensorDescriptor(nowhere, list(laid.shape), [*strides, 1], block, layout)


_GLUON = {
    torch.float16: gl.float16, torch.bfloat16: gl.bfloat16, torch.float32: gl.float32,
    torch.float8_e4m3fn: gl.float8e4nv, torch.float8_e5m2: gl.float8e5,
}  # fmt: skip


def takes(x: Tensor) -> bool:
    """Whether TMA takes the tensor as it lies."""
    return x.data_ptr() % 16 == 0 and _takes(x.shape, x.stride())


def loadable(x: Tensor) -> Tensor:
    """x, or a copy of it that TMA takes."""
    if takes(x):
        return x
    columns = x.shape[3]
    return x.new_empty(*x.shape[:3], columns + -columns % ALIGNMENT)[..., :columns].copy_(x)


@lru_cache(maxsize=256)
def _takes(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides are ones that TMA takes: 1 for columns, else multiples of 16 bytes and not 0."""
    outer = [s for n, s in zip(shape[:3], strides, strict=False) if n > 1]
    return strides[3] == 1 and all(s > 0 and s % ALIGNMENT == 0 for s in outer)


@lru_cache
def programs(device: torch.device) -> int:
    """As many as the device has SMs: one fills an SM."""
    if device.type != "cuda":
        return hopper_configs.PROGRAMS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count
