"""One line of a results file: strict JSON whose last member is a checksum of the rest.

    {"type":"record", …, "checksum":"0f3a…"}

The checksum is the first 16 hex digits of the SHA-256 of the line without it, so that a digit that changed on
the disk or in an editor is found. It is no signature: who edits a line on purpose can write another one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from typing import Any

from flashbench import record_shape

FIELD = "checksum"
_SEAL = re.compile(rb',"checksum":"([0-9a-f]{16})"\}$')


def seal(value: Mapping[str, Any]) -> bytes:
    """The line of a non-empty object, with its newline. Raises ValueError for NaN."""
    text = json.dumps(
        {name: item for name, item in value.items() if name != FIELD},
        allow_nan=False, ensure_ascii=False, separators=(",", ":"),
    )  # fmt: skip
    # a lone surrogate, as of a file name that is no UTF-8, is no text that could be written
    body = text.encode("utf-8", errors="replace")
    return body[:-1] + f',"{FIELD}":"{_sum(body)}"}}\n'.encode()


def intact(line: bytes) -> bool | None:
    """Whether the line is as it was written; None for one without a checksum."""
    found = _SEAL.search(line)
    return None if found is None else _sum(line[: found.start()] + b"}") == found[1].decode()


def parse(line: bytes) -> dict[str, Any]:
    """The object of a line, without its checksum. Raises ValueError, in words, for anything else, and
    for a field that is not of its type (``record_shape``)."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not strict JSON")

    try:
        value = json.loads(line.decode("utf-8"), parse_constant=refuse)
    except RecursionError:
        raise ValueError("not JSON (nested too deeply)") from None
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ValueError("a JSON object is wanted")
    value.pop(FIELD, None)
    record_shape.check(value)
    return value


def _sum(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:16]
