"""What each bundled kernel would be launched with, written down without compiling: rows of the exact gate.

    rows(Grid(…)) -> [{"cell": "flash-v2 dkdv half d128", "archs": ["sm_80", …], "block_q": 32, …}, …]

A row is a kernel's configuration and where it is the choice. A cell names its mask, its length and which of
fp16 and bf16 it is of (else both are ``half``) only where some configuration of that kernel depends on it,
and architectures of one configuration share a row: a row for each would be thirty times as many lines.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

from flashbench._profilers.occupancy import LIMITS
from flashbench._profilers.static import SHAPE, architecture
from flashbench.flash_configs import math_of
from flashbench.kernels import Target, _defaults
from flashbench.problem import Problem


@dataclass(frozen=True, kw_only=True)
class Grid:
    """Where to look. seqlens: of queries and keys, one of each length class; capabilities: of the cards."""

    implementations: tuple[str, ...]
    seqlens: tuple[int, ...]
    head_dims: tuple[int, ...]
    dtypes: tuple[str, ...]
    causal: tuple[bool, ...]
    passes: tuple[str, ...]
    capabilities: tuple[tuple[int, int], ...]


class _Point(NamedTuple):
    """Where a kernel has a configuration; mask and length are empty where they make no difference."""

    dtype: str
    head_dim: str
    mask: str
    length: str
    arch: str


Configs = dict[_Point, dict[str, int]]
"""The numbers of one kernel, point by point."""


def rows(grid: Grid) -> list[dict[str, Any]]:
    """Every kernel's configurations, in the order of the grid."""
    return [row for name in grid.implementations for row in _rows_of(name, grid)]


def _rows_of(name: str, grid: Grid) -> Iterator[dict[str, Any]]:
    for kernel, configs in _found(name, grid).items():
        for axis, coarser in _COARSER.items():
            configs = _told_by(coarser, axis, configs)
        shared: dict[tuple[Any, ...], dict[str, Any]] = {}
        for point, numbers in configs.items():
            words = name, kernel, point.dtype, point.head_dim, point.mask, point.length
            cell = " ".join(filter(None, words))
            row = {"cell": cell, "status": "ok", "archs": [], **numbers}
            shared.setdefault((cell, *numbers.items()), row)["archs"].append(point.arch)
        yield from shared.values()


def _found(name: str, grid: Grid) -> dict[str, Configs]:
    """By kernel, its configuration at every point where it has one."""
    found: dict[str, Configs] = {}
    axes = product(grid.dtypes, grid.head_dims, grid.causal, grid.seqlens)
    for dtype, dim, causal, length in axes:
        shape = {**SHAPE, "seqlen_q": length, "seqlen_k": length}
        problem = Problem(**shape, head_dim=dim, head_dim_v=dim, dtype=dtype, causal=causal)
        for capability, pass_ in product(grid.capabilities, grid.passes):
            card = Target(
                device="cuda", name=architecture(capability), capability=capability,
                smem_per_block_bytes=LIMITS[capability].smem_per_block_bytes,
            )  # fmt: skip
            point = _Point(dtype, f"d{dim}", "causal" if causal else "full", f"n{length}", card.name)
            for kernel, numbers in _defaults.found(name, problem, pass_, card).items():
                found.setdefault(kernel, {})[point] = numbers
    return found


def _told_by(coarser: Callable[[str], str], axis: str, configs: Configs) -> Configs:
    """The same with coarser values of the axis, where at every point those decide; else as it is."""
    values = {getattr(point, axis) for point in configs}
    merged: dict[_Point, list[dict[str, int]]] = {}
    for point, numbers in configs.items():
        merged.setdefault(point._replace(**{axis: coarser(getattr(point, axis))}), []).append(numbers)
    whole = Counter(map(coarser, values))
    alike = all(
        len(found) == whole[getattr(point, axis)] and all(one == found[0] for one in found)
        for point, found in merged.items()
    )
    return {point: found[0] for point, found in merged.items()} if alike else configs


_COARSER: Mapping[str, Callable[[str], str]] = {
    "length": lambda _: "", "mask": lambda _: "", "dtype": math_of
}  # fmt: skip
