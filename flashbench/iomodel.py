"""The analytic model: FLOPs, memory traffic and extra memory of attention, algorithm by algorithm.

    estimate("flash-v2", problem, "fwd", sram_bytes=192 * 1024) -> Estimate
    estimate("flash-v2", problem, "bwd", tiles={"dq_block_q": 128, "dq_block_k": 64}) -> Estimate
    flops(problem, "fwd") -> int

Exact integers from closed forms, in plain Python: nothing here needs torch, numpy or a GPU. To
add an algorithm, add a row to MODELS. docs/io-model.md derives the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashbench._iomodel import flash_v1, flash_v2, standard
from flashbench._iomodel.tensors import compulsory, flops, flops_half_convention
from flashbench._iomodel.types import Estimate, Model, Step, Tiles, Traffic, Work, merge
from flashbench.devices import Device
from flashbench.errors import SpecError, UnknownName
from flashbench.problem import PASSES, Problem

__all__ = ["DEFAULT_SRAM_BYTES", "MODELS", "Estimate", "Model", "Step", "Tiles", "Traffic", "compulsory",
           "estimate", "find", "flops", "flops_half_convention"]  # fmt: skip

DEFAULT_SRAM_BYTES = 192 * 1024
"""On-chip memory of one A100 SM, as the FlashAttention paper counts it."""

_V2 = "Dao 2023, arXiv:2307.08691"

MODELS: tuple[Model, ...] = (
    Model(
        name="standard",
        summary="S and P in memory, op by op as eager PyTorch runs them",
        source="Dao et al. 2022, arXiv:2205.14135, Algorithms 0 and 3",
        assumptions=standard.ASSUMPTIONS,
        forward=standard.forward,
        backward=standard.backward,
    ),
    Model(
        name="flash-v1",
        summary="FlashAttention-1, K/V outside, as the paper writes it",
        source="Dao et al. 2022, arXiv:2205.14135, Algorithms 1, 2 and 4",
        assumptions=flash_v1.ASSUMPTIONS,
        forward=flash_v1.forward,
        backward=flash_v1.backward,
        fwd_kernels=("fwd",),
        bwd_kernels=("bwd",),
        sram_tiles=flash_v1.sram_tiles,
        footprint=flash_v1.footprint,
    ),
    Model(
        name="flash-v1-cuda",
        summary="FlashAttention-1 as release 1.0 of its CUDA code ran it, non-causal",
        source="flash-attention 1.0, fmha_fprop_kernel_1xN.h and fmha_dgrad_kernel_1xN_loop.h",
        assumptions=flash_v1.CUDA_ASSUMPTIONS,
        forward=flash_v1.cuda_forward,
        backward=flash_v1.cuda_backward,
        fwd_kernels=("fwd",),
        bwd_kernels=("bwd",),
        shipped_tiles=flash_v1.shipped_tiles,
        footprint=flash_v1.footprint,
        refuses=flash_v1.cuda_refuses,
        shown=False,
    ),
    Model(
        name="flash-v2",
        summary="FlashAttention-2, Q outside; backward as two kernels without atomics",
        source=f"{_V2}, Algorithm 1; backward in the two-kernel form",
        assumptions=flash_v2.ASSUMPTIONS,
        forward=flash_v2.forward,
        backward=flash_v2.backward,
        fwd_kernels=("fwd",),
        bwd_kernels=("dkdv", "dq"),
        sram_tiles=flash_v2.sram_tiles,
        shipped_tiles=flash_v2.shipped_tiles,
        footprint=flash_v2.footprint,
    ),
    Model(
        name="flash-v2-atomic",
        summary="FlashAttention-2, Q outside; backward as one kernel that adds dQ atomically",
        source=f"{_V2}, Algorithms 1 and 2",
        assumptions=flash_v2.ASSUMPTIONS,
        forward=flash_v2.forward,
        backward=flash_v2.atomic_backward,
        fwd_kernels=("fwd",),
        bwd_kernels=("bwd",),
        sram_tiles=flash_v2.sram_tiles,
        shipped_tiles=flash_v2.shipped_tiles,
        footprint=flash_v2.footprint,
        shown=False,
    ),
)
"""Every algorithm that can be estimated."""

_BY_NAME = {model.name: model for model in MODELS}


def find(name: str) -> Model:
    """The model of that name. Raises UnknownName, offering the nearest."""
    if name not in _BY_NAME:
        raise UnknownName("model", name, _BY_NAME)
    return _BY_NAME[name]


def estimate(
    model: str,
    problem: Problem,
    pass_: str,
    *,
    sram_bytes: int | None = None,
    tiles: Mapping[str, int] | None = None,
    device: Device | None = None,
) -> Estimate:
    """What the model predicts for one pass over one problem.

    Tiles are, kernel by kernel: those given (``fwd_block_q``, ``dkdv_block_k``, …, as a kernel's
    configuration names them; ``block_q`` and ``block_k`` stand for every kernel that has no own;
    other keys are ignored), else those that sram_bytes of fast memory allow, else those of the
    published code on the device. A paper's algorithm without published tiles takes the device's
    memory per SM, or 192 KiB.

    Raises UnknownName for an unknown model or pass, SpecError for a size below 1 or a problem that
    the model does not cover.
    """
    row = find(model)
    if pass_ not in PASSES:
        raise UnknownName("pass", pass_, PASSES)
    if (reason := row.refuses(problem)) is not None:
        raise SpecError(f"model {model!r} does not cover {problem.key}: {reason}")
    if sram_bytes is not None and sram_bytes < 1:
        raise SpecError(f"sram_bytes {sram_bytes} is out of range; it must be 1 or more")
    sram = sram_bytes // problem.dtype_bytes if sram_bytes is not None else None
    chosen, source = _choose(row, problem, pass_, sram, tiles or {}, device)
    parts = [row.forward(problem, chosen)] if pass_ != "bwd" else []
    if pass_ != "fwd":
        parts.append(row.backward(problem, chosen))
    steps = tuple(step for part in parts for step in part.steps)
    return Estimate(
        model=model,
        problem=problem,
        pass_=pass_,
        flops=flops(problem, pass_),
        done_flops=sum(step.flops for step in steps),
        exps=sum(step.exps for step in steps),
        requested=Traffic(
            level="requested",
            read=merge(*(step.read for step in steps)),
            write=merge(*(step.write for step in steps)),
            atomic=merge(*(step.atomic for step in steps)),
        ),
        compulsory=compulsory(problem, pass_),
        saved_bytes=parts[0].saved_bytes,
        extra_bytes=_extra_bytes(parts),
        tiles={
            f"{kernel}_{name}": getattr(tile, name)
            for kernel, tile in chosen.items()
            for name in ("block_q", "block_k")
        },
        assumptions=row.assumptions,
        tile_source=source,
        tiles_fit=_fits(row, problem, chosen, sram),
        sram_elements=sram,
        steps=steps,
    )


def _extra_bytes(parts: list[Work]) -> int:
    """Peak of one pass, or of a backward on top of what its forward holds."""
    if len(parts) == 1:
        return parts[0].extra_bytes
    forward, backward = parts
    joined = backward.joined_extra_bytes
    return max(forward.extra_bytes, forward.held_bytes + (backward.extra_bytes if joined is None else joined))


def _fits(row: Model, problem: Problem, chosen: Mapping[str, Tiles], sram: int | None) -> bool | None:
    if sram is None or row.footprint is None:
        return None
    footprint = row.footprint
    return all(footprint(problem, kernel, tile) <= sram for kernel, tile in chosen.items())


def _choose(
    row: Model,
    problem: Problem,
    pass_: str,
    sram: int | None,
    given: Mapping[str, int],
    device: Device | None,
) -> tuple[dict[str, Tiles], str]:
    """The tile of every kernel of the pass, and where the tiles come from."""
    chosen: dict[str, Tiles] = {}
    source = ""
    for kernel in row.kernels(pass_):
        if row.sram_tiles and (sram is not None or row.shipped_tiles is None):
            fallback = (device.smem_per_sm_bytes if device else DEFAULT_SRAM_BYTES) // problem.dtype_bytes
            tile, source = row.sram_tiles(problem, kernel, fallback if sram is None else sram), "sram"
        else:
            assert row.shipped_tiles is not None, row.name
            tile, source = row.shipped_tiles(problem, kernel, device), "shipped"
        chosen[kernel] = tile
    if not given or not chosen:
        return chosen, source
    own = {
        kernel: Tiles(
            _given(given, kernel, "block_q", tile.block_q), _given(given, kernel, "block_k", tile.block_k)
        )
        for kernel, tile in chosen.items()
    }
    return own, source if own == chosen else "given"


def _given(given: Mapping[str, int], kernel: str, name: str, default: int) -> int:
    value = given.get(f"{kernel}_{name}", given.get(name, default))
    if value < 1:
        raise SpecError(f"{name} {value} is out of range; it must be 1 or more")
    return value
