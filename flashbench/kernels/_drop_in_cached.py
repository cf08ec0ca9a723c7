"""A K/V cache as a caller has it, and how the bundled kernels get at what a call sees of it.

flash-decode takes a cache as it lies, in pages of one row each, too; flash-v2 takes contiguous rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor

from flashbench.kernels import _drop_in_checks as checks
from flashbench.kernels import _triton
from flashbench.kernels._drop_in import Options, attend
from flashbench.kernels._drop_in_probabilities import Packed
from flashbench.kernels._drop_in_rows import one_by_one, rows_of

_NAME = "flash_attn_with_kvcache"

Way: TypeAlias = Callable[[Tensor, "Kept", Any], tuple[Tensor, Tensor]]
"""(o, lse) of q, a cache with the new keys in it, and the arguments of the call."""


def check_whose(batch: int, lengths: Any, batch_idx: Any, leftpad: Any, block_table: Any) -> None:
    """Raise ValueError for what does not say of each sequence how long it is, or where."""
    if lengths is not None:
        checks.check_cached("cache_seqlens", lengths, batch, kind="one number, or int32")
    if batch_idx is not None:
        checks.check_cached("cache_batch_idx", batch_idx, batch, (torch.int64,))
    if leftpad is not None:
        checks.check_cached("cache_leftpad", leftpad, batch)
    if block_table is not None:
        checks.check_table(block_table, batch)
    if block_table is not None and batch_idx is not None:
        raise ValueError("cache_batch_idx and block_table exclude each other")


def check_shapes(q: Tensor, k_cache: Tensor, v_cache: Tensor, asked: Any) -> None:
    """Raise ValueError for tensors that are not of one attention problem, in the caller's order of sides."""
    shapes = f"q {tuple(q.shape)}, k_cache {tuple(k_cache.shape)}, v_cache {tuple(v_cache.shape)}"
    if k_cache.shape[:3] != v_cache.shape[:3]:
        raise ValueError(f"k_cache and v_cache differ in more than head_dim: {shapes}")
    if k_cache.dtype != v_cache.dtype:
        raise ValueError(f"k_cache and v_cache must be of one dtype: {k_cache.dtype}, {v_cache.dtype}")
    if q.shape[3] != k_cache.shape[3]:
        raise ValueError(f"head_dim of q and of k_cache differ: {shapes}")
    heads, kv_heads = q.shape[2], k_cache.shape[2]
    if not kv_heads or heads % kv_heads:
        raise ValueError(f"num_heads {heads} of q is not divisible by num_kv_heads {kv_heads}: {shapes}")
    entries, batch = k_cache.shape[0], q.shape[0]
    if asked.block_table is None and asked.batch_idx is None and entries < batch:
        raise ValueError(
            f"k_cache and v_cache are of {entries} sequences, q of {batch}; accepted: at least as many, or"
            " cache_batch_idx"
        )
    for name, x in (("k_cache", k_cache), ("v_cache", v_cache)):
        if x.stride(-1) != 1 < x.shape[-1]:
            raise ValueError(f"{name} of stride {x.stride()} is not taken; accepted: a last stride of 1")
    _check_new(asked, k_cache, v_cache, batch)


def _check_new(asked: Any, k_cache: Tensor, v_cache: Tensor, batch: int) -> None:
    """The same of the new keys and values."""
    k, v = asked.k, asked.v
    if k is None and v is None:
        return
    if k is None or v is None:
        raise ValueError(f"k and v of {_NAME} must be given together")
    if asked.lengths is None:
        raise ValueError(f"cache_seqlens of {_NAME} must say where the new k and v go")
    checks.check_dimensions(4, "(batch, new, heads, head_dim)", k=k, v=v)
    for name, x, cache in (("k", k, k_cache), ("v", v, v_cache)):
        wanted = batch, k.shape[1], *cache.shape[2:]
        if tuple(x.shape) != wanted:
            raise ValueError(f"{name} must be {wanted}, as q and {name}_cache are; got {tuple(x.shape)}")


