"""How flash-v3's kernels are cut on sm_90: head dims in pieces, tables of tiles, and the choice from them.

Plain Python, so that a refusal and the IO model's tile sizes are to be had without torch or Triton.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Generic, TypeVar

from flashbench.installed import version_of

CAPABILITY = (9, 0)
"""The compute capability whose TMA and wgmma the kernel is written in."""
ROWS = 64
"""Rows of queries of a warpgroup: what one wgmma covers."""
KEYS = 128
"""Of a tile of the backward: of two warpgroups."""
WIDEST_SINGLE = 128
"""The largest head dim whose backward is one kernel; larger ones' dQ has a kernel of its own."""
WIDE_BLOCK_Q = 128
"""Rows of queries of a tile of that kernel, of two warpgroups; all other tiles are of ROWS rows or keys."""
SHARED_LIMIT = 232448
"""Shared memory of a block, bytes (CUDA C++ Programming Guide, compute capability 9.0)."""
PROGRAMS = 132
"""SMs of an H100 SXM and an H200, for a card that is not here; else as many as the card has."""


@dataclass(frozen=True)
class Tiles:
    """How the kernel is cut.

    warpgroups: consumers, of ROWS rows of queries each. block_k: keys of a K/V tile. stages: K/V tiles in
    flight. q_stages: tiles of queries in flight. pingpong: warpgroups take turns to issue products. o_shared:
    both pieces of O leave through one buffer. max3: maxima of three scores at once, compared as integers.
    emulated: of eight exponentials, how many are computed on the multiply-add units, in fp16 and fp8 alone
    and beside max3, whose maxima carry NaN, or with promote. promote: of fp8, P V of so many tiles is summed
    in the tensor cores' precision; 0: of each alone. guarded: in 16 bits, no maxima: bases that row sums
    guard (``_hopper_guard16``), of a tile at once while P V is in flight (1), or after it and in two parts
    (2), which need fewer registers; in place of max3 and emulated.
    """

    warpgroups: int = 2
    block_k: int = 128
    stages: int = 2
    q_stages: int = 2
    pingpong: bool = False
    o_shared: bool = False
    max3: bool = False
    emulated: int = 0
    promote: int = 0
    guarded: int = 0

    @property
    def name(self) -> str:
        """Short text that tells it from others of its head dim."""
        numbers = f"{self.warpgroups}w.n{self.block_k}.s{self.stages}.q{self.q_stages}"
        told = ".pingpong" * self.pingpong + ".max3" * self.max3
        told += f".e{self.emulated}" * (self.emulated > 0) + f".p{self.promote}" * (self.promote > 0)
        return numbers + told + f".guard{self.guarded}" * (self.guarded > 0)

    @property
    def block_q(self) -> int:
        """Rows of queries of a program's tile."""
        return ROWS * self.warpgroups

    @property
    def num_warps(self) -> int:
        """Of the consumers, the one that loads and, with promote, one that waits for each warpgroup."""
        return 4 * self.warpgroups + 1 + (self.warpgroups if self.promote else 0)

    @property
    def registers(self) -> tuple[int, int]:
        """Of a consumer's thread and of the producer's: together what an SM has (setmaxnreg)."""
        return (240, 24) if self.warpgroups == 2 else (160, 32)


_Cut = TypeVar("_Cut")


@dataclass(frozen=True)
class Row(Generic[_Cut]):
    """A table row: what runs head dims (the larger one) up to max_dim and keys up to max_keys.

    fp16: what runs them in fp16, where that is something of its own.
    """

    max_dim: int
    causal: bool
    max_keys: float
    tiles: _Cut
    fp16: _Cut | None = None


def _first(table: Iterable[Row[_Cut]], dim: int, causal: bool, seqlen_k: int) -> Row[_Cut]:
    """The first row that takes the head dim, the mask and the keys of a sequence."""
    rows = (row for row in table if row.max_dim >= dim and row.causal == causal and row.max_keys >= seqlen_k)
    return next(rows)


