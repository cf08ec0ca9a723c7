"""Sequence mixing without a score matrix: linear attention, Mamba (selective scan), Mamba-2 (SSD).

Forward only. One query over a longer sequence is a decode step: it reads and writes the state, whatever
came before, each operand once. A Mamba layer is as wide as the attention it would replace: ``expand`` times
num_heads · head_dim_v channels. Projections, convolution and normalisation are not counted, as
attention's are not. Matrix FLOPs count, and for the scans, which have no matrices, all FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from flashbench._iomodel.approximate import BLOCK_Q, ceil_div
from flashbench._iomodel.tensors import FP32, sizes
from flashbench._iomodel.types import Step, Traffic
from flashbench.problem import Problem

SCAN_CHUNK = 2048
"""Positions after which the scan keeps its state for the backward."""


@dataclass(frozen=True, kw_only=True)
class LinearAttention:
    """φ(Q)(φ(K)ᵀV): a state of head_dim x head_dim_v per head; causal in chunks of ``chunk`` rows.

    Source: Katharopoulos et al. 2020, arXiv:2006.16236, equations 6 and 18; chunks as in Yang et
    al. 2023, arXiv:2312.06635, section 2.
    """

    NAME: ClassVar[str] = "linear-attention"
    SUMMARY: ClassVar[str] = "a feature map in place of the softmax: a state of d x dv, no score matrix"
    SOURCE: ClassVar[str] = "Katharopoulos et al. 2020, arXiv:2006.16236, section 3"
    ASSUMPTIONS: ClassVar[str] = (
        "causal: one thread block per head, the fp32 state stays on chip; not causal: one kernel sums the"
        " state, a second applies it to tiles of 128 queries; the feature map is not counted"
    )

    chunk: int = 64

    def refuses(self, problem: Problem) -> str | None:
        """Why it does not cover the problem, or None."""
        return _equal_lengths(problem) if problem.causal else None

    def steps(self, problem: Problem) -> tuple[Step, ...]:
        """causal: one; a decode step: one; else state, apply."""
        p, s = problem, sizes(problem)
        if is_decode(p):
            products = p.batch * (p.num_heads + p.num_kv_heads)  # q·S per head, kᵀv per K/V head
            new = {"q": s.q, "k": s.k // p.seqlen_k, "v": s.v // p.seqlen_k}
            flops = 2 * products * p.head_dim * p.head_dim_v
            return (_update(p.batch, self.decode_bytes(p), new, {"o": s.o}, flops=flops),)
        d, dv, heads, kv_heads = p.head_dim, p.head_dim_v, p.batch * p.num_heads, p.batch * p.num_kv_heads
        if p.causal:
            inner = square_sum(p.seqlen_q, self.chunk) * (d + dv) + 2 * p.seqlen_q * d * dv
            read = {"q": s.q, "k": s.k_heads, "v": s.v_heads}
            return (Step(name="chunks", read=read, write={"o": s.o}, flops=2 * heads * inner),)
        state, tiles = (d * dv + d) * FP32, ceil_div(p.seqlen_q, BLOCK_Q)
        return (
            Step(
                name="state", read={"k": s.k, "v": s.v}, write={"state": kv_heads * state},
                flops=2 * kv_heads * p.seqlen_k * d * dv,
            ),
            Step(
                name="apply", read={"q": s.q, "state": heads * tiles * state}, write={"o": s.o},
                flops=2 * heads * p.seqlen_q * d * dv,
            ),
        )  # fmt: skip

    def compulsory(self, problem: Problem) -> Traffic:
        """Reads q, k, v; writes o; a decode step reads the new rows and the state, and writes the state."""
        if is_decode(problem):
            return _least(self.steps(problem))
        s = sizes(problem)
        return Traffic(level="compulsory", read={"q": s.q, "k": s.k, "v": s.v}, write={"o": s.o})

    def extra_bytes(self, problem: Problem) -> int:
        """o, and without a mask the state; a decode step updates it in place."""
        p = problem
        if is_decode(p):
            return sizes(p).o
        state = p.batch * p.num_kv_heads * (p.head_dim * p.head_dim_v + p.head_dim) * FP32
        return sizes(p).o + (0 if p.causal else state)

    def decode_bytes(self, problem: Problem) -> int:
        """fp32 state per sequence and layer, per K/V head: the sum of kᵀv, and of k."""
        p = problem
        return p.num_kv_heads * (p.head_dim * p.head_dim_v + p.head_dim) * FP32


@dataclass(frozen=True, kw_only=True)
class Mamba:
    """The selective scan of Mamba-1: a state of ``state`` numbers per channel, one thread block per channel.

    Source: Gu and Dao 2023, arXiv:2312.00752, section 3.3 and appendix D; the published kernel for
    what is loaded and kept (B and C per channel, two fp32 numbers per state and 2048 positions);
    9 FLOPs per position, channel and state as its authors count.
    """

    NAME: ClassVar[str] = "mamba"
    SUMMARY: ClassVar[str] = "selective scan (Mamba-1): a small state per channel instead of keys and values"
    SOURCE: ClassVar[str] = "Gu and Dao 2023, arXiv:2312.00752, section 3.3; state-spaces/mamba issue 110"
    ASSUMPTIONS: ClassVar[str] = (
        "expand x num_heads x head_dim_v channels; one fused kernel, as published: every channel loads B and"
        " C itself; sees only earlier positions; FLOPs are not matrix FLOPs"
    )

    expand: int = 2
    state: int = 16

    def refuses(self, problem: Problem) -> str | None:
        """Why it does not cover the problem, or None."""
        return _equal_lengths(problem)

    def steps(self, problem: Problem) -> tuple[Step, ...]:
        """scan; of a decode step, update."""
        b, length, e, n = problem.batch, problem.seqlen_q, problem.dtype_bytes, self.state
        channels = self._channels(problem)
        if is_decode(problem):
            wide, cells = b * channels * e, b * channels
            new = {"u": wide, "delta": wide, "z": wide, "b": b * n * e, "c": b * n * e,
                   "a": channels * n * FP32, "d": channels * FP32, "delta_bias": channels * FP32}  # fmt: skip
            work = {"flops": cells * (9 * n + 2), "exps": cells * n}
            return (_update(b, self.decode_bytes(problem), new, {"out_z": wide}, **work),)
        wide, chunks = b * channels * length * e, ceil_div(length, SCAN_CHUNK)
        shared = b * channels * n * length * e
        read = {
            "u": wide, "delta": wide, "z": wide, "b": shared, "c": shared,
            "a": b * channels * chunks * n * FP32, "d": b * channels * FP32,
            "delta_bias": b * channels * FP32,
        }  # fmt: skip
        write = {"out": wide, "out_z": wide, "states": b * channels * chunks * n * 2 * FP32}
        cells = b * channels * length
        return (Step(name="scan", read=read, write=write, flops=cells * (9 * n + 2), exps=cells * n),)

    def compulsory(self, problem: Problem) -> Traffic:
        """Reads u, delta, z, b, c and the parameters; writes out. A decode step: the state too, both ways."""
        if is_decode(problem):
            return _least(self.steps(problem))
        b, length, e, n = problem.batch, problem.seqlen_q, problem.dtype_bytes, self.state
        channels = self._channels(problem)
        wide, shared = b * channels * length * e, b * n * length * e
        read = {
            "u": wide, "delta": wide, "z": wide, "b": shared, "c": shared, "a": channels * n * FP32,
            "d": channels * FP32, "delta_bias": channels * FP32,
        }  # fmt: skip
        return Traffic(level="compulsory", read=read, write={"out_z": wide})

    def extra_bytes(self, problem: Problem) -> int:
        """out before and after the gate, and the states that are kept; of a decode step, out."""
        (step,) = self.steps(problem)
        return sum(size for name, size in step.write.items() if name != "state")

    def materialised_bytes(self, problem: Problem) -> int:
        """The fp32 state of every position and channel, which a scan that is not fused writes."""
        return problem.batch * problem.seqlen_q * self._channels(problem) * self.state * FP32

    def decode_bytes(self, problem: Problem) -> int:
        """fp32 state per sequence and layer, read at each decoded token whatever came before."""
        return self._channels(problem) * self.state * FP32

    def _channels(self, problem: Problem) -> int:
        return self.expand * problem.num_heads * problem.head_dim_v


@dataclass(frozen=True, kw_only=True)
class Mamba2:
    """State-space duality: matrix products within chunks, a scan over the chunks' states.

    Heads of ``channels`` channels with a state of ``state`` rows; B and C are shared by the heads of
    one of ``groups`` groups. Source: Dao and Gu 2024, arXiv:2405.21060, section 6; the published five
    kernels for what is kept between them.
    """

    NAME: ClassVar[str] = "mamba2"
    SUMMARY: ClassVar[str] = "state-space duality (Mamba-2): matrix products in chunks, a scan over states"
    SOURCE: ClassVar[str] = "Dao and Gu 2024, arXiv:2405.21060, section 6"
    ASSUMPTIONS: ClassVar[str] = (
        "expand x num_heads x head_dim_v channels; five kernels, each operand once per kernel (tiles ask L2"
        " for more); whole chunks; sees only earlier positions"
    )

    expand: int = 2
    state: int = 128
    channels: int = 64
    groups: int = 1
    chunk: int = 256

    def refuses(self, problem: Problem) -> str | None:
        """Why it does not cover the problem, or None."""
        width = self.expand * problem.num_heads * problem.head_dim_v
        if width % self.channels:
            return f"{width} channels are not heads of {self.channels}"
        if (width // self.channels) % self.groups:
            return f"{width // self.channels} heads are not {self.groups} groups"
        return _equal_lengths(problem)

    def steps(self, problem: Problem) -> tuple[Step, ...]:
        """cumulate, chunk states, pass states, chunk products, chunk scan; of a decode step, update."""
        b, length, e, n = problem.batch, problem.seqlen_q, problem.dtype_bytes, self.state
        if is_decode(problem):
            return (self._decode(problem),)
        heads, chunks = self._heads(problem), ceil_div(length, self.chunk)
        squares = square_sum(length, self.chunk)
        rows, wide = b * length * heads, b * length * heads * self.channels * e
        shared = b * length * self.groups * n * e
        states, decays = (
            b * chunks * heads * self.channels * n,
            {"dt_fp32": rows * FP32, "decay": rows * FP32},
        )
        products = {"cb": b * self.groups * squares * FP32}
        return (
            Step(name="cumulate", read={"dt": rows * e, "a": heads * FP32}, write=decays),
            Step(
                name="chunk states", read={"b": shared, "x": wide, **decays}, write={"states": states * FP32},
                flops=2 * rows * n * self.channels, exps=rows,
            ),
            Step(
                name="pass states", read={"states": states * FP32, "decay": b * chunks * heads * FP32},
                write={"states_in": states * e, "state_out": b * heads * self.channels * n * FP32},
                flops=2 * states, exps=b * chunks * heads,
            ),
            Step(
                name="chunk products", read={"b": shared, "c": shared}, write=products,
                flops=2 * b * self.groups * squares * n,
            ),
            Step(
                name="chunk scan",
                read={
                    **products, **decays, "x": wide, "c": shared, "states_in": states * e, "d": heads * FP32,
                },
                write={"out": wide}, exps=b * heads * squares + rows,
                flops=2 * rows * n * self.channels + 2 * b * heads * squares * self.channels,
            ),
        )  # fmt: skip

    def compulsory(self, problem: Problem) -> Traffic:
        """Reads x, dt, b, c and the parameters; writes out. A decode step: the state too, both ways."""
        if is_decode(problem):
            return _least(self.steps(problem))
        b, length, e = problem.batch, problem.seqlen_q, problem.dtype_bytes
        heads, shared = self._heads(problem), b * length * self.groups * self.state * e
        wide = b * length * heads * self.channels * e
        read = {
            "x": wide, "dt": b * length * heads * e, "b": shared, "c": shared, "a": heads * FP32,
            "d": heads * FP32,
        }  # fmt: skip
        return Traffic(level="compulsory", read=read, write={"out": wide})

    def extra_bytes(self, problem: Problem) -> int:
        """out, decays, states before and after they are passed on, and the chunk products."""
        steps = self.steps(problem)
        return sum(size for step in steps for name, size in step.write.items() if name != "state")

    def _decode(self, problem: Problem) -> Step:
        b, e, n, heads = problem.batch, problem.dtype_bytes, self.state, self._heads(problem)
        wide, shared = b * heads * self.channels * e, b * self.groups * n * e
        new = {"x": wide, "dt": b * heads * e, "b": shared, "c": shared, "a": heads * FP32, "d": heads * FP32}
        # the state decays and takes in x·b, and c reads it: three multiplications, two additions
        flops, exps = 5 * b * heads * self.channels * n, b * heads
        return _update(b, self.decode_bytes(problem), new, {"out": wide}, flops=flops, exps=exps)

    def decode_bytes(self, problem: Problem) -> int:
        """fp32 state per sequence and layer, read at each decoded token whatever came before."""
        return self._heads(problem) * self.channels * self.state * FP32

    def _heads(self, problem: Problem) -> int:
        return self.expand * problem.num_heads * problem.head_dim_v // self.channels


def square_sum(length: int, chunk: int) -> int:
    """Σ over the chunks of their squared rows: whole ones of ``chunk`` rows, and a rest."""
    whole, rest = divmod(length, chunk)
    return whole * chunk * chunk + rest * rest


def is_decode(problem: Problem) -> bool:
    """One query that follows the rest of its sequence."""
    return problem.seqlen_q == 1 < problem.seqlen_k


def _update(
    batch: int, state: int, new: Mapping[str, int], out: Mapping[str, int], *, flops: int, exps: int = 0
) -> Step:
    """A decode step: the state of every sequence is read, updated and written."""
    kept = {"state": batch * state}
    return Step(name="update", read={**new, **kept}, write={**out, **kept}, flops=flops, exps=exps)


def _least(steps: tuple[Step, ...]) -> Traffic:
    (step,) = steps
    return Traffic(level="compulsory", read=step.read, write=step.write)


def _equal_lengths(problem: Problem) -> str | None:
    if problem.seqlen_q == problem.seqlen_k or is_decode(problem):
        return None
    return "it scans one sequence: seqlen_q is seqlen_k, or 1 for a decode step"
