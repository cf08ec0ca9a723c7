"""The kernel launches of FlashAttention-2 in portable Triton: which, with which arguments."""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from triton import cdiv

from flashbench.flash_configs import SUMMED_ROWS, section
from flashbench.kernels import _flash_dkdv_kernels as dkdv_kernels
from flashbench.kernels import _flash_kernels as kernels
from flashbench.kernels import _gradient_kernels as gradients
from flashbench.kernels._call import NOTHING, Call, Extra, Launch, like, on


def forward_launch(
    q: Tensor, k: Tensor, v: Tensor, call: Call, extra: Extra = NOTHING
) -> tuple[Tensor, Tensor, Launch]:
    """(o, lse, the launch that fills them); o lies in memory in the order of q's dimensions."""
    heads, group = q.shape[1], _group(q, k)
    batch, seqlen_q, seqlen_k = extra.lengths(q, k)
    o = like(q, v.shape[-1])
    lse = q.new_empty(q.shape[:3], dtype=torch.float32)
    config, options = call.options("fwd", q, v, q, k, v, o)
    tiles = cdiv(seqlen_q, config.block_q)
    args = (
        *(q, k, v, o, lse, extra.slopes, extra.bias, extra.sinks, extra.cu_q, extra.cu_k),
        *extra.lists(), *_strides(extra, q, k, v, o), *extra.bias_strides, *_row_strides(extra, lse),
        *(batch * heads, heads, group, seqlen_q, seqlen_k, tiles),
        _section(k, v, batch * heads, extra.grows(call)), *call.numbers,
    )  # fmt: skip
    options |= {**extra.options, "LAST_FIRST": extra.grows(call)}
    return o, lse, Launch("fwd", kernels.forward, tiles * batch * heads, args, options)


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a backward starts from: all tensors as of the forward, do as o, dlse as lse if it has one."""

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    lse: Tensor
    do: Tensor
    dlse: Tensor | None = None


@dataclass(frozen=True, kw_only=True)
class Backward:
    """Gradients, and the launches that fill them, in order. dbias and dsinks: None where not wanted.

    delta: filled by the launch of that name, None without it; a gradient of lse is taken off it then.
    """

    dq: Tensor
    dk: Tensor
    dv: Tensor
    launches: tuple[Launch, ...]
    delta: Tensor | None = None
    dbias: Tensor | None = None
    dsinks: Tensor | None = None

    @property
    def gradients(self) -> tuple[Tensor, ...]:
        """Those that there are: of q, k, v, bias, sinks."""
        every = self.dq, self.dk, self.dv, self.dbias, self.dsinks
        return tuple(x for x in every if x is not None)

    def run(self, saved: Saved) -> None:
        """Fill the gradients, on the device of what was saved."""
        with on(saved.q.device):
            for launch in self.launches:
                launch.run()
                if launch.name == "delta" and self.delta is not None and saved.dlse is not None:
                    self.delta.sub_(saved.dlse)  # d lse / d s = p, as d o / d s = p (dP - delta)


def backward_launches(
    saved: Saved,
    call: Call,
    extra: Extra = NOTHING,
    *,
    wanted: Container[str] = ("bias", "sinks"),
) -> Backward:
    """The backward of one call. With a gradient of lse a row's dS does not sum to 0.

    wanted: of ``bias`` and ``sinks``, those whose gradient is.
    """
    s = saved
    dq, dk, dv = empty_gradients(s)
    delta = torch.empty_like(s.lse)
    exactness = {
        "REFINE": s.dlse is None and s.q.element_size() == 4,
        "ALONE": s.dlse is None and extra.sinks is None and (extra.block_mask is None or call.alone),
    }
    norm = torch.empty_like(s.lse) if exactness["REFINE"] else s.lse
    shared = _Shared(saved, call, extra, delta, norm, exactness)
    launches = [delta_launch(s, call, extra, delta), _dq(shared, dq), _dkdv(shared, dk, dv)]
    dbias = dsinks = None
    if extra.bias is not None and "bias" in wanted:
        dbias = torch.empty_like(extra.bias, memory_format=torch.contiguous_format)
        of_rows = dbias.shape[3] == 1
        launches.append(_dbias_of_rows(shared, dbias) if of_rows else _dbias(shared, dbias))
    if extra.sinks is not None and "sinks" in wanted:
        dsinks = torch.empty_like(extra.sinks, memory_format=torch.contiguous_format)
        launches.append(_dsinks(shared, dsinks))
    return Backward(dq=dq, dk=dk, dv=dv, delta=delta, dbias=dbias, dsinks=dsinks, launches=tuple(launches))


@dataclass(frozen=True)
class _Shared:
    saved: Saved
    call: Call
    extra: Extra
    delta: Tensor
    norm: Tensor
    exactness: dict[str, bool]

    def options(self, name: str) -> tuple[Any, dict[str, Any]]:
        s = self.saved
        config, options = self.call.options(name, s.q, s.v, s.q, s.k, s.v, s.do)
        return config, {**options, **self.extra.options, **self.exactness}

    @property
    def strides(self) -> tuple[int, ...]:
        s = self.saved
        return (
            *_strides(self.extra, s.q, s.k, s.v, s.do),
            *self.extra.bias_strides,
            *_row_strides(self.extra, s.lse),
        )


def delta_launch(saved: Saved, call: Call, extra: Extra, delta: Tensor) -> Launch:
    """What fills delta, which is like lse: rowsum(do * o)."""
    s = saved
    config, options = call.options("delta", s.q, s.v, s.o, s.do)
    batch, seqlen_q, _ = extra.lengths(s.q, s.k)
    heads, tiles = s.q.shape[1], cdiv(seqlen_q, config.block_q)
    args = (
        *(s.o, s.do, delta, extra.cu_q), *_strides(extra, s.o, s.do), *_row_strides(extra, s.lse),
        *(heads, seqlen_q, tiles),
    )  # fmt: skip
    wanted = ("BLOCK_M", "DIM_V", "WIDEST", "WIDE", "num_warps", "num_stages", "enable_fp_fusion")
    options = {name: options[name] for name in wanted}
    return Launch("delta", kernels.delta_rows, tiles * batch * heads, args, options)


def empty_gradients(saved: Saved) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv to fill, contiguous."""
    dq, dk, dv = (
        torch.empty_like(x, memory_format=torch.contiguous_format) for x in (saved.q, saved.k, saved.v)
    )
    return dq, dk, dv


