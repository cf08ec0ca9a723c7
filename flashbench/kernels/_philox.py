"""Dropout's random bits: Philox4x32-10, a counter-based generator, in torch operations.

A kept probability depends on its absolute position and the seed alone, so that every tile shape, the
forward, the backward and this module agree. Source: Salmon et al. 2011, "Parallel random numbers: as
easy as 1, 2, 3", and the constants of their library Random123.
"""

from __future__ import annotations

import torch
from torch import Tensor

ROUNDS = 10
MULTIPLIERS = 0xD2511F53, 0xCD9E8D57
WEYL = 0x9E3779B9, 0xBB67AE85
"""What the two words of the key grow by per round."""

WORD = 0xFFFFFFFF


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int | Tensor, int | Tensor]
) -> tuple[Tensor, ...]:
    """The four 32-bit words of each counter, as int64 from 0 to 2**32 - 1.

    counter: four int64 tensors of such words, which broadcast; key: two such words, numbers or tensors ().
    """
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(ROUNDS):
        (high0, low0), (high2, low2) = _product(c0, MULTIPLIERS[0]), _product(c2, MULTIPLIERS[1])
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + WEYL[0]) & WORD, (k1 + WEYL[1]) & WORD
    return c0, c1, c2, c3


def _product(word: Tensor, factor: int) -> tuple[Tensor, Tensor]:
    """The high and the low word of word * factor.

    By halves of the factor, so that nothing is over 2**49: a product that wraps is right in torch itself,
    but what torch's compiler makes of it for a CPU is not.
    """
    high, low = word * (factor >> 16), word * (factor & 0xFFFF)
    return (high + (low >> 16)) >> 16, (((high & 0xFFFF) << 16) + low) & WORD


def keep_mask(seed: int | Tensor, dropout_p: float, heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
    """True where a probability is kept: (heads, rows, columns), boolean.

    heads: batch * num_heads + head; rows and columns: query and key numbers of the sequence, each
    int64 in one dimension. Key: the seed's low and high word; counter: (column, row, head, 0);
    kept if the first word is at least dropout_p * 2**32, rounded.
    """
    zero = torch.zeros((), dtype=torch.int64, device=columns.device)
    counter = columns[None, None, :], rows[None, :, None], heads[:, None, None], zero
    return philox(counter, (seed & WORD, seed >> 32 & WORD))[0] >= round(dropout_p * 2**32)


def dropout_mask(
    batch: int, num_heads: int, seqlen_q: int, seqlen_k: int, dropout_p: float, *, seed: int = 0,
    device: str | torch.device = "cpu",
) -> Tensor:  # fmt: skip
    """True where the bundled kernels keep a probability: boolean (batch, num_heads, seqlen_q, seqlen_k).

    dropout_p and seed as given to ``flash_attention``; of packed sequences, sequence n is batch n of any that
    has as many. A kept probability is divided by 1 - dropout_p. Raises ValueError for a share or a seed out
    of range.
    """
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p {dropout_p} is out of range; it must be at least 0 and below 1")
    if not 0 <= seed < 2**63:
        raise ValueError(f"seed {seed} is out of range; it must be a whole number, 0 to 2**63 - 1")
    heads, rows, columns = (torch.arange(n, device=device) for n in (batch * num_heads, seqlen_q, seqlen_k))
    return keep_mask(seed, dropout_p, heads, rows, columns).unflatten(0, (batch, num_heads))
