"""A message as a line of a pipe to which any code of the worker's process may write.

What the worker says begins with the token that was the first line it was told, which no implementation is
given: anything else on the pipe is noise, whatever it looks like, and is not taken for a message.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Mapping
from typing import Any

LONGEST = 2**26
"""Bytes of a line, at most."""


class Noise(Exception):
    """A line that is no message. str: what it begins with."""


def token() -> bytes:
    """A new one."""
    return uuid.uuid4().hex.encode()


def line(message: Mapping[str, Any], mark: bytes = b"") -> bytes:
    """The message, with the token where it is the worker that says it."""
    return mark + json.dumps(message, allow_nan=False).encode() + b"\n"


def message(text: bytes, mark: bytes) -> dict[str, Any]:
    """The worker's message. Raises Noise."""
    try:
        found = json.loads(text[len(mark) :]) if text.startswith(mark) else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise Noise(repr(text.removeprefix(mark)[:100]))
    return found
