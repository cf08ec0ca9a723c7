"""Memory that this process holds, to tell whether a cell left some behind."""

from __future__ import annotations

import os
from pathlib import Path

from flashbench.kernels import Target

WORTH = 2**28
"""Bytes from which on memory counts as left behind: workspaces of cuBLAS and heaps stay for good."""


def held_bytes(target: Target) -> int | None:
    """Device memory in torch's tensors, or on a CPU what is resident; None where it cannot be told."""
    if target.type == "cuda":
        import torch

        return int(torch.cuda.memory_allocated(target.device))
    try:
        pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    except (OSError, ValueError, IndexError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")
