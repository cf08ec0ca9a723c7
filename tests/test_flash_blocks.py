"""Block masks in the bundled kernels: against fp64 with every other option, and against what they equal.

On a machine without a GPU this runs in Triton's interpreter, on one the compiled kernels.
"""

from __future__ import annotations

import importlib.util
from typing import Any

import numpy
import pytest
import torch
from attention import problem, run
from torch import Tensor

from flashbench import block_masks, kernels, named_masks
from flashbench.flash_configs import Config
from flashbench.kernels import Target, _triton
from flashbench.kernels._block_mask import DeviceMask, from_flex
from flashbench.kernels._inputs import make_inputs
from flashbench.kernels._reference import Reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
FLASH = kernels.get("flash")
REASON = FLASH.why_unavailable(Target(device=DEVICE, capability=CAPABILITY))
assert REASON is None, REASON
attention = _triton.load(DEVICE).flash_attention

SHAPE = {"batch": 1, "num_heads": 2, "num_kv_heads": 1, "seqlen_q": 140, "seqlen_k": 170, "head_dim": 24,
         "head_dim_v": 16, "causal": False}  # fmt: skip
CASES: dict[str, dict[str, Any]] = {
    "causal": {"block_mask": "causal", "dtype": "fp32"},
    "window": {"block_mask": "window", "seqlen_k": 400, "seqlen_q": 129},
    "butterfly": {"block_mask": "butterfly", "seqlen_q": 140, "seqlen_k": 400},
    "document": {"block_mask": "document", "dtype": "bf16"},
    "random": {"block_mask": "random:0.4", "seqlen_q": 300, "seqlen_k": 300},
    "under a causal mask": {"block_mask": "document", "causal": True, "dtype": "fp32"},
    "in a window": {"block_mask": "random:0.5", "window": (40, 9), "alignment": "top-left"},
    "more queries": {"block_mask": "causal", "seqlen_q": 200, "seqlen_k": 70, "dtype": "fp32"},
    "softcap": {"block_mask": "document", "softcap": 1.5, "dtype": "fp32"},
    "alibi": {"block_mask": "document", "alibi": True, "causal": True},
    "bias": {"block_mask": "document", "bias": "1hqk", "dtype": "fp32"},
    "shared bias": {"block_mask": "causal", "bias": "b1q1"},
    "sinks": {"block_mask": "causal", "sinks": True, "seqlen_q": 200, "seqlen_k": 70, "dtype": "fp32"},
    "dropout": {"block_mask": "document", "dropout_p": 0.3},
    "bshd": {"block_mask": "document", "layout": "bshd", "batch": 2},
    "one key": {"block_mask": "document", "seqlen_k": 1, "seqlen_q": 9},
}


@pytest.mark.parametrize("name", CASES)
def test_is_within_budget(name: str) -> None:
    p = problem(**{**SHAPE, "dtype": "fp16", **CASES[name]})
    inputs = make_inputs(p, DEVICE, 0)
    o, *gradients = run(FLASH, p, inputs)
    accuracy = Reference(p, inputs).compare(o, gradients)
    assert accuracy.ok, f"{p.key}: {accuracy}"


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def results(nq: int, nk: int, **options: Any) -> list[Tensor]:
    """o, lse, dq, dk, dv of fp32 inputs that are the same in every call."""
    shapes = ((1, 2, nq, 16), (1, 1, nk, 16), (1, 1, nk, 16))
    leaves = [rand(*shape, seed=seed).requires_grad_() for seed, shape in enumerate(shapes)]
    o, lse = attention(*leaves, return_lse=True, **options)
    return [o.detach(), lse.detach(), *torch.autograd.grad(o, leaves, rand(*o.shape, seed=7))]


def assert_alike(one: list[Tensor], other: list[Tensor]) -> None:
    """Sums of the same terms in another order."""
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def named(name: str, nq: int, nk: int, **changes: Any) -> DeviceMask:
    host = named_masks.of(problem(seqlen_q=nq, seqlen_k=nk, block_mask=name, **changes))
    return DeviceMask(host, DEVICE)


@pytest.mark.parametrize(("nq", "nk"), [(150, 150), (140, 270), (200, 70)])
def test_the_causal_block_mask_is_the_causal_mask(nq: int, nk: int) -> None:
    sparse, dense = results(nq, nk, block_mask=named("causal", nq, nk)), results(nq, nk, causal=True)
    assert torch.equal(sparse[0], dense[0])  # the forward in the same order, too
    assert_alike(sparse, dense)


def test_the_window_block_mask_is_a_band() -> None:
    sparse = results(40, 400, block_mask=named("window", 40, 400, alignment="top-left"))
    assert_alike(sparse, results(40, 400, window=(256, 256), top_left=True))


