"""The oracle is fp64 attention on the rows it compares; right implementations pass, wrong ones do not."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from attention import SHAPES, exact, problem, run
from torch.utils._python_dispatch import TorchDispatchMode

from flashbench import kernels
from flashbench.kernels import _other_units, _part, _reference, _yardstick
from flashbench.kernels._inputs import Inputs, make_inputs
from flashbench.kernels._part import SAMPLED_ROWS, sample_rows
from flashbench.kernels._reference import Reference, rounding
from flashbench.kernels._yardstick import to_tf32
from flashbench.problem import Problem
from flashbench.record import Accuracy

NAMES = ("o", "dq", "dk", "dv")


class ProductsRoundedOnce(TorchDispatchMode):
    """Matrix products in fp64, rounded once: a library's order of additions depends on sizes and the CPU."""

    number = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func not in (torch.ops.aten.mm.default, torch.ops.aten.bmm.default):
            return func(*args, **(kwargs or {}))
        self.number += 1
        return func(*(x.double() for x in args)).to(args[0].dtype)


def references(reference: Reference) -> list[torch.Tensor]:
    """o, dq, dk, dv on the compared rows, (batch, heads, compared rows, width)."""
    expected = reference.expected(gradients=True)
    return [expected[name].refs[0] for name in NAMES]


