"""How far attention is from fp64, by dtype, length and range of scores: measured, not judged.

    for row in rows(Grid(...), target): ...

The reference knows no dtype: it is fp64 attention of fp32 inputs, before a dtype rounds them, so that an
error holds all that the dtype costs. ``input_rmse`` is what rounding the inputs costs by itself: fp64
attention of the rounded ones. Queries are few (``Grid.queries``) and keys are many: a query's row depends on
no other, so a sample of them shows what a million would, in bounded memory.

Source: the distribution with outliers and the RMSE are those of FlashAttention-3 (arXiv:2407.08608), 4.3.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashbench import environment, kernels, plan, units
from flashbench.errors import RAISED, in_words
from flashbench.kernels import Implementation, Target
from flashbench.problem import Cell, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

DTYPES = ("fp32", "tf32", "fp16", "bf16", "fp8")

RANGES = {
    "plain": "q, k and v are N(0, 1)",
    "outliers": "q, k and v are N(0, 1) + N(0, 100)·Bernoulli(0.001), 100 a variance",
    "large": "q is 30·N(0, 1): scores have a deviation of 30, and few keys take all the weight",
}
"""What the inputs are drawn from, by name."""

LARGE = 30.0
FP8_WAYS = (("tensor", False), ("block", True))
"""What shares an fp8 scale, and whether q and k are rotated: the plainest way, and FlashAttention-3's."""

IN_FP8 = {"flash": "flash-fp8", "flash-fp8": "flash-fp8"}
"""Which implementation an implementation's name stands for in fp8; others have none."""

CHUNK = {"cpu": 2**12, "cuda": 2**16}
"""Keys that the reference takes at a time, in fp64."""


@dataclass(frozen=True, kw_only=True)
class Grid:
    """What to measure. seqlens: keys; queries: rows that are compared; one batch, not causal."""

    impls: tuple[str, ...]
    dtypes: tuple[str, ...]
    seqlens: tuple[int, ...]
    ranges: tuple[str, ...]
    head_dim: int
    heads: int
    queries: int
    seed: int = 0

    def problems(self, seqlen: int) -> list[Problem]:
        """The problems of one length, by dtype; fp8 has one for each of FP8_WAYS."""
        found = []
        for dtype in self.dtypes:
            for share, turn in FP8_WAYS if dtype == "fp8" else (("", False),):
                found.append(
                    Problem(
                        batch=1, num_heads=self.heads, num_kv_heads=self.heads, seqlen_q=self.queries,
                        seqlen_k=seqlen, head_dim=self.head_dim, head_dim_v=self.head_dim, causal=False,
                        dtype=dtype, fp8_scale=share, hadamard=turn,
                    )
                )  # fmt: skip
        return found

    def cells(self, seqlen: int) -> list[Cell]:
        """The cells of one length: each problem with those who have it, in the order of the names."""
        return [
            Cell(implementation=name, problem=problem, pass_="fwd")
            for problem in self.problems(seqlen)
            for name in dict.fromkeys(self._taking(problem.dtype))
        ]

    def _taking(self, dtype: str) -> list[str]:
        if dtype == "fp8":
            return [IN_FP8[name] for name in self.impls if name in IN_FP8]
        return [name for name in self.impls if name != IN_FP8["flash"]]

    @property
    def count(self) -> int:
        """Rows in all."""
        return len(self.ranges) * sum(len(self.cells(seqlen)) for seqlen in self.seqlens)


def rows(
    grid: Grid, target: Target, begin: Callable[[str], None] = lambda _: None
) -> Iterator[dict[str, Any]]:
    """A row for each range, length and cell; begin hears what starts.

    Keys: range, implementation, backend, dtype, fp8_scale, hadamard, seqlen_k, seqlen_q, num_heads, head_dim,
    status (``ok``, ``nonfinite``, or one of record.STATUSES), reason; and, absent where nothing ran, rmse,
    max_abs_error, input_rmse, and reference_rms, the root mean square of what is right.
    """
    for range_ in grid.ranges:
        for seqlen in grid.seqlens:
            yield from _length(grid, range_, seqlen, target, begin)


