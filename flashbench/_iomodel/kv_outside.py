"""The bundled Triton kernels with K/V outside, load by load: ``flash-v1`` and ``flash-v2-atomic``.

``flash-v1-triton`` beside ``flash-v1``: of 16-bit inputs O and dQ travel in fp32 (o_tmp, dq_tmp) and are
rounded once, at the end; dK and dV stay on chip, and a thread block of the backward loops over the query
heads of its K/V head. ``flash-v2-atomic-triton`` beside ``flash-v2-atomic``: the same loop over a group, so
that K and V are read and dK and dV written per K/V head; a kernel of its own zeroes dQ's accumulator. Held
to the kernels, traced in Triton's interpreter, by tests/test_kv_outside.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashbench._iomodel import flash, flash_v1, flash_v2
from flashbench._iomodel.tensors import FP32, sizes
from flashbench._iomodel.types import Step, Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench.problem import Problem

if TYPE_CHECKING:
    from flashbench.devices import Device


def v1_forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """flash-v1's forward; O is in fp32 between K/V tiles, and read once more and rounded if that is not e."""
    p, s = problem, sizes(problem)
    work = flash_v1.forward(p, tiles, variant)
    (step,) = work.steps
    passes = step.read["q"] // (p.head_dim * p.dtype_bytes)
    d, dv = flash.padded(p)
    o, read, write = _accumulated("o", s.o, passes * p.head_dim_v, p)
    rows = {"l": passes * FP32, "m": passes * FP32}
    step = step._replace(
        read={"k": step.read["k"], "v": step.read["v"], "q": step.read["q"], **read, **rows},
        write={**write, **{name: s.lse + count for name, count in rows.items()}},
        flops=2 * step.exps * (d + dv),
    )
    return work._replace(steps=(step,), extra_bytes=work.extra_bytes + o)


def v1_backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """flash-v1's backward; dQ is in fp32 between K/V tiles; K/V, dK and dV move once per K/V head."""
    p, s = problem, sizes(problem)
    step = flash_v1.backward(p, tiles, variant).steps[0]
    passes = step.read["q"] // (p.head_dim * p.dtype_bytes)
    d, dv = flash.padded(p)
    extra, read, write = _accumulated("dq", s.q, passes * p.head_dim, p)
    step = step._replace(
        read={"k": s.k, "v": s.v, "q": step.read["q"], "o": step.read["o"], "do": step.read["do"],
              **read, "l": passes * FP32, "m": passes * FP32},
        write={**write, "dk": s.k, "dv": s.v},
        flops=2 * step.exps * (3 * d + 2 * dv),
        ctas=p.batch * p.num_kv_heads,
    )  # fmt: skip
    return Work(steps=(step,), extra_bytes=s.q + s.k + s.v + extra)


def _accumulated(name: str, size: int, moved: int, p: Problem) -> tuple[int, dict[str, int], dict[str, int]]:
    """(bytes of an fp32 accumulator, reads, writes) of a result of ``size`` bytes that grows in memory.

    moved: elements that are read, and written, on the way. It is zeroed first; if the result is no fp32
    itself, it is read once more and the result written.
    """
    if p.dtype_bytes == FP32:
        return 0, {name: moved * FP32}, {name: size + moved * FP32}
    scratch = size // p.dtype_bytes * FP32
    there = f"{name}_tmp"
    return scratch, {there: moved * FP32 + scratch}, {there: scratch + moved * FP32, name: size}


def atomic_backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """delta, a zeroed fp32 dQ, one kernel with K/V outside that adds to it, a conversion."""
    p, s = problem, sizes(problem)
    work = flash_v2.atomic_backward(p, tiles, variant)
    step = next(step for step in work.steps if step.name == "backward")
    d, dv = flash.padded(p)
    dq_acc = s.q // p.dtype_bytes * FP32
    steps = (
        flash_v2.delta(s),
        Step(name="clear", read={}, write={"dq_acc": dq_acc}),
        step._replace(
            read={**step.read, "k": s.k, "v": s.v},
            write={"dk": s.k, "dv": s.v},
            flops=2 * step.exps * (3 * d + 2 * dv),
            ctas=p.batch * p.num_kv_heads * -(-p.seqlen_k // tiles["bwd"].block_k),
        ),
        Step(name="convert", read={"dq_acc": dq_acc}, write={"dq": s.q}),
    )
    return Work(steps=steps, extra_bytes=s.q + s.k + s.v + s.lse + dq_acc)


def refuses(problem: Problem) -> str | None:
    """Why the kernels do not run the problem, or None."""
    return flash.refuses(problem) or flash.refuses_plain(problem)


def shipped_tiles(table: Mapping[str, str], problem: Problem, kernel: str, device: Device | None) -> Tiles:
    """The tile that the kernel ships with for the card; without one, that of the interpreter.

    table: the names that flash_configs has for a row's kernels, where they are others.
    """
    return flash.shipped_tiles(problem, table.get(kernel, kernel), device)
