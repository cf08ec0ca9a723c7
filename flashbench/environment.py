"""What this machine is: the device, its driver, the versions, the source that was measured."""

from __future__ import annotations

import hashlib
import os
import platform
import re
import socket
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from flashbench import __version__
from flashbench._profilers import topology
from flashbench._profilers.clocks import nvml, open_clocks, optional, text
from flashbench.errors import SpecError, UnavailableError, in_words
from flashbench.installed import version_of
from flashbench.kernels import Target
from flashbench.signals import postponed

ROW_FIELDS = (
    "host", "device_name", "uuid", "driver", "cuda", "cudnn", "torch", "triton", "python", "flashbench",
    "source_hash",
)  # fmt: skip
"""What each record carries of ``collect``; the rest stands once, in the header."""


@dataclass(frozen=True, kw_only=True)
class GpuStatus:
    """Whether torch can use a GPU here, and if not, why and what to do.

    kind: ``ok``, ``no-torch`` (it cannot be imported), ``rocm-torch``, ``cpu-only-torch``, ``hidden`` (by
    CUDA_VISIBLE_DEVICES), ``no-driver``, ``no-gpu`` or ``unusable`` (a driver and a GPU that torch still
    cannot use).
    """

    kind: str
    message: str
    hint: str = ""


@dataclass(frozen=True, kw_only=True)
class Probe:
    """What ``gpu_status`` judges by. nvml_gpus is None where NVML does not answer."""

    torch_version: str
    torch_cuda: str | None
    devices: int
    visible: str | None
    driver: str | None
    nvml_gpus: int | None
    torch_hip: str | None = None


def need_torch() -> None:
    """Import torch. Raises UnavailableError with what it said, whatever a broken installation raises."""
    if "torch" in sys.modules:
        return
    try:
        with postponed():
            import torch  # noqa: F401
    except Exception as error:
        message, hint = f"torch cannot be imported: {in_words(error, 300)}", "pip install torch"
        if isinstance(error, MemoryError) or any(words in message for words in _NO_ROOM):
            hint = "give it more memory: raise the limit that 'ulimit -v' shows"
        elif not (isinstance(error, ModuleNotFoundError) and error.name == "torch"):
            hint = "reinstall it: pip install --force-reinstall torch"
        raise UnavailableError(message, hint=f"{hint}; {WITHOUT_TORCH}") from None


WITHOUT_TORCH = "io-model, compare, report and list work without it"
_NO_ROOM = ("failed to map segment", "annot allocate memory")
"""How the dynamic linker says that a library finds no room."""


def probe() -> Probe:
    """Look at torch, NVML and the environment; creates no CUDA context. Raises UnavailableError without
    torch."""
    need_torch()
    import torch

    library = _quiet_nvml()
    return Probe(
        torch_version=str(torch.__version__),
        torch_cuda=torch.version.cuda,
        devices=torch.cuda.device_count() if torch.version.cuda else 0,
        visible=os.environ.get("CUDA_VISIBLE_DEVICES"),
        driver=driver_version(),
        nvml_gpus=None if library is None else optional(library.nvmlDeviceGetCount),
        torch_hip=getattr(torch.version, "hip", None),
    )


def gpu_status(seen: Probe | None = None) -> GpuStatus:
    """Tell apart the reasons why there is no usable GPU."""
    try:
        seen = seen or probe()
    except UnavailableError as error:
        return GpuStatus(kind="no-torch", message=str(error), hint=error.hint)
    if seen.torch_hip:
        return GpuStatus(
            kind="rocm-torch",
            message=f"torch {seen.torch_version} is built for AMD GPUs (ROCm {seen.torch_hip});"
            " flashbench measures on NVIDIA GPUs, and checks on the CPU",
            hint="use --device cpu here; rocprofv3 counts an AMD GPU's traffic",
        )
    if seen.torch_cuda is None:
        hint = "install a CUDA build of torch" if seen.driver else ""
        return GpuStatus(
            kind="cpu-only-torch", message=f"torch {seen.torch_version} is built without CUDA", hint=hint
        )
    if seen.devices:
        return GpuStatus(kind="ok", message=f"torch sees {seen.devices} GPU{'s' * (seen.devices > 1)}")
    if seen.driver is None:
        return GpuStatus(
            kind="no-driver", message="no NVIDIA driver answers here", hint="install the NVIDIA driver"
        )
    if seen.visible is not None and seen.nvml_gpus != 0:
        return GpuStatus(
            kind="hidden",
            message=f"CUDA_VISIBLE_DEVICES={seen.visible!r} hides every GPU from torch",
            hint="unset CUDA_VISIBLE_DEVICES, or set it to 0",
        )
    if not seen.nvml_gpus:
        return GpuStatus(kind="no-gpu", message=f"driver {seen.driver} answers, but it has no GPU")
    return GpuStatus(
        kind="unusable",
        message=f"driver {seen.driver} shows {seen.nvml_gpus} GPUs, but torch {seen.torch_version}"
        f" (CUDA {seen.torch_cuda}) can use none",
        hint="check that the driver is new enough for torch's CUDA version",
    )


