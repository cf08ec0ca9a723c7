"""Masks and score options of the bundled kernel against fp64, singly and in pairs, forward and gradients."""

from __future__ import annotations

import importlib.util
import itertools
import math
import random as pick
from typing import Any

import pytest
import torch
from tiers import tiers
from torch import Tensor

from flashbench import kernels
from flashbench.kernels import Target, _triton
from flashbench.kernels._philox import keep_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
REASON = kernels.get("flash").why_unavailable(Target(device=DEVICE, capability=CAPABILITY))
assert REASON is None, REASON
flash = _triton.load(DEVICE)

MASKS = {
    "full": {},
    "causal": {"causal": True},
    "top-left": {"causal": True, "top_left": True},
    "window": {"window": (20, 9)},
    "left window": {"causal": True, "window": (33, -1)},
    "top-left window": {"window": (7, 50), "top_left": True},
    "right window": {"window": (-1, 5)},
}
SCORES = ("softcap", "alibi", "bias", "sinks", "dropout", "lse")
BIASES = ("bhqk", "1hqk", "b1qk", "11qk", "bh1k", "111k", "bhq1", "1111")


def rand(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def dense(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, sinks: Tensor | None, **o: Any
) -> tuple[Tensor, ...]:
    """(o, lse) from the whole score matrix, in the dtype of q; differentiable."""
    batch, heads, nq, d = q.shape
    nk, group = k.shape[2], heads // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = (q * d**-0.5) @ k.mT
    if cap := o.get("softcap", 0.0):
        s = cap * torch.tanh(s / cap)
    i, j = torch.arange(nq, device=q.device)[:, None], torch.arange(nk, device=q.device)
    diagonal = 0 if o.get("top_left") else nk - nq
    if (slopes := o.get("alibi_slopes")) is not None:
        s = s - (slopes[:, None, None] * (i + diagonal - j).abs()).to(s.dtype)
    if bias is not None:
        s = s + bias
    before, after = o.get("window", (-1, -1))
    after = 0 if o.get("causal") else after
    hidden = torch.zeros(nq, nk, dtype=torch.bool, device=q.device)
    if after >= 0:
        hidden |= j > i + diagonal + after
    if before >= 0:
        hidden |= j < i + diagonal - before
    s = s.masked_fill(hidden, -math.inf)
    if sinks is not None:
        s = torch.cat((s, sinks.to(s.dtype).view(1, -1, 1, 1).expand(batch, -1, nq, 1)), 3)
    lse = torch.logsumexp(s, -1)
    empty = s.isneginf().all(-1, keepdim=True)
    p = torch.softmax(s.masked_fill(empty, 0.0), -1).masked_fill(empty, 0.0)[..., :nk]
    if rate := o.get("dropout_p", 0.0):
        numbers = (torch.arange(n, device=q.device) for n in (batch * heads, nq, nk))
        kept = keep_mask(o["seed"], rate, *numbers).view(batch, heads, nq, nk)
        p = torch.where(kept, p / (1 - rate), 0.0)
    return p @ v, lse


def gradients(outputs: tuple[Tensor, ...], leaves: list[Tensor], seeds: tuple[Tensor, ...]) -> list[Tensor]:
    finite = [torch.where(x.isfinite(), x, 0.0) for x in outputs]
    return list(torch.autograd.grad(finite, leaves, seeds))


def assert_close(
    options: dict[str, Any], shape: dict[str, Any], dtype: torch.dtype, bias: str, sinks: bool, lse: bool
):
    b, h, g, nq, nk, d, dv = (shape[x] for x in ("b", "h", "g", "nq", "nk", "d", "dv"))
    tensors = [rand(b, h, nq, d, dtype=dtype, seed=1), rand(b, h // g, nk, d, dtype=dtype, seed=2)]
    tensors += [rand(b, h // g, nk, dv, dtype=dtype, seed=3)]
    sizes = {"b": b, "h": h, "q": nq, "k": nk, "1": 1}
    extra: list[Tensor | None] = [None, None]
    if bias:
        extra[0] = rand(*(sizes[x] for x in bias), dtype=dtype, seed=4)
    if sinks:
        extra[1] = rand(h, seed=5)
    dout, dlse = rand(b, h, nq, dv, dtype=dtype, seed=6), rand(b, h, nq, seed=7)

    def results(kind: str) -> list[Tensor]:
        to = {"exact": torch.float64, "naive": dtype, "mine": dtype}[kind]
        leaves = [x.detach().to(to).requires_grad_() for x in tensors]
        more = [
            None
            if x is None
            else x.detach().to(to if i == 0 or kind == "exact" else x.dtype).requires_grad_()
            for i, x in enumerate(extra)
        ]
        if kind == "mine":
            outputs = flash.flash_attention(*leaves, bias=more[0], sinks=more[1], return_lse=True, **options)
        else:
            outputs = dense(*leaves, *more, **options)
        every = leaves + [x for x in more if x is not None]
        seeds = (dout.to(outputs[0].dtype), dlse.to(outputs[1].dtype))
        wanted, given = (outputs, seeds) if lse else (outputs[:1], seeds[:1])
        return [x.detach() for x in (*outputs, *gradients(wanted, every, given))]

    exact, naive, mine = (results(kind) for kind in ("exact", "naive", "mine"))
    names = ["o", "lse", "dq", "dk", "dv", *(["dbias"] if bias else []), *(["dsinks"] if sinks else [])]
    for name, a, n, m in zip(names, exact, naive, mine, strict=True):
        assert not m.isnan().any(), name
        assert torch.equal(a.isneginf(), m.isneginf()), name
        a, n, m = (torch.where(a.isfinite(), x.double(), 0.0) for x in (a, n, m))
        at = torch.float32 if name in ("lse", "dsinks") else dtype
        budget = 2 * (n - a).abs().max() + 2 * ((a.to(at) + 0.3 - 0.3).double() - a).abs().max()
        assert (m - a).abs().max() <= budget, (
            f"{name}: {float((m - a).abs().max()):.3g} of {float(budget):.3g}"
        )


def made(features: tuple[str, ...], generator: pick.Random, heads: int) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if "softcap" in features:
        options["softcap"] = generator.choice((0.7, 5.0, 30.0))
    if "alibi" in features:
        options["alibi_slopes"] = torch.tensor([2.0 ** -(h + 1) for h in range(heads)], device=DEVICE)
    if "dropout" in features:
        options |= {"dropout_p": generator.choice((0.1, 0.5)), "seed": generator.randrange(2**40)}
    return options


def cases() -> list[Any]:
    """Masks alone; in the full suite with scores and pairs of scores, of which test_covering.py has fewer."""
    chosen = [(mask, (one,), n) for n, (mask, one) in enumerate(itertools.product(MASKS, SCORES))]
    for mask, first in (("full", 0), ("left window", 1)):
        chosen += [(mask, pair, n + first) for n, pair in enumerate(itertools.combinations(SCORES, 2))]
    return tiers(((mask, (), n) for mask in MASKS for n in range(2)), chosen)


@pytest.mark.parametrize(("mask", "features", "number"), cases(), ids=str)
def test_features_are_within_budget(mask: str, features: tuple[str, ...], number: int) -> None:
    generator = pick.Random(f"{mask} {features} {number}")
    dtype = (torch.float16, torch.float32, torch.bfloat16)[number % 3]
    h, g = generator.choice(((2, 1), (4, 2), (3, 3)))
    lengths = ((65, 65), (70, 131), (131, 70), (64, 128))
    if dtype != torch.float32:  # the largest error of a row or two is no yardstick for rounding in fp32
        lengths += ((1, 90), (90, 1))
    nq, nk = generator.choice(lengths)
    d, dv = generator.choice(((16, 16), (40, 24), (32, 64)))
    shape = {"b": generator.choice((1, 2)), "h": h, "g": g, "nq": nq, "nk": nk, "d": d, "dv": dv}
    options = MASKS[mask] | made(features, generator, h)
    bias = generator.choice(BIASES) if "bias" in features else ""
    assert_close(options, shape, dtype, bias, "sinks" in features, "lse" in features)


def head_dims() -> list[tuple[int, int, int]]:
    generator = pick.Random(3)
    widths = (1, 3, 8, 16, 24, 40, 64, 72, 80, 96, 100, 128, 192, 200, 256)
    return [(40, 24, 0), (1, 3, 1), (64, 24, 0), (40, 16, 1), (80, 24, 0)] + [
        (generator.choice(widths), generator.choice(widths), number) for number in range(40)
    ]


@pytest.mark.gpu
@pytest.mark.parametrize(("d", "dv", "number"), head_dims())
def test_any_head_dims_on_a_gpu(d: int, dv: int, number: int) -> None:
    """Rows that are not aligned to 16 elements are loaded otherwise, with tiles of unlike layouts."""
    generator = pick.Random(number)
    shape = {
        "b": 1,
        "h": 4,
        "g": 2,
        "nq": generator.choice((70, 300)),
        "nk": generator.choice((131, 257)),
        "d": d,
        "dv": dv,
    }
    mask = generator.choice(list(MASKS))
    assert_close(
        MASKS[mask],
        shape,
        (torch.float16, torch.bfloat16)[number % 2],
        "1hqk" if number % 4 == 3 else "",
        number % 5 == 4,
        False,
    )


@pytest.mark.parametrize("cap", [50.0, 128.0, 300.0, 1e3, 1e6, 1e30])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_cap_of_any_height_leaves_low_scores_their_bits(cap: float, dtype: torch.dtype) -> None:
    """tanh(x) from exp(x) alone is off by 2**-24 near 0: times a cap of 1e6, by hundredths."""
    q, k, v, dout = (rand(1, 2, 40, 32, seed=n, dtype=dtype) for n in range(4))

    def results(attention: Any, to: torch.dtype, *extra: None) -> list[Tensor]:
        leaves = [x.to(to).requires_grad_() for x in (q, k, v)]
        o, lse = attention(*leaves, *extra, softcap=cap)
        return [o, lse, *torch.autograd.grad(o, leaves, dout.to(to))]

    mine = results(lambda *x, **how: flash.flash_attention(*x, return_lse=True, **how), dtype)
    exact = results(dense, torch.float64, None, None)
    assert (mine[1] - exact[1]).abs().max() < 1.5e-6
    for one, other in zip(mine, exact, strict=True):
        assert (one - other).abs().max() < 4 * torch.finfo(dtype).eps * other.abs().max() + 1e-6


@pytest.mark.parametrize("lowest", [-1e6, torch.finfo(torch.float32).min])
def test_what_is_added_to_all_keys_of_a_row_moves_no_gradient(lowest: float) -> None:
    """As masks of the lowest number do to rows of padding: lse then has no bits left for the sum."""
    tensors = [rand(1, 2, 40, 16, seed=n) for n in range(4)]
    bias, hidden = torch.zeros(1, 1, 40, 40, device=DEVICE), torch.zeros(1, 1, 40, 40, device=DEVICE)
    hidden[0, 0, 10] = lowest
    tensors[0][:, :, 10] = 0.0  # a score is rounded to what is added to it; of 0 nothing is lost

    def grads(bias: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.clone().requires_grad_() for x in (*tensors[:3], bias)]
        o = flash.flash_attention(*leaves[:3], bias=leaves[3])
        return torch.autograd.grad(o, leaves, tensors[3])

    for low, plain in zip(grads(hidden), grads(bias), strict=True):
        assert (low - plain).abs().max() < 2e-6


def test_scores_near_the_end_of_fp32_have_gradients() -> None:
    """In fp16, where scores are turned into powers of two: times log2(e) they and lse would be infinite."""
    q, k, v, dout = (rand(1, 1, n, 16, seed=n, dtype=torch.float16) for n in (12, 4, 4, 12))
    slopes = torch.tensor([4e37], device=DEVICE)  # rows 9 to 11 are 6 to 8 from the last key
    leaves = [x.requires_grad_() for x in (q, k, v, torch.zeros(1, 1, 12, 4, device=DEVICE).half())]
    o = flash.flash_attention(*leaves[:3], bias=leaves[3], alibi_slopes=slopes, top_left=True)
    assert torch.allclose(o[0, 0, 4:], v[0, 0, 3].expand(8, 16))  # the nearest key alone
    dq, dk, dv, dbias = torch.autograd.grad(o, leaves, dout)
    assert all(x.abs().max() < 2e-2 for x in (dq, dk, dbias))  # p is 1: nothing but the rounding of o
    assert torch.allclose(dv[0, 0, 3], dout[0, 0, 3:].float().sum(0).half(), atol=1e-2)
