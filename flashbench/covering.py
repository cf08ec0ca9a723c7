"""A covering array of what attention may be asked: each feature alone, and each pair, at several points.

A problem shows some factors: a mask, an option of scores, a dtype, an awkward shape. The array is made
greedily from a fixed seed, so that one command checks the same problems everywhere. A point is a head dim,
a dtype and a shape; a pair counts once per point. ``ATTENTION`` is what problems may show; a decode over a
cache is a subject of its own, in ``decode_cases``.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from random import Random
from typing import Any, Generic, TypeVar

from flashbench.block_masks import SIZE
from flashbench.errors import SpecError
from flashbench.named_masks import NAMES
from flashbench.problem import DTYPES, FP8_SCALES, UNLIMITED, Problem

WIDTH = 5
"""Factors that are turned on together, beside the dtype: more hide which one fails."""

SEED = 5
DRAWS = 40
"""How often a set of factors is drawn before it counts as never taken: a limit may lie on a size alone."""

FEW_ROWS = 16
"""Below it the largest error of a row or two is no yardstick for the rounding of fp32, or of dsinks."""

Fields = dict[str, Any]
P = TypeVar("P")
"""What is checked: a Problem, or another frozen dataclass."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Sizes to draw from. lengths: of queries and keys; groups: query heads per K/V head of GQA."""

    lengths: tuple[int, ...]
    even_dims: tuple[int, ...]
    odd_dims: tuple[int, ...]
    groups: tuple[int, ...]
    points: int


SCALES: Mapping[str, Scale] = {
    "cuda": Scale(
        lengths=(1, 3, 63, 64, 65, 113, 127, 128, 129, 255, 511, 1023, 2048),
        even_dims=(16, 32, 64, 128, 256),
        odd_dims=(1, 24, 40, 72, 80, 96, 100, 112, 160, 192, 224),
        groups=(2, 3, 8),
        points=3,
    ),
    "cpu": Scale(lengths=(1, 17, 33, 65), even_dims=(16, 32), odd_dims=(1, 24, 40), groups=(2, 3), points=1),
}
"""By kind of device: a GPU, or Triton's interpreter."""


@dataclass(frozen=True, kw_only=True)
class Factor(Generic[P]):
    """Something that a problem may show. draw(generator, scale, fields so far) -> the fields that show it."""

    name: str
    shows: Callable[[P], bool]
    draw: Callable[[Random, Scale, Fields], Fields]


@dataclass(frozen=True, kw_only=True)
class Subject(Generic[P]):
    """What an array is made of.

    factors: by name, in the order that they are drawn in. groups: names of which everything shows exactly
    one, such as a dtype. start(generator, scale, names) -> the scale to draw from and the first fields.
    make(fields) -> one of them, or SpecError. point: what makes a second place to look at.
    """

    factors: Mapping[str, Factor[P]]
    groups: tuple[tuple[str, ...], ...]
    start: Callable[[Random, Scale, Collection[str]], tuple[Scale, Fields]]
    make: Callable[[Fields], P]
    point: Callable[[P], tuple[Any, ...]]

    def shown(self, one: P) -> frozenset[str]:
        """The factors that it shows."""
        return frozenset(row.name for row in self.factors.values() if row.shows(one))


def one_of(field: str, *values: Any) -> Callable[[Random, Scale, Fields], Fields]:
    """A draw of one of the values."""
    return lambda generator, scale, fields: {field: generator.choice(values)}


def _dtype(name: str) -> Factor[Problem]:
    return Factor(name=name, shows=lambda p: p.dtype == name, draw=one_of("dtype", name))


def odd_dims(generator: Random, scale: Scale, fields: Fields) -> Fields:
    """A head dim that is no power of two, or tiny."""
    dim = generator.choice(scale.odd_dims)
    return {"head_dim": dim, "head_dim_v": dim}


def other_width(generator: Random, scale: Scale, fields: Fields) -> Fields:
    """Values of another width than keys."""
    dims = (*scale.even_dims, *scale.odd_dims)
    return {"head_dim_v": generator.choice([dim for dim in dims if dim != fields["head_dim"]])}


def _other_keys(generator: Random, scale: Scale, fields: Fields) -> Fields:
    return {"seqlen_k": generator.choice([n for n in scale.lengths if n != fields["seqlen_q"]])}


def _gqa(generator: Random, scale: Scale, fields: Fields) -> Fields:
    """One or two K/V heads, each of several query heads."""
    heads = generator.choice((1, 2))
    return {"num_kv_heads": heads, "num_heads": heads * generator.choice(scale.groups)}