@dataclass(frozen=True, kw_only=True, eq=False)
class Kept:
    """A cache: k and v as given, and for each sequence its pages (an entry of a cache is a page as long as
    it; None: one after the other), where its keys end (None: at the end of the cache) and where they begin
    (None: at 0). indices: the argument that pages are from."""

    k: Tensor
    v: Tensor
    batch: int
    pages: Tensor | None
    used: Tensor | None
    leftpad: Tensor | None
    indices: str

    @classmethod
    def of(cls, kept: tuple[Tensor, Tensor], asked: Any, batch: int) -> Kept:
        """Of arguments that fit; of a longer batch the first ones, as the package has it."""
        k, v = kept
        pages, name = asked.block_table, "block_table"
        if asked.batch_idx is not None:
            pages, name = asked.batch_idx.int()[:, None], "cache_batch_idx"
        elif pages is None:
            k, v = k[:batch], v[:batch]
        pages = None if pages is None else pages.contiguous()
        used = None if asked.lengths is None else asked.lengths.contiguous()
        return cls(k=k, v=v, batch=batch, pages=pages, used=used, leftpad=asked.leftpad, indices=name)

    @property
    def capacity(self) -> int:
        """Keys that a sequence can have."""
        return int(self.k.shape[1]) * (1 if self.pages is None else self.pages.shape[1])

    @property
    def ends(self) -> Tensor:
        """Where each sequence's keys end, int32."""
        if self.used is not None:
            return self.used
        return torch.full((self.batch,), self.capacity, dtype=torch.int32, device=self.k.device)

    @property
    def decode(self) -> Any:
        """The decode kernels' module."""
        return _triton.load(self.k.device.type, "_flash_decode")

    @property
    def cache(self) -> Any:
        """The decode kernels' cache, from 0 on: contiguous ones have heads before rows."""
        k, v = (self.k, self.v) if self.pages is not None else (x.transpose(1, 2) for x in (self.k, self.v))
        return self.decode.Cache(k=k, v=v, seqused_k=self.used, block_table=self.pages)

    def with_new(self, k: Tensor, v: Tensor) -> Kept:
        """The same with new keys and values behind the others, which are written."""
        self.decode.append(self.cache, k.transpose(1, 2), v.transpose(1, 2))
        return replace(self, used=self.ends + k.shape[1])

    def check_places(self, new: int, lengths: Tensor | None) -> None:
        """On a CPU, where it costs no wait for a device: whether there is room, and pages and starts are of
        the cache. Raises ValueError."""
        if self.k.device.type != "cpu":
            return
        ends = self.ends
        held = ends + new
        if lengths is not None and bool(((ends < 0) | (held > self.capacity)).any()):
            what = f"cache_seqlens {lengths.tolist()}" + (f" and {new} new keys" if new else "")
            raise ValueError(f"{what} are out of range; the cache has room for 0 to {self.capacity} keys")
        if self.leftpad is not None and bool(((self.leftpad < 0) | (self.leftpad > held)).any()):
            raise ValueError(
                f"cache_leftpad {self.leftpad.tolist()} is out of range; keys end at {held.tolist()}"
            )
        if self.pages is not None:
            checks.check_pages(self.indices, self.pages, held, self.k.shape[1], self.k.shape[0])

    def seen(self, rows: int, left: int) -> tuple[Tensor, Tensor, int]:
        """(first key, keys, the most of them) of each sequence that ``rows`` queries at its end can see."""
        ends = self.ends.clamp(min=0, max=self.capacity)
        first = torch.zeros_like(ends) if self.leftpad is None else self.leftpad.clamp(min=0)
        most = self.capacity
        if left >= 0:
            most = min(most, rows + left)
            first = torch.maximum(first, ends - most)
        return first, (ends - first).clamp(min=0), most

    def places(self, first: Tensor, count: Tensor, most: int) -> tuple[Tensor, Tensor]:
        """(page, row in it) of each of those keys, both (batch, most)."""
        pages, size = self.pages, int(self.k.shape[1])
        if pages is None:
            pages = torch.arange(self.batch, device=self.k.device)[:, None]
        return rows_of(pages, max(1, size), first, count, most if self.k.shape[0] and size else 0)


def way(q: Tensor, kept: Kept, asked: Any) -> Way:
    """Which kernels run a call. Raises ValueError for what they do not take."""
    scattered = kept.pages is not None or kept.leftpad is not None
    window = (asked.left, asked.right) != (-1, -1)
    only_starts = window and q.shape[1] == 1 and scattered  # what the last query sees is the last keys
    if asked.softcap or asked.slopes is not None or (window and not only_starts):
        _check_without_splits(q, kept, asked.options, asked.num_splits)
        return _without_splits
    kept.decode.checked_scale(q.transpose(1, 2), kept.cache, asked.scale, asked.num_splits)
    return _by_rows if kept.leftpad is not None or window else _as_it_lies


