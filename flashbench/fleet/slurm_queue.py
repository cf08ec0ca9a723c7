"""Jobs of one card each, submitted to Slurm through submitit: what they ask for, and how they end."""

from __future__ import annotations

import logging
import re
import shutil
import subprocess
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from flashbench import units
from flashbench._runner.outcomes import what
from flashbench.errors import SpecError, UnavailableError
from flashbench.fleet.slurm_job import Job

EXTRA = "pip install 'flashbench[slurm]'"
TIME_MIN = 60
"""What a job asks for where nobody says; submitit's own 5 minutes are too few."""
SHOWS_S = 5.0
"""A network file system may take so long to show what a job that is over has written."""
TAIL = 300
"""Characters of a job's log that are told."""

ACCEPTED = "sbatch's long options such as 'partition=gpu,time=2:00:00,gres=gpu:h100:1'"
OURS = (
    "array", "dependency", "error", "job-name", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output",
    "signal", "wrap",
)  # fmt: skip
"""Options of sbatch that a sweep sets itself."""
_CARD = re.compile(r"gres|gpus(-per-.*)?")
_TIME = re.compile(r"(?:(\d{1,2})-)?(\d{1,3}):(\d\d)(?::(\d\d))?")


def parse(text: str, label: str) -> dict[str, str]:
    """The options of ``--slurm-args``: ``a=1,b=2,3`` is {"a": "1", "b": "2,3"}. Raises SpecError."""
    found: dict[str, str] = {}
    last = ""
    if not text:
        return found
    for part in text.split(","):
        key, sign, value = part.strip().partition("=")
        if not sign and last and key:
            found[last] += f",{key}"  # of a list: nodelist=a,b
            continue
        key, value = key.removeprefix("--").replace("_", "-"), value.strip()
        if not re.fullmatch(r"[a-z][a-z0-9-]*", key) or not value or not value.isprintable():
            raise SpecError(f"{label} {units.quoted(text)}: {units.quoted(part)}; accepted: {ACCEPTED}")
        if key in OURS:
            raise SpecError(
                f"{label} {units.quoted(text)}: {key} is the sweep's own; accepted: other options of sbatch"
            )
        if key in found:
            raise SpecError(f"{label} {units.quoted(text)}: {key} twice; accepted: each option once")
        found[key], last = value, key
    if "time" in found:
        minutes(found["time"], label)
    return found


def minutes(text: str, label: str) -> int:
    """Slurm's time limit (minutes, H:MM:SS, D-H:MM:SS) in minutes, as submitit wants it. Raises SpecError."""
    if re.fullmatch(r"[1-9]\d{0,5}", text):
        return int(text)
    if not (found := _TIME.fullmatch(text)):
        raise SpecError(f"{label} time={text}: accepted: minutes, H:MM:SS or D-H:MM:SS")
    days, first, second, third = (int(part or 0) for part in found.groups())
    if found[4] is None and found[1] is None:  # MM:SS
        total = first + (second > 0)
    else:
        total = (24 * days + first) * 60 + second + (third > 0)
    if not total:
        raise SpecError(f"{label} time={text}: no time at all; accepted: minutes, H:MM:SS or D-H:MM:SS")
    return total


class Queue:
    """Where jobs are submitted. logs: the folder for submitit's files. arguments: as from ``parse``.

    executor: of submitit, for tests. Raises UnavailableError without submitit, or without Slurm.
    """

    def __init__(
        self, logs: Path, *, on_gpu: bool, arguments: Mapping[str, str], executor: Any = None
    ) -> None:  # fmt: skip
        try:
            import submitit
        except ImportError as error:
            raise UnavailableError(f"--executor 'slurm': {what(error)}", hint=EXTRA) from None
        logging.getLogger("submitit").setLevel(logging.CRITICAL)  # it writes to stdout
        self._logs = logs
        if executor is not None:
            self._executor = executor(logs)
            return
        for program in ("sbatch", "srun"):
            if shutil.which(program) is None:
                raise UnavailableError(
                    f"--executor 'slurm': {program!r} is not found on this host",
                    hint="start it on a login node of the cluster; --executor local takes this host's cards",
                )
        self._executor = submitit.SlurmExecutor(logs, max_num_timeout=1000)
        known, more = _asked(on_gpu, arguments, self._executor._valid_parameters())
        self._executor.update_parameters(**known, additional_parameters=more)

    def submit(self, count: int, job: Job) -> list[Any]:
        """So many jobs, which are one array. Raises UnavailableError where Slurm refuses them."""
        try:
            with self._executor.batch():
                made = [self._executor.submit(job) for _ in range(count)]
            return [one for one in made if one.job_id]
        except (RuntimeError, subprocess.SubprocessError, OSError) as error:
            said = (getattr(error, "stderr", None) or str(error)).strip()
            said = " ".join((said.decode(errors="replace") if isinstance(said, bytes) else said).split())
            raise UnavailableError(f"--executor 'slurm': sbatch refuses the jobs: {said[-TAIL:]}") from None


def _asked(
    on_gpu: bool, arguments: Mapping[str, str], valid: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """What submitit calls parameters, and what it passes on to sbatch as it is."""
    asked: dict[str, Any] = {"requeue": "true", "time": str(TIME_MIN), **arguments}
    if on_gpu and not any(map(_CARD.fullmatch, asked)):
        asked["gpus-per-node"] = "1"
    if not any(name.startswith("cpus-per-") for name in asked):
        asked["cpus-per-task"] = "2"
    asked["time"] = minutes(asked["time"], "--slurm-args")
    asked = {name: True if value == "true" else value for name, value in asked.items()}
    known, more = dict[str, Any](job_name="flashbench", wckey=None), dict[str, Any]()
    for name, value in asked.items():
        if (own := name.replace("-", "_")) in valid:
            known[own] = value
        else:
            more[name] = value
    return known, more


def how_it_ended(job: Any) -> str:
    """Why a job that is over raised or was lost, in one line; empty where it came to its end."""
    deadline = time.monotonic() + SHOWS_S
    while not (shown := job.paths.result_pickle.exists()) and time.monotonic() < deadline:
        if job.state not in ("COMPLETED", "COMPLETING"):
            break
        time.sleep(0.2)
    if not shown:
        tail = _tail(job)
        return f"job {job.job_id} is gone ({job.state})" + (f": {tail}" if tail else "")
    if (error := job.exception()) is None:
        return ""
    said = str(error).partition("\nYou can check full logs")[0]  # submitit's words round a traceback
    told = [line for line in said.splitlines() if line.strip() and not line.startswith(("-", "*", " "))]
    return f"job {job.job_id}: {told[-1].strip()[:TAIL] if told else what(error)}"


def _tail(job: Any) -> str:
    try:
        lines = (job.stderr() or "").strip().splitlines()
    except OSError:
        return ""
    return lines[-1][-TAIL:] if lines else ""
