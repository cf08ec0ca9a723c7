"""Other packages that are no exact attention: called by their real signatures, held to their own form."""

from __future__ import annotations

import pytest
import torch
from attention import problem
from peer_packages import APPROXIMATE

from flashbench import kernels
from flashbench.kernels import Target, _linear, _peer
from flashbench.kernels._alternatives import feature
from flashbench.kernels._inputs import make_inputs
from flashbench.kernels._reference import Reference

GPU = Target(device="cuda:0", capability=(9, 0))
WIDE = {"head_dim": 64, "head_dim_v": 64, "num_kv_heads": 2, "dtype": "fp16"}


@pytest.fixture(autouse=True)
def forgotten() -> None:
    _peer._imported.cache_clear()
    yield
    _peer._imported.cache_clear()


@pytest.mark.parametrize("name", APPROXIMATE)
def test_it_is_marked_and_says_how_to_get_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    row = kernels.get(name)
    assert not row.exact
    assert row.summary.startswith("not exact: ")
    assert "is not installed: pip install " in (row.why_unavailable(GPU) or "")
    APPROXIMATE[name](monkeypatch)
    assert row.why_unavailable(GPU) is None
    assert row.describe(problem(), "fwd", GPU)["package"].split()[1] in ("0.6.0", "1.0.6")


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize("shape", [{}, {"causal": False, "seqlen_q": 33, "seqlen_k": 300}, {"dtype": "bf16"}])
def test_sageattention_is_held_to_what_eight_bits_do(
    shape: dict, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    APPROXIMATE["sageattention"](monkeypatch)
    p = problem(**{**WIDE, "seqlen_q": 200, "seqlen_k": 200, "layout": layout, **shape})
    row, inputs = kernels.get("sageattention"), make_inputs(p, "cpu", 1)
    assert row.why_unsupported(p, "fwd", GPU) is None
    before = inputs.k.clone()
    call = row.prepare(p, inputs)
    o = call()
    assert torch.equal(inputs.k, before)  # release 1.0 subtracts the mean of what it is given
    assert row.own_check is not None
    found = row.own_check(p, inputs, o, None)
    assert found.ok
    assert found.max_abs_error["o"] > found.budget["o"] / 50  # the bound is no matter of another size
    assert Reference(p, inputs).apart(o)["relative"] < 0.03
    assert torch.allclose(call().float(), o.float(), atol=found.budget["o"])
    assert not row.own_check(p, inputs, o * 1.2, None).ok
    assert not row.own_check(p, inputs, o.roll(1, 2), None).ok


def test_sageattention_refuses_what_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    APPROXIMATE["sageattention"](monkeypatch)
    row = kernels.get("sageattention")
    said = "sageattention's causal mask is of queries and keys of one length"
    assert row.why_unsupported(problem(seqlen_q=8), "fwd", GPU) == said
    assert (
        row.why_unsupported(problem(head_dim_v=4), "fwd", GPU)
        == "sageattention's values are as wide as its keys"
    )
    assert row.why_unsupported(problem(), "bwd", GPU) == "sageattention has no backward"
    assert row.why_unsupported(problem(window=(3, 0)), "fwd", GPU) == "it does not take window"
    p = problem(head_dim=32, head_dim_v=32, dtype="fp16")
    with pytest.raises(kernels.Refusal, match=r"1.0.6 refuses it: headdim should be in \[64, 96, 128\]"):
        row.prepare(p, make_inputs(p, "cpu", 0))


def fla_run(p, inputs):
    leaves = inputs.detached(grad=True)
    o = kernels.get("fla-linear").prepare(p, leaves)()
    return o.detach(), torch.autograd.grad(o, leaves.leaves, leaves.dout)


@pytest.mark.parametrize("layout", ["bhsd", "bshd"])
@pytest.mark.parametrize(
    ("dtype", "n"),
    [("bf16", 1), ("bf16", 130), ("fp16", 64), pytest.param("bf16", 2048, marks=pytest.mark.slow)],
)
def test_linear_attention_and_its_gradients_are_held_to_the_plain_form(
    dtype: str, n: int, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    APPROXIMATE["fla-linear"](monkeypatch)
    heads = 1 if n > 1000 else 4
    shape = {"seqlen_q": n, "seqlen_k": n, "head_dim": 64, "head_dim_v": 32, "num_heads": heads}
    p = problem(**shape, num_kv_heads=heads, batch=2, dtype=dtype, layout=layout)
    row, inputs = kernels.get("fla-linear"), make_inputs(p, "cpu", 1)
    assert row.why_unsupported(p, "bwd", GPU) is None
    o, gradients = fla_run(p, inputs)
    assert row.own_check is not None
    found = row.own_check(p, inputs, o, gradients)
    assert set(found.max_abs_error) == {"o", "dq", "dk", "dv"}
    assert found.ok, found
    for number, name in enumerate(("dq", "dk", "dv")):
        if n == 1 and name != "dv":
            continue  # one key has the whole share, whatever q and k are
        wrong = [x * 1.3 if i == number else x for i, x in enumerate(gradients)]
        assert not row.own_check(p, inputs, o, wrong).ok, name
    assert not row.own_check(p, inputs, o * 1.1, gradients).ok
    assert set(row.own_check(p, inputs, o, None).budget) == {"o"}
    with pytest.raises(ValueError, match=r"dk is torch\.float32 .* is wanted"):
        row.own_check(p, inputs, o, (gradients[0], gradients[1].float(), gradients[2]))


def test_the_plain_gradients_are_those_of_autograd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_linear, "AT_ONCE", 3 * 5 * 21)  # several rows at a time, the last fewer
    p = problem(seqlen_q=21, seqlen_k=21)
    inputs = make_inputs(p, "cpu", 3)
    q, k, v = (getattr(inputs, name).double().requires_grad_() for name in "qkv")
    weights = (feature(q) @ feature(k).mT).tril()
    o = weights / weights.sum(-1, keepdim=True) @ v
    wanted = torch.autograd.grad(o, (q, k, v), inputs.dout.double())
    found = _linear.plain_gradients(inputs, 5, torch.float64)
    for name, x in zip("qkv", wanted, strict=True):
        assert torch.allclose(found[name], x.flatten(0, 1)[:5], atol=1e-12)


def test_linear_attention_refuses_what_it_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    APPROXIMATE["fla-linear"](monkeypatch)
    row, said = kernels.get("fla-linear"), []
    for changes in ({"causal": False}, {"seqlen_q": 8}, {"num_kv_heads": 2}, {}):
        reason = row.why_unsupported(problem(**changes), "bwd", GPU) or ""
        said.append(reason.removeprefix("flash-linear-attention "))
    assert said == [
        "sees earlier positions only: causal", "mixes one sequence: seqlen_q is seqlen_k",
        "flash-linear-attention's operator has as many K/V heads as query heads",
        "is measured in fp16 and bf16: it multiplies fp32 in TF32",
    ]  # fmt: skip


@pytest.mark.gpu
@pytest.mark.parametrize("name", APPROXIMATE)
def test_on_a_gpu_it_is_right_or_says_why_not(name: str) -> None:
    from flashbench import environment

    p = problem(dtype="bf16", seqlen_q=200, seqlen_k=200, head_dim=64, head_dim_v=64)
    target, row = environment.target("cuda:0"), kernels.get(name)
    pass_ = "fwd" if name == "sageattention" else "bwd"
    reason = row.why_unavailable(target) or row.why_unsupported(p, pass_, target)
    if reason is not None:
        assert len(reason.split()) > 3
        return
    inputs = make_inputs(p, "cuda:0", seed=2).detached(grad=pass_ != "fwd")
    o = row.prepare(p, inputs)()
    gradients = torch.autograd.grad(o, inputs.leaves, inputs.dout) if pass_ != "fwd" else None
    assert row.own_check is not None
    assert row.own_check(p, inputs.detached(grad=False), o.detach(), gradients).ok


def test_an_older_release_is_told_that_rows_come_first(monkeypatch: pytest.MonkeyPatch) -> None:
    module, seen = APPROXIMATE["fla-linear"](monkeypatch), []
    new = module.chunk_linear_attn

    def chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True,
                          head_first=True):  # fmt: skip
        seen.append(head_first)
        return new(q, k, v, scale)

    module.chunk_linear_attn = chunk_linear_attn
    p = problem(dtype="bf16")
    kernels.get("fla-linear").prepare(p, make_inputs(p, "cpu", 0))
    assert seen == [False]
