"""A worker never outlives the process that started it, nor does what it starts outlive the worker.

The parent ends the worker's whole process group when it is done with it (``worker.py``). If the parent is
killed, its end of the pipe to the worker's stdin closes. A worker that hangs in C code notices nothing, so
on Linux a guard does: the process that was started forks the worker and stays behind, small and never busy,
to end the group when the pipe closes and to end as the worker does. Should the guard be killed, the kernel
kills the worker with it (PR_SET_PDEATHSIG). Elsewhere a thread of the worker waits for the pipe to close.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import sys
from typing import NoReturn

PR_SET_PDEATHSIG = 1


def guarded() -> None:
    """Go on in a child of this process, which stays behind as its guard; before any thread is started."""
    leader = os.getpid()
    try:
        os.close(os.pidfd_open(leader))
    except (AttributeError, OSError):  # no Linux, or one that is too old: the thread is left
        return
    worker = os.fork()
    if worker:
        _guard(worker)
    die_with(leader)


def _guard(worker: int) -> NoReturn:
    os.closerange(1, 3)
    poll = select.poll()
    poll.register(0, 0)  # the end of the pipe alone: what it holds is the worker's
    poll.register(os.pidfd_open(worker), select.POLLIN)
    if any(file == 0 for file, _ in poll.poll()):
        end_group()
    _, status = os.waitpid(worker, 0)
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


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


def end_group() -> NoReturn:
    """End this process and all of its group at once, nothing flushed."""
    if hasattr(os, "killpg") and os.getpgrp() in (os.getpid(), os.getppid()):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
