"""Whether a path can be what it is wanted for, told before any work is done for it."""

from __future__ import annotations

import errno
import os
import tempfile
from pathlib import Path


def resolved(path: Path) -> Path:
    """The path without links and ``..``. Raises OSError for links in a circle, on every Python alike."""
    try:
        found = path.resolve()
    except RuntimeError:  # what Python calls it before 3.13
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path)) from None
    try:
        os.lstat(path / "x")  # 3.13 and later hand the circle on
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise OSError(errno.ELOOP, error.strerror, str(path)) from None
    return found


def why_no_folder(path: Path) -> str | None:
    """Why no files can be written into the folder, which need not be there yet, or None; makes nothing."""
    try:
        real = resolved(path)  # 'a/../b' makes no folder 'a'
        parent = next(one for one in (real, *real.parents) if one.exists())
    except OSError as error:
        return error.strerror or str(error)
    if not parent.is_dir():
        return f"{str(parent)!r} is no folder"
    try:
        with tempfile.TemporaryFile(dir=parent):  # permissions alone do not tell, of /proc for one
            pass
    except OSError as error:
        return f"{str(parent)!r} takes no file ({error.strerror or error})"
    return None