def _packed(generator: Random, scale: Scale, fields: Fields) -> Fields:
    """Sequences of other lengths beside the one there is, an empty one, and where keys differ no keys."""
    same = fields["seqlen_q"] == fields["seqlen_k"]
    more = [[generator.choice(scale.lengths[:-1]) for _ in range(1 if same else 2)] for _ in range(2)]
    lengths = [
        (fields["seqlen_q"], fields["seqlen_k"]),
        (0, 0 if same else 5),
        *((x[0], x[-1]) for x in more),
    ]
    lengths += [] if same else [(3, 0)]
    generator.shuffle(lengths)
    longest = (max(side) for side in zip(*lengths, strict=True))
    return {
        "lengths": tuple(lengths),
        "batch": len(lengths),
        "seqlen_q": next(longest),
        "seqlen_k": next(longest),
    }


def _masked(generator: Random, scale: Scale, fields: Fields) -> Fields:
    """A named mask; inside a single block only some hide anything."""
    longest = max(fields["seqlen_q"], fields["seqlen_k"])
    names = (*NAMES, "random:0.5") if longest > SIZE else ("causal", "document")
    return {"block_mask": generator.choice(names)}


_ROWS: tuple[Factor[Problem], ...] = (
    # shapes first: what follows may depend on them
    Factor(
        name="odd head dim",
        shows=lambda p: p.head_dim & (p.head_dim - 1) != 0 or p.head_dim < 8,
        draw=odd_dims,
    ),
    Factor(name="head_dim_v", shows=lambda p: p.head_dim_v != p.head_dim, draw=other_width),
    Factor(
        name="seqlen_k",
        shows=lambda p: any(q != k for q, k in p.lengths or ((p.seqlen_q, p.seqlen_k),)),
        draw=_other_keys,
    ),
    Factor(name="gqa", shows=lambda p: p.group > 1, draw=_gqa),
    Factor(name="varlen", shows=lambda p: bool(p.lengths), draw=_packed),
    Factor(name="bshd", shows=lambda p: p.layout == "bshd", draw=one_of("layout", "bshd")),
    Factor(
        name="causal",
        shows=lambda p: p.causal and p.alignment == "bottom-right",
        draw=lambda *_: {"causal": True, "alignment": "bottom-right"},
    ),
    Factor(
        name="top-left",
        shows=lambda p: p.causal and p.alignment == "top-left",
        draw=lambda *_: {"causal": True, "alignment": "top-left"},
    ),
    Factor(
        name="window",
        shows=lambda p: p.window != (UNLIMITED, UNLIMITED),
        draw=one_of("window", (20, 9), (33, UNLIMITED), (UNLIMITED, 5), (7, 50), (0, 0)),
    ),
    Factor(
        name="block-mask",
        shows=lambda p: bool(p.block_mask),
        draw=_masked,
    ),
    Factor(name="softcap", shows=lambda p: p.softcap > 0, draw=one_of("softcap", 0.7, 5.0, 30.0)),
    Factor(name="alibi", shows=lambda p: p.alibi, draw=one_of("alibi", True)),
    Factor(
        name="bias",
        shows=lambda p: bool(p.bias),
        draw=one_of("bias", "bhqk", "1hqk", "b1qk", "11qk", "bh1k", "111k", "bhq1", "1111"),
    ),
    Factor(name="sinks", shows=lambda p: p.sinks, draw=one_of("sinks", True)),
    Factor(name="dropout", shows=lambda p: p.dropout_p > 0, draw=one_of("dropout_p", 0.1, 0.5)),
    Factor(name="deterministic", shows=lambda p: p.deterministic, draw=one_of("deterministic", True)),
    Factor(name="fp8-scale", shows=lambda p: bool(p.fp8_scale), draw=one_of("fp8_scale", *FP8_SCALES)),
    Factor(name="hadamard", shows=lambda p: p.hadamard, draw=one_of("hadamard", True)),
    *map(_dtype, DTYPES),
)

FACTORS = {row.name: row for row in _ROWS}
"""Every factor by name, in the order that they are drawn in."""


@dataclass(frozen=True, kw_only=True)
class Array(Generic[P]):
    """The problems; features and pairs that each stand at ``points`` points or more."""

    problems: tuple[P, ...]
    covered: frozenset[frozenset[str]]
    points: int

    @property
    def words(self) -> str:
        """What it covers, for a note."""
        pairs = sum(len(one) == 2 for one in self.covered)
        return (
            f"{len(self.covered) - pairs} features and {pairs} pairs of them in"
            f" {len(self.problems)} problems, each at {self.points} or more points"
        )


def shown(problem: Problem) -> frozenset[str]:
    """The factors that a problem shows."""
    return ATTENTION.shown(problem)


def point(problem: Problem) -> tuple[Any, ...]:
    """What makes a second place to look at: head dims, dtype, lengths, heads and batch."""
    p = problem
    shape = p.batch, p.num_heads, p.num_kv_heads, p.seqlen_q, p.seqlen_k, p.lengths
    return p.head_dim, p.head_dim_v, p.dtype, *shape


