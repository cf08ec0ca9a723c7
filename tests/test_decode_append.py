"""What appending to a KV cache moves is what its model says, counted load by load in the interpreter."""

from __future__ import annotations

import importlib.util
from dataclasses import replace

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled, not interpreted", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from decoding import decode, lengths, make, normal, paged

from flashbench import iomodel
from flashbench._profilers import trace as tracing
from flashbench.iomodel import Append

KINDS = {"read": "loaded_bytes", "write": "stored_bytes", "atomic": "atomic_bytes"}


def assert_exact(used: tuple[int, ...], new: int, *, page_size: int = 0, fp8: bool = False) -> Append:
    """Sequences of a cache of 48 rows, 2 heads, 24 and 40 columns: traced is modelled, tensor by tensor."""
    _, cache = make(lengths(*used), dims=(24, 40), capacity=48)
    dtype = torch.float32 if fp8 else torch.float16  # an fp8 cache is given fp32 in the interpreter
    if fp8:
        one, two = torch.ones(2), torch.ones(2)
        cache = replace(
            cache, k=cache.k.to(decode.FP8), v=cache.v.to(decode.FP8), k_descale=one, v_descale=two
        )
    if page_size:
        whole = replace(cache, seqused_k=lengths(*[48] * len(used)))
        cache = replace(paged(whole, page_size), seqused_k=cache.seqused_k)
    rows = [normal(len(used), 2, new, width, dtype=dtype) for width in (24, 40)]
    (launch,) = tracing.trace(lambda: decode.append(cache, *rows))
    asked = Append(
        used=used, new=new, capacity=cache.capacity, num_kv_heads=2, head_dim=24, head_dim_v=40,
        dtype_bytes=dtype.itemsize, cache_bytes=cache.k.element_size(), page_size=page_size,
    )  # fmt: skip
    step = iomodel.append(asked)
    for kind, counted in KINDS.items():
        traced = {name.lower(): getattr(moved, counted) for name, moved in launch.arguments.items()}
        assert {name: count for name, count in traced.items() if count} == dict(getattr(step, kind)), kind
    assert (launch.programs, launch.flops) == (step.ctas, step.flops)
    return asked


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("page_size", [0, 3, 16])
def test_every_byte_of_an_append_is_in_the_model(page_size: int, fp8: bool) -> None:
    """One token, a piece of a prompt in two tiles of rows, and rows for which there is no room."""
    for used, new in (((0, 7, 30), 1), ((5,), 17), ((47, 20, 40), 5)):
        assert_exact(used, new, page_size=page_size, fp8=fp8)


def test_what_crosses_is_whole_sectors_of_what_is_looked_up() -> None:
    """A token of two heads in pages of 16: per program one sector of lengths and one of the table."""
    asked = assert_exact((15, 31), 1, page_size=16)
    step = iomodel.append(asked)
    assert step.moved == {"seqused_k": 4 * 32, "block_table": 4 * 32}
    many = iomodel.append(replace(asked, used=(0,), new=16, capacity=16, page_size=1))
    assert many.read["block_table"] == 2 * 16 * 4
    assert many.moved["block_table"] == 2 * 2 * 32  # 16 entries lie in two sectors
    full = iomodel.append(replace(asked, used=(48,), capacity=48))
    assert sum(full.write.values()) == full.moved["block_table"] == 0
