"""What the kernels do not take is one sentence, before anything is launched; a NaN is no row without keys."""

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


def starts(*numbers: int) -> Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)


BAD: dict[str, dict[str, Any]] = {
    "window 5 is out of range": {"window": 5},
    "causal 'yes' must be True or False": {"causal": "yes"},
    "cu_seqlens_q must be a tensor; got list": {"cu_seqlens_q": [0, 5], "cu_seqlens_k": [0, 7]},
    "softmax_scale inf": {"softmax_scale": math.inf},
    "softcap inf": {"softcap": math.inf},
    "softcap nan": {"softcap": math.nan},
    r"window \(5,\)": {"window": (5,)},
    r"window \(1, 2, 3\)": {"window": (1, 2, 3)},
    r"window \(1.5, 0\)": {"window": (1.5, 0)},
    r"window \(None, 0\)": {"window": (None, 0)},
    "seed 1.5": {"seed": 1.5, "dropout_p": 0.1},
    "bias is on meta, q on": {"bias": torch.zeros(1, 1, 1, 1, device="meta")},
    "sinks is on meta, q on": {"sinks": torch.zeros(2, device="meta")},
    "alibi_slopes is on meta, q on": {"alibi_slopes": torch.zeros(2, device="meta")},
}


@pytest.mark.parametrize("said", BAD)
def test_options_that_have_no_meaning_are_named(said: str) -> None:
    with pytest.raises(ValueError, match=said):
        flash.flash_attention(Q, K, V, **BAD[said])


@pytest.mark.parametrize(
    ("cu_q", "cu_k", "said"),
    [
        (starts(0, 9), starts(0, 7), "cu_seqlens_q must ascend from 0 to the 5 rows .* from 0 to 9"),
        (starts(0, 3), starts(0, 7), "cu_seqlens_q must ascend from 0 to the 5 rows .* from 0 to 3"),
        (starts(0, 5), starts(1, 7), "cu_seqlens_k must ascend from 0 to the 7 rows .* from 1 to 7"),
        (
            starts(0, 4, 2, 5),
            starts(0, 1, 2, 7),
            "cu_seqlens_q must ascend .* from 0 to 5 and falls from 4 to 2",
        ),
        (starts(0, 5), starts(0, 2, 7), "of 1 and 2 sequences; they must be of the same"),
        (starts(0), starts(0), "cu_seqlens_q must ascend"),
        (starts(0, 5).to("meta"), starts(0, 7), "cu_seqlens_q is on meta"),
    ],
)
def test_sequences_that_are_not_all_of_the_rows_are_named(cu_q: Tensor, cu_k: Tensor, said: str) -> None:
    """Where the device is asked for lengths: what no program writes, or lies outside, would be anything."""
    with pytest.raises(ValueError, match=said):
        flash.flash_attention(Q, K, V, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def test_a_length_below_0_is_named() -> None:
    with pytest.raises(ValueError, match="max_seqlen_k -1"):
        flash.flash_attention(
            Q, K, V, cu_seqlens_q=starts(0, 5), cu_seqlens_k=starts(0, 7), max_seqlen_q=5, max_seqlen_k=-1
        )


@pytest.mark.parametrize("name", FAMILY)
def test_tensors_that_cannot_be_read_as_they_are_are_named_and_not_copied(name: str) -> None:
    attention = FAMILY[name].flash_attention
    columns = rand(1, 2, 16, 5).mT
    for tensors, said in (
        ((columns, K, V), r"last stride of q must be 1, got \(160, 80, 1, 5\); accepted: q.contiguous\(\)"),
        ((Q, K, V.mT.contiguous().mT), "last stride of v must be 1"),
        ((Q, K.to("meta"), V), "k is on meta, q on"),
        ((Q[..., :0], K[..., :0], V), "head dims must be 1 to 256"),
    ):
        with pytest.raises(ValueError, match=said):
            attention(*tensors, causal=False)
    one = Q.expand(1, 2, 5, 16)[..., ::16]  # of one column the stride says nothing
    attention(one, K[..., ::16], V, causal=False)


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
