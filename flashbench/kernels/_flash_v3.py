"""FlashAttention-3's forward for sm_90, and flash-v2's backward after it. Import through ``_triton.load``.

The kernel is made ready once for tensors of the same shapes and strides (``Plan``): descriptors, the schedule
and the compiled kernel; a call fills in addresses, so that it costs the host little (_hopper_kernels.py has
the kernel, hopper_configs.py its tiles).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from itertools import starmap
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from flashbench import hopper_configs
from flashbench.flash_configs import Config
from flashbench.hopper_configs import ROWS, Tiles
from flashbench.kernels import _hopper_kernels as kernels
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.kernels._call import (
    Call,
    Launch,
    check_devices,
    check_scale,
    check_shapes,
    like,
    on,
    unit_stride,
)
from flashbench.kernels._flash_v2 import NOTHING, FlashAttention
from flashbench.kernels._jit_keys import settle

ALIGNMENT = 8
"""Elements of 16 bits to which TMA wants addresses and strides aligned."""


def flash_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    return_lse: bool = False,
    tiles: Tiles | None = None,
    configs: tuple[tuple[str, Config], ...] = (),
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · softmax_scale) v on an sm_90 GPU; differentiable in q, k and v by flash-v2's kernels.

    q: (batch, num_heads, seqlen_q, head_dim); k: (batch, num_kv_heads, seqlen_k, head_dim);
    v: (batch, num_kv_heads, seqlen_k, head_dim_v), fp16 or bf16, any strides (those that TMA cannot take are
    copied); head dims up to 256. Query head h uses K/V head h // (num_heads // num_kv_heads). causal: keys
    up to j = i + seqlen_k - seqlen_q. softmax_scale: head_dim**-0.5 by default, more than 0. tiles: in place
    of the forward's table; configs: (kernel, configuration) in place of the backward's.

    Returns o (batch, num_heads, seqlen_q, head_dim_v) in q's dtype, in memory ordered as q is; with
    return_lse also lse (batch, num_heads, seqlen_q): log of the sum of exponentials, fp32, differentiable.
    Rows without keys: o = 0, lse = -inf, no gradient. Raises ValueError for a misfit.
    """
    _check(q, k, v)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    check_scale(scale)
    if torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad):
        o, lse = _FlashAttention3.apply(q, k, v, Call(causal=causal, scale=scale, configs=configs), tiles)
    else:
        o, lse = forward(q, k, v, causal=causal, scale=scale, tiles=tiles)
    return (o, lse) if return_lse else o


class _FlashAttention3(FlashAttention):
    """This forward, flash-v2's backward: it asks for o and the natural lse alone."""

    @staticmethod
    def forward(ctx: Any, *args: Any) -> tuple[Tensor, Tensor]:
        q, k, v, call, tiles = args
        o, lse = forward(q, k, v, causal=call.causal, scale=call.scale, tiles=tiles)
        ctx.save_for_backward(*(unit_stride(x) for x in (q, k, v)), o, lse, None, None)
        ctx.call, ctx.dtype, ctx.extra = call, q.dtype, NOTHING
        ctx.set_materialize_grads(False)
        return o, lse

    @staticmethod
    def backward(ctx: Any, do: Tensor | None, dlse: Tensor | None) -> tuple[Tensor | None, ...]:
        return *FlashAttention.backward(ctx, do, dlse)[:3], None, None


def forward(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor]:
    """(o, lse) of arguments that were checked."""
    if not (q.numel() and k.numel()):
        o = q.new_zeros(*q.shape[:3], v.shape[3])
        return o, q.new_full(q.shape[:3], -math.inf, dtype=torch.float32)
    q, k, v = loadable(q), loadable(k), loadable(v)
    o, lse, launch = forward_launch(q, k, v, causal=causal, scale=scale, tiles=tiles)
    with on(q.device):
        launch.run()
    return o, lse


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool, scale: float, tiles: Tiles | None = None
) -> tuple[Tensor, Tensor, Launch]:
    """(o, lse, the launch that fills them) of tensors that TMA takes; o is ordered as q."""
    columns = v.shape[3]
    o = like(q, columns + -columns % ALIGNMENT)
    o = o[..., :columns] if columns % ALIGNMENT else o
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    layout = starmap(Laid, ((x.shape, x.stride()) for x in (q, k, v, o)))
    made = plan(tuple(layout), q.dtype, q.device, causal, tiles)
    args = made.arguments(q, k, v, o, lse, scale)
    return o, lse, PlannedLaunch("v3_fwd", kernels.forward, made.programs, args, made.options, made)


@dataclass(frozen=True)
class PlannedLaunch(Launch):
    """A launch of a kernel that its plan has compiled."""

    plan: Plan

    def start(self) -> None:
        """Launch on the current device, which is the tensors', and stream."""
        self.plan.compiled(self.args)[(self.programs, 1, 1)](*self.args, *self.plan.constants.values())


