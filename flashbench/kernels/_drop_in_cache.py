"""flash-attention's function of a K/V cache, as calls of flash-decode or, with options of scores, flash-v2.

Names, order and defaults of the arguments: github.com/Dao-AILab/flash-attention, release 2.8.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from flashbench.kernels import _drop_in_cached as cached
from flashbench.kernels import _drop_in_checks as checks
from flashbench.kernels._drop_in import Options
from flashbench.kernels._drop_in_rotary import check_positions, check_rotary, rotated
from flashbench.kernels._eager import refuse_forward_mode
from flashbench.kernels._layout import unit_stride


class Asked(NamedTuple):
    """The arguments after q, k_cache and v_cache, looked at one by one; band: see ``_band``."""

    k: Tensor | None
    v: Tensor | None
    rotary_cos: Tensor | None
    rotary_sin: Tensor | None
    lengths: Tensor | None
    batch_idx: Tensor | None
    leftpad: Tensor | None
    block_table: Tensor | None
    slopes: Tensor | None
    scale: float | None
    causal: bool
    left: int
    right: int
    softcap: float
    interleaved: bool
    num_splits: int

    @property
    def options(self) -> Options:
        """What scores are, and what is seen of them."""
        return Options(
            softmax_scale=self.scale, causal=self.causal, window_size=(self.left, self.right),
            softcap=self.softcap, alibi_slopes=self.slopes,
        )  # fmt: skip


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

    k_cache, v_cache: (batch or more, capacity, num_kv_heads, …), or with block_table, int32 (batch,
    max_pages), (num_pages, page_size, num_kv_heads, …). cache_seqlens: where each sequence's keys end, int32
    (batch,) or one number for all; None: the cache is full. k and v (batch, new, num_kv_heads, …): written
    behind those, in place, before q sees them; there must be room. cache_batch_idx: int32 (batch,), which
    entry of the cache is a sequence's. cache_leftpad: int32 (batch,), where its keys begin. rotary_cos,
    rotary_sin (seqlen_ro, rotary_dim / 2): k is turned by its position, q likewise with causal or a window,
    else as at cache_seqlens. causal and window_size are aligned to the last query and key of each sequence.

    Keys are split over thread blocks by flash-decode; a window, softcap or alibi_slopes, (num_heads,) or
    (batch, num_heads), are flash-v2's, which has no splits: of pages it is given a copy of the rows that the
    window shows (docs/flash-attn.md).

    Returns o (batch, seqlen_q, num_heads, head_dim_v); with return_softmax_lse also lse (batch, num_heads,
    seqlen_q), fp32, natural log, -inf for a row without keys. Raises ValueError for a misfit.
    """
    refuse_forward_mode(q, k_cache, v_cache, k, v, rotary_cos, rotary_sin, alibi_slopes)
    given = Asked(
        k, v, rotary_cos, rotary_sin, cache_seqlens, cache_batch_idx, cache_leftpad, block_table,
        alibi_slopes, softmax_scale, causal, -1, -1, softcap, rotary_interleaved, num_splits,
    )  # fmt: skip
    asked = _checked(q, k_cache, v_cache, given, window_size)
    more = checks.flag("return_softmax_lse", return_softmax_lse)
    run = torch.ops.flashbench.attention_with_kvcache if torch.compiler.is_compiling() else _attend
    o, lse = run(q, k_cache, v_cache, *asked)
    return (o, lse) if more else o


