"""flash-attention's function of a K/V cache, as calls of flash-decode or, with options of scores, flash-v2.

Names, order and defaults of the arguments: github.com/Dao-AILab/flash-attention, release 2.8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from flashbench.kernels import _triton
from flashbench.kernels._drop_in import Options, attend
from flashbench.kernels._drop_in_checks import (
    check_cached,
    check_dimensions,
    check_options,
    check_whole,
    refuse,
)
from flashbench.kernels._eager import refuse_forward_mode
from flashbench.kernels._layout import unit_stride

_NAME = "flash_attn_with_kvcache"


@torch.no_grad()  # type: ignore[untyped-decorator]
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of q (batch, seqlen_q, num_heads, head_dim) over a cache; not differentiable.

    k_cache, v_cache: (batch, capacity, num_kv_heads, …), or with block_table, int32 (batch, max_pages),
    (num_pages, page_size, num_kv_heads, …). cache_seqlens: keys of each sequence, int32 (batch,) or
    one number for all; None: the cache is full. k and v (batch, new, num_kv_heads, …): written behind those,
    in place, before q sees them; there must be room. cache_batch_idx: int32 (batch,), which entry of the
    cache is a sequence's. causal and window_size are aligned to the last query and key of each sequence.

    Keys are split over thread blocks by flash-decode; a window, softcap or alibi_slopes (num_heads,) are
    flash-v2's, which has no splits and takes a dense contiguous cache alone. Refused by name: rotary_cos,
    rotary_sin, cache_leftpad; without those rotary_interleaved means nothing.

    Returns o (batch, seqlen_q, num_heads, head_dim_v); with return_softmax_lse also lse (batch, num_heads,
    seqlen_q), fp32, natural log, -inf for a row without keys. Raises ValueError for a misfit.
    """
    refuse_forward_mode(q, k_cache, v_cache, k, v, alibi_slopes)
    refuse(_NAME, rotary_cos=rotary_cos, rotary_sin=rotary_sin, cache_leftpad=cache_leftpad)
    check_dimensions(4, "(batch, seqlen, heads, head_dim)", q=q)
    check_dimensions(4, "(batch, capacity, heads, head_dim), or pages", k_cache=k_cache, v_cache=v_cache)
    check_options(causal, window_size, alibi_slopes, scale=softmax_scale, softcap=softcap)
    check_whole("num_splits", num_splits, "a count, or 0 for the best")
    if isinstance(cache_seqlens, int):
        cache_seqlens = torch.full(q.shape[:1], cache_seqlens, dtype=torch.int32, device=q.device)
    _check_whose(q.shape[0], cache_seqlens, cache_batch_idx, block_table)
    band = _band(causal, window_size)
    run = torch.ops.flashbench.attention_with_kvcache if torch.compiler.is_compiling() else _attend
    o, lse = run(
        q, k_cache, v_cache, k, v, cache_seqlens, cache_batch_idx, block_table, alibi_slopes, softmax_scale,
        *band, softcap, num_splits,
    )  # fmt: skip
    return (o, lse) if return_softmax_lse else o


def _check_whose(batch: int, lengths: Any, batch_idx: Any, block_table: Any) -> None:
    """Raise ValueError for what does not say of each sequence how long it is, or where."""
    if lengths is not None:
        check_cached("cache_seqlens", lengths, batch, kind="one number, or int32")
    if batch_idx is not None:
        check_cached("cache_batch_idx", batch_idx, batch, (torch.int64,))
    if block_table is not None:
        check_dimensions(2, "(batch, max_pages)", block_table=block_table)


def _band(causal: bool, window_size: tuple[int, int]) -> tuple[bool, int, int]:
    """(causal, left, right), causal alone where the window hides no more: all kernels have that."""
    left, right = int(window_size[0]), int(window_size[1])
    return (True, -1, -1) if left == -1 and (causal or right == 0) else (causal, left, right)


