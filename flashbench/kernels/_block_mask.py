"""A block mask on a device: the lists that kernels walk, and a dense view for naive and the oracle.

What a mask is, is in ``flashbench.block_masks``; a ``BlockMask`` of torch's
FlexAttention becomes one here.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flashbench import block_masks, named_masks
from flashbench.block_masks import FULL, SIZE, WORD_BITS
from flashbench.problem import Problem

MOST = 2**31 // SIZE - 1
"""Blocks in a list: kernels count their rows in 32 bits."""


@dataclass(frozen=True, kw_only=True)
class Lists:
    """``block_masks.Lists`` as int32 tensors."""

    spans: Tensor
    blocks: Tensor
    slots: Tensor


class DeviceMask:
    """A block mask whose tensors lie on a device, each put there when it is first asked for."""

    def __init__(self, host: block_masks.BlockMask, device: str | torch.device) -> None:
        self.host = host
        self.device = torch.device(device)
        self._within: dict[tuple[int, int], DeviceMask] = {}

    @property
    def shape(self) -> tuple[int, int]:
        """(seqlen_q, seqlen_k)."""
        return self.host.seqlen_q, self.host.seqlen_k

    @cached_property
    def by_query(self) -> Lists:
        """Per query block its key blocks, for the forward and dq."""
        return self._lists(self.host.by_query)

    @cached_property
    def by_key(self) -> Lists:
        """Per key block its query blocks, for dk and dv."""
        return self._lists(self.host.by_key)

    @cached_property
    def bits(self) -> Tensor:
        """int32 (partial blocks, SIZE, WORDS)."""
        return self._on(self.host.bits)

    @cached_property
    def slots(self) -> Tensor:
        """int32 (query blocks, key blocks): EMPTY, FULL or the slot of a partial block."""
        return self._on(self.host.slots)

    def within(self, low: int, high: int) -> DeviceMask:
        """The same where query i sees keys i + low to i + high only; made once for each."""
        if (low, high) not in self._within:
            host = self.host & block_masks.banded(low, high, *self.shape)
            self._within[low, high] = DeviceMask(host, self.device)
        return self._within[low, high]

    def dense(self, rows: Tensor | None = None, columns: Tensor | None = None) -> Tensor:
        """Boolean (rows, columns), True where a query sees a key; all of them, or of those int64 numbers."""
        rows, columns = (
            torch.arange(length, device=self.device) if numbers is None else numbers
            for length, numbers in zip(self.shape, (rows, columns), strict=True)
        )
        slots = self.slots[rows // SIZE][:, columns // SIZE]
        seen = slots == FULL
        if len(self.bits):
            inside = columns % SIZE
            words = self.bits[slots.clamp_min(0), (rows % SIZE)[:, None], inside // WORD_BITS]
            seen |= (slots >= 0) & (words >> inside % WORD_BITS & 1).bool()
        return seen

    def _lists(self, lists: block_masks.Lists) -> Lists:
        return Lists(spans=self._on(lists.spans), blocks=self._on(lists.blocks), slots=self._on(lists.slots))

    def _on(self, array: Any) -> Tensor:
        return torch.from_numpy(array).to(self.device)


def build(problem: Problem, device: str) -> DeviceMask:
    """The block mask that the problem names. Raises SpecError for a file that holds none."""
    return DeviceMask(named_masks.of(problem), device)


def taken(mask: Any, seqlen_q: int, seqlen_k: int, device: torch.device) -> DeviceMask:
    """The mask itself, or the one that FlexAttention's stands for. Raises ValueError for a misfit."""
    if not isinstance(mask, DeviceMask) and not hasattr(mask, "mask_mod"):
        raise ValueError(
            "block_mask must be a DeviceMask of flashbench or a BlockMask of torch's flex_attention;"
            f" got {type(mask).__name__}"
        )
    found: DeviceMask = mask if isinstance(mask, DeviceMask) else from_flex(mask)
    if found.shape != (seqlen_q, seqlen_k):
        raise ValueError(
            f"block_mask is of {found.shape} queries and keys; q and k have {seqlen_q, seqlen_k}"
        )
    if found.device.type != device.type:
        raise ValueError(f"block_mask is on {found.device}, q on {device}")
    if len(found.host.by_query.slots) > MOST:
        raise ValueError(
            f"block_mask lists {len(found.host.by_query.slots)} blocks; at most {MOST} are taken"
        )
    return found


def from_flex(mask: Any) -> DeviceMask:
    """Of a ``torch.nn.attention.flex_attention.BlockMask``, its mask_mod evaluated on partial blocks only.

    Raises ValueError for one with blocks other than 128 x 128 or of more than one batch or head.
    """
    if tuple(mask.BLOCK_SIZE) != (SIZE, SIZE):
        raise ValueError(f"block_mask has blocks of {tuple(mask.BLOCK_SIZE)}; ({SIZE}, {SIZE}) is taken")
    if tuple(mask.kv_indices.shape[:2]) != (1, 1):
        raise ValueError(
            f"block_mask is of {tuple(mask.kv_indices.shape[:2])} batches and heads; (1, 1) is taken"
        )
    seqlen_q, seqlen_k = mask.seq_lengths
    full, partial = (
        _flagged(counts, indices, (-(-seqlen_q // SIZE), -(-seqlen_k // SIZE)))
        for counts, indices in (
            (mask.full_kv_num_blocks, mask.full_kv_indices),
            (mask.kv_num_blocks, mask.kv_indices),
        )
    )
    words = block_masks.packed(_tiles(mask, partial).cpu().numpy())
    host = block_masks.made(full.numpy(), partial.numpy().nonzero(), words, seqlen_q, seqlen_k)
    return DeviceMask(host, mask.kv_indices.device)


def _tiles(mask: Any, partial: Tensor) -> Tensor:
    """What the mask_mod says of the pairs of each partial block: boolean (blocks, SIZE, SIZE)."""
    seqlen_q, seqlen_k = mask.seq_lengths
    device = mask.kv_indices.device
    at = partial.nonzero().to(device)
    if not len(at):  # vmap calls a mask_mod with no pairs in a shape that indexing does not take
        return torch.zeros(0, SIZE, SIZE, dtype=torch.bool)
    offsets = torch.arange(SIZE, device=device)
    rows, columns = at[:, :1] * SIZE + offsets, at[:, 1:] * SIZE + offsets
    of_columns = torch.vmap(mask.mask_mod, in_dims=(None, None, None, 0))
    of_tile = torch.vmap(of_columns, in_dims=(None, None, 0, None))
    zero = torch.zeros((), dtype=torch.int64, device=device)
    tiles = torch.vmap(of_tile, in_dims=(None, None, 0, 0))(
        zero, zero, rows.clamp_max(seqlen_q - 1), columns.clamp_max(seqlen_k - 1)
    )
    inside: Tensor = tiles & (rows < seqlen_q)[:, :, None] & (columns < seqlen_k)[:, None, :]
    return inside


def _flagged(counts: Tensor | None, indices: Tensor | None, shape: tuple[int, int]) -> Tensor:
    """Boolean (query blocks, key blocks) of FlexAttention's lists, on the CPU."""
    flags = torch.zeros(shape, dtype=torch.bool)
    if counts is None or indices is None:
        return flags
    listed = torch.arange(indices.shape[-1]) < counts[0, 0].cpu()[:, None]
    rows = listed.nonzero()[:, 0]
    flags[rows, indices[0, 0].cpu()[listed].long()] = True
    return flags
