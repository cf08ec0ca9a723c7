"""Derived values, to the byte: B·H = 64, N = 4096, d = 128, bf16, MHA; and published figures.

The derivations are in docs/io-model.md; each number here was computed by hand from the loops.
"""

from __future__ import annotations

from typing import Any

import pytest

from flashbench import iomodel, plan
from flashbench.iomodel import estimate
from flashbench.problem import Problem

SRAM = 192 * 1024
GIGA = 1e9


def problem(**changes: Any) -> Problem:
    values: dict[str, Any] = {
        "batch": 4, "num_heads": 16, "num_kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096,
        "head_dim": 128, "head_dim_v": 128, "dtype": "bf16", "causal": False,
    }  # fmt: skip
    return Problem(**{**values, **changes})


def tile(block_q: int, block_k: int, kernel: str = "") -> dict[str, int]:
    return {f"{kernel}block_q": block_q, f"{kernel}block_k": block_k}


TWO_KERNELS = tile(64, 128, "dkdv_") | tile(128, 64, "dq_")

GOLDEN: list[tuple[str, str, bool, dict[str, Any], tuple[int, int, int]]] = [
    ("standard", "fwd", False, {}, (4_563_402_752, 4_429_185_024, 0)),
    ("standard", "bwd", False, {}, (15_435_038_720, 6_710_886_400, 0)),
    ("flash-v1", "fwd", False, {"sram_bytes": SRAM}, (3_133_145_088, 1_591_738_368, 0)),
    ("flash-v1-cuda", "fwd", False, {}, (6_474_956_800, 4_261_412_864, 0)),
    ("flash-v1-cuda", "bwd", False, {}, (8_723_103_744, 4_363_124_736, 0)),
    ("flash-v2", "fwd", False, {"tiles": tile(128, 128)}, (4_362_076_160, 68_157_440, 0)),
    ("flash-v2", "fwd", False, {"tiles": tile(128, 32)}, (4_362_076_160, 68_157_440, 0)),
    ("flash-v2", "fwd", True, {"tiles": tile(128, 128)}, (2_281_701_376, 68_157_440, 0)),
    ("flash-v2", "fwd", True, {"tiles": tile(128, 64)}, (2_281_701_376, 68_157_440, 0)),
    ("flash-v2", "fwd", False, {"tiles": tile(64, 64)}, (8_657_043_456, 68_157_440, 0)),
    ("flash-v2", "fwd", True, {"tiles": tile(64, 64)}, (4_429_185_024, 68_157_440, 0)),
    ("flash-v2-atomic", "bwd", False, {"tiles": tile(64, 128)}, (4_764_729_344, 336_592_896, 4_294_967_296)),
    ("flash-v2-atomic", "bwd", True, {"tiles": tile(64, 128)}, (2_651_848_704, 336_592_896, 2_214_592_512)),
    ("flash-v2", "bwd", False, {"tiles": TWO_KERNELS}, (9_061_793_792, 202_375_168, 0)),
]


@pytest.mark.parametrize(("model", "pass_", "causal", "options", "expected"), GOLDEN)
def test_golden_values(
    model: str, pass_: str, causal: bool, options: dict[str, Any], expected: tuple[int, int, int]
) -> None:
    moved = estimate(model, problem(causal=causal), pass_, **options).requested
    assert (moved.read_bytes, moved.write_bytes, moved.atomic_bytes) == expected


def test_compulsory_bytes_and_flops() -> None:
    least = iomodel.compulsory(problem(), "fwd")
    assert (least.read_bytes, least.write_bytes) == (201_326_592, 68_157_440)
    assert iomodel.flops(problem(), "fwd") == 549_755_813_888


def test_what_a_forward_of_flash_holds_is_told_apart() -> None:
    """Of 16 heads of 4k at head dim 64: inputs, o and the fp32 LSE; and a score matrix of 32 of 2k."""
    p = problem(batch=1, head_dim=64, head_dim_v=64, dtype="fp16")
    assert plan.input_bytes(p, "fwd") == 25_165_824
    found = estimate("flash", p, "fwd").extra_bytes
    assert found == 8_388_608 + 262_144
    scores = problem(batch=1, num_heads=32, num_kv_heads=32, seqlen_q=2048, seqlen_k=2048)
    assert estimate("standard", scores, "fwd").requested.write["s"] == 268_435_456


def test_flops_are_the_formulas_where_no_counter_counts() -> None:
    p = problem(batch=1, num_heads=12, num_kv_heads=12, seqlen_q=64, seqlen_k=64, head_dim=64, head_dim_v=64)
    assert iomodel.flops(p, "fwd") == 12_582_912  # torch's counter on a CPU says 0