def _dq(shared: _Shared, dq: Tensor) -> Launch:
    s, call, extra = shared.saved, shared.call, shared.extra
    config, options = shared.options("dq")
    batch, seqlen_q, seqlen_k = extra.lengths(s.q, s.k)
    heads, tiles = s.q.shape[1], cdiv(seqlen_q, config.block_q)
    args = (
        *(s.q, s.k, s.v, s.do, s.lse, shared.delta, shared.norm, dq),
        *(extra.slopes, extra.bias, extra.sinks, extra.cu_q, extra.cu_k), *extra.lists(), *shared.strides,
        *(batch * heads, heads, _group(s.q, s.k), seqlen_q, seqlen_k, tiles),
        _section(s.k, s.v, batch * heads, extra.grows(call)), *call.numbers,
    )  # fmt: skip
    options |= {"LAST_FIRST": extra.grows(call)}
    return Launch("dq", kernels.backward_dq, tiles * batch * heads, args, options)


def _dkdv(shared: _Shared, dk: Tensor, dv: Tensor) -> Launch:
    s, call, extra = shared.saved, shared.call, shared.extra
    config, options = shared.options("dkdv")
    batch, seqlen_q, seqlen_k = extra.lengths(s.q, s.k)
    num_kv_heads, tiles = s.k.shape[1], cdiv(seqlen_k, config.block_k)
    m_h = s.k.shape[2]
    m_b = 0 if extra.cu_k is not None else num_kv_heads * m_h
    args = (
        *(s.q, s.k, s.v, s.do, s.lse, shared.delta, shared.norm, dk, dv),
        *(extra.slopes, extra.bias, extra.cu_q, extra.cu_k), *extra.lists(by_key=True),
        *shared.strides, *(m_b, m_h),
        *(batch * num_kv_heads, num_kv_heads, seqlen_q, seqlen_k, tiles),
        _section(s.q, s.do, batch * num_kv_heads, extra.grows(call)), *call.numbers,
    )  # fmt: skip
    options = {**options, "GROUP": _group(s.q, s.k)}
    return Launch("dkdv", dkdv_kernels.backward_dkdv, tiles * batch * num_kv_heads, args, options)


