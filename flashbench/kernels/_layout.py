"""How tensors lie, apart from where: what kernels are made ready for. Needs torch alone."""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import Tensor

Layout: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...], torch.dtype, torch.device], ...]
"""Of q, k and v: shape, strides, dtype and device."""


def layout(q: Tensor, k: Tensor, v: Tensor) -> Layout:
    """That of a call, which costs the host a microsecond: what is kept by it is found in one look."""
    return (
        (q.shape, q.stride(), q.dtype, q.device),
        (k.shape, k.stride(), k.dtype, k.device),
        (v.shape, v.stride(), v.dtype, v.device),
    )


def unit_stride(x: Tensor) -> Tensor:
    """x with unit stride along the head dim."""
    return x if x.stride(-1) == 1 else x.contiguous()