def test_standard_backward_moves_fourteen_score_matrices_in_both_passes() -> None:
    one = 64 * 4096 * 4096 * 2
    both = estimate("standard", problem(), "fwd+bwd").requested
    matrices = {
        name: both.read.get(name, 0) + both.write.get(name, 0) for name in ("s", "p", "dp", "dp_p", "ds")
    }
    assert sum(matrices.values()) == 14 * one


def test_naive_needs_275_gb_at_64k() -> None:
    row = estimate("standard", problem(batch=1, seqlen_q=65536, seqlen_k=65536), "fwd")
    assert row.extra_bytes == 2 * 16 * 65536**2 * 2
    assert round(row.extra_bytes / GIGA) == 275


def test_figure_2_of_the_paper_is_consistent_with_the_model() -> None:
    """HBM R/W of FlashAttention's Figure 2 (B=64, H=16, N=1024, d=64, fp16): printed 4.4 GB.

    Algorithms 2 and 4 with M = 192 KB give 4.65 GB, release 1.0's scratch without L2 reuse 6.10.
    The figure does not say which it counts, so it cannot be reproduced, only be consistent.
    """
    p = problem(batch=64, seqlen_q=1024, seqlen_k=1024, head_dim=64, head_dim_v=64, dtype="fp16")
    paper = estimate("flash-v1", p, "fwd+bwd", sram_bytes=SRAM)
    assert (paper.tiles["fwd_block_k"], paper.tiles["fwd_block_q"]) == (384, 64)
    assert round(paper.requested.total_bytes / GIGA, 2) == 4.65
    assert round(estimate("flash-v1-cuda", p, "fwd+bwd").requested.total_bytes / GIGA, 2) == 6.10


@pytest.mark.parametrize(("block_k", "gigabytes"), [(64, 7.12), (128, 3.77), (256, 2.09), (512, 1.25)])
def test_block_sizes_of_figure_2(block_k: int, gigabytes: float) -> None:
    """Figure 2, middle: Algorithm 2's bytes fall with the K/V block. The figure has no table."""
    p = problem(batch=64, seqlen_q=1024, seqlen_k=1024, head_dim=64, head_dim_v=64, dtype="fp16")
    row = estimate("flash-v1", p, "fwd", tiles={"block_q": 64, "block_k": block_k})
    assert round(row.requested.total_bytes / GIGA, 2) == gigabytes


@pytest.mark.parametrize(
    ("seqlen", "standard_mib"), [(256, 104), (512, 336), (1024, 1184), (2048, 4416), (4096, 17024)]
)
def test_memory_of_standard_attention_is_the_papers_table_21(seqlen: int, standard_mib: int) -> None:
    """A100, B=16 H=8 d=64 fp16, fwd+bwd: printed are 4P + 10 tensors, MiB.

    The model has q, k, v, do; p, dp, dp·p, ds; q_scaled, o, dv. The other three tensors are the
    packed q, k, v that the authors' script also holds. At 128 and below, P is too small to peak.
    """
    p = problem(batch=16, num_heads=8, num_kv_heads=8, seqlen_q=seqlen, seqlen_k=seqlen, head_dim=64,
                head_dim_v=64, dtype="fp16")  # fmt: skip
    tensor = 16 * 8 * seqlen * 64 * 2
    inputs = 4 * tensor
    assert estimate("standard", p, "fwd+bwd").extra_bytes + inputs + 3 * tensor == standard_mib * 2**20


def test_requested_saving_is_twice_the_tile_over_the_head_dim() -> None:
    """At SM to L2, FlashAttention-2 saves 2·block_q/d over standard for long sequences, not more."""
    for d, expected in ((64, 4.0), (128, 2.0)):
        p = problem(seqlen_q=2**18, seqlen_k=2**18, head_dim=d, head_dim_v=d)
        standard = estimate("standard", p, "fwd").requested.total_bytes
        flash = estimate("flash-v2", p, "fwd", tiles=tile(128, 64)).requested.total_bytes
        assert standard / flash == pytest.approx(expected, rel=0.01)


@pytest.mark.parametrize(("model", "limit"), [("flash-v1", 3), ("flash-v2", 1)])
@pytest.mark.parametrize("d", [64, 128, 256])
def test_flash_beats_standard_only_above_its_memory_threshold(model: str, limit: int, d: int) -> None:
    """v1 needs M > 3d² elements, v2 M > d², for long sequences (v1 more: it also moves l and m)."""
    p = problem(seqlen_q=2**18, seqlen_k=2**18, head_dim=d, head_dim_v=d)
    standard = estimate("standard", p, "fwd").requested.total_bytes

    def flash(elements: int) -> int:
        return estimate(model, p, "fwd", sram_bytes=2 * elements).requested.total_bytes

    assert flash(round(limit * d * d * 0.95)) > standard
    assert flash(round(limit * d * d * (1.15 if model == "flash-v1" else 1.05))) < standard
