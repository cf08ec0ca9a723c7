"""A Slurm of this host alone: sbatch, srun, sacct, scancel and scontrol as far as a sweep needs them.

    folder = fake_slurm.installed(tmp_path)    a folder for PATH with the five
    python tests/fake_slurm.py sbatch FILE     what each of them does

Jobs are processes. A job's record is a file of the folder state: its number, process and last state. Jobs
wait (PENDING) while the file ``hold`` is there.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

STATE = "FAKE_SLURM_STATE"


def installed(folder: Path) -> dict[str, str]:
    """Environment variables with which the five are found; state is kept below the folder."""
    programs, state = folder / "bin", folder / "state"
    programs.mkdir(parents=True)
    state.mkdir()
    for name in ("sbatch", "srun", "sacct", "scancel", "scontrol"):
        path = programs / name
        path.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -S {__file__} {name} "$@"\n')
        path.chmod(0o755)
    return {"PATH": f"{programs}:{os.environ['PATH']}", STATE: str(state)}


def jobs(state: Path) -> dict[str, dict[str, Any]]:
    """Every job by its number, with the state that it is in now."""
    found = {}
    for path in sorted(state.glob("*.job")):
        job = json.loads(path.read_text())
        if job["state"] == "RUNNING" and not Path(f"/proc/{job['pid']}/exe").exists():
            job["state"] = "FAILED"
        found[path.stem] = job
    return found


def keep(folder: Path, number: str, **job: Any) -> None:
    part = folder / f"{number}.part{os.getpid()}"
    part.write_text(json.dumps(job))
    part.rename(folder / f"{number}.job")


def sbatch(state: Path, script: str) -> None:
    text = Path(script).read_text()
    (state / "last.sbatch").write_text(text)
    main = str(1000 + len(list(state.glob("*.array"))))
    (state / f"{main}.array").touch()
    count = re.search(r"--array=0-(\d+)", text)
    numbers = [f"{main}_{index}" for index in range(int(count[1]) + 1)] if count else [main]
    for number in numbers:
        keep(state, number, state="PENDING", pid=0, script=script)
        subprocess.Popen(
            [sys.executable, "-S", __file__, "node", number, text], start_new_session=True,
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
    print(f"Submitted batch job {main}")


def node(state: Path, number: str, text: str) -> None:
    """What runs the job: again for as long as it is requeued."""
    main, _, index = number.partition("_")
    about = {"SLURM_JOB_ID": main, "SLURM_NTASKS": "1", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1"}
    if index:
        about |= {"SLURM_ARRAY_JOB_ID": main, "SLURM_ARRAY_TASK_ID": index}
    while True:
        while (state / "hold").exists():
            if jobs(state)[number]["state"] == "CANCELLED":
                return
            time.sleep(0.02)
        child = subprocess.Popen(["bash", "-c", text], env={**os.environ, **about}, start_new_session=True)
        keep(state, number, state="RUNNING", pid=child.pid)
        code = child.wait()
        if (mark := state / f"{number}.requeue").exists():
            mark.unlink()
            keep(state, number, state="PENDING", pid=0)
            continue
        if jobs(state)[number]["state"] != "CANCELLED":
            keep(state, number, state="FAILED" if code else "COMPLETED", pid=child.pid)
        return


def srun(*line: str) -> None:
    """Run the command with its output where it is to go."""
    values = {"%j": os.environ["SLURM_JOB_ID"], "%t": "0", "%A": os.environ.get("SLURM_ARRAY_JOB_ID", ""),
              "%a": os.environ.get("SLURM_ARRAY_TASK_ID", "")}  # fmt: skip
    rest, streams = list(line), {}
    while rest[0].startswith("--"):
        option = rest.pop(0)
        if option in ("--output", "--error"):
            streams[option] = re.sub("%[jtAa]", lambda found: values[found[0]], rest.pop(0))
    for option, descriptor in (("--output", 1), ("--error", 2)):
        if option in streams:
            with open(streams[option], "ab") as file:
                os.dup2(file.fileno(), descriptor)
    os.execvp(rest[0], rest)


def sacct(state: Path, *_: str) -> None:
    print("JobID|State|NodeList")
    for number, job in jobs(state).items():
        print(f"{number}|{job['state']}|here")


def scancel(state: Path, *line: str) -> None:
    for number, job in jobs(state).items():
        if line[0] not in (number, number.partition("_")[0]):
            continue
        if job["state"] in ("PENDING", "RUNNING"):
            keep(state, number, **{**job, "state": "CANCELLED"})
        if job["pid"]:
            kill(job["pid"])


def scontrol(state: Path, *line: str) -> None:
    assert line[0] == "requeue"
    (state / f"{line[1]}.requeue").touch()


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    with suppress(OSError):
        os.killpg(pid, number)


if __name__ == "__main__":
    kind, *line = sys.argv[1:]
    if kind == "srun":
        srun(*line)
    else:
        globals()[kind](Path(os.environ[STATE]), *line)
