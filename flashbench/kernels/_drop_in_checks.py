"""What flash-attention's functions are given: each misfit refused in one line, which names the argument.

What is taken is handed back as the kernels have it: 0-d tensors and numpy's numbers as Python's own.
"""

from __future__ import annotations

import operator
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from flashbench.kernels._misfits import check_mask

PAIRS = "two counts of keys, or -1"


def check_dimensions(count: int, meaning: str, **tensors: Any) -> None:
    """Raise ValueError for what is no tensor, and for a tensor of another rank."""
    for name, x in tensors.items():
        if not isinstance(x, Tensor):
            raise ValueError(f"{name} {shown(x)} is not taken; accepted: a tensor {meaning}")
        if x.ndim != count:
            raise ValueError(f"{name} has {count} dimensions, {meaning}; got {tuple(x.shape)}")


def check_slopes(slopes: Any, sequences: int, heads: int) -> Tensor | None:
    """Slopes that lie one after the other, or None. Raise ValueError for what is neither."""
    if slopes is None:
        return None
    if not isinstance(slopes, Tensor):
        raise ValueError(f"alibi_slopes {shown(slopes)} is not taken; accepted: an fp32 tensor, or None")
    if tuple(slopes.shape) not in ((heads,), (sequences, heads)):
        raise ValueError(
            f"alibi_slopes must be ({heads},) or {(sequences, heads)}; got {tuple(slopes.shape)}"
        )
    return slopes.contiguous()


def check_cached(
    name: str, x: Any, batch: int, more: tuple[torch.dtype, ...] = (), kind: str = "int32"
) -> None:
    """Raise ValueError for what is not one int32 for each sequence; more: dtypes that are taken, too."""
    if isinstance(x, Tensor) and x.dtype in (torch.int32, *more) and x.shape == (batch,):
        return
    raise ValueError(f"{name} {shown(x)} is not taken; accepted: {kind} ({batch},)")


def check_table(table: Any, sequences: int) -> None:
    """Raise ValueError for what is no row of page numbers for each sequence."""
    check_dimensions(2, "(batch, max_pages)", block_table=table)
    if table.dtype != torch.int32 or table.shape[0] != sequences:
        raise ValueError(
            f"block_table {shown(table)} is not taken; accepted: int32 ({sequences}, max_pages), a row for"
            " each sequence"
        )


def check_devices(first: str, **given: Any) -> None:
    """Raise ValueError for a tensor that is not where the one of that name is."""
    there = given[first].device
    for name, x in given.items():
        if isinstance(x, Tensor) and x.device != there:
            raise ValueError(f"{name} is on {x.device}, {first} on {there}")


def check_lengths(**given: Any) -> None:
    """Raise ValueError for what does not say where each sequence begins, and the end."""
    check_dimensions(1, "(sequences + 1,)", **given)
    for name, cu in given.items():
        if cu.dtype != torch.int32 or not cu.is_contiguous() or not cu.numel():
            raise ValueError(f"{name} {shown(cu)} is not taken; accepted: contiguous int32 (sequences + 1,)")


def check_starts(name: str, cu: Tensor, rows: int, longest: int, of_longest: str) -> None:
    """Raise ValueError for starts of sequences that cannot be, on a CPU, where they cost no wait."""
    if cu.device.type != "cpu" or torch.compiler.is_compiling():
        return
    starts = cu.tolist()
    if starts[0] != 0 or starts[-1] != rows or starts != sorted(starts):
        raise ValueError(f"{name} must ascend from 0 to the {rows} rows that there are")
    most = max((b - a for a, b in pairwise(starts)), default=0)
    if longest < most:
        raise ValueError(f"{of_longest} {longest} is too small; the longest sequence has {most} rows")


def check_pages(name: str, table: Tensor, lengths: Tensor, size: int, pages: int) -> None:
    """On a CPU: raise ValueError where keys of a sequence are on pages that there are not."""
    needed = torch.arange(table.shape[1]) * size < lengths[:, None]
    if bool((needed & ((table < 0) | (table >= pages))).any()):
        raise ValueError(f"{name} {table.tolist()} is out of range; the cache has {pages} pages or entries")


def flag(name: str, value: Any) -> bool:
    """A bool, numpy's and 0 and 1 among them."""
    number = value.item() if getattr(value, "ndim", None) == 0 else value
    if isinstance(number, int) and number in (0, 1):
        return bool(number)
    raise ValueError(f"{name} {shown(value)} is not taken; accepted: True or False")


def whole(name: str, value: Any, accepted: str = "a whole number, 0 or more") -> int:
    """A whole number of any kind."""
    if type(value) is int or isinstance(value, torch.SymInt):
        return value
    try:
        return int(operator.index(value))
    except (TypeError, ValueError):
        raise ValueError(f"{name} {shown(value)} is not taken; accepted: {accepted}") from None


def length(name: str, value: Any) -> int:
    """A whole number, 0 or more."""
    found = whole(name, value)
    if found < 0:
        raise ValueError(f"{name} {found} is out of range; it must be 0 or more")
    return found


def sides(value: Any) -> tuple[int, int]:
    """window_size: a pair of counts, in a tensor, too."""
    pair = value if isinstance(value, tuple | list) else None
    if pair is None and getattr(value, "ndim", None) == 1:
        pair = value.tolist()
    try:
        left, right = (whole("window_size", side) for side in pair)  # type: ignore[union-attr]
    except (TypeError, ValueError):
        raise ValueError(f"window_size {shown(value)} is out of range; it must be {PAIRS}") from None
    check_mask(False, (left, right), "window_size")
    return left, right


def number(name: str, value: Any, accepted: str) -> float:
    """A number of any kind; whether it is in range the kernels' checks say."""
    try:
        if isinstance(value, str):
            raise TypeError
        return float(value)
    except (TypeError, ValueError):
        raise ValueError(f"{name} {shown(value)} is not taken; accepted: {accepted}") from None


def scale_of(value: Any) -> float | None:
    """softmax_scale, None for head_dim**-0.5."""
    return None if value is None else number("softmax_scale", value, "a number greater than 0, or None")


def cap_of(value: Any) -> float:
    """softcap."""
    return number("softcap", value, "a number greater than 0, or 0 for none")


def shown(value: Any) -> str:
    """In one line: dtype and shape, or a value as it is written, where that is short, else its type."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    written = repr(value)
    return written if len(written) <= 60 and "\n" not in written else f"of type {type(value).__name__}"
