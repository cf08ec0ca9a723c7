"""Memory that this process holds, to tell whether a cell left some behind."""

from __future__ import annotations

import gc
import os
import time
from pathlib import Path

from flashbench.kernels import Target

WORTH = 2**28
"""Bytes from which on memory counts as left behind: workspaces of cuBLAS and heaps stay for good."""
PATIENCE_S, LOOK_EVERY_S = 1.0, 0.02
"""How long memory may take to be let go of: a thread of autograd drops its last graph when it next runs, on a
busy machine after the cell."""


def beyond(usual: int | None, target: Target) -> int:
    """Bytes over the usual ones that stay held; 0 where they are not worth it, or cannot be told."""
    end = time.monotonic() + PATIENCE_S
    while True:
        gc.collect()
        held = held_bytes(target)
        if held is None or usual is None or held - usual < WORTH:
            return 0
        if time.monotonic() >= end:
            return held - usual
        time.sleep(LOOK_EVERY_S)


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