class Laid(NamedTuple):
    """Where the elements of a tensor (batch, heads, rows, columns) are, in elements."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]


@lru_cache(maxsize=256)
def plan(
    laid: tuple[Laid, ...], dtype: torch.dtype, device: torch.device, causal: bool, tiles: Tiles | None
) -> Plan:
    """The plan for q, k, v and o laid out so."""
    return Plan(laid, dtype, device, causal, tiles)


class Plan:
    """What launches over tensors of one layout share.

    descriptors: of boxes of q, q, k, k, v, v, o, o, without an address; None for a second piece of a head
    dim that has none. options: compile-time constants and launch options. table: the schedule, on the device.
    """

    def __init__(
        self, laid: tuple[Laid, ...], dtype: torch.dtype, device: torch.device, causal: bool,
        tiles: Tiles | None,
    ) -> None:  # fmt: skip
        q, k, v, o = laid
        (batch, heads, seqlen_q, dim), (_, kv_heads, seqlen_k, dim_v) = q.shape, v.shape
        tiles = tiles or hopper_configs.choose(dim, dim_v, causal, seqlen_k)
        shape = schedule.Shape(
            heads=batch * heads, group=heads // kv_heads, seqlen_q=seqlen_q, seqlen_k=seqlen_k,
            block_m=tiles.block_q, block_n=tiles.block_k, causal=causal,
            kv_bytes=seqlen_k * (dim + dim_v) * dtype.itemsize,
        )  # fmt: skip
        rows = schedule.table(shape, _programs(device))
        self.programs = len(rows[0])
        self.table = torch.tensor(rows, dtype=torch.int32, device=device)
        self.numbers = (shape.tiles, heads, shape.group, seqlen_q, seqlen_k)
        (d0, d1), (e0, e1) = hopper_configs.pieces(dim), hopper_configs.pieces(dim_v, of_v=True)
        cut = ((q, ROWS, d0, d1), (k, tiles.block_k, d0, d1), (v, tiles.block_k, e0, e1), (o, ROWS, e0, e1))
        self.descriptors = tuple(
            _descriptor(x, height, columns, dtype) if columns else None
            for x, height, *both in cut
            for columns in both
        )
        self.constants = {
            "BLOCK_M": tiles.block_q, "BLOCK_N": tiles.block_k, "D0": d0, "D1": d1, "E0": e0, "E1": e1,
            "STAGES": tiles.stages, "Q_STAGES": tiles.q_stages, "O_SHARED": tiles.o_shared,
            "CAUSAL": causal, "PINGPONG": tiles.pingpong,
            "REGISTERS": tiles.registers[0], "PRODUCER_REGISTERS": tiles.registers[1],
        }  # fmt: skip
        self.options = {**self.constants, "num_warps": 4, "enable_fp_fusion": True}
        self._compiled: Any = None

    def arguments(
        self, q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor, scale: float
    ) -> tuple[Any, ...]:
        """The kernel's arguments but for compile-time constants."""
        bound = _bound(self.descriptors, (q, q, k, k, v, v, o, o))
        return *bound, lse, self.table, *self.numbers, scale * math.log2(math.e)

    def compiled(self, args: tuple[Any, ...]) -> Any:
        """The compiled kernel, looked up once: Triton's own look-up costs as much as all else of a call."""
        if self._compiled is None:
            settle(kernels.forward)
            self._compiled = kernels.forward.warmup(*args, grid=(1,), **self.options)
        return self._compiled


def _bound(descriptors: tuple[Any, ...], tensors: tuple[Tensor, ...]) -> Iterator[Any]:
    """The descriptors, each of its tensor; copied, as a cached one must not keep a tensor alive."""
    for descriptor, x in zip(descriptors, tensors, strict=True):
        if descriptor is None:
            yield None
            continue
        own = object.__new__(TensorDescriptor)
        own.__dict__.update(descriptor.__dict__, base=x)
        yield own


def _descriptor(laid: Laid, rows: int, columns: int, dtype: torch.dtype) -> TensorDescriptor:
    """Of boxes of rows by columns of (batch, heads, rows, columns); outside is 0, and is not fetched."""
    block = [1, 1, rows, columns]
    strides = [s if n > 1 else ALIGNMENT for n, s in zip(laid.shape[:3], laid.strides, strict=False)]
    nowhere = torch.empty(0, dtype=dtype, device="meta")
    layout = gl.NVMMASharedLayout.get_default_for(
        block, gl.float16 if dtype == torch.float16 else gl.bfloat16
    )
    return TensorDescriptor(nowhere, list(laid.shape), [*strides, 1], block, layout)


def loadable(x: Tensor) -> Tensor:
    """x, or a copy of it that TMA takes."""
    if x.data_ptr() % 16 == 0 and _takes(x.shape, x.stride()):
        return x
    columns = x.shape[3]
    return x.new_empty(*x.shape[:3], columns + -columns % ALIGNMENT)[..., :columns].copy_(x)


@lru_cache(maxsize=256)
def _takes(shape: tuple[int, ...], strides: tuple[int, ...]) -> bool:
    """Whether strides are ones that TMA takes: 1 for columns, else multiples of 16 bytes and not 0."""
    outer = [s for n, s in zip(shape[:3], strides, strict=False) if n > 1]
    return strides[3] == 1 and all(s > 0 and s % ALIGNMENT == 0 for s in outer)


@lru_cache
def _programs(device: torch.device) -> int:
    """As many as the device has SMs: one fills an SM."""
    if device.type != "cuda":
        return hopper_configs.PROGRAMS
    count: int = torch.cuda.get_device_properties(device).multi_processor_count
    return count


def _check(q: Tensor, k: Tensor, v: Tensor) -> None:
    check_shapes(q, k, v)
    check_devices(q=q, k=k, v=v)
    if not q.dtype == k.dtype == v.dtype or q.dtype not in (torch.float16, torch.bfloat16):
        raise ValueError(f"q, k and v must be of one dtype, fp16 or bf16: {q.dtype}, {k.dtype}, {v.dtype}")
