"""Runs lines of PTX in numpy, of the few instructions that the kernels' softmax is written in.

A register is an array of 32-bit patterns, one per lane; all lanes are one warp, which votes, hands numbers
from lane to lane, and jumps as a whole.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import torch

Bits = np.ndarray[Any, np.dtype[np.uint32]]


def of_floats(x: Any) -> Bits:
    return np.asarray(x, np.float32).view(np.uint32)


def floats(bits: Bits) -> Any:
    return bits.view(np.float32)


def halves(bits: Bits) -> Any:
    """(lanes, 2) fp16 numbers of words, the lower first."""
    return np.ascontiguousarray(bits).view(np.float16).reshape(-1, 2)


def _words(x: Any) -> Bits:
    return np.ascontiguousarray(np.asarray(x).astype(np.float16)).view(np.uint32).reshape(-1)


def _doubles(*x: Bits) -> Any:
    return [floats(one).astype(np.float64) for one in x]


def _f32(of: Callable[..., Any]) -> Callable[..., Bits]:
    """An operation on fp32 numbers, rounded once: fp64 holds their products exactly."""
    return lambda *x: of_floats(of(*_doubles(*x)))


def _up(x: Any) -> Bits:
    """fp32 numbers that are rounded up."""
    near = np.asarray(x).astype(np.float32)
    return of_floats(np.where(near < x, np.nextafter(near, np.float32(np.inf)), near))


def _bf16(x: Any) -> Bits:
    """(lanes, 2) fp32 numbers as words of two."""
    rounded = torch.tensor(np.asarray(x, np.float32)).bfloat16()
    return rounded.view(torch.int16).numpy().view(np.uint32).reshape(-1)


def _f16(of: Callable[..., Any]) -> Callable[..., Bits]:
    return lambda *x: _words(of(*(halves(one).astype(np.float64) for one in x)))


def by_row(first: Bits, second: Bits) -> np.ndarray:
    """(16, 4): of a warp's fp32 numbers for each thread's two rows, a row's four."""
    return np.concatenate([floats(x).reshape(8, 4) for x in (first, second)]).astype(np.float64)


def _lop3(a: Bits, b: Bits, c: Bits, table: Bits) -> Bits:
    found = np.zeros_like(a)
    for n in range(8):
        if int(table[0]) >> n & 1:
            masks = [one if n >> bit & 1 else ~one for one, bit in ((a, 2), (b, 1), (c, 0))]
            found |= masks[0] & masks[1] & masks[2]
    return found


def _permute(a: Bits, b: Bits, selector: Bits) -> Bits:
    of = [(one >> (8 * n)) & 0xFF for one in (a, b) for n in range(4)]
    return sum((of[int(selector[0]) >> (4 * n) & 7] << (8 * n) for n in range(4)), np.zeros_like(a))  # type: ignore[return-value]


def _as(dtype: torch.dtype, x: Any) -> Bits:
    """(lanes, 2) numbers in 8 bits, to nearest and no further than the largest, as words; a NaN stays."""
    limit = torch.finfo(dtype).max
    rounded = torch.tensor(np.asarray(x, np.float32)).clamp(-limit, limit).to(dtype)
    low, high = rounded.view(torch.uint8).numpy().astype(np.uint32).T
    return low | high << 8


def _to_8(dtype: torch.dtype) -> dict[str, Callable[..., Bits]]:
    name = f"cvt.rn.satfinite.{'e4m3' if dtype == torch.float8_e4m3fn else 'e5m2'}x2"
    return {
        f"{name}.f32": lambda a, b: _as(dtype, np.stack((floats(b), floats(a)), -1)),
        f"{name}.f16x2": lambda a: _as(dtype, halves(a)),
    }


def _where(of: Callable[..., Any], joined: Callable[..., Any] | None = None) -> Callable[..., Bits]:
    """A comparison of fp32 numbers, joined with a predicate where there is one."""
    if joined:
        return lambda a, b, p: joined(of(floats(a), floats(b)), p > 0).astype(np.uint32)
    return lambda a, b: of(floats(a), floats(b)).astype(np.uint32)


def _across(a: Bits, step: Bits, *rest: Bits) -> Bits:
    return a[np.arange(len(a)) ^ int(step[0])]