def _length(
    grid: Grid, range_: str, seqlen: int, target: Target, begin: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    import torch

    cells = grid.cells(seqlen)
    drawn: _Drawn | None = None
    reason = _does_not_fit(cells, target)
    for cell in cells:
        begin(f"{range_} {cell.key}")
        row = _identity(range_, cell)
        implementation = kernels.get(cell.implementation)
        if refusal := plan.refuses(implementation, cell, target) or (reason and ("skipped", reason)):
            yield {**row, "status": refusal[0], "reason": refusal[1]}
            continue
        try:
            with torch.no_grad():
                drawn = drawn or _Drawn(grid, range_, seqlen, target.device)
                yield {**row, **drawn.measure(implementation, cell)}
        except RAISED as error:  # an implementation raises whatever it likes; the others go on
            status = "oom" if type(error).__name__ == "OutOfMemoryError" else "failed"
            yield {**row, "status": status, "reason": in_words(error)}


def _identity(range_: str, cell: Cell) -> dict[str, Any]:
    p = cell.problem
    return {
        "range": range_, "implementation": cell.implementation, "backend": None, "dtype": p.dtype,
        "fp8_scale": p.fp8_scale, "hadamard": p.hadamard, "seqlen_k": p.seqlen_k, "seqlen_q": p.seqlen_q,
        "num_heads": p.num_heads, "head_dim": p.head_dim,
    }  # fmt: skip


def _does_not_fit(cells: Sequence[Cell], target: Target) -> str | None:
    """Why a length cannot be measured: its fp32 inputs, twice, and the hungriest of its cells must fit."""
    free = environment.free_bytes(target)
    if free is None or not cells:
        return None
    drawn = plan.resident_bytes(replace(cells[0].problem, dtype="fp32", fp8_scale="", hadamard=False))
    needs = 2 * drawn + max(plan.needs_bytes(cell, target) for cell in cells)
    if needs <= free:
        return None
    return f"needs {units.format_bytes(needs)} of memory, {units.format_bytes(free)} free"


class _Drawn:
    """The inputs of one range and length in fp32, and fp64 attention of them."""

    def __init__(self, grid: Grid, range_: str, seqlen: int, device: str) -> None:
        self.q, self.k, self.v = draw(grid, range_, seqlen, device)
        self.reference = exact(self.q, self.k, self.v)
        self._input_rmse: dict[tuple[str, str, bool], float] = {}

    def measure(self, implementation: Implementation, cell: Cell) -> Mapping[str, Any]:
        """The errors of one cell."""
        p = cell.problem
        inputs = self._inputs(p)
        with implementation.context(p):
            call = implementation.prepare(p, inputs)
            backend = implementation.backend(call)
            o = call()
        found: dict[str, Any] = {
            "backend": backend,
            "reference_rms": _rms(self.reference),
            "input_rmse": self._rounding(p),
        }
        if not bool(o.isfinite().all()):
            return {**found, "status": "nonfinite", "reason": "o has infinities or NaNs"}
        error = o.double() - self.reference
        return {
            **found, "status": "ok", "reason": None, "rmse": _rms(error),
            "max_abs_error": float(error.abs().max()),
        }  # fmt: skip

    def _inputs(self, problem: Problem) -> Inputs:
        """As the implementation gets them: rounded to 16 bits, or in fp32; fp8 is rounded by prepare."""
        import torch

        from flashbench.kernels._inputs import Inputs
        from flashbench.kernels._precision import input_dtype

        dtype = torch.float32 if problem.dtype_bytes == 1 else input_dtype(problem)
        q, k, v = (x.to(dtype) for x in (self.q, self.k, self.v))
        return Inputs(q=q, k=k, v=v, dout=q)

    def _rounding(self, problem: Problem) -> float:
        """RMSE of fp64 attention of the rounded inputs; tf32 stores fp32, so that its inputs lose nothing."""
        key = problem.dtype, problem.fp8_scale, problem.hadamard
        if key not in self._input_rmse:
            from flashbench.kernels import _fp8

            inputs = self._inputs(problem)
            inputs = _fp8.rounded(problem, inputs) if problem.dtype_bytes == 1 else inputs
            self._input_rmse[key] = _rms(exact(inputs.q, inputs.k, inputs.v) - self.reference)
        return self._input_rmse[key]


def draw(grid: Grid, range_: str, seqlen: int, device: str) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in fp32, (1, heads, queries or seqlen, head_dim), as RANGES says; of the seed alone."""
    import torch

    generator = torch.Generator(device=device).manual_seed(grid.seed)

    def one(length: int) -> Tensor:
        shape = (1, grid.heads, length, grid.head_dim)
        x = torch.randn(shape, generator=generator, device=device)
        if range_ == "outliers":
            rare = torch.rand(shape, generator=generator, device=device) < 0.001
            x += torch.randn(shape, generator=generator, device=device).mul_(10 * rare)
        return x

    q, k, v = one(grid.queries), one(seqlen), one(seqlen)
    return q * LARGE if range_ == "large" else q, k, v


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """softmax(q kᵀ / sqrt(head_dim)) v in fp64, (1, heads, queries, head_dim), keys in chunks."""
    import torch

    q = q.double() * q.shape[3] ** -0.5
    acc = torch.zeros(*q.shape[:3], v.shape[3], dtype=torch.float64, device=q.device)
    total = torch.zeros(*q.shape[:3], 1, dtype=torch.float64, device=q.device)
    top = torch.full_like(total, float("-inf"))
    step = CHUNK[q.device.type]
    for keys, values in zip(k.split(step, 2), v.split(step, 2), strict=True):
        scores = q @ keys.double().mT
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        weights = scores.sub_(new_top).exp_()
        shrink = (top - new_top).exp()
        acc = acc * shrink + weights @ values.double()
        total = total * shrink + weights.sum(-1, keepdim=True)
        top = new_top
    return acc / total


def _rms(x: Tensor) -> float:
    return float(x.double().square().mean().sqrt())
