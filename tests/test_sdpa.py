"""sdpa runs what torch picks and says what it was; a forced backend runs or refuses in a sentence."""

from __future__ import annotations

import pytest
import torch
from attention import FEATURES, SHAPES, exact, featured, problem, run

from flashbench import kernels
from flashbench.kernels import Target
from flashbench.kernels._inputs import make_inputs
from flashbench.kernels.sdpa import TAKEN

CPU = Target()
NAMES = ("sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient", "sdpa-math")


def refusal(name: str, p, pass_: str = "bwd", target: Target = CPU) -> str | None:
    row = kernels.get(name)
    return row.why_unavailable(target) or row.why_unsupported(p, pass_, target)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_answers_right_or_says_why_not(name: str, shape: str, causal: bool) -> None:
    p = problem(causal=causal, **SHAPES[shape])
    reason = refusal(name, p)
    if reason is not None:
        assert len(reason.split()) > 3
        return
    inputs = make_inputs(p, "cpu", seed=2)
    for mine, theirs in zip(run(kernels.get(name), p, inputs), exact(p, inputs), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=2e-6)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("name", NAMES)
def test_a_feature_is_computed_or_refused(name: str, feature: str, causal: bool) -> None:
    p = featured(feature, causal=causal)
    reason = refusal(name, p)
    if reason is not None:
        assert len(reason.split()) > 3
        return
    taken = TAKEN[name.removeprefix("sdpa").removeprefix("-") or None]
    assert feature in taken | {"deterministic"}
    inputs = make_inputs(p, "cpu", seed=2)
    for mine, theirs in zip(run(kernels.get(name), p, inputs), exact(p, inputs), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=2e-6)


def test_the_same_bits_are_promised_where_nothing_is_added_with_atomics() -> None:
    p, gpu = problem(deterministic=True, dtype="bf16"), Target(device="cuda:0", capability=(9, 0))
    for name in ("sdpa", "sdpa-flash", "sdpa-cudnn", "sdpa-efficient"):
        assert kernels.get(name).why_unsupported(p, "bwd", gpu) == "it does not take deterministic"
    assert kernels.get("sdpa").why_unsupported(p, "fwd", gpu) is None
    assert kernels.get("sdpa-math").why_unsupported(p, "bwd", gpu) is None


@pytest.mark.parametrize(("lengths", "kind"), [((5, 19), "is_causal"), ((19, 5), "is_causal")], ids=str)
@pytest.mark.parametrize("name", ["sdpa", "sdpa-flash", "sdpa-math"])
def test_top_left_is_torchs_own_causal(name: str, lengths: tuple[int, int], kind: str) -> None:
    p = problem(seqlen_q=lengths[0], seqlen_k=lengths[1], alignment="top-left")
    assert refusal(name, p) is None
    assert kernels.get(name).describe(p, "fwd", CPU)["causal_mask"] == kind
    inputs = make_inputs(p, "cpu", seed=2)
    for mine, theirs in zip(run(kernels.get(name), p, inputs), exact(p, inputs), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=2e-6)


@pytest.mark.parametrize("bias", ["bhqk", "1hqk", "b1qk", "11qk", "bh1k", "bhq1", "1111"])
@pytest.mark.parametrize("name", ["sdpa", "sdpa-math"])
def test_a_bias_is_torchs_additive_mask_with_its_gradient(name: str, bias: str) -> None:
    p = problem(bias=bias, causal=False, seqlen_k=19)
    if reason := refusal(name, p):
        assert "broadcast over keys" in reason
        return
    inputs = make_inputs(p, "cpu", seed=2)
    for mine, theirs in zip(run(kernels.get(name), p, inputs), exact(p, inputs), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=4e-6)


def test_only_these_refuse_on_a_cpu() -> None:
    square, wide = problem(), problem(head_dim_v=24)
    assert {name for name in NAMES if refusal(name, square)} == {"sdpa-cudnn", "sdpa-efficient"}
    assert {name for name in NAMES if refusal(name, wide)} == {"sdpa-cudnn", "sdpa-efficient", "sdpa-flash"}


@pytest.mark.parametrize("name", NAMES)
def test_rows_without_keys_are_refused_because_torch_gives_nan(name: str) -> None:
    row = kernels.get(name)
    assert "5 query rows" in (row.why_unsupported(problem(seqlen_q=21), "fwd", CPU) or "")
    assert row.why_unsupported(problem(seqlen_q=21, causal=False), "fwd", CPU) is None


@pytest.mark.parametrize(
    ("name", "shape", "ran"),
    [
        ("sdpa", "square", "flash"),
        ("sdpa", "wide values", "math"),
        ("sdpa-flash", "square", "flash"),
        ("sdpa-math", "square", "math"),
        ("sdpa-math", "fewer queries", "math"),
    ],
)
def test_backend_is_what_really_ran(name: str, shape: str, ran: str) -> None:
    row, p = kernels.get(name), problem(**SHAPES[shape])
    inputs = make_inputs(p, "cpu", seed=0)
    with row.context(p):
        assert row.backend(row.prepare(p, inputs)) == ran


def test_forcing_a_backend_ends_with_the_context() -> None:
    row, p = kernels.get("sdpa-math"), problem()
    inputs = make_inputs(p, "cpu", seed=0)
    call = row.prepare(p, inputs)
    with row.context(p):
        assert row.backend(call) == "math"
    assert row.backend(call) == "flash"


@pytest.mark.parametrize("name", ["sdpa", "sdpa-math"])
def test_the_mask_of_a_rectangle_is_made_once(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row, p = kernels.get(name), problem(seqlen_q=5)
    inputs = make_inputs(p, "cpu", seed=0)
    call = row.prepare(p, inputs)
    assert row.describe(p, "fwd", CPU)["causal_mask"] == "dense"
    assert row.prepared_bytes(p, "fwd", CPU) == 5 * 16
    monkeypatch.setattr(torch, "ones", None)
    monkeypatch.setattr(torch, "tril", None)
    with row.context(p):
        call()


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_gpu_backends_answer_right_or_say_why_not(name: str, shape: str, causal: bool) -> None:
    from flashbench import environment
    from flashbench.kernels._reference import Reference

    p = problem(causal=causal, dtype="bf16", **SHAPES[shape])
    target = environment.target("cuda:0")
    reason = refusal(name, p, target=target)
    if reason is not None:
        assert len(reason.split()) > 3
        return
    inputs = make_inputs(p, "cuda:0", seed=2)
    o, *gradients = run(kernels.get(name), p, inputs)
    accuracy = Reference(p, inputs).compare(o, gradients)
    assert accuracy.ok, accuracy


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "part"), [("sdpa-flash", "flash"), ("sdpa-cudnn", "cudnn"), ("sdpa-efficient", "fmha")]
)
def test_the_kernel_that_runs_is_the_forced_backends(name: str, part: str) -> None:
    from torch.profiler import ProfilerActivity, profile

    p = problem(dtype="bf16", seqlen_q=256, seqlen_k=256, head_dim=64, head_dim_v=64)
    row = kernels.get(name)
    inputs = make_inputs(p, "cuda:0", seed=0)
    with row.context(p):
        call = row.prepare(p, inputs)
        assert row.backend(call) == name.removeprefix("sdpa-")
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
            call()
            torch.cuda.synchronize()
    ran = [event.key.lower() for event in seen.key_averages() if event.device_type.name == "CUDA"]
    assert any(part in key for key in ran), ran
