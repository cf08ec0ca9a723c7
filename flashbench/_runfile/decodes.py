"""What ``flashbench decode --out`` wrote, one JSON document, as a header and rows."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from flashbench import record_shape
from flashbench._runfile import lines
from flashbench.errors import RunFileError

SCHEMA = 1
_BEGINS = re.compile(rb'\s*\{\s*"type"\s*:\s*"decode"')
_HEADER = ("created_at", "argv", "environment", "copy")


def begins(first: Sequence[bytes]) -> bool:
    """Whether a file with these first lines is such a document, in one line or several."""
    return _BEGINS.match(b"\n".join(first)) is not None


def text_of(source: Iterable[bytes]) -> bytes:
    """The document of these lines, or of more than ``parse`` takes no more than tells it so."""
    found, size = list[bytes](), 0
    for line in source:
        found.append(line)
        size += len(line) + 1
        if size > lines.MAX_LINE + 1:
            break
    return b"\n".join(found)


def parse(path: Path, text: bytes) -> tuple[dict[str, Any], tuple[Mapping[str, Any], ...]]:
    """(header, rows of steps). Raises RunFileError for what is damaged, newer, or of other rows."""
    try:
        document = lines.parse(text)
        schema = document.get("schema")
        if schema != SCHEMA:
            raise ValueError(f"schema {schema!r}; this flashbench reads {SCHEMA}")
        if "covered" in document:
            raise ValueError(
                "what 'decode --check --pairs' found; accepted: what 'decode --out' writes of steps"
            )
        rows = _rows(document)
    except ValueError as error:
        raise RunFileError(f"{path}: {error}") from None
    header = {name: document[name] for name in _HEADER if document.get(name) is not None}
    return {"type": "header", "environment": {}, "options": {}, "cells": [], **header}, tuple(rows)


def _rows(document: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Raises ValueError where there are none, or where one lacks what it cannot do without."""
    rows: Sequence[Mapping[str, Any]] | None = document.get("rows")
    if rows is None:
        raise ValueError("the field 'rows' is missing")
    for number, row in enumerate(rows):
        try:
            record_shape.need(row, "decode")
        except ValueError as error:
            raise ValueError(f"rows[{number}]: {error}") from None
    return rows
