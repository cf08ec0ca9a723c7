"""Whether a path can be what it is wanted for, told before any work is done for it."""

from __future__ import annotations

import tempfile
from pathlib import Path


def why_no_folder(path: Path) -> str | None:
    """Why no files can be written into the folder, which need not be there yet, or None; makes nothing."""
    try:
        real = path.resolve()  # 'a/../b' makes no folder 'a'
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
