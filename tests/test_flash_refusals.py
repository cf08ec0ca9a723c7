"""A NaN is no row without keys."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from flashbench.kernels import _triton, merge

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILY = {name: _triton.load(DEVICE, name) for name in ("_flash_v2", "_flash_v1", "_flash_v2_atomic")}
flash: Any = FAMILY["_flash_v2"]


def rand(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


Q, K, V = rand(1, 2, 5, 16), rand(1, 2, 7, 16, seed=1), rand(1, 2, 7, 16, seed=2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("name", FAMILY)
def test_a_nan_is_in_o_and_in_lse_of_every_row_that_sees_it(name: str, dtype: torch.dtype) -> None:
    """Else a merge would take the row for one without keys, and leave no trace of it."""
    q, k, v = (x.to(dtype) for x in (Q, K, V))
    k = k.clone()
    k[0, 0, 5, 3] = math.nan
    o, lse = FAMILY[name].flash_attention(q, k, v, causal=True, return_lse=True)
    assert lse[0, 0].isnan().tolist() == [False, False, False, True, True]
    assert o[0, 0].isnan().all(1).tolist() == [False, False, False, True, True]
    assert not o[0, 1].isnan().any()
    assert not lse[0, 1].isnan().any()
    merged, merged_lse = merge([o, o], [lse, lse])
    assert torch.equal(merged.isnan(), o.isnan())
    assert torch.equal(merged_lse.isnan(), lse.isnan())


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_a_sink_of_minus_infinity_is_none_and_has_no_gradient(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in (K, Q, rand(1, 2, 5, 16, seed=2)))  # two rows have no key
    sinks = torch.tensor([-math.inf, 0.5], device=DEVICE).requires_grad_()
    o, lse = flash.flash_attention(q, k, v, causal=True, sinks=sinks, return_lse=True)
    without, its_lse = flash.flash_attention(q, k, v, causal=True, return_lse=True)
    assert torch.equal(o[:, 0], without[:, 0])
    assert torch.equal(lse[:, 0], its_lse[:, 0])
    assert lse[0, 0, :2].isneginf().all()
    assert not lse[0, 1].isinf().any()
    [gradient] = torch.autograd.grad(o.float().sum() + lse[:, 1].sum(), sinks)
    assert gradient[0] == 0.0
    assert gradient[1].abs() > 0.1
