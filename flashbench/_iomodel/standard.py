"""Standard attention as eager PyTorch runs it: the score matrix S and the probabilities P in memory.

Every op reads each operand once and writes each result once. That is what DRAM sees while P is far
larger than L2; the tiles of a matrix product ask L2 for more, by the library's choice, which is not
counted. masked_fill asks for its boolean mask once per head; of the four scores that a thread takes, 128
apart, it reads the last one only where the mask leaves it (counted on an H100, torch 2.11:
docs/counters.md). A mask saves nothing else. NAIVE is the implementation ``naive``, op by op and with what
is alive beside what; query rows without keys take no part and are filled with zeros. A batch of
different lengths is padded to the longest and masked per sequence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from flashbench._iomodel.ledger import Ledger
from flashbench._iomodel.tensors import FP32, sizes
from flashbench._iomodel.types import Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench.problem import Problem, clamped_sum

ASSUMPTIONS = (
    "eager PyTorch op by op; each op reads its operands and writes its result once (re-reads by the"
    " tiles of a matrix product are not counted); score matrices in the input dtype"
)
HF_ASSUMPTIONS = (
    "eager PyTorch as Hugging Face writes it: scores scaled, mask added, softmax in fp32 and cast"
)
MINIMAL_ASSUMPTIONS = (
    "no op but the two products and the softmax, whose backward is one kernel; scaling and mask cost nothing"
)
FLAG = 1
"""Bytes of an element of a boolean mask, also of dropout's."""

_TAKEN, _APART = 4, 128
"""Elements that a thread of torch's elementwise kernels takes where an operand is broadcast, and how far
apart they are."""


@dataclass(frozen=True, kw_only=True)
class Style:
    """Which ops an eager implementation launches.

    scale: what is multiplied by softmax_scale: ``q``, ``scores``, or nothing (folded into a product).
    mask: ``fill_`` (masked_fill_ in place), ``fill`` (out of place: a copy and a fill), ``add`` (an
    additive mask in the input dtype, one per sequence), or nothing. wide_softmax: the softmax gives
    fp32, cast back. one_kernel_softmax: its backward is one kernel, not a product and a kernel.
    """

    scale: str = "q"
    mask: str = "fill_"
    wide_softmax: bool = False
    one_kernel_softmax: bool = False


NAIVE = Style()
ADDED = Style(mask="add")
HUGGING_FACE = Style(scale="scores", mask="add", wide_softmax=True)
MINIMAL = Style(scale="", mask="", one_kernel_softmax=True)


class _Operands(NamedTuple):
    """Bytes of the ops' operands; q, o, scores over the query rows that see a key.

    full_q, full_o: with all rows. k, v: as the products read them, once per query head. wide: scores
    in fp32. flags: a boolean per score. mask: as an op reads it, or 0; open: what masked_fill reads of the
    scores.
    """

    q: int
    o: int
    scores: int
    wide: int
    flags: int
    mask: int
    open: int
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


def _spared(p: Problem, pairs: int) -> int:
    """Of the pairs that masked_fill looks at, those whose score it does not read: masked, a thread's last.

    Where threads and rows of keys are in step those are columns; else a quarter of what is masked.
    """
    thread_block = _TAKEN * _APART
    if p.block_mask or p.lengths or p.seqlen_k % thread_block:
        return (pairs - p.visible_pairs) // _TAKEN
    last = pairs // _TAKEN
    return last - p.batch * p.num_heads * _seen_by_the_last(p.seqlen_q, p.seqlen_k, p.band)


@lru_cache(maxsize=256)
def _seen_by_the_last(seqlen_q: int, seqlen_k: int, band: tuple[int, int]) -> int:
    """Visible pairs of the columns of which each thread takes its last score."""
    low, high = band
    first = (_TAKEN - 1) * _APART
    # queries down to the lower edge of the band, less those above its upper edge, column by column
    return sum(
        clamped_sum(_APART, start - low + 1, seqlen_q) - clamped_sum(_APART, start - high, seqlen_q)
        for start in range(first, seqlen_k, _TAKEN * _APART)
    )


