"""Processes that a test starts, and whether any is left of them."""

from __future__ import annotations

import os
import time
import uuid
from pathlib import Path

TAG = "FLASHBENCH_TEST_TAG"


def tagged() -> tuple[str, dict[str, str]]:
    """A new tag and the environment that carries it to a process and to whatever that starts."""
    tag = uuid.uuid4().hex
    return tag, {**os.environ, TAG: tag}


def left(tag: str, within_s: float = 5.0) -> list[str]:
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
