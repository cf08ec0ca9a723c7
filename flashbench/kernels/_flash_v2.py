"""FlashAttention-2 in portable Triton: launches and autograd. Import through ``_triton.load``.

The same kernels run compiled on a GPU and through Triton's interpreter on a CPU.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from triton import cdiv
from triton.runtime.interpreter import InterpretedFunction

from flashbench.flash_configs import MAX_HEAD_DIM, Config, choose, section, widest
from flashbench.kernels import _flash_kernels as kernels

INTERPRETED = isinstance(kernels.forward, InterpretedFunction)


@dataclass(frozen=True)
class Launch:
    """One kernel launch, ready to run or to be compiled."""

    name: str
    kernel: Any
    programs: int
    args: tuple[Any, ...]
    options: dict[str, Any]

    def run(self) -> None:
        """Launch on the current device and stream."""
        if self.programs:
            self.kernel[(self.programs,)](*self.args, **self.options)

    def compile(self) -> Any:
        """Compile only; arguments may be meta tensors."""
        return self.kernel.warmup(*self.args, grid=(1,), **self.options)

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for launches that share one compiled kernel: what Triton specialises on."""
        special = (
            (arg % 16 == 0, arg == 1, arg >= 2**31)
            for name, arg in zip(self.kernel.arg_names, self.args, strict=False)
            if isinstance(arg, int) and name not in kernels.RUNTIME
        )
        dtypes = (arg.dtype for arg in self.args if isinstance(arg, Tensor))
        return self.name, *self.options.items(), *special, *dtypes


