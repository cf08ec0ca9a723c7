"""A hundred thousand launches over mixed shapes leave the memory of the card and of the host as it was."""

from __future__ import annotations

import gc
import importlib.util
import itertools
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from attention import problem

from flashbench import environment, kernels
from flashbench.kernels._inputs import make_inputs

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

import torch

TARGET = environment.target(None)
LAUNCHES = 100_000
FIRST = 5_000
"""Launches after which caches (of plans, of launches that are kept) are full."""
SMALL = ((1, 5, 9), (2, 17, 16))
SHAPES = ((1, 64, 64), (2, 65, 333), (1, 300, 127), (3, 128, 512), (1, 1, 1000), (2, 513, 513))


def calls(shapes: Sequence[tuple[int, int, int]]) -> list[tuple[int, Callable[[], object]]]:
    """(kernels that it launches, a call that makes o or gradients) of mixed shapes and kernels."""
    found = []
    for n, (batch, rows, keys) in enumerate(shapes):
        for name, pass_, count, more in (
            ("flash-v2", "bwd", 4, {}), ("flash-v2", "fwd", 1, {"window": (40, 0), "softcap": 5.0}),
            ("flash", "fwd", 1, {}), ("flash", "bwd", 4, {"head_dim": 128, "head_dim_v": 128}),
            ("flash-decode", "fwd", 2, {}), ("flash-v2-atomic", "bwd", 5, {"causal": False}),
        ):  # fmt: skip
            shape = {"dtype": "bf16" if n % 2 else "fp16", "head_dim": 64, "head_dim_v": 64}
            sizes = {"batch": batch, "seqlen_q": rows, "seqlen_k": keys, "num_kv_heads": 2}
            p = problem(**{**shape, **sizes, **more})
            row = kernels.get(name)
            if row.why_unavailable(TARGET) is None and row.why_unsupported(p, pass_, TARGET) is None:
                found.append((count, _call(row, p, pass_)))
    return found


def _call(row: kernels.Implementation, p, pass_: str) -> Callable[[], object]:
    inputs = make_inputs(p, TARGET.device, 0).detached(grad=pass_ == "bwd")
    prepared = row.prepare(p, inputs)
    if pass_ == "fwd":
        return prepared
    return lambda: torch.autograd.grad(prepared(), inputs.leaves, inputs.dout)


def held_bytes() -> tuple[int, int, int]:
    """Of the host, resident; of the card in torch's tensors, and in all of this process's and others' use."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text("ascii").split()[1])
    host = pages * os.sysconf("SC_PAGE_SIZE")
    if TARGET.type != "cuda":
        return host, 0, 0
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info(TARGET.device)
    return host, torch.cuda.memory_allocated(TARGET.device), total - free


def soak(launches: int, first: int, shapes: Sequence[tuple[int, int, int]] = SHAPES) -> dict[str, float]:
    """Launch so often; how much more memory is held than after the first, in bytes, and the seconds."""
    ready, done, began = calls(shapes), 0, time.monotonic()
    before = None
    for count, call in itertools.cycle(ready):
        call()
        done += count
        if before is None and done >= first:
            before = held_bytes()
        if done >= launches:
            break
    assert before is not None
    host, tensors, card = (now - then for now, then in zip(held_bytes(), before, strict=True))
    return {"launches": done, "calls": len(ready), "host_bytes": host, "tensor_bytes": tensors,
            "card_bytes": card, "wall_s": time.monotonic() - began}  # fmt: skip


@pytest.mark.gpu
def test_a_hundred_thousand_launches_keep_no_memory() -> None:
    found = soak(LAUNCHES, FIRST)
    print(found)
    assert found["launches"] >= LAUNCHES
    assert found["tensor_bytes"] == 0
    assert found["host_bytes"] < 2**24
    if "PYTEST_XDIST_WORKER" not in os.environ:  # else others use the card
        assert found["card_bytes"] < 2**24


@pytest.mark.slow
def test_the_same_in_the_interpreter() -> None:
    found = soak(120, 60, SMALL)
    assert found["launches"] >= 120
    assert found["host_bytes"] < 2**24
