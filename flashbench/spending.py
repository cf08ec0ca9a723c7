"""Where the wall time of a run went, from what its rows and its own line say of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flashbench.record import Record

PARTS = {
    "compiling ahead": (),
    "starting workers": (),
    "inputs": ("inputs_s",),
    "fp64 reference": ("reference_s", "check_s"),
    "preparing, and compiling at the first call": ("prepare_s",),
    "memory": ("memory_s",),
    "warm-up": ("warmup_s", "load_s"),
    "samples": ("samples_s",),
    "flushes of the L2": ("flushes_s",),
    "rounds put aside": (),
    "the rest of the rounds": ("rounds_s",),
    "timing by events that was given up": ("given_up_s",),
    "waiting for a cap to end": ("paused_s",),
    "energy": ("energy_s",),
}
"""What wall time goes to, and the fields of ``Record.spent`` that say how much."""
NEEDED = (
    "compiling ahead", "fp64 reference", "preparing, and compiling at the first call", "warm-up", "samples",
    "flushes of the L2",
)  # fmt: skip
"""What nobody can do without; the overhead is what comes on top."""
IN_ROUNDS = ("samples", "flushes of the L2", "rounds put aside")
ELSE = "everything else"


def seconds(records: Sequence[Record], timings: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Seconds by part. timings: as of ``RunFile.timings``; without them there is no ``everything else``."""
    found = {
        part: sum(record.spent.get(name, 0.0) for record in records for name in names)
        for part, names in PARTS.items()
    }
    found["rounds put aside"] = sum(_put_aside_s(record) for record in records)
    found["the rest of the rounds"] -= sum(found[part] for part in IN_ROUNDS)
    found["compiling ahead"] = sum(one.get("precompile_s", 0.0) for one in timings)
    found["starting workers"] = sum(one.get("starting_s", 0.0) for one in timings)
    if timings:
        found[ELSE] = sum(one.get("wall_s", 0.0) * one.get("workers", 1.0) for one in timings) - sum(
            found.values()
        )
    return found


def _put_aside_s(record: Record) -> float:
    return sum(sum((one or {}).get("samples_s") or ()) for one in record.timing.get("set_aside") or ())


def rows(records: Sequence[Record], timings: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """name, seconds and share of the wall time, the largest first; parts that took none are left out."""
    found = seconds(records, timings)
    total = sum(found.values())
    ordered = sorted(found.items(), key=lambda item: -item[1])
    return [{"name": name, "seconds": took, "share": took / total} for name, took in ordered if took > 0]


def overhead(records: Sequence[Record], timings: Sequence[Mapping[str, Any]]) -> float | None:
    """Wall time over what the run cannot do without (``NEEDED``); None for files that do not tell."""
    found = seconds(records, timings)
    needed = sum(found[part] for part in NEEDED)
    return sum(found.values()) / needed if timings and needed else None