def _start(generator: Random, scale: Scale, names: Collection[str]) -> tuple[Scale, Fields]:
    heads, dim = generator.choice((1, 2, 3)), generator.choice(scale.even_dims)
    few = {"fp32", "tf32", "sinks"}.isdisjoint(names)
    sizes = replace(scale, lengths=tuple(n for n in scale.lengths if few or n >= FEW_ROWS))
    length = generator.choice(sizes.lengths)
    return sizes, {
        "batch": generator.choice((1, 2)), "num_heads": heads, "num_kv_heads": heads,
        "seqlen_q": length, "seqlen_k": length, "head_dim": dim, "head_dim_v": dim, "causal": False,
    }  # fmt: skip


ATTENTION: Subject[Problem] = Subject(
    factors=FACTORS,
    groups=(tuple(DTYPES),),
    start=_start,
    make=lambda fields: Problem(**fields),
    point=point,
)


def sets(names: Iterable[str]) -> Iterator[frozenset[str]]:
    """Each of the names and each pair of them."""
    names = sorted(names)
    for size in (1, 2):
        yield from map(frozenset, itertools.combinations(names, size))


def array(
    takes: Callable[[Problem], bool], scale: Scale, dtypes: Collection[str] = tuple(DTYPES), seed: int = SEED
) -> Array[Problem]:
    """Problems that together show each factor alone and each pair at scale.points points or more.

    takes: whether a problem can be checked; what it never takes (a pair that excludes each other) is not in
    the array. The same arguments give the same problems.
    """
    return array_of(ATTENTION, takes, scale, without=set(DTYPES) - set(dtypes), seed=seed)


def array_of(
    subject: Subject[P], takes: Callable[[P], bool], scale: Scale, *, without: Collection[str] = (),
    seed: int = SEED,
) -> Array[P]:  # fmt: skip
    """As ``array``, of any subject, without some of its factors."""
    return _Search(subject, takes, scale, without, seed).run()


class _Search(Generic[P]):
    def __init__(
        self, subject: Subject[P], takes: Callable[[P], bool], scale: Scale, without: Collection[str],
        seed: int,
    ) -> None:  # fmt: skip
        self.subject = subject
        self.takes = takes
        self.scale = scale
        self.names = [name for name in subject.factors if name not in without]
        self.groups = [[name for name in group if name not in without] for group in subject.groups]
        self.grouped = frozenset(itertools.chain(*subject.groups))
        self.generator = Random(seed)
        self.problems: dict[P, None] = {}
        self.seen: dict[frozenset[str], set[tuple[Any, ...]]] = {}

    def run(self) -> Array[P]:
        possible = [one for one in sets(self.names) if self._taken(one)]
        self.seen = {one: set() for one in possible}
        for one in possible:
            if len(one) == 1:
                for _ in range(self.scale.points):
                    self._keep(self._drawn(one))
        for one in possible:
            tries = 0
            while len(self.seen[one]) < self.scale.points and tries < 50:
                tries += 1
                self._keep(self._wide(one))
        points = self.scale.points
        covered = frozenset(one for one, found in self.seen.items() if len(found) >= points)
        return Array(problems=tuple(self.problems), covered=covered, points=points)

    def _taken(self, names: frozenset[str]) -> bool:
        """Whether any draw of the factors is taken."""
        return any(self._drawn(names) is not None for _ in range(DRAWS))

    def _wide(self, pair: frozenset[str]) -> P | None:
        """A problem that shows the pair, and others with which it shows pairs that are still wanted."""
        wanted = {one for one, found in self.seen.items() if len(found) < self.scale.points}
        names = set(pair)
        while len(names - self.grouped) < WIDTH:
            gains = {
                name: sum(frozenset((name, other)) in wanted for other in names)
                for name in self.subject.factors
                if name not in names and all(frozenset((name, other)) in self.seen for other in names)
            }
            best = max(gains.values(), default=0)
            if not best:
                break
            names.add(self.generator.choice([name for name, gain in gains.items() if gain == best]))
        return self._drawn(names) or self._drawn(pair)

    def _keep(self, problem: P | None) -> None:
        if problem is None or problem in self.problems:
            return
        self.problems[problem] = None
        for one in sets(self.subject.shown(problem)):
            if one in self.seen:
                self.seen[one].add(self.subject.point(problem))

    def _drawn(self, names: Collection[str]) -> P | None:
        """A problem that shows the names and, but for those of groups, no more; None where none is taken."""
        for chosen in self._choices(names):
            wanted = {*names, *chosen}
            try:
                problem = self.subject.make(self._fields(wanted))
            except SpecError:
                continue
            if self.subject.shown(problem) == wanted and self.takes(problem):
                return problem
        return None

    def _choices(self, names: Collection[str]) -> Iterator[tuple[str, ...]]:
        """One name of each group: that of the names, or each in turn."""
        each = [
            [name for name in names if name in group] or self.generator.sample(group, len(group))
            for group in self.groups
        ]
        return itertools.product(*each)

    def _fields(self, names: Collection[str]) -> Fields:
        sizes, fields = self.subject.start(self.generator, self.scale, names)
        for name, row in self.subject.factors.items():
            if name in names:
                fields |= row.draw(self.generator, sizes, fields)
        return fields