@dataclass(frozen=True)
class Call:
    """What the launches of one attention call share.

    card: (compute capability, shared memory per block in bytes) to compile for; None is q's device.
    configs: takes the place of the table for the kernels that it names.
    """

    causal: bool
    scale: float
    tf32: bool = False
    card: tuple[tuple[int, int], int | None] | None = None
    configs: tuple[tuple[str, Config], ...] = ()

    def config(self, name: str, q: Tensor, v: Tensor) -> Config:
        """The configuration that the named kernel runs with."""
        for kernel, config in self.configs:
            if kernel == name:
                return config
        return choose(name, self.math(q), q.shape[-1], v.shape[-1], *(self.card or _card(q.device)))

    def math(self, q: Tensor) -> str:
        """How q's dtype is multiplied, as the table of configurations has it."""
        return "half" if q.element_size() == 2 else "tf32" if self.tf32 else "ieee"

    def options(self, name: str, q: Tensor, v: Tensor, *strided: Tensor) -> tuple[Config, dict[str, Any]]:
        """The configuration, and the launch options and compile-time constants that follow from it."""
        config = self.config(name, q, v)
        tallest = max(config.block_q, config.block_k)
        return config, {
            "BLOCK_M": config.block_q,
            "BLOCK_N": config.block_k,
            "DIM": q.shape[-1],
            "DIM_V": v.shape[-1],
            "WIDEST": widest(self.math(q)),
            "CAUSAL": self.causal,
            "PRECISION": "tf32" if self.tf32 and not INTERPRETED else "ieee",  # no CPU has TF32
            "WIDE": any(tallest * x.stride(2) >= 2**31 for x in strided),
            "EXACT": q.element_size() == 4,
            "num_warps": config.num_warps,
            "num_stages": config.num_stages,
            "enable_fp_fusion": True,  # off by default from Triton 3.10 on: an operation more per score
        }


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    tf32: bool = False,
    configs: tuple[tuple[str, Config], ...] = (),
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · softmax_scale) v without the score matrix; differentiable in q, k and v.

    q: (batch, num_heads, seqlen_q, head_dim); k: (batch, num_kv_heads, seqlen_k, head_dim);
    v: (batch, num_kv_heads, seqlen_k, head_dim_v), all of one dtype (fp16, bf16, fp32) and device,
    any strides; head dims up to 256. Query head h uses K/V head h // (num_heads // num_kv_heads).
    causal is bottom-right aligned: query i sees keys j <= i + seqlen_k - seqlen_q.
    softmax_scale defaults to head_dim**-0.5. fp32 products are IEEE, or TF32 with ``tf32``. configs: (kernel,
    configuration) in place of the table's.

    Returns o (batch, num_heads, seqlen_q, head_dim_v), contiguous, in q's dtype; with return_lse also
    lse (batch, num_heads, seqlen_q): natural log of the sum of exponentials, fp32, differentiable.
    Rows without keys: o = 0, lse = -inf, no gradient. Raises ValueError for shapes that do not fit.
    """
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    _check(q, k, v, scale)
    o, lse = _FlashAttention.apply(q, k, v, Call(causal=causal, scale=scale, tf32=tf32, configs=configs))
    return (o, lse) if return_lse else o


class _FlashAttention(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor]:
        dtype = q.dtype
        q, k, v = (_prepare(x) for x in (q, k, v))
        o, lse, launch = forward_launch(q, k, v, call)
        with _on(q.device):
            launch.run()
        o = o.to(dtype)
        ctx.save_for_backward(q, k, v, o, lse)
        ctx.call, ctx.dtype = call, dtype
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse = ctx.saved_tensors
        do = torch.zeros_like(o) if do is None else do
        refine = q.element_size() == 4 and dlse is None
        inputs = q, k, v, _prepare(o), lse, _prepare(do)
        grads, delta, launches = backward_launches(*inputs, ctx.call, refine)
        with _on(q.device):
            for launch in launches:
                launch.run()
                if launch.name == "delta" and dlse is not None:
                    delta.sub_(dlse)  # d lse / d s = p, as d o / d s = p (dP - delta)
        return *(grad.to(ctx.dtype) for grad in grads), None


def forward_launch(q: Tensor, k: Tensor, v: Tensor, call: Call) -> tuple[Tensor, Tensor, Launch]:
    """(o, lse, the launch that fills them)."""
    batch, heads, seqlen_q, _ = q.shape
    group = heads // k.shape[1] if k.shape[1] else 1
    o = q.new_empty(batch, heads, seqlen_q, v.shape[-1])
    lse = q.new_empty(batch, heads, seqlen_q, dtype=torch.float32)
    config, options = call.options("fwd", q, v, q, k, v)
    tiles = cdiv(seqlen_q, config.block_q)
    args = (
        *(q, k, v, o, lse),
        *(*q.stride()[:3], *k.stride()[:3], *v.stride()[:3]),
        *(batch * heads, heads, group, seqlen_q, k.shape[2], tiles, _section(k, v, batch * heads, call)),
        call.scale,
    )
    return o, lse, Launch("fwd", kernels.forward, tiles * batch * heads, args, options)


def backward_launches(
    q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, do: Tensor, call: Call, refine: bool
) -> tuple[tuple[Tensor, Tensor, Tensor], Tensor, tuple[Launch, ...]]:
    """((dq, dk, dv), delta, the launches that fill them, in order); refine as in ``backward_dq``."""
    batch, heads, seqlen_q, _ = q.shape
    num_kv_heads, seqlen_k = k.shape[1], k.shape[2]
    group = heads // num_kv_heads if num_kv_heads else 1
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    delta = torch.empty_like(lse)
    norm = torch.empty_like(lse) if refine else lse

    config, options = call.options("delta", q, v, do)
    tiles = cdiv(seqlen_q, config.block_q)
    args: tuple[Any, ...] = (o, do, delta, *do.stride()[:3], heads, seqlen_q, seqlen_k, tiles)
    for name in ("BLOCK_N", "DIM", "EXACT"):
        del options[name]
    launches = [Launch("delta", kernels.delta_rows, tiles * batch * heads, args, options)]

    strides = (*q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *do.stride()[:3])
    config, options = call.options("dq", q, v, q, k, v, do)
    tiles = cdiv(seqlen_q, config.block_q)
    args = (q, k, v, do, lse, delta, norm, dq, *strides)
    args += (batch * heads, heads, group, seqlen_q, seqlen_k, tiles, _section(k, v, batch * heads, call))
    options = {**options, "REFINE": refine}
    launches += [Launch("dq", kernels.backward_dq, tiles * batch * heads, (*args, call.scale), options)]

    config, options = call.options("dkdv", q, v, q, k, v, do)
    tiles = cdiv(seqlen_k, config.block_k)
    kv_heads = batch * num_kv_heads
    args = (q, k, v, do, lse, delta, norm, dk, dv, *strides)
    args += (kv_heads, num_kv_heads, seqlen_q, seqlen_k, tiles, _section(q, do, kv_heads, call))
    options = {**options, "REFINE": refine, "GROUP": group}
    launches += [Launch("dkdv", kernels.backward_dkdv, tiles * kv_heads, (*args, call.scale), options)]
    return (dq, dk, dv), delta, tuple(launches)


def _section(a: Tensor, b: Tensor, heads: int, call: Call) -> int:
    """How many heads to walk tile by tile, given the two tensors that a head streams."""
    streamed = a.shape[2] * (a.shape[3] + b.shape[3]) * a.element_size()
    return section(streamed, heads) if call.causal else 1


def _prepare(x: Tensor) -> Tensor:
    """x with unit stride along the head dim; in fp32 where the interpreter would garble it.

    The interpreter's bf16 arithmetic is wrong and its rounding to bf16 truncates, so there bf16
    comes in as fp32, goes out as fp32, and torch rounds.
    """
    if INTERPRETED and x.dtype == torch.bfloat16:
        x = x.float()
    return x if x.stride(-1) == 1 else x.contiguous()


@cache
def _card(device: torch.device) -> tuple[tuple[int, int] | None, int | None]:
    """(compute capability, shared memory per block in bytes), both None in the interpreter."""
    if INTERPRETED:
        return None, None
    properties = torch.cuda.get_device_properties(device)
    limit = getattr(properties, "shared_memory_per_block_optin", None)
    return (properties.major, properties.minor), limit


def _on(device: torch.device) -> Any:
    """Triton launches on the current device; make it the tensors'."""
    return torch.cuda.device(device if device.type == "cuda" else -1)


def _check(q: Tensor, k: Tensor, v: Tensor, scale: float) -> None:
    shapes = f"q {tuple(q.shape)}, k {tuple(k.shape)}, v {tuple(v.shape)}"
    dtypes = f"{q.dtype}, {k.dtype}, {v.dtype}"
    if not q.ndim == k.ndim == v.ndim == 4:
        raise ValueError(f"q, k and v have 4 dimensions (batch, heads, seqlen, head_dim); got {shapes}")
    if q.shape[0] != k.shape[0] or k.shape[:3] != v.shape[:3] or q.shape[3] != k.shape[3]:
        raise ValueError(f"batch, K/V heads, seqlen_k or head_dim differ: {shapes}")
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(f"num_heads {q.shape[1]} is not divisible by num_kv_heads {k.shape[1]}")
    if not 1 <= min(q.shape[3], v.shape[3]) <= max(q.shape[3], v.shape[3]) <= MAX_HEAD_DIM:
        raise ValueError(f"head dims must be 1 to {MAX_HEAD_DIM}: {shapes}")
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float16, torch.bfloat16, torch.float32):
        raise ValueError(f"q, k and v must be of one dtype, fp16, bf16 or fp32: {dtypes}")
    if not scale > 0:
        raise ValueError(f"softmax_scale {scale} is out of range; it must be greater than 0")
