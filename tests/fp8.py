"""Inputs with outliers, as the fp8 tests take them, and attention in fp64."""

from __future__ import annotations

import torch
from torch import Tensor

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


def with_outliers(*shape: int, seed: int, device: str = "cpu") -> Tensor:
    """N(0, 1) + N(0, 100)·Bernoulli(0.001), 100 a variance. Source: FlashAttention-3, section 4.3."""
    generator = torch.Generator(device=device).manual_seed(seed)

    def normal() -> Tensor:
        return torch.randn(shape, generator=generator, device=device)

    rare = torch.rand(shape, generator=generator, device=device) < 0.001
    return normal() + 10 * normal() * rare


def exact(q: Tensor, k: Tensor, v: Tensor, *, causal: bool = False) -> tuple[Tensor, Tensor]:
    """(o, lse) in fp64, head by head; causal is bottom-right."""
    group = q.shape[1] // k.shape[1]
    outputs, lses = [], []
    for h in range(q.shape[1]):
        keys, values = k[:, h // group].double(), v[:, h // group].double()
        s = q[:, h].double() @ keys.mT * q.shape[3] ** -0.5
        if causal:
            i, j = (
                torch.arange(s.shape[1], device=s.device)[:, None],
                torch.arange(s.shape[2], device=s.device),
            )
            s.masked_fill_(j > i + s.shape[2] - s.shape[1], float("-inf"))
        lses.append(s.logsumexp(-1))
        outputs.append(s.softmax(-1).nan_to_num() @ values)
    return torch.stack(outputs, 1), torch.stack(lses, 1)


def rmse(x: Tensor, ref: Tensor) -> float:
    """Root of the mean square of x - ref."""
    return float((x.double() - ref).square().mean().sqrt())
