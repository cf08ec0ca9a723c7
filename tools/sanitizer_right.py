"""Small kernels that are right by construction, of a kind in which a sanitizer may see what is not there.

A tool that reports one of them does not know that pattern: what it reports of the same pattern in a bundled
kernel says nothing. Each is run under the tool, its result is held to what it must be, and a finding of a
bundled kernel is put aside only if each of its accesses is one that the tool reported of one right kernel:
the same sort of access at the same source line, up to its arguments. Whatever else is found stays an error.
"""

# Triton reads the bodies of kernels, not Python.
# mypy: disable-error-code="no-untyped-def,no-untyped-call"

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from flashbench.kernels._hopper_tiles import tma_store

SLOTS = gl.constexpr(2)
WIDTH = gl.constexpr(128)
"""Threads of a warpgroup."""
LINE = gl.constexpr(4)
"""Numbers that a thread hands on in a turn."""
FOLDERS = ("flashbench/kernels", "tools")


@gluon.jit
def fill(Out, FROM: gl.constexpr):
    at = FROM + gl.arange(0, WIDTH, gl.BlockedLayout([1], [32], [4], [0]))
    gl.store(Out + at, at)


@gluon.jit
def part(Out):
    """Two warpgroups that share nothing: Out = 0, 1, 2, …"""
    gl.warp_specialize([
        (fill, (Out, 0)),
        (fill, (Out, WIDTH)),
    ], [4], [24])  # fmt: skip


@gluon.jit
def lines(j, LINES: gl.constexpr):
    """The numbers of a turn: a line of a few for each thread."""
    row = gl.expand_dims(gl.arange(0, WIDTH, gl.SliceLayout(1, LINES)), 1)
    return (j * WIDTH + row) * LINE + gl.expand_dims(gl.arange(0, LINE, gl.SliceLayout(0, LINES)), 0)


