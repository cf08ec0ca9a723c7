"""From a row of MODELS to what it does with a problem: its tiles, its variant, its work, its peak memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from flashbench._iomodel import varlen
from flashbench._iomodel.models import MODELS
from flashbench._iomodel.types import Model, Tiles, Work
from flashbench._iomodel.variant import DEFAULT, Variant
from flashbench.devices import Device
from flashbench.errors import SpecError, UnknownName
from flashbench.problem import Problem

DEFAULT_SRAM_BYTES = 192 * 1024
"""On-chip memory of one A100 SM, as the FlashAttention paper counts it."""

_KINDS = {"fwd": ("fwd",), "bwd": ("bwd",), "fwd+bwd": ("fwd", "bwd")}
_BY_NAME = {model.name: model for model in MODELS}


class Choice(NamedTuple):
    """What decides the tiles and the variant: memory in bytes or None, tiles by name, the card, options."""

    sram_bytes: int | None = None
    tiles: Mapping[str, int] | None = None
    device: Device | None = None
    variant: Variant = DEFAULT

    def elements(self, problem: Problem) -> int | None:
        """M in elements of the dtype. Raises SpecError for a size below 1 byte."""
        if self.sram_bytes is None:
            return None
        if self.sram_bytes < 1:
            raise SpecError(f"sram_bytes {self.sram_bytes} is out of range; it must be 1 or more")
        return self.sram_bytes // problem.dtype_bytes


def find(name: str) -> Model:
    """The model of that name. Raises UnknownName, offering the nearest."""
    if name not in _BY_NAME:
        raise UnknownName("model", name, _BY_NAME)
    return _BY_NAME[name]


def kinds(pass_: str) -> tuple[str, ...]:
    """The single passes that a pass consists of. Raises UnknownName for an unknown one."""
    if pass_ not in _KINDS:
        raise UnknownName("pass", pass_, _KINDS)
    return _KINDS[pass_]


MODELLED = frozenset({"window", "top-left", "dropout", "varlen", "fp8", "bshd", "deterministic"})
"""Features of a problem that every model counts, or refuses by itself; a row names others in ``covers``."""


def uncounted(row: Model, problem: Problem) -> frozenset[str]:
    """The features of the problem that the model does not count."""
    return problem.features - MODELLED - row.covers if problem.options else frozenset()


def check(row: Model, problem: Problem, variant: Variant) -> None:
    """Raise SpecError for what the model does not cover."""
    p = problem
    if missing := uncounted(row, p):
        named = ", ".join(sorted(missing))
        raise SpecError(f"model {row.name!r} does not cover {problem.key}: it does not count {named}")
    if not (row.packs or (p.seqlen_q and p.seqlen_k)):
        raise SpecError(f"model {row.name!r} does not cover {problem.key}: it has no queries or no keys")
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
    if row.pads or row.packs or not problem.lengths:
        return function(problem, tiles, variant)
    return varlen.work(function, problem, tiles, variant)


def joined(parts: list[Work]) -> list[Work]:
    """The passes of one call: a forward that a backward follows writes what it keeps for it."""
    if len(parts) == 1 or not parts[0].kept:
        return parts
    forward, backward = parts
    *rest, last = forward.steps
    steps = (*rest, last._replace(write={**last.write, **forward.kept}))
    return [forward._replace(steps=steps, kept={}), backward]


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
    for kernel, tile in chosen.items():  # noqa: SIM110
        if footprint(problem, kernel, tile) > sram:
            return False
    return True


def known(name: str) -> bool:
    """Whether there is a model of that name."""
    return name in _BY_NAME


def choose(row: Model, problem: Problem, pass_: str, choice: Choice) -> tuple[dict[str, Tiles], str]:
    """The tile of every kernel of the pass, and where the tiles come from."""
    chosen: dict[str, Tiles] = {}
    source = ""
    if not row.fwd_kernels:
        return chosen, source
    if pass_ not in row.passes:
        kinds(pass_)  # an unknown name is another mistake
        raise SpecError(f"model {row.name!r} has no pass {pass_!r}; accepted: {', '.join(row.passes)}")
    sram, device, given = choice.elements(problem), choice.device, choice.tiles
    if choice.variant.pack_gqa and problem.group > 1:  # a tile may hold the rows of all heads of a group
        g = problem.group
        stacked = replace(problem, num_heads=problem.num_kv_heads, seqlen_q=g * problem.seqlen_q, lengths=())
    else:
        stacked = problem
    for kernel in row.kernels(pass_):
        if row.sram_tiles and (sram is not None or row.shipped_tiles is None):
            fallback = (device.smem_per_sm_bytes if device else DEFAULT_SRAM_BYTES) // problem.dtype_bytes
            shape = stacked if kernel == "fwd" else problem
            tile, source = row.sram_tiles(shape, kernel, fallback if sram is None else sram), "sram"
        else:
            assert row.shipped_tiles is not None, row.name
            shipped = row.shipped_tiles(problem, kernel, device)
            if shipped is None:
                continue
            tile, source = shipped, "kernel" if row.bundled else "shipped"
        chosen[kernel] = tile
    if not given:
        return chosen, source
    own = {
        kernel: Tiles(
            _given(given, kernel, "block_q", tile.block_q), _given(given, kernel, "block_k", tile.block_k)
        )
        for kernel, tile in chosen.items()
    }
    return own, source if own == chosen else "given"


def _given(given: Mapping[str, Any], kernel: str, name: str, default: int) -> int:
    value = given.get(f"{kernel}_{name}", given.get(name, default))
    if type(value) is not int or value < 1:  # a configuration may hold anything under that name
        raise SpecError(f"{name} {value} is out of range; it must be a whole number of 1 or more")
    return value
