"""Launch options of kernels that know no mask but the causal one, and no option of scores."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from flashbench.kernels._call import Call

_UNKNOWN = ("LOWER", "UPPER", "TOP_LEFT", "CAPPED", "DROPS", "EARLY")


def options(call: Call, name: str, q: Tensor, v: Tensor, *strided: Tensor) -> dict[str, Any]:
    """As ``Call.options`` of a call that is causal or full, and no more."""
    _, every = call.options(name, q, v, *strided)
    return {"CAUSAL": call.causal, **{key: value for key, value in every.items() if key not in _UNKNOWN}}
