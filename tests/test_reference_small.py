"""Of a few numbers naive's largest error is luck: in 16 bits too right kernels pass, wrong ones do not."""

from __future__ import annotations

import math

import pytest
from attention import problem
from torch import Tensor

from flashbench.kernels import _other_units
from flashbench.kernels._inputs import Inputs, make_inputs
from flashbench.kernels._reference import Reference
from flashbench.problem import Problem

SHAPES = [(2, 2, 3, 2, 2), (5, 18, 1, 65, 1), (1, 18, 3, 2, 2)]
"""seqlen_q, seqlen_k, head_dim, head_dim_v, heads."""


def small(shape: tuple[int, ...], dtype: str) -> Problem:
    sizes = dict(zip(("seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "num_heads"), shape, strict=True))
    return problem(batch=1, num_kv_heads=shape[4], dtype=dtype, causal=False, **sizes)


def as_a_kernel(
    p: Problem, x: Inputs, *, scale: float = 1.0, keys: int = 0
) -> tuple[Tensor, list[Tensor], Tensor]:
    """o, gradients and lse with sums in fp32, P and dS in 16 bits and powers of two, as flash-v2's.

    scale: scores times this; keys: so many of the last are left out.
    """
    q, k, v, dout = (t.float() for t in (x.q, x.k, x.v, x.dout))
    to, by, last = x.q.dtype, p.softmax_scale * scale, k.shape[2] - keys
    s = (q @ k.mT) * (by / math.log(2))
    s[..., last:] = -math.inf
    top = s.amax(-1, keepdim=True)
    sums = (s - top).exp2().sum(-1, keepdim=True)
    lse = top + sums.log2()
    weights = (s - lse).exp2()
    o = (weights.to(to).float() @ v).to(to)
    delta = (o.float() * dout).sum(-1, keepdim=True)
    ds = (weights * (dout @ v.mT - delta)).to(to).float()
    gradients = (ds @ k * by, ds.mT @ q * by, weights.to(to).float().mT @ dout)
    return o, [gradient.to(to) for gradient in gradients], lse[..., 0] * math.log(2)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_right_kernel_passes_whatever_the_seed(shape: tuple[int, ...], dtype: str) -> None:
    p = small(shape, dtype)
    for seed in range(40):
        inputs = make_inputs(p, "cpu", seed)
        found = Reference(p, inputs).compare(*as_a_kernel(p, inputs))
        assert found.ok, (seed, found.max_abs_error, found.budget)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_a_wrong_kernel_does_not(dtype: str) -> None:
    p = small((5, 18, 3, 2, 2), dtype)
    for seed in range(20):
        inputs = make_inputs(p, "cpu", seed)
        for mistake in ({"keys": 1}, {"scale": 1.05}):
            found = Reference(p, inputs).compare(*as_a_kernel(p, inputs, **mistake))
            assert not found.ok, (seed, mistake)
            assert found.max_abs_error["lse"] > 100 * found.budget["lse"], "an fp32 number, held as one"


def test_tensors_of_many_numbers_are_held_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    p = problem(seqlen_q=64, seqlen_k=80, head_dim=32, head_dim_v=32, dtype="fp16")
    inputs = make_inputs(p, "cpu", 1)
    drawn = {name: x.budget for name, x in Reference(p, inputs).expected(gradients=True).items()}
    monkeypatch.setattr(_other_units, "LIMIT", 0)
    assert drawn == {name: x.budget for name, x in Reference(p, inputs).expected(gradients=True).items()}
