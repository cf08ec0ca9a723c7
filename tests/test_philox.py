"""Philox gives Random123's published answers; the dropout mask is of the right rate and position alone."""

from __future__ import annotations

import math

import pytest
import torch

import flashbench
from flashbench.kernels._philox import keep_mask, philox

ANSWERS = [
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
"""philox4x32 with 10 rounds of Random123's kat_vectors: counter, key, words."""


@pytest.mark.parametrize(("counter", "key", "words"), ANSWERS)
def test_known_answers(counter: tuple, key: tuple[int, int], words: tuple) -> None:
    found = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in found) == words


def test_a_bit_depends_on_its_position_and_the_seed_alone() -> None:
    heads, rows, columns = torch.arange(3), torch.arange(40), torch.arange(50)
    whole = keep_mask(7, 0.3, heads, rows, columns)
    assert torch.equal(
        keep_mask(7, 0.3, heads[2:], rows[11:17], columns[[4, 30]]), whole[2:, 11:17][..., [4, 30]]
    )
    for other in (8, 7 + 2**32):
        assert not torch.equal(keep_mask(other, 0.3, heads, rows, columns), whole)
    assert not torch.equal(whole[0], whole[1])
    assert not torch.equal(whole[0, :40, :40], whole[0, :40, :40].T)


@pytest.mark.parametrize("p", [0.0, 0.1, 0.5, 0.9])
def test_the_share_that_is_dropped_is_p(p: float) -> None:
    kept = keep_mask(1, p, torch.arange(4), torch.arange(256), torch.arange(256))
    dropped = 1 - kept.double().mean().item()
    assert abs(dropped - p) <= 4 * math.sqrt(p * (1 - p) / kept.numel())


def test_the_public_mask_is_that_of_the_kernels_positions() -> None:
    mask = flashbench.dropout_mask(2, 3, 5, 7, 0.3, seed=2**40 + 1)
    assert (mask.dtype, mask.shape) == (torch.bool, (2, 3, 5, 7))
    one = keep_mask(2**40 + 1, 0.3, torch.tensor([4]), torch.tensor([2]), torch.tensor([6]))
    assert mask[1, 1, 2, 6] == one.item()
    assert flashbench.dropout_mask(1, 1, 4, 4, 0.0).all()
    for bad in ({"dropout_p": 1.0}, {"dropout_p": 0.1, "seed": -1}):
        with pytest.raises(ValueError, match="is out of range"):
            flashbench.dropout_mask(1, 1, 4, 4, **bad)
