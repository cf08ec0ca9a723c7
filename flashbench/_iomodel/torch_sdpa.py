"""torch's scaled_dot_product_attention as its wrappers launch it: FlashAttention-2 with copies, and cuDNN.

Both backwards are flash-v2-atomic's: delta and a zeroed fp32 dQ, one kernel with K/V outside that adds to
it, a conversion. What is cuDNN's own is not published: its tiles are read off counters (an H100, cuDNN
9.19, torch 2.11; docs/counters.md): its TMA loads are those of 128 query rows a tile forward and of 128
key rows backward, to the byte.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flashbench._iomodel import flash_v2, splits
from flashbench._iomodel.tensors import FP16, sizes
from flashbench._iomodel.types import Spills, Step, Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench.problem import UNLIMITED, Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

FLASH_ASSUMPTIONS = (
    f"{flash_v2.ASSUMPTIONS}; one query: the heads of a group in one tile; o and do are copied into rows of"
    " all heads before the backward, as torch's wrapper makes them contiguous; spilled registers, counted"
    " for d = 64 and 128 in 16 bits, are told apart"
)
CUDNN_ASSUMPTIONS = (
    f"{flash_v2.ASSUMPTIONS}; tiles read off counters of cuDNN 9.19 on an H100; no lse where nothing needs a"
    " gradient"
)

SPILLED = {
    ("fwd", 64, False): (3072, 11264), ("fwd", 64, True): (3072, 13312),
    ("fwd", 128, False): (7168, 7168), ("fwd", 128, True): (7168, 8192),
    ("bwd", 64, False): (0, 19456), ("bwd", 64, True): (0, 12288),
    ("bwd", 128, False): (0, 2048), ("bwd", 128, True): (0, 3072),
}  # fmt: skip
"""Bytes of registers that torch 2.11's FlashAttention-2 writes to memory on an H100, by kernel, head dim and
mask: per visited tile and per thread block. Read off spill_write_bytes at N = 1k to 64k, which they give to
0.3 % (docs/counters.md); multiples of the 512 B of one register of 128 threads."""


def flash_forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """flash-v2's forward and the registers that it spills."""
    work = flash_v2.forward(problem, tiles, variant)
    first, *rest = work.steps
    return work._replace(steps=(_spilling(first, problem, "fwd", tiles["fwd"]), *rest))


def flash_backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """flash-v2-atomic's backward after copies of do and o.

    torch gives the kernel (batch, seqlen, head, dim) views of (batch, head, seqlen, dim) tensors, and makes
    o and do contiguous in that order, which they are already where there is one head or one row.
    """
    s = sizes(problem)
    work = flash_v2.atomic_backward(problem, tiles, variant)
    delta, main, *rest = work.steps
    main = _spilling(main, problem, "bwd", tiles["bwd"])
    if problem.num_heads == 1 or problem.seqlen_q == 1:
        return work._replace(steps=(delta, main, *rest))
    main = main._replace(read=_renamed(main.read))
    copies = tuple(
        Step(name=f"copy {name}", read={name: s.o}, write={_COPIES[name]: s.o}) for name in ("do", "o")
    )
    steps = (*copies, delta._replace(read=_renamed(delta.read)), main, *rest)
    return work._replace(steps=steps, extra_bytes=work.extra_bytes + 2 * s.o)


_COPIES = {"do": "do_rows", "o": "o_rows"}


def _renamed(read: Mapping[str, int]) -> dict[str, int]:
    return {_COPIES.get(name, name): size for name, size in read.items()}


def _spilling(step: Step, problem: Problem, kernel: str, tile: Tiles) -> Step:
    """The kernel with what its published build spills; as it is where nobody counted that build."""
    p = problem
    known = SPILLED.get((kernel, p.head_dim, p.causal)) if p.head_dim == p.head_dim_v else None
    other = p.window != (UNLIMITED, UNLIMITED) or p.dropout_p or p.dtype_bytes != FP16
    if known is None or other or tile != flash_v2.shipped_tiles(p, kernel, None):
        return step
    per_tile, per_block = known
    visited = step.exps // (tile.block_q * tile.block_k)
    held = step.ctas * (per_tile + per_block)
    return step._replace(spills=Spills(visited * per_tile + step.ctas * per_block, held))


