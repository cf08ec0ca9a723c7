"""lse is held to what a card's own softmax can do: every kernel as exact as that passes, a mistake does not.

The kernel is a model of Hopper's: scores cut off at fp32, powers of two and logarithm as wrong as PTX allows.
"""

from __future__ import annotations

import math

import pytest
import torch
from attention import problem
from torch import Tensor

from flashbench import kernels
from flashbench.kernels import Target, _lse_rounding, _other_units
from flashbench.kernels._inputs import Inputs, make_inputs
from flashbench.kernels._reference import Reference
from flashbench.kernels._yardstick import to_tf32
from flashbench.problem import Problem

SHAPES = [(1, 7, 40), (9, 9, 96), (1, 1, 64), (3, 60, 32), (17, 279, 80)]
"""seqlen_q, seqlen_k, head_dim."""
VALUES = {"normal": (1.0, 1.0), "tiny": (1e-6, 1e-6), "large q": (30.0, 1.0), "huge k": (1.0, 1e4)}
"""What q and k are multiplied by."""
PTX = 2.0**-22


def asked(shape: tuple[int, ...], dtype: str) -> Problem:
    sizes = dict(zip(("seqlen_q", "seqlen_k", "head_dim"), shape, strict=True))
    return problem(batch=1, num_heads=1, num_kv_heads=1, dtype=dtype, causal=False, head_dim_v=16, **sizes)


def given(p: Problem, values: str, seed: int) -> Inputs:
    made = make_inputs(p, "cpu", seed)
    q, k = VALUES[values]
    with torch.no_grad():
        made.q.mul_(q)
        made.k.mul_(k)
    return made


def cut_off(x: Tensor) -> Tensor:
    """fp64 as the fp32 number nearest to it towards 0."""
    near = x.float()
    return torch.where(near.double().abs() > x.abs(), near.nextafter(torch.zeros_like(near)), near)


def on_a_card(p: Problem, x: Inputs, seed: int) -> Tensor:
    """lse as flash-v3 computes it; the instructions' errors are random, or all of them the largest."""
    generator = torch.Generator().manual_seed(seed)

    def wrong(like: Tensor) -> Tensor:
        if seed % 3:
            return torch.full_like(like, PTX if seed % 3 == 1 else -PTX)
        return (2 * torch.rand(like.shape, generator=generator, dtype=torch.float64) - 1) * PTX

    unit = torch.tensor(p.softmax_scale * math.log2(math.e), dtype=torch.float32)
    s = cut_off(x.q.double() @ x.k.double().mT)
    top = s.amax(-1, keepdim=True)
    base = top * unit
    exponents = (s.double() * unit.double() - base.double()).float()  # one multiply-add
    p2 = exponents.double().exp2()
    weights = (p2 * (1 + wrong(p2))).float()
    weights = weights.where(exponents != 0, 1.0)
    exact = weights.sum(-1, keepdim=True).double().log2()
    log2 = (exact + wrong(exact) * exact.abs().clamp_min(1)).float()
    return ((base + log2) * torch.tensor(math.log(2), dtype=torch.float32))[..., 0].detach()


def judged(p: Problem, x: Inputs, lse: Tensor, **how: float) -> tuple[float, float]:
    """(error, budget)."""
    found = Reference(p, x).compare(torch.zeros_like(x.dout), lse=lse, **how)
    return found.max_abs_error["lse"], found.budget["lse"]