def target(device: str | None = None, said: str | None = None) -> Target:
    """Where cells run: the named device, or the first GPU, or else the CPU.

    device: ``cpu``, ``cuda`` (the first GPU), ``cuda:1``, …, or None. said: the option and value that named
    it, for messages. Raises SpecError for another text and UnavailableError, naming the cause, for a GPU that
    is not there, and without torch, where it is to say whether there is one.
    """
    if device is not None and not re.fullmatch(r"cpu|cuda(:\d+)?", device):
        raise SpecError(f"--device {device!r}: not a device; accepted: 'cpu', 'cuda' or 'cuda:0'")
    if device == "cpu":
        return Target(device="cpu", name=cpu_name())
    said = said or f"--device {device or 'cuda:0'!r}"
    _let_segments_grow()
    status = gpu_status()
    if status.kind == "no-torch":
        raise UnavailableError(status.message, hint=status.hint)
    if status.kind != "ok":
        if device is None:
            return Target(device="cpu", name=cpu_name())
        raise UnavailableError(f"{said}: {status.message}", hint=status.hint)
    return _gpu_target(int((device or "cuda:0").partition(":")[2] or 0), said)


def _let_segments_grow() -> None:
    """Ask torch's allocator for growing segments, unless the user has set it up; before CUDA starts.

    By default torch splits a large freed block for the next tensor, and what is left fits nothing:
    naive's backward at 16k then runs out of 80 GiB with 64 GiB in use.
    """
    if not {"PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"} & os.environ.keys():
        os.environ["PYTORCH_CUDA_ALLOC_CONF"] = "expandable_segments:True"


def _gpu_target(index: int, said: str) -> Target:
    import torch

    count = torch.cuda.device_count()
    if index >= count:
        raise UnavailableError(
            f"{said}: there is no GPU {index}; torch sees {count}", hint="see flashbench doctor"
        )
    properties = torch.cuda.get_device_properties(index)
    return Target(
        device=f"cuda:{index}",
        name=properties.name,
        capability=(properties.major, properties.minor),
        total_bytes=properties.total_memory,
        smem_per_block_bytes=getattr(properties, "shared_memory_per_block_optin", None),
        l2_bytes=getattr(properties, "L2_cache_size", None),
        num_sms=properties.multi_processor_count,
    )


def free_bytes(target: Target) -> int | None:
    """Memory that new tensors could take on the target, or None where it cannot be told."""
    if target.type == "cuda":
        import torch

        free, _ = torch.cuda.mem_get_info(target.device)
        cached = torch.cuda.memory_reserved(target.device) - torch.cuda.memory_allocated(target.device)
        return int(free) + int(cached)
    return min((value for value in (_available_ram(), _cgroup_room()) if value is not None), default=None)


def collect(target: Target) -> dict[str, Any]:
    """Everything that may explain a number: JSON-able, None where it cannot be told.

    Keys: ``ROW_FIELDS``, and device, device_type, capability, num_sms, total_bytes, l2_bytes,
    smem_per_block_bytes, power_limit_w, persistence, max_sm_clock_mhz, clocks, topology, platform, cpu,
    cpu_threads, git_commit, git_dirty, numpy. Raises UnavailableError without torch.
    """
    need_torch()
    import torch

    facts: dict[str, Any] = {
        "host": socket.gethostname(),
        "device": target.device,
        "device_type": target.type,
        "device_name": target.name,
        "capability": None if target.capability is None else ".".join(map(str, target.capability)),
        "total_bytes": target.total_bytes,
        "l2_bytes": target.l2_bytes,
        "smem_per_block_bytes": target.smem_per_block_bytes,
        "uuid": None,
        "num_sms": None,
        "driver": driver_version(),
        "cuda": torch.version.cuda,
        "cudnn": _cudnn_version(),
        "torch": str(torch.__version__),
        "triton": version_of("triton"),
        "numpy": version_of("numpy"),
        "python": platform.python_version(),
        "flashbench": __version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cpu_threads": torch.get_num_threads(),
        "source_hash": source_hash(),
        **git_state(),
        "clocks": None,
    }
    if target.type == "cuda":
        properties = torch.cuda.get_device_properties(target.device)
        uuid = getattr(properties, "uuid", None)
        facts |= {"num_sms": properties.multi_processor_count, "uuid": None if uuid is None else str(uuid)}
        clocks = open_clocks(target.device)
        if clocks is not None:
            facts |= {**clocks.facts(), "clocks": clocks.read()}
            whole = clocks.handle if clocks.card is None else clocks.card
            facts["topology"] = topology.read(clocks.nvml, whole)
    return facts


