"""A transformer layer of random weights around an implementation of attention, and a stack of them.

Pre-norm: x + Wo·attention(norm(x)), then x + MLP(norm(x)). A gated model (Llama) has RMSNorm, rotary
positions and SwiGLU; others LayerNorm and GELU. No biases, embeddings or head, no dropout.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from flashbench.kernels import Target, _own_call, get
from flashbench.kernels._inputs import Inputs
from flashbench.kernels._own import Loaded
from flashbench.presets import Preset
from flashbench.problem import Problem

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""o (batch, num_heads, seqlen, head_dim) of q, k, v; differentiable where they require grad."""

EAGER = "naive"
"""The implementation that is written out here: its mask is made once per model, as eager code does."""

ROTARY_BASE = 500_000.0


def attend(name: str, problem: Problem, device: str) -> Attend:
    """What computes the attention of every layer; an implementation prepares itself in each call, but a
    function of somebody's own, whose preparation is a trial that no model would make.
    """
    if name == EAGER:
        return _eager(problem, device)
    row = get(name)
    if row.origin:
        own = row.origin.load(Target(device=device))
        assert isinstance(own, Loaded)
        return _own_call.within(own, problem)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return row.prepare(problem, Inputs(q=q, k=k, v=v, dout=q))()

    return call


def _eager(problem: Problem, device: str) -> Attend:
    group, scale, hidden = problem.group, problem.softmax_scale, None
    if problem.causal:
        hidden = torch.ones(problem.seqlen_q, problem.seqlen_k, dtype=torch.bool, device=device).triu(1)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if group > 1:
            k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
        scores = (q * scale) @ k.mT
        if hidden is not None:
            scores = scores.masked_fill_(hidden, float("-inf"))
        return scores.softmax(-1) @ v

    return call


def weights(preset: Preset, *, dtype: torch.dtype, device: str, seed: int) -> list[Tensor]:
    """One layer's matrices (out, in): q, k and v in one, the output, the MLP's; N(0, 1/in), with grad."""
    generator = torch.Generator(device=device).manual_seed(seed)
    shapes = preset.matrices
    return [
        (torch.randn(shape, generator=generator, device=device) / shape[1] ** 0.5).to(dtype).requires_grad_()
        for shape in shapes
    ]


class Stack:
    """Layers one after the other: called with x (batch, seqlen, hidden), returns the same shape and dtype."""

    def __init__(self, preset: Preset, problem: Problem, layers: list[list[Tensor]], name: str) -> None:
        self.preset, self.problem, self.layers = preset, problem, layers
        first = layers[0][0]
        self.attention = attend(name, problem, str(first.device))
        self._turns = _turns(problem, first) if preset.gated else None

    def __call__(self, x: Tensor) -> Tensor:
        for matrices in self.layers:
            x = self._layer(x, *matrices)
        return x

    def _layer(self, x: Tensor, qkv: Tensor, out: Tensor, *mlp: Tensor) -> Tensor:
        p, wide = self.problem, functional.linear(self._norm(x), qkv)
        parts = wide.split([n * p.head_dim for n in (p.num_heads, p.num_kv_heads, p.num_kv_heads)], dim=-1)
        q, k, v = (part.unflatten(-1, (-1, p.head_dim)).transpose(1, 2) for part in parts)
        if self._turns is not None:
            q, k = self._turned(q), self._turned(k)
        x = x + functional.linear(self.attention(q, k, v).transpose(1, 2).flatten(2), out)
        up, down = functional.linear(self._norm(x), mlp[0]), mlp[1]
        if self.preset.gated:
            gate, up = up.chunk(2, dim=-1)
            return x + functional.linear(functional.silu(gate) * up, down)
        return x + functional.linear(functional.gelu(up), down)

    def _norm(self, x: Tensor) -> Tensor:
        norm = functional.rms_norm if self.preset.gated else functional.layer_norm
        return norm(x, x.shape[-1:])

    def _turned(self, x: Tensor) -> Tensor:
        assert self._turns is not None
        (cosine, sine), (first, second) = self._turns, x.chunk(2, dim=-1)
        return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


def _turns(problem: Problem, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines of rotary positions, (seqlen, head_dim / 2)."""
    half = problem.head_dim // 2
    speeds = ROTARY_BASE ** (-torch.arange(half, device=like.device, dtype=torch.float64) / half)
    angles = torch.arange(problem.seqlen_q, device=like.device, dtype=torch.float64)[:, None] * speeds
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)
