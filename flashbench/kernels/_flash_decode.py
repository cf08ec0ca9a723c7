"""Flash-Decoding in portable Triton: the cache, launches, functions. Import through ``_triton.load``.

    cache = Cache(k=k_pages, v=v_pages, seqused_k=lengths, block_table=table)
    append(cache, k_new, v_new)
    o = flash_decode(q, replace(cache, seqused_k=lengths + 1))

The same kernels run compiled on a GPU and through Triton's interpreter on a CPU. Nothing here reads a
length back from the device, so that a call can be captured in a CUDA graph.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton import cdiv

from flashbench import decode_configs as configs
from flashbench.decode_configs import DecodeConfig, Shape
from flashbench.flash_configs import FP8_CAPABILITY, MAX_HEAD_DIM, widest
from flashbench.kernels import _decode_kernels as kernels
from flashbench.kernels._call import (
    INTERPRETED,
    Launch,
    card,
    check_devices,
    check_scale,
    computable,
    like,
    on,
)

FP8 = torch.float8_e4m3fn


@dataclass(frozen=True, kw_only=True, eq=False)
class Cache:
    """Keys and values of a batch of sequences, contiguous or in pages; any strides with a unit last one.

    Contiguous: k (batch, num_kv_heads, capacity, head_dim), v (…, head_dim_v). In pages, with block_table:
    k (num_pages, page_size, num_kv_heads, head_dim), v likewise; block_table int32 (batch, max_pages):
    key j of sequence b is row j % page_size of page block_table[b, j // page_size]. Entries past the end
    of a sequence may be anything.

    seqused_k: int32 (batch,), keys of each sequence, at most the capacity; None: all of it. max_seqlen_k:
    the longest of them, which the split count is chosen for; None: the capacity. A longer one is still
    computed right.
    dtype: q's, or fp8 e4m3 with k_descale and v_descale, fp32 () for all or (num_kv_heads,), which its
    numbers are multiplied by (None: 1).
    """

    k: Tensor
    v: Tensor
    seqused_k: Tensor | None = None
    block_table: Tensor | None = None
    k_descale: Tensor | None = None
    v_descale: Tensor | None = None
    max_seqlen_k: int | None = None

    @property
    def page_size(self) -> int:
        """Keys of a page, 0 where the cache is contiguous."""
        return 0 if self.block_table is None else int(self.k.shape[1])

    @property
    def batch(self) -> int:
        """Sequences."""
        return int((self.k if self.block_table is None else self.block_table).shape[0])

    @property
    def num_kv_heads(self) -> int:
        """K/V heads."""
        return int(self.k.shape[1 if self.block_table is None else 2])

    @property
    def capacity(self) -> int:
        """Keys that a sequence can have."""
        if self.block_table is None:
            return int(self.k.shape[2])
        return int(self.block_table.shape[1]) * self.page_size

    @property
    def strides(self) -> tuple[int, ...]:
        """(batch or page, head, row) of k and of v, and of a sequence's row of the block table."""
        order = (0, 1, 2) if self.block_table is None else (0, 2, 1)
        table = 0 if self.block_table is None else self.block_table.stride(0)
        return *(x.stride(dim) for x in (self.k, self.v) for dim in order), table

    def lengths(self) -> Tensor:
        """seqused_k, or the capacity for each sequence."""
        if self.seqused_k is not None:
            return self.seqused_k
        return torch.full((self.batch,), self.capacity, dtype=torch.int32, device=self.k.device)


@dataclass(frozen=True, kw_only=True)
class Call:
    """How a decode is launched. card: (compute capability, shared memory per block, slots) to compile for;
    amd: for one of AMD's, whose capability is not to be read as NVIDIA's.

    None for any of these takes what q's device and the table say: config, split_keys (keys per split, a
    multiple of block_k); num_splits: so many equal splits, 0 by heuristic.
    """

    causal: bool
    scale: float
    tf32: bool = False
    num_splits: int = 0
    split_keys: int | None = None
    config: DecodeConfig | None = None
    card: tuple[tuple[int, int] | None, int | None, int] | None = None
    amd: bool = torch.version.hip is not None


def flash_decode(
    q: Tensor,
    cache: Cache,
    *,
    causal: bool = True,
    softmax_scale: float | None = None,
    num_splits: int = 0,
    return_lse: bool = False,
    tf32: bool = False,
    config: DecodeConfig | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Attention of few queries over a cache, its keys split over thread blocks; not differentiable.

    q: (batch, num_heads, seqlen_q, head_dim), fp16, bf16 or fp32, any strides with a unit last one; the
    cache on the same device. Query head h uses K/V head h // (num_heads // num_kv_heads). causal: the last
    query of a sequence sees all its seqused_k keys, each one before it one less. softmax_scale defaults to
    head_dim**-0.5. num_splits: 0 chooses by the card. fp32 products are IEEE, or TF32 with ``tf32``.

    Returns o (batch, num_heads, seqlen_q, head_dim_v), laid out as q, in q's dtype; with return_lse also
    lse (batch, num_heads, seqlen_q): natural log of the sum of exponentials, fp32. Rows without keys:
    o = 0, lse = -inf. Raises ValueError for what does not fit together.
    """
    scale = checked_scale(q, cache, softmax_scale, num_splits)
    call = Call(causal=causal, scale=scale, tf32=tf32, num_splits=num_splits, config=config)
    return run(q, cache, call, return_lse=return_lse)


def checked_scale(q: Tensor, cache: Cache, softmax_scale: float | None, num_splits: int) -> float:
    """The scale of a call of ``flash_decode``. Raises ValueError where that would."""
    _check(q, cache)
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else float(softmax_scale)
    check_scale(scale)
    if not 0 <= num_splits <= configs.MAX_SPLITS:
        raise ValueError(f"num_splits {num_splits} is out of range; it must be 0 to {configs.MAX_SPLITS}")
    return scale


def run(q: Tensor, cache: Cache, call: Call, *, return_lse: bool = False) -> Tensor | tuple[Tensor, Tensor]:
    """As flash_decode, with everything decided or left open in call."""
    o, lse, launched = launches(q, cache, call)
    with on(q.device):
        for launch in launched:
            launch.run()
    o = o.to(q.dtype)
    return (o, lse) if return_lse else o


def launches(q: Tensor, cache: Cache, call: Call) -> tuple[Tensor, Tensor, tuple[Launch, ...]]:
    """(o, lse, the launches that fill them): one, or with several splits two."""
    batch, heads, seqlen_q, dim = q.shape
    dim_v, group = cache.v.shape[-1], heads // cache.num_kv_heads
    config, split_keys, num_splits = plan(q, cache, call)
    block_m = configs.block_q(max(1, group * seqlen_q), _math(q, cache, call.tf32))
    q, k, v = (computable(x) for x in (q, cache.k, cache.v))
    lengths = cache.lengths()
    num_tiles = cdiv(group * seqlen_q, block_m)
    o = like(q, dim_v)
    lse = q.new_empty(batch, heads, seqlen_q, dtype=torch.float32)
    o_part = lse_part = None
    if num_splits > 1:
        o_part = q.new_empty(num_splits, batch, heads, seqlen_q, dim_v, dtype=torch.float32)
        lse_part = q.new_empty(num_splits, batch, heads, seqlen_q, dtype=torch.float32)
    pdl = num_splits > 1 and not call.amd and _has_pdl((call.card or card(q.device))[0])
    is_fp8, math = cache.k.dtype == FP8, _math(q, cache, call.tf32)
    exact = math != "half"
    all_rows = batch * heads * seqlen_q
    descales, descale_h = _descales(cache)
    strides = _holding(cache, k, v).strides
    args = (
        *(q, k, v, o, lse, o_part, lse_part, cache.block_table, lengths), *descales,
        *q.stride()[:3], *o.stride()[:3], *strides, descale_h,
        *(cache.num_kv_heads, seqlen_q, num_tiles, num_splits, split_keys, all_rows),
        cache.capacity, call.scale,
    )  # fmt: skip
    options = {
        "GROUP": group, "BLOCK_M": block_m, "BLOCK_N": config.block_k, "DIM": dim, "DIM_V": dim_v,
        "WIDEST": widest(math), "PAGE_SIZE": cache.page_size, "CAUSAL": call.causal, "FP8": is_fp8,
        "AHEAD": config.ahead, "PDL": pdl,
        "PRECISION": "tf32" if math == "tf32" and not INTERPRETED else "ieee",  # no CPU has TF32
        "WIDE": config.block_k * max(strides[2], strides[5]) >= 2**31, "EXACT": exact,
        "num_warps": config.num_warps, "num_stages": config.num_stages,
        "enable_fp_fusion": True,
    }  # fmt: skip
    programs = num_tiles * num_splits * batch * cache.num_kv_heads
    first = Launch("decode", kernels.decode, programs, args, options)
    if num_splits == 1:
        return o, lse, (first,)
    splits, cols = configs.merge_tile(num_splits, dim_v)
    second = Launch(
        "merge", kernels.merge, all_rows * cdiv(dim_v, cols),
        (o_part, lse_part, o, lse, lengths, *o.stride()[:3],
         heads, seqlen_q, num_splits, split_keys, all_rows, cache.capacity),
        {"SPLITS": splits, "COLS": cols, "DIM_V": dim_v, "CAUSAL": call.causal, "EXACT": exact,
         "PDL": pdl, "num_warps": 1, "num_stages": 1, **({"launch_pdl": True} if pdl else {})},
    )  # fmt: skip
    return o, lse, (first, second)


def append(cache: Cache, k: Tensor, v: Tensor) -> None:
    """Write new keys and values behind those that the cache has, in place; quantised where it is fp8.

    k (batch, num_kv_heads, new, head_dim), v (…, head_dim_v), of one dtype, the cache's unless that is fp8;
    row t of sequence b becomes key seqused_k[b] + t. Rows past the capacity are dropped. The caller counts:
    seqused_k stays as it is. Raises ValueError for what does not fit together.
    """
    _check_new(cache, k, v)
    with on(k.device):
        for launch in append_launches(cache, k, v):
            launch.run()


def append_launches(cache: Cache, k: Tensor, v: Tensor) -> tuple[Launch, ...]:
    """The launches of ``append``."""
    is_fp8 = cache.k.dtype == FP8
    if is_fp8 and INTERPRETED:
        k, v = k.float(), v.float()
    num_tiles = cdiv(k.shape[2], configs.APPEND_ROWS)
    descales, descale_h = _descales(cache)
    args = (
        *(k, v, cache.k, cache.v, cache.block_table, cache.seqused_k), *descales,
        *k.stride()[:3], *v.stride()[:3], *cache.strides, descale_h,
        *(cache.num_kv_heads, k.shape[2], num_tiles, cache.capacity),
    )  # fmt: skip
    options = {
        "BLOCK_M": configs.APPEND_ROWS, "DIM": k.shape[-1], "DIM_V": v.shape[-1], "WIDEST": MAX_HEAD_DIM,
        "PAGE_SIZE": cache.page_size, "FP8": is_fp8, "BY_HAND": INTERPRETED, "num_warps": 4, "num_stages": 1,
    }  # fmt: skip
    programs = num_tiles * cache.batch * cache.num_kv_heads
    return (Launch("append", kernels.append, programs, args, options),)


def plan(q: Tensor, cache: Cache, call: Call) -> tuple[DecodeConfig, int, int]:
    """(configuration, keys per split, splits)."""
    capability, limit, slots = call.card or (*card(q.device), _sms(q.device))
    shape = Shape(
        _math(q, cache, call.tf32), q.shape[-1], cache.v.shape[-1], cache.k.element_size(), cache.page_size
    )
    config = call.config or configs.choose(shape, capability, limit)
    keys = cache.capacity if cache.max_seqlen_k is None else cache.max_seqlen_k
    rows = q.shape[1] // cache.num_kv_heads * q.shape[2]
    tiles = cdiv(rows, configs.block_q(max(1, rows), shape.math)) * cache.batch * cache.num_kv_heads
    split_keys = call.split_keys or configs.keys_per_split(
        keys, tiles, config.block_k, configs.slots(config, slots), call.num_splits
    )
    return config, split_keys, max(1, cdiv(keys, split_keys))


def _holding(cache: Cache, k: Tensor, v: Tensor) -> Cache:
    """The same cache with other tensors."""
    return Cache(k=k, v=v, block_table=cache.block_table)


def _math(q: Tensor, cache: Cache, tf32: bool) -> str:
    """How products are computed, as the table of configurations has it; an fp8 cache is widened to fp16."""
    if cache.k.dtype == FP8 or q.element_size() == 2:
        return "half"
    return "tf32" if tf32 else "ieee"


def _descales(cache: Cache) -> tuple[tuple[Tensor | None, Tensor | None], int]:
    """Both scales, and the stride from one K/V head to the next."""
    both = cache.k_descale, cache.v_descale
    return both, int(any(x is not None and x.numel() > 1 for x in both))


def _has_pdl(capability: tuple[int, int] | None) -> bool:
    """Whether NVIDIA's can launch a kernel before the one that it waits for has ended; None: interpreter."""
    return capability is not None and capability >= (9, 0)


def _sms(device: torch.device) -> int:
    """SMs of the card; 0 is the interpreter."""
    return 0 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def _check(q: Tensor, cache: Cache) -> None:
    _check_cache(cache)
    check_devices(q=q, k=cache.k)
    shapes = f"q {tuple(q.shape)}, k {tuple(cache.k.shape)}, v {tuple(cache.v.shape)}"
    if q.ndim != 4 or q.shape[0] != cache.batch or q.shape[3] != cache.k.shape[3]:
        raise ValueError(
            f"q is (batch, num_heads, seqlen_q, head_dim), batch and head_dim as cached: {shapes}"
        )
    if q.shape[1] % cache.num_kv_heads:
        raise ValueError(f"num_heads {q.shape[1]} is not divisible by num_kv_heads {cache.num_kv_heads}")
    if q.dtype not in (torch.float16, torch.bfloat16, torch.float32) or cache.k.dtype not in (q.dtype, FP8):
        raise ValueError(
            f"q must be fp16, bf16 or fp32 and the cache of its dtype or e4m3: {q.dtype}, {cache.k.dtype}"
        )
    if q.stride(3) != 1 < q.shape[3]:
        raise ValueError(f"the last stride of q must be 1, got {q.stride()}")


def _check_cache(cache: Cache) -> None:
    k, v, table = cache.k, cache.v, cache.block_table
    shapes = f"k {tuple(k.shape)}, v {tuple(v.shape)}"
    if not k.ndim == v.ndim == 4 or k.shape[:3] != v.shape[:3] or 0 in (k.shape[1], cache.num_kv_heads):
        raise ValueError(f"k and v of a cache have 4 dimensions and differ in the last one at most: {shapes}")
    if not 1 <= min(k.shape[3], v.shape[3]) <= max(k.shape[3], v.shape[3]) <= MAX_HEAD_DIM:
        raise ValueError(f"head dims must be 1 to {MAX_HEAD_DIM}: {shapes}")
    if k.dtype != v.dtype:
        raise ValueError(f"k and v must be of one dtype: {k.dtype}, {v.dtype}")
    check_devices(
        k=k, v=v, seqused_k=cache.seqused_k, block_table=table, k_descale=cache.k_descale,
        v_descale=cache.v_descale,
    )  # fmt: skip
    if any(x.stride(3) != 1 < x.shape[3] for x in (k, v)):
        raise ValueError(f"the last stride of k and v must be 1, got {k.stride()} and {v.stride()}")
    if k.dtype == FP8 and k.is_cuda and (card(k.device)[0] or FP8_CAPABILITY) < FP8_CAPABILITY:
        raise ValueError("an fp8 cache needs sm89 or newer")
    integers = (("block_table", table, 2), ("seqused_k", cache.seqused_k, 1))
    for name, x, dims in integers:
        if x is not None and (
            x.dtype != torch.int32 or x.ndim != dims or x.shape[0] != cache.batch or not x.is_contiguous()
        ):
            raise ValueError(
                f"{name} must be contiguous int32 with a row for each of {cache.batch} sequences;"
                f" got {x.dtype} {tuple(x.shape)}"
            )
    scales = [x for x in (cache.k_descale, cache.v_descale) if x is not None]
    if any(x.dtype != torch.float32 or x.numel() not in (1, cache.num_kv_heads) for x in scales):
        raise ValueError(f"descales must be fp32, one or one for each of {cache.num_kv_heads} K/V heads")
    if len({x.numel() for x in scales}) > 1 or any(not x.is_contiguous() for x in scales):
        raise ValueError("k_descale and v_descale must be contiguous and of one shape")


def _check_new(cache: Cache, k: Tensor, v: Tensor) -> None:
    _check_cache(cache)
    if cache.seqused_k is None:
        raise ValueError("a cache without seqused_k is full; append needs the length of each sequence")
    rows = k.shape[2] if k.ndim == 4 else 0
    wanted = tuple((cache.batch, cache.num_kv_heads, rows, x.shape[3]) for x in (cache.k, cache.v))
    if (tuple(k.shape), tuple(v.shape)) != wanted:
        raise ValueError(
            f"new k and v must be {wanted[0]} and {wanted[1]}, got {tuple(k.shape)}, {tuple(v.shape)}"
        )
    check_devices(cache=cache.k, k=k, v=v)
    if k.dtype != v.dtype or cache.k.dtype not in (k.dtype, FP8):
        raise ValueError(f"new k and v must be of the cache's dtype {cache.k.dtype}: {k.dtype}, {v.dtype}")
    if any(x.stride(3) != 1 < x.shape[3] for x in (k, v)):
        raise ValueError(f"the last stride of k and v must be 1, got {k.stride()} and {v.stride()}")
