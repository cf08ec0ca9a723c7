"""What a decode over a cache may show, and the covering array of it: see ``covering``.

A case is one call of the decode kernels: some queries over the caches of a batch, contiguous or in pages, in
the queries' dtype or in fp8, of sequences of any lengths, perhaps with new keys that are appended first.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any

from flashbench.covering import (
    FEW_ROWS,
    SEED,
    Array,
    Factor,
    Fields,
    Scale,
    Subject,
    array_of,
    odd_dims,
    one_of,
    other_width,
)
from flashbench.decode_configs import DecodeConfig, Shape, math_of
from flashbench.errors import SpecError
from flashbench.problem import DTYPES, Problem

QUERY_DTYPES = tuple(name for name, row in DTYPES.items() if row.bytes > 1)
"""Dtypes of q and o."""

FP8_CACHES = ("tensor", "head")
"""What shares a scale of an fp8 cache: all of K (of V), or a K/V head."""

AUTO = 0
"""Splits that the heuristic chooses."""

SPLITS = {f"{count} split{'s' if count > 1 else ''}": count for count in (1, 2, 7)} | {"auto splits": AUTO}
TIMES_SCALE = (0.25, 4.0)
"""Softmax scales over the default one: powers of two, by which q can be multiplied exactly."""

TILES = DecodeConfig(16, 4, 1)
"""In the interpreter: tiles of 16 keys, so that a short cache has several."""


@dataclass(frozen=True, kw_only=True)
class DecodeScale(Scale):
    """lengths: keys of a sequence. queries: where there are several. tile: the most keys of a tile. rows:
    queries of all heads and sequences at least, of fp16 and bf16, and of fp32: the largest error of a row or
    two is no yardstick.
    """

    queries: tuple[int, ...]
    tile: int
    rows: tuple[int, int]


SCALES: Mapping[str, DecodeScale] = {
    "cuda": DecodeScale(
        lengths=(1, 3, 63, 64, 65, 113, 127, 128, 129, 255, 511, 1023, 2048, 4099),
        even_dims=(16, 32, 64, 128, 256),
        odd_dims=(1, 24, 40, 72, 80, 96, 100, 112, 160, 192, 224),
        groups=(2, 3, 8),
        points=3,
        queries=(2, 3, 5, 17, 33),
        tile=128,
        rows=(6, FEW_ROWS),
    ),
    "cpu": DecodeScale(
        lengths=(1, 5, 16, 17, 33, 47), even_dims=(16, 32), odd_dims=(1, 24, 40), groups=(2, 3), points=1,
        queries=(2, 5, 17), tile=TILES.block_k, rows=(4, 8),
    ),
}  # fmt: skip
"""By kind of device: a GPU, or Triton's interpreter."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """lengths: keys of each sequence when it is decoded, the new ones among them. new: of each sequence, how
    many of them are appended first. announced: as max_seqlen_k, 0: the longest. page_size 0: contiguous.
    fp8: what shares a scale of a cache in e4m3, of FP8_CACHES, or "" of one in q's dtype. strided: q and the
    cache lie (batch, rows, heads) in memory, pages the other way round, all rows with room behind them.
    times_scale: the softmax scale over the default one. A row without keys has o = 0 and lse = -inf.

    Raises SpecError for values that exclude each other.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    head_dim_v: int
    lengths: tuple[int, ...]
    dtype: str
    queries: int = 1
    causal: bool = True
    splits: int = AUTO
    page_size: int = 0
    fp8: str = ""
    new: int = 0
    announced: int = 0
    strided: bool = False
    times_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.new > min(self.lengths):
            raise SpecError(
                f"new {self.new} is out of range; it must be at most the shortest sequence's keys"
            )

    @property
    def problem(self) -> Problem:
        """The attention as of a packed batch, in the dtype that products are in: fp16 of an fp8 cache."""
        half = DTYPES[self.dtype].bytes == 2
        return Problem(
            batch=len(self.lengths), num_heads=self.num_heads, num_kv_heads=self.num_kv_heads,
            seqlen_q=self.queries, seqlen_k=max(self.lengths), head_dim=self.head_dim,
            head_dim_v=self.head_dim_v, dtype=self.dtype if half or not self.fp8 else "fp16",
            causal=self.causal, lengths=tuple((self.queries, keys) for keys in self.lengths),
        )  # fmt: skip

    @property
    def shape(self) -> Shape:
        """What the kernel's configuration depends on."""
        math, size = math_of(self.dtype), DTYPES[self.dtype].bytes
        if self.fp8:
            math, size = "half", 1
        return Shape(math, self.head_dim, self.head_dim_v, size, self.page_size)

    @property
    def key(self) -> str:
        """Stable text that identifies the case."""
        heads = f"h{self.num_heads}" + (f"/{self.num_kv_heads}" if self.num_heads > self.num_kv_heads else "")
        dims = f"d{self.head_dim}" + (f"/{self.head_dim_v}" if self.head_dim_v != self.head_dim else "")
        words = [heads, f"q{self.queries}", "keys" + _counted(self.lengths), dims, self.dtype]
        words.append("causal" if self.causal else "full")
        words.append(f"splits{self.splits}" if self.splits else "auto")
        words += [f"page{self.page_size}"] if self.page_size else []
        words += [f"fp8={self.fp8}"] if self.fp8 else []
        words += [f"append{self.new}"] if self.new else []
        words += [f"announced{self.announced}"] if self.announced else []
        words += ["strided"] if self.strided else []
        words += [f"scale*{self.times_scale:g}"] if self.times_scale != 1 else []
        return " ".join(words)


