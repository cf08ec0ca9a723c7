"""Hardware counters of cells: what each cell's kernels moved, counted by Nsight Compute.

    count_cells(cells, target, folder=Path("out/counters"), on_count=keep)

The cells run in processes of their own under the profiler (child.py), some dozens in each, so that a
crash or a hang costs that batch only. A cell's counters are a mapping, as they stand in a record::

    {"tool": "ncu 2025.3.1.0", "cache_control": "all", "clock_control": "none", "replay": "kernel",
     "started_at": "2026-…", "clocks": {"before": {…}, "after": {…}}, "total": {counter: value, …},
     "kernels": [{"kernel", "grid", "block", counter: value, …}, …]}

or ``{"reason": "…"}`` where there are none. started_at (UTC) is of the cell's process, and so are clocks:
what NVML reads just before it starts and just after it ends, empty where NVML does not answer. Counter
names and units: _profilers/counters.py. Times in them are the profiler's and only good for shares.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flashbench import environment
from flashbench._profilers import counters, ncu, ncu_csv
from flashbench._profilers.clocks import Clocks, open_clocks, optional
from flashbench.errors import RunFileError
from flashbench.kernels import Target
from flashbench.problem import Cell

BATCH = 28
"""Jobs per process: starting one takes some 10 s, and a lost one loses so many."""
START_S, JOB_S = 120.0, 30.0
"""A batch is given START_S and JOB_S for each job before it counts as hung."""

Counters = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Job:
    """Something to run under the profiler. what: its parameters, JSON-able.

    kind: ``cell``, ``step`` (of a decode) or ``known``.
    """

    kind: str
    what: Mapping[str, Any]


def cell_job(cell: Cell) -> Job:
    """The job that runs one cell."""
    return Job(kind="cell", what=cell.to_json())


def why_unavailable(target: Target) -> str | None:
    """Why nothing can be counted here, one sentence with its remedy, or None. Starts nothing."""
    if _is_amd(target):
        return (
            "Nsight Compute counts on NVIDIA GPUs only; on AMD's use rocprofv3 by hand, as flashbench does"
            " not support it yet"
        )
    if target.type != "cuda":
        return "counters need an NVIDIA GPU; without one, 'flashbench profile --trace' counts exactly"
    return ncu.why_unavailable()


def _is_amd(target: Target) -> bool:
    """By its name, or as this torch is one for ROCm, whose GPUs are called ``cuda`` as well."""
    import torch

    named = target.type == "cuda" and re.search(r"\bAMD\b|Instinct|Radeon", target.name)
    return bool(torch.version.hip or named)


def count_cells(
    cells: Sequence[Cell],
    target: Target,
    *,
    folder: Path,
    on_count: Callable[[Cell, Counters], None],
    detail: bool = False,
    seed: int = 0,
    tuned: Path | None = None,
) -> None:
    """Count the cells in the order given; on_count gets each one's counters, or the reason for none.

    folder: takes the profiler's raw CSV files, one per batch. detail: also the counters of the group
    ``detail``, at more passes over each kernel. tuned: a file as ``tuned.read`` takes it. Raises nothing for
    what ncu or a cell does.
    """
    jobs = [cell_job(cell) for cell in cells]

    def keep(index: int, found: Counters) -> None:
        on_count(cells[index], found)

    count_jobs(jobs, target, folder=folder, on_count=keep, detail=detail, seed=seed, tuned=tuned)


def count_jobs(
    jobs: Sequence[Job],
    target: Target,
    *,
    folder: Path,
    on_count: Callable[[int, Counters], None],
    detail: bool = False,
    seed: int = 0,
    tuned: Path | None = None,
) -> None:
    """As count_cells, for jobs of any kind; on_count gets the job's index."""
    reason = why_unavailable(target)
    clocks = None
    if reason is None:
        folder.mkdir(parents=True, exist_ok=True)
        clocks = optional(lambda: open_clocks(target.device))
    for first in range(0, len(jobs), BATCH):
        batch = jobs[first : first + BATCH]
        if reason is None:
            found, reason = _Batch(batch, target, folder, seed, tuned).run(detail, clocks)
        else:
            found = [{"reason": reason}] * len(batch)
        for offset, counted in enumerate(found):
            on_count(first + offset, counted)


