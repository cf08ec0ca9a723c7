"""The model's bytes and FLOPs of ``flash-decode`` are its kernels' own, counted load by load."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from typing import Any

import pytest
import torch

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled, not interpreted", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

from attention import problem
from decoding import decode, lengths, make, paged

from flashbench import decode_configs, devices, iomodel
from flashbench import tracing as joined
from flashbench._profilers import trace as tracing
from flashbench.decode_configs import DecodeConfig
from flashbench.errors import SpecError
from flashbench.iomodel import Variant
from flashbench.problem import Cell, Problem, packed

TORCH = {"fp16": torch.float16, "fp32": torch.float32}


def asked(**changes: Any) -> Problem:
    shape = {"num_heads": 4, "num_kv_heads": 2, "seqlen_q": 1, "seqlen_k": 100, "head_dim": 16,
             "head_dim_v": 16, "dtype": "fp16"}  # fmt: skip
    return problem(**{**shape, **changes})


def assert_exact(
    p: Problem, split: int, *, page_size: int = 0, fp8: bool = False, ahead: bool = False
) -> None:
    """What the kernels move with tiles of 16 keys and splits of ``split`` is what the model says."""
    q, cache = make(
        lengths(*[p.seqlen_k] * p.batch), heads=(p.num_heads, p.num_kv_heads), seqlen_q=p.seqlen_q,
        dims=(p.head_dim, p.head_dim_v), dtype=TORCH[p.dtype],
    )  # fmt: skip
    if fp8:
        one, two = torch.ones(p.num_kv_heads), torch.ones(p.num_kv_heads)
        cache = replace(
            cache, k=cache.k.to(decode.FP8), v=cache.v.to(decode.FP8), k_descale=one, v_descale=two
        )
    if page_size:
        cache = replace(paged(cache, page_size), max_seqlen_k=p.seqlen_k)
    call = decode.Call(
        causal=p.causal, scale=p.softmax_scale, split_keys=split, config=DecodeConfig(16, 4, 1, ahead=ahead)
    )
    launches = tracing.trace(lambda: decode.run(q, cache, call))
    math = decode_configs.math_of("fp16" if fp8 else p.dtype)
    rows = decode_configs.block_q(p.group * p.seqlen_q, math)
    tiles = {"fwd_block_q": rows, "fwd_block_k": 16, "split_block_q": rows, "split_block_k": split}
    variant = Variant(page_size=page_size, cache_bytes=int(fp8))
    row = iomodel.estimate("flash-decode", p, "fwd", tiles=tiles, variant=variant)
    found = joined.compare(launches, row)
    assert (found["difference_bytes"], found["difference_flops"]) == (0, 0), found["kernels"]
    assert [launch.programs for launch in launches][:1] == [row.steps[0].ctas]


SHAPES = {
    "one query": {},
    "speculative, ragged": {"seqlen_q": 5, "seqlen_k": 77, "head_dim": 40, "head_dim_v": 72},
    "mqa": {"num_kv_heads": 1, "seqlen_q": 3},
    "mha": {"num_kv_heads": 4, "seqlen_k": 33},
    "several query tiles": {"num_kv_heads": 1, "seqlen_q": 40, "seqlen_k": 50},
    "rows without keys": {"seqlen_q": 40, "seqlen_k": 9},
    "one key": {"seqlen_k": 1, "seqlen_q": 2},
    "head dims in pieces": {"head_dim": 96, "head_dim_v": 80, "seqlen_k": 20},
}


@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_and_product_is_in_the_model(shape: str) -> None:
    for dtype in TORCH:
        for causal, split in ((True, 16), (True, 48), (False, 32), (True, 1024)):
            assert_exact(asked(**SHAPES[shape], dtype=dtype, causal=causal, batch=1), split)


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("page_size", [1, 3, 16, 24, 32])
def test_pages_and_their_table_too(page_size: int, ahead: bool) -> None:
    for split in (32, 128):
        assert_exact(asked(seqlen_q=3, seqlen_k=77), split, page_size=page_size, ahead=ahead)


@pytest.mark.parametrize("page_size", [0, 5])
def test_a_cache_in_fp8_and_its_scales(page_size: int) -> None:
    for dtype in TORCH:
        assert_exact(asked(seqlen_q=2, dtype=dtype, head_dim_v=40), 48, page_size=page_size, fp8=True)


def test_the_implementation_as_profile_traces_it() -> None:
    p = asked(seqlen_k=700, seqlen_q=2, batch=1)
    cell = Cell(implementation="flash-decode", problem=p, pass_="fwd")
    found = joined.trace_cell(cell)
    assert (found["difference_bytes"], found["difference_flops"]) == (0, 0)
    assert [kernel["step"] for kernel in found["kernels"]] == ["decode", "merge"]


def test_the_predicted_memory_is_that_of_outputs_and_workspace() -> None:
    for split in (16, 512):
        p = asked(seqlen_q=3, batch=2)
        q, cache = make(lengths(100, 100), seqlen_q=3)
        call = decode.Call(causal=True, scale=0.1, split_keys=split, config=DecodeConfig(16, 4, 1))
        o, lse, launches = decode.launches(q, cache, call)
        parts = [x for x in launches[0].args[5:7] if x is not None]
        tiles = {"fwd_block_q": 16, "fwd_block_k": 16, "split_block_q": 16, "split_block_k": split}
        row = iomodel.estimate("flash-decode", p, "fwd", tiles=tiles)
        assert sum(x.nbytes for x in (o, lse, *parts)) == row.extra_bytes


def test_the_model_takes_the_tiles_of_the_card_and_predicts_the_time_of_the_cache() -> None:
    h100 = devices.find("h100-sxm")
    p = asked(num_heads=32, num_kv_heads=8, seqlen_k=131072, head_dim=128, head_dim_v=128, dtype="bf16")
    row = iomodel.estimate("flash-decode", p, "fwd", device=h100)
    assert [step.name for step in row.steps] == ["decode", "merge"]
    assert row.requested.total_bytes < 1.02 * row.compulsory.total_bytes
    found = iomodel.predict(row, h100)
    assert found.parts[0].limiting == "DRAM"
    assert 1 < found.time_s / (row.compulsory.total_bytes / h100.hbm_bytes_per_s) < 1.3
    half = iomodel.estimate("flash-decode", p, "fwd", device=h100, variant=Variant(cache_bytes=1))
    assert 0.49 < half.requested.read["k"] / row.requested.read["k"] < 0.51


def test_caches_of_different_lengths_are_those_of_each_and_the_same_queries_are_wanted() -> None:
    """Splits are counted for the longest, as one launch has one length of a split."""
    tiles = {"fwd_block_q": 16, "fwd_block_k": 16, "split_block_q": 16, "split_block_k": 48}

    def read(*lengths: tuple[int, int], **changes: int) -> iomodel.Estimate:
        p = packed(asked(causal=True), lengths)
        return iomodel.estimate("flash-decode", p, "fwd", tiles=tiles, variant=Variant(**changes))

    long, short, both = read((2, 100)), read((2, 9)), read((2, 100), (2, 9), (2, 9), (2, 0))
    for name in ("k", "v"):
        one, other = (row.requested.read[name] for row in (long, short))
        assert both.requested.read[name] == one + 2 * other
    assert [step.ctas for step in both.steps][:1] == [4 * long.steps[0].ctas]
    assert len(read((2, 100), announced=48).steps) == 1
    assert read((2, 100), announced=48).requested.read["k"] == long.requested.read["k"]
    with pytest.raises(SpecError, match="as many queries of every sequence"):
        read((2, 100), (1, 9))
    with pytest.raises(SpecError, match="announced -1 is out of range"):
        Variant(announced=-1)
    with pytest.raises(SpecError, match="has no announced; accepted: flash-decode"):
        iomodel.estimate("flash-v2", asked(), "fwd", variant=Variant(announced=3))


def test_decoding_has_no_backward() -> None:
    for pass_ in ("bwd", "fwd+bwd"):
        with pytest.raises(SpecError, match=r"no pass.*accepted: fwd"):
            iomodel.estimate("flash-decode", asked(), pass_)
