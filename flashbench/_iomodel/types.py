"""What the model speaks in: traffic per tensor, steps, tiles, models and estimates."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench.problem import PASSES, Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

LEVELS = ("requested", "compulsory")
"""Requested: what kernels load and store, between SM and L2. Compulsory: each tensor once."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Traffic:
    """Bytes moved at one level, per tensor: plain reads, plain writes, and atomic additions.

    An atomic travels from the SM to L2 and is added there; it is in neither read nor write.
    """

    level: str
    read: Mapping[str, int]
    write: Mapping[str, int]
    atomic: Mapping[str, int] = field(default_factory=dict)

    @property
    def read_bytes(self) -> int:
        """Bytes read, all tensors."""
        return sum(self.read.values())

    @property
    def write_bytes(self) -> int:
        """Bytes written, all tensors, atomics apart."""
        return sum(self.write.values())

    @property
    def atomic_bytes(self) -> int:
        """Bytes added atomically, all tensors."""
        return sum(self.atomic.values())

    @property
    def total_bytes(self) -> int:
        """Reads, writes and atomics together."""
        return self.read_bytes + self.write_bytes + self.atomic_bytes

    def __add__(self, other: Traffic) -> Traffic:
        """Both after one another. Raises ValueError for two different levels."""
        if self.level != other.level:
            raise ValueError(f"cannot add {other.level} traffic to {self.level} traffic")
        return Traffic(
            level=self.level,
            read=merge(self.read, other.read),
            write=merge(self.write, other.write),
            atomic=merge(self.atomic, other.atomic),
        )


def merge(*parts: Mapping[str, int]) -> dict[str, int]:
    """The sum per tensor."""
    total: dict[str, int] = {}
    for part in parts:
        for name, count in part.items():
            total[name] = total.get(name, 0) + count
    return total


NO_BYTES: Mapping[str, int] = {}
"""Traffic of no tensor."""


class Spills(NamedTuple):
    """Registers that a published kernel keeps in memory, no tensor's traffic and not in its bytes.

    written: bytes from SM to L2 in all. held: bytes of every thread block's own copy, once.
    """

    written: int
    held: int


NO_SPILLS = Spills(0, 0)


class Step(NamedTuple):
    """One kernel or op: the bytes that it requests per tensor, its matrix FLOPs and its exponentials.

    ctas: thread blocks that a tiled kernel launches, one per outer tile; 0 where that is not known.
    spills: what it writes of its registers, where that is known. moved: of tensors for which other bytes
    cross between SM and L2 than the lanes of threads ask for, those bytes: whole sectors (sectors.py), whole
    boxes. nearby: of what crosses, the bytes that the L1 may answer, as programs of one SM ask for the same.
    """

    name: str
    read: Mapping[str, int]
    write: Mapping[str, int]
    atomic: Mapping[str, int] = NO_BYTES
    flops: int = 0
    exps: int = 0
    ctas: int = 0
    spills: Spills = NO_SPILLS
    moved: Mapping[str, int] = NO_BYTES
    nearby: int = 0

    def crossing(self, part: str) -> int:
        """Bytes between SM and L2 of a part (read, write, atomic), as hardware moves them."""
        asked: Mapping[str, int] = getattr(self, part)
        return sum([self.moved.get(name, count) for name, count in asked.items()])


class Work(NamedTuple):
    """What one pass of an algorithm does.

    saved_bytes: what a forward keeps for the backward beyond the inputs. held_bytes: all that is
    alive after a forward under autograd (saved and outputs). extra_bytes: most alive during the
    pass beyond what was alive before it, outputs included (a forward: without autograd).
    joined_extra_bytes: of a backward, the same where the forward's memory is freed on the way, as
    in ``fwd+bwd``; None if nothing of it is. kept: tensors that the last kernel of a forward writes
    where a backward follows, and else leaves out.
    """

    steps: tuple[Step, ...]
    extra_bytes: int
    saved_bytes: int = 0
    held_bytes: int = 0
    joined_extra_bytes: int | None = None
    kept: Mapping[str, int] = NO_BYTES


class Tiles(NamedTuple):
    """Rows of Q (block_q) and of K/V (block_k) in one tile of one kernel."""

    block_q: int
    block_k: int