@pytest.mark.parametrize("elements", [2**23, 64])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_is_attention_in_fp64_however_small_its_chunks(
    shape: str, causal: bool, elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(_part.WORKSPACE_BYTES, "cpu", 8 * elements)
    p = problem(causal=causal, **SHAPES[shape])
    inputs = make_inputs(p, "cpu", seed=3)
    reference = Reference(p, inputs)
    reference.prepare(gradients=True)
    for mine, theirs in zip(references(reference), exact(p, inputs), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize(
    "changes", [{}, {"num_kv_heads": 2}, {"seqlen_q": 150}, {"seqlen_k": 150}, {"causal": False}], ids=str
)
def test_sampled_rows_are_those_of_the_whole(changes: dict) -> None:
    p = problem(**{"seqlen_q": 200, "seqlen_k": 200, **changes})
    inputs = make_inputs(p, "cpu", seed=4)
    reference = Reference(p, inputs, all_rows=False)
    reference.prepare(gradients=True)
    assert len(reference.parts[0].query_rows) == len(reference.parts[0].key_rows) == SAMPLED_ROWS
    rows = (
        reference.parts[0].query_rows,
        reference.parts[0].query_rows,
        reference.parts[0].key_rows,
        reference.parts[0].key_rows,
    )
    for mine, theirs, at in zip(references(reference), exact(p, inputs), rows, strict=True):
        assert torch.allclose(mine, theirs.index_select(2, at), atol=1e-13, rtol=1e-12)


@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("dtype", ["fp32", "tf32", "fp16"])
def test_heads_together_are_as_heads_alone_in_fewer_operations(
    dtype: str, all_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Count(TorchDispatchMode):
        operations = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.operations += 1
            return func(*args, **(kwargs or {}))

    p = problem(batch=3, num_kv_heads=2, seqlen_q=150, seqlen_k=130, dtype=dtype)
    inputs = make_inputs(p, "cpu", seed=13)
    found, operations = [], []
    for batched in (2**23, 8):
        monkeypatch.setitem(_part.BATCHED_BYTES, "cpu", batched)
        reference = Reference(p, inputs, all_rows=all_rows)
        with Count() as count:
            reference.prepare(gradients=True)
        operations.append(count.operations)
        found.append(reference.expected(gradients=True))
    for name, together in found[0].items():
        alone = found[1][name]
        assert torch.allclose(together.refs[0], alone.refs[0], atol=1e-13, rtol=1e-12)
        # a product of another height may add in another order
        assert together.budget == pytest.approx(alone.budget, rel=0.1)
    assert operations[0] < operations[1] / 3, "six K/V heads"


@pytest.mark.parametrize("scale", [1.0, 30.0, 200.0])
def test_scores_of_any_size_keep_fp64s_precision(scale: float) -> None:
    # 30: exp(S) would overflow fp32; 200: it would overflow fp64 without the maximum
    p = problem(seqlen_q=33, seqlen_k=33)
    inputs = make_inputs(p, "cpu", seed=5)
    inputs = replace(inputs, q=inputs.q * scale, k=inputs.k * scale)
    reference = Reference(p, inputs)
    reference.prepare(gradients=True)
    for mine, theirs in zip(references(reference), exact(p, inputs), strict=True):
        assert torch.allclose(mine, theirs, atol=1e-12 * scale, rtol=1e-10)


@pytest.mark.parametrize("dtype", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("all_rows", [True, False])
def test_the_budget_is_twice_naives_error_and_twice_the_rounding(
    dtype: str, all_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_other_units, "LIMIT", 0)  # as of any larger problem
    monkeypatch.setattr(_reference, "_largest_deviation", lambda variances: 0.0)  # what naive has not
    p = problem(dtype=dtype, seqlen_q=130, seqlen_k=140, num_kv_heads=2)
    inputs = make_inputs(p, "cpu", seed=6)
    reference = Reference(p, inputs, all_rows=all_rows)
    with ProductsRoundedOnce() as products:
        naive = run(kernels.get("naive"), p, inputs)
        alone = products.number
        accuracy = reference.compare(naive[0], naive[1:])
    assert 0 < alone < products.number, "both sides' products"
    for name, ref in zip(NAMES, references(reference), strict=True):
        wanted = 2 * accuracy.max_abs_error[name] + 2 * rounding(ref, inputs.q.dtype)
        assert accuracy.budget[name] == pytest.approx(wanted, rel=1e-9)
    assert accuracy.ok


def test_the_rounding_term_is_of_the_dtype() -> None:
    ref = torch.linspace(-2, 2, 1001, dtype=torch.float64)
    half, single = rounding(ref, torch.bfloat16), rounding(ref, torch.float32)
    assert 2**-9 < half < 2**-6
    assert 2**-25 < single < 2**-21


def test_an_overflow_of_naive_falls_back_to_rounded_fp32() -> None:
    p = problem(dtype="fp16", causal=False)
    inputs = make_inputs(p, "cpu", seed=7)
    inputs = replace(inputs, q=inputs.q * 300, k=inputs.k * 300)  # scores up to 1e6: infinite in fp16
    naive = run(kernels.get("naive"), p, inputs)
    assert not naive[0].isfinite().all()
    reference = Reference(p, inputs)
    reference.prepare(gradients=True)
    assert math.isfinite(reference.expected(gradients=False)["o"].budget)
    assert reference.expected(gradients=False)["o"].budget < 0.1
    fp32 = run(kernels.get("naive"), problem(causal=False), in_floats(inputs))
    assert reference.compare(fp32[0].half()).ok


def on_the_tf32_grid(x: torch.Tensor) -> bool:
    return bool(((x.view(torch.int32) & 0x1FFF) == 0).all())


def test_tf32_rounds_to_ten_bits_to_nearest_and_ties_away_from_zero() -> None:
    step = 2.0**-10
    x = torch.tensor([1, 1 + step / 2, 1 + 1.5 * step, 1 + step * 0.499, -1 - step / 2, 2 - step / 2, 0.0])
    wanted = torch.tensor([1, 1 + step, 1 + 2 * step, 1, -1 - step, 2, 0.0])
    assert torch.equal(to_tf32(x), wanted)
    anything = torch.randn(10_000, generator=torch.Generator().manual_seed(0)) * 1e3
    rounded = to_tf32(anything)
    assert on_the_tf32_grid(rounded)
    assert ((rounded - anything).abs() <= anything.abs() * 2**-11).all()
    assert torch.equal(to_tf32(rounded), rounded)
    special = torch.tensor([math.inf, -math.inf, math.nan, 1e-40])
    assert torch.equal(to_tf32(special).isfinite(), special.isfinite())
    worst = torch.tensor([-1, 0x7FFFFFFF], dtype=torch.int32).view(torch.float32)  # NaNs of all ones
    assert to_tf32(worst).isnan().all()


def in_floats(inputs: Inputs, by: torch.dtype = torch.float32) -> Inputs:
    """The same in fp32, rounded to another dtype on the way."""
    return replace(inputs, **{name: getattr(inputs, name).to(by).float() for name in ("q", "k", "v", "dout")})


def in_tf32(p, inputs: Inputs) -> tuple:
    """o, dq, dk, dv of attention whose products, forward and backward, take TF32 operands."""

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx, a, b):
            ctx.save_for_backward(a, b)
            return to_tf32(a) @ to_tf32(b)

        @staticmethod
        def backward(ctx, gradient):
            a, b = (to_tf32(x).transpose(-2, -1) for x in ctx.saved_tensors)
            gradient = to_tf32(gradient)
            return gradient @ b, a @ gradient

    q, k, v = inputs.detached(grad=True).leaves
    all_k, all_v = (x.repeat_interleave(p.group, dim=1) for x in (k, v))
    scores = Product.apply(q * p.softmax_scale, all_k.transpose(-2, -1))
    if p.causal:
        hidden = torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool).triu(p.seqlen_k - p.seqlen_q + 1)
        scores = scores.masked_fill(hidden, -math.inf)
    o = Product.apply(scores.softmax(-1), all_v)
    return o.detach(), *torch.autograd.grad(o, (q, k, v), inputs.dout)


@pytest.mark.parametrize(
    "changes",
    [
        {"seqlen_q": 65, "seqlen_k": 65, "head_dim": 80, "head_dim_v": 80},
        {"seqlen_q": 64, "seqlen_k": 64, "head_dim": 64, "head_dim_v": 64, "causal": False},
        {"seqlen_q": 7, "seqlen_k": 129, "head_dim": 41, "head_dim_v": 33, "num_kv_heads": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("all_rows", [True, False])
def test_tf32s_yardstick_is_tf32_arithmetic_on_every_device(
    changes: dict, all_rows: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_other_units, "LIMIT", 0)
    p = problem(dtype="tf32", **changes)
    inputs = make_inputs(p, "cpu", seed=12)
    reference = Reference(p, inputs, all_rows=all_rows)
    mine = in_tf32(p, inputs)
    accuracy = reference.compare(mine[0], mine[1:])
    assert accuracy.ok
    single = Reference(problem(dtype="fp32", **changes), inputs, all_rows=all_rows)
    single.prepare(gradients=True)
    for name, ref, same in zip(NAMES, references(reference), references(single), strict=True):
        assert torch.equal(ref, same), "the reference itself knows no dtype"
        wanted = 2 * accuracy.max_abs_error[name] + 2 * rounding(ref, torch.float32)
        assert accuracy.budget[name] == pytest.approx(wanted, rel=0.05)
    assert accuracy.budget["o"] > 20 * single.expected(gradients=False)["o"].budget
    assert not single.compare(mine[0], mine[1:]).ok, "TF32 products are not fp32's"
    half = in_floats(inputs, torch.bfloat16)
    coarse = in_tf32(p, half)
    assert not reference.compare(coarse[0], coarse[1:]).ok, "bf16 products are not TF32's"


def test_the_yardstick_of_tf32_does_not_ask_the_library_for_tf32(monkeypatch: pytest.MonkeyPatch) -> None:
    switch = torch.backends.cuda.matmul
    seen = []
    real = _yardstick.to_tf32
    monkeypatch.setattr(
        _yardstick, "to_tf32", lambda x, **how: (seen.append(switch.allow_tf32), real(x, **how))[1]
    )
    p = problem(dtype="tf32")
    Reference(p, make_inputs(p, "cpu", seed=0)).prepare(gradients=True)
    assert seen
    assert not any(seen)


def moved(inputs: Inputs, device: str) -> Inputs:
    return replace(inputs, **{name: getattr(inputs, name).to(device) for name in ("q", "k", "v", "dout")})


@pytest.mark.gpu
@pytest.mark.parametrize("length", [64, 65])
@pytest.mark.parametrize("dim", [64, 80])
def test_a_gpu_has_the_same_tf32_yardstick_for_aligned_sizes_and_others(length: int, dim: int) -> None:
    p = problem(dtype="tf32", seqlen_q=length, seqlen_k=length, head_dim=dim, head_dim_v=dim)
    inputs = make_inputs(p, "cpu", seed=0)
    budgets = []
    for device in ("cpu", "cuda:0"):
        reference = Reference(p, moved(inputs, device))
        reference.prepare(gradients=True)
        budgets.append([expected.budget for expected in reference.expected(gradients=True).values()])
    assert budgets[0] == pytest.approx(budgets[1], rel=0.01)


def wrong(p, o, dq, dk, dv, how: str) -> tuple:
    if how == "rescale":
        return o * 1.02, dq, dk, dv
    if how == "dq scale":
        return o, dq * 1.02, dk, dv
    if how == "dk of one head":
        dk = dk.clone()
        dk[-1, -1] *= 1.02
        return o, dq, dk, dv
    if how == "dv lost a row":
        dv = dv.clone()
        dv[:, :, -1] = 0
        return o, dq, dk, dv
    o = o.clone()
    o[:, :, -1] = o[:, :, -2]
    return o, dq, dk, dv


@pytest.mark.parametrize("all_rows", [True, False])
@pytest.mark.parametrize("how", ["rescale", "dq scale", "dk of one head", "dv lost a row", "o repeats a row"])
def test_small_mistakes_are_caught(how: str, all_rows: bool) -> None:
    p = problem(seqlen_q=200, seqlen_k=200, head_dim=32, head_dim_v=32)
    inputs = make_inputs(p, "cpu", seed=8)
    reference = Reference(p, inputs, all_rows=all_rows)
    right = run(kernels.get("sdpa"), p, inputs)
    assert reference.compare(right[0], right[1:]).ok
    o, *gradients = wrong(p, *right, how)
    assert not reference.compare(o, gradients).ok


def test_a_top_left_mask_is_caught() -> None:
    p = problem(seqlen_q=20, seqlen_k=30)
    inputs = make_inputs(p, "cpu", seed=9)
    o = torch.nn.functional.scaled_dot_product_attention(inputs.q, inputs.k, inputs.v, is_causal=True)
    assert not Reference(p, inputs).compare(o).ok


def test_a_nan_in_a_row_that_is_not_compared_is_caught() -> None:
    p = problem(seqlen_q=600, seqlen_k=600, batch=1, num_heads=1, num_kv_heads=1)
    inputs = make_inputs(p, "cpu", seed=10)
    reference = Reference(p, inputs, all_rows=False)
    o = run(kernels.get("naive"), p, inputs)[0]
    assert reference.compare(o).ok
    unseen = next(row for row in range(600) if row not in reference.parts[0].query_rows.tolist())
    o[0, 0, unseen, 3] = float("nan")
    accuracy = reference.compare(o)
    assert not accuracy.ok
    assert math.isnan(accuracy.max_abs_error["o"])


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("size", [1.0, 1e4])
def test_lse_is_judged_as_the_fp32_number_that_it_is(dtype: str, size: float) -> None:
    """Large logits overflow naive's o in fp16; lse has the room of fp32 all the same."""
    p = problem(dtype=dtype, seqlen_q=90, seqlen_k=90)
    inputs = make_inputs(p, "cpu", seed=2)
    inputs = replace(inputs, q=(inputs.q.detach() * size).requires_grad_())
    reference = Reference(p, inputs)
    o, *_ = exact(p, inputs)
    [lse] = reference.expected(gradients=False)["lse"].refs
    right = reference.compare(o.to(inputs.q.dtype), lse=lse.float())
    assert right.max_abs_error["lse"] <= right.budget["lse"] <= 1e-5 * float(lse.abs().max())
    wrong = reference.compare(o.to(inputs.q.dtype), lse=(lse * (1 + 2e-5)).float())
    assert wrong.max_abs_error["lse"] > wrong.budget["lse"]


def test_lse_is_computed_where_it_is_given_and_nothing_else_depends_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    p = problem(dtype="fp16", seqlen_q=20, seqlen_k=20)
    inputs = make_inputs(p, "cpu", seed=2)
    o, *_ = exact(p, inputs)
    asked, rows = [], _yardstick.Yardstick.rows
    monkeypatch.setattr(
        _yardstick.Yardstick, "rows", lambda *args, **how: asked.append(how.get("lse")) or rows(*args, **how)
    )
    reference = Reference(p, inputs)
    without = reference.compare(o.half())
    assert {*asked} == {False}
    given = reference.compare(o.half(), lse=reference.expected(gradients=False)["lse"].refs[0].float())
    assert asked[-1] is True
    assert given.max_abs_error.keys() == {"o", "lse"}
    assert (without.max_abs_error["o"], without.budget["o"]) == (given.max_abs_error["o"], given.budget["o"])
    count = len(asked)
    assert reference.compare(o.half()).budget == without.budget
    assert len(asked) == count, "it is kept"


def test_another_shape_or_dtype_is_an_error_that_says_so() -> None:
    p = problem()
    inputs = make_inputs(p, "cpu", seed=0)
    reference = Reference(p, inputs)
    with pytest.raises(ValueError, match="o is"):
        reference.compare(torch.zeros(2, 4, 16, 9))
    with pytest.raises(ValueError, match=r"float64.*is wanted"):
        reference.compare(torch.zeros(2, 4, 16, 8, dtype=torch.float64))


def test_inputs_depend_on_the_seed_only() -> None:
    p = problem(num_kv_heads=2, head_dim_v=12, dtype="bf16")
    made = [make_inputs(p, "cpu", seed=seed) for seed in (1, 1, 2)]
    one, same, other = ((*inputs.leaves, inputs.dout) for inputs in made)
    assert all(torch.equal(a, b) for a, b in zip(one, same, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert [tuple(t.shape) for t in one] == [(2, 4, 16, 8), (2, 2, 16, 8), (2, 2, 16, 12), (2, 4, 16, 12)]


@pytest.mark.parametrize("rows", [1, 2, 64, 95, 96, 97, 1021, 65536])
def test_sampled_rows_hold_the_ends_and_tile_edges(rows: int) -> None:
    sample = sample_rows(rows, seed=0)
    assert sample == sorted(set(sample))
    assert {0, rows - 1} <= set(sample)
    assert set(sample) <= set(range(rows))
    assert len(sample) == min(rows, SAMPLED_ROWS) or rows < 2 * SAMPLED_ROWS
    if rows > 256:
        assert {63, 64, 127, 128, rows - 64, rows - 65, rows - 128, rows - 129} <= set(sample)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
def test_64k_is_checked_in_bounded_memory_and_seconds(causal: bool) -> None:
    import time

    p = problem(
        batch=1, num_heads=32, num_kv_heads=32, seqlen_q=65536, seqlen_k=65536, head_dim=64, head_dim_v=64,
        dtype="bf16", causal=causal,
    )  # fmt: skip
    inputs = make_inputs(p, "cuda:0", seed=0)
    Reference(problem(dtype="bf16"), make_inputs(problem(dtype="bf16"), "cuda:0", 0)).prepare(gradients=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before, start = torch.cuda.memory_allocated(), time.perf_counter()
    Reference(p, inputs).prepare(gradients=True)
    torch.cuda.synchronize()
    took, peak = time.perf_counter() - start, torch.cuda.max_memory_allocated() - before
    print(f"reference of {p.key}: {took:.2f} s, {peak / 1e9:.2f} GB")
    assert peak < 3 * 2**30
    assert took < 8


LUCKY = [
    (1, problem(batch=2, num_heads=2, num_kv_heads=2, seqlen_q=33, seqlen_k=33, head_dim=32, head_dim_v=16,
                causal=False)),
    (0, problem(batch=1, num_heads=6, num_kv_heads=2, seqlen_q=65, seqlen_k=17, head_dim=1, head_dim_v=1,
                causal=False, softcap=5.0)),
    (0, problem(batch=2, num_heads=1, num_kv_heads=1, seqlen_q=65, seqlen_k=65, head_dim=1, head_dim_v=32,
                softcap=0.7)),
]  # fmt: skip
"""(seed, fp32 problem): of these, or of their like, the bundled kernel was over naive's largest error."""


def in_fp64(p: Problem, inputs: Inputs, *, scale: float = 1.0, keys: int = 0, tf32: bool = False) -> Accuracy:
    """Exact attention, but for what is asked to be wrong, rounded to fp32: how it is judged."""
    q, k, v = (x.detach().double().requires_grad_() for x in (inputs.q, inputs.k, inputs.v))
    a, b = (to_tf32(x.float()).double() if tf32 else x for x in (q, k))
    a = a + (q - q.detach()) if tf32 else a
    b = b + (k - k.detach()) if tf32 else b
    s = a @ b.repeat_interleave(p.group, 1).mT * p.softmax_scale * scale
    s = p.softcap * (s / p.softcap).tanh() if p.softcap else s
    hidden = torch.full((p.seqlen_q, p.seqlen_k), p.causal).triu(1)
    hidden[:, p.seqlen_k - keys :] = True
    s = s.masked_fill(hidden, -math.inf)
    o = s.softmax(-1) @ v.repeat_interleave(p.group, 1)
    gradients = torch.autograd.grad(o, (q, k, v), inputs.dout.double())
    return Reference(p, inputs).compare(
        o.detach().float(), [x.float() for x in gradients], s.logsumexp(-1).detach().float()
    )


@pytest.mark.parametrize(("seed", "p"), LUCKY, ids=lambda x: getattr(x, "key", x))
def test_fp32_has_room_for_luck_and_none_for_mistakes(seed: int, p: Problem) -> None:
    inputs = make_inputs(p, "cpu", seed)
    right = in_fp64(p, inputs)
    assert right.ok
    for mistake in ({"scale": 1.001}, {"keys": 1}, {"tf32": True}):
        wrong = in_fp64(p, inputs, **mistake)
        assert not wrong.ok
        assert wrong.max_abs_error["o"] > 20 * wrong.budget["o"], mistake


@pytest.mark.parametrize("seed", range(3))
def test_the_errors_that_are_drawn_are_of_the_size_of_those_that_are_there(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Many numbers of one kind: the bound without draws holds nearly as much."""
    p = problem(batch=1, num_heads=4, num_kv_heads=2, seqlen_q=64, seqlen_k=80, head_dim=32, causal=False)
    inputs = make_inputs(p, "cpu", seed)
    drawn = {name: x.budget for name, x in Reference(p, inputs).expected(gradients=True).items()}
    monkeypatch.setattr(_other_units, "LIMIT", 0)
    once = {name: x.budget for name, x in Reference(p, inputs).expected(gradients=True).items()}
    assert all(once[name] <= drawn[name] <= 2 * once[name] for name in once), (once, drawn)


def test_other_units_change_nothing_but_roundings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of exact attention, with every option, the draws differ by fp64's rounding."""
    monkeypatch.setattr(_other_units, "LIMIT", 0)
    p = problem(softcap=2.0, bias="1hqk", sinks=True, dropout_p=0.3, window=(9, 4), causal=False)
    inputs = make_inputs(p, "cpu", 1)
    inputs = replace(inputs, **{name: getattr(inputs, name).double() for name in ("q", "k", "v", "dout")})

    def compute(inputs: Inputs) -> list[dict[str, torch.Tensor]]:
        expected = Reference(p, inputs).expected(gradients=True)
        return [{name: one.refs[0] for name, one in expected.items()}]

    found = _other_units.deviations(inputs, compute, compute(inputs))
    assert found.keys() >= {"o", "lse", "dq", "dk", "dv", "dbias", "dsinks"}
    assert max(found.values()) < 1e-12
