"""What flash-attention's functions tell of dropout (``return_attn_probs``), computed by torch, for tests."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flashbench.kernels._philox import keep_mask


class Packed(NamedTuple):
    """Where the sequences of a packed batch begin and end, and the longest, or more."""

    cu_q: Tensor
    cu_k: Tensor
    longest_q: int
    longest_k: int


class Scores(NamedTuple):
    """What makes probabilities of q·k. window: with a causal mask in it; slopes: of all or of each."""

    scale: float
    window: tuple[int, int]
    softcap: float
    slopes: Tensor | None
    dropout_p: float


def probabilities(
    q: Tensor, k: Tensor, lse: Tensor, scores: Scores, seed: Tensor, packed: Packed | None = None
) -> Tensor:
    """The probabilities (batch, num_heads, seqlen_q, seqlen_k), fp32, negative where the seed drops them.

    q and k: heads before rows; of packed sequences in batch 1, and each sequence then has the longest's size.
    """
    q, k = q.detach(), k.detach()
    if packed is not None:
        q, lse = (_apart(x, packed.cu_q, packed.longest_q) for x in (q, lse[..., None]))
        k, lse = _apart(k, packed.cu_k, packed.longest_k), lse[..., 0]
    batch, heads, rows = q.shape[:3]
    s = q.float() @ k.float().repeat_interleave(heads // max(1, k.shape[1]), 1).mT * scores.scale
    if scores.softcap:
        s = scores.softcap * (s / scores.softcap).tanh()
    i, j = (torch.arange(n, device=q.device) for n in s.shape[2:])
    row, shift = i[:, None], k.shape[2] - rows
    hidden = torch.zeros((), dtype=torch.bool, device=q.device)
    if packed is not None:
        of_q, of_k = (cu.diff()[:, None, None, None] for cu in packed[:2])
        shift = of_k - of_q
        hidden = (row >= of_q) | (j >= of_k)
    behind = row + shift - j
    if scores.slopes is not None:
        s = s - scores.slopes.reshape(-1, heads, 1, 1)[:batch] * behind.abs()
    left, right = scores.window
    hidden = hidden | ((behind > left) & (left >= 0)) | ((-behind > right) & (right >= 0))
    p = (s - lse[..., None]).exp().masked_fill(hidden, 0.0)
    numbers = torch.arange(batch * heads, device=q.device), i, j
    kept = keep_mask(seed, scores.dropout_p, *numbers).unflatten(0, (batch, heads))
    return torch.where(kept, p, -p)


def _apart(x: Tensor, cu: Tensor, longest: int) -> Tensor:
    """(sequences, heads, longest, …) of (1, heads, rows of all, …), 0 behind the end of each."""
    rows = cu[:-1, None] + torch.arange(longest, device=x.device)
    rows = torch.where(rows < cu[1:, None], rows, x.shape[2])
    padded = torch.cat((x[0], x.new_zeros(x.shape[1], 1, x.shape[3])), 1)
    return padded[:, rows].transpose(0, 1)