def flash_tiles(problem: Problem, kernel: str, device: Device | None) -> Tiles:
    """flash-v2's, and those of the kernel for split K/V where the device would have it split."""
    if kernel == "fwd" and _splits(problem, device) > 1:
        return _split_tile(problem)
    return flash_v2.shipped_tiles(problem, kernel, device)


def flash_settle(
    problem: Problem, tiles: Mapping[str, Tiles], variant: Variant, device: Device | None
) -> Variant:
    """What is not asked for is torch's choice: of one query the heads of a group are packed, few are split.

    Source: flash-attention 2, flash_api.cpp, mha_fwd: seqlenq_ngroups_swapped, set_params_splitkv.
    """
    packs = _packs(problem) if variant.pack_gqa is None else variant.pack_gqa
    count = variant.num_splits
    if count == DEFAULT.num_splits and "fwd" in tiles:
        count = _splits(problem, device)
    same = count == variant.num_splits and packs == bool(variant.pack_gqa)
    return variant if same else replace(variant, pack_gqa=packs, num_splits=count)


def _packs(p: Problem) -> bool:
    unlimited = p.window == (UNLIMITED, UNLIMITED)
    return p.seqlen_q == 1 and p.group > 1 and unlimited and not p.dropout_p and p.head_dim % 8 == 0


def _split_tile(problem: Problem) -> Tiles:
    d = problem.head_dim
    return Tiles(64, 256 if d <= 64 else 128 if d <= 128 else 64)


def _splits(problem: Problem, device: Device | None) -> int:
    """Splits of K/V; 1 without a device, which decides."""
    if device is None or problem.dropout_p or problem.lengths:
        return 1
    load = splits.load(problem, _split_tile(problem), DEFAULT.packing(_packs(problem)))
    return splits.flash_attention_2(load, device.num_sms)


def cudnn_forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """flash-v2's forward, whose LSE cuDNN leaves out where nothing needs a gradient."""
    work, lse = flash_v2.forward(problem, tiles, variant), sizes(problem).lse
    steps = tuple(
        step._replace(write={name: size for name, size in step.write.items() if name != "lse"})
        for step in work.steps
    )
    return work._replace(steps=steps, extra_bytes=work.extra_bytes - lse, kept={"lse": lse})


def cudnn_backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """flash-v2-atomic's backward, whose two small kernels cuDNN has write in halves of sectors."""
    work = flash_v2.atomic_backward(problem, tiles, variant)
    return work._replace(steps=tuple(_halved(step) for step in work.steps))


def _halved(step: Step) -> Step:
    if step.name not in HALVED:
        return step
    name, share = HALVED[step.name]
    return step._replace(moved={name: round(step.write[name] * (1 + share))})


HALVED = {"delta": ("dq_acc", 0.11), "convert dq": ("dq", 0.62)}
"""What cuDNN's small kernels write, and of its sectors those that cross to L2 twice.

Their grids give each of 128 threads 8 numbers of fp32 to zero, 16 of 16 bits to convert: 32 B, a sector. That
takes two stores, as none is wider than 16 B. What part of the halves meets again on the way is counted, not
derived: 0.21 to 0.26 times a 16-bit tensor more in the first, 0.61 to 0.65 in the second, at every length,
and other in every run of the same cell (docs/counters.md).
"""


def cudnn_tiles(problem: Problem, kernel: str, device: Device | None) -> Tiles:
    """128 rows of what stays, forward and backward."""
    return Tiles(128, 128) if kernel == "fwd" else Tiles(64, 128)
