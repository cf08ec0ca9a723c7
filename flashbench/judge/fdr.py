"""How many sure-looking cells chance alone makes: the false discovery rate.

Source: Benjamini and Hochberg, Controlling the false discovery rate (1995), the step-up procedure.
"""

from __future__ import annotations

from collections.abc import Sequence


def false_discoveries(p_values: Sequence[float], rate: float) -> list[bool]:
    """Which of the p values stand when at most ``rate`` of those that stand may be chance."""
    order = sorted(range(len(p_values)), key=lambda index: p_values[index])
    last = max(
        (rank for rank, index in enumerate(order, 1) if p_values[index] <= rate * rank / len(order)),
        default=0,
    )
    standing = set(order[:last])
    return [index in standing for index in range(len(p_values))]
