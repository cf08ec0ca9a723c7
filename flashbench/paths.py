"""Whether a path can be what it is wanted for, told before any work is done for it; files that are read and
written whole."""

from __future__ import annotations

import errno
import importlib
import itertools
import os
import re
import stat
import tempfile
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

MOST = 2**30
"""Most bytes of a file that is read whole, where its format has no smaller bound of its own."""

_NAMED = 50
"""Characters of a file's name in that of the neighbour which becomes it; the longest name has no room."""
_PART = ".part"
_PIECE = 2**24
"""Bytes that are read at a time, as Python takes the memory for what it is asked to read at most."""
CAREFUL = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
"""Flags to open a file of flashbench's own with: no link is followed, and no named pipe waited for."""
_MOVES_OPEN = os.name == "posix"
"""Whether a file can be given another name while it is open."""
_HEADER = re.compile(rb'\s*\{\s*"type"\s*:\s*"header"')
_HEADER_BEGINS = 100
"""How a results file begins, and as many bytes that show it."""
_OPEN_ALREADY = ("/dev/stdin", "/dev/fd/", "/proc/")
"""How the names begin of what a shell has opened for the process, as for ``<(…)`` and ``/dev/stdin``."""


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


def opened(path: Path | str) -> BinaryIO:
    """The file, open for reading. Raises OSError, also for what never ends or may never begin: a device, or a
    pipe that has a name in a folder. What a shell has opened is taken, and the null device, which is empty.
    """
    found = os.stat(path)
    if what := _no_file(path, found):
        raise OSError(errno.EINVAL, f"is {what}, no file", str(path))
    return open(path, "rb")


def whole(path: Path | str, most: int = MOST) -> bytes:
    """What the file holds. Raises OSError as ``opened``, and where it is larger than ``most`` bytes."""
    with opened(path) as file:
        size = os.fstat(file.fileno()).st_size  # of a pipe 0
        pieces = [file.read(size)] if 0 < size <= most else []
        while size <= most and (piece := file.read(_PIECE)):
            pieces.append(piece)
            size = sum(map(len, pieces))
    if size > most:
        raise OSError(errno.EFBIG, f"is larger than {most >> 20} MiB", str(path))
    return pieces[0] if len(pieces) == 1 else b"".join(pieces)


def encoded(text: str) -> bytes:
    """The text in UTF-8; a lone surrogate stands as ``\\udce9``, which a JSON string has for it, too.

    A name of a file may hold any byte, which Python has as such a surrogate where it is no text.
    """
    return text.encode("utf-8", errors="backslashreplace")


def put(path: Path | str, data: bytes | str) -> None:
    """Write the file whole or not at all, on the disk when it returns; text as ``encoded``. Raises OSError.

    A link stays one: what it leads to is replaced. Another name of the same file (a hard link) keeps the old
    one. What is no file, such as the null device, is written to. A results file is not replaced.
    """
    if why := why_kept(path):
        raise FileExistsError(errno.EEXIST, why, str(path))
    if isinstance(data, str):
        data = encoded(data)
    if os.path.exists(path) and not os.path.isfile(path):
        Path(path).write_bytes(data)
        return
    replace(Path(os.path.realpath(path)), data)


def why_kept(path: Path | str, inputs: Iterable[Path | str] = ()) -> str:
    """Why no output may take the place of what has the path, in words, or empty: it is a results file, whose
    rows nothing gives back, or one of the inputs."""
    for one in inputs:
        with suppress(OSError, ValueError):
            if os.path.samefile(path, one) and os.path.isfile(path):
                return f"is the input {str(one)!r}, which is not overwritten"
    with suppress(OSError, ValueError):
        if os.path.isfile(path):
            with open(path, "rb") as file:
                if _HEADER.match(file.read(_HEADER_BEGINS)):
                    return "is a results file, which is not overwritten"
    return ""


def replace(real: Path, data: bytes) -> None:
    """As ``put``, in the place of whatever has the name, a link as well."""
    clear_parts(real)
    part, file = _part(real)
    try:
        try:
            with open(file, "wb", closefd=False) as whole_file:
                whole_file.write(data)
            os.fsync(file)
            if not _MOVES_OPEN:
                os.close(file)
                file = -1
            os.replace(part, real)
        except BaseException:
            with suppress(OSError):
                part.unlink()
            raise
    finally:
        if file >= 0:
            os.close(file)
    with suppress(OSError):  # the new name as well; not every system opens folders
        folder = os.open(real.parent, os.O_RDONLY)
        with suppress(OSError):
            os.fsync(folder)
        os.close(folder)


def clear_parts(real: Path) -> None:
    """Take away what ``replace`` left beside the path where its process was killed.

    Whoever writes a part holds its lock until it has its name, so that one that can be locked has no writer.
    """
    pattern = re.compile(rf"{re.escape(_before(real))}\d+(-\d+)?{re.escape(_PART)}")
    with suppress(OSError):
        for name in os.listdir(real.parent):
            if pattern.fullmatch(name):
                _clear(real.with_name(name))


def _clear(part: Path) -> None:
    """Take a part away that has no writer."""
    with suppress(OSError):
        file = os.open(part, os.O_RDWR | CAREFUL)
        try:
            if lock(file) and names(part, file):
                part.unlink()
        finally:
            os.close(file)


def _part(real: Path) -> tuple[Path, int]:
    """A neighbour that becomes the file, empty, open and locked."""
    for number in itertools.count():
        part = real.with_name(f"{_before(real)}{os.getpid()}{f'-{number}' if number else ''}{_PART}")
        with suppress(FileExistsError):  # another thread's, or another machine's
            file = os.open(part, os.O_RDWR | os.O_CREAT | os.O_EXCL | CAREFUL, 0o666)
            if lock(file) is not False and names(part, file):
                return part, file
            os.close(file)  # somebody thought that it had no writer, and took it away
    raise AssertionError


def lock(file: int) -> bool | None:
    """Lock an open file if nobody has; False if somebody has, None where there are no such locks."""
    try:
        fcntl: Any = importlib.import_module("fcntl")
    except ImportError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


def names(path: Path, file: int) -> bool:
    """Whether the path still is that of the open file, which is a plain one."""
    try:
        held = os.fstat(file)
        return stat.S_ISREG(held.st_mode) and os.path.samestat(held, os.lstat(path))
    except FileNotFoundError:
        return False


def _before(real: Path) -> str:
    """How the names of the neighbours begin that become the file; a process's number and _PART follow."""
    return f".{real.name[:_NAMED]}."


def _no_file(path: Path | str, found: os.stat_result) -> str:
    """What it is instead of a file that can be read to its end, else empty."""
    if stat.S_ISBLK(found.st_mode):
        return "a device"
    if not (stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode)):
        return ""
    names = os.path.abspath(path), os.path.realpath(path)
    if any(name.startswith(_OPEN_ALREADY) for name in names):
        return ""
    if stat.S_ISFIFO(found.st_mode):
        return "a named pipe"
    null = os.stat(os.devnull)
    return "" if found.st_rdev == null.st_rdev else "a device"
