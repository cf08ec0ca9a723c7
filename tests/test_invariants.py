"""What holds for attention whatever its numbers: of each bundled kernel with a backward, and of its options.

Block masks, pages and splits have theirs in test_block_mask.py and test_decode.py.
"""

from __future__ import annotations

import importlib.util
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from flashbench import block_masks, kernels
from flashbench.flash_configs import Config
from flashbench.kernels import Target, _triton
from flashbench.kernels._block_mask import DeviceMask
from flashbench.kernels._philox import keep_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
REASON = kernels.get("flash").why_unavailable(Target(device=DEVICE, capability=CAPABILITY))
assert REASON is None, REASON

NAMES = ("_flash_v2", "_flash_v1", "_flash_v2_atomic")
flash = _triton.load(DEVICE).flash_attention
few = settings(
    max_examples=25 if DEVICE == "cuda" else 3, deadline=None, derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)  # fmt: skip
lengths = st.integers(1, 300 if DEVICE == "cuda" else 70)
head_dims = st.sampled_from((8, 24, 40, 64))
masks = st.sampled_from(((-1, -1), (-1, 0), (7, -1), (0, 0), (20, 9), (-1, 5)))


def attention_of(name: str) -> Callable[..., Any]:
    of_module: Callable[..., Any] = _triton.load(DEVICE, name).flash_attention
    return of_module


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def qkv(nq: int, nk: int, d: int, heads: int = 2) -> tuple[Tensor, Tensor, Tensor]:
    return rand(1, heads, nq, d, seed=1), rand(1, heads, nk, d, seed=2), rand(1, heads, nk, d, seed=3)


