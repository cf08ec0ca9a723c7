"""What flash-attention's functions are given: each misfit refused in one line, which names the argument."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashbench.kernels._misfits import check_mask


def refuse(function: str, **given: object) -> None:
    """Raise ValueError for an argument that is given and that no bundled kernel takes."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"{name} of {function} is not taken by the bundled kernels; accepted: None")


def check_dimensions(count: int, meaning: str, **tensors: Any) -> None:
    """Raise ValueError for what is no tensor, and for a tensor of another rank."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} {_shown(x)} is not taken; accepted: a tensor {meaning}")
        if x.ndim != count:
            raise ValueError(f"{name} has {count} dimensions, {meaning}; got {tuple(x.shape)}")


def check_options(
    causal: Any, window_size: Any, slopes: Any = None, *, dropout_p: Any = 0.0, scale: Any = None,
    softcap: Any = 0.0,
) -> None:  # fmt: skip
    """Raise ValueError for options of another kind; whether numbers are in range the kernels' checks say."""
    check_mask(causal, window_size, "window_size")
    if not (slopes is None or isinstance(slopes, Tensor)):
        raise ValueError(f"alibi_slopes {_shown(slopes)} is not taken; accepted: an fp32 tensor, or None")
    _check_number("dropout_p", dropout_p, "a number from 0 to below 1")
    _check_number("softcap", softcap, "a number greater than 0, or 0 for none")
    if scale is not None:
        _check_number("softmax_scale", scale, "a number greater than 0, or None for head_dim**-0.5")


def check_whole(name: str, value: Any, accepted: str) -> None:
    """Raise ValueError for what is no whole number."""
    if not isinstance(value, int):
        raise ValueError(f"{name} {_shown(value)} is not taken; accepted: {accepted}")


def check_cached(
    name: str, x: Any, batch: int, more: tuple[torch.dtype, ...] = (), kind: str = "int32"
) -> None:
    """Raise ValueError for what is not one int32 for each sequence; more: dtypes that are taken, too."""
    if isinstance(x, Tensor) and x.dtype in (torch.int32, *more) and x.shape == (batch,):
        return
    got = f"{x.dtype} {tuple(x.shape)}" if isinstance(x, Tensor) else _shown(x)
    raise ValueError(f"{name} {got} is not taken; accepted: {kind} ({batch},)")


def _check_number(name: str, value: Any, accepted: str) -> None:
    try:
        float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} {_shown(value)} is not taken; accepted: {accepted}") from None


def _shown(value: Any) -> str:
    """In one line: a value as it is written, where that is short, else its type."""
    written = repr(value)
    return written if len(written) <= 60 and "\n" not in written else f"of type {type(value).__name__}"
