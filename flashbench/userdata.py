"""The user's own folders: where what this machine keeps is found, if it knows of a home at all, and a
temporary one.

A container that is run by a number (``docker run --user 12345``) has no HOME and no entry in passwd: nothing
is kept there then, and nothing found."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from flashbench.errors import UnavailableError, UsageError

NO_HOME = "no home folder is known: HOME is not set, and the user has no entry in passwd"


def home() -> Path | None:
    """The home folder, or None where none is known."""
    try:
        return Path.home()
    except RuntimeError:
        return None


def folder(name: str, variable: str) -> Path | None:
    """The one that the variable names, else flashbench/NAME in the user's data; None without a home."""
    if own := os.environ.get(variable):
        return Path(own)
    if data := os.environ.get("XDG_DATA_HOME"):
        return Path(data) / "flashbench" / name
    house = home()
    return None if house is None else house / ".local" / "share" / "flashbench" / name


def needed(name: str, variable: str) -> Path:
    """The same, to write into. Raises UsageError where there is none."""
    found = folder(name, variable)
    if found is None:
        raise UsageError(f"{NO_HOME}; accepted: --out FILE, or {variable}=DIR in the environment")
    return found


def temporary(prefix: str) -> tempfile.TemporaryDirectory[str]:
    """A new folder that is gone when it is left. Raises UnavailableError where there is no place for one."""
    try:
        return tempfile.TemporaryDirectory(prefix=prefix, ignore_cleanup_errors=True)
    except OSError as error:  # of a place that is named but full, the path is told by who catches it
        if error.filename is not None:
            raise
        raise UnavailableError(
            f"no temporary folder can be written: {error.strerror or error}",
            hint="export TMPDIR=DIR, a folder that can be written",
        ) from None