def _counted(lengths: tuple[int, ...]) -> str:
    """``3*64+0+17``."""
    words: list[tuple[int, int]] = []
    for length in lengths:
        if words and words[-1][1] == length:
            words[-1] = words[-1][0] + 1, length
        else:
            words.append((1, length))
    return "+".join(f"{count}*{length}" if count > 1 else str(length) for count, length in words)


def _longest(generator: Random, scale: Scale, fields: Fields, lengths: Collection[int]) -> Fields:
    """All sequences of one of these lengths."""
    return {"lengths": (generator.choice(sorted(lengths)),) * len(fields["lengths"])}


def _splits(name: str) -> Factor[Case]:
    """So many splits that lengths are drawn for: each has keys, in tiles of any size up to the scale's."""

    def draw(generator: Random, scale: Scale, fields: Fields) -> Fields:
        assert isinstance(scale, DecodeScale)
        lengths: Collection[int] = scale.lengths
        if SPLITS[name] == 7:  # whole tiles of each split, and the last one cut
            lengths = [7 * scale.tile, 7 * scale.tile - 7]
        elif SPLITS[name] == 2:
            lengths = [n for n in lengths if n > scale.tile]
        return {"splits": SPLITS[name], **_longest(generator, scale, fields, lengths)}

    return Factor(name=name, shows=lambda case: case.splits == SPLITS[name], draw=draw)


def _ragged(generator: Random, scale: Scale, fields: Fields) -> Fields:
    """Other lengths beside the longest, at least two."""
    longest = fields["lengths"][0]
    shorter = [n for n in scale.lengths if n < longest] or [longest]
    more = [generator.choice(shorter) for _ in range(max(1, len(fields["lengths"]) - 1))]
    return {"lengths": _shuffled(generator, (longest, *more))}


def _empty(generator: Random, scale: Scale, fields: Fields) -> Fields:
    return {"lengths": _shuffled(generator, (*fields["lengths"], 0))}


