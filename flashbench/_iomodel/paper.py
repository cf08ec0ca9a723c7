"""The paper's view: accesses as a function of M, the lower bound, and where the algorithms cross.

Everything counts elements per query head, as the papers do, with M in elements too. The Θ forms
leave constants out; the exact counts and the crossovers are those of the models.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from flashbench._iomodel import flash_v1, flash_v2, standard
from flashbench._iomodel.types import Work
from flashbench.errors import SpecError
from flashbench.problem import Problem

LIMITS = {"flash-v1": 3, "flash-v2": 1}
"""What M/d² exceeds at the crossover with standard, for long sequences and without row statistics."""


@dataclass(frozen=True, kw_only=True)
class PaperView:
    """One forward pass over one head with M elements of fast memory; all counts in elements.

    block_k, block_q: ⌈M/4d⌉ and min(block_k, d), cut to the lengths; passes: ⌈seqlen_k/block_k⌉.
    standard, flash_v1, flash_v2: the terms of Θ(Nd + N²) and Θ(N²d²/M) with the constants of the
    algorithms for long sequences (4N² + 4Nd, 12N²d²/M + 2Nd, 4N²d²/M + 2Nd). paper_v1: what the paper
    counts, 2Nd + passes·(3Nd + 4N). bound: min(N²d²/M, N²d/√M). regime: which of the two holds.
    covered: whether d ≤ M ≤ Nd, which the theorems assume. crossovers: the least M from which the
    exact model requests fewer bytes than standard, None where none does; limits: the same for long
    sequences, 3d² and d², empty for a problem for which these do not hold.
    """

    problem: Problem
    sram_elements: int
    block_q: int
    block_k: int
    passes: int
    standard: int
    flash_v1: float
    flash_v2: float
    paper_v1: int
    bound: float
    regime: str
    covered: bool
    crossovers: dict[str, int | None]
    limits: dict[str, int]


def paper_view(problem: Problem, sram_bytes: int) -> PaperView:
    """The theorems of FlashAttention and of Saha and Ye for a problem and a fast memory, in numbers.

    Sources: FlashAttention (arXiv:2205.14135), Algorithm 1, Theorems 1 and 2, Proposition 3; Saha and
    Ye 2024 (arXiv:2402.07443): N²d²/M is optimal for M ≥ d², below that N²d/√M. Raises SpecError for a
    block mask, whose theorem (Proposition 4) is of its density alone.
    """
    if problem.block_mask:
        raise SpecError(
            f"block mask {problem.block_mask!r}: the papers' view (--paper) has none; accepted: no block mask"
        )
    p, m = problem, max(1, sram_bytes // problem.dtype_bytes)
    tile = flash_v1.sram_tiles(p, "fwd", m)
    pairs, linear = p.seqlen_q * p.seqlen_k, (p.seqlen_q + p.seqlen_k) * p.head_dim
    d = p.head_dim
    passes = -(-p.seqlen_k // tile.block_k)
    return PaperView(
        problem=p,
        sram_elements=m,
        block_q=tile.block_q,
        block_k=tile.block_k,
        passes=passes,
        standard=4 * pairs + 2 * linear,
        flash_v1=12 * pairs * d * d / m + linear,
        flash_v2=4 * pairs * d * d / m + linear,
        paper_v1=2 * p.seqlen_k * d + passes * (3 * p.seqlen_q * d + 4 * p.seqlen_q),
        bound=lower_bound(p, m),
        regime="M >= d^2: N^2 d^2 / M" if m >= d * d else "M < d^2: N^2 d / sqrt(M)",
        covered=d <= m <= max(p.seqlen_q, p.seqlen_k) * d,
        crossovers={name: crossover(name, p) for name in LIMITS},
        limits={name: factor * d * d for name, factor in LIMITS.items()} if plain(p) else {},
    )


def plain(problem: Problem) -> bool:
    """Whether the papers' forms are of such a problem: seqlen_q = seqlen_k, one head dim, nothing else.

    Masks, windows and dropout change what standard and flash move by different amounts.
    """
    p = problem
    square = p.seqlen_q == p.seqlen_k and p.head_dim == p.head_dim_v
    return square and not (p.masked or p.dropout_p or p.lengths)


def lower_bound(problem: Problem, elements: int) -> float:
    """min(N²d²/M, N²d/√M) accesses per head, up to a constant, that no exact algorithm undercuts.

    N² is seqlen_q·seqlen_k; d the smaller head dim. Source: Saha and Ye 2024, arXiv:2402.07443.
    """
    pairs, d = problem.seqlen_q * problem.seqlen_k, min(problem.head_dim, problem.head_dim_v)
    return min(pairs * d * d / elements, pairs * d / math.sqrt(elements))


def crossover(name: str, problem: Problem) -> int | None:
    """The least M, in elements, at which a forward of flash-v1 or flash-v2 requests less than standard.

    One element less, and it requests as much or more. Exact: found by bisection over the models, with
    the tiles that M gives. None where it does not even with all that there is in fast memory.
    """
    choose, forward = _ALGORITHMS[name]

    def bytes_at(elements: int) -> int:
        return _requested(forward(problem, {"fwd": choose(problem, "fwd", elements)}))

    goal = _requested(standard.forward(problem, {}))
    longest, d = max(problem.seqlen_q, problem.seqlen_k), problem.head_dim + problem.head_dim_v
    high = 2 * longest * d
    if bytes_at(high) >= goal:
        return None
    low = 0
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if bytes_at(middle) < goal else (middle, high)
    return high


_ALGORITHMS: dict[str, tuple[Callable[..., object], Callable[..., Work]]] = {
    "flash-v1": (flash_v1.sram_tiles, flash_v1.forward),
    "flash-v2": (flash_v2.sram_tiles, flash_v2.forward),
}


def _requested(work: Work) -> int:
    return sum(sum(step.read.values()) + sum(step.write.values()) for step in work.steps)
