"""The cards of this host that a sweep is dealt out to, and what each row says of its own."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from flashbench import __version__, environment, units
from flashbench.errors import SpecError, UsageError
from flashbench.kernels import Target

ACCEPTED = "GPUs such as '0,1' or 'cuda:0,cuda:1', 'all', or 'cpu,cpu'"

VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Card:
    """One of the fleet. name: ``cuda:1``, or ``cpu:0`` for the first worker on the CPU. target: as the worker
    sees it, which sees no other card. facts: as from ``environment.collect``. surroundings: environment
    variables of the worker."""

    name: str
    target: Target
    facts: Mapping[str, Any]
    surroundings: Mapping[str, str]


def parse(text: str, label: str) -> tuple[str, ...]:
    """The devices of ``--devices`` as ``environment.target`` takes them; ``("all",)`` for all GPUs.

    label: of the option, for messages. Raises SpecError.
    """
    names = [part.strip() for part in text.split(",")]
    if names == ["all"]:
        return ("all",)
    found = []
    for name in names:
        if not re.fullmatch(r"cpu|(cuda:)?[0-9]{1,4}", name):
            raise SpecError(f"{label} {units.quoted(text)}: {units.quoted(name)}; accepted: {ACCEPTED}")
        found.append(name if name == "cpu" else f"cuda:{int(name.removeprefix('cuda:'))}")
    if len({name == "cpu" for name in found}) > 1:
        raise SpecError(f"{label} {units.quoted(text)}: the CPU beside GPUs; accepted: {ACCEPTED}")
    gpus = [name for name in found if name != "cpu"]
    if twice := [name for name in gpus if gpus.count(name) > 1]:
        raise SpecError(f"{label} {units.quoted(text)}: {twice[0]} twice; accepted: each GPU once")
    return tuple(found)


def cards_of(devices: tuple[str, ...]) -> list[Card]:
    """The cards of ``parse``'s devices. Raises UnavailableError for a GPU that is not there."""
    if devices == ("all",):
        first = environment.target("cuda", "--devices 'all'")  # tells why there is none
        import torch

        devices = tuple(f"{first.type}:{index}" for index in range(torch.cuda.device_count()))
    if devices[0] == "cpu":
        return _on_cpu(len(devices))
    return [_gpu(name) for name in devices]


def _on_cpu(workers: int) -> list[Card]:
    """Workers that share the CPU: each computes with its share of the cores."""
    target = environment.target("cpu")
    threads = max(1, len(os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else [0]) // workers)
    facts = {**environment.collect(target), "cpu_threads": threads}
    surroundings = {"OMP_NUM_THREADS": str(threads)}
    return [
        Card(name=f"cpu:{number}", target=target, facts={**facts, "device": f"cpu:{number}"},
             surroundings=surroundings)
        for number in range(workers)
    ]  # fmt: skip


def _gpu(name: str) -> Card:
    """A GPU, which its worker sees as the first and only one."""
    target = environment.target(name, f"--devices {name!r}")
    index = int(name.partition(":")[2])
    seen = [part.strip() for part in os.environ.get(VISIBLE, "").split(",") if part.strip()]
    return Card(
        name=name, target=replace(target, device="cuda:0"), facts=environment.collect(target),
        surroundings={VISIBLE: seen[index] if index < len(seen) else str(index)},
    )  # fmt: skip


ROW = ("device", "num_sms", "total_bytes", "cpu_threads", "topology")
"""What a row of a fleet says of its card beside ``environment.ROW_FIELDS``: it may be of another kind than
the header's."""


def row_facts(facts: Mapping[str, Any], neighbours: list[str]) -> dict[str, Any]:
    """The environment of a row. facts: of its card."""
    own = {**environment.row_fields(facts), **{name: facts.get(name) for name in ROW}}
    return {**own, "neighbours": neighbours}


def refuse_other(facts: Mapping[str, Any], executor: str) -> None:
    """Raise UsageError for a card whose process runs another flashbench: one file is of one."""
    theirs = (facts["flashbench"], facts["source_hash"])
    ours = (__version__, environment.source_hash())
    if theirs != ours:
        raise UsageError(
            f"--executor {executor!r}: {facts['host']} has flashbench {theirs[0]} (sources {theirs[1]}), this"
            f" process {ours[0]} ({ours[1]}); accepted: the same on every node"
        )
