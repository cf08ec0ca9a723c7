"""From which length on an alternative costs less than exact attention, found numerically in the model.

    crossover.length("linformer", problem, "flops") -> Crossover

Both sides are the model's own counts, with every tile rounded; the closed-form crossings of
docs/io-model.md are their limits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from flashbench import iomodel
from flashbench._iomodel import alternatives
from flashbench._iomodel.types import Estimate
from flashbench.errors import SpecError, UnknownName
from flashbench.problem import Problem

QUANTITIES: dict[str, Callable[[Estimate], int]] = {
    "flops": lambda row: row.done_flops,
    "exps": lambda row: row.exps,
    "requested": lambda row: row.requested.total_bytes,
    "compulsory": lambda row: row.compulsory.total_bytes,
    "extra": lambda row: row.extra_bytes,
}
"""What can be compared: FLOPs and exponentials done, bytes by level, peak memory."""

WORDS = {"flops": "fewer FLOPs", "exps": "fewer exps", "requested": "fewer requested bytes",
         "compulsory": "fewer compulsory bytes", "extra": "less extra memory"}  # fmt: skip

SHORTEST, LONGEST = 16, 2**24
SETTLED = 128
"""Lengths above a crossing that are looked at one by one: tiles make the counts a saw."""


@dataclass(frozen=True, kw_only=True)
class Crossover:
    """seqlen: from this length on ``model`` needs less of ``quantity`` than ``against``.

    SHORTEST where it always does, None where it does not up to LONGEST.
    """

    model: str
    against: str
    quantity: str
    seqlen: int | None

    def __str__(self) -> str:
        what = WORDS[self.quantity]
        if self.seqlen is None:
            return f"never {what}"
        return f"{what} " + ("at any length" if self.seqlen == SHORTEST else f"from {self.seqlen:,} on")


def length(model: str, problem: Problem, quantity: str, *, against: str = "flash-v2") -> Crossover:
    """Where the alternative starts to need less, with the problem's batch, heads, head dims and dtype.

    Raises UnknownName for an unknown name and SpecError where the alternative covers no such problem.
    """
    if quantity not in QUANTITIES:
        raise UnknownName("quantity", quantity, QUANTITIES)
    value = QUANTITIES[quantity]

    def less(seqlen: int) -> bool:
        at = replace(problem, seqlen_q=seqlen, seqlen_k=seqlen)
        other = value(iomodel.estimate(against, at, "fwd"))
        return value(alternatives.estimate(model, at, "fwd")) < other

    return Crossover(
        model=alternatives.find(model).name, against=against, quantity=quantity, seqlen=_first(less)
    )


def _first(less: Callable[[int], bool]) -> int | None:
    """The length from which on ``less`` holds: the last doubling where it does not, then a bisection."""
    lengths = [SHORTEST]
    while lengths[-1] < LONGEST:
        lengths.append(2 * lengths[-1])
    failing = [length for length in lengths if not less(length)]
    if not failing:
        return SHORTEST
    low = failing[-1]
    if low == LONGEST:
        return None
    high = 2 * low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if less(middle) else (middle, high)
    while later := [length for length in range(high + 1, high + SETTLED) if not less(length)]:
        high = later[-1] + 1
    return high


def decode_length(model: str, problem: Problem) -> int:
    """Cached tokens from which on a decode step reads more keys and values than the model's state.

    Per layer: keys and values are num_kv_heads · (head_dim + head_dim_v) numbers of the dtype per
    token, the state is fp32 and of fixed size. Raises SpecError for a model without such a state.
    """
    method = alternatives.find(model).method
    state = getattr(method, "decode_bytes", None)
    if state is None:
        raise SpecError(
            f"model {model!r} has no state of fixed size; accepted: linear-attention, mamba, mamba2"
        )
    token = problem.num_kv_heads * (problem.head_dim + problem.head_dim_v) * problem.dtype_bytes
    return int(state(problem)) // token + 1
