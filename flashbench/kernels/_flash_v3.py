"""FlashAttention-3 for sm_90, both passes, flash-v2's backward beside. Import through ``_triton.load``.

The kernel is made ready once for tensors of the same shapes and strides (``Plan``): checks, how outputs lie,
descriptors, the schedule and the compiled kernel; a call looks that up and fills in addresses, so that it
costs the host little (_hopper_kernels.py has the kernel, hopper_configs.py its tiles; _flash_v3_backward.py
and _flash_v3_wide.py the backward's launches).
"""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from flashbench import hopper_configs
from flashbench.flash_configs import Config
from flashbench.hopper_configs import ROWS, Tiles
from flashbench.kernels import _flash_v3_backward as gradients
from flashbench.kernels import _flash_v3_wide as wide_gradients
from flashbench.kernels import _hopper_kernels as kernels
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.kernels._call import (
    Call,
    Launch,
    check_same_device,
    check_scale,
    misfit,
    on,
)
from flashbench.kernels._flash_v2 import NOTHING, FlashAttention
from flashbench.kernels._hopper_plan import (
    ADDRESSES,
    Laid,
    descriptor,
    loadable,
    output,
    programs,
    takes_layout,
)
from flashbench.kernels._hopper_ready import Ready
from flashbench.kernels._launches import Saved
from flashbench.kernels._layout import Layout, layout, unit_stride


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    tiles: Tiles | None = None,
    configs: tuple[tuple[str, Config], ...] = (),
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · softmax_scale) v on an sm_90 GPU; differentiable in q, k and v.

    q: (batch, num_heads, seqlen_q, head_dim); k: (batch, num_kv_heads, seqlen_k, head_dim);
    v: (batch, num_kv_heads, seqlen_k, head_dim_v), fp16 or bf16, any strides (those that TMA cannot take are
    copied); head dims up to 256. Query head h uses K/V head h // (num_heads // num_kv_heads). causal: keys
    up to j = i + seqlen_k - seqlen_q. softmax_scale: head_dim**-0.5 by default, more than 0. deterministic:
    dq has the same bits every run. tiles: in place of the forward's table; configs: (kernel, configuration)
    in place of the table's, of flash-v2's kernels, which the backward takes for what
    ``hopper_configs.why_portable`` names, and for dq of head dims up to 128 where it is to be deterministic.

    Returns o (batch, num_heads, seqlen_q, head_dim_v) in q's dtype, in memory ordered as q is; with
    return_lse also lse (batch, num_heads, seqlen_q): log of the sum of exponentials, fp32, differentiable.
    Rows without keys: o = 0, lse = -inf, no gradient. Raises ValueError for a misfit.
    """
    own = plan(layout(q, k, v), causal, tiles)
    scale = q.shape[3] ** -0.5 if softmax_scale is None else float(softmax_scale)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        call = Call(causal=causal, scale=scale, configs=configs)
        o, lse = _FlashAttention3.apply(q, k, v, call, tiles, deterministic)
    else:
        o, lse = _by(own, q, k, v, causal=causal, scale=scale, tiles=tiles)
    return (o, lse) if return_lse else o


class _FlashAttention3(FlashAttention):
    """(o, lse) of (q, k, v, call, tiles, deterministic), with gradients; flash-v2's where it has none."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, call, tiles, ctx.deterministic = args
        o, lse = forward(q, k, v, causal=call.causal, scale=call.scale, tiles=tiles)
        ctx.save_for_backward(*(unit_stride(x) for x in (q, k, v)), o, lse, None, None)
        ctx.call, ctx.dtype, ctx.extra = call, q.dtype, NOTHING
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, o, lse, *_ = ctx.saved_tensors
        portable = hopper_configs.why_portable(q.shape[3], v.shape[3])
        if portable or not (q.numel() and k.numel()):
            return *FlashAttention.backward(ctx, do, dlse)[:3], None, None, None
        do = torch.zeros_like(o) if do is None else do
        saved = Saved(q=q, k=k, v=v, o=o, lse=lse, do=do, dlse=dlse)
        if hopper_configs.wide(q.shape[3], v.shape[3]):
            work = wide_gradients.backward_launches(saved, ctx.call)
        else:
            work = gradients.backward_launches(saved, ctx.call, deterministic=ctx.deterministic)
        work.run(saved)
        return work.dq, work.dk, work.dv, None, None, None


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """(o, lse). Raises ValueError for a misfit."""
    return _by(plan(layout(q, k, v), causal, tiles), q, k, v, causal=causal, scale=scale, tiles=tiles)


def _by(
    own: Plan | None, q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tiles: Tiles | None
) -> tuple[Tensor, Tensor]:
    """The same by the plan, where there is one and the tensors lie where TMA takes them."""
    if own is not None and own.takes(q, k, v):
        return own.attention(q, k, v, scale)
    check_scale(scale)
    if not (q.numel() and k.numel()):
        o = q.new_zeros(*q.shape[:3], v.shape[3])
        return o, q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    return forward(loadable(q), loadable(k), loadable(v), causal=causal, scale=scale, tiles=tiles)


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor, Launch]:
    """(o, lse, the launch that fills them) of tensors that TMA takes; o is ordered as q."""
    own = plan(layout(q, k, v), causal, tiles)
    assert own is not None
    o, lse = own.outputs(q)
    return o, lse, own.ready.launch(*own.arguments(q, k, v, o, lse, scale))


