"""What the tests of flash-attention's functions share: inputs, attention by the textbook, the error rule."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import combinations, product
from random import Random
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbench import environment, kernels

TARGET = environment.target(None)
REASON = kernels.get("flash").why_unavailable(TARGET)
runs = pytest.mark.skipif(REASON is not None, reason=str(REASON))
DEVICE = TARGET.type
SLACK = 2e-5 if DEVICE == "cpu" else 1e-4


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32, device: str = DEVICE) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(device, dtype)


def qkv(
    rows: int, keys: int, *, heads: tuple[int, int] = (2, 1), batch: int = 2, dim: int = 16, **more: Any
) -> list[Tensor]:
    sizes = (rows, heads[0]), (keys, heads[1]), (keys, heads[1])
    return [normal(batch, *size, dim, seed=seed, **more).requires_grad_() for seed, size in enumerate(sizes)]


def plain(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False, window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0, alibi_slopes: Tensor | None = None, softmax_scale: float | None = None,
    kept: Tensor | None = None, dropout_p: float = 0.0, dtype: torch.dtype = torch.float64,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(o, lse, probabilities) by the textbook in a dtype, rows before heads; kept: what dropout leaves."""
    (rows, heads, dim), keys = q.shape[1:], k.shape[1]
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(heads // x.shape[1], 1) for x in (k, v))
    s = q @ k.mT * (dim**-0.5 if softmax_scale is None else softmax_scale)
    if softcap:
        s = softcap * torch.tanh(s / softcap)
    ahead = torch.arange(keys, device=q.device) - torch.arange(rows, device=q.device)[:, None] - keys + rows
    if alibi_slopes is not None:
        slopes = alibi_slopes.to(dtype)
        s = s - slopes.reshape(-1, heads, 1, 1) * ahead.abs()
    left, right = window_size
    hidden = torch.zeros_like(ahead, dtype=torch.bool)
    if causal or right >= 0:
        hidden |= ahead > (0 if causal else right)
    if left >= 0:
        hidden |= ahead < -left
    s = s.masked_fill(hidden, -math.inf)
    p = s.softmax(-1).nan_to_num(0.0)
    weights = p if kept is None else p * kept / (1 - dropout_p)
    return (weights @ v).transpose(1, 2), s.logsumexp(-1), p


def of_plain(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "deterministic"}


def assert_as_good(
    found: tuple[Tensor, ...], exact: tuple[Tensor, ...], theirs: tuple[Tensor, ...], about: str
) -> None:
    """At most twice the error that the same in the dtype by torch has, and twice a rounding of it."""
    for number, (mine, right, other) in enumerate(zip(found, exact, theirs, strict=True)):
        assert mine.shape == right.shape
        rounded = ((right.to(mine.dtype) + 0.3) - 0.3).double()
        most = 2 * largest(other, right) + 2 * largest(rounded, right)
        error = largest(mine, right)
        assert math.isfinite(most)
        assert error <= most, f"{about}: tensor {number} is off by {error}, allowed {most}"


def largest(x: Tensor, exact: Tensor) -> float:
    """The largest difference; a NaN is larger than any."""
    apart = (x.double() - exact.double()).detach().abs()
    return float(apart.nan_to_num(math.inf).max()) if apart.numel() else 0.0


def covered(strength: int, *columns: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Rows, one value of each column, that have every combination of the values of so many columns.

    Greedily and always the same: of forty drawn around a combination that lacks, what has most new ones.
    """

    def of(row: tuple[Any, ...]) -> set[tuple[Any, ...]]:
        return {tuple((at, row[at]) for at in some) for some in combinations(range(len(row)), strength)}

    lacking = {
        tuple(zip(some, values, strict=True)): None
        for some in combinations(range(len(columns)), strength)
        for values in product(*(columns[at] for at in some))
    }
    generator, rows = Random(1), list[tuple[Any, ...]]()
    while lacking:
        first = dict(next(iter(lacking)))
        drawn = [
            tuple(first.get(at, generator.choice(values)) for at, values in enumerate(columns))
            for _ in range(40)
        ]
        rows.append(max(drawn, key=lambda row: len(of(row) & lacking.keys())))
        for one in of(rows[-1]):
            lacking.pop(one, None)
    return rows