def both(call: Callable[..., Any], *tensors: Tensor, **options: Any) -> tuple[Tensor, ...]:
    """(o, lse, gradients of the tensors), with do a fixed random tensor."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    o, lse = call(*leaves, return_lse=True, **options)
    return o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, rand(*o.shape, seed=9).to(o.dtype))


def assert_near(mine: Tensor, theirs: Tensor, scale: float = 1.0) -> None:
    """Equal but for the rounding of fp32, in sums of numbers of that size."""
    finite = theirs.isfinite()
    assert torch.equal(mine.isfinite(), finite)
    top = float(theirs.detach()[finite].abs().max()) if finite.any() else 0.0
    assert torch.allclose(mine[finite], theirs[finite], rtol=0, atol=1e-5 * scale * max(1.0, top))


@pytest.mark.parametrize("name", NAMES)
@few
@given(nq=lengths, nk=lengths, d=head_dims, data=st.data())
def test_permuted_keys_are_the_same_keys(name: str, nq: int, nk: int, d: int, data: st.DataObject) -> None:
    q, k, v = qkv(nq, nk, d)
    order = torch.tensor(data.draw(st.permutations(range(nk))), device=DEVICE)
    call = attention_of(name)
    o, lse, dq, dk, dv = both(call, q, k, v, causal=False)
    moved = both(call, q, k[:, :, order], v[:, :, order], causal=False)
    for mine, theirs in zip(moved, (o, lse, dq, dk[:, :, order], dv[:, :, order]), strict=True):
        assert_near(mine, theirs)


@pytest.mark.parametrize("name", NAMES)
@few
@given(nq=lengths, nk=lengths, d=head_dims, data=st.data())
def test_parts_of_any_split_merge_to_the_whole(
    name: str, nq: int, nk: int, d: int, data: st.DataObject
) -> None:
    """An empty part too, which saw nothing."""
    q, k, v = qkv(nq, nk, d)
    cuts = sorted(data.draw(st.lists(st.integers(0, nk), max_size=4)))
    call = attention_of(name)
    parts = [
        call(q, k[:, :, a:b], v[:, :, a:b], causal=False, return_lse=True)
        for a, b in itertools.pairwise((0, *cuts, nk))
    ]
    o, lse = kernels.merge(*map(list, zip(*parts, strict=True)))
    whole, whole_lse = call(q, k, v, causal=False, return_lse=True)
    assert_near(o, whole)
    assert_near(lse, whole_lse)


def test_a_row_that_no_part_saw_a_key_of_has_no_gradient_and_its_o_is_not_looked_at() -> None:
    lses = [torch.tensor(row, requires_grad=True) for row in ([-math.inf, 1.0], [-math.inf, 2.0])]
    outputs = [torch.full((2, 3), math.nan), torch.ones(2, 3)]
    outputs[0][1] = 4.0
    o, lse = kernels.merge([x.requires_grad_() for x in outputs], lses)
    found = torch.autograd.grad((o, lse), (*outputs, *lses), (torch.ones_like(o), torch.ones_like(lse)))
    assert o[0].eq(0).all()
    assert lse[0] == -math.inf
    assert all(x.isfinite().all() and x[0].eq(0).all() for x in found)
    share = torch.tensor([1.0, 2.0]).softmax(0)  # d lse / d lse_i, and of o, 3 · share · (o_i - o)
    of_o = torch.stack([3 * share[i] * (outputs[i][1, 0] - o[1, 0]) for i in (0, 1)])
    torch.testing.assert_close(torch.stack([x[1] for x in found[2:]]), share + of_o)


@pytest.mark.parametrize("name", NAMES)
@few
@given(nq=lengths, nk=lengths, d=head_dims, causal=st.booleans())
def test_equal_values_come_out_as_they_are(name: str, nq: int, nk: int, d: int, causal: bool) -> None:
    """And as no probability changes o then, nothing moves q and k."""
    q, k, _ = qkv(nq, nk, d)
    v = rand(1, 2, 1, d, seed=5).expand(1, 2, nk, d)
    o, lse, dq, dk, _ = both(attention_of(name), q, k, v, causal=causal)
    seen = ~lse.isneginf()[..., None]
    assert_near(o, torch.where(seen, v[:, :, :1], 0.0))
    assert max(float(dq.abs().max()), float(dk.abs().max())) < 1e-4


@pytest.mark.parametrize("name", NAMES)
@few
@given(nq=lengths, nk=lengths, d=head_dims, causal=st.booleans())
def test_what_is_added_to_every_key_shifts_the_lse_alone(
    name: str, nq: int, nk: int, d: int, causal: bool
) -> None:
    q, k, v = qkv(nq, nk, d)
    shift = rand(1, 2, 1, d, seed=6)
    call = attention_of(name)
    o, lse = call(q, k, v, causal=causal, return_lse=True)
    shifted, shifted_lse = call(q, k + shift, v, causal=causal, return_lse=True)
    assert_near(shifted, o, 4)
    assert_near(shifted_lse, lse + (q * shift).sum(-1) * d**-0.5, 4)


@few
@given(nq=lengths, nk=lengths, window=masks, top_left=st.booleans())
def test_a_window_is_a_bias_that_hides_a_band(
    nq: int, nk: int, window: tuple[int, int], top_left: bool
) -> None:
    q, k, v = qkv(nq, nk, 24)
    at = (
        torch.arange(nk, device=DEVICE)
        - torch.arange(nq, device=DEVICE)[:, None]
        - (0 if top_left else nk - nq)
    )
    hidden = torch.zeros(nq, nk, dtype=torch.bool, device=DEVICE)
    before, after = window
    if before >= 0:
        hidden |= at < -before
    if after >= 0:
        hidden |= at > after
    bias = torch.zeros(1, 1, nq, nk, device=DEVICE).masked_fill(hidden, -math.inf)
    mine = both(flash, q, k, v, window=window, top_left=top_left)
    for one, other in zip(mine, both(flash, q, k, v, bias=bias), strict=True):
        assert_near(one, other)
    if window == (-1, 0):
        causal = both(flash, q, k, v, causal=True, top_left=top_left)
        assert all(torch.equal(a, b) for a, b in zip(mine, causal, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 2, 37, 1), (1, 1, 37, 1), (1, 2, 1, 1), (1, 1, 1, 1)])
def test_a_bias_that_all_keys_share_has_no_gradient(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    leaves = [x.detach().to(dtype).requires_grad_() for x in (*qkv(37, 53, 24), rand(*shape, seed=4))]
    o = flash(*leaves[:3], bias=leaves[3], causal=True, dropout_p=0.1, seed=3)
    [dbias] = torch.autograd.grad(o, leaves[3:], torch.randn_like(o))
    assert dbias.shape == shape
    assert not dbias.any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(("nq", "nk"), [(2, 1), (2, 2), (37, 53)])
def test_a_row_that_a_bias_hides_is_a_row_without_keys(nq: int, nk: int, dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv(nq, nk, 24))
    bias = rand(1, 2, nq, nk, seed=4).to(dtype)
    bias[:, :, ::2] = -math.inf
    o, lse, *gradients = both(flash, q, k, v, bias=bias)
    seen = slice(1, None, 2)
    leaves = [x.detach().requires_grad_() for x in (q[:, :, seen], k, v)]
    rest, rest_lse = flash(*leaves, bias=bias[:, :, seen], return_lse=True)
    found = torch.autograd.grad(rest, leaves, rand(*o.shape, seed=9).to(dtype)[:, :, seen])
    assert not o[:, :, ::2].any()
    assert (lse[:, :, ::2] == -math.inf).all()
    assert not gradients[0][:, :, ::2].any()
    mine = o[:, :, seen], lse[:, :, seen], gradients[0][:, :, seen], *gradients[1:]
    for one, other in zip(mine, (rest, rest_lse, *found), strict=True):
        assert_near(one, other, 1.0 if dtype == torch.float32 else 200.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("dropout_p", [0.0, 0.1])
@pytest.mark.parametrize("blocks", [False, True])
def test_where_each_row_sees_one_key_its_score_has_no_gradient(
    dtype: torch.dtype, dropout_p: float, blocks: bool
) -> None:
    q, k, v = (x.to(dtype) for x in qkv(130, 130, 16))
    bias = rand(1, 2, 130, 130, seed=4).to(dtype).requires_grad_()
    mask = DeviceMask(block_masks.from_blocks(numpy.tri(2, dtype=bool), 130, 130), DEVICE) if blocks else None
    leaves = [x.requires_grad_() for x in (q, k, v)]
    o = flash(*leaves, bias=bias, window=(0, 0), dropout_p=dropout_p, seed=3, block_mask=mask)
    dq, dk, dv, dbias = torch.autograd.grad(o, (*leaves, bias), rand(*o.shape, seed=9).to(dtype))
    assert not any(x.any() for x in (dq, dk, dbias))
    assert dv.any()


@few
@given(n=lengths, window=masks, alibi=st.booleans(), causal=st.booleans())
def test_the_corners_are_one_where_lengths_agree(
    n: int, window: tuple[int, int], alibi: bool, causal: bool
) -> None:
    q, k, v = qkv(n, n, 40)
    slopes = torch.tensor([0.5, 0.25], device=DEVICE) if alibi else None
    asked: dict[str, Any] = {"window": window, "causal": causal, "alibi_slopes": slopes}
    bottom_right, top_left = (both(flash, q, k, v, top_left=corner, **asked) for corner in (False, True))
    assert all(torch.equal(a, b) for a, b in zip(bottom_right, top_left, strict=True))


def test_no_dropout_is_not_a_bit_from_none_whatever_the_seed() -> None:
    q, k, v = qkv(70, 90, 40)
    plain = both(flash, q, k, v, causal=True)
    for other in ({"dropout_p": 0.0, "seed": 2**40 + 1}, {"dropout_p": 1e-12, "seed": 3}):
        assert all(
            torch.equal(a, b) for a, b in zip(plain, both(flash, q, k, v, causal=True, **other), strict=True)
        )


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("config", [None, Config(32, 16, 4, 1)], ids=["table", "small tiles"])
def test_both_passes_drop_what_the_exported_mask_says_and_as_much(p: float, config: Config | None) -> None:
    """With V and dO the identity, O is the probabilities that were kept, and dV their transpose."""
    batch, heads, n, seed = 2, 8 if DEVICE == "cuda" else 1, 64, 12345
    q, k = rand(batch, heads, n, 16, seed=1), rand(batch, heads, n, 16, seed=2)
    eye = torch.eye(n, device=DEVICE).expand(batch, heads, n, n).contiguous()
    v = eye.clone().requires_grad_()
    configs = tuple((name, config) for name in ("fwd", "dq", "dkdv")) if config else ()
    o = flash(q, k, v, dropout_p=p, seed=seed, configs=configs)
    (dv,) = torch.autograd.grad(o, v, eye)
    numbers = (torch.arange(count, device=DEVICE) for count in (batch * heads, n, n))
    kept = keep_mask(seed, p, *numbers).view(batch, heads, n, n)
    assert torch.equal(o != 0, kept)
    assert torch.equal(dv.mT != 0, kept)
    assert_near(dv.mT, o.detach())
    deviation = math.sqrt(p * (1 - p) / kept.numel())
    assert abs(1 - float(kept.double().mean()) - p) < 4 * deviation


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "top-left window": {"window": (5, 3), "top_left": True},
    "softcap": {"softcap": 2.0, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.1], device=DEVICE)},
    "sinks": {"sinks": torch.tensor([0.3, -1.0], device=DEVICE), "window": (9, 0)},
}


@pytest.mark.parametrize("options", OPTIONS)
@few
@given(sequences=st.lists(st.tuples(st.integers(0, 70), st.integers(0, 70)), min_size=1, max_size=3))
def test_packed_sequences_are_a_loop_over_them(options: str, sequences: list[tuple[int, int]]) -> None:
    rows, keys = ([0, *itertools.accumulate(side)] for side in zip(*sequences, strict=True))
    q, k, v = qkv(rows[-1], keys[-1], 24)
    cu_q, cu_k = (torch.tensor(cu, dtype=torch.int32, device=DEVICE) for cu in (rows, keys))
    dout = rand(1, 2, rows[-1], 24, seed=9)

    def results(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, **packed: Tensor) -> tuple[Tensor, ...]:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        o, lse = flash(*leaves, return_lse=True, **OPTIONS[options], **packed)
        return o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, dout)

    whole = results(q, k, v, dout, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)
    for a, b, c, d in zip(rows[:-1], rows[1:], keys[:-1], keys[1:], strict=True):
        alone = results(q[:, :, a:b], k[:, :, c:d], v[:, :, c:d], dout[:, :, a:b])
        for number, (mine, theirs) in enumerate(zip(whole, alone, strict=True)):
            assert_near(mine[:, :, c:d] if number > 2 else mine[:, :, a:b], theirs)