EMULATED_WITHIN = {1: 6e-3, 2: 1.3e-3}
"""How far an emulated exponential may be off, relative, by bytes of the dtype: its polynomial and roundings
to fp16 (``_hopper_exp2``; ``tests/test_hopper_exp2.py`` holds them to it)."""

_ANY = float("inf")
_TWO = Tiles()
_THREE = Tiles(warpgroups=3)
_IN_TURN = replace(_TWO, q_stages=1, pingpong=True)
_64_FULL = replace(_THREE, q_stages=1, pingpong=True, guarded=2)
_64_CAUSAL = replace(_THREE, guarded=2)
_128_FULL = replace(_IN_TURN, guarded=1)
_128_CAUSAL = replace(_TWO, guarded=1)
_TWO_MAX3 = replace(_TWO, max3=True)
_EMULATED = replace(_TWO_MAX3, emulated=4)
_WIDE = Tiles(block_k=64, q_stages=1)
TABLE = (
    # TFLOP/s in fp16 on an H200 with Triton 3.6 (reports/h200-sxm/tuning/flash-v3-guarded.json), in brackets
    # of the fastest with maxima where this has none, and the other way about; 96 and 192 are cut as what
    # follows them
    Row(64, False, _ANY, _64_FULL),  # at 512 361 (362), at 4096 523 (457), at 16384 566 (479)
    Row(64, True, 1024, _TWO_MAX3, _EMULATED),  # at 512 262 (242), at 1024 328 (323)
    Row(64, True, _ANY, _64_CAUSAL),  # at 2048 389 (377), at 4096 454 (403), at 16384 540 (451)
    Row(128, False, 512, replace(_IN_TURN, max3=True)),  # 483 (469)
    Row(128, False, _ANY, _128_FULL),  # at 1024 563 (545), at 4096 668 (579), at 16384 700 (594)
    Row(128, True, 1024, _TWO),  # at 512 334 (306), at 1024 438 (423)
    Row(128, True, _ANY, _128_CAUSAL),  # at 2048 535 (512), at 4096 620 (557), at 16384 698 (597)
    *(Row(256, causal, _ANY, _WIDE) for causal in (False, True)),  # 724 (cuDNN 612), causal 727 (535)
)


WIDTHS = {64: (64, 0), 96: (64, 32), 128: (128, 0), 192: (128, 64), 256: (256, 0)}
"""Head dims that the kernel has, as the widths of two pieces; others run in the next larger one."""
WIDTHS_V = {**WIDTHS, 256: (128, 128)}
"""The same of V and O."""


def pieces(dim: int, of_v: bool = False) -> tuple[int, int]:
    """Columns of the two boxes that hold a head dim of Q and K, or of V and O; 0 for no second one."""
    return (WIDTHS_V if of_v else WIDTHS)[next(width for width in WIDTHS if width >= dim)]


@cache
def choose(head_dim: int, head_dim_v: int, causal: bool, seqlen_k: int, *, fp16: bool) -> Tiles:
    """The configuration for the head dims (at most 256), the mask, the keys of a sequence, and fp16 or bf16.

    Two pieces of O that are alike share a buffer: nothing else fits beside Q and K of 256.
    """
    row = _first(TABLE, max(head_dim, head_dim_v), causal, seqlen_k)
    tiles = row.fp16 if fp16 and row.fp16 else row.tiles
    first, second = pieces(head_dim_v, of_v=True)
    return replace(tiles, o_shared=first == second)


def described(tiles: Tiles) -> dict[str, int | str]:
    """The configuration as a row says it; fwd_cut: its name, which tells what the numbers do not."""
    return {
        "fwd_cut": tiles.name,
        "fwd_block_q": tiles.block_q, "fwd_block_k": tiles.block_k, "fwd_num_warps": tiles.num_warps,
        "fwd_num_stages": tiles.stages, "fwd_q_stages": tiles.q_stages,
    }  # fmt: skip


