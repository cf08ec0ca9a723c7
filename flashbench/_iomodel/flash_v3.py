"""FlashAttention-3 on Hopper: the traffic of FlashAttention-2 with larger tiles, packing and TMA.

The forward is FlashAttention-2's. The backward adds dQ with TMA reductions, and where a group of
query heads shares K/V also dK and dV, into fp32 accumulators that further kernels convert.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flashbench._iomodel import splits
from flashbench._iomodel.flash_v2 import forward as forward
from flashbench._iomodel.tensors import FP32, INT32, sizes
from flashbench._iomodel.types import Step, Tiles, Work
from flashbench._iomodel.variant import AUTO, DEFAULT, Variant
from flashbench._iomodel.visits import visits
from flashbench.problem import UNLIMITED, Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

ASSUMPTIONS = (
    "every tile of K and V comes from L2 once per query tile; TMA reads no row outside the tensor;"
    " row vectors and accumulators without the padding to whole tiles; o in the input dtype"
)


def refuses(problem: Problem) -> str | None:
    """What the published kernels do not take."""
    if problem.dtype_bytes > 2:
        return "the published kernels take 16-bit and fp8 inputs only"
    return "the published kernels have no dropout" if problem.dropout_p else None


def settle(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant, device: Device | None) -> Variant:
    """Packed where that fills the tiles better, with splits, and for a packed batch; splits by heuristic.

    Source: flash-attention 3, heuristics.h, should_pack_gqa and num_splits_heuristic.
    """
    if "fwd" not in tiles:
        return variant
    if variant.pack_gqa is None:
        variant = variant.packing(_packs(problem, tiles["fwd"].block_q, variant))
    if variant.num_splits == AUTO:
        trial = variant.packing(problem.group > 1)
        count = splits.flash_attention_3(splits.load(problem, tiles["fwd"], trial), splits.sms(device))
        variant = replace(trial if count > 1 else variant, num_splits=count)
    return variant


def _packs(problem: Problem, block_q: int, variant: Variant) -> bool:
    if problem.group == 1 or variant.blocks is not None:
        return False
    if problem.lengths or variant.num_splits > 1:
        return True

    def efficiency(rows: int) -> float:
        return rows / (-(-rows // block_q) * block_q)

    return efficiency(problem.seqlen_q) < 0.9 * efficiency(problem.seqlen_q * problem.group)


def backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """K/V outside; dQ by fp32 reductions, and dK, dV too where K/V is shared. See ``reducing_backward``."""
    return reducing_backward(problem, tiles["bwd"], variant)


def reducing_backward(problem: Problem, tile: Tiles, variant: Variant, *, cta_pair: bool = False) -> Work:
    """Preparation (delta, lse in base 2, zeroed dQ), one kernel with K/V outside, conversions.

    cta_pair: two thread blocks share a tile of block_k keys, half of it each. Of Q and dO each loads
    half the rows and, for the products that sum over queries, half the columns, of K its half twice
    (as it is and by columns); their dQ is summed before one reduction. Source: flash-attention 3,
    flash_bwd_launch_template.h; flash-attention 4, flash_bwd_sm100.py.
    """
    p, s = problem, sizes(problem)
    heads, e, d, dv = p.batch * p.num_heads, p.dtype_bytes, p.head_dim, p.head_dim_v
    seen = visits(p, tile.block_q, tile.block_k, variant)
    times = 2 if cta_pair else 1
    added = heads * seen.query_rows * d * FP32
    rows = times * heads * seen.query_rows
    pairs = heads * seen.tiles * tile.block_q * tile.block_k
    dq_acc = s.q // e * FP32
    shared = {"dk_acc": s.k // e * FP32, "dv_acc": s.v // e * FP32} if p.group > 1 else {}
    per_head = {"dk_acc": s.k_heads // e * FP32, "dv_acc": s.v_heads // e * FP32} if shared else {}
    read = {"k": times * s.k_heads, "v": s.v_heads, "q": rows * d * e, "do": rows * dv * e,
            "lse_log2": rows * FP32, "delta": rows * FP32}  # fmt: skip
    ctas = times * heads * -(-p.seqlen_k // tile.block_k)
    if variant.blocks is not None:
        read["block_lists"] = heads * variant.blocks.transposed.entries(p.seqlen_k, tile.block_k) * INT32
    prepare = Step(
        name="prepare", read={"o": s.o, "do": s.o, "lse": s.lse},
        write={"delta": s.lse, "lse_log2": s.lse, "dq_acc": dq_acc},
    )  # fmt: skip
    main = Step(
        name="backward", read=read, write={} if shared else {"dk": s.k, "dv": s.v},
        atomic={"dq_acc": added, **per_head}, flops=2 * pairs * (3 * d + 2 * dv), exps=pairs, ctas=ctas,
    )  # fmt: skip
    steps = [prepare, main, Step(name="convert dq", read={"dq_acc": dq_acc}, write={"dq": s.q})]
    if shared:
        steps.insert(1, Step(name="zero dk, dv", read={}, write=shared))
        steps.append(Step(name="convert dk, dv", read=shared, write={"dk": s.k, "dv": s.v}))
    extra = s.q + s.k + s.v + 2 * s.lse + dq_acc + sum(shared.values())
    return Work(steps=tuple(steps), extra_bytes=extra)


def is_local(problem: Problem) -> bool:
    """Whether the kernels take their path for windows; without a left limit, right 0 is causal."""
    left, right = problem.window
    return left != UNLIMITED or (right > 0 and not problem.causal)


def shipped_tiles(problem: Problem, kernel: str, _: Device | None) -> Tiles:
    """The published tiles for Hopper.

    Source: flash-attention 3, tile_size.h (forward) and flash_bwd_launch_template.h (backward).
    """
    d, dv, local = problem.head_dim, problem.head_dim_v, is_local(problem)
    masked = problem.masked
    if kernel == "bwd":
        return _shipped_backward(max(d, dv), masked)
    if problem.dtype_bytes == 1:
        return _shipped_fp8(d, local)
    if d <= 64:
        if dv > 256:
            return Tiles(64, 64)
        return Tiles(128, 96) if dv > 192 else Tiles(192, 128 if masked else 192)
    if d <= 96:
        return Tiles(192, 128 if local else 144)
    if d <= 128:
        return Tiles(128, 128 if masked else 176)
    if d <= 192:
        return Tiles(128, 96 if local else 128 if dv <= 128 else 112)
    return Tiles(128, 64 if local else 80)


def _shipped_fp8(d: int, local: bool) -> Tiles:
    if d <= 64:
        return Tiles(192, 160)
    if d <= 96:
        return Tiles(192, 128)
    if d <= 128:
        return Tiles(128, 224)
    return Tiles(128, 160) if d <= 192 else Tiles(128, 64 if local else 128)


def _shipped_backward(d: int, masked: bool) -> Tiles:
    if d <= 64:
        return Tiles(128, 128)
    if d <= 96:
        return Tiles(64, 128)
    if d <= 128:
        return Tiles(64 if masked else 80, 128)
    return Tiles(64, 96) if d <= 192 else Tiles(64, 80)
