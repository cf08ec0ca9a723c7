"""With every feature nothing outside the outputs is written, repeats are equal bits, and offsets are 64-bit.

What is read before it is written shows in test_covering.py, whose memory is poisoned.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import pytest
import torch
from attention import FEATURES, featured, problem, run
from torch import Tensor

from flashbench import environment, kernels
from flashbench.kernels._inputs import make_inputs
from flashbench.kernels._reference import Reference
from flashbench.problem import Problem

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

TARGET = environment.target(None)
IMPLEMENTATIONS = ("flash-v2", "flash-v1", "flash-v2-atomic", "flash-fp8", "flash-decode")
EDGE = 1024
"""Elements before and after a tensor that nobody may touch."""
MARK = 7.0


def asked(name: str, feature: str, **changes: Any) -> Problem | None:
    """A small problem with the feature that the implementation takes, or None."""
    shape = {"num_heads": 4, "num_kv_heads": 2, "head_dim": 24, "head_dim_v": 40,
             "dtype": "fp8" if name == "flash-fp8" else "fp16", **changes}  # fmt: skip
    if feature != "varlen":
        shape = {"seqlen_q": 37, "seqlen_k": 45, **shape}
    p = problem(**shape) if feature == "plain" else featured(feature, **shape)
    return None if kernels.get(name).why_unsupported(p, "fwd", TARGET) else p


CASES = [
    (name, feature)
    for name in IMPLEMENTATIONS
    if kernels.get(name).why_unavailable(TARGET) is None
    for feature in ("plain", *FEATURES)
    if asked(name, feature)
]


def results_of(name: str, p: Problem, inputs: Any) -> tuple[Tensor, ...]:
    row = kernels.get(name)
    if row.why_unsupported(p, "bwd", TARGET):
        return (row.prepare(p, inputs)(),)
    return run(row, p, inputs)


@pytest.fixture
def canaries(monkeypatch: pytest.MonkeyPatch) -> list[Tensor]:
    """torch.empty and its relatives lie NaN-filled between marks; the list holds the marked buffers."""
    buffers: list[Tensor] = []

    def between_marks(make: Any) -> Any:
        def made(*args: Any, **options: Any) -> Tensor:
            like = make(*args, **options)
            if not like.is_floating_point() or like.element_size() < 2:
                return like
            buffer = torch.full((like.numel() + 2 * EDGE,), MARK, dtype=like.dtype, device=like.device)
            buffers.append(buffer)
            inside = buffer[EDGE : EDGE + like.numel()].fill_(float("nan"))
            return inside.as_strided(like.shape, like.stride(), EDGE)

        return made

    for owner, name in (
        (torch, "empty"), (torch, "empty_like"), (torch, "empty_strided"),
        (torch.Tensor, "new_empty"), (torch.Tensor, "new_empty_strided"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, between_marks(getattr(owner, name)))
    return buffers


@pytest.mark.parametrize(("name", "feature"), CASES)
def test_nothing_beside_the_outputs_is_written_and_nothing_inside_is_left(
    name: str, feature: str, canaries: list[Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    p = asked(name, feature)
    assert p is not None
    inputs = make_inputs(p, TARGET.device, 0)
    del canaries[:]
    results = results_of(name, p, inputs)
    guarded = list(canaries)
    monkeypatch.undo()
    assert len(guarded) > len(results)  # o, lse and each gradient
    for buffer in guarded:
        assert bool((buffer[:EDGE] == MARK).all() & (buffer[-EDGE:] == MARK).all())
    assert not any(x.isnan().any() for x in results)
    assert Reference(p, inputs).compare(results[0], results[1:] or None).ok


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "feature"), CASES)
def test_a_thousand_repeats_give_the_same_bits(name: str, feature: str) -> None:
    """Forward and backward, with more thread blocks than the card runs at once. What adds with atomics: o."""
    many = {"batch": 8, "num_heads": 8, "num_kv_heads": 4, "seqlen_q": 300, "seqlen_k": 333, "head_dim": 64}
    if feature == "varlen":
        many = {"num_heads": 64, "num_kv_heads": 32, "head_dim": 64}
        sequences = tuple((n % 97 * 3, n % 89 * 4) for n in range(0, 400, 40))
        many |= {"lengths": sequences, "batch": 10, "seqlen_q": max(q for q, _ in sequences),
                 "seqlen_k": max(k for _, k in sequences)}  # fmt: skip
    p = dataclasses.replace(asked(name, feature) or problem(), **many)
    inputs = make_inputs(p, TARGET.device, 0)
    first = results_of(name, p, inputs)
    stable = first if kernels.get(name).deterministic else first[:1]
    differ = torch.zeros((), dtype=torch.bool, device=TARGET.device)
    for _ in range(1000):
        for one, again in zip(stable, results_of(name, p, inputs), strict=False):
            differ |= (one != again).any()
    assert not differ


@pytest.mark.gpu
def test_more_elements_than_32_bits_count_in_both_passes() -> None:
    """Tensors of 2.4e9 elements: the last batch is as it is alone, and o right on sampled rows."""
    p = problem(
        batch=9, num_heads=64, num_kv_heads=64, seqlen_q=32768, seqlen_k=32768, head_dim=128, head_dim_v=128,
        dtype="bf16", causal=True,
    )  # fmt: skip
    inputs = make_inputs(p, TARGET.device, 0)
    assert inputs.k.numel() > 2**31
    whole = [x[8:].clone() for x in run(kernels.get("flash-v2"), p, inputs)]
    views = {name: getattr(inputs, name)[8:].clone() for name in ("q", "k", "v", "dout")}
    last, alone = dataclasses.replace(p, batch=1), dataclasses.replace(inputs, **views)
    for mine, theirs in zip(whole, run(kernels.get("flash-v2"), last, alone), strict=True):
        assert torch.equal(mine, theirs)
    accuracy = Reference(last, alone).compare(whole[0])
    assert accuracy.ok, accuracy
