"""The model's bytes and FLOPs of ``flash-fp8`` are its kernel's own, counted in the interpreter."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
from typing import Any

import pytest
import torch
from attention import problem
from fp8 import E4M3, with_outliers

from flashbench import iomodel
from flashbench import tracing as joined
from flashbench._profilers import trace as tracing
from flashbench.errors import SpecError
from flashbench.flash_configs import Config
from flashbench.kernels import _triton
from flashbench.problem import Problem

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled, not interpreted", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
_triton.load("cpu")
flash = importlib.import_module("flashbench.kernels._flash_fp8")

SHAPES: dict[str, dict[str, int]] = {
    "whole tiles": {"seqlen_q": 64, "seqlen_k": 64},
    "a ragged tile, padded": {"seqlen_q": 45, "seqlen_k": 83},
    "a ragged tile of whole 16": {"seqlen_q": 33, "seqlen_k": 80},
    "one key": {"seqlen_q": 37, "seqlen_k": 1},
    "rows without keys": {"seqlen_q": 70, "seqlen_k": 9},
    "shared": {"seqlen_q": 20, "seqlen_k": 50, "num_kv_heads": 2},
    "dims in pieces": {"seqlen_q": 33, "seqlen_k": 35, "head_dim": 96, "head_dim_v": 40},
}


def run(p: Problem, config: Config) -> tracing.Launch:
    q, k, v = (
        with_outliers(p.batch, heads, rows, dim, seed=0)
        for heads, rows, dim in (
            (p.num_heads, p.seqlen_q, p.head_dim),
            (p.num_kv_heads, p.seqlen_k, p.head_dim),
            (p.num_kv_heads, p.seqlen_k, p.head_dim_v),
        )
    )
    x = flash.operands(q, k, v, dtype=E4M3, config=config)
    (launch,) = tracing.trace(lambda: flash.flash_attention(x, causal=p.causal, out_dtype=torch.float16))
    return launch


@pytest.mark.parametrize("tile", [(32, 32), (16, 64), (64, 16)], ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_every_byte_and_product_of_the_kernel_is_in_the_model(shape: str, tile: tuple[int, int]) -> None:
    for causal, dtype in itertools.product((False, True), ("fp8", "fp8-e5m2")):
        options: dict[str, Any] = {"batch": 1, "head_dim": 32, "head_dim_v": 32, **SHAPES[shape]}
        p = problem(**options, dtype=dtype, causal=causal)
        row = iomodel.estimate("flash-fp8", p, "fwd", tiles={"fwd_block_q": tile[0], "fwd_block_k": tile[1]})
        launch = run(p, Config(*tile, 4, 1))
        (step,) = row.steps
        moved = {name.lower(): argument for name, argument in launch.arguments.items()}
        assert {name: one.loaded_bytes for name, one in moved.items() if one.loaded_bytes} == {
            name: count for name, count in step.read.items() if count
        }
        assert {name: one.stored_bytes for name, one in moved.items() if one.stored_bytes} == step.write
        assert launch.flops == step.flops
        assert launch.programs == step.ctas
        found = joined.compare((launch,), row)
        assert (found["difference_bytes"], found["difference_flops"]) == (0, 0)
        assert row.extra_bytes == sum(step.write.values())


def test_scales_are_as_many_as_tiles_and_v_is_padded_to_16_keys() -> None:
    p = problem(dtype="fp8", batch=1, num_heads=1, num_kv_heads=1, seqlen_q=64, seqlen_k=33, causal=False,
                head_dim=32, head_dim_v=32)  # fmt: skip
    read = iomodel.estimate("flash-fp8", p, "fwd", tiles={"block_q": 32, "block_k": 32}).requested.read
    assert read == {
        "q": 64 * 32, "k": 2 * 33 * 32, "v": 2 * 48 * 32, "q_scale": 4 * 2, "k_scale": 4 * 4, "v_scale": 4 * 4
    }  # fmt: skip


def test_what_the_kernel_does_not_do_is_refused() -> None:
    with pytest.raises(SpecError, match="does not take bf16"):
        iomodel.estimate("flash-fp8", problem(dtype="bf16"), "fwd")
    with pytest.raises(SpecError, match="'flash-fp8' has no pass 'bwd'; accepted: fwd"):
        iomodel.estimate("flash-fp8", problem(dtype="fp8"), "bwd")
    with pytest.raises(SpecError, match="no window"):
        iomodel.estimate("flash-fp8", problem(dtype="fp8", window=(4, 0)), "fwd")
    with pytest.raises(SpecError, match="do not take fp8-e5m2"):
        iomodel.estimate("flash", problem(dtype="fp8-e5m2"), "fwd")
