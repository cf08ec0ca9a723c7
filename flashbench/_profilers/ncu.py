"""Drives Nsight Compute: which command, and what its refusals mean.

Only kernels inside an NVTX range named RANGE are counted, so that neither inputs nor compilation nor
warm-up are; a start/stop range, as a backward launches its kernels from a thread of autograd's own.
Clocks are left alone and the caches are flushed before each kernel, and both are said in the results.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

RANGE = "flashbench"
"""NVTX range of what is counted."""
CACHE_CONTROL = "all"
"""Flushed before every pass over every kernel: each starts with a cold L2."""
CLOCK_CONTROL = "none"
REPLAY = "kernel"
CONDITIONS = {"cache_control": CACHE_CONTROL, "clock_control": CLOCK_CONTROL, "replay": REPLAY}

_PLACES = ("/usr/local/cuda/bin/ncu", "/opt/nvidia/nsight-compute/*/ncu", "/usr/local/cuda-*/bin/ncu")


@dataclass(frozen=True)
class Refusal:
    """What in ncu's output means what, and what to do about it. ``{}`` is the pattern's first group."""

    pattern: str
    meaning: str
    remedy: str


REFUSALS = (
    Refusal(
        r"ERR_NVGPUCTRPERM|INSUFFICIENT_PRIVILEGES|permission to access NVIDIA GPU Performance Counters",
        "the driver keeps the performance counters from this user (ERR_NVGPUCTRPERM)",
        "run as root or with CAP_SYS_ADMIN (docker --cap-add=SYS_ADMIN), or let the host load the nvidia"
        " module with NVreg_RestrictProfilingToAdminUsers=0",
    ),
    Refusal(
        r"driver resource was unavailable|DriverResourceUnavailable|already in use by another|"
        r"profiling tool is already attached",
        "the counters are in use by another tool (such as DCGM or a second profiler)",
        "stop it while this runs: 'dcgmi profile --pause', or 'systemctl stop nvidia-dcgm'",
    ),
    Refusal(
        r"\bMIG\b",
        "the counters of a MIG slice cannot be read",
        "profile on a whole GPU, or use the interpreter's trace ('flashbench profile --trace')",
    ),
    Refusal(
        r"(?i)\bv-?GPU\b|virtual GPU",
        "the counters of this virtual GPU are closed",
        "enable profiling for the vGPU in the hypervisor (plugin parameter enable_profiling=1), or profile on"
        " a whole GPU",
    ),
    Refusal(
        r"\bWSL\b|Windows Subsystem",
        "the counters are closed under WSL",
        "allow them for all users in the NVIDIA Control Panel on the Windows side (Developer settings)",
    ),
    Refusal(
        r"(not supported|unsupported).{0,40}(GPU|device|chip|driver)|LibraryNotLoaded|no compatible GPU",
        "this version of Nsight Compute does not know this GPU or driver",
        "install the Nsight Compute of the driver's CUDA version",
    ),
    Refusal(
        r"(?i)cuda driver is not compatible",
        "this Nsight Compute and the CUDA driver do not fit each other",
        "update the older of them: ncu, or the driver",
    ),
    Refusal(
        r"(?i)(unrecogni[sz]ed (?:command[- ]line )?option\s*\S*)",
        "this Nsight Compute is too old: {}",
        "install a newer one, or set FLASHBENCH_NCU to its path",
    ),
    Refusal(
        r"[Ff]ailed to (?:access|find)(?: the following)?(?: \d+)? metrics?:?\s*(?:regex:)?(.*)",
        "this Nsight Compute or this GPU lacks metrics: {}",
        "install the newest Nsight Compute that knows the GPU, or count without --detail",
    ),
    Refusal(
        r"No space left on device",
        "the disk is full (No space left on device)",
        "free some of it, or name other folders with --out and TMPDIR",
    ),
    Refusal(
        r"InterprocessLockFailed|[Ff]ailed to (open|create|obtain).{0,40}lock",
        "another Nsight Compute holds its lock file",
        "wait for it, or give this one a folder of its own: set TMPDIR",
    ),
    Refusal(
        r"==ERROR==.*\bUnknown ?Error\b|[Ff]ailed to prepare kernel for profiling",
        "Nsight Compute could not prepare a kernel (UnknownError)",
        "stop what else profiles this GPU (DCGM: 'dcgmi profile --pause'), and see that the cell runs without"
        " --counters",
    ),
)  # fmt: skip
"""Why a profile may be refused. To know another one, add a row."""

_UNKNOWN_METRICS = re.compile(
    r"[Ff]ailed to (?:find metric|access the following(?: \d+)? metric)(.*?)(?=^==|^\"|\Z)",
    re.DOTALL | re.MULTILINE,
)
_CHILD_FAILED = "The application returned an error code"
_TRACEBACK = "Traceback (most recent call last):"


@dataclass(frozen=True, kw_only=True)
class Profile:
    """What a profiled command left: the CSV, or the reason (with its remedy) why there is none."""

    csv: str = ""
    reason: str = ""
    missing: tuple[str, ...] = ()


def find() -> str | None:
    """The path of ncu: $FLASHBENCH_NCU, the PATH, or where CUDA installs it; None where it is not."""
    asked = os.environ.get("FLASHBENCH_NCU")
    if asked is not None:
        return shutil.which(asked)
    if found := shutil.which("ncu"):
        return found
    for pattern in _PLACES:
        root = Path(pattern.split("*")[0])
        matches = sorted(Path("/").glob(pattern.lstrip("/"))) if root.parent.exists() else []
        if matches:
            return str(matches[-1])
    return None


def why_unavailable() -> str | None:
    """Why no counters can be asked for here, one sentence with its remedy, or None. Starts nothing."""
    if find() is None:
        if asked := os.environ.get("FLASHBENCH_NCU"):
            return (
                f"ncu (Nsight Compute) is not at FLASHBENCH_NCU ({asked!r}); install it (it comes with CUDA,"
                " or as nsight-compute) and set FLASHBENCH_NCU to its path, or unset it"
            )
        return (
            "ncu (Nsight Compute) is not here; install it (it comes with CUDA, or as nsight-compute), or"
            " set FLASHBENCH_NCU to its path"
        )
    return None


def version(path: str) -> str | None:
    """Such as ``2025.3.1.0``, or None where ncu does not say."""
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=30, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = re.search(r"Version (\S+)", said.stdout)
    return found.group(1) if found else None


def command(path: str, metrics: Sequence[str], log: Path, target: Sequence[str]) -> list[str]:
    """The whole command line: the metrics of every kernel inside RANGE of the target command."""
    return [
        path, "--target-processes", "all", "--nvtx", "--nvtx-include", RANGE,
        "--clock-control", CLOCK_CONTROL, "--cache-control", CACHE_CONTROL, "--replay-mode", REPLAY,
        "--csv", "--page", "raw", "--print-units", "base", "--log-file", str(log),
        "--metrics", ",".join(metrics), *target,
    ]  # fmt: skip


def profile(
    metrics: Sequence[str],
    log: Path,
    target: Sequence[str],
    timeout_s: float,
    environment: Mapping[str, str] | None = None,
) -> Profile:
    """Run the target command under ncu and read its CSV; never raises for what ncu does.

    Metrics that the chip lacks are named in ``missing`` and left out in a second try. A run that
    hangs is stopped with all its processes after timeout_s.
    """
    path = find()
    if path is None:
        return Profile(reason=why_unavailable() or "")
    wanted, missing = list(metrics), []
    while True:
        log.unlink(missing_ok=True)
        code, said = _run(command(path, wanted, log, target), timeout_s, environment)
        csv = log.read_text(encoding="utf-8", errors="replace") if log.exists() else ""
        named = re.findall(r"\w[\w.]*\w", " ".join(_UNKNOWN_METRICS.findall(f"{said}\n{csv}")))
        unknown = [name for name in wanted if name in named]
        if not unknown or len(unknown) == len(wanted):
            break
        missing += unknown
        wanted = [name for name in wanted if name not in unknown]
    return Profile(csv=csv, reason=_why(code, f"{said}\n{csv}", timeout_s), missing=tuple(missing))


def _why(code: int | None, said: str, timeout_s: float) -> str:
    """Why the profile is not whole, or empty. A refusal counts also where ncu exits with 0."""
    lines = "\n".join(line for line in said.splitlines() if not line.startswith('"'))
    if refusal := explain(lines):
        return refusal
    if code is None:
        return f"ncu did not end within {timeout_s:g} s and was stopped; profile fewer or shorter cells"
    if code != 0:
        return f"ncu exited with {code}: {_cause(lines)}"
    return ""


def _cause(said: str) -> str:
    """The line that tells most: ncu's first error, else what the child raised, else what came last."""
    lines = [line for line in said.splitlines() if line.strip() and not line.startswith("==PROF==")]
    errors = [line for line in lines if line.startswith("==ERROR==") and _CHILD_FAILED not in line]
    raised: list[str] = []
    if _TRACEBACK in said:
        after = said.rpartition(_TRACEBACK)[2].splitlines()
        raised = [line for line in after if line.strip() and line[0] not in " \t=|+"]
    told = [*errors, *raised, *lines[-1:], "it said nothing"]
    return told[0].strip()[:300]


