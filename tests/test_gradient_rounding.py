"""Gradients are held to what FlashAttention's backward can do: a right one passes, a mistake does not.

Right is a model of it (``backward_model``) whose o is stored in its dtype and whose probabilities are made
again of scores and lse in fp32, by powers of two as wrong as PTX allows.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from attention import problem
from backward_model import ALL, Kernel
from drawn import Scaled
from torch import Tensor

from flashbench.kernels import _exact, _other_units, _reference
from flashbench.kernels import _gradient_rounding as rounding
from flashbench.kernels._gradient_rounding import VARIANCE
from flashbench.kernels._inputs import Inputs, make_inputs
from flashbench.kernels._part import Part
from flashbench.kernels._reference import Reference
from flashbench.record import Accuracy

EXACT = {"fp32": (False, True), "tf32": (True,), "fp16": (False,), "bf16": (False,)}
"""By dtype, kernels that are right: of TF32 those alone whose rows of dS sum to 0."""


def drawn(dtype: str, number: int, longest: int = 40) -> tuple[Scaled, Inputs]:
    """A random small problem; with scores up to 500, at times."""
    r = random.Random(f"{dtype} {number}")
    few = 16 if dtype in ("fp32", "tf32") else 2
    kv_heads, group, dim = r.choice((1, 2)), r.choice((1, 1, 2, 3)), r.choice((1, 3, 16, 32, 64))
    p = Scaled(
        batch=r.choice((1, 2)), num_heads=kv_heads * group, num_kv_heads=kv_heads,
        seqlen_q=r.randint(few, longest), seqlen_k=r.randint(few, longest),
        head_dim=dim, head_dim_v=r.choice((dim, 2, 16, 64)), dtype=dtype, causal=r.random() < 0.4,
        window=r.choice(((-1, -1), (-1, -1), (r.randint(0, 9), r.choice((-1, 0, 3))))),
        softcap=r.choice((0, 0, 0, 1.0, 5.0, 50.0)), alibi=r.random() < 0.2, sinks=r.random() < 0.2,
        dropout_p=r.choice((0, 0, 0, 0.01, 0.3, 0.9)), scale=r.choice((0, 0, 1.0, 0.5, 0.01, 1e-5, 2.0)),
    )  # fmt: skip
    x = make_inputs(p, "cpu", number)
    return p, replace(x, q=x.q * r.choice((1, 1, 30, 1e-6)))


def over(accuracy: Accuracy, names: str = "dq dk dv dsinks") -> float:
    """The largest error of the gradients over its budget."""
    pairs = [(accuracy.max_abs_error[n], accuracy.budget[n]) for n in names.split() if n in accuracy.budget]
    return max(error / budget if error else 0.0 for error, budget in pairs)


@pytest.mark.parametrize("dtype", EXACT)
def test_a_right_backward_is_within_the_bound(dtype: str) -> None:
    for number in range(10):
        p, x = drawn(dtype, number)
        for exact in EXACT[dtype]:
            found = over(Reference(p, x).compare(*Kernel(exact=exact)(p, x, number)))
            assert found <= 1, (number, exact, p, found)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", EXACT)
def test_a_right_backward_is_within_the_bound_a_thousand_times(dtype: str) -> None:
    for number in range(10, 1010):
        p, x = drawn(dtype, number)
        for exact in EXACT[dtype]:
            found = over(Reference(p, x).compare(*Kernel(exact=exact)(p, x, number)))
            assert found <= 1, (number, exact, p, found)


LUCKY = {"fp16": (62, 76, 82), "bf16": (25, 75, 96), "fp32": (3, 66, 73, 76), "tf32": (88,)}
"""Numbers of problems whose right gradients were over naive's own errors alone."""