@lru_cache(maxsize=256)
def plan(of: Layout, causal: bool, tiles: Tiles | None) -> Plan | None:
    """The plan for q, k and v laid out so; None where there is nothing to do or TMA does not take them.

    Raises ValueError for a misfit.
    """
    shapes, strides, dtypes, devices = zip(*of, strict=True)
    if wrong := misfit(*shapes):
        raise ValueError(wrong)
    check_same_device(**dict(zip("qkv", devices, strict=True)))
    if not dtypes[0] == dtypes[1] == dtypes[2] or dtypes[0] not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q, k and v must be of one dtype, fp16 or bf16: {', '.join(map(str, dtypes))}")
    if any(0 in shape for shape in shapes) or not all(map(takes_layout, shapes, strides)):
        return None
    return Plan(tuple(map(Laid, shapes, strides)), dtypes[0], devices[0], causal, tiles)


class Plan:
    """The kernel, made ready for tensors of one layout.

    It takes each of q, k, v and o twice: a piece of the head dim each, None where there is no second.
    """

    def __init__(
        self, laid: tuple[Laid, ...], dtype: torch.dtype, device: torch.device, causal: bool,
        tiles: Tiles | None,
    ) -> None:  # fmt: skip
        q, k, v = laid
        (batch, heads, seqlen_q, dim), (_, kv_heads, seqlen_k, dim_v) = q.shape, v.shape
        if tiles and tiles.emulated and dtype != torch.float16:
            raise ValueError(f"tiles {tiles.name} are for fp16: exponentials are emulated in its bits")
        tiles = tiles or hopper_configs.choose(dim, dim_v, causal, seqlen_k, fp16=dtype == torch.float16)
        shape = schedule.Shape(
            heads=batch * heads, group=heads // kv_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            block_m=tiles.block_q, block_n=tiles.block_k, causal=causal,
            kv_bytes=seqlen_k * (dim + dim_v) * dtype.itemsize,
        )  # fmt: skip
        rows = schedule.table(shape, programs(device))
        table = torch.tensor(schedule.packed(rows, shape.tiles, heads), device=device)
        (d0, d1), (e0, e1) = hopper_configs.pieces(dim), hopper_configs.pieces(dim_v, of_v=True)
        self.halved, self.device, self.o = (d1 > 0, e1 > 0), device, output(q, dim_v)
        self.lse = Laid(q.shape[:3], (heads * seqlen_q, seqlen_q, 1))
        cut = (
            (q, ROWS, d0, d1),
            (k, tiles.block_k, d0, d1),
            (v, tiles.block_k, e0, e1),
            (self.o, ROWS, e0, e1),
        )
        boxes = tuple(
            descriptor(x, [1, 1, height, columns], dtype) if columns else None
            for x, height, *both in cut
            for columns in both
        )
        constants = {
            "BLOCK_M": tiles.block_q, "BLOCK_N": tiles.block_k, "D0": d0, "D1": d1, "E0": e0, "E1": e1,
            "STAGES": tiles.stages, "Q_STAGES": tiles.q_stages, "O_SHARED": tiles.o_shared,
            "CAUSAL": causal, "PINGPONG": tiles.pingpong,
            "MAX3": tiles.max3, "EMULATED": tiles.emulated, "GUARDED": tiles.guarded,
            "REGISTERS": tiles.registers[0], "PRODUCER_REGISTERS": tiles.registers[1],
        }  # fmt: skip
        fixed = table, heads, shape.group, seqlen_q, seqlen_k
        self.ready = Ready("v3_fwd", kernels.forward, len(rows[0]), (*boxes, None), fixed, constants)

    def takes(self, q: Tensor, k: Tensor, v: Tensor) -> bool:
        """Whether tensors of this layout lie at addresses that TMA takes."""
        return not (q.data_ptr() | k.data_ptr() | v.data_ptr()) % ADDRESSES

    def attention(self, q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
        """(o, lse) of tensors that it takes. Raises ValueError for a scale out of range."""
        check_scale(scale)
        o, lse = self.outputs(q)
        with on(self.device):
            self.ready.run(*self.arguments(q, k, v, o, lse, scale))
        return o, lse

    def outputs(self, q: Tensor) -> tuple[Tensor, Tensor]:
        """(o, lse) to fill; o is ordered as q."""
        return q.new_empty_strided(*self.o), q.new_empty_strided(*self.lse, dtype=torch.float32)

    def arguments(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
    ) -> tuple[tuple[Tensor | None, ...], float]:
        """What the kernel is launched with."""
        of_qk, of_v = self.halved
        pieces = q, q if of_qk else None, k, k if of_qk else None, v, v if of_v else None, o
        return (*pieces, o if of_v else None, lse), scale * LOG2E


LOG2E = math.log2(math.e)
