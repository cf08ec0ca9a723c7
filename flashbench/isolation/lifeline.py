"""A worker never outlives the process that started it, nor does what it starts outlive the worker.

On Linux the process that was started forks the worker and stays behind as its guard, small and never busy.
What the worker starts becomes the guard's child once it has no other parent, however it detached itself
(PR_SET_CHILD_SUBREAPER): sessions of its own, double forks. The guard kills its children, and theirs as they
become its own, when

- the worker ends: then the guard ends as the worker did;
- the parent is done with it and asks (``ask``);
- the parent is killed: its end of the pipe to the worker's stdin closes, which a worker that hangs in C code
  does not notice.

Nobody but the guard is made a subreaper: it has no children but these, while the parent may be anybody's
process, with children that are none of ours. Should the guard be killed, the kernel kills the worker with it
(PR_SET_PDEATHSIG), and the parent ends its group and, of what left that, everything with the mark that the
worker's environment carries (``end_marked``). Elsewhere a thread of the worker waits for the pipe to close,
and the group is all that is ended.
"""

from __future__ import annotations

import ctypes
import itertools
import os
import select
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import NoReturn

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

GUARDS = sys.platform.startswith("linux")
"""Whether a guard that ends by itself leaves nothing."""
MARK = "FLASHBENCH_WORKER"
"""The environment variable by which what a worker started is known as such."""
ENDING_S = 5.0
"""What a guard is given to end its children; a device may take its time to let go of one."""
LOOKING_S, LOOKS = 2.0, 5
"""Marked processes are looked for so long, at most: one that forks without end is not raced for ever. So many
looks there are at least, should this process be held up meanwhile."""


def turn_of(mark: str) -> bytes:
    """What a worker with that mark writes to stderr where another cell's turn begins, among the rest."""
    return f"\n{mark}\n".encode()


def guarded() -> None:
    """Go on in a child of this process, which stays behind as its guard; before any thread is started."""
    leader = os.getpid()
    if not _prctl(PR_SET_CHILD_SUBREAPER, 1):  # no Linux: the thread is left
        return
    worker = os.fork()
    if worker:
        _guard(worker)
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != leader:
        os._exit(1)


def _guard(worker: int) -> NoReturn:
    read, write = os.pipe()
    os.set_blocking(write, False)
    os.closerange(1, 3)
    signal.set_wakeup_fd(write, warn_on_full_buffer=False)
    for awaited in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(awaited, lambda *_: None)
    poll = select.poll()
    poll.register(0, 0)  # the end of the pipe alone: what it holds is the worker's
    poll.register(read, select.POLLIN)
    while (status := _reaped(worker)) is None:
        ready = [file for file, _ in poll.poll()]
        if 0 in ready:
            _end_children()
            end_group()
        if signal.SIGTERM in os.read(read, 512):
            _end_children()
            os._exit(1)
    _end_children()
    if os.WIFSIGNALED(status):
        number = os.WTERMSIG(status)
        if number != signal.SIGKILL:
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _reaped(worker: int) -> int | None:
    """Take note of children that have ended; how the worker did, if it is one of them."""
    while True:
        pid, status = os.waitpid(-1, os.WNOHANG)  # the worker is one as long as this is asked
        if pid in (0, worker):
            return status if pid else None


def _end_children() -> None:
    """Kill this process's children until there are none; a child's children are its own once that has ended.

    A number stays a child's until that is waited for, which is done here alone.
    """
    with suppress(ChildProcessError):
        while True:
            for pid in _children():
                with suppress(OSError):
                    os.kill(pid, signal.SIGKILL)
            os.waitpid(-1, 0)
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _children() -> Iterator[int]:
    """Children of this process that have not been waited for."""
    mine = os.getpid()
    for pid in _processes():
        with suppress(OSError, ValueError, IndexError), open(f"/proc/{pid}/stat", "rb") as file:
            if int(file.read().rpartition(b")")[2].split()[1]) == mine:  # after the name, which may hold any
                yield pid


def _processes() -> list[int]:
    """All that /proc shows, where it is that of this process's own namespace."""
    try:
        if os.readlink("/proc/self") != str(os.getpid()):
            return []
        return [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    except OSError:
        return []


def ask(pid: int) -> None:
    """Have a guard end what it guards, and then itself; ``end`` waits. What is no guard ends alone."""
    with suppress(OSError):
        os.kill(pid, signal.SIGTERM)


def end(pid: int) -> None:
    """End a child of this process, its guard first, and its group; it is left to be waited for."""
    with suppress(AttributeError, OSError):  # elsewhere than on Linux there is no guard
        ended = os.pidfd_open(pid)
        try:
            ask(pid)
            poll = select.poll()
            poll.register(ended, select.POLLIN)
            poll.poll(1000 * ENDING_S)
        finally:
            os.close(ended)
    with suppress(AttributeError, OSError):
        os.killpg(pid, signal.SIGKILL)


def end_marked(mark: str) -> None:
    """Kill every process whose environment carries that mark but this one."""
    wanted = f"{MARK}={mark}".encode()
    deadline = time.monotonic() + LOOKING_S
    for look in itertools.count(1):
        others = [pid for pid in _processes() if pid != os.getpid()]
        carries = {pid: _carries(pid, wanted) for pid in others}
        if not any(known is not False for known in carries.values()):
            return
        for pid in (pid for pid, known in carries.items() if known):
            _kill_marked(pid, wanted)
        if look >= LOOKS and time.monotonic() > deadline:
            return
        time.sleep(0.01)


def _kill_marked(pid: int, wanted: bytes) -> None:
    with suppress(AttributeError, OSError):
        held = os.pidfd_open(pid)  # first, so that what is killed is what is looked at
        try:
            if _carries(pid, wanted):
                signal.pidfd_send_signal(held, signal.SIGKILL)
        finally:
            os.close(held)


def _carries(pid: int, wanted: bytes) -> bool | None:
    """Whether that process has the mark; None while it begins a program (exec): it cannot be known then.

    Whoever started the program goes on before the kernel has laid out its environment. On a busy machine
    that takes milliseconds, in which the environment reads as empty; where the code begins is set after it.
    """
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            if found := file.read():
                return wanted in found.split(b"\0")
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
        memory, code, start, end = (int(fields[at - 3]) for at in (23, 26, 50, 51))  # as in proc(5)
    except (OSError, ValueError, IndexError):  # somebody else's, or gone
        return False
    ended, empty = not memory, code and start == end  # else it was laid out since it was read
    return False if ended or empty else None


def die_with(parent: int) -> None:
    """Be killed by the kernel when the parent ends, on Linux; elsewhere nothing. Exits if it has already."""
    if _prctl(PR_SET_PDEATHSIG, signal.SIGKILL) and os.getppid() != parent:
        os._exit(1)


def _prctl(option: int, value: int) -> bool:
    """Whether the kernel did that."""
    if not GUARDS:
        return False
    try:
        return bool(ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) == 0)
    except (OSError, AttributeError):  # a libc without prctl
        return False


def end_group() -> NoReturn:
    """End this process at once, nothing flushed, and all of its group if it leads that: a guard does that."""
    if hasattr(os, "killpg") and os.getpgrp() == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)
