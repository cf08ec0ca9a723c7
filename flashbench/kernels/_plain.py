"""Calls and launch options of kernels that know no mask but the causal one, and no option of scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashbench.flash_configs import Config
from flashbench.kernels._call import NOTHING, Call, check_shapes
from flashbench.kernels._flash_v2 import check

_UNKNOWN = ("LOWER", "UPPER", "TOP_LEFT", "CAPPED", "DROPS", "EARLY")


def call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None,
    tf32: bool,
    configs: tuple[tuple[str, Config], ...],
) -> Call:
    """The call of these arguments of ``flash_attention``. Raises ValueError as that does."""
    check_shapes(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    found = Call(causal=causal, scale=scale, tf32=tf32, configs=configs)
    check(q, k, v, found, NOTHING)
    return found


def options(call: Call, name: str, q: Tensor, v: Tensor, *strided: Tensor) -> dict[str, Any]:
    """As ``Call.options`` of a call that is causal or full, and no more."""
    _, every = call.options(name, q, v, *strided)
    return {"CAUSAL": call.causal, **{key: value for key, value in every.items() if key not in _UNKNOWN}}
