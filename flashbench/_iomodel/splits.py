"""How many thread blocks share a sequence of keys: the heuristics of flash-attention 2, 3 and 4."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, NamedTuple

from flashbench._iomodel.types import Tiles
from flashbench._iomodel.variant import Variant
from flashbench.errors import SpecError
from flashbench.problem import UNLIMITED, Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

MOST = 128
"""Most splits that the heuristics choose."""

_L2_BYTES = 50 * 2**20
"""What flash-attention 3 takes for the size of L2."""


class Load(NamedTuple):
    """What there is to split: query tiles of all heads, of one head, K/V tiles, bytes of a K/V head."""

    tiles: int
    tiles_per_head: int
    key_tiles: int
    kv_bytes: int
    masked: bool


def load(problem: Problem, tile: Tiles, variant: Variant) -> Load:
    """The query and K/V tiles of the forward; with a window, the K/V tiles that one query tile may see."""
    p = problem
    is_packed = bool(variant.pack_gqa) and p.group > 1
    heads = p.batch * (p.num_kv_heads if is_packed else p.num_heads)
    per_head = -(-p.seqlen_q * (p.group if is_packed else 1) // tile.block_q)
    keys = p.seqlen_k
    left, right = p.window
    right = 0 if p.causal else right
    if UNLIMITED not in (left, right):
        keys = min(keys, left + right + 1 + tile.block_q)
    kv_bytes = p.seqlen_k * (p.head_dim + p.head_dim_v) * p.dtype_bytes
    return Load(heads * per_head, per_head, -(-keys // tile.block_k), kv_bytes, p.masked)


def sms(device: Device | None) -> int:
    """SMs of the device. Raises SpecError where there is none."""
    if device is None:
        raise SpecError("num_splits 0 (auto) depends on the card; name a device or give a number")
    return device.num_sms


def flash_attention_2(work: Load, num_sms: int) -> int:
    """The fewest splits within 85 % of the best wave efficiency, of those that shorten the longest share.

    Source: flash-attention 2, flash_api.cpp, num_splits_heuristic, which is given two blocks per SM.
    """
    slots = 2 * num_sms
    if work.tiles >= 0.8 * slots:
        return 1
    counts = [
        count
        for count in range(1, min(MOST, slots, work.key_tiles) + 1)
        if count == 1 or -(-work.key_tiles // count) != -(-work.key_tiles // (count - 1))
    ]
    return _fewest(work.tiles, slots, counts)


def flash_attention_3(work: Load, num_sms: int) -> int:
    """The same over all counts with one block per SM; never for 4 K/V tiles or fewer.

    Where the SMs are filled, K/V heads larger than L2 are still split if every SM has two query tiles
    of a head and no mask. Source: flash-attention 3, heuristics.h, num_splits_heuristic.
    """
    if work.tiles >= 0.8 * num_sms:
        large = work.kv_bytes > _L2_BYTES and work.tiles_per_head >= 2 * num_sms and not work.masked
        return min(-(-work.kv_bytes // _L2_BYTES), MOST) if large else 1
    if work.key_tiles <= 4:
        return 1
    return _fewest(work.tiles, num_sms, list(range(1, min(MOST, num_sms, work.key_tiles) + 1)))


def flash_attention_4(work: Load, num_sms: int) -> int:
    """As many as fill the SMs once; never for 4 K/V tiles or fewer.

    Source: flash-attention 4, interface.py.
    """
    if work.key_tiles <= 4:
        return 1
    return max(1, min(num_sms // work.tiles, MOST, work.key_tiles))


def _fewest(tiles: int, slots: int, counts: list[int]) -> int:
    waves = {count: tiles * count / slots for count in counts}
    efficiency = {count: wave / math.ceil(wave) for count, wave in waves.items()}
    best = max(efficiency.values())
    return next(count for count in counts if efficiency[count] >= 0.85 * best)
