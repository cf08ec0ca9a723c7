"""What went wrong with a cell, as the fields of its record."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flashbench.errors import message
from flashbench.kernels import Implementation, Misbehaviour, Refusal
from flashbench.record import Accuracy


class ReferenceFailed(Exception):
    """The fp64 check itself could not be computed; the cause is chained."""


def with_source(outcome: Mapping[str, Any], implementation: Implementation) -> dict[str, Any]:
    """The outcome; whatever became of a function of somebody's own, its row says of which source it is."""
    if implementation.origin is None:
        return dict(outcome)
    return {**outcome, "config": {**outcome.get("config", {}), **implementation.origin.facts()}}


def failure(error: BaseException) -> dict[str, Any]:
    """``oom`` or ``failed``, or what a Refusal or a Misbehaviour stands for, and why."""
    if isinstance(error, Refusal | Misbehaviour):
        return {"status": "unsupported" if isinstance(error, Refusal) else "wrong", "reason": message(error)}
    where = ""
    cause: BaseException = error
    if isinstance(error, ReferenceFailed) and error.__cause__ is not None:
        where, cause = "the fp64 reference: ", error.__cause__
    status = "oom" if _is_out_of_memory(cause) else "failed"
    frames = traceback.extract_tb(cause.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno} in {frames[-1].name})" if frames else ""
    return {"status": status, "reason": f"{where}{what(cause)}{place if status == 'failed' else ''}"}


def _is_out_of_memory(error: BaseException) -> bool:
    names = {kind.__name__ for kind in type(error).__mro__}  # torch's class without importing torch
    if names & {"OutOfMemoryError", "MemoryError"}:
        return True
    said = message(error)
    return isinstance(error, RuntimeError) and (
        "out of memory" in said or "can't allocate memory" in said or "not enough memory" in said
    )


def what(error: BaseException) -> str:
    """Type and first line of the message, at most 300 characters."""
    lines = [line.strip() for line in message(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else 'no message'}"[:300]


def why_wrong(accuracy: Accuracy, hint: str = "") -> str:
    """Each tensor that is off, by how much, and what it may be; where it is o, what that may come from."""
    parts = [
        f"{name} is off by {error:.3g}, allowed {accuracy.budget[name]:.3g}"
        for name, error in accuracy.max_abs_error.items()
        if not error <= accuracy.budget[name]
    ]
    o_is_off = not accuracy.max_abs_error.get("o", 0.0) <= accuracy.budget.get("o", 0.0)
    return "; ".join([*parts, *([hint] if hint and o_is_off else [])])


def duration(seconds: float) -> str:
    """A time as it is typed: 300 -> "5m"."""
    hours, rest = divmod(round(seconds), 3600)
    minutes, left = divmod(rest, 60)
    parts = [f"{hours}h" * bool(hours), f"{minutes}m" * bool(minutes), f"{left}s" * bool(left)]
    return "".join(parts) or f"{seconds:g}s"
