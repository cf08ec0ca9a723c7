"""Arguments of another kind than attention takes, each refused in one line; needs torch alone."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def check_mask(causal: Any, window: Any, name: str = "window") -> None:
    """Raise ValueError for what is no bool and no pair of counts, or a count below -1."""
    if not isinstance(causal, bool):
        raise ValueError(f"causal {causal!r} must be True or False")
    pair = isinstance(window, tuple | list) and len(window) == 2
    if not pair or not all(isinstance(side, int) and side >= -1 for side in window):
        raise ValueError(f"{name} {window!r} is out of range; it must be two counts of keys, or -1")


def check_tensors(**given: object) -> None:
    """Raise ValueError for what is neither a tensor nor None."""
    for name, x in given.items():
        if not (x is None or isinstance(x, Tensor)):
            raise ValueError(f"{name} must be a tensor; got {type(x).__name__}")