def _dbias(shared: _Shared, dbias: Tensor) -> Launch:
    """As dQ's tiles, one pipeline stage: a program streams little unless its bias is shared."""
    s, call, extra = shared.saved, shared.call, shared.extra
    config, options = shared.options("dq")
    heads, (batches, bias_heads) = s.q.shape[1], dbias.shape[:2]
    seqlen_q, seqlen_k = s.q.shape[2], s.k.shape[2]
    tiles_m, tiles_n = cdiv(seqlen_q, config.block_q), cdiv(seqlen_k, config.block_k)
    mask = extra.block_mask
    table = (None, None) if mask is None else (mask.slots, mask.bits)
    args = (
        *(s.q, s.k, s.v, s.do, s.lse, shared.delta, shared.norm, dbias, extra.slopes, extra.bias, *table),
        *shared.strides,
        *(heads, _group(s.q, s.k), s.q.shape[0] // max(1, batches), heads // max(1, bias_heads)),
        *(seqlen_q, seqlen_k, tiles_m, tiles_n), *call.numbers,
    )  # fmt: skip
    programs = batches * bias_heads * (tiles_m if options["BIAS_ROWS"] else 1) * tiles_n
    options["num_stages"] = 1
    return Launch("dbias", gradients.backward_dbias, programs, args, options)


def _dbias_of_rows(shared: _Shared, dbias: Tensor) -> Launch:
    lse, dlse, extra = shared.saved.lse, shared.saved.dlse, shared.extra
    batches, bias_heads, rows, _ = dbias.shape
    batch, heads, seqlen_q = lse.shape
    tiles = cdiv(seqlen_q, SUMMED_ROWS)
    args = (
        *(lse, shared.delta, None if dlse is None else dlse.contiguous(), extra.sinks, dbias),
        *_row_strides(extra, lse), heads, batch // max(1, batches), heads // max(1, bias_heads),
        *(seqlen_q, tiles),
    )  # fmt: skip
    options = {"BIAS_ROWS": rows != 1, "BLOCK_M": SUMMED_ROWS, "num_warps": 4}
    programs = batches * bias_heads * (tiles if rows != 1 else 1)
    return Launch("dbias", gradients.backward_dbias_of_rows, programs, args, options)


def _dsinks(shared: _Shared, dsinks: Tensor) -> Launch:
    lse, extra = shared.saved.lse, shared.extra
    args = (lse, shared.delta, extra.sinks, dsinks, *_row_strides(extra, lse), lse.shape[0], lse.shape[2])
    return Launch(
        "dsinks", gradients.backward_dsinks, lse.shape[1], args, {"BLOCK_M": SUMMED_ROWS, "num_warps": 4}
    )


def _group(q: Tensor, k: Tensor) -> int:
    return q.shape[1] // k.shape[1] if k.shape[1] else 1


def _strides(extra: Extra, *tensors: Tensor) -> tuple[int, ...]:
    """Of batch, head and row of each; packed sequences are all in batch 0."""
    return tuple(
        step for x in tensors for step in (x.stride() if extra.cu_q is None else (0, *x.stride()[1:]))[:3]
    )


def _row_strides(extra: Extra, lse: Tensor) -> tuple[int, int]:
    """Of batch and head, of lse and whatever else has a number per query."""
    return lse.stride(0) if extra.cu_q is None else 0, lse.stride(1)


def _section(a: Tensor, b: Tensor, heads: int, grows: bool) -> int:
    """How many heads to walk tile by tile, given the two tensors that a head streams.

    grows: tiles differ in length, so that one head's do not end together.
    """
    streamed = a.shape[2] * (a.shape[3] + b.shape[3]) * a.element_size()
    return section(streamed, heads) if grows else 1
