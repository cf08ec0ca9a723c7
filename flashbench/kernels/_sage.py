"""What SageAttention is held to: twice the error that 8-bit rounding alone makes of exact attention.

Rounded as coarsely as any of its kernels does: K less its mean over the keys, Q and K in int8 with a scale
for each 128 rows of a head, probabilities and V in e4m3, V with a scale for each column of a head. Versions
and cards that round more finely (V in fp16, a scale for fewer rows) have room to spare.

Source: Zhang et al. 2024, SageAttention (arXiv:2410.02367), section 4, and SageAttention2
(arXiv:2411.10958), section 3.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flashbench.kernels._alternatives import judged, of_heads
from flashbench.kernels._inputs import Inputs
from flashbench.problem import Problem
from flashbench.record import Accuracy

ROWS = 128
"""Rows that share a scale of Q or K."""

INT8, E4M3 = 127.0, 448.0
"""The largest numbers of the two formats."""


def check(problem: Problem, inputs: Inputs, o: Tensor) -> Accuracy:
    """Largest error of o against exact attention in fp64; raises as ``judged``."""
    return judged(_plain, torch.float32, problem, inputs, o)


def _plain(p: Problem, inputs: Inputs, rows: Tensor, dtype: torch.dtype) -> Tensor:
    """o at those rows: exact in fp64, of 8-bit numbers in fp32."""
    q, k, v = (x.to(dtype) for x in (inputs.q, inputs.k, inputs.v))
    rounds = dtype != torch.float64
    if rounds:
        q, k, v = _int8(q), _int8(k - k.mean(2, keepdim=True)), _e4m3(v, v.abs().amax(2, keepdim=True))
    k, v = of_heads(p, k), of_heads(p, v)
    scores = q[:, :, rows] @ k.mT * p.softmax_scale
    if p.causal:
        later = torch.arange(p.seqlen_k, device=rows.device) > rows[:, None]
        scores = scores.masked_fill(later, float("-inf"))
    weights = (scores - scores.amax(-1, keepdim=True)).exp()
    total = weights.sum(-1, keepdim=True)
    if rounds:
        weights = _e4m3(weights, torch.ones_like(total))
    return weights @ v / total


def _int8(x: Tensor) -> Tensor:
    """x (batch, heads, rows, columns) rounded to 255 steps, a scale for each ROWS rows of a head."""
    tall = torch.nn.functional.pad(x, (0, 0, 0, -x.shape[2] % ROWS)).unflatten(2, (-1, ROWS))
    unit = tall.abs().amax((3, 4), keepdim=True).clamp_min(torch.finfo(x.dtype).tiny) / INT8
    return ((tall / unit).round() * unit).flatten(2, 3)[:, :, : x.shape[2]]


def _e4m3(x: Tensor, largest: Tensor) -> Tensor:
    """x rounded to e4m3, in units that make largest the largest number of the format."""
    unit = largest.clamp_min(torch.finfo(x.dtype).tiny) / E4M3
    return (x / unit).clamp(-E4M3, E4M3).to(torch.float8_e4m3fn).to(x.dtype) * unit