def _shuffled(generator: Random, lengths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(generator.sample(lengths, len(lengths)))


def _few_more(generator: Random, scale: Scale, fields: Fields) -> Fields:
    """The last keys of each sequence are new; one that has fewer has nothing before."""
    new = generator.choice((1, 3, 17))
    return {"new": new, "lengths": tuple(max(n, new) for n in fields["lengths"])}


def _queries(generator: Random, scale: Scale, fields: Fields) -> Fields:
    assert isinstance(scale, DecodeScale)
    return {"queries": generator.choice(scale.queries)}


def _several(generator: Random, scale: Scale, fields: Fields) -> Fields:
    """Two K/V heads, each of several query heads."""
    return {"num_kv_heads": 2, "num_heads": 2 * generator.choice(scale.groups)}


def _one_for_all(generator: Random, scale: Scale, fields: Fields) -> Fields:
    return {"num_kv_heads": 1, "num_heads": generator.choice((*scale.groups, 5))}


def _dtype(name: str) -> Factor[Case]:
    return Factor(name=name, shows=lambda case: case.dtype == name, draw=one_of("dtype", name))


def _pages(name: str, *sizes: int) -> Factor[Case]:
    return Factor(name=name, shows=lambda case: case.page_size in sizes, draw=one_of("page_size", *sizes))


def _fp8(of: str) -> Factor[Case]:
    return Factor(
        name=f"fp8 cache, a scale per {of}", shows=lambda case: case.fp8 == of, draw=one_of("fp8", of)
    )  # fmt: skip


_ROWS: tuple[Factor[Case], ...] = (
    # lengths first: what follows may depend on them
    *map(_splits, SPLITS),
    Factor(
        name="odd head dim",
        shows=lambda case: case.head_dim & (case.head_dim - 1) != 0 or case.head_dim < 8,
        draw=odd_dims,
    ),
    Factor(name="head_dim_v", shows=lambda case: case.head_dim_v != case.head_dim, draw=other_width),
    Factor(name="gqa", shows=lambda case: case.num_heads > case.num_kv_heads > 1, draw=_several),
    Factor(name="mqa", shows=lambda case: case.num_heads > case.num_kv_heads == 1, draw=_one_for_all),
    Factor(name="queries", shows=lambda case: case.queries > 1, draw=_queries),
    Factor(name="full", shows=lambda case: not case.causal, draw=one_of("causal", False)),
    Factor(name="ragged", shows=lambda case: len({*case.lengths} - {0}) > 1, draw=_ragged),
    Factor(name="no keys", shows=lambda case: 0 in case.lengths, draw=_empty),
    Factor(name="append", shows=lambda case: case.new > 0, draw=_few_more),
    Factor(
        name="longer than announced",
        shows=lambda case: 0 < case.announced < max(case.lengths),
        draw=lambda generator, scale, fields: {"announced": -(-max(fields["lengths"]) // 2)},
    ),
    _pages("pages of 1", 1),
    _pages("pages of 16", 16),
    _pages("odd pages", 3, 5, 7, 33),
    _pages("pages of tiles", 128, 256),
    *map(_fp8, FP8_CACHES),
    Factor(name="strides", shows=lambda case: case.strided, draw=one_of("strided", True)),
    Factor(
        name="softmax scale",
        shows=lambda case: case.times_scale != 1,
        draw=one_of("times_scale", *TIMES_SCALE),
    ),
    *map(_dtype, QUERY_DTYPES),
)

FACTORS = {row.name: row for row in _ROWS}
"""Every factor by name, in the order that they are drawn in."""


def _start(generator: Random, scale: Scale, names: Collection[str]) -> tuple[Scale, Fields]:
    assert isinstance(scale, DecodeScale)
    exact = not {"fp32", "tf32"}.isdisjoint(names)
    sizes = replace(scale, lengths=tuple(n for n in scale.lengths if not exact or n >= FEW_ROWS))
    heads, dim = generator.choice((1, 2, 3)), generator.choice(scale.even_dims)
    rows = 4 if "gqa" in names else 2 if "mqa" in names else heads
    rows *= 2 if "queries" in names else 1
    batch = -(-scale.rows[exact] // rows)
    return sizes, {
        "num_heads": heads, "num_kv_heads": heads, "head_dim": dim, "head_dim_v": dim,
        "lengths": (generator.choice(sizes.lengths),) * batch,
    }  # fmt: skip


def point(case: Case) -> tuple[Any, ...]:
    """What makes a second place to look at: head dims, dtype, heads, queries and lengths."""
    c = case
    return c.head_dim, c.head_dim_v, c.dtype, c.num_heads, c.num_kv_heads, c.queries, c.lengths


DECODING: Subject[Case] = Subject(
    factors=FACTORS, groups=(QUERY_DTYPES, tuple(SPLITS)), start=_start, make=lambda fields: Case(**fields),
    point=point,
)  # fmt: skip


def array(
    takes: Callable[[Case], bool], scale: DecodeScale, dtypes: Collection[str] = QUERY_DTYPES,
    seed: int = SEED,
) -> Array[Case]:  # fmt: skip
    """As ``covering.array``, of decodes; dtypes: of the queries."""
    return array_of(DECODING, takes, scale, without=set(QUERY_DTYPES) - set(dtypes), seed=seed)
