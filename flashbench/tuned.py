"""What ``flashbench tune`` found, as a file, and its use in place of the tables.

    found = tuned.read("tuned.json", target)      # refuses a file of another GPU or Triton
    found.get("flash-v2")                         # the implementation with the file's configurations

A case of the file is one implementation, pass and problem. Its shape (``shape_of``) is what a compiled
kernel depends on and must be the same; of the cases of a shape the nearest in lengths and heads serves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench import kernels, paths
from flashbench.decode_configs import DecodeConfig
from flashbench.environment import driver_version, source_hash
from flashbench.errors import RunFileError, UsageError
from flashbench.installed import version_of
from flashbench.kernels import Call, Implementation, Target
from flashbench.problem import Cell, Problem

if TYPE_CHECKING:
    from flashbench.decoding import Step
    from flashbench.kernels._inputs import Inputs

SCHEMA = 1
MAX_BYTES = 2**26
MUST = ("gpu", "capability", "triton")
"""Fields of the key without which a configuration says nothing of this machine; others are worth a note."""

OF_A_PASS = {"fwd": ("fwd",), "bwd": ("bwd",), "fwd+bwd": ("fwd", "bwd")}
"""What a pass consists of; each is tuned on its own."""
INDIFFERENT = frozenset({"bshd", "deterministic", "fp8"})
"""Features (``unsupported_features``) that a configuration need not be tuned with."""

FAR = 2.0
"""Doublings between a length and the tuned one from which on the table is the better guess."""


def key_of(target: Target) -> dict[str, str | None]:
    """What a file is keyed by: this GPU, and the versions that made and ran its kernels."""
    return {
        "gpu": target.name,
        "capability": None if target.capability is None else ".".join(map(str, target.capability)),
        "driver": driver_version(),
        "torch": version_of("torch"),
        "triton": version_of("triton"),
        "kernels": source_hash(),
    }


def shape_of(implementation: str, pass_: str, problem: Problem) -> dict[str, Any]:
    """What must be the same for a configuration to serve; a decode's step adds its cache to it."""
    p = problem
    return {
        "implementation": implementation, "pass": pass_, "dtype": p.dtype, "head_dim": p.head_dim,
        "head_dim_v": p.head_dim_v, "causal": p.causal, "group": p.group,
    }  # fmt: skip


def shape_of_step(step: Step) -> dict[str, Any]:
    """The same of a step of ``flashbench decode``: dtype is the cache's; pages are in it."""
    shape = shape_of("flash-decode", "fwd", step.problem) | {"dtype": step.dtype}
    return shape | ({"page_size": step.page_size} if step.page_size else {})


def decode_config(config: Mapping[str, Any]) -> DecodeConfig:
    """The configuration of the decode kernel that is written so."""
    known = {f"fwd_{field.name}": field.name for field in fields(DecodeConfig)}
    return DecodeConfig(**{known[name]: value for name, value in config.items() if name in known})


def point_of(problem: Problem) -> dict[str, int]:
    """Where in its shape a problem is; heads: K/V heads of the batch."""
    p = problem
    return {"seqlen_q": p.seqlen_q, "seqlen_k": p.seqlen_k, "heads": p.batch * p.num_kv_heads}


