"""The fp8 kernel: its arithmetic in the interpreter, and the accuracy that it is for on a GPU."""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch
from attention import problem
from fp8 import E4M3, E5M2, exact, rmse, with_outliers

from flashbench import kernels
from flashbench.flash_configs import Config
from flashbench.kernels import Target, _fp8, _triton
from flashbench.kernels._inputs import Inputs, make_inputs
from flashbench.kernels._reference import Reference
from flashbench.problem import Problem

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

ROW = kernels.get("flash-fp8")
CPU = Target()
H100 = Target(device="cuda:0", capability=(9, 0), smem_per_block_bytes=232448)
GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
_triton.load(DEVICE)
flash = importlib.import_module("flashbench.kernels._flash_fp8")
interpreted = pytest.mark.skipif(GPU, reason="with a GPU the kernels are compiled, not interpreted")

SHAPES: dict[str, dict[str, int]] = {
    "square": {},
    "one pair": {"seqlen_q": 1, "seqlen_k": 1},
    "a tile's length": {"seqlen_q": 32, "seqlen_k": 64},
    "ragged": {"seqlen_q": 45, "seqlen_k": 75},
    "rows without keys": {"seqlen_q": 70, "seqlen_k": 9},
    "gqa": {"num_heads": 4, "num_kv_heads": 2},
    "mqa": {"num_heads": 3, "num_kv_heads": 1, "batch": 2},
    "dims in pieces": {"head_dim": 40, "head_dim_v": 96},
    "small dims": {"head_dim": 3, "head_dim_v": 1},
}


def tensors(device: str = DEVICE, **shape: int) -> tuple[torch.Tensor, ...]:
    p = {"batch": 1, "num_heads": 2, "num_kv_heads": 2, "seqlen_q": 48, "seqlen_k": 48, "head_dim": 32,
         "head_dim_v": 32, **shape}  # fmt: skip
    q = with_outliers(p["batch"], p["num_heads"], p["seqlen_q"], p["head_dim"], seed=0, device=device)
    k = with_outliers(p["batch"], p["num_kv_heads"], p["seqlen_k"], p["head_dim"], seed=1, device=device)
    v = with_outliers(p["batch"], p["num_kv_heads"], p["seqlen_k"], p["head_dim_v"], seed=2, device=device)
    return q, k, v


@interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
@pytest.mark.parametrize("shape", SHAPES)
def test_the_kernel_does_the_arithmetic_that_is_written_down(
    shape: str, dtype: torch.dtype, causal: bool
) -> None:
    q, k, v = tensors(**SHAPES[shape])
    for share, rotated in (("block", True), ("tensor", False)):
        x = flash.operands(q, k, v, dtype=dtype, share=share, hadamard=rotated, config=Config(32, 16, 4, 1))
        o, lse = flash.flash_attention(x, causal=causal, out_dtype=torch.float32)
        straight = _fp8.quantise(v, dtype, share, 16)
        expected = _fp8.attention(x.q, x.k, straight, causal=causal, scale=q.shape[3] ** -0.5)
        for found, wanted in zip((o, lse), expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=2e-6, rtol=2e-6)


@interpreted
def test_every_number_that_p_can_be_is_rounded_as_torch_rounds() -> None:
    """One key: p is 1. Values beside it: o is V, so that fp8 outputs show the kernel's own rounding."""
    v = torch.logspace(-4, 0, 96).mul(448).reshape(1, 1, 1, 96)
    for dtype in (E4M3, E5M2):
        exact_v = _fp8.Quantised(v.to(dtype), torch.ones(1, 1, 1), 16)
        ones = _fp8.Quantised(torch.ones(1, 1, 1, 32).to(dtype), torch.ones(1, 1, 1), 16)
        x = flash.Operands(q=ones, k=ones, v=_fp8.turn(exact_v), config=Config(16, 16, 4, 1))
        plain, _ = flash.flash_attention(x, causal=False, out_dtype=torch.float32)
        assert torch.equal(plain, v.to(dtype).float())
        narrow, _ = flash.flash_attention(x, causal=False, out_dtype=E4M3)
        again = _fp8.quantise(plain, E4M3, "block", 16)
        assert torch.equal(narrow.scales, again.scales)
        assert torch.equal(narrow.values.float(), again.values.float())


@interpreted
@pytest.mark.usefixtures("poisoned")
@pytest.mark.parametrize("dtype", [E4M3, E5M2])
def test_an_fp8_output_is_the_output_rounded_with_a_scale_per_tile(dtype: torch.dtype) -> None:
    q, k, v = tensors(seqlen_q=75, seqlen_k=45)
    x = flash.operands(q, k, v, dtype=E4M3, config=Config(32, 32, 4, 1))
    plain, lse = flash.flash_attention(x, causal=True, out_dtype=torch.float32)
    narrow, same = flash.flash_attention(x, causal=True, out_dtype=dtype)
    again = _fp8.quantise(plain, dtype, "block", 32)
    assert torch.equal(lse, same)
    torch.testing.assert_close(narrow.scales, again.scales, atol=0, rtol=1e-6)
    step = 2**-3 if dtype == E4M3 else 2**-2  # a tie may fall to the other side
    torch.testing.assert_close(_fp8.dequantise(narrow), _fp8.dequantise(again), atol=1e-4, rtol=step)


