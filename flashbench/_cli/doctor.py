"""``flashbench doctor``: what this machine offers, and what to do about what it lacks."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from flashbench._cli import options, streams
from flashbench._cli.finding import OK, PROBLEM, WARN, Finding
from flashbench.errors import UnavailableError, in_words
from flashbench.installed import version_of

if TYPE_CHECKING:
    from flashbench._cli.driver import Driver, Gpu

PARAMETERS = Path("/proc/driver/nvidia/params")
LOW_DISK_BYTES = 2 * 10**9


def doctor(json: options.Json = False, csv: options.Csv = False) -> None:
    """Say what this machine offers and what to do about what it lacks.

    'warn' is what makes numbers less trustworthy or leaves something out, 'problem' what keeps
    flashbench from its main job. It is a report: exits 0 whatever it finds.
    """
    from flashbench import console
    from flashbench.console import Column

    options.one_format(json, csv)
    elsewhere = folder()
    columns = [
        Column(name="name", header="what"),
        Column(name="state", header="state"),
        Column(name="detail", header="found"),
        Column(name="todo", header="what to do", format=lambda text: text or "-"),
    ]
    console.show_table(
        columns, [asdict(finding) for finding in (*elsewhere, *findings())], json=json, csv=csv
    )


def folder() -> list[Finding]:
    """A working directory that is gone; torch's libraries end a process there, so this one leaves it."""
    reason = streams.gone()
    if reason is None:
        return []
    os.chdir(os.sep)
    todo = "cd to a folder that exists: every other command needs one"
    return [Finding(name="folder", state=PROBLEM, detail=f"the working directory {reason}", todo=todo)]


def findings() -> list[Finding]:
    """Everything that is looked at, in order; a look that fails is a finding itself."""
    from flashbench._cli import surroundings
    from flashbench._cli.driver import look

    driver = look()
    looks: list[tuple[str, Callable[[], Iterable[Finding]]]] = [
        ("python", python),
        ("torch", torch_),
        ("driver", lambda: driver_(driver)),
        ("gpu", lambda: (finding for gpu in driver.gpus for finding in gpu_(gpu))),
        ("ncu", lambda: ncu(find_ncu(), PARAMETERS, privileged=_privileged(), gpu=bool(driver.gpus))),
        ("triton", triton),
        ("cores", cores),
        ("disk", lambda: disk(Path.cwd())),
        *surroundings.LOOKS,
    ]
    found: list[Finding] = []
    for name, look_at in looks:
        try:
            found.extend(look_at())
        except UnavailableError as error:
            found.append(Finding(name=name, state=PROBLEM, detail=str(error), todo=error.hint))
        except Exception as error:  # a broken installation raises whatever it likes
            found.append(
                Finding(name=name, state=PROBLEM, detail=in_words(error), todo="repair or reinstall it")
            )
    return found


def python() -> Iterator[Finding]:
    """The interpreter that runs this."""
    version = ".".join(map(str, sys.version_info[:3]))
    yield Finding(name="python", state=OK, detail=f"{version} at {sys.executable}")


def torch_() -> Iterator[Finding]:
    """Which torch, and whether it can use a GPU: CPU-only, no driver, hidden, or fine."""
    from flashbench import environment

    status = environment.gpu_status()
    detail = status.message
    if status.kind == "no-torch":
        yield Finding(name="torch", state=PROBLEM, detail=detail, todo=status.hint)
        return
    import torch

    if status.kind == "ok":
        detail = f"{torch.__version__} (CUDA {torch.version.cuda}); {detail}"
        yield Finding(name="torch", state=OK, detail=detail)
    elif status.kind == "cpu-only-torch" and not status.hint:
        todo = "nothing on a machine without a GPU: naive and sdpa run on the CPU, flash is checked"
        yield Finding(name="torch", state=WARN, detail=f"{detail} (CPU-only torch)", todo=todo)
    else:
        todo = status.hint or "run on a machine with a GPU, or stay with --device cpu"
        yield Finding(name="torch", state=PROBLEM, detail=f"{detail} ({status.kind})", todo=todo)


def driver_(driver: Driver) -> Iterator[Finding]:
    """The NVIDIA driver."""
    if driver.gpus:
        yield Finding(name="driver", state=OK, detail=f"NVIDIA {driver.version or 'of unknown version'}")
        return
    why, state = driver.why_none, WARN
    todo = "install the NVIDIA driver if this machine has an NVIDIA GPU; else nothing"
    if "mismatch" in why.lower():
        state, todo = PROBLEM, "reboot, or reload the driver: its library and its kernel module differ"
    elif "nvidia-ml-py" in why:
        todo = "pip install nvidia-ml-py: without it no clocks, caps, power and neighbours are told"
    yield Finding(name="driver", state=state, detail=why, todo=todo)