class _Batch:
    """Some jobs in one process under the profiler."""

    def __init__(
        self, jobs: Sequence[Job], target: Target, folder: Path, seed: int, tuned: Path | None
    ) -> None:
        self.jobs = jobs
        self.tuned = tuned
        self.target = target
        self.seed = seed
        number = 1 + sum(1 for path in folder.glob("counters-*.csv"))
        self.log = folder / f"counters-{number:03d}.csv"
        self.spec = self.log.with_suffix(".jobs.json")
        self.said = self.log.with_suffix(".said.jsonl")

    def run(self, detail: bool, clocks: Clocks | None) -> tuple[list[Counters], str | None]:
        """Each job's counters, and why no further batch needs to be tried, if so."""
        spec = {
            "device": self.target.device, "seed": self.seed, "said": str(self.said),
            "jobs": [asdict(job) for job in self.jobs],
            "tuned": str(self.tuned) if self.tuned else None,
        }  # fmt: skip
        self.spec.write_text(json.dumps(spec), encoding="utf-8")
        self.said.unlink(missing_ok=True)
        target = [sys.executable, "-m", "flashbench.counting.child", str(self.spec)]
        limit = START_S + JOB_S * len(self.jobs)
        started_at = datetime.now(UTC).isoformat(timespec="seconds")
        before = _read(clocks)
        profile = ncu.profile(counters.metrics(detail=detail), self.log, target, limit, _surroundings())
        read = {"before": before, "after": _read(clocks)} if clocks else {}
        said = self._said()
        try:
            kernels = ncu_csv.parse(profile.csv, source=str(self.log), only=counters.READ)
        except RunFileError as error:
            kernels, profile = (), ncu.Profile(csv="", reason=profile.reason or str(error))
        found = [
            counted if "reason" in counted else {**counted, "started_at": started_at, "clocks": read}
            for counted in self._join(kernels, said, profile)
        ]
        self.spec.unlink(missing_ok=True)
        self.said.unlink(missing_ok=True)
        refused = bool(profile.reason) and not said
        return found, profile.reason if refused else None

    def _said(self) -> dict[int, str]:
        """What the child said of each job that it came to: a reason, or empty for a job that ran."""
        try:
            lines = self.said.read_text(encoding="utf-8").splitlines()
        except OSError:
            return {}
        rows = [json.loads(line) for line in lines if line.endswith("}")]
        return {row["index"]: row["reason"] for row in rows}

    def _join(
        self, kernels: Sequence[ncu_csv.Kernel], said: Mapping[int, str], profile: ncu.Profile
    ) -> list[Counters]:
        tool = f"ncu {_version() or '(version unknown)'}"
        of_job: dict[int, list[ncu_csv.Kernel]] = {}
        for kernel in kernels:
            for name in kernel.ranges:
                if found := re.fullmatch(rf"{ncu.RANGE}#(\d+)", name):
                    of_job.setdefault(int(found.group(1)), []).append(kernel)
        result: list[Counters] = []
        for index in range(len(self.jobs)):
            if reason := said.get(index) or _why_none(index, said, profile, bool(of_job.get(index))):
                result.append({"reason": reason})
                continue
            counted = counters.count(of_job[index])
            result.append({
                "tool": tool, **ncu.CONDITIONS,
                **({"missing": list(profile.missing)} if profile.missing else {}),
                "total": counters.total(counted),
                "kernels": [
                    {"kernel": row.kernel, "grid": row.grid, "block": row.block, **row.counters}
                    for row in counted
                ],
            })  # fmt: skip
        return result


def _why_none(index: int, said: Mapping[int, str], profile: ncu.Profile, counted: bool) -> str:
    if index in said:
        return "" if counted else profile.reason or "the profiler saw no kernel of this cell"
    return profile.reason or "the profiled process ended before this cell"


def _read(clocks: Clocks | None) -> dict[str, Any]:
    return clocks.read() | clocks.others() if clocks else {}


def _version() -> str | None:
    path = ncu.find()
    return ncu.version(path) if path else None


def _surroundings() -> dict[str, str]:
    """Of the child: memory in plain segments, as the profiler saves and restores all between its passes."""
    given = os.environ.get("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:False")
    return environment.for_child(PYTORCH_CUDA_ALLOC_CONF=given)
