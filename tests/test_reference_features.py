"""The oracle knows every feature, alone and in pairs, on all rows or sampled ones, and tells it from none."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from attention import FEATURES, exact, exact_lse, featured, problem

from flashbench.errors import SpecError
from flashbench.kernels import _part
from flashbench.kernels._inputs import make_inputs
from flashbench.kernels._reference import Reference
from flashbench.problem import Problem

BIASES = ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "1h1k", "b11k", "bhq1", "11q1", "bh11", "1111")


def pairs() -> list[tuple[str, ...]]:
    """Every feature alone, and every pair that a problem may have."""
    found: list[tuple[str, ...]] = [(name,) for name in FEATURES]
    for pair in itertools.combinations(FEATURES, 2):
        try:
            featured(*pair)
        except SpecError:
            continue
        found.append(pair)
    return found


def assert_exact(p: Problem, seed: int = 3, **options: Any) -> None:
    inputs = make_inputs(p, "cpu", seed)
    reference = Reference(p, inputs, **options)
    expected = reference.expected(gradients=True)
    names = ["o", *(f"d{name}" for name in inputs.differentiable())]
    wanted = dict(zip(names, exact(p, inputs), strict=True)) | {"lse": exact_lse(p, inputs)}
    assert expected.keys() == wanted.keys()
    for name, tensor in wanted.items():
        picked = reference._picked(name, tensor)
        for mine, theirs in zip(expected[name].refs, picked, strict=True):
            assert mine.shape == theirs.shape, name
            assert torch.allclose(mine, theirs, atol=1e-12, rtol=1e-11), name


@pytest.mark.parametrize("names", pairs(), ids="+".join)
@pytest.mark.parametrize("causal", [False, True])
def test_a_feature_is_its_definition(names: tuple[str, ...], causal: bool) -> None:
    lengths = {} if "varlen" in names else {"seqlen_q": 9, "seqlen_k": 14}
    assert_exact(featured(*names, causal=causal, num_kv_heads=2, head_dim_v=5, **lengths))


@pytest.mark.parametrize("bias", BIASES)
@pytest.mark.parametrize("more", [{}, {"sinks": True, "softcap": 2.0, "dropout_p": 0.2}], ids=str)
def test_a_bias_of_any_shape(bias: str, more: dict[str, Any]) -> None:
    assert_exact(problem(bias=bias, num_kv_heads=2, seqlen_q=7, seqlen_k=5, **more))


@pytest.mark.parametrize(
    "names", [("sinks",), ("bias", "softcap"), ("alibi",), ("dropout", "sinks"), ("top-left",)]
)
@pytest.mark.parametrize("elements", [64, 2**20])
def test_more_queries_than_keys_in_chunks_of_any_size(
    names: tuple[str, ...], elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_part.WORKSPACE_BYTES, "cpu", 8 * elements)
    assert_exact(featured(*names, seqlen_q=14, seqlen_k=6))


@pytest.mark.parametrize("bias", ["bhqk", "11qk", "1h1k", "bhq1", "b111"])
def test_sampled_rows_of_everything_at_once(bias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_part, "SAMPLED_ROWS", 6)
    p = problem(
        batch=2, num_heads=2, num_kv_heads=1, seqlen_q=31, seqlen_k=40, window=(20, 3), softcap=2.0,
        alibi=True, bias=bias, sinks=True, dropout_p=0.2, block_mask="document",
    )  # fmt: skip
    assert_exact(p, all_rows=False)


def test_sampled_rows_of_a_packed_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_part, "SAMPLED_ROWS", 4)
    assert_exact(featured("varlen", "sinks", "dropout", num_kv_heads=2), all_rows=False)


def test_rows_without_keys_are_zero_and_their_lse_is_the_sinks() -> None:
    p = problem(seqlen_q=9, seqlen_k=4)
    expected = Reference(p, make_inputs(p, "cpu", 0)).expected(gradients=True)
    assert (expected["lse"].refs[0][:, :, :5] == -torch.inf).all()
    assert not expected["o"].refs[0][:, :, :5].any()
    assert not expected["dq"].refs[0][:, :, :5].any()
    with_sinks = problem(seqlen_q=9, seqlen_k=4, sinks=True)
    inputs = make_inputs(with_sinks, "cpu", 0)
    expected = Reference(with_sinks, inputs).expected(gradients=True)
    assert inputs.sinks is not None
    sinks = inputs.sinks.double()[None, :, None].expand(2, 4, 5)
    assert torch.equal(expected["lse"].refs[0][:, :, :5], sinks)
    assert all(
        ref.isfinite().all() for name in ("o", "dq", "dk", "dv", "dsinks") for ref in expected[name].refs
    )


@pytest.mark.parametrize("name", [name for name in FEATURES if name not in ("bshd", "deterministic")])
def test_leaving_a_feature_out_is_caught(name: str) -> None:
    p = featured(name, causal=False) if name in ("window", "block-mask") else featured(name)
    inputs = make_inputs(p, "cpu", 5)
    without = problem(causal=p.causal, batch=p.batch) if name != "varlen" else None
    if without is None:
        o, *gradients = (x.roll(1, 2) for x in exact(p, inputs))
    else:
        plain = make_inputs(without, "cpu", 5)
        o, *gradients = exact(without, plain)
        gradients += [torch.zeros_like(x) for x in inputs.leaves[3:]]
    accuracy = Reference(p, inputs).compare(o.float(), [x.float() for x in gradients])
    assert not accuracy.ok
    right = [x.float() for x in exact(p, inputs)]
    assert Reference(p, inputs).compare(right[0], right[1:], exact_lse(p, inputs).float()).ok


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32"])
def test_lse_is_compared_and_infinite_where_the_reference_is(dtype: str) -> None:
    p = problem(seqlen_q=9, seqlen_k=4, dtype=dtype)
    inputs = make_inputs(p, "cpu", 0)
    reference = Reference(p, inputs)
    o, lse = exact(p, inputs)[0].to(inputs.q.dtype), exact_lse(p, inputs).float()
    assert reference.compare(o, lse=lse).ok
    for wrong in (lse.clamp_min(-1e4), lse * 1.4427, lse.nan_to_num(neginf=float("nan"))):
        accuracy = reference.compare(o, lse=wrong)
        assert not accuracy.max_abs_error["lse"] <= accuracy.budget["lse"]
