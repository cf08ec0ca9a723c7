"""naive is attention op by op in the tensors' dtype; causal is bottom-right; rows without keys are 0."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import torch
from attention import FEATURES, SHAPES, exact, featured, problem, run

from flashbench import kernels
from flashbench.errors import SpecError
from flashbench.kernels import Target
from flashbench.kernels._inputs import make_inputs
from flashbench.kernels._reference import Reference

NAIVE = kernels.get("naive")


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_output_and_gradients_are_those_of_attention(name: str, causal: bool, poisoned: None) -> None:
    p = problem(causal=causal, **SHAPES[name])
    inputs = make_inputs(p, "cpu", seed=1)
    for mine, theirs in zip(run(NAIVE, p, inputs), exact(p, inputs), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=2e-6)


def pairs() -> list[tuple[str, ...]]:
    found: list[tuple[str, ...]] = [(name,) for name in FEATURES]
    for pair in itertools.combinations(FEATURES, 2):
        try:
            featured(*pair)
        except SpecError:
            continue
        found.append(pair)
    return found


@pytest.mark.parametrize("names", pairs(), ids="+".join)
@pytest.mark.parametrize("causal", [False, True])
def test_features_alone_and_in_pairs(names: tuple[str, ...], causal: bool, poisoned: None) -> None:
    lengths = {} if "varlen" in names else {"seqlen_q": 14, "seqlen_k": 9}
    p = featured(*names, causal=causal, num_kv_heads=2, head_dim_v=5, **lengths)
    inputs = make_inputs(p, "cpu", seed=1)
    for mine, theirs in zip(run(NAIVE, p, inputs), exact(p, inputs), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=1e-5)


@pytest.mark.parametrize("name", FEATURES)
@pytest.mark.parametrize("dtype", ["bf16", "fp16", "tf32"])
def test_the_yardstick_runs_naives_ops(name: str, dtype: str) -> None:
    p = featured(name, dtype=dtype, num_kv_heads=2)
    inputs = make_inputs(p, "cpu", seed=1)
    o, *gradients = run(NAIVE, p, inputs)
    accuracy = Reference(p, inputs).compare(o, gradients)
    assert accuracy.ok
    if dtype == "tf32":  # naive's products are fp32 on a CPU
        return
    for tensor, error in accuracy.max_abs_error.items():
        # half of the budget is the yardstick's own error, the rest what rounding does
        assert error <= 0.75 * accuracy.budget[tensor], tensor


def test_causal_is_bottom_right() -> None:
    p = problem(batch=1, num_heads=1, num_kv_heads=1, seqlen_q=2, seqlen_k=5)
    inputs = make_inputs(p, "cpu", seed=0)
    o = NAIVE.prepare(p, inputs)()
    changed = inputs.v.clone()
    changed[:, :, 4] += 1  # only the last query sees the last key
    moved = (NAIVE.prepare(p, replace(inputs, v=changed))() - o).abs().sum(-1).flatten()
    assert moved[0] == 0
    assert moved[1] > 0


def test_rows_without_keys_are_zero_and_take_no_gradient() -> None:
    p = problem(seqlen_q=9, seqlen_k=4)
    o, dq, dk, dv = run(NAIVE, p, make_inputs(p, "cpu", seed=0))
    assert not o[:, :, :5].any()
    assert not dq[:, :, :5].any()
    assert all(tensor.isfinite().all() for tensor in (o, dq, dk, dv))


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_scores_stay_in_the_tensors_dtype(dtype: str) -> None:
    # up-casting would be more exact: naive must differ from attention by what its dtype loses
    p = problem(dtype=dtype, seqlen_q=64, seqlen_k=64, causal=False)
    inputs = make_inputs(p, "cpu", seed=0)
    q, k, v = inputs.leaves
    scores = (q * p.softmax_scale) @ k.transpose(-2, -1)
    assert scores.dtype == q.dtype
    assert torch.equal(NAIVE.prepare(p, inputs)(), scores.softmax(-1) @ v)


def test_autograd_keeps_the_probabilities_and_not_the_scores() -> None:
    p = problem(seqlen_q=32, seqlen_k=32)
    call = NAIVE.prepare(p, make_inputs(p, "cpu", seed=0).detached(grad=True))
    kept: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.is_floating_point():
            kept[tensor.untyped_storage().data_ptr()] = tensor.numel()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        call()
    scores = p.batch * p.num_heads * p.seqlen_q * p.seqlen_k
    assert list(kept.values()).count(scores) == 1


def test_the_mask_is_one_byte_per_score_of_one_head() -> None:
    target = Target()
    assert NAIVE.prepared_bytes(problem(seqlen_q=100, seqlen_k=300), "fwd", target) == 100 * 300
    assert NAIVE.prepared_bytes(problem(seqlen_q=300, seqlen_k=100), "fwd", target) == 100 * 100
    assert NAIVE.prepared_bytes(problem(causal=False), "fwd", target) == 0
    assert NAIVE.prepared_bytes(problem(alibi=True, causal=False), "fwd", target) == 4 * 16 * 16 * 4
    assert NAIVE.prepared_bytes(problem(dropout_p=0.5, causal=False), "fwd", target) == 2 * 4 * 16 * 16
    packed = featured("varlen", "sinks")
    assert NAIVE.prepared_bytes(packed, "fwd", target) == 5 * 9 + 16 * 16 + 1 * 3


def test_tf32_needs_a_gpu_and_is_switched_on_for_its_cell_only() -> None:
    assert NAIVE.why_unsupported(problem(dtype="tf32"), "fwd", Target())
    assert NAIVE.why_unsupported(problem(dtype="tf32"), "fwd", Target(device="cuda:0")) is None
    for dtype, allowed in (("tf32", True), ("fp32", False), ("bf16", False)):
        with NAIVE.context(problem(dtype=dtype)):
            assert torch.backends.cuda.matmul.allow_tf32 is allowed
        assert torch.backends.cuda.matmul.allow_tf32 is False


@pytest.mark.gpu
def test_fp32_is_ieee_and_tf32_is_not() -> None:
    errors = {}
    for dtype in ("fp32", "tf32"):
        p = problem(dtype=dtype, seqlen_q=256, seqlen_k=256, head_dim=64, head_dim_v=64)
        inputs = make_inputs(p, "cuda:0", seed=0)
        o = run(NAIVE, p, inputs)[0]
        errors[dtype] = float((o.double() - exact(p, inputs)[0]).abs().max())
    assert errors["fp32"] < 1e-5
    assert 1e-4 < errors["tf32"] < 1e-2