@interpreted
def test_layouts_do_not_matter_and_nan_shows() -> None:
    q, k, v = tensors()
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    one, two = (
        flash.flash_attention(flash.operands(*inputs, dtype=E4M3, config=Config(16, 16, 4, 1)), causal=True)[
            0
        ]
        for inputs in ((q, k, v), turned)
    )
    assert torch.equal(one, two)
    for number in range(3):
        bad = [x.clone() for x in (q, k, v)]
        bad[number][0, 1, 40, 7] = float("nan")
        x = flash.operands(*bad, dtype=E4M3, config=Config(16, 16, 4, 1))
        o, _ = flash.flash_attention(x, causal=True)
        assert o[0, 1, 40:].isnan().any(), "qkv"[number]
        assert torch.equal(o[0, 0], one[0, 0])


@interpreted
@pytest.mark.parametrize("share", ["", "tensor", "head", "block"])
def test_the_implementation_rotates_and_rounds_what_it_is_given(share: str) -> None:
    p = problem(
        dtype="fp8", seqlen_q=70, seqlen_k=66, head_dim=32, head_dim_v=32, fp8_scale=share, hadamard=True
    )
    q, k, v = (x.half() for x in tensors(batch=2, num_heads=4, num_kv_heads=4, seqlen_q=70, seqlen_k=66))
    o = ROW.prepare(p, Inputs(q=q, k=k, v=v, dout=q))()
    x = flash.operands(q, k, v, dtype=E4M3, share=share or "block", hadamard=True)
    assert o.dtype == q.dtype
    assert torch.equal(o, flash.flash_attention(x, causal=True)[0])
    ref, _ = exact(q, k, v, causal=True)
    assert rmse(o, ref) < 0.06


@interpreted
@pytest.mark.parametrize(
    "changes", [{}, {"fp8_scale": "tensor"}, {"fp8_scale": "head", "hadamard": True}], ids=str
)
@pytest.mark.parametrize("dtype", ["fp8", "fp8-e5m2"])
def test_the_oracle_takes_what_fp8_costs_and_no_more(dtype: str, changes: dict[str, Any]) -> None:
    p = problem(dtype=dtype, seqlen_q=70, seqlen_k=90, head_dim=32, head_dim_v=32, num_kv_heads=2, **changes)
    inputs = make_inputs(p, "cpu", 0)
    assert inputs.q.dtype == torch.float16
    reference = Reference(p, inputs)
    o = ROW.prepare(p, inputs)()
    assert reference.compare(o).ok
    assert reference.compare(exact(inputs.q, inputs.k, inputs.v, causal=True)[0].half()).ok
    coarse = replace(p, fp8_scale="tensor", hadamard=False)
    large = replace(inputs, v=inputs.v.index_fill(2, torch.tensor([5]), 2.0**14))  # one scale for all of v
    assert not reference.compare(ROW.prepare(coarse, large)()).ok
    assert not reference.compare(o * 1.5).ok


@interpreted
def test_bf16_out_is_rounded_to_nearest() -> None:
    q, k, v = tensors()
    x = flash.operands(q, k, v, dtype=E4M3)
    plain, _ = flash.flash_attention(x, causal=False, out_dtype=torch.float32)
    assert torch.equal(flash.flash_attention(x, causal=False, out_dtype=torch.bfloat16)[0], plain.bfloat16())


def fp8_problem(**changes: Any) -> Problem:
    return problem(dtype="fp8", head_dim=64, head_dim_v=64, **changes)


@pytest.mark.parametrize(
    ("asked", "pass_", "target", "why"),
    [
        (problem(dtype="bf16"), "fwd", CPU, "it takes fp8 only, not bf16"),
        (fp8_problem(), "bwd", CPU, "attention in fp8 has no backward"),
        (fp8_problem(), "fwd+bwd", H100, "attention in fp8 has no backward"),
        (fp8_problem(window=(4, 0)), "fwd", CPU, "it does not take window"),
        (problem(dtype="fp8", head_dim=257), "fwd", CPU, "head_dim 257 is larger than 256"),
        (fp8_problem(), "fwd", CPU, None),
        (fp8_problem(layout="bshd", fp8_scale="head", hadamard=True), "fwd", CPU, None),
    ],
)
def test_refusals(asked: Problem, pass_: str, target: Target, why: str | None) -> None:
    assert ROW.why_unsupported(asked, pass_, target) == why