@gluon.jit
def hand(PS, PFULL, PEMPTY, turns):
    """The numbers of each turn, stored by 128 threads; behind their barrier one of them arrives."""
    LINES: gl.constexpr = gl.BlockedLayout([1, LINE], [32, 1], [4, 1], [1, 0])
    for j in range(turns):
        slot = j % SLOTS
        mbarrier.wait(PEMPTY.index(slot), ((j // SLOTS) & 1) ^ 1)
        PS.index(slot).store(lines(j, LINES))
        mbarrier.arrive(PFULL.index(slot))


@gluon.jit
def take(Out, PS, PFULL, PEMPTY, turns):
    """Out = what the other warpgroup handed on."""
    LINES: gl.constexpr = gl.BlockedLayout([1, LINE], [32, 1], [4, 1], [1, 0])
    for j in range(turns):
        slot = j % SLOTS
        mbarrier.wait(PFULL.index(slot), (j // SLOTS) & 1)
        x = PS.index(slot).load(LINES)
        mbarrier.arrive(PEMPTY.index(slot))
        gl.store(Out + lines(j, LINES), x)


@gluon.jit
def exchange(Out, turns):
    """One warpgroup hands numbers to another through shared memory and mbarriers: Out = 0, 1, 2, …"""
    LINEAR: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    PS = gl.allocate_shared_memory(gl.int32, [SLOTS, WIDTH, LINE], LINEAR)
    PFULL = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    PEMPTY = gl.allocate_shared_memory(gl.int64, [SLOTS, 1], mbarrier.MBarrierLayout())
    for n in gl.static_range(SLOTS):
        mbarrier.init(PFULL.index(n), count=1)
        mbarrier.init(PEMPTY.index(n), count=1)
    fence_async_shared()
    gl.warp_specialize([
        (hand, (PS, PFULL, PEMPTY, turns)),
        (take, (Out, PS, PFULL, PEMPTY, turns)),
    ], [4], [64])  # fmt: skip


@gluon.jit
def write_by_tma(DESC, ROWS: gl.constexpr, COLUMNS: gl.constexpr):
    """All of a tensor of ROWS by COLUMNS in one box: 1."""
    LINES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    BOX = gl.allocate_shared_memory(DESC.dtype, [ROWS, COLUMNS], DESC.layout)
    BOX.store(gl.full([ROWS, COLUMNS], 1.0, DESC.dtype, LINES))
    fence_async_shared()
    tma_store(DESC, [0, 0], BOX)
    tma.store_wait(0)


@triton.jit
def read_back(X, Out, SIZE: tl.constexpr):
    """In a launch after that which wrote X."""
    at = tl.arange(0, SIZE)
    tl.store(Out + at, tl.load(X + at))


def _counted(kernel: Any, numbers: int, *more: int) -> None:
    import torch

    out = torch.full((numbers,), -1, dtype=torch.int32).to("cuda")
    kernel[(1,)](out, *more, num_warps=4)
    assert torch.equal(out.cpu(), torch.arange(numbers, dtype=torch.int32)), "the right kernel is wrong"


def boxes(x: Any) -> Any:
    """The descriptor of a tensor, for TMA to write in one box."""
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    layout = gl.NVMMASharedLayout.get_default_for(list(x.shape), gl.float16)
    return TensorDescriptor(x, list(x.shape), list(x.stride()), list(x.shape), layout)


def _read_back() -> None:
    import torch

    shape = [64, 64]
    x = torch.empty(shape, dtype=torch.float16, device="cuda")
    out = torch.zeros(shape, dtype=torch.float16).to("cuda")
    write_by_tma[(1,)](boxes(x), *shape, num_warps=4)
    say_tma_wrote(x)
    read_back[(1,)](x, out, x.numel(), num_warps=4)
    assert out.cpu().eq(1).all(), "the right kernel is wrong"


@dataclass(frozen=True)
class Right:
    """A right kernel, for a tool that may not know its pattern."""

    tool: str
    kernel: str
    run: Callable[[], None]


RIGHT: dict[str, Right] = {
    "right part": Right("racecheck", "part", lambda: _counted(part, 2 * WIDTH.value)),
    "right exchange": Right(
        "racecheck", "exchange", lambda: _counted(exchange, 6 * WIDTH.value * LINE.value, 6)
    ),
    "right tma": Right("initcheck", "read_back", _read_back),
}
"""By group, each run in a process of its own."""
KEPT: list[Any] = []
"""Tensors that TMA wrote, so that their addresses stay theirs."""


def say_tma_wrote(x: Any) -> None:
    """Say where a tensor is that TMA has written, for ``accesses``."""
    KEPT.append(x)
    print(f"TMA wrote {x.untyped_storage().nbytes()} bytes at {x.data_ptr():#x}", flush=True)


ACCESS = re.compile(r"(Read|Write) access at \S+?(?:\(.*\))?\+0x[0-9a-f]+ in ([\w.]+):(\d+)")
UNWRITTEN = re.compile(r"Uninitialized __global__ memory read")
ADDRESS = re.compile(r"Address (0x[0-9a-f]+)")
WROTE = re.compile(r"TMA wrote (\d+) bytes at (0x[0-9a-f]+)")
BEFORE_ARGUMENTS = re.compile(r"(?:\w+ = )?((?:[\w.]+(?:\(\w+\))?)+)\(")
"""In ``x = PS.index(slot).load(LINES)``, what stands before the last bracket."""


def accesses(block: Collection[str], said: str) -> frozenset[str] | None:
    """Each access of a report (its lines), as what and where; None of one that cannot be put aside."""
    text = "\n".join(block)
    if UNWRITTEN.match(text):
        address = ADDRESS.search(text)
        written = [(int(at, 16), int(size)) for size, at in WROTE.findall(said)]
        inside = address and any(0 <= int(address[1], 16) - at < size for at, size in written)
        return frozenset(["read of what TMA wrote"]) if inside else None
    found = [f"{what} at {_line(file, int(number))}" for what, file, number in ACCESS.findall(text)]
    return frozenset(found) if len(found) == len(block) > 0 and not any("?" in x for x in found) else None


@lru_cache
def _line(file: str, number: int) -> str:
    """A source line up to its arguments; of a function's first that it is one, of an if what it guards."""
    paths = [Path(__file__).parents[1] / folder / file for folder in FOLDERS]
    lines = next((path.read_text("utf-8").splitlines() for path in paths if path.is_file()), [])
    line = lines[number - 1].strip() if 0 < number <= len(lines) else ""
    if line.startswith("def "):
        return "def"
    if line.startswith("if "):
        return _line(file, number + 1)
    match = BEFORE_ARGUMENTS.match(line)
    return match[1] if match else "?"


def put_aside(rows: Sequence[dict[str, Any]]) -> list[str]:
    """Take from the rows' errors what a tool reports of a right kernel too; a line for each such row.

    A row is left as it is where not all that was found was printed.
    """
    seen: list[tuple[str, str, frozenset[str]]] = []
    for row in rows:
        row["right"] = row["group"] in RIGHT
        if row["right"]:
            reports = [accesses(one.lines, row["said"]) for one in row["mine"]]
            seen += [(row["tool"], row["group"], found) for found in reports if found]
    told = []
    for row in rows:
        if row["right"] or row["group"] == "control" or "not printed" in (row["summary"] or ""):
            continue
        reports = [accesses(one.lines, row["said"]) for one in row["mine"]]
        like = [{group for tool, group, known in seen if tool == row["tool"] and found <= known}
                for found in reports if found]  # fmt: skip
        row["aside"] = sum(map(bool, like))
        if row["aside"]:
            row["errors"] -= row["aside"]
            groups = ", ".join(sorted(set().union(*like)))
            told.append(f"{row['tool']} {row['group']}: {row['aside']} reports as of {groups}")
    return told
