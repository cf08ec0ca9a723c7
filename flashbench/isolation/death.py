"""How a worker ended, in words: its signal or exit code, and the last thing that it said."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass
from pathlib import Path

from flashbench.record import STATUSES

MOST = 300
"""Characters of last words, at most."""

_FATAL = "Fatal Python error:"
_STACK = re.compile(
    r"^(?:(?P<current>Current thread|Stack)|Thread)(?: 0x(?P<thread>[0-9a-f]+)[^\n]*)?"
    r" \(most recent call first\):\n"
    r'  File "(?P<file>[^"]*)", line (?P<line>\d+) in (?P<name>\S+)\n',
    re.MULTILINE,
)
"""A thread's innermost frame, as faulthandler writes it. Of more than a hundred threads it leaves the oldest
out, among them that of the cells.
"""


class Silent(Exception):
    """The worker gave no sign of life for as long as it may."""


@dataclass(kw_only=True, eq=False)
class Ended(Exception):
    """The worker is gone, or of no more use. code: as of subprocess, None where it says so itself (said).

    oom_killed: the kernel ran out of memory meanwhile.
    """

    code: int | None = None
    said: str = ""
    output: str = ""
    oom_killed: bool = False

    @property
    def status(self) -> str:
        """That of the cell that is to blame."""
        status = "oom" if self.oom_killed and self.code == -getattr(signal, "SIGKILL", 9) else "failed"
        assert status in STATUSES
        return status

    def __str__(self) -> str:
        if self.code is None:
            return self.said
        words = last_words(self.output)
        return f"its process {how(self.code)}{': ' + words if words else ''}"


def how(code: int) -> str:
    """ "was killed by SIGSEGV", "exited with code 3"."""
    if code >= 0:
        return f"exited with code {code}"
    try:
        name = signal.Signals(-code).name
    except ValueError:
        name = f"signal {-code}"
    return f"was killed by {name}"


def last_words(output: str) -> str:
    """The last line that was printed, and where Python was if it says so (faulthandler)."""
    before, fatal, after = output.rpartition(_FATAL)
    lines = [line for line in map(_plain, (before if fatal else output).splitlines()) if line]
    words = lines[-1] if lines else _plain(after.partition("\n")[0])
    return f"{words[:MOST]}{place(after)}" if fatal else words[:MOST]


def place(dump: str, thread: int | None = None) -> str:
    """ " (x.py:12 in call)" of a dump of faulthandler, the innermost frame; empty where it has none.

    thread: whose frame, else that of the thread which wrote the dump, as the one that crashed does.
    """
    for found in _STACK.finditer(dump):
        if found["current"] if thread is None else int(found["thread"] or "0", 16) == thread:
            return f" ({Path(found['file']).name}:{found['line']} in {found['name']})"
    return ""


def _plain(line: str) -> str:
    return " ".join("".join(c if c.isprintable() else " " for c in line).split())


def oom_kills() -> int:
    """How often the kernel killed for want of memory so far, in this container if it is one; 0 if unknown."""
    for path, name in (("/sys/fs/cgroup/memory.events", "oom_kill"), ("/proc/vmstat", "oom_kill")):
        try:
            text = Path(path).read_text(encoding="ascii")
        except OSError:
            continue
        if found := re.search(rf"^{name} (\d+)$", text, flags=re.MULTILINE):
            return int(found[1])
    return 0
