"""Processes that a test starts, and whether any is left of them."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO

TAG = "FLASHBENCH_TEST_TAG"


def tagged() -> tuple[str, dict[str, str]]:
    """A new tag and the environment that carries it to a process and to whatever that starts."""
    tag = uuid.uuid4().hex
    return tag, {**os.environ, TAG: tag}


def in_the_foreground() -> None:
    """A suite under nohup ignores SIGHUP, and so would its children; of Ctrl-C see conftest."""
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def watched(
    command: Sequence[str], environment: Mapping[str, str], silent_s: float
) -> tuple[int | None, str]:
    """Runs a command that says how it gets on; (exit code, what it said).

    One that says nothing for silent_s is killed, and its exit code is None: it may take as long as it
    likes for all, but not for one step.
    """
    with subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as child:  # fmt: skip
        lines, said = lines_of(child.stdout), list[str]()
        try:
            while (line := lines.get(timeout=silent_s)) is not None:
                said.append(line)
        except queue.Empty:
            child.kill()
            return None, "".join(said)
        return child.wait(), "".join(said)


def lines_of(stream: IO[str] | None) -> queue.SimpleQueue[str | None]:
    """The lines of a pipe as they come, then None: whoever waits for one can give it a time."""
    assert stream is not None
    lines = queue.SimpleQueue[str | None]()
    threading.Thread(target=lambda: [*map(lines.put, stream), lines.put(None)], daemon=True).start()
    return lines


def left(tag: str, within_s: float = 60.0) -> list[str]:
    """Command lines of the living processes with the tag, once there are none or the time is over."""
    deadline = time.monotonic() + within_s
    while (found := _living(tag)) and time.monotonic() < deadline:
        time.sleep(0.02)
    return found


def workers(tag: str) -> list[int]:
    """pids of the workers among them."""
    return [pid for pid, line in _with(tag) if "--light" in line or "--worker" in line]


def _living(tag: str) -> list[str]:
    return [line for _, line in _with(tag)]


def _with(tag: str) -> list[tuple[int, str]]:
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            mine = f"{TAG}={tag}".encode() in (folder / "environ").read_bytes()
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if mine and line:  # a zombie has neither
            found.append((int(folder.name), line))
    return found
