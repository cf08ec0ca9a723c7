"""A worker never outlives the process that started it, nor does what it starts outlive the worker.

Three ends are provided for. The parent ends the worker's whole process group (``worker.py``). If the parent
is killed, the pipe to the worker's stdin closes, and the worker ends its group. If the worker hangs in C code
and notices nothing, Linux kills it with its parent (PR_SET_PDEATHSIG), and what it forked with it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def die_with(parent: int) -> None:
    """Be killed by the kernel when the parent ends, on Linux; elsewhere nothing. Exits if it has already."""
    if not sys.platform.startswith("linux"):
        return
    try:
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    except (OSError, AttributeError):  # a libc without prctl: the pipe is left
        return
    if os.getppid() != parent:
        os._exit(1)


def end_group() -> None:
    """End this process and all of its group at once, nothing flushed."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