def _operands(p: Problem, style: Style) -> _Operands:
    s = sizes(p)
    rows = p.seqlen_q if p.lengths else p.seqlen_q - p.rows_without_keys
    pairs = p.batch * p.num_heads * rows * p.seqlen_k
    mask = 0
    if style.mask and (p.masked or p.lengths):
        mask = p.batch * rows * p.seqlen_k * p.dtype_bytes if style.mask == "add" else pairs * FLAG
    return _Operands(
        q=s.q // p.seqlen_q * rows,
        o=s.o // p.seqlen_q * rows,
        scores=pairs * p.dtype_bytes,
        wide=pairs * FP32 if style.wide_softmax and p.dtype_bytes < FP32 else 0,
        flags=pairs * FLAG if p.dropout_p else 0,
        mask=mask,
        open=(pairs - _spared(p, pairs)) * p.dtype_bytes,
        full_q=s.q,
        full_o=s.o,
        k=s.k_heads,
        v=s.v_heads,
        group=p.group,
        pairs=pairs,
    )


def forward(problem: Problem, _: Mapping[str, Tiles], __: Variant = DEFAULT, *, style: Style = NAIVE) -> Work:
    """(q·scale)Kᵀ, the mask, softmax, dropout, PV: 2P read and 2P written by the least of them.

    Source: FlashAttention (arXiv:2205.14135), Algorithm 0, in the ops that torch launches.
    """
    p, t, ledger = problem, _operands(problem, style), Ledger()
    keys, values = "k" + t.suffix, "v" + t.suffix
    if t.expanded:
        ledger.op("repeat k, v", {"k": t.k // t.group, "v": t.v // t.group}, {keys: t.k, values: t.v})
    query = "q"
    if style.scale == "q":
        query = "q_scaled"
        ledger.op("scale q", {"q": t.q}, {query: t.q})
    ledger.op("qk", {query: t.q, keys: t.k}, {"s": t.scores}, flops=2 * t.pairs * p.head_dim)
    ledger.free("q_scaled")
    last = _mask(ledger, t, style)
    drop = _softmax(ledger, t, last)
    padding = t.full_o - t.o
    seen = "o_seen" if padding else "o"
    ledger.op("pv", {drop: t.scores, values: t.v}, {seen: t.o}, flops=2 * t.pairs * p.head_dim_v)
    if padding:
        ledger.op("pad o", {seen: t.o, "zeros": padding}, {"zeros": padding, "o": t.full_o})
    probabilities = (t.wide or t.scores) + (t.scores if t.wide or t.flags else 0) + t.flags
    saved = probabilities + t.expanded + (t.q if style.scale == "q" else 0)
    return Work(
        steps=tuple(ledger.steps),
        extra_bytes=ledger.peak,
        saved_bytes=saved,
        held_bytes=saved + t.full_o,
    )


def _mask(ledger: Ledger, t: _Operands, style: Style) -> str:
    """Scaling and masking of the scores; the name of what the softmax reads."""
    scores = {"s": t.scores}
    last = "s"
    if style.scale == "scores":
        ledger.op("scale scores", scores, {"s_scaled": t.scores})
        ledger.free("s")
        last = "s_scaled"
    if not t.mask:
        return last
    if style.mask == "fill_":
        ledger.op("mask", {last: t.open, "mask": t.mask}, {last: t.scores})
        return last
    if style.mask == "add":
        ledger.op("mask", {last: t.scores, "mask": t.mask}, {"s_masked": t.scores})
    else:
        ledger.op("mask: copy", {last: t.scores}, {"s_masked": t.scores})
        ledger.op("mask: fill", {"s_masked": t.open, "mask": t.mask}, {"s_masked": t.scores})
    ledger.free(last)
    return "s_masked"


def _softmax(ledger: Ledger, t: _Operands, last: str) -> str:
    """The softmax, the cast where it is wide, dropout; the name of what multiplies V."""
    if t.wide:
        ledger.op("softmax", {last: t.scores}, {"p_fp32": t.wide}, exps=t.pairs)
        ledger.op("cast p", {"p_fp32": t.wide}, {"p": t.scores})
    else:
        ledger.op("softmax", {last: t.scores}, {"p": t.scores}, exps=t.pairs)
    ledger.free(last, "p_fp32")
    if not t.flags:
        return "p"
    ledger.op("dropout", {"p": t.scores}, {"p_dropped": t.scores, "dropped": t.flags})
    ledger.free("p", "dropped")
    return "p_dropped"


def backward(
    problem: Problem, _: Mapping[str, Tiles], __: Variant = DEFAULT, *, style: Style = NAIVE
) -> Work:
    """dP, dV, dropout, softmax backward, mask, scale, dQ, dK from the saved P: 7P read, 3P written at least.

    torch computes the softmax backward in two kernels, dP·P and then the row sums: 4P read and 2P
    written where one kernel would need 2P and P. masked_fill's backward is a copy and a fill: 2P, 2P.
    """
    p, t, ledger = problem, _operands(problem, style), Ledger()
    dk, dv = "dk" + t.suffix, "dv" + t.suffix
    qk, pv = 2 * t.pairs * p.head_dim, 2 * t.pairs * p.head_dim_v
    one = t.scores
    dropped = "p_dropped" if t.flags else "p"
    ledger.op("dv", {dropped: one, "do": t.o}, {dv: t.v}, flops=pv)
    ledger.op("dp", {"do": t.o, "v" + t.suffix: t.v}, {"dp": one}, flops=pv)
    ledger.release((t.v if t.expanded else 0) + (one if t.flags or t.wide else 0))
    if t.flags:
        ledger.op("dropout backward", {"dp": one, "dropped": t.flags}, {"dp_kept": one})
        ledger.free("dp")
        ledger.release(t.flags)
    _softmax_backward(ledger, t, "dp_kept" if t.flags else "dp", style)
    ds = _mask_backward(ledger, t, style)
    scaled = style.scale == "q"
    seen = "dq_seen" if t.full_q > t.q else "dq"
    query, gradient = ("q_scaled", "dq_scaled") if scaled else ("q", seen)
    ledger.op("dq", {ds: one, "k" + t.suffix: t.k}, {gradient: t.q}, flops=qk)
    ledger.op("dk", {ds: one, query: t.q}, {dk: t.k}, flops=qk)
    ledger.free(ds)
    ledger.release((t.k if t.expanded else 0) + (t.q if scaled else 0))
    if scaled:
        ledger.op("scale dq", {gradient: t.q}, {seen: t.q})
        ledger.free(gradient)
    if t.full_q > t.q:
        ledger.op("pad dq", {seen: t.q}, {"dq": t.full_q, seen: t.q})  # zeros, then the rows
        ledger.free(seen)
    if t.expanded:
        ledger.op("sum dv", {dv: t.v}, {"dv": t.v // t.group})
        ledger.free(dv)
        ledger.op("sum dk", {dk: t.k}, {"dk": t.k // t.group})
    return Work(steps=tuple(ledger.steps), extra_bytes=ledger.peak, joined_extra_bytes=ledger.joined)


def _softmax_backward(ledger: Ledger, t: _Operands, grad: str, style: Style) -> None:
    """ds from the gradient of the probabilities and the saved softmax, in its width."""
    one, saved = t.scores, "p"
    if t.wide:
        ledger.op("cast dp", {grad: one}, {"dp_fp32": t.wide})
        ledger.free(grad)
        grad, saved = "dp_fp32", "p_fp32"
    size = t.wide or one
    if style.one_kernel_softmax:
        ledger.op("softmax backward", {grad: size, saved: size}, {"ds": one})
    else:
        ledger.op("softmax backward: dp·p", {grad: size, saved: size}, {"dp_p": size})
        ledger.op("softmax backward: rows", {"dp_p": size, saved: size}, {"ds": one})
    ledger.free(grad, "dp_p")
    ledger.release(size)


def _mask_backward(ledger: Ledger, t: _Operands, style: Style) -> str:
    """What of mask and scaling has a backward; the name of the gradient of QKᵀ."""
    ds, one = "ds", t.scores
    if t.mask and style.mask != "add":
        ledger.op("mask backward: copy", {ds: one}, {"ds_masked": one})
        ledger.op("mask backward: fill", {"ds_masked": t.open, "mask": t.mask}, {"ds_masked": one})
        ledger.free(ds)
        ds = "ds_masked"
    if style.scale == "scores":
        ledger.op("scale ds", {ds: one}, {"ds_scaled": one})
        ledger.free(ds)
        ds = "ds_scaled"
    return ds
