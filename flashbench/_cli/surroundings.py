"""What ``doctor`` says of what surrounds a process: system, cards together, caches, locale, limits."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from flashbench._cli.finding import OK, WARN, Finding

BF16_CAPABILITY = (8, 0)
"""The first that multiplies bf16 in hardware, and that Triton supports."""
LOW_SHARED_BYTES = 128 * 2**20
FEW_FILES = 1024
LOW_MEMORY_BYTES = 4 * 2**30
NARROW = 80
"""Columns below which tables fold."""


def system(platform: str = sys.platform, kernel: Path = Path("/proc/version")) -> Iterator[Finding]:
    """Linux, WSL, or a system without Triton."""
    if platform != "linux":
        known = {"darwin": "macOS", "win32": "Windows"}
        wsl = "use WSL 2, or " if platform == "win32" else ""
        yield Finding(
            name="system", state=WARN, detail=f"{known.get(platform, platform)}: Triton has no build for it",
            todo=f"{wsl}measure naive and sdpa on the CPU; io-model, compare and report work as on Linux",
        )  # fmt: skip
        return
    try:
        said = kernel.read_text(encoding="utf-8", errors="replace")
    except OSError:
        said = ""
    if "microsoft" in said.lower():
        todo = "expect noise, and allow counters in the NVIDIA Control Panel (Developer) of Windows"
        yield Finding(name="system", state=WARN, detail="WSL: Windows owns the GPU and its clocks", todo=todo)
    else:
        yield Finding(name="system", state=OK, detail="Linux")


def cards(cuda: Any = None) -> Iterator[Finding]:
    """What of torch's GPUs a sweep must know: those without bf16, and unlike ones. cuda stands in for
    torch.cuda."""
    if cuda is None:
        from flashbench import environment

        if environment.gpu_status().kind != "ok":
            return
        import torch

        cuda = torch.cuda
    found = [cuda.get_device_properties(index) for index in range(cuda.device_count())]
    for index, card in enumerate(found):
        if (card.major, card.minor) < BF16_CAPABILITY:
            what = (
                f"{card.name} is sm_{card.major}{card.minor}: no bf16 in hardware, none of Triton's kernels"
            )
            todo = "--dtypes fp16,fp32 --impls naive,sdpa"
            yield Finding(name=f"cuda:{index}", state=WARN, detail=what, todo=todo)
    if len({card.name for card in found}) > 1:
        names = ", ".join(f"cuda:{index} {card.name}" for index, card in enumerate(found))
        todo = "name one (--device cuda:N): a run is of one card, and only runs of like cards compare"
        yield Finding(name="unlike GPUs", state=WARN, detail=names, todo=todo)


def cache() -> Iterator[Finding]:
    """Whether Triton can keep what it compiles."""
    from flashbench.errors import UsageError
    from flashbench.kernels import _triton

    try:
        _triton.check_cache()
    except UsageError as error:
        todo = "export TRITON_CACHE_DIR=DIR, a folder that can be written; nothing if no GPU is used"
        yield Finding(name="Triton's cache", state=WARN, detail=str(error), todo=todo)
    else:
        yield Finding(name="Triton's cache", state=OK, detail="can be written")


def home() -> Iterator[Finding]:
    """Whether there is a folder for what this machine keeps."""
    from flashbench import userdata

    found = userdata.home()
    if found is None:
        todo = "export HOME=DIR, a folder that can be written (docker run -e HOME=/tmp)"
        detail = f"{userdata.NO_HOME}: calibrations and noise are neither found nor kept"
        yield Finding(name="home", state=WARN, detail=detail, todo=todo)
    else:
        yield Finding(name="home", state=OK, detail=str(found))


def terminal(encoding: str | None = None, columns: int | None = None) -> Iterator[Finding]:
    """Whether stdout takes every character, and a table its width. columns: None off a terminal."""
    encoding = encoding or sys.stdout.encoding or "ascii"
    if columns is None and sys.stdout.isatty():
        columns = shutil.get_terminal_size().columns
    if not encoding.lower().replace("-", "").startswith("utf"):
        todo = "export LC_ALL=C.UTF-8, or PYTHONUTF8=1; files are UTF-8 all the same"
        detail = f"{encoding}: other characters are printed as '?'"
        yield Finding(name="encoding", state=WARN, detail=detail, todo=todo)
    else:
        yield Finding(name="encoding", state=OK, detail=encoding)
    if columns is not None and columns < NARROW:
        todo = f"widen it to {NARROW} or more, or take --json, --csv or the report"
        yield Finding(
            name="terminal", state=WARN, detail=f"{columns} columns: cells of tables fold", todo=todo
        )


def shared_memory(folder: Path = Path("/dev/shm"), free: int | None = None) -> Iterator[Finding]:
    """Room for what processes share; compiling in parallel needs some. free: bytes, None to look."""
    from flashbench import units

    if free is None:
        if not folder.is_dir():
            return
        free = shutil.disk_usage(folder).free
    detail = f"{units.format_bytes(free)} free in {folder}"
    if free < LOW_SHARED_BYTES:
        todo = "give a container more: docker run --shm-size=1g, or --ipc=host"
        yield Finding(name="shared memory", state=WARN, detail=detail, todo=todo)
    else:
        yield Finding(name="shared memory", state=OK, detail=detail)


def limits(files: int | None = None, address_space: int | None = None) -> Iterator[Finding]:
    """Limits of this process; None to look. files: descriptors; address_space: bytes, -1 without a limit."""
    try:
        import resource
    except ImportError:  # Windows has none
        return
    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if files is None else files
    space = resource.getrlimit(resource.RLIMIT_AS)[0] if address_space is None else address_space
    if 0 <= files < FEW_FILES:
        yield Finding(
            name="open files", state=WARN, detail=f"at most {files}", todo=f"ulimit -n {4 * FEW_FILES}"
        )
    else:
        yield Finding(name="open files", state=OK, detail="no limit" if files < 0 else f"at most {files}")
    if space >= 0:
        from flashbench import units

        detail = f"at most {units.format_bytes(space)} of addresses: CUDA reserves more than it uses"
        yield Finding(name="address space", state=WARN, detail=detail, todo="ulimit -v unlimited")


def memory(free: int | None = None) -> Iterator[Finding]:
    """Memory that this process may still take, of the machine or its container. free: bytes, None to look."""
    from flashbench import environment, units
    from flashbench.kernels import Target

    free = environment.free_bytes(Target()) if free is None else free
    if free is None:
        return
    detail = f"{units.format_bytes(free)} free"
    if free < LOW_MEMORY_BYTES:
        todo = "raise the container's limit, or measure shorter lengths: the fp64 reference runs here"
        yield Finding(name="memory", state=WARN, detail=detail, todo=todo)
    else:
        yield Finding(name="memory", state=OK, detail=detail)


LOOKS: Sequence[tuple[str, Any]] = (
    ("system", system), ("GPUs", cards), ("Triton's cache", cache), ("home", home), ("terminal", terminal),
    ("shared memory", shared_memory), ("limits", limits), ("memory", memory),
)  # fmt: skip
"""Name and function of each look."""
