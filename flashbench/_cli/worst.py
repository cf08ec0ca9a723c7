"""The table of what was checked against fp64: by dtype and tensor, the worst error beside its budget."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashbench.console import Column

TITLE = "worst error by dtype and tensor"


@dataclass(frozen=True, kw_only=True)
class Checked:
    """One problem that was compared: who computed it, where, and the errors and budgets by tensor."""

    implementation: str
    dtype: str
    at: str
    max_abs_error: Mapping[str, float]
    budget: Mapping[str, float]

    def ratio(self, tensor: str) -> float | None:
        """Largest error over its budget; up to 1 is correct, None where the tensor was not compared."""
        if tensor not in self.max_abs_error:
            return None
        error, budget = self.max_abs_error[tensor], self.budget[tensor]
        if budget > 0:
            return error / budget
        return 0.0 if error == 0 else float("inf")

    def badness(self, tensor: str) -> float:
        """The ratio as an order: a NaN is the worst of all."""
        value = self.ratio(tensor)
        return float("inf") if value is None or math.isnan(value) else value


def by_tensor(found: Iterable[Checked], tensors: Sequence[str]) -> list[dict[str, Any]]:
    """Per implementation, dtype and tensor: how many compared it, and the worst of them."""
    groups: dict[tuple[str, str, str], list[Checked]] = {}
    for one in found:
        for tensor in tensors:
            if one.ratio(tensor) is not None:
                groups.setdefault((one.implementation, one.dtype, tensor), []).append(one)
    rows = []
    for (implementation, dtype, tensor), group in groups.items():
        at = max(group, key=partial(Checked.badness, tensor=tensor))
        rows.append({
            "implementation": implementation, "dtype": dtype, "tensor": tensor, "cells": len(group),
            "max_error_ratio": f"{at.ratio(tensor):.3g}",
            "max_abs_error": f"{at.max_abs_error[tensor]:.2e}", "budget": f"{at.budget[tensor]:.2e}",
            "at": at.at,
        })  # fmt: skip
    return rows


def columns() -> list[Column]:
    """Of ``by_tensor``."""
    from flashbench.console import Column

    return [
        Column(name="implementation", header="implementation"),
        Column(name="dtype", header="dtype"),
        Column(name="tensor", header="tensor"),
        Column(name="cells", header="cells", justify="right"),
        Column(name="max_error_ratio", header="error/budget", justify="right"),
        Column(name="max_abs_error", header="max |error|", justify="right"),
        Column(name="budget", header="budget", justify="right"),
        Column(name="at", header="at"),
    ]
