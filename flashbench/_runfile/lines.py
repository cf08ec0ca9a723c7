"""One line of a results file: strict JSON whose last member is a checksum of the rest.

    {"type":"record", …, "checksum":"0f3a…"}

The checksum is the first 16 hex digits of the SHA-256 of the line without it, so that a digit that changed on
the disk or in an editor is found. It is no signature: who edits a line on purpose can write another one.
"""

from __future__ import annotations

import errno
import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flashbench import paths, record_shape

FIELD = "checksum"
MAX_LINE = 2**26
"""Most bytes of a line; a header with 100,000 cells has 20 million."""
MAX_VALUES = 2**20
"""Most commas and opening brackets of a line: as many values, and a value takes some 100 bytes when it is
read."""
MAX_LINES = 2**22
"""Most lines of a file; 100,000 cells have a few each."""
CRLF = "CRLF line ending, as of Windows, instead of LF"
_MARKS = (b"\xef\xbb\xbf", b"\xff\xfe", b"\xfe\xff")
"""Of UTF-8, and of UTF-16 either way round."""
_SEAL = re.compile(rb',"checksum":"([0-9a-f]{16})"\}$')


def seal(value: Mapping[str, Any]) -> bytes:
    """The line of a non-empty object, with its newline. Raises ValueError for NaN."""
    text = json.dumps(
        {name: item for name, item in value.items() if name != FIELD},
        allow_nan=False, ensure_ascii=False, separators=(",", ":"),
    )  # fmt: skip
    body = paths.encoded(text)
    return body[:-1] + f',"{FIELD}":"{_sum(body)}"}}\n'.encode()


def intact(line: bytes) -> bool | None:
    """Whether the line is as it was written; None for one without a checksum."""
    found = _SEAL.search(line)
    return None if found is None else _sum(line[: found.start()] + b"}") == found[1].decode()


def flaw(line: bytes) -> str:
    """In words, what is wrong with a line that is not ``intact``."""
    bare = line.removesuffix(b"\r")
    fits = intact(bare)
    said = "it has no checksum" if fits is None else "its checksum does not fit"
    if bare == line:
        return said
    return f"{CRLF}; without that its checksum fits" if fits else f"{CRLF}, and {said}"


def each(path: Path) -> Iterator[tuple[bytes, bool]]:
    """The lines of a file without their newlines, one at a time, and whether each ended in one; the last may
    not.

    What is longer than ``MAX_LINE`` is cut off behind that, and refused by ``parse``. Raises OSError as
    ``paths.whole``.
    """
    count = size = 0
    with paths.opened(path) as file:
        while line := file.readline(MAX_LINE + 2):
            more = line
            while not more.endswith(b"\n") and (more := file.readline(2**20)):
                size += len(more)
                _bound(path, size)
            size += len(line)
            _bound(path, size)
            if more:
                count += 1
                if count > MAX_LINES:
                    raise OSError(errno.EFBIG, f"has more than {MAX_LINES} lines", str(path))
            yield line.removesuffix(b"\n"), bool(more)


def _bound(path: Path, size: int) -> None:
    if size > paths.MOST:
        raise OSError(errno.EFBIG, f"is larger than {paths.MOST >> 20} MiB", str(path))


def parse(line: bytes) -> dict[str, Any]:
    """The object of a line, without its checksum. Raises ValueError, in words, for anything else, and
    for a field that is not of its type (``record_shape``)."""

    def refuse(constant: str) -> float:
        raise ValueError(f"{constant} is not strict JSON")

    if len(line) > MAX_LINE:
        raise ValueError(f"longer than {MAX_LINE >> 20} MiB")
    if sum(map(line.count, (b",", b"[", b"{"))) > MAX_VALUES:
        raise ValueError(f"more than {MAX_VALUES} values")
    if line.startswith(_MARKS):
        raise ValueError("it begins with a byte order mark, as an editor or a shell of Windows puts there")
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