def _as_it_is(_: Problem, __: Mapping[str, Tiles], variant: Variant, ___: Device | None) -> Variant:
    return variant


@dataclass(frozen=True, kw_only=True)
class Model:
    """One algorithm. To add one: its functions, and a row of iomodel.MODELS.

    forward, backward (problem, tiles per kernel, variant) -> Work, of a batch of equal sequences.
    fwd_kernels, bwd_kernels: the kernels that have tiles. sram_tiles(problem, kernel, elements): the tile
    that a fast memory of so many elements gives; None if the algorithm has no such rule.
    shipped_tiles(problem, kernel, device): the tile of the published code, None of a kernel that the problem
    is computed without. footprint(problem, kernel, tiles): elements that must be in fast memory at once.
    refuses(problem): why the model does not cover it, or None. takes: the options of a Variant that it knows.
    settle(problem, tiles, variant, device): the variant with what is left open (pack_gqa None, num_splits 0)
    decided. pads: a packed batch is padded to its longest sequence. packs: forward and backward take a packed
    batch whole, empty sequences too; else it is the sum over its sequences (varlen.py). covers: features of a
    problem (problem.FEATURES) that it counts beyond those that every model does. shown: in the default table.
    passes: those that it covers. bundled: describes an implementation of this package, launch by launch, with
    the tiles that it ships with.
    """

    name: str
    summary: str
    source: str
    assumptions: str
    forward: Callable[[Problem, Mapping[str, Tiles], Variant], Work]
    backward: Callable[[Problem, Mapping[str, Tiles], Variant], Work]
    fwd_kernels: tuple[str, ...] = ()
    bwd_kernels: tuple[str, ...] = ()
    sram_tiles: Callable[[Problem, str, int], Tiles] | None = None
    shipped_tiles: Callable[[Problem, str, Device | None], Tiles | None] | None = None
    footprint: Callable[[Problem, str, Tiles], int] | None = None
    refuses: Callable[[Problem], str | None] = lambda _: None
    takes: tuple[str, ...] = ()
    covers: frozenset[str] = frozenset()
    settle: Callable[[Problem, Mapping[str, Tiles], Variant, Device | None], Variant] = _as_it_is
    pads: bool = False
    packs: bool = False
    shown: bool = True
    passes: tuple[str, ...] = PASSES
    bundled: bool = False

    def kernels(self, pass_: str) -> tuple[str, ...]:
        """The tiled kernels of that pass."""
        forward = () if pass_ == "bwd" else self.fwd_kernels
        return forward if pass_ == "fwd" else forward + self.bwd_kernels


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """What a model says of one pass over one problem; all bytes and FLOPs are exact integers.

    flops: nominal matrix FLOPs (2·pairs·(d+dv) forward, 2·pairs·(3d+2dv) backward, over visible
    pairs). done_flops, exps: matrix FLOPs and score exponentials really executed, on whole tiles
    and with recomputation. saved_bytes: what the forward keeps for the backward beyond q, k, v.
    extra_bytes: predicted peak_extra_bytes of the pass. tiles: block_q and block_k of each kernel,
    with its name before (``fwd_block_q``, ``dkdv_block_k``). tile_source: ``sram`` (derived from
    M), ``shipped`` (published code), ``kernel`` (a bundled one's), ``given``, or empty without
    tiles. tiles_fit: whether they fit fast memory, None where no size was given. sram_elements: M,
    in elements of the dtype. steps: the same traffic kernel by kernel. variant: as asked, with what
    was left open decided.
    """

    model: str
    problem: Problem
    pass_: str
    flops: int
    done_flops: int
    exps: int
    requested: Traffic
    compulsory: Traffic
    saved_bytes: int
    extra_bytes: int
    tiles: Mapping[str, int]
    assumptions: str
    tile_source: str = ""
    tiles_fit: bool | None = None
    sram_elements: int | None = None
    steps: tuple[Step, ...] = field(default=(), repr=False)
    variant: Variant = DEFAULT

    @property
    def intensity(self) -> float:
        """Nominal FLOPs per requested byte (reads, writes and atomics)."""
        return self.flops / self.requested.total_bytes

    @property
    def intensity_compulsory(self) -> float:
        """Nominal FLOPs per compulsory byte: the most that any algorithm can reach."""
        return self.flops / self.compulsory.total_bytes
