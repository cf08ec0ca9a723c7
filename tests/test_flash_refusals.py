"""A NaN is no row without keys."""

from __future__ import annotations

import importlib.util
import math

import pytest
import torch
from torch import Tensor

from flashbench.kernels import _triton, merge

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FAMILY = {name: _triton.load(DEVICE, name) for name in ("_flash_v2", "_flash_v1", "_flash_v2_atomic")}


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
