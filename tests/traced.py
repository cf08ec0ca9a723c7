"""Forward and backward of ``flash`` in Triton's interpreter, held to the model tensor by tensor."""

from __future__ import annotations

import torch

from flashbench import iomodel, kernels
from flashbench import tracing as joined
from flashbench._profilers import trace as tracing
from flashbench.kernels._inputs import make_inputs
from flashbench.problem import Problem

TILES = {"fwd": (32, 16), "dq": (16, 32), "dkdv": (32, 16), "delta": (16, 16)}
"""Tiles of other shapes than the interpreter's 64x64, so that small problems have ragged and whole ones."""


def run(p: Problem, tiles: dict[str, tuple[int, int]]) -> tuple[tracing.Launch, ...]:
    """Forward and backward of the real kernels with those tiles, traced."""
    inputs = make_inputs(p, "cpu", 0).detached(grad=True)
    fields = ("block_q", "block_k", "num_warps", "num_stages")
    config = {
        f"{name}_{field}": value
        for name, rows in tiles.items()
        for field, value in zip(fields, (*rows, 4, 1), strict=True)
    }
    prepare = kernels.get("flash").prepare_tiles
    assert prepare is not None
    call = prepare(p, inputs, config)
    return tracing.trace(lambda: torch.autograd.grad(call(), inputs.leaves, inputs.dout))


def moved(launch: tracing.Launch, kind: str) -> dict[str, int]:
    found = {name.lower(): getattr(arg, kind) for name, arg in launch.arguments.items()}
    return {name: count for name, count in found.items() if count}


def assert_exact(p: Problem, tiles: dict[str, tuple[int, int]]) -> None:
    named = {f"{name}_block_q": rows[0] for name, rows in tiles.items()}
    named |= {f"{name}_block_k": rows[1] for name, rows in tiles.items()}
    row = iomodel.estimate("flash", p, "fwd+bwd", tiles=named)
    launches = run(p, tiles)
    assert [joined.STEPS[launch.kernel] for launch in launches] == [step.name for step in row.steps]
    for launch, step in zip(launches, row.steps, strict=True):
        counted = tuple(moved(launch, f"{kind}_bytes") for kind in ("loaded", "stored", "atomic"))
        said = tuple({name: n for name, n in part.items() if n} for part in step[1:4])
        assert counted == said, f"{p.key}: {step.name}"
        assert launch.flops == step.flops, f"{p.key}: {step.name}"
    found = joined.compare(launches, row)
    assert (found["difference_bytes"], found["difference_flops"]) == (0, 0)