def _attend(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None,
    v: Tensor | None,
    lengths: Tensor | None,
    batch_idx: Tensor | None,
    block_table: Tensor | None,
    slopes: Tensor | None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """(o, lse) of arguments that were looked at one by one."""
    scale, causal, left, right, softcap, num_splits = rest
    decode = _triton.load(q.device.type, "_flash_decode")
    lengths = None if lengths is None else lengths.contiguous()
    cache = _cache(decode, (k_cache, v_cache), lengths, _table(block_table, batch_idx))
    q = unit_stride(q).transpose(1, 2)
    options = Options(
        softmax_scale=scale, causal=causal, window_size=(left, right), softcap=softcap, alibi_slopes=slopes
    )
    # all that is refused is refused before the cache is written to
    if (left, right) == (-1, -1) and not softcap and slopes is None:
        scale = decode.checked_scale(q, cache, scale, num_splits)
        cache = _with_new(decode, cache, k, v)
        call = decode.Call(causal=causal, scale=scale, num_splits=num_splits)
        o, lse = decode.run(q, cache, call, return_lse=True)
    else:
        _check_without_splits(q, cache, options, num_splits)
        cache = _with_new(decode, cache, k, v)
        o, lse = _without_splits(q, cache, options)
    return o.transpose(1, 2), lse


def _operator(*args: Any) -> tuple[Tensor, Tensor]:
    o, lse = _attend(*args)
    return o.contiguous(), lse.contiguous()


def _fake(q: Tensor, k_cache: Tensor, v_cache: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    batch, rows, heads = q.shape[:3]
    o = q.new_empty(batch, rows, heads, v_cache.shape[3])
    return o, q.new_empty((batch, heads, rows), dtype=torch.float32)


torch.library.custom_op(
    "flashbench::attention_with_kvcache",
    _operator,
    mutates_args=("k_cache", "v_cache"),
    schema=(
        "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, Tensor? cache_seqlens,"
        " Tensor? cache_batch_idx, Tensor? block_table, Tensor? alibi_slopes, float? softmax_scale,"
        " bool causal, int left, int right, float softcap, int num_splits) -> (Tensor, Tensor)"
    ),
).register_fake(_fake)


def _table(block_table: Tensor | None, cache_batch_idx: Tensor | None) -> Tensor | None:
    """The pages of each sequence; an entry of a contiguous cache is a page as long as it."""
    if block_table is not None and cache_batch_idx is not None:
        raise ValueError("cache_batch_idx and block_table exclude each other")
    if cache_batch_idx is None:
        return None if block_table is None else block_table.contiguous()
    return cache_batch_idx.int()[:, None].contiguous()


def _cache(decode: Any, kept: tuple[Tensor, Tensor], lengths: Tensor | None, table: Tensor | None) -> Any:
    """The decode kernels' cache: contiguous ones have heads before rows."""
    for name, x in zip(("k_cache", "v_cache"), kept, strict=True):
        if x.stride(-1) != 1 < x.shape[-1]:
            raise ValueError(f"{name} of stride {x.stride()} is not taken; accepted: a last stride of 1")
    k, v = kept if table is not None else (x.transpose(1, 2) for x in kept)
    return decode.Cache(k=k, v=v, seqused_k=lengths, block_table=table)


def _with_new(decode: Any, cache: Any, k: Tensor | None, v: Tensor | None) -> Any:
    """The cache with new keys and values behind the others."""
    if k is None and v is None:
        _check_places(cache, 0)
        return cache
    if k is None or v is None:
        raise ValueError(f"k and v of {_NAME} must be given together")
    if cache.seqused_k is None:
        raise ValueError(f"cache_seqlens of {_NAME} must say where the new k and v go")
    check_dimensions(4, "(batch, new, heads, head_dim)", k=k, v=v)
    _check_places(cache, k.shape[1])
    k, v = unit_stride(k), unit_stride(v)
    decode.append(cache, k.transpose(1, 2), v.transpose(1, 2))
    return replace(cache, seqused_k=cache.seqused_k + k.shape[1])


def _check_places(cache: Any, new: int) -> None:
    """On a CPU, where it costs no wait for a device: whether there is room, and the pages are of the cache.

    What is of another shape or dtype is left to the kernels' own checks.
    """
    used, table = cache.seqused_k, cache.block_table
    if cache.k.device.type != "cpu" or any(x is not None and x.dtype != torch.int32 for x in (used, table)):
        return
    held = cache.lengths() + new
    if bool((held - new < 0).any()) or bool((held > cache.capacity).any()):
        what = f"cache_seqlens {used.tolist()}" + (f" and {new} new keys" if new else "")
        raise ValueError(f"{what} are out of range; the cache has room for 0 to {cache.capacity} keys")
    if table is None or table.ndim != 2 or table.shape[0] != held.shape[0]:
        return
    needed = torch.arange(table.shape[1]) * cache.page_size < held[:, None]
    if bool((needed & ((table < 0) | (table >= cache.k.shape[0]))).any()):
        raise ValueError(
            f"block_table or cache_batch_idx {table.tolist()} is out of range; the cache has"
            f" {cache.k.shape[0]} pages or entries"
        )


def _check_without_splits(q: Tensor, cache: Any, options: Options, num_splits: int) -> None:
    """Raise ValueError for what ``_without_splits`` does not take."""
    slopes = options.alibi_slopes
    if cache.block_table is not None:
        raise ValueError(
            "window_size, softcap and alibi_slopes are not taken with block_table or cache_batch_idx;"
            " accepted: a contiguous cache"
        )
    if num_splits > 1:
        raise ValueError(
            f"num_splits {num_splits} is not taken with window_size, softcap or alibi_slopes; accepted: 0, 1"
        )
    if slopes is not None and slopes.ndim != 1:
        raise ValueError(f"alibi_slopes of {_NAME} must be (num_heads,), the same for all")
    of, v2 = (_triton.load(q.device.type, name) for name in ("_call", "_flash_v2"))
    of.check_shapes(q, cache.k, cache.v)
    scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    call = of.Call(causal=options.causal, scale=scale, window=options.window_size, softcap=options.softcap)
    v2.check(q, cache.k, cache.v, call, of.Extra(slopes=slopes))


def _without_splits(q: Tensor, cache: Any, options: Options) -> tuple[Tensor, Tensor]:
    """(o, lse) of a contiguous cache as packed sequences: one's keys, then, without queries, its room."""
    (batch, _, rows, _), capacity = q.shape, cache.capacity
    first = torch.arange(batch, dtype=torch.int32, device=q.device)
    used = cache.lengths()
    starts = torch.stack((first * capacity, first * capacity + used.clamp(max=capacity)), 1).flatten()
    queries = torch.stack((first * rows, (first + 1) * rows), 1).flatten()
    packed = {
        "cu_seqlens_q": torch.cat((queries, queries[-1:])),
        "cu_seqlens_k": torch.cat((starts, starts.new_tensor([batch * capacity]))),
        "max_seqlen_q": rows, "max_seqlen_k": capacity,
    }  # fmt: skip
    one = [x.transpose(1, 2).flatten(0, 1).transpose(0, 1)[None] for x in (q, cache.k, cache.v)]
    o, lse, _ = attend(tuple(one), options, options.alibi_slopes, packed)
    o = o[0].transpose(0, 1).unflatten(0, (batch, rows)).transpose(1, 2)
    return o, lse[0].unflatten(1, (batch, rows)).transpose(0, 1)
