"""Rotary embedding of queries and new keys, in torch: fp32 products, then the tensor's dtype."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashbench.kernels._drop_in_checks import check_dimensions, shown


def rotated(x: Tensor, cos: Tensor, sin: Tensor, positions: Tensor, interleaved: bool) -> Tensor:
    """x (batch, rows, heads, head_dim), its first 2 * cos.shape[1] columns turned, the others as they are.

    positions: (batch, rows), which row of cos and sin is a row's; outside of them the nearest. Pairs of
    columns are neighbours where interleaved, else of the first half and the second.
    """
    columns = 2 * cos.shape[1]
    at = positions.long().clamp(0, max(0, cos.shape[0] - 1))
    c, s = (angles[at].float()[:, :, None] for angles in (cos, sin))
    turned, rest = x[..., :columns].float(), x[..., columns:]
    if interleaved:
        a, b = turned.unflatten(-1, (-1, 2)).unbind(-1)
        turned = torch.stack((a * c - b * s, a * s + b * c), -1).flatten(-2)
    else:
        a, b = turned.chunk(2, -1)
        turned = torch.cat((a * c - b * s, a * s + b * c), -1)
    return torch.cat((turned.to(x.dtype), rest), -1)


def check_rotary(cos: Any, sin: Any, q: Tensor, k: Any, capacity: int) -> None:
    """Raise ValueError for angles that do not go with the other arguments; both None: there are none."""
    if cos is None and sin is None:
        return
    if cos is None or sin is None:
        missing = "rotary_cos" if cos is None else "rotary_sin"
        raise ValueError(f"{missing} None is not taken; accepted: rotary_cos and rotary_sin together")
    check_dimensions(2, "(seqlen_ro, rotary_dim / 2)", rotary_cos=cos, rotary_sin=sin)
    if k is None:
        raise ValueError("rotary_cos of flash_attn_with_kvcache is not taken without new k and v")
    for name, x in (("rotary_cos", cos), ("rotary_sin", sin)):
        if x.shape != cos.shape or x.dtype != q.dtype:
            raise ValueError(f"{name} {shown(x)} is not taken; accepted: {q.dtype} {tuple(cos.shape)}")
    rows, half = cos.shape
    if rows < capacity or 2 * half > q.shape[3]:
        raise ValueError(
            f"rotary_cos {tuple(cos.shape)} is not taken; accepted: a row for each of the cache's {capacity}"
            f" keys, and at most half of head_dim {q.shape[3]}"
        )


def check_positions(cos: Tensor, lengths: Tensor, rows: int) -> None:
    """On a CPU: raise ValueError where the last of a sequence's rows is past the angles."""
    if lengths.device.type == "cpu" and bool((lengths + rows > cos.shape[0]).any()):
        raise ValueError(
            f"rotary_cos has {cos.shape[0]} rows; cache_seqlens {lengths.tolist()} and {rows} queries or new"
            " keys behind them need more"
        )