def explain(said: str) -> str:
    """The meaning and the remedy of a refusal in ncu's output, or empty where none is known in it."""
    joined = re.sub(r"(metrics:)\s*\n\s+", r"\1 ", said)  # their names may begin on a line of their own
    errors = "\n".join(line for line in joined.splitlines() if re.search(r"ERR|rror|==WARN|not |WSL", line))
    for row in REFUSALS:
        if found := re.search(row.pattern, errors):
            return f"{row.meaning.format(*found.groups())}; {row.remedy}"
    return ""


def _run(line: list[str], timeout_s: float, environment: Mapping[str, str] | None) -> tuple[int | None, str]:
    """Exit code (None: stopped) and all that was said. Its processes do not outlive it."""
    try:
        process = subprocess.Popen(
            line, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            errors="replace", start_new_session=True, env=environment,
        )  # fmt: skip
    except OSError as error:
        return 127, f"==ERROR== {line[0]}: {error.strerror or error}"
    try:
        said, _ = process.communicate(timeout=timeout_s)
        return process.returncode, said
    except subprocess.TimeoutExpired:
        return None, _stop(process)
    except BaseException:  # Ctrl-C reaches this process only: the child has a session of its own
        _stop(process)
        raise


def _stop(process: subprocess.Popen[str]) -> str:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    return process.communicate()[0]
