"""The bundled Triton kernels of the implementation ``flash``, load by load: FlashAttention-2 as they run it.

Beside ``flash-v2``: in fp32 and tf32 the dQ kernel runs first, renews delta and hands a factor per row to
the dK, dV kernel, so that a row's p sums to 1 and its dS to 0, with its sink's; head dims are multiplied in
pieces of powers of two. What scores take beside q and k is in flash_scores.py; softcap and dropout move
nothing. Held to the kernels themselves, traced in Triton's interpreter, by tests/test_trace.py and
tests/test_trace_features.py.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from flashbench import flash_configs
from flashbench._iomodel import flash_scores as scores
from flashbench._iomodel import flash_v2, sectors, varlen
from flashbench._iomodel.listed import metadata
from flashbench._iomodel.tensors import FP32
from flashbench._iomodel.types import Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench.problem import ALIGNMENTS, UNLIMITED, Problem

if TYPE_CHECKING:
    from flashbench.devices import Device

ASSUMPTIONS = (
    "the bundled kernels' own loads and stores; masked lanes move nothing; products on whole tiles and"
    " padded head dims"
)


def forward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """What flash-v2's forward moves, and what its programs read for scores and lengths.

    A slope, a sink and, of a packed batch, lengths per program; of a bias what lies under each tile visited;
    of a block mask lists and bits (listed.py).
    Products are over padded head dims.
    """
    p = problem
    work = _flash_v2(flash_v2.forward, p, tiles, variant)
    (step,) = work.steps
    d, dv = padded(p)
    once = {**scores.slopes(p, step.ctas), **scores.sinks(p, step.ctas), **scores.lengths(p, step.ctas)}
    read = {**step.read, **scores.bias(p, tiles["fwd"]), **once, **metadata(p, tiles["fwd"], step.ctas)}
    heads, rows = p.batch * p.num_heads, p.seqlen_q
    moved = {} if p.lengths else {"lse": sectors.vectors(heads, rows, tiles["fwd"].block_q)}
    return work._replace(steps=(step._replace(read=read, flops=2 * step.exps * (d + dv), moved=moved),))


def backward(problem: Problem, tiles: Mapping[str, Tiles], variant: Variant = DEFAULT) -> Work:
    """delta, then dQ, then dK, dV, then the gradients of bias and sinks; no atomics.

    Refined, norm is one more fp32 row vector: refining dQ sums P·K as well (one more product), writes norm
    and delta anew, 8 B per query row; the dK, dV kernel reads norm with lse and delta, 4 B more per row that
    it streams. With ALiBi, dQ reads a slope per program and dK, dV one per query head of the group.
    Tiles of Q and dO go past the L1 into shared memory; these vectors go by it, which has them for the second
    of two programs on neighbouring keys that are in step.
    """
    p = problem
    work = _flash_v2(flash_v2.backward, p, tiles, variant)
    delta, dkdv, dq = work.steps
    d, dv = padded(p)
    lse = dq.read["lse"]
    norm = lse if refines(p) else 0
    programs = p.batch * p.num_heads * -(-p.seqlen_q // tiles["delta"].block_q)
    steps = [
        delta._replace(read={**delta.read, **scores.lengths(p, programs, ("cu_q",))}),
        dq._replace(
            flops=dq.exps * (2 * (2 * d + dv) + (2 * d if norm else 0)),
            read={
                **dq.read,
                **scores.bias(p, tiles["dq"]),
                **metadata(p, tiles["dq"], dq.ctas),
                **scores.slopes(p, dq.ctas),
                **(scores.sinks(p, dq.ctas) if norm else {}),
                **scores.lengths(p, dq.ctas),
            },
            write={**dq.write, **({"norm": lse, "delta": lse} if norm else {})},
        ),
        dkdv._replace(
            flops=4 * dkdv.exps * (d + dv),
            read={
                **dkdv.read,
                **({"norm": dkdv.read["lse"]} if norm else {}),
                **scores.bias(p, tiles["dkdv"]),
                **metadata(p, tiles["dkdv"], dkdv.ctas),
                **scores.slopes(p, dkdv.ctas * p.group),
                **scores.lengths(p, dkdv.ctas),
            },
            nearby=(2 + bool(norm)) * dkdv.read["lse"] * (scores.RESIDENT - 1) // scores.RESIDENT,
        ),
    ]
    steps += [scores.dbias(p, tiles["dq"], d + dv, refined=bool(norm))] if p.bias else []
    steps += [scores.dsinks(p, lse)] if p.sinks else []
    gradients = sum(step.write.get("dbias", 0) + step.write.get("dsinks", 0) for step in steps)
    return work._replace(steps=tuple(steps), extra_bytes=work.extra_bytes + norm + gradients)


def _flash_v2(
    pass_: Callable[[Problem, Mapping[str, Tiles], Variant], Work],
    problem: Problem,
    tiles: Mapping[str, Tiles],
    variant: Variant,
) -> Work:
    """What flash-v2 does; of a packed batch the sum over its sequences."""
    if problem.lengths:
        return varlen.summed(pass_, problem, tiles, variant)
    return pass_(problem, tiles, variant)


def refines(problem: Problem) -> bool:
    """Whether the backward corrects row sums, which are known: where the inputs are fp32."""
    return problem.dtype_bytes == FP32


def padded(problem: Problem) -> tuple[int, int]:
    """The head dims as they are multiplied, in columns of all pieces."""
    widest = flash_configs.widest(flash_configs.math_of(problem.dtype))
    d, dv = (
        sum(width for _, width in flash_configs.split(dim, widest))
        for dim in (problem.head_dim, problem.head_dim_v)
    )
    return d, dv


def shipped_tiles(problem: Problem, kernel: str, device: Device | None) -> Tiles:
    """The tile that the kernel ships with for the card; without one, that of the interpreter."""
    config = shipped_config(problem, kernel, device)
    return Tiles(config.block_q, config.block_k)


def shipped_config(problem: Problem, kernel: str, device: Device | None) -> flash_configs.Config:
    """The configuration of that tile."""
    limits = (device.capability, device.smem_per_block_bytes) if device else (None, None)
    return flash_configs.chosen(problem, kernel, *limits)


def footprint(problem: Problem, kernel: str, tiles: Tiles) -> int:
    """As flash-v2's; the delta kernel holds its rows of o and do."""
    if kernel == "delta":
        return 2 * tiles.block_q * problem.head_dim_v
    return flash_v2.footprint(problem, kernel, tiles)


def refuses(problem: Problem) -> str | None:
    """Why the kernels do not run the problem, or None."""
    if problem.dtype_bytes == 1:
        return f"the bundled kernels do not take {problem.dtype}"
    return _refuses_head_dims(problem)


def _refuses_head_dims(problem: Problem) -> str | None:
    if max(problem.head_dim, problem.head_dim_v) > flash_configs.MAX_HEAD_DIM:
        return f"the bundled kernels take head dims up to {flash_configs.MAX_HEAD_DIM}"
    return None


def refuses_plain(problem: Problem) -> str | None:
    """Of kernels that know no mask but the causal one, whatever the dtype."""
    if reason := _refuses_head_dims(problem):
        return reason
    if problem.window != (UNLIMITED, UNLIMITED) or problem.dropout_p or problem.lengths:
        return "its kernel has no window, no dropout and no packed batches"
    if problem.causal and problem.alignment != ALIGNMENTS[0] and problem.seqlen_q != problem.seqlen_k:
        return f"its kernel aligns a causal mask {ALIGNMENTS[0]}"
    return None