def gpu_(gpu: Gpu) -> Iterator[Finding]:
    """What of a GPU matters for timing: its roofs, clocks, persistence, neighbours, MIG."""
    from flashbench import devices

    name = f"gpu {gpu.index}"
    row = devices.match(gpu.name or "")
    if row is not None:
        yield Finding(name=name, state=OK, detail=f"{gpu.name} ({row.name})")
    else:
        todo = "add a row to flashbench/devices.py; until then fractions of the roofs stay empty"
        yield Finding(name=name, state=WARN, detail=f"{gpu.name}: its peaks are not known", todo=todo)
    clocks = f"SM {gpu.clock_mhz or '?'} MHz now, {gpu.max_clock_mhz or '?'} MHz at most"
    if gpu.caps:
        todo = "let it cool down, or raise the limit (nvidia-smi -q -d PERFORMANCE)"
        yield Finding(
            name=f"{name} clocks", state=WARN, detail=f"{clocks}; held back: {', '.join(gpu.caps)}", todo=todo
        )
    else:
        yield Finding(name=f"{name} clocks", state=OK, detail=clocks)
    if gpu.persistence is False:
        todo = f"nvidia-smi -i {gpu.index} -pm 1 (as root): the first call then does not wake the driver"
        yield Finding(name=f"{name} persistence", state=WARN, detail="off", todo=todo)
    elif gpu.persistence is None:
        yield Finding(name=f"{name} persistence", state=OK, detail="the driver does not tell")
    else:
        yield Finding(name=f"{name} persistence", state=OK, detail="on")
    if gpu.processes:
        pids = ", ".join(map(str, gpu.processes))
        todo = "stop them, or measure when the GPU is free: they share its time and memory"
        yield Finding(
            name=f"{name} processes", state=WARN, detail=f"{len(gpu.processes)} others: {pids}", todo=todo
        )
    else:
        detail = "no others" if gpu.processes is not None else "the driver does not tell"
        yield Finding(name=f"{name} processes", state=OK, detail=detail)
    if gpu.mig:
        todo = "numbers are those of a slice; disable MIG for the whole card (nvidia-smi -mig 0)"
        yield Finding(name=f"{name} MIG", state=WARN, detail="on", todo=todo)
    else:
        yield Finding(name=f"{name} MIG", state=OK, detail="off" if gpu.mig is False else "not supported")


def find_ncu() -> str | None:
    """Where Nsight Compute is, as ``profile`` would find it, or None."""
    from flashbench._profilers import ncu as tool

    return tool.find()


def ncu(path: str | None, parameters: Path, *, privileged: bool, gpu: bool) -> Iterator[Finding]:
    """Whether hardware counters can be read: Nsight Compute and the driver's permission."""
    if path is None:
        todo = "install Nsight Compute and put ncu on PATH" if gpu else "nothing without a GPU"
        yield Finding(name="ncu", state=WARN, detail="not found: no measured DRAM bytes", todo=todo)
    else:
        yield Finding(name="ncu", state=OK, detail=path)
    if not gpu:
        return
    try:
        said = parameters.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        detail = f"{parameters}: {error.strerror}"
        yield Finding(name="counters", state=WARN, detail=detail, todo="try ncu; ERR_NVGPUCTRPERM means no")
        return
    admin_only = "RmProfilingAdminOnly: 0" not in " ".join(said.split())
    if not admin_only:
        yield Finding(name="counters", state=OK, detail="open to all users (RmProfilingAdminOnly 0)")
    elif privileged:
        yield Finding(name="counters", state=OK, detail="for administrators only, and this process is one")
    else:
        todo = "run as root, or load the driver with NVreg_RestrictProfilingToAdminUsers=0"
        yield Finding(
            name="counters", state=WARN, detail="for administrators only (ERR_NVGPUCTRPERM)", todo=todo
        )


CAP_SYS_ADMIN = 21


def _privileged(status: Path = Path("/proc/self/status")) -> bool:
    """True where this process holds CAP_SYS_ADMIN, which the driver asks for."""
    try:
        lines = status.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return hasattr(os, "geteuid") and os.geteuid() == 0
    mask = next((int(line.split()[1], 16) for line in lines if line.startswith("CapEff:")), 0)
    return bool(mask >> CAP_SYS_ADMIN & 1)


def triton() -> Iterator[Finding]:
    """Whether the bundled kernel runs here: compiled, interpreted or not at all."""
    from flashbench import environment, kernels

    version = version_of("triton")
    target = environment.target(None)
    row = kernels.get("flash")
    why_not = row.why_unavailable(target)
    if why_not is not None:
        what = f"{version}: not usable: {why_not}" if version else why_not
        todo = why_not.rpartition(": ")[2] if "pip install" in why_not else "see the reason"
        yield Finding(name="triton", state=PROBLEM, detail=what, todo=todo)
    elif row.interpreted(target):
        detail = f"{version}, interpreter: flash is checked, never timed"
        yield Finding(name="triton", state=OK, detail=detail)
    else:
        yield Finding(name="triton", state=OK, detail=f"{version}, compiled for {target.name}")


def cores() -> Iterator[Finding]:
    """Cores that this process may use."""
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    yield Finding(name="cores", state=OK, detail=f"{usable} usable of {os.cpu_count()}")


def disk(folder: Path) -> Iterator[Finding]:
    """Room for results and compiled kernels."""
    from flashbench import units

    free = shutil.disk_usage(folder).free
    detail = f"{units.format_bytes(free)} free in {folder}"
    if free < LOW_DISK_BYTES:
        yield Finding(name="disk", state=WARN, detail=detail, todo="free some: results and kernels need room")
    else:
        yield Finding(name="disk", state=OK, detail=detail)