def _as_it_lies(q: Tensor, kept: Kept, asked: Any) -> tuple[Tensor, Tensor]:
    """By flash-decode."""
    return _decoded(q, kept.cache, asked)


def _by_rows(q: Tensor, kept: Kept, asked: Any) -> tuple[Tensor, Tensor]:
    """By flash-decode, each key a page of its own; of a copy where pages do not lie side by side."""
    first, count, most = kept.seen(q.shape[1], asked.left)
    page, row = kept.places(first, count, most)
    k, v = one_by_one(kept.k), one_by_one(kept.v)
    if k is None or v is None:
        k, v = (x[page, row].transpose(1, 2) for x in (kept.k, kept.v))
        table = None
    else:
        table = (page * kept.k.shape[1] + row).int()
    return _decoded(q, kept.decode.Cache(k=k, v=v, seqused_k=count.int(), block_table=table), asked)


def _decoded(q: Tensor, cache: Any, asked: Any) -> tuple[Tensor, Tensor]:
    decode, q = _triton.load(q.device.type, "_flash_decode"), q.transpose(1, 2)
    scale = decode.checked_scale(q, cache, asked.scale, asked.num_splits)
    call = decode.Call(causal=asked.causal, scale=scale, num_splits=asked.num_splits)
    o, lse = decode.run(q, cache, call, return_lse=True)
    return o.transpose(1, 2), lse


def _check_without_splits(q: Tensor, kept: Kept, options: Options, num_splits: int) -> None:
    """Raise ValueError for what ``_without_splits`` does not take."""
    if num_splits not in (0, 1):
        raise ValueError(
            f"num_splits {num_splits} is not taken with window_size, softcap or alibi_slopes; accepted: 0, 1"
        )
    of, v2 = (_triton.load(q.device.type, name) for name in ("_call", "_flash_v2"))
    q = q.transpose(1, 2)
    some = (x[:1] if x.shape[0] else x.new_empty(1, *x.shape[1:]) for x in (kept.k, kept.v))
    k, v = (x.expand(q.shape[0], -1, -1, -1).transpose(1, 2) for x in some)
    of.check_shapes(q, k, v)
    scale = q.shape[-1] ** -0.5 if options.softmax_scale is None else options.softmax_scale
    call = of.Call(causal=options.causal, scale=scale, window=options.window_size, softcap=options.softcap)
    v2.check(q, k, v, call, of.Extra(slopes=options.alibi_slopes))


def _without_splits(q: Tensor, kept: Kept, asked: Any) -> tuple[Tensor, Tensor]:
    """By flash-v2, as packed sequences: before each one's keys, without queries, what lies there.

    Of pages and entries the keys that the window shows are copied.
    """
    rows, options = q.shape[1], asked.options
    k, v, batch = kept.k, kept.v, kept.batch
    first, count, most = kept.seen(rows, -1 if kept.pages is None else asked.left)
    if kept.pages is not None:
        page, row = kept.places(first, count, most)
        k, v, first = k[page, row], v[page, row], torch.zeros_like(first)
    capacity = k.shape[1]
    which = torch.arange(batch, dtype=torch.int32, device=q.device)
    begins = torch.minimum(first, first.new_full((), capacity)) + which * capacity
    starts = torch.stack((begins, begins + count), 1).flatten()
    queries = torch.stack((which * rows, (which + 1) * rows), 1).flatten()
    packed = Packed(_between(queries, batch * rows), _between(starts, batch * capacity), rows, 2 * capacity)
    slopes = options.alibi_slopes
    if slopes is not None and slopes.ndim == 2:
        slopes = torch.stack((torch.zeros_like(slopes), slopes), 1).flatten(0, 1)
        slopes = torch.cat((slopes, slopes.new_zeros(1, slopes.shape[1])))
    one = tuple(x.flatten(0, 1).transpose(0, 1)[None] for x in (q, k, v))
    o, lse, _ = attend(one, options, slopes, packed)
    o = o[0].transpose(0, 1).unflatten(0, (batch, rows))
    return o, lse[0].unflatten(1, (batch, rows)).transpose(0, 1)


def _between(inner: Tensor, end: int) -> Tensor:
    """0, what is between, and the end."""
    return torch.cat((inner.new_zeros(1), inner, inner.new_full((1,), end)))
