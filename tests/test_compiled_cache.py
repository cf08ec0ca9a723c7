"""Decode steps with a cache under torch's default compiler, on a GPU; its eager backend: test_drop_in.py."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_drop_in import DEVICE, normal, plain
from torch import Tensor

from flashbench import flash_attn

BATCH, CAPACITY, PAGE, HEADS, KV_HEADS, DIM = 2, 512, 64, 8, 2, 128
USED = [200, 331]
KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "pages": {},
    "window": {"window_size": (37, 0)},
    "softcap": {"softcap": 15.0},
    "pages, window": {"window_size": (37, 0)},
    "pages, softcap": {"softcap": 15.0},
}


def holding(kind: str, *whole: Tensor) -> list[Tensor]:
    """The keys and the values that are used of each sequence, all else NaN."""
    held = [torch.full_like(x, math.nan) for x in whole]
    for x, of in zip(held, whole, strict=True):
        for b, n in enumerate(USED):
            x[b, :n] = of[b, :n]
    return [x.view(-1, PAGE, KV_HEADS, DIM) for x in held] if kind.startswith("pages") else held


def stepping(options: dict[str, Any]) -> Callable[..., tuple[Tensor, Tensor]]:
    """What is compiled: a step that writes its key, attends, and counts on."""

    def step(q: Tensor, new: list[Tensor], held: list[Tensor], used: Tensor) -> tuple[Tensor, Tensor]:
        o = flash_attn.flash_attn_with_kvcache(q * 2, *held, *new, cache_seqlens=used, causal=True, **options)
        return o, used + 1

    return step


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_steps_are_the_eager_ones(kind: str, dtype: torch.dtype) -> None:
    """Whole, two one after the other: o and caches to the bit, and o within the package's rule of fp64."""
    k, v = (normal(BATCH, CAPACITY, KV_HEADS, DIM, seed=seed, dtype=dtype) for seed in (1, 2))
    ours, theirs = holding(kind, k, v), holding(kind, k, v)
    options = {**KINDS[kind]}
    if kind.startswith("pages"):
        table = torch.arange(len(ours[0]), dtype=torch.int32, device=DEVICE)
        options["block_table"] = table.view(BATCH, -1)
    step = stepping(options)
    compiled = torch.compile(step, fullgraph=True)
    used = torch.tensor(USED, dtype=torch.int32, device=DEVICE)
    for number in range(2):
        held = used.tolist()
        q = normal(BATCH, 1, HEADS, DIM, seed=3 + number, dtype=dtype)
        new = [torch.stack([x[b, n : n + 1] for b, n in enumerate(held)]) for x in (k, v)]
        wanted, _ = step(q, new, ours, used)
        found, used = compiled(q, new, theirs, used)
        assert torch.equal(found, wanted)
        assert used.tolist() == [n + 1 for n in held]
        for mine, other in zip(ours, theirs, strict=True):
            assert torch.equal(mine.nan_to_num(9.0), other.nan_to_num(9.0))
        for b, n in enumerate(held):
            one = q[b, None] * 2, k[b, None, : n + 1], v[b, None, : n + 1]
            exact, same = (plain(*one, **KINDS[kind], dtype=x)[0][0] for x in (torch.float64, dtype))
            error = lambda x, exact=exact: float((x.double() - exact).abs().max())  # noqa: E731
            assert error(found[b]) <= 2 * error(same) + 2 * error((exact.to(dtype) + 0.3) - 0.3), (kind, b)
