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

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier

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


def _counted(kernel: Any, numbers: int, *more: int) -> None:
    import torch

    out = torch.full((numbers,), -1, dtype=torch.int32).to("cuda")
    kernel[(1,)](out, *more, num_warps=4)
    assert torch.equal(out.cpu(), torch.arange(numbers, dtype=torch.int32)), "the right kernel is wrong"


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
}
"""By group, each run in a process of its own."""

ACCESS = re.compile(r"(Read|Write) access at \S+?(?:\(.*\))?\+0x[0-9a-f]+ in ([\w.]+):(\d+)")
BEFORE_ARGUMENTS = re.compile(r"(?:\w+ = )?((?:[\w.]+(?:\(\w+\))?)+)\(")
"""In ``x = PS.index(slot).load(LINES)``, what stands before the last bracket."""


def accesses(block: Collection[str]) -> frozenset[str] | None:
    """Each access of a report (its lines), as what and where; None of one that cannot be put aside."""
    found = [
        f"{what} at {_line(file, int(number))}" for what, file, number in ACCESS.findall("\n".join(block))
    ]
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
            reports = [accesses(one.lines) for one in row["mine"]]
            seen += [(row["tool"], row["group"], found) for found in reports if found]
    told = []
    for row in rows:
        if row["right"] or row["group"] == "control" or "not printed" in (row["summary"] or ""):
            continue
        reports = [accesses(one.lines) for one in row["mine"]]
        like = [{group for tool, group, known in seen if tool == row["tool"] and found <= known}
                for found in reports if found]  # fmt: skip
        row["aside"] = sum(map(bool, like))
        if row["aside"]:
            row["errors"] -= row["aside"]
            groups = ", ".join(sorted(set().union(*like)))
            told.append(f"{row['tool']} {row['group']}: {row['aside']} reports as of {groups}")
    return told
