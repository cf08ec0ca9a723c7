"""Attention across cards: bytes over the link, to the byte, and whether compute hides them.

    sent("ring", problem, "fwd", ranks=2)[0] -> {"k": …, "v": …}, bytes that rank 0 sends
    across("ring", problem, "fwd", ranks=2, device=device, link="nvlink") -> Across

Every rank holds its shard of q, k, v, o and of their gradients. docs/ring.md derives the equations; what
``flashbench ring`` counts while it sends is the same to the byte (tests/test_ring.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from flashbench import links
from flashbench._iomodel import shards
from flashbench.errors import SpecError, UnknownName
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

ALGORITHMS = ("ring", "ulysses", "allgather")
"""Ring Attention (Liu et al. 2023, arXiv:2310.01889), DeepSpeed-Ulysses (Jacobs et al. 2023,
arXiv:2309.14509), and K/V gathered by everybody (Llama 3, arXiv:2407.21783, section 3.3.2)."""

SUM_BYTES = 4
"""Gradients of K and V that travel to be added up are fp32."""


def zigzag(algorithm: str, problem: Problem) -> bool:
    """Whether the shards are zigzag: for a causal mask, but not of Ulysses, which sees whole sequences."""
    return problem.causal and algorithm != "ulysses"


def shards_of(algorithm: str, problem: Problem, ranks: int) -> tuple[shards.Shard, ...]:
    """The rows of each rank."""
    return shards.shards(problem.seqlen_q, ranks, zigzag=zigzag(algorithm, problem))


def kv_heads(problem: Problem, ranks: int, rank: int) -> range:
    """Of Ulysses: the K/V heads that a rank's query heads use; ranks share one where there are more ranks."""
    count = problem.num_heads // ranks
    return range(rank * count // problem.group, -(-(rank + 1) * count // problem.group))


def why_unsupported(algorithm: str, problem: Problem, ranks: int) -> str | None:
    """Why the algorithm does not take the problem on so many ranks, one sentence, or None."""
    p = problem
    if p.seqlen_q != p.seqlen_k:
        return f"queries and keys are cut alike, but there are {p.seqlen_q} and {p.seqlen_k}"
    if p.features or p.dtype == "tf32":
        return f"it does not take {', '.join(sorted(p.features)) or 'tf32'}"
    if p.seqlen_q < 2 * ranks:
        return f"{p.seqlen_q} rows cannot be cut for {ranks} ranks; it needs {2 * ranks} or more"
    if algorithm == "ulysses":
        if p.num_heads % ranks:
            return f"{p.num_heads} query heads are not divisible by {ranks} ranks"
        if p.num_kv_heads % ranks and ranks % p.num_kv_heads:
            return f"{p.num_kv_heads} K/V heads and {ranks} ranks: neither divides the other"
    return None


def sent(algorithm: str, problem: Problem, pass_: str, ranks: int) -> tuple[dict[str, int], ...]:
    """Bytes that each rank sends to others, by tensor. Raises UnknownName, SpecError for what it refuses."""
    _check(algorithm, problem, ranks)
    return tuple(_sent_by(algorithm, problem, pass_, ranks, rank) for rank in range(ranks))


def most_sent(algorithm: str, problem: Problem, pass_: str, ranks: int) -> dict[str, int]:
    """Of ``sent`` that of the rank that sends most; ranks of as many rows before ranks of as many send alike.

    Raises as ``sent`` does.
    """
    _check(algorithm, problem, ranks)
    own = [shards.length(shard) for shard in shards_of(algorithm, problem, ranks)]
    kinds = dict(zip(zip(own, own[1:] + own[:1], strict=True), range(ranks), strict=True))
    found = (_sent_by(algorithm, problem, pass_, ranks, rank) for rank in kinds.values())
    return max(found, key=lambda sizes: sum(sizes.values()))


def _check(algorithm: str, problem: Problem, ranks: int) -> None:
    if algorithm not in _SENT:
        raise UnknownName("algorithm", algorithm, ALGORITHMS)
    if reason := why_unsupported(algorithm, problem, ranks):
        raise SpecError(f"{algorithm} of {problem.key} on {ranks} ranks: {reason}")


def _sent_by(algorithm: str, problem: Problem, pass_: str, ranks: int, rank: int) -> dict[str, int]:
    total: dict[str, int] = {}
    for kind in pass_.split("+"):
        for name, count in _SENT[algorithm](problem, kind == "bwd", ranks, rank).items():
            total[name] = total.get(name, 0) + count
    return total


def _widths(problem: Problem) -> dict[str, int]:
    """Bytes of one row of all heads of k and v."""
    row = problem.batch * problem.num_kv_heads * problem.dtype_bytes
    return {"k": row * problem.head_dim, "v": row * problem.head_dim_v}


def _sums(problem: Problem, rows: int) -> dict[str, int]:
    """Gradients of k and v of so many rows, to be added up elsewhere."""
    wider = SUM_BYTES // problem.dtype_bytes
    return {f"d{name}": rows * width * wider for name, width in _widths(problem).items()}


def _ring(p: Problem, backward: bool, ranks: int, rank: int) -> dict[str, int]:
    """K and V of every shard but the one that the next rank begins with; of gradients all but the own."""
    cut = shards_of("ring", p, ranks)
    passed = p.seqlen_k - shards.length(cut[(rank + 1) % ranks])
    found = {name: passed * width for name, width in _widths(p).items()}
    return found | _sums(p, p.seqlen_k - shards.length(cut[rank])) if backward else found


def _allgather(p: Problem, backward: bool, ranks: int, rank: int) -> dict[str, int]:
    """The own K and V, as long as the longest, to all others; of gradients each its own rows."""
    cut = shards_of("allgather", p, ranks)
    found = {name: (ranks - 1) * shards.longest(cut) * width for name, width in _widths(p).items()}
    return found | _sums(p, p.seqlen_k - shards.length(cut[rank])) if backward else found


def _ulysses(p: Problem, backward: bool, ranks: int, rank: int) -> dict[str, int]:
    """Own rows of others' heads there, and others' rows of own heads back."""
    rows = shards.length(shards_of("ulysses", p, ranks)[rank])
    rest, heads = p.seqlen_q - rows, p.num_heads // ranks
    q_there = p.batch * rows * (p.num_heads - heads) * p.dtype_bytes
    q_back = p.batch * rest * heads * p.dtype_bytes
    shared = len(kv_heads(p, ranks, rank))  # every rank uses as many
    kv_there = p.batch * rows * (ranks - 1) * shared * p.dtype_bytes
    kv_back = p.batch * rest * shared * p.dtype_bytes
    d, dv = p.head_dim, p.head_dim_v
    if backward:
        return {"do": q_there * dv, "dq": q_back * d, "dk": kv_back * d, "dv": kv_back * dv}
    return {"q": q_there * d, "k": kv_there * d, "v": kv_there * dv, "o": q_back * dv}


_SENT = {"ring": _ring, "ulysses": _ulysses, "allgather": _allgather}


@dataclass(frozen=True, kw_only=True)
class Across:
    """One algorithm on so many cards; seconds are None without a card.

    link_bytes: what the rank that sends most sends, by tensor. share: of all pairs, those of the busiest
    rank. one_card_s: the pass on one card; compute_s: the busiest rank's share of it; link_s: all its
    bytes at the link's rate; time_s: with as much of the one behind the other as the algorithm allows.
    hidden: whether all of it is but for what nothing is left to hide behind (``exposed_s``). hidden_from:
    tokens of the whole sequence from which on a step takes as long as its hop.
    """

    algorithm: str
    problem: Problem
    pass_: str
    ranks: int
    link_bytes: Mapping[str, int]
    share: float
    link: str | None = None
    one_card_s: float | None = None
    compute_s: float | None = None
    link_s: float | None = None
    time_s: float | None = None
    exposed_s: float | None = None
    hidden: bool | None = None
    hidden_from: int | None = None

    @property
    def total_bytes(self) -> int:
        """All tensors together."""
        return sum(self.link_bytes.values())

    @property
    def efficiency(self) -> float | None:
        """Time of one card over that of all, times their number."""
        if self.time_s is None or self.one_card_s is None:
            return None
        return self.one_card_s / (self.ranks * self.time_s)


def across(
    algorithm: str, problem: Problem, pass_: str, *, ranks: int, device: Device | None = None, link: str = ""
) -> Across:
    """The model's word on one pass. link: of links.KINDS, empty for the fastest that the card has.

    Raises UnknownName and SpecError as ``sent`` does, SpecError for a link or a dtype that the card lacks.
    """
    row = Across(
        algorithm=algorithm, problem=problem, pass_=pass_, ranks=ranks,
        link_bytes=most_sent(algorithm, problem, pass_, ranks), share=share(algorithm, problem, ranks),
    )  # fmt: skip
    return row if device is None else _timed(row, device, link)


def share(algorithm: str, problem: Problem, ranks: int) -> float:
    """Of all visible pairs, those of the busiest rank."""
    if algorithm == "ulysses":
        return 1 / ranks
    cut, p = shards_of(algorithm, problem, ranks), problem
    if not p.causal:
        return max(map(shards.length, cut)) / p.seqlen_q
    # row i sees i + 1 keys
    most = max(sum(stop * (stop + 1) - start * (start + 1) for start, stop in mine) // 2 for mine in cut)
    return most * p.batch * p.num_heads / p.visible_pairs


def local_model(problem: Problem, device: Device) -> str:
    """The model of the bundled kernels that run the local steps there."""
    half = problem.dtype in ("fp16", "bf16")
    return "flash-v3-gluon" if device.capability == (9, 0) and half else "flash"


def _timed(row: Across, device: Device, link: str) -> Across:
    from flashbench import iomodel

    kind = link or links.of(device.name).fastest
    rate = links.of(device.name).rate(kind)
    p, ranks, ringed = row.problem, row.ranks, row.algorithm == "ring" and row.ranks > 1
    alone, compute, moved, time, exposed, ratio = 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for pass_ in row.pass_.split("+"):
        one = iomodel.predict(
            iomodel.estimate(local_model(p, device), p, pass_, device=device), device
        ).time_s
        local = one * row.share
        sizes = most_sent(row.algorithm, p, pass_, ranks)
        sums = sum(count for name, count in sizes.items() if name in ("dk", "dv")) / rate
        rest = sum(sizes.values()) / rate - sums
        if ringed:
            all_, worst = _ring_s(local / ranks, rest / (ranks - 1), sums / (ranks - 1), ranks)
            ratio = max(ratio, worst)
        else:  # nothing to compute before all is there, and nothing after it left
            all_ = local + rest + sums
        alone, compute, moved = alone + one, compute + local, moved + rest + sums
        time, exposed = time + all_, exposed + all_ - local
    return replace(
        row, link=kind, one_card_s=alone, compute_s=compute, link_s=moved, time_s=time, exposed_s=exposed,
        hidden=ratio <= 1 if ringed else ranks == 1,
        hidden_from=max(1, round(p.seqlen_q * ratio)) if ringed else None,
    )  # fmt: skip


def _ring_s(step: float, hop: float, add: float, ranks: int) -> tuple[float, float]:
    """(seconds of a ring, what travels during a step over the step at the worst).

    step: one of ``ranks`` equal steps of compute. hop, add: of K and V, and of gradients. K and V for the
    next step travel during this one; a step's gradients during the next step, and those of the last during
    none.
    """
    travels = [(hop if s + 1 < ranks else 0.0) + (add if s > 1 else 0.0) for s in range(ranks)]
    return sum(max(step, moving) for moving in travels) + add, max(travels) / step
