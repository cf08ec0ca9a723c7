"""``flashbench decode --counters DIR``: what each step moves, counted beside what its model requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench.errors import UnavailableError

if TYPE_CHECKING:
    from flashbench.decoding import Step
    from flashbench.kernels import Target

REQUESTED = ("l2_read_bytes", "l2_write_bytes", "l2_atomic_bytes")


def folder(text: str | None, target: Target) -> Path | None:
    """The folder of --counters, refused before anything runs. Raises UsageError, UnavailableError."""
    if text is None:
        return None
    from flashbench import counting, paths
    from flashbench.errors import UsageError

    reason = "no name" if not text.strip() else paths.why_no_folder(Path(text))
    if reason is not None:
        raise UsageError(f"--counters {text!r}: {reason}; accepted: a folder that can be written")
    if unavailable := counting.why_unavailable(target):
        raise UnavailableError(f"no counters: {unavailable}")
    return Path(text)


def add(
    rows: Sequence[dict[str, Any]], steps: Sequence[Step], target: Target, folder: Path, seed: int
) -> None:
    """Count the steps of rows that are right, in as few processes as can be, and add it to their rows.

    A row gets ``counters`` as a record has them, ``counted_bytes`` between SMs and L2 without spilled
    registers, and ``counted_ratio`` to what was requested; or ``not_counted``, the reason.
    """
    from flashbench import counting, decoding

    right = [index for index, row in enumerate(rows) if row["status"] == "ok"]
    jobs = [counting.Job(kind="step", what=decoding.to_json(steps[index])) for index in right]

    def keep(job: int, counters: counting.Counters) -> None:
        rows[right[job]].update(_fields(counters, rows[right[job]]["requested_bytes"]))

    try:
        counting.count_jobs(jobs, target, folder=folder, on_count=keep, seed=seed)
    except KeyboardInterrupt:
        for index in right:
            if not {"counters", "not_counted"} & set(rows[index]):
                rows[index]["not_counted"] = "interrupted"
        raise


def _fields(counters: Mapping[str, Any], requested: int) -> dict[str, Any]:
    if reason := counters.get("reason"):
        return {"not_counted": reason}
    from flashbench.compared import SPILLED

    total = counters["total"]
    moved = [total.get(name) for name in REQUESTED]
    if None in moved:
        return {"counters": dict(counters), "not_counted": "this GPU lacks the counters"}
    counted = sum(moved) - sum(total.get(name) or 0 for name in SPILLED.values())
    return {"counters": dict(counters), "counted_bytes": counted, "counted_ratio": counted / requested}