@pytest.mark.parametrize(
    ("capability", "limit", "why"),
    [
        ((8, 0), 166912, "fp8 products need sm89, this is sm80"),
        ((8, 9), 101376, None),
        ((9, 0), 232448, None),
        ((9, 0), 19000, "fwd kernel needs 19456 B of shared memory per block, limit 19000 B"),
    ],
)
def test_cards_without_fp8_products_or_room_are_refused(
    capability: tuple[int, int], limit: int, why: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_triton, "interpreted", lambda target: False)
    target = Target(device="cuda:0", capability=capability, smem_per_block_bytes=limit)
    p = problem(dtype="fp8", head_dim=128, head_dim_v=128)
    assert ROW.why_unsupported(p, "fwd", target) == why


@interpreted
@pytest.mark.parametrize(
    ("shapes", "why"),
    [
        (((1, 2, 4, 8), (1, 2, 4, 9), (1, 2, 4, 8)), "head_dim differ"),
        (((1, 3, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)), "num_heads 3 is not divisible by num_kv_heads 2"),
        (((1, 2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 300)), "head dims must be 1 to 256"),
        (((2, 4, 8), (1, 2, 4, 8), (1, 2, 4, 8)), "4 dimensions"),
    ],
)
def test_shapes_that_do_not_fit_are_named(shapes: tuple[tuple[int, ...], ...], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        flash.operands(*map(torch.zeros, shapes), dtype=E4M3)


@interpreted
def test_other_formats_and_scales_are_named() -> None:
    q, k, v = tensors()
    with pytest.raises(ValueError, match=r"fp8 is .*e4m3fn or .*e5m2; got torch\.float16"):
        flash.operands(q, k, v, dtype=torch.float16)
    with pytest.raises(ValueError, match="softmax_scale 0 is out of range"):
        flash.flash_attention(flash.operands(q, k, v, dtype=E4M3), causal=False, softmax_scale=0)


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128])
def test_on_a_gpu_outliers_cost_what_the_paper_says(dim: int) -> None:
    """N = 4096, 16 heads, non-causal, fp64 of the unrounded inputs; d = 64 has no bound of its own."""
    q, k, v = (with_outliers(1, 16, 4096, dim, seed=n, device="cuda") for n in range(3))
    ref, _ = exact(q, k, v)
    for share, rotated in (("block", True), ("block", False), ("tensor", False)):
        x = flash.operands(q, k, v, dtype=E4M3, share=share, hadamard=rotated)
        o, lse = flash.flash_attention(x, causal=False)
        straight = _fp8.quantise(v, E4M3, share, x.config.block_k)
        expected, expected_lse = _fp8.attention(x.q, x.k, straight, causal=False, scale=dim**-0.5)
        assert rmse(o, ref) <= 1.05 * rmse(expected, ref)  # the tensor cores' own rounding is far below
        # Hopper cuts each product of a sum off 13 bits below the largest one: d small ones beside an outlier
        largest = (q.float().abs() * k.float().abs().amax(2, keepdim=True)).amax(3)  # per row
        assert ((lse - expected_lse).abs() <= 2e-2 + largest * dim**-0.5 * dim * 2**-13).all()
        assert rmse(lse, expected_lse.double()) <= 1e-2
        if (share, rotated, dim) == ("block", True, 128):
            assert rmse(o, ref) <= 1.1e-2
    if dim == 128:
        half = _triton.load("cuda").flash_attention(q.half(), k.half(), v.half(), causal=False)
        assert rmse(half, ref) <= 2.0e-4


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_on_a_gpu_every_shape_is_right_and_repeats(shape: str, causal: bool) -> None:
    q, k, v = tensors(**SHAPES[shape])
    for dtype in (E4M3, E5M2):
        x = flash.operands(q, k, v, dtype=dtype, hadamard=True)
        o, lse = flash.flash_attention(x, causal=causal, out_dtype=torch.float32)
        straight = _fp8.quantise(v, dtype, "block", x.config.block_k)
        expected, expected_lse = _fp8.attention(x.q, x.k, straight, causal=causal, scale=q.shape[3] ** -0.5)
        assert torch.equal(lse.isneginf(), expected_lse.isneginf())
        assert rmse(o, expected.double()) <= 2e-2 * float(expected.double().square().mean().sqrt()) + 1e-6
        for _ in range(20):
            assert torch.equal(o, flash.flash_attention(x, causal=causal, out_dtype=torch.float32)[0])


@interpreted
@pytest.mark.parametrize("share", ["tensor", "head", "block"])
@pytest.mark.parametrize(("seqlen_q", "seqlen_k"), [(0, 33), (33, 0), (0, 0)])
def test_no_queries_and_no_keys_are_no_rows_and_zeros(share: str, seqlen_q: int, seqlen_k: int) -> None:
    q, k, v = tensors(seqlen_q=seqlen_q, seqlen_k=seqlen_k)
    x = flash.operands(q, k, v, dtype=E4M3, share=share, hadamard=True)
    o, lse = flash.flash_attention(x, causal=True)
    assert o.shape == (*q.shape[:3], v.shape[3])
    assert lse.shape == q.shape[:3]
    assert not o.any()
    assert bool(lse.isneginf().all())
