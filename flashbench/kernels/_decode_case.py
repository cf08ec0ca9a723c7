"""A case of ``decode_cases`` on a device: its tensors, its run, and how far it is from fp64. Never timed.

Everything that no one may read is NaN: rows past a sequence's end, the room between rows, pages that no
sequence uses; table entries past the end name no page; o, lse and workspaces hold NaN until they are written.
The oracle is ``_reference`` over the sequences as a packed batch, of what the cache holds after the append.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flashbench.decode_cases import Case
from flashbench.kernels import _flash_decode as decode
from flashbench.kernels._decode_reference import paged
from flashbench.kernels._flash_decode import FP8, Cache, Call
from flashbench.kernels._inputs import Inputs
from flashbench.kernels._precision import torch_dtype
from flashbench.kernels._reference import Reference

ROOM = 5
"""Rows of a contiguous cache beyond its longest sequence, columns between strided rows, unused pages."""

SCALES = (0.25, 3.0, 0.5, 1.75, 7.0)
"""Of fp8 caches, head by head: times e4m3 exact in fp16, and but for the powers of two no exact divisors."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Made:
    """q, the cache before the append, what is appended (rows of K and of V, or nothing), the same cache as it
    must be after it, and q, K and V of a packed batch as the oracle takes them.
    """

    case: Case
    q: Tensor
    cache: Cache
    new: tuple[Tensor, Tensor] | None
    after: Cache
    packed: Inputs


def make(case: Case, device: str, seed: int) -> Made:
    """Standard normal numbers, the same for one seed and device."""
    generator = torch.Generator(device=device).manual_seed(seed % 2**63)
    batch, longest, dtype = len(case.lengths), max(case.lengths), torch_dtype(case.dtype)

    def normal(heads: int, rows: int, dim: int) -> Tensor:
        return torch.randn(batch, heads, rows, dim, generator=generator, device=device, dtype=dtype)

    q = normal(case.num_heads, case.queries, case.head_dim)
    rows = [normal(case.num_kv_heads, longest, dim) for dim in (case.head_dim, case.head_dim_v)]
    scales = _scales(case, device)
    stored = [_stored(x, scale) for x, scale in zip(rows, scales, strict=True)]
    used = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    before, after = (
        _cache(case, [_filled(x, [n - new for n in case.lengths], longest + ROOM) for x in stored], seed)
        for new in (case.new, 0)
    )
    new = None
    if case.new:
        k, v = (torch.stack([x[b, :, n - case.new : n] for b, n in enumerate(case.lengths)]) for x in rows)
        new = k, v
    k_descale, v_descale = scales
    whole = {"k_descale": k_descale, "v_descale": v_descale, "max_seqlen_k": case.announced or longest}
    return Made(
        case=case,
        q=_strided(q, case),
        cache=replace(before, seqused_k=used - case.new, **whole),
        new=new,
        after=replace(after, seqused_k=used, **whole),
        packed=_packed(case, q, [_exact(x, scale) for x, scale in zip(stored, scales, strict=True)]),
    )


def call_of(case: Case, config: Any = None) -> Call:
    """How the case is launched."""
    scale = case.problem.softmax_scale * case.times_scale
    return Call(
        causal=case.causal, scale=scale, tf32=case.dtype == "tf32", num_splits=case.splits, config=config
    )  # fmt: skip


def run(made: Made, how: Call) -> tuple[Tensor, Tensor]:
    """Append what is new, then decode: (o, lse)."""
    if made.new is not None:
        decode.append(made.cache, *made.new)
    cache = replace(made.cache, seqused_k=made.after.seqused_k)
    with _poisoned():
        o, lse = decode.run(made.q, cache, how, return_lse=True)
    return o, lse


def compare(made: Made, o: Tensor, lse: Tensor, seed: int) -> tuple[dict[str, float], dict[str, float]]:
    """(errors, budgets) of o and lse, and of the cache how many of its numbers are others than they must be,
    of which none is allowed.
    """
    accuracy = Reference(made.case.problem, made.packed, seed=seed).compare(_rows(o), lse=_rows(lse))
    wrong = sum(_others(getattr(made.cache, name), getattr(made.after, name)) for name in ("k", "v"))
    return {**accuracy.max_abs_error, "cache": float(wrong)}, {**accuracy.budget, "cache": 0.0}


@contextmanager
def _poisoned() -> Iterator[None]:
    """Inside, torch fills memory that nobody has written with NaN."""
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
        torch.utils.deterministic.fill_uninitialized_memory = filling


def _scales(case: Case, device: str) -> tuple[Tensor | None, Tensor | None]:
    """k_descale and v_descale of an fp8 cache."""
    if not case.fp8:
        return None, None
    count = case.num_kv_heads if case.fp8 == "head" else 1
    values = [SCALES[i % len(SCALES)] for i in range(count + 1)]
    k, v = (torch.tensor(x, device=device) for x in (values[1:], values[:-1]))
    return k, v


def _stored(x: Tensor, scale: Tensor | None) -> Tensor:
    """As the cache holds it: as it is, or over its scale in e4m3, the nearest that there is."""
    if scale is None:
        return x
    limit = torch.finfo(FP8).max
    return (x.float() / scale[:, None, None]).clamp(-limit, limit).to(FP8)


def _exact(x: Tensor, scale: Tensor | None) -> Tensor:
    return x if scale is None else x.float() * scale[:, None, None]


def _filled(x: Tensor, lengths: list[int], capacity: int) -> Tensor:
    """(batch, heads, capacity, dim): the rows of each sequence, NaN past its length."""
    whole = torch.full((*x.shape[:2], capacity, x.shape[3]), float("nan"), device=x.device).to(x.dtype)
    for b, n in enumerate(lengths):
        whole[b, :, :n] = x[b, :, :n]
    return whole


def _cache(case: Case, rows: list[Tensor], seed: int) -> Cache:
    """Contiguous, or in shuffled pages, in memory as the case asks."""
    k, v, table = *rows, None
    if case.page_size:
        (k, v), table = paged(rows, case.lengths, case.page_size, spare=ROOM, seed=seed)
    return Cache(k=_strided(k, case), v=_strided(v, case), block_table=table)


def _strided(x: Tensor, case: Case) -> Tensor:
    """The same numbers, with the second and third dimension swapped in memory and NaN behind each row."""
    if not case.strided:
        return x
    b, h, n, d = x.shape
    wide = torch.full((b, n, h, d + ROOM), float("nan"), device=x.device).to(x.dtype)
    wide[..., :d] = x.transpose(1, 2)
    return wide[..., :d].transpose(1, 2)


def _packed(case: Case, q: Tensor, rows: list[Tensor]) -> Inputs:
    """The sequences one behind the other."""
    k, v = (torch.cat([x[b, :, :n] for b, n in enumerate(case.lengths)], dim=1)[None] for x in rows)
    q = _rows(q) * case.times_scale  # a power of two
    return Inputs(q=q, k=k, v=v, dout=q.new_zeros(*q.shape[:3], case.head_dim_v))


def _rows(x: Tensor) -> Tensor:
    """(batch, heads, queries, …) as (1, heads, batch * queries, …)."""
    return x.transpose(0, 1).flatten(1, 2)[None]


def _others(x: Tensor, wanted: Tensor) -> int:
    """How many numbers are not those that are wanted; a NaN is wanted where there is one."""
    x, wanted = x.float(), wanted.float()
    return int(((x != wanted) & ~(x.isnan() & wanted.isnan())).sum())
