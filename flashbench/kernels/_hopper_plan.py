"""What plans of flash-v3's launches are made of: layouts that TMA takes, and descriptors of them.

Import through ``_triton.load``.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashbench import hopper_configs
from flashbench.kernels._call import like

ALIGNMENT = 8
"""Elements of 16 bits to which TMA wants addresses and strides aligned."""
ADDRESSES = 2 * ALIGNMENT
"""The same, in bytes."""


class Laid(NamedTuple):
    """Where the elements of a tensor are, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]

    def empty(self, beside: Tensor) -> Tensor:
        """A tensor that lies so, of another one's dtype and device."""
        return torch.empty_strided(*self, dtype=beside.dtype, device=beside.device)


def output(x: Laid, columns: int) -> Laid:
    """How an output for the rows of x lies: as ``like``, and so that TMA stores it."""
    own = like(x.empty(torch.empty(0, device="meta")), columns + -columns % ALIGNMENT)
    return Laid((*x.shape[:3], columns), own.stride())


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
    return x.data_ptr() % ADDRESSES == 0 and takes_layout(x.shape, x.stride())


def loadable(x: Tensor) -> Tensor:
    """x, or a copy of it that TMA takes."""
    if takes(x):
        return x
    columns = x.shape[3]
    return x.new_empty(*x.shape[:3], columns + -columns % ALIGNMENT)[..., :columns].copy_(x)


@lru_cache(maxsize=256)
def takes_layout(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
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