def given(config: Mapping[str, Any], own: Tiles) -> Tiles | None:
    """The configuration that is described so, the rest as the table's own has it; None without one."""
    if "fwd_q_stages" not in config:
        return None
    return replace(
        own,
        warpgroups=config["fwd_block_q"] // ROWS,
        block_k=config["fwd_block_k"],
        stages=config["fwd_num_stages"],
        q_stages=config["fwd_q_stages"],
    )


def shared_bytes(tiles: Tiles, head_dim: int, head_dim_v: int) -> int:
    """Shared memory that a block asks for at most: rings of Q, K and V, O on its way, mbarriers.

    Tested against the compiler's own figure.
    """
    width, (first_v, second_v) = sum(pieces(head_dim)), pieces(head_dim_v, of_v=True)
    q = tiles.q_stages * tiles.block_q * width
    kv = tiles.stages * tiles.block_k * (width + first_v + second_v)
    o = tiles.block_q * (first_v + (0 if tiles.o_shared else second_v))
    return 2 * (q + kv + o) + _BARRIER_BYTES


def shared_bytes_fp8(tiles: Tiles, head_dim: int, head_dim_v: int, o_bytes: int = 2) -> int:
    """The same of the forward in 8-bit floats; o_bytes: of an element of O (promote: 4, set aside)."""
    d, e = width(head_dim, head_dim), width(head_dim_v, head_dim_v)
    o_bytes = 4 if tiles.promote else o_bytes
    kv = tiles.stages * tiles.block_k * (d + e)
    return tiles.block_q * (tiles.q_stages * d + o_bytes * e) + kv + _BARRIER_BYTES


_BARRIER_BYTES = 1024
"""mbarriers of 8 bytes, and what Triton hands values and states over with."""


_ONE_Q = Tiles(stages=4, q_stages=1)
_256_KEYS = Tiles(block_k=256)
_GUARDED = Tiles(stages=4, emulated=2, promote=16)
FP8_TABLE = (
    # TFLOP/s as above (reports/h100-sxm/tuning/flash-v3-fp8.json), of the next best in brackets
    Row(64, False, 2048, _ONE_Q),  # at 1024 411 (404), at 2048 439 (440)
    Row(64, False, _ANY, _256_KEYS),  # at 4096 465 (453), at 16384 487 (474)
    Row(64, True, 2048, _ONE_Q),  # at 1024 318 (316), at 2048 377 (364)
    Row(64, True, _ANY, _256_KEYS),  # at 4096 424 (412), at 16384 486 (441)
    # of 128 flash-v3-exps-fp8.json, of the next best without emulated ones in brackets
    Row(128, False, 1024, replace(_ONE_Q, max3=True, emulated=2)),  # 695 (669)
    Row(128, False, 2048, replace(_ONE_Q, max3=True, emulated=3)),  # 722 (699)
    # from here on h200-sxm/tuning/flash-v3-fp8-guarded.json, of the fastest other guarded one
    Row(128, False, _ANY, _GUARDED),  # at 4096 911 (901), 8192 937 (913), 16384 934 (933)
    Row(128, True, 2048, _EMULATED),  # at 1024 557 (535)
    Row(128, True, _ANY, _GUARDED),  # at 4096 819 (823), 8192 872 (887), 16384 919 (925)
)


@cache
def choose_fp8(head_dim: int, head_dim_v: int, causal: bool, seqlen_k: int) -> Tiles:
    """The configuration of the forward in 8-bit floats, for head dims up to 128."""
    return _first(FP8_TABLE, max(head_dim, head_dim_v), causal, seqlen_k).tiles


def why_not_fp8(head_dim: int, head_dim_v: int) -> str | None:
    """Why the forward in 8-bit floats does not take the head dims, one sentence, or None."""
    for dim in (head_dim, head_dim_v):
        if dim > WIDEST_SINGLE:
            return f"head_dim {dim} is larger than {WIDEST_SINGLE}"
        if dim % 16:
            return f"head_dim {dim} is not a multiple of 16, as TMA wants"
    return None