OPERATIONS: dict[str, Callable[..., Bits]] = {
    "fma.rn.ftz.sat.f32": _f32(lambda a, b, c: np.clip(np.nan_to_num(a * b + c, nan=0.0), 0, 1)),
    "fma.rp.f32": lambda *x: _up(np.add(np.multiply(*_doubles(*x[:2])), *_doubles(x[2]))),
    "fma.rn.f32": _f32(lambda a, b, c: a * b + c),
    "add.f32": _f32(lambda a, b: a + b),
    "mul.f32": _f32(lambda a, b: a * b),
    "neg.f32": _f32(np.negative),
    "sub.f32": _f32(lambda a, b: a - b),
    "max.NaN.f32": _f32(np.maximum),
    "max.f32": _f32(np.fmax),
    "min.f32": _f32(np.fmin),
    "selp.f32": lambda a, b, p: np.where(p > 0, a, b),
    "ex2.approx.ftz.f32": _f32(np.exp2),
    "lg2.approx.ftz.f32": _f32(np.log2),
    "cvt.rmi.f32.f32": _f32(np.floor),
    "max.s32": lambda a, b: np.maximum(a.view(np.int32), b.view(np.int32)).view(np.uint32),
    "add.rn.f16x2": _f16(lambda a, b: a + b),
    "fma.rn.f16x2": _f16(lambda a, b, c: a * b + c),
    "mul.rn.f16x2": _f16(lambda a, b: a * b),
    "or.b32": lambda a, b: a | b,
    "and.b32": lambda a, b: a & b,
    "lop3.b32": _lop3,
    "prmt.b32": _permute,
    "mov.b32": lambda a: a.copy(),
    "mov.f32": lambda a: a.copy(),
    "cvt.rn.f16x2.f32": lambda a, b: _words(np.stack((floats(b), floats(a)), -1)),
    "cvt.rn.bf16x2.f32": lambda a, b: _bf16(np.stack((floats(b), floats(a)), -1)),
    "cvt.f32.bf16": lambda a: a << 16,
    "cvt.f32.f16": lambda a: of_floats(halves(a)[:, 0]),
    "setp.lt.s32": lambda a, b: (a.view(np.int32) < b.view(np.int32)).astype(np.uint32),
    "setp.lt.or.s32": lambda a, b, p: ((a.view(np.int32) < b.view(np.int32)) | (p > 0)).astype(np.uint32),
    "setp.ne.u32": lambda a, b: (a != b).astype(np.uint32),
    "setp.ne.b32": lambda a, b: (a != b).astype(np.uint32),
    "setp.eq.u32": lambda a, b: (a == b).astype(np.uint32),
    "setp.le.f32": _where(np.less_equal),
    "setp.ne.f32": _where(lambda a, b: (a < b) | (a > b)),
    "setp.gtu.f32": _where(lambda a, b: ~(a <= b)),
    "setp.gtu.or.f32": _where(lambda a, b: ~(a <= b), np.logical_or),
    "setp.eq.or.f32": _where(np.equal, np.logical_or),
    "setp.eq.and.f32": _where(np.equal, np.logical_and),
    "shfl.sync.bfly.b32": _across,
    **_to_8(torch.float8_e4m3fn),
    **_to_8(torch.float8_e5m2),
    "vote.sync.any.pred": lambda p, mask: np.full_like(p, p.any()),
}


def run(lines: str | Iterable[str], registers: dict[str, Bits]) -> dict[str, Bits]:
    """The registers after the lines; raises KeyError for an instruction that is not known."""
    text = lines if isinstance(lines, str) else "\n".join(lines)
    known = dict(registers)
    size = len(next(iter(known.values())))

    def value(name: str) -> Bits:
        if name in known:
            return known[name]
        if name.startswith("0f"):
            return np.full(size, int(name[2:], 16), np.uint32)
        return np.full(size, int(name, 0) & 0xFFFFFFFF, np.uint32)

    at, steps = 0, text.splitlines()
    while at < len(steps):
        line = steps[at]
        at += 1
        if line in "{}" or line.startswith(".reg") or re.fullmatch(r"\w+:", line):
            continue
        if branch := re.fullmatch(r"(?:@(!?)(\w+) )?bra (\w+);", line):
            taken = np.full(size, True) if branch[2] is None else (known[branch[2]] > 0) ^ (branch[1] == "!")
            assert taken.all() == taken.any(), f"a warp divides at {line}"
            at = steps.index(f"{branch[3]}:") if taken.all() else at
            continue
        if apart := re.fullmatch(r"mov\.b32 \{(\w+), (\w+)\}, (\S+);", line):
            both = value(apart[3])
            known[apart[1]], known[apart[2]] = both & 0xFFFF, both >> 16
            continue
        if both_of := re.fullmatch(r"mov\.b32 (\S+), \{(\w+), (\w+)\};", line):
            known[both_of[1]] = known[both_of[2]] & 0xFFFF | known[both_of[3]] << 16
            continue
        name, rest = line.rstrip(";").split(" ", 1)
        to, *operands = rest.split(", ")
        with np.errstate(all="ignore"):
            known[to] = OPERATIONS[name](*map(value, operands))
    return known