@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
@pytest.mark.parametrize("values", VALUES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_no_kernel_is_more_wrong_than_a_card_and_fp32_make_it(
    shape: tuple[int, ...], values: str, dtype: str
) -> None:
    p = asked(shape, dtype)
    for seed in range(24):
        inputs = given(p, values, seed)
        error, budget = judged(p, inputs, on_a_card(p, inputs, seed))
        assert error <= budget, (seed, error, budget)


def test_without_that_room_right_kernels_fail_by_naives_luck(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_lse_rounding, "largest", lambda lse, keys: 0.0)
    p = asked((17, 279, 80), "fp16")
    failed = 0
    for seed in range(24):
        inputs = given(p, "tiny", seed)
        error, budget = judged(p, inputs, on_a_card(p, inputs, seed))
        failed += error > budget
    assert failed > 12


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32"])
@pytest.mark.parametrize("values", ["normal", "tiny", "large q"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_is_off_by_more_is_wrong(shape: tuple[int, ...], values: str, dtype: str) -> None:
    p = asked(shape, dtype)
    inputs = given(p, values, 1)
    [ref] = Reference(p, inputs).expected(gradients=False)["lse"].refs
    room = _lse_rounding.largest(ref, p.seqlen_k)
    without = Reference(p, inputs).expected(gradients=False)["lse"].budget - room
    assert judged(p, inputs, ref.float())[0] <= without + 2.0**-24 * float(ref.abs().max())
    error, budget = judged(p, inputs, (ref + without + 3 * room).float())
    assert error > 1.5 * budget or room < without


MISTAKES = {
    "a key of a thousand": lambda s: s[..., :-1].logsumexp(-1),
    "log2": lambda s: s.logsumexp(-1) / math.log(2),
    "log10": lambda s: s.logsumexp(-1) / math.log(10),
    "no scale": lambda s: (s * 8).logsumexp(-1),
    "no base": lambda s: (s - s.amax(-1, keepdim=True)).logsumexp(-1),
    "fp16 numbers": lambda s: s.logsumexp(-1).half(),
    "a scale off by a thousandth": lambda s: (s * 1.001).logsumexp(-1),
}


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "fp32", "tf32"])
@pytest.mark.parametrize("values", ["normal", "tiny"])
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_still_wrong(mistake: str, values: str, dtype: str) -> None:
    if values == "tiny" and mistake in ("no scale", "no base", "a scale off by a thousandth"):
        return  # of equal scores those are none
    p = asked((40, 1000, 64), dtype)
    inputs = given(p, values, 2)
    s = inputs.q.detach().double() @ inputs.k.detach().double().mT * p.softmax_scale
    error, budget = judged(p, inputs, MISTAKES[mistake](s).float())
    assert error > 3 * budget, (error, budget)


def test_a_single_row_that_lost_one_key_of_a_thousand_is_wrong() -> None:
    p = asked((1, 1000, 64), "fp16")
    for seed in range(10):
        inputs = given(p, "normal", seed)
        s = inputs.q.detach().double() @ inputs.k.detach().double().mT * p.softmax_scale
        lost = s.scatter(-1, s.argsort(-1)[..., 500:501], -math.inf)  # one that is neither large nor small
        error, budget = judged(p, inputs, lost.logsumexp(-1).float())
        assert error > 20 * budget, (seed, error, budget)


@pytest.mark.parametrize("within", [1.3e-3, 6e-3])
def test_what_an_implementation_says_of_its_exponentials_is_room_for_lse_alone(within: float) -> None:
    """Exponentials that are off by up to so much make lse as wrong, and nothing more is let pass."""
    p = asked((40, 1000, 64), "fp16")
    inputs = given(p, "normal", 2)
    s = inputs.q.detach().double() @ inputs.k.detach().double().mT * p.softmax_scale
    right = s.logsumexp(-1)
    for sign in (1, -1):
        lse = (s.exp() * (1 + sign * within)).sum(-1).log().float()
        error, budget = judged(p, inputs, lse)
        assert error > 50 * budget, "of one that says nothing"
        error, budget = judged(p, inputs, lse, exponentials_within=within)
        assert error <= budget
    error, budget = judged(p, inputs, (right + 1.1 * within).float(), exponentials_within=within)
    assert error > budget
    reference, o = Reference(p, inputs), torch.zeros_like(inputs.dout)
    budgets = [reference.compare(o, exponentials_within=e).budget["o"] for e in (0.0, within)]
    assert budgets[0] == budgets[1]


def in_tf32(p: Problem, x: Inputs, factor: float) -> Tensor:
    """lse of a kernel that multiplies q by the factor before it is rounded to TF32."""
    q = to_tf32((x.q.detach().double() * p.softmax_scale * factor).float()).double()
    s = (q @ to_tf32(x.k.detach()).double().mT).float().double() / factor
    return s.logsumexp(-1).float()


def test_tf32_may_round_other_numbers_than_naive(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of small problems naive's largest error is luck, as q and q · scale · log2(e) are rounded otherwise."""
    p = asked((16, 17, 32), "tf32")
    lucky = [(330, math.log2(math.e)), (6, math.log2(math.e)), (395, 1 / p.softmax_scale)]
    for seed, factor in [*lucky, *((seed, math.log2(math.e)) for seed in range(40))]:
        inputs = given(p, "normal", seed)
        error, budget = judged(p, inputs, in_tf32(p, inputs, factor))
        assert error <= budget, (seed, error, budget)
    monkeypatch.setattr(_other_units, "LIMIT", 0)
    for seed, factor in lucky:
        inputs = given(p, "normal", seed)
        error, budget = judged(p, inputs, in_tf32(p, inputs, factor))
        assert error > budget, "without draws"


def test_bf16_products_are_not_those_of_tf32() -> None:
    p = asked((40, 1000, 64), "tf32")
    inputs = given(p, "large q", 0)
    q, k = (x.detach().bfloat16().double() for x in (inputs.q, inputs.k))
    error, budget = judged(p, inputs, (q @ k.mT * p.softmax_scale).logsumexp(-1).float())
    assert error > budget


def test_who_computes_exponentials_in_fp16_says_so() -> None:
    hopper = Target(device="cuda", capability=(9, 0), smem_per_block_bytes=232448)
    ada = Target(device="cuda", capability=(8, 9), smem_per_block_bytes=101376)

    def within(name: str, target: Target = hopper, **changes: object) -> float:
        p = problem(**{"dtype": "fp16", "head_dim": 64, "head_dim_v": 64, "causal": True, **changes})
        said = kernels.get(name).exponentials_within(p, target)
        cut = kernels.get(name).on_card(p, "fwd", target).get("fwd_cut", "")
        assert bool(said) == (".e" in cut), cut
        return said

    for name in ("flash-v3", "flash"):
        assert within(name) == 1.3e-3
        assert within(name, dtype="bf16") == within(name, causal=False) == within(name, head_dim=128) == 0
    assert within("flash", ada) == within("flash-v2") == within("flash", softcap=1.0) == 0
    wide = {"head_dim": 128, "head_dim_v": 128, "dtype": "fp8"}
    for name in ("flash-v3-fp8", "flash-fp8"):
        assert within(name, **wide) == 6e-3
        assert within(name, dtype="fp8") == 0
    assert within("flash-fp8", ada, **wide) == within("flash-v2-fp8", **wide) == 0
