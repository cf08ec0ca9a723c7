"""The analytic model: FLOPs, memory traffic and extra memory of attention, algorithm by algorithm.

    estimate("flash-v2", problem, "fwd", sram_bytes=192 * 1024) -> Estimate
    estimate("flash-v2", problem, "bwd", tiles={"dq_block_q": 128, "dq_block_k": 64}) -> Estimate
    estimate("flash-v3", problem, "fwd", variant=Variant(num_splits=8, page_size=64)) -> Estimate
    flops(problem, "fwd") -> int

Exact integers from closed forms, in plain Python: nothing here needs torch, numpy or a GPU. To
add an algorithm, add a row to _iomodel/models.py. docs/io-model.md derives the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashbench._iomodel import varlen
from flashbench._iomodel.models import MODELS
from flashbench._iomodel.paper import PaperView, crossover, lower_bound, paper_view
from flashbench._iomodel.tensors import compulsory, flops, flops_half_convention, flops_materialised
from flashbench._iomodel.types import Estimate, Model, Step, Tiles, Traffic, Work, merge
from flashbench._iomodel.variant import DEFAULT, BlockMask, Variant
from flashbench.devices import Device
from flashbench.errors import SpecError, UnknownName
from flashbench.problem import PASSES, Problem

__all__ = ["DEFAULT_SRAM_BYTES", "MODELS", "BlockMask", "Estimate", "Model", "PaperView", "Step", "Tiles",
           "Traffic", "Variant", "compulsory", "crossover", "estimate", "find", "flops",
           "flops_half_convention", "flops_materialised", "lower_bound", "paper_view"]  # fmt: skip

DEFAULT_SRAM_BYTES = 192 * 1024
"""On-chip memory of one A100 SM, as the FlashAttention paper counts it."""

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
    variant: Variant = DEFAULT,
) -> Estimate:
    """What the model predicts for one pass over one problem.

    Tiles are, kernel by kernel: those given (``fwd_block_q``, ``dkdv_block_k``, …, as a kernel's
    configuration names them; ``block_q`` and ``block_k`` stand for every kernel that has no own;
    other keys are ignored), else those that sram_bytes of fast memory allow, else those of the
    published code on the device. A paper's algorithm without published tiles takes the device's
    memory per SM, or 192 KiB. An alternative (``linformer:rank=128``; _iomodel/alternatives.py) takes
    neither tiles nor a variant.

    Raises UnknownName for an unknown model or pass, SpecError for a size below 1, a problem that
    the model does not cover or an option of the variant that the algorithm does not have.
    """
    if model not in _BY_NAME:
        from flashbench._iomodel import alternatives

        if alternatives.is_one(model):
            return alternatives.estimate(model, problem, pass_)
    row = find(model)
    check(row, problem, pass_, variant)
    if sram_bytes is not None and sram_bytes < 1:
        raise SpecError(f"sram_bytes {sram_bytes} is out of range; it must be 1 or more")
    sram = sram_bytes // problem.dtype_bytes if sram_bytes is not None else None
    chosen, source = choose(row, problem, pass_, sram, tiles or {}, device)
    variant = row.settle(problem, chosen, variant, device)
    parts = [work(row, problem, kind, chosen, variant) for kind in ("fwd", "bwd") if kind in pass_]
    steps = tuple(step for part in parts for step in part.steps)
    return Estimate(
        model=model,
        problem=problem,
        pass_=pass_,
        flops=flops(problem, pass_, variant),
        done_flops=sum(step.flops for step in steps),
        exps=sum(step.exps for step in steps),
        requested=Traffic(
            level="requested",
            read=merge(*(step.read for step in steps)),
            write=merge(*(step.write for step in steps)),
            atomic=merge(*(step.atomic for step in steps)),
        ),
        compulsory=compulsory(problem, pass_, variant),
        saved_bytes=parts[0].saved_bytes,
        extra_bytes=extra_bytes(parts),
        tiles=name_tiles(chosen),
        assumptions=row.assumptions,
        tile_source=source,
        tiles_fit=tiles_fit(row, problem, chosen, sram),
        sram_elements=sram,
        steps=steps,
        variant=variant,
    )


def check(row: Model, problem: Problem, pass_: str, variant: Variant) -> None:
    """Raise UnknownName or SpecError for what the model does not cover."""
    if pass_ not in PASSES:
        raise UnknownName("pass", pass_, PASSES)
    if (reason := row.refuses(problem)) is not None:
        raise SpecError(f"model {row.name!r} does not cover {problem.key}: {reason}")
    if variant is not DEFAULT:
        for name in variant.given:
            if name not in row.takes:
                able = ", ".join(model.name for model in MODELS if name in model.takes)
                raise SpecError(f"model {row.name!r} has no {name}; accepted: {able}")
        if problem.lengths and variant.blocks is not None:
            raise SpecError("a block mask is for sequences of one length; accepted: no lengths")


def work(row: Model, problem: Problem, pass_: str, tiles: Mapping[str, Tiles], variant: Variant) -> Work:
    """What one pass of the model does, ``fwd`` or ``bwd``; of a packed batch, the sum."""
    function = row.forward if pass_ == "fwd" else row.backward
    if row.pads:
        return function(problem, tiles, variant)
    return varlen.work(function, problem, tiles, variant)


def name_tiles(chosen: Mapping[str, Tiles]) -> dict[str, int]:
    """Tiles as a kernel's configuration names them: ``fwd_block_q``, ``dkdv_block_k``, …"""
    named: dict[str, int] = {}
    for kernel, tile in chosen.items():
        named[f"{kernel}_block_q"], named[f"{kernel}_block_k"] = tile.block_q, tile.block_k
    return named


def extra_bytes(parts: list[Work]) -> int:
    """Most alive at once in one pass, or of a backward on top of what its forward holds."""
    if len(parts) == 1:
        return parts[0].extra_bytes
    forward, backward = parts
    joined = backward.joined_extra_bytes
    return max(forward.extra_bytes, forward.held_bytes + (backward.extra_bytes if joined is None else joined))


def tiles_fit(row: Model, problem: Problem, chosen: Mapping[str, Tiles], sram: int | None) -> bool | None:
    """Whether every kernel's tile fits the fast memory, in elements; None where that is not known."""
    if sram is None or row.footprint is None:
        return None
    footprint = row.footprint
    return all(footprint(problem, kernel, tile) <= sram for kernel, tile in chosen.items())


def choose(
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
