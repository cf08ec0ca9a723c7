"""Standard attention as eager PyTorch runs it: the score matrix S and the probabilities P in memory.

Every op reads each operand once and writes each result once. That is what DRAM sees while P is far
larger than L2; the tiles of a matrix product ask L2 for more, by the library's choice, which is not
counted. A causal mask saves nothing. The ops, and what is alive beside what, are those of the
implementation ``naive``; query rows without keys take no part and are filled with zeros.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from flashbench._iomodel.tensors import sizes
from flashbench._iomodel.types import Step, Tiles, Work
from flashbench.problem import Problem

ASSUMPTIONS = (
    "eager PyTorch op by op; each op reads its operands and writes its result once (re-reads by the"
    " tiles of a matrix product are not counted); score matrices in the input dtype"
)
MASK_BYTES = 1


class _Operands(NamedTuple):
    """Bytes of the ops' operands; q, o, scores over the query rows that see a key.

    full_q, full_o: with all rows. k, v: as the products read them, once per query head.
    group: query heads per K/V head. pairs: elements of the score matrices.
    """

    q: int
    o: int
    scores: int
    mask: int
    full_q: int
    full_o: int
    k: int
    v: int
    group: int
    pairs: int

    @property
    def expanded(self) -> int:
        """Bytes of the copies of K and V per query head; 0 for MHA."""
        return self.k + self.v if self.group > 1 else 0

    @property
    def suffix(self) -> str:
        """What the names of K, V and their gradients end in where they exist per query head."""
        return "_heads" if self.group > 1 else ""


def _operands(p: Problem) -> _Operands:
    s = sizes(p)
    rows = p.seqlen_q - p.rows_without_keys
    pairs = p.batch * p.num_heads * rows * p.seqlen_k
    return _Operands(
        q=s.q // p.seqlen_q * rows,
        o=s.o // p.seqlen_q * rows,
        scores=pairs * p.dtype_bytes,
        mask=rows * p.seqlen_k * MASK_BYTES,
        full_q=s.q,
        full_o=s.o,
        k=s.k_heads,
        v=s.v_heads,
        group=p.group,
        pairs=pairs,
    )


def forward(problem: Problem, _: Mapping[str, Tiles]) -> Work:
    """(q·scale)Kᵀ, masked_fill_ if causal, softmax, PV: 2P read and 2P written, and terms of O(seqlen).

    Source: FlashAttention (arXiv:2205.14135), Algorithm 0, in the ops that torch launches.
    """
    p, t = problem, _operands(problem)
    keys, values = "k" + t.suffix, "v" + t.suffix
    steps = []
    if t.expanded:
        read = {"k": t.k // t.group, "v": t.v // t.group}
        steps.append(Step(name="repeat k, v", read=read, write={keys: t.k, values: t.v}))
    steps.append(Step(name="scale q", read={"q": t.q}, write={"q_scaled": t.q}))
    qk, pv = 2 * t.pairs * p.head_dim, 2 * t.pairs * p.head_dim_v
    steps.append(Step(name="qk", read={"q_scaled": t.q, keys: t.k}, write={"s": t.scores}, flops=qk))
    if p.causal:
        steps.append(Step(name="mask", read={"s": t.scores, "mask": t.mask}, write={"s": t.scores}))
    steps.append(Step(name="softmax", read={"s": t.scores}, write={"p": t.scores}, exps=t.pairs))
    steps.append(Step(name="pv", read={"p": t.scores, values: t.v}, write={"o": t.o}, flops=pv))
    padding = t.full_o - t.o
    if padding:
        read = {"o": t.o, "zeros": padding}
        steps.append(Step(name="pad o", read=read, write={"zeros": padding, "o": t.full_o}))
    last = t.scores + t.o + (padding + t.full_o if padding else 0)
    saved = t.scores + t.q + t.expanded  # p, q_scaled, and k, v per query head
    return Work(
        steps=tuple(steps),
        # s beside q_scaled, then beside p, then p beside o
        extra_bytes=t.expanded + max(t.scores + t.q, 2 * t.scores, last),
        saved_bytes=saved,
        held_bytes=saved + t.full_o,
    )


def backward(problem: Problem, _: Mapping[str, Tiles]) -> Work:
    """dP, dV, softmax backward, dQ, dK from the saved P: 7P read and 3P written without a mask.

    torch computes the softmax backward in two kernels, dP·P and then the row sums: 4P read and 2P
    written where one kernel would need 2P and P. masked_fill's backward is a copy and a fill: 2P, 2P.
    """
    p, t = problem, _operands(problem)
    dk, dv = "dk" + t.suffix, "dv" + t.suffix
    qk, pv = 2 * t.pairs * p.head_dim, 2 * t.pairs * p.head_dim_v
    one = t.scores
    steps = [
        Step(name="dp", read={"do": t.o, "v" + t.suffix: t.v}, write={"dp": one}, flops=pv),
        Step(name="dv", read={"p": one, "do": t.o}, write={dv: t.v}, flops=pv),
        Step(name="softmax backward: dp·p", read={"dp": one, "p": one}, write={"dp_p": one}),
        Step(name="softmax backward: rows", read={"dp_p": one, "p": one}, write={"ds": one}),
    ]
    if p.causal:
        steps.append(Step(name="mask backward: copy", read={"ds": one}, write={"ds": one}))
        steps.append(Step(name="mask backward: fill", read={"ds": one, "mask": t.mask}, write={"ds": one}))
    steps += [
        Step(name="dq", read={"ds": one, "k" + t.suffix: t.k}, write={"dq_scaled": t.q}, flops=qk),
        Step(name="dk", read={"ds": one, "q_scaled": t.q}, write={dk: t.k}, flops=qk),
        Step(name="scale dq", read={"dq_scaled": t.q}, write={"dq": t.q}),
    ]
    if t.full_q > t.q:
        steps.append(Step(name="pad dq", read={"dq": t.q}, write={"dq": t.full_q + t.q}))
    if t.expanded:
        write = {"dk": t.k // t.group, "dv": t.v // t.group}
        steps.append(Step(name="sum dk, dv", read={dk: t.k, dv: t.v}, write=write))
    extra, joined = _backward_peaks(t)
    return Work(steps=tuple(steps), extra_bytes=extra, joined_extra_bytes=joined)


def _backward_peaks(t: _Operands) -> tuple[int, int]:
    """Most alive at once beyond what was: with the graph kept, and with the graph freed on the way.

    Each stage: what is alive, and what of the forward's a freed graph has given back by then.
    """
    padded = t.full_q if t.full_q > t.q else 0
    values = t.v if t.expanded else 0
    stages = [
        (t.v + 3 * t.scores, values),  # softmax backward: dv, dp, dp·p, ds
        (t.v + t.scores + t.q + t.k, values + t.scores),  # dq and dk from ds
        (t.v + t.k + 2 * t.q, t.expanded + t.scores + t.q),  # scale dq
        (t.v + t.k + t.q + padded, t.expanded + t.scores + t.q),
    ]
    if t.expanded:
        sums = t.k + t.v + (padded or t.q) + t.v // t.group
        stages.append((sums, t.expanded + t.scores + t.q))
        stages.append((sums - t.v + t.k // t.group, t.expanded + t.scores + t.q))
    return max(alive for alive, _ in stages), max(alive - freed for alive, freed in stages)