@dataclass(frozen=True)
class BackwardTiles:
    """How the backward is cut: tiles of 128 keys, and of so many queries that their dQ is two 64 x 64 blocks.

    width: columns that the head dims run in. stages: tiles of Q and dO in flight; ds_stages: of dS. lag: how
    many tiles later a tile's dQ is issued. early_dv: dV is issued before dS is known. rotate: tiles of keys
    of one head start with different tiles of queries. held: K and V are first operands from registers.
    """

    width: int
    stages: int = 2
    ds_stages: int = 2
    lag: int = 1
    early_dv: bool = False
    rotate: bool = False
    held: bool = False

    @property
    def name(self) -> str:
        """Short text that tells it from others of its width."""
        told = ".early" * self.early_dv + ".rotate" * self.rotate + ".held" * self.held
        return f"ds{self.ds_stages}.lag{self.lag}{told}"

    @property
    def block_q(self) -> int:
        """Rows of queries of a tile."""
        return 2 * ROWS * ROWS // self.width


def why_portable(head_dim: int, head_dim_v: int) -> str | None:
    """Why the backward is left to flash-v2's kernels, one sentence, or None."""
    for dim in (head_dim, head_dim_v):
        if dim % 8:
            return f"head_dim {dim} is not a multiple of 8"
    return None


def wide(head_dim: int, head_dim_v: int) -> bool:
    """Whether the backward is two kernels."""
    return max(head_dim, head_dim_v) > WIDEST_SINGLE


WIDE = {"dkdv": (ROWS, ROWS), "dq": (WIDE_BLOCK_Q, ROWS)}
"""Queries and keys of a tile of each of the two kernels."""


def described_wide() -> dict[str, int]:
    """Those as a row says them; warps: two warpgroups and the one that loads."""
    return {
        f"{kernel}_{name}": number
        for kernel, (block_q, block_k) in WIDE.items()
        for name, number in (("block_q", block_q), ("block_k", block_k), ("num_warps", 9))
    }


def described_backward(tiles: BackwardTiles) -> dict[str, int]:
    """The backward's configuration as a row says it; warps: two warpgroups and the one that loads."""
    return {
        "bwd_block_q": tiles.block_q, "bwd_block_k": KEYS, "bwd_num_warps": 9,
        "bwd_num_stages": tiles.stages,
    }  # fmt: skip


def width(head_dim: int, head_dim_v: int) -> int:
    """Columns that the backward, and fp8's forward, runs head dims up to 128 in."""
    return 64 if max(head_dim, head_dim_v) <= 64 else 128


_64 = BackwardTiles(64, ds_stages=3)
_128 = BackwardTiles(128, ds_stages=4)
BACKWARD_TABLE = (
    # TFLOP/s as above (reports/h100-sxm/tuning/flash-v3-backward.json), of the next best in brackets
    Row(64, False, 512, BackwardTiles(64, lag=0, held=True)),  # 299 (293)
    Row(64, False, _ANY, replace(_64, held=True)),  # at 4096 512 (477 with lag 0, 444 from shared memory)
    Row(64, True, 512, BackwardTiles(64, lag=0)),  # 177 (173)
    Row(64, True, _ANY, replace(_64, rotate=True)),  # at 16384 510 (492); held 382
    Row(128, False, _ANY, _128),  # at 4096 538 (523)
    Row(128, True, _ANY, replace(_128, lag=0, early_dv=True)),  # at 8192 524 (512)
)


@cache
def choose_backward(head_dim: int, head_dim_v: int, causal: bool, seqlen_k: int) -> BackwardTiles:
    """The backward's configuration for head dims up to 128."""
    tiles = _first(BACKWARD_TABLE, max(head_dim, head_dim_v), causal, seqlen_k).tiles
    if tiles.held and (version_of("triton") or "").startswith(SERIALISES_HELD):
        return replace(tiles, held=False)
    return tiles


SERIALISES_HELD = "3.8."
"""The Triton whose ptxas has too few registers left for products beside K and V in them, and makes each wait
for the one before (C7512)."""