def _checked(q: Any, k_cache: Any, v_cache: Any, given: Any, window_size: Any) -> Asked:
    """The arguments as the kernels have them. Raises ValueError for what does not go together."""
    checks.check_dimensions(4, "(batch, seqlen, heads, head_dim)", q=q)
    checks.check_dimensions(
        4, "(batch, capacity, heads, head_dim), or pages", k_cache=k_cache, v_cache=v_cache
    )
    batch, rows, heads = q.shape[:3]
    num_splits = checks.whole("num_splits", given.num_splits, "a count, or 0 for the best")
    left, right = checks.sides(window_size)
    lengths = given.lengths
    if lengths is not None and not isinstance(lengths, Tensor):
        count = checks.whole("cache_seqlens", lengths, f"one number, or int32 ({batch},)")
        lengths = torch.full((batch,), count, dtype=torch.int32, device=q.device)
    causal, left, right = _band(checks.flag("causal", given.causal), left, right, rows)
    asked = given._replace(
        lengths=lengths, slopes=checks.check_slopes(given.slopes, batch, heads),
        scale=checks.scale_of(given.scale), causal=causal, left=left, right=right,
        softcap=checks.cap_of(given.softcap), num_splits=num_splits,
        interleaved=checks.flag("rotary_interleaved", given.interleaved),
    )  # fmt: skip
    cached.check_whose(batch, lengths, asked.batch_idx, asked.leftpad, asked.block_table)
    cached.check_shapes(q, k_cache, v_cache, asked)
    table, size = asked.block_table, k_cache.shape[1]
    capacity = size if table is None else table.shape[1] * size
    check_rotary(asked.rotary_cos, asked.rotary_sin, q, asked.k, capacity)
    checks.check_devices(
        "q", q=q, k_cache=k_cache, v_cache=v_cache, k=asked.k, v=asked.v, cache_seqlens=lengths,
        cache_batch_idx=asked.batch_idx, cache_leftpad=asked.leftpad, block_table=table,
        rotary_cos=asked.rotary_cos, rotary_sin=asked.rotary_sin, alibi_slopes=asked.slopes,
    )  # fmt: skip
    found: Asked = asked
    return found


def _band(causal: bool, left: int, right: int, rows: int) -> tuple[bool, int, int]:
    """(causal, left, right), causal alone where the window hides no more: all kernels have that.

    The last query, and so an only one, sees all keys up to the last.
    """
    if left == -1 and (causal or right == 0 or rows == 1):
        return causal or right == 0, -1, -1
    return causal, left, right


def _attend(q: Tensor, k_cache: Tensor, v_cache: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    """(o, lse) of arguments that were looked at one by one."""
    asked = Asked(*rest)
    kept = cached.Kept.of((k_cache, v_cache), asked, q.shape[0])
    k, v = asked.k, asked.v
    new = 0 if k is None else k.shape[1]
    kept.check_places(new, asked.lengths)
    if asked.rotary_cos is not None and k is not None:
        q, k = _turned(q, k, asked, kept.ends)
    q = unit_stride(q)
    how = cached.way(q, kept, asked)  # all that is refused is refused before the cache is written to
    if k is not None and v is not None:
        kept = kept.with_new(unit_stride(k), unit_stride(v))
    return how(q, kept, asked)


def _turned(q: Tensor, k: Tensor, asked: Asked, ends: Tensor) -> tuple[Tensor, Tensor]:
    """q and the new k by their positions; without an order among queries all of them are at the end."""
    cos, sin = asked.rotary_cos, asked.rotary_sin
    assert cos is not None
    assert sin is not None
    in_order = asked.causal or (asked.left, asked.right) != (-1, -1)
    rows, new = q.shape[1], k.shape[1]
    check_positions(cos, ends, max(rows if in_order else 1, new))
    steps = torch.arange(max(rows, new), device=q.device)
    at = ends[:, None] + steps
    of_q = at[:, :rows] if in_order else ends[:, None].expand(-1, rows)
    return (
        rotated(q, cos, sin, of_q, asked.interleaved),
        rotated(k, cos, sin, at[:, :new], asked.interleaved),
    )


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
        "(Tensor q, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor? k, Tensor? v, Tensor? rotary_cos,"
        " Tensor? rotary_sin, Tensor? cache_seqlens, Tensor? cache_batch_idx, Tensor? cache_leftpad,"
        " Tensor? block_table, Tensor? alibi_slopes, float? softmax_scale, bool causal, int left, int right,"
        " float softcap, bool rotary_interleaved, int num_splits) -> (Tensor, Tensor)"
    ),
).register_fake(_fake)