@dataclass(frozen=True, eq=False)
class Tuned:
    """A file that fits this machine. notes: what of its key differs without being in the way."""

    path: Path
    cases: Sequence[Mapping[str, Any]]
    notes: tuple[str, ...] = ()

    def nearest(self, shape: Mapping[str, Any], point: Mapping[str, int]) -> Mapping[str, Any] | None:
        """The finished case of that shape whose lengths, then heads, are nearest; None where all are FAR."""

        def off(case: Mapping[str, Any], *names: str) -> float:
            there = case["point"]
            return max(abs(math.log2(max(1, point[name]) / max(1, there[name]))) for name in names)

        near = [
            (off(case, "seqlen_q", "seqlen_k"), off(case, "heads"), index)
            for index, case in enumerate(self.cases)
            if case["shape"] == shape and case.get("winner")
        ]
        best = min(near, default=(math.inf, 0.0, 0))
        return self.cases[best[2]] if best[0] <= FAR else None

    def of(self, implementation: str, problem: Problem, pass_: str) -> list[Mapping[str, Any]]:
        """The cases that serve, one for the forward and one for the backward as far as the pass has them."""
        if not problem.features <= INDIFFERENT:
            return []
        found = [
            self.nearest(shape_of(implementation, one, problem), point_of(problem))
            for one in OF_A_PASS[pass_]
        ]
        return [case for case in found if case is not None]

    def tiles(self, implementation: str, problem: Problem, pass_: str) -> dict[str, Any]:
        """What the file has in place of the table's configuration; empty where it has nothing."""
        found: dict[str, Any] = {}
        for case in self.of(implementation, problem, pass_):
            found |= case["winner"]["config"]
        return found

    def step(self, step: Step) -> tuple[Step, str | None]:
        """The step with the file's configuration, and the case that has it; None where the table serves."""
        found = self.nearest(shape_of_step(step), point_of(step.problem))
        if found is None:
            return step, None
        return replace(step, config=decode_config(found["winner"]["config"])), found["case"]

    def source(self, cell: Cell) -> dict[str, Any]:
        """For the record: the file, and the problems of it whose configurations serve; empty where none."""
        found = self.of(cell.implementation, cell.problem, cell.pass_)
        return {"file": str(self.path), "cases": [case["case"] for case in found]} if found else {}

    def get(self, name: str) -> Implementation:
        """The implementation of that name, with the file's configurations where it has some."""
        base = kernels.get(name)
        if not any(case["shape"].get("implementation") == name for case in self.cases):
            return base

        def prepare(problem: Problem, inputs: Inputs) -> Call:
            tiles = self.tiles(name, problem, "fwd+bwd")
            if not tiles or base.prepare_tiles is None:
                return base.prepare(problem, inputs)
            return base.prepare_tiles(problem, inputs, tiles)

        def prepare_lse(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Callable[[], Any]:
            assert base.prepare_lse is not None
            return base.prepare_lse(problem, inputs, {**self.tiles(name, problem, "fwd+bwd"), **config})

        def describe(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
            config = {**base.describe(problem, pass_, target)}
            tiles = self.tiles(name, problem, pass_)
            return completed(base, problem, config | tiles, target) if tiles else config

        def precompile(cells: Sequence[Cell], target: Target) -> None:
            base.precompile([cell for cell in cells if not self.source(cell)], target)

        return replace(
            base,
            prepare=prepare,
            prepare_lse=base.prepare_lse and prepare_lse,
            describe=describe,
            precompile=precompile,
        )


def get(found: Tuned | None, name: str) -> Implementation:
    """The implementation of that name, tuned where there is a file."""
    return kernels.get(name) if found is None else found.get(name)


def completed(
    implementation: Implementation, problem: Problem, config: Mapping[str, Any], target: Target
) -> dict[str, Any]:
    """A configuration with the fields that follow from its others."""
    return {**config, **implementation.follows(problem, config, target)}


def read(path: str | Path, target: Target, option: str = "--tuned") -> Tuned:
    """The file, fit for the target.

    Raises UsageError for a file that is not there or of another GPU or Triton, RunFileError for one that
    is not what ``flashbench tune`` writes.
    """
    document = load(path, option)
    here, there = key_of(target), document["key"]
    other = [name for name in here if there.get(name) != here[name]]
    if wrong := [name for name in other if name in MUST]:
        said = ", ".join(f"{name} {there.get(name)}, here {here[name]}" for name in wrong)
        raise UsageError(
            f"{option} {str(path)!r}: tuned for another machine ({said});"
            " accepted: a file of this GPU and Triton",
            hint="'flashbench tune' makes one",
        )
    notes = [f"{path} was tuned with {name} {there.get(name)}; here is {here[name]}" for name in other]
    return Tuned(path=Path(path), cases=document["cases"], notes=tuple(notes))


def load(path: str | Path, option: str = "--tuned") -> dict[str, Any]:
    """The document of a file. Raises UsageError and RunFileError as ``read`` does."""
    where, made = f"{option} {str(path)!r}", "accepted: what 'flashbench tune' writes"
    try:
        with paths.opened(path) as file:
            data = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"{where}: {error.strerror or error}; {made}") from None
    try:
        document = json.loads(data)
    except (ValueError, RecursionError):
        raise RunFileError(f"{where}: not JSON; {made}") from None
    if not isinstance(document, dict) or document.get("type") != "tuned":
        raise RunFileError(f"{where}: no tuning; {made}")
    if document.get("schema") != SCHEMA:
        raise RunFileError(f"{where}: schema {document.get('schema')!r}; accepted: {SCHEMA}")
    cases = document.get("cases")
    if not isinstance(document.get("key"), dict) or not isinstance(cases, list) or not all(map(_fit, cases)):
        raise RunFileError(f"{where}: no key or a damaged case; {made}")
    return document


def _fit(case: Any) -> bool:
    """Whether the case has what its use looks at, in its type."""
    try:
        point, winner = case["point"], case["winner"]
        numbers = all(type(point[name]) is int for name in ("seqlen_q", "seqlen_k", "heads"))
        tiles = winner is None or all(type(value) in (int, bool) for value in winner["config"].values())
        return numbers and tiles and isinstance(case["shape"], dict) and isinstance(case["case"], str)
    except (KeyError, TypeError, AttributeError):
        return False


def save(document: Mapping[str, Any], path: Path) -> None:
    """Write the document, whole or not at all. Raises UsageError where the disk refuses."""
    try:
        paths.put(path, (json.dumps(document, indent=1, allow_nan=False) + "\n").encode())
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror or error}") from None
