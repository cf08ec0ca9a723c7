"""The analytic model: FLOPs, memory traffic and extra memory of attention, algorithm by algorithm.

    estimate("flash-v2", problem, "fwd", sram_bytes=192 * 1024) -> Estimate
    estimate("flash-v2", problem, "bwd", tiles={"dq_block_q": 128, "dq_block_k": 64}) -> Estimate
    estimate("flash-v3", problem, "fwd", variant=Variant(num_splits=8, page_size=64)) -> Estimate
    predict(estimate, device) -> Prediction
    flops(problem, "fwd") -> int

Exact integers from closed forms, in plain Python: nothing here needs torch, numpy or a GPU. To
add an algorithm, add a row to _iomodel/models.py. docs/io-model.md derives the formulas.
"""

from __future__ import annotations

from collections.abc import Mapping

from flashbench._iomodel.batch import Totals, totals, whole
from flashbench._iomodel.dram import Alone, Band
from flashbench._iomodel.engine import (
    DEFAULT_SRAM_BYTES,
    Choice,
    check,
    choose,
    extra_bytes,
    find,
    joined,
    kinds,
    known,
    name_tiles,
    tiles_fit,
    work,
)
from flashbench._iomodel.explain import explain
from flashbench._iomodel.kv_append import Append, append
from flashbench._iomodel.models import MODELS
from flashbench._iomodel.paper import PaperView, crossover, lower_bound, paper_view
from flashbench._iomodel.roofline import Roofs, roofs
from flashbench._iomodel.stated import stated, stated_numbers
from flashbench._iomodel.tensors import compulsory, flops, flops_half_convention, flops_materialised
from flashbench._iomodel.time import Prediction, kernels_alone, predict
from flashbench._iomodel.types import Estimate, Model, Step, Tiles, Traffic, merge
from flashbench._iomodel.variant import DEFAULT, BlockMask, Variant
from flashbench.devices import Device
from flashbench.problem import Problem

ONCE = frozenset({"standard", "standard-hf", "standard-minimal"})
"""Models that count each operand of a product once: at L2 the tiles of a library's product ask for more."""

__all__ = ["DEFAULT_SRAM_BYTES", "MODELS", "Alone", "Append", "Band", "BlockMask", "Choice", "Estimate",
           "Model", "PaperView", "Prediction", "Roofs", "Step", "Tiles", "Totals", "Traffic", "Variant",
           "append", "compulsory", "crossover", "estimate", "explain", "find", "flops",
           "flops_half_convention", "flops_materialised", "kernels_alone", "known", "lower_bound",
           "paper_view", "predict", "roofs", "stated", "stated_numbers", "totals", "whole"]  # fmt: skip


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
    if not known(model):
        from flashbench._iomodel import alternatives

        if alternatives.is_one(model):
            return alternatives.estimate(model, problem, pass_)
    row = find(model)
    check(row, problem, variant)
    choice = Choice(sram_bytes, tiles, device, variant)
    sram = choice.elements(problem)
    chosen, source = choose(row, problem, pass_, choice)
    variant = row.settle(problem, chosen, variant, device)
    parts = joined([work(row, problem, kind, chosen, variant) for kind in kinds(pass_)])
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