@pytest.mark.parametrize("dtype", EXACT)
def test_without_that_room_right_ones_fail(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if dtype == "tf32":
        monkeypatch.setattr(_other_units, "LIMIT", 0)  # its room is that of numbers rounded otherwise
    else:
        monkeypatch.setattr(_reference, "_largest_deviation", lambda variances: 0.0)
    for number in LUCKY[dtype]:
        p, x = drawn(dtype, number)
        assert over(Reference(p, x).compare(*Kernel(exact=dtype == "tf32")(p, x, number))) > 1, number


MISTAKES = ("no delta", "no scale", "mask forgotten", "dP not dropped", "dP not scaled", "sink's sign")
OVER = {"fp16": 100.0, "bf16": 10.0, "fp32": 1e5, "tf32": 100.0}
"""How many times the bound the smallest of these mistakes is, at least, where scores are of usual size."""


@pytest.mark.parametrize("dtype", EXACT)
@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_still_wrong(mistake: str, dtype: str) -> None:
    more = {"sinks": mistake == "sink's sign", "dropout_p": 0.3 * mistake.startswith("dP")}
    p = problem(batch=1, num_heads=2, seqlen_q=96, seqlen_k=96, num_kv_heads=1, head_dim=64, head_dim_v=64,
                dtype=dtype, **more)  # fmt: skip
    # where rows of dS are made to sum to 0, that is what delta is for
    exact = EXACT[dtype][-1] and mistake != "no delta"
    for seed in range(2):
        x = make_inputs(p, "cpu", seed)
        reference = Reference(p, x)
        assert reference.compare(*Kernel(exact=EXACT[dtype][-1])(p, x)).ok
        wrong = reference.compare(*Kernel(exact=exact, mistake=mistake)(p, x))
        names = {"sink's sign": "dsinks"}.get(mistake, "dq dk").split()
        assert min(over(wrong, name) for name in names) > OVER[dtype], (seed, wrong)


@pytest.mark.parametrize(("dtype", "times"), [("fp16", 10.0), ("bf16", 1.5), ("fp32", 1e4), ("tf32", 20.0)])
def test_a_part_of_a_thousand_left_out_of_dk_is_wrong(dtype: str, times: float) -> None:
    p = problem(batch=1, num_heads=1, num_kv_heads=1, seqlen_q=1000, seqlen_k=1000, head_dim=64,
                head_dim_v=64, dtype=dtype)  # fmt: skip
    x = make_inputs(p, "cpu", 3)
    reference = Reference(p, x)
    for mistake in ("a key's dk lost", "a query lost in dk"):
        wrong = reference.compare(*Kernel(exact=EXACT[dtype][-1], mistake=mistake)(p, x))
        assert over(wrong, "dk") > times
        assert over(wrong, "dq dv") <= 1


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_ordinary_problems_are_held_nearly_as_by_naive_alone(
    dtype: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for length, causal in ((64, False), (256, True), (256, False)):
        p = problem(batch=1, num_heads=2, num_kv_heads=2, seqlen_q=length, seqlen_k=length, head_dim=64,
                    head_dim_v=64, dtype=dtype, causal=causal)  # fmt: skip
        x = make_inputs(p, "cpu", 1)
        with_room = Reference(p, x).expected(gradients=True)
        with monkeypatch.context() as patch:
            patch.setattr(_reference, "_largest_deviation", lambda variances: 0.0)
            without = Reference(p, x).expected(gradients=True)
        assert with_room["o"].budget == without["o"].budget
        assert with_room["dv"].budget == without["dv"].budget
        for name in ("dq", "dk"):
            assert 1 < with_room[name].budget / without[name].budget < (1.2 if causal else 1.02), name


FEATURES = [
    {}, {"softcap": 1.5}, {"alibi": True, "window": (9, 3)}, {"sinks": True, "dropout_p": 0.3},
    {"bias": "bhqk"}, {"bias": "1hqk", "sinks": True}, {"bias": "bhq1"}, {"bias": "1h1k"},
    {"bias": "bhqk", "softcap": 2.0, "sinks": True, "dropout_p": 0.2},
]  # fmt: skip


@pytest.mark.parametrize("changes", FEATURES, ids=str)
def test_variances_are_those_of_errors_that_are_simulated(changes: dict) -> None:
    """Of o, lse and exponentials that are wrong at random, many times, and gradients in fp64."""
    p = problem(batch=2, num_heads=4, num_kv_heads=2, seqlen_q=12, seqlen_k=17, causal=False, **changes)
    x = make_inputs(p, "cpu", 4)
    part = Part(p, x, seed=0, all_rows=True)
    every = torch.arange(p.seqlen_q)
    told = _exact.rows(part, ALL, every, gradients=True) | _exact.columns(part, ALL)
    squares = {name: torch.zeros_like(told[name]) for name in told if not name.startswith(VARIANCE)}
    generator = torch.Generator().manual_seed(0)
    simulated = _Simulated(part)
    for _ in range(600):
        for name, found in simulated.gradients(generator).items():
            squares[name] += (found - told[name]).square() / 600
    for name, found in squares.items():
        assert float(found.mean()) == pytest.approx(float(told[VARIANCE + name].mean()), rel=0.1, abs=0), name
        assert float(found.max()) == pytest.approx(float(told[VARIANCE + name].max()), rel=0.35, abs=0), name


class _Simulated:
    """Gradients of P times 1 + d + e and of delta + b, each error of the variance that is told of it."""

    def __init__(self, part: Part) -> None:
        self.part, terms = part, part.terms
        self.q, self.k, self.v, self.dout = (t.double() for t in (part.q, part.k, part.v, part.dout))
        at = part.where(ALL, part.rows, part.columns)
        s = torch.einsum("hgid,hjd->hgij", self.q, self.k) * part.problem.softmax_scale
        self.s, self.slope, _ = terms.apply(s, at)
        self.sink = terms.sinks(at.heads, torch.float64)
        self.kept = terms.kept(at)
        self.lse = _exact.with_sink(part, ALL, self.s.logsumexp(-1))
        self.p = (self.s - self.lse[..., None]).exp()
        self.o = torch.einsum("hgij,hjd->hgid", terms.drop(self.p, self.kept), self.v)
        self.of_delta, self.of_lse = rounding.of_rows(part, ALL, at, self.o, self.lse)
        self.of_scores = rounding.of_scores(part, self.s)
        self.of_dp = rounding.of_products(part, self.dout, self.v, self.kept)

    def gradients(self, generator: torch.Generator) -> dict[str, Tensor]:
        part, p = self.part, self.part.problem

        def wrong(variance: Tensor) -> Tensor:
            return torch.randn(variance.shape, generator=generator, dtype=torch.float64) * variance.sqrt()

        delta = (self.o * self.dout).sum(-1) + wrong(self.of_delta)
        of_lse = wrong(self.of_lse)
        weights = self.p * (1 + of_lse[..., None] + wrong(self.of_scores))
        dp = part.terms.drop(torch.einsum("hgid,hjd->hgij", self.dout, self.v), self.kept)
        dp = dp + wrong(self.of_dp)
        ds = weights * (dp - delta[..., None])
        after = ds if self.slope is None else ds * self.slope
        found = {
            "dq": torch.einsum("hgij,hjd->hgid", after, self.k) * p.softmax_scale,
            "dk": torch.einsum("hgij,hgid->hjd", after, self.q) * p.softmax_scale,
            "dv": torch.einsum("hgij,hgid->hjd", part.terms.drop(weights, self.kept), self.dout),
        }
        if p.bias:
            shared = [dim for dim in (2, 3) if p.bias[dim] == "1"]
            found["dbias"] = ds.sum(shared, keepdim=True) if shared else ds
        if self.sink is not None:
            p_sink = (self.sink[..., 0] - self.lse).exp()
            own = rounding.of_scores(part, self.sink[..., 0].expand_as(self.lse))
            found["dsinks"] = -p_sink * (1 + of_lse + wrong(own)) * delta
        return found


def test_a_sinks_probability_below_the_smallest_number_of_fp32_may_be_that() -> None:
    p = problem(batch=1, num_heads=2, num_kv_heads=1, seqlen_q=24, seqlen_k=24, head_dim=64, head_dim_v=64,
                dtype="fp16", sinks=True)  # fmt: skip
    made = make_inputs(p, "cpu", 0)
    x = replace(made, sinks=made.sinks - 150)  # its P is about e^-153
    o, gradients = Kernel()(p, x)
    reference, smallest = Reference(p, x), 2.0**-126
    delta = (o.double() * x.dout.double()).sum((0, 2, 3))
    for times, right in ((1.0, True), (1e3, False)):
        held = [*gradients[:3], (-smallest * times * delta).float()]
        assert reference.compare(o, held).ok == right