def test_every_key_seen_is_no_mask() -> None:
    full = DeviceMask(block_masks.from_blocks(numpy.ones((1, 2), bool), 128, 150), DEVICE)
    assert_alike(results(128, 150, block_mask=full), results(128, 150))


def test_documents_are_packed_sequences() -> None:
    lengths = named_masks.cuts(150, seed=0)
    assert 0 < min(lengths) < max(lengths) < 150
    starts = torch.tensor([0, *lengths]).cumsum(0).to(DEVICE, torch.int32)
    packed = results(150, 150, cu_seqlens_q=starts, cu_seqlens_k=starts)
    assert_alike(results(150, 150, block_mask=named("document", 150, 150)), packed)


@pytest.mark.parametrize("sinks", [False, True])
def test_rows_that_see_nothing_are_zero(sinks: bool) -> None:
    """A whole block of queries, and rows of partial blocks; a key that nobody sees."""
    seen = numpy.random.RandomState(0).random_sample((300, 140)) < 0.5
    seen[128:256] = seen[:, 5] = seen[[3, 280]] = False
    mask, more = DeviceMask(block_masks.from_elements(seen), DEVICE), {}
    if sinks:
        more["sinks"] = rand(2, seed=9)
    o, lse, dq, dk, dv = results(300, 140, block_mask=mask, **more)
    empty = torch.from_numpy(~seen.any(1)).to(DEVICE)
    assert not any(x.isnan().any() for x in (o, lse, dq, dk, dv))
    assert not o[:, :, empty].any()
    assert not dq[:, :, empty].any()
    expected = more["sinks"][None, :, None] if sinks else torch.tensor(-torch.inf, device=DEVICE)
    torch.testing.assert_close(lse[:, :, empty], expected.expand(1, 2, int(empty.sum())))
    assert not dk[:, :, 5].any()
    assert not dv[:, :, 5].any()
    assert dq[:, :, ~empty].any(-1).all()
    assert dk[:, :, 6].any()


def test_the_order_of_tiles_is_fixed() -> None:
    mask = named("random:0.6", 200, 200)
    one, two = (results(200, 200, block_mask=mask) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_a_mask_of_flex_attention_is_taken() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return (q // 50 >= k // 50) | (k == 3)

    flex = create_block_mask(mod, None, None, 140, 170, device=DEVICE)
    given, converted = (results(140, 170, block_mask=mask) for mask in (flex, from_flex(flex)))
    assert all(torch.equal(a, b) for a, b in zip(given, converted, strict=True))
    i, j = torch.arange(140)[:, None], torch.arange(170)
    wanted = DeviceMask(block_masks.from_elements(((i // 50 >= j // 50) | (j == 3)).numpy()), DEVICE)
    assert_alike(given, results(140, 170, block_mask=wanted))


def test_what_does_not_go_with_a_block_mask_is_refused_in_a_line() -> None:
    mask = named("causal", 140, 170)
    starts = torch.tensor([0, 140], dtype=torch.int32, device=DEVICE)
    packed = {"cu_seqlens_q": starts, "cu_seqlens_k": starts}
    for options, message in (
        ({"block_mask": mask, **packed}, "packed sequences take no block_mask"),
        ({"block_mask": torch.ones(2, 2)}, "must be a DeviceMask of flashbench or a BlockMask of torch's"),
        ({"block_mask": named("causal", 140, 140)}, r"is of \(140, 140\) queries and keys; q and k have"),
        ({"block_mask": DeviceMask(mask.host, "meta")}, "block_mask is on meta, q on"),
        (
            {"block_mask": mask, "configs": (("fwd", Config(256, 64, 8, 1)),)},
            "fwd tile 256 x 64 does not divide a block of 128",
        ),
    ):
        with pytest.raises(ValueError, match=message) as raised:
            results(140, 170, **options)
        assert "\n" not in str(raised.value)
    for name in ("flash-v1", "flash-v2-atomic", "flash-decode", "sdpa"):
        row = kernels.registry().get(name)
        if row is not None:
            reason = row.why_unsupported(problem(block_mask="causal"), "fwd", Target())
            assert reason == "it does not take block-mask", name


def test_a_row_of_the_table_fits_every_block() -> None:
    """Tiles that a block mask may be asked with divide its blocks."""
    from flashbench.flash_configs import TABLE, with_bias

    configs = [c for row in TABLE if row.kernel in ("fwd", "dq", "dkdv") for c in row.configs]
    for config in (*configs, *map(with_bias, configs)):
        assert block_masks.SIZE % config.block_q == block_masks.SIZE % config.block_k == 0