def cards(count: int) -> list[dict[str, Any]]:
    """device, uuid and topology of the first so many GPUs, one to a rank."""
    every = (collect(target(f"cuda:{index}")) for index in range(count))
    return [{name: facts.get(name) for name in ("device", "uuid", "topology")} for facts in every]


def row_fields(environment: Mapping[str, Any]) -> dict[str, Any]:
    """The part of ``collect`` that each record carries."""
    return {name: environment.get(name) for name in ROW_FIELDS}


def for_child(**more: str) -> dict[str, str]:
    """The environment variables of a child that finds this package however it was found here, and more."""
    package = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join(filter(None, (package, os.environ.get("PYTHONPATH"))))
    return {**os.environ, "PYTHONPATH": path, **more}


def driver_version() -> str | None:
    """The NVIDIA driver's version, from NVML or the kernel module, or None."""
    library = _quiet_nvml()
    if library is not None:
        version = text(optional(library.nvmlSystemGetDriverVersion))
        if version:
            return version
    try:
        said = Path("/proc/driver/nvidia/version").read_text(encoding="utf-8")
    except OSError:
        return None
    found = re.search(r"Kernel Module.*?(\d+\.\d+(?:\.\d+)?)", said)
    return found.group(1) if found else None


def _quiet_nvml() -> Any:
    """NVML without the warning: here its absence is the finding."""
    try:
        import pynvml

        pynvml.nvmlInit()
    except Exception:
        return None
    return nvml()


def _cudnn_version() -> str | None:
    import torch

    number = optional(torch.backends.cudnn.version)
    if number is None:
        return None
    # 9.x counts 10000 to the major version, older ones 1000
    major, rest = divmod(number, 10000) if number >= 90000 else divmod(number, 1000)
    return f"{major}.{rest // 100}.{rest % 100}"


@cache
def cpu_name() -> str:
    """The processor's marketing name."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return platform.processor() or platform.machine() or "CPU"
    found = re.search(r"^model name\s*:\s*(.+)$", lines, flags=re.MULTILINE)
    return found.group(1).strip() if found else platform.processor() or platform.machine() or "CPU"


@cache
def source_hash() -> str:
    """First 16 hex digits of the SHA-256 over flashbench/kernels/*.py: names and contents."""
    digest = hashlib.sha256()
    for path in sorted((Path(__file__).parent / "kernels").glob("*.py")):
        digest.update(path.name.encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


@cache
def git_state() -> dict[str, Any]:
    """git_commit and git_dirty of the checkout that flashbench runs from, None outside of one."""
    root = Path(__file__).resolve().parent.parent

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=10, check=False
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    # an installed copy may lie inside somebody else's repository: only a checkout of this one counts
    if not (root / ".git").exists():
        return {"git_commit": None, "git_dirty": None}
    changed = git("status", "--porcelain", "--untracked-files=no")
    return {"git_commit": git("rev-parse", "HEAD"), "git_dirty": None if changed is None else bool(changed)}


def _available_ram() -> int | None:
    try:
        said = Path("/proc/meminfo").read_text(encoding="ascii")
    except OSError:
        return None
    found = re.search(r"^MemAvailable:\s*(\d+) kB", said, flags=re.MULTILINE)
    return int(found.group(1)) * 1024 if found else None


def _cgroup_room() -> int | None:
    """What the container may still allocate (cgroup v2), or None without a limit."""
    folder = Path("/sys/fs/cgroup")
    try:
        limit = (folder / "memory.max").read_text(encoding="ascii").strip()
        used = (folder / "memory.current").read_text(encoding="ascii").strip()
    except OSError:
        return None
    return max(0, int(limit) - int(used)) if limit.isdigit() and used.isdigit() else None
