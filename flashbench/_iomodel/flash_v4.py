"""FlashAttention-4 on Blackwell: 256 query rows per thread block, a backward of thread block pairs.

A thread block of the forward holds two tiles of 128 queries, which share every K/V tile that it
reads. In the backward the two thread blocks of a pair, 128 keys each, work on one matrix product.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from flashbench._iomodel import splits
from flashbench._iomodel.flash_v2 import forward as forward
from flashbench._iomodel.flash_v3 import is_local, reducing_backward
from flashbench._iomodel.types import Tiles, Work
from flashbench._iomodel.variant import AUTO, DEFAULT, Variant
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

ASSUMPTIONS = (
    "every tile of K and V comes from L2 once per 256 query rows; TMA reads no row outside the tensor;"
    " backward in pairs of thread blocks without a window, alone with one; o in the input dtype"
)
ROWS = 128
"""Rows of one matrix instruction of one SM."""


def settle(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant, device: Device | None) -> Variant:
    """Heads of a group are packed where they divide a tile, not with splits; splits fill the SMs once.

    Source: flash-attention 4, flash_attn/cute/interface.py.
    """
    if "fwd" not in tiles:
        return variant
    if variant.num_splits == AUTO:
        trial = variant.packing(problem.group > 1)
        count = splits.flash_attention_4(splits.load(problem, tiles["fwd"], trial), splits.sms(device))
        variant = replace(variant, num_splits=count)
    if variant.pack_gqa is None:
        packs = problem.group > 1 and ROWS % problem.group == 0 and variant.blocks is None
        variant = variant.packing(packs and (variant.num_splits == 1 or bool(problem.lengths)))
    return variant


def backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """K/V outside; pairs of thread blocks with block_k keys together, where no window is set."""
    return reducing_backward(problem, tiles["bwd"], variant, cta_pair=not is_local(problem))


def shipped_tiles(problem: Problem, kernel: str, _: Device | None) -> Tiles:
    """256x128 in the forward (128x128 where a K/V head has at most 128 query rows), 128x256 in the backward.

    The backward's 256 keys are those of a pair; one thread block of 128 keys with a window. Source:
    flash-attention 4 (arXiv:2603.05451) and flash_attn/cute/interface.py.
    """
    if kernel == "bwd":
        return Tiles(ROWS, ROWS if is_local(problem) else 2 * ROWS)
    return Tiles(2 * ROWS if problem.seqlen_q * problem.group > ROWS else ROWS, ROWS)
