"""One writer per folder: a lock that the system lets go of when its process ends, however it ends."""

from __future__ import annotations

import importlib
import os
import socket
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

from flashbench import paths, units
from flashbench.errors import UsageError

NAME = ".flashbench.lock"


class Lock:
    """Holds the folder until ``release``. The file names who does, and is gone afterwards."""

    def __init__(self, folder: Path) -> None:
        """Take it. Raises UsageError where another process has it or something else has its name, OSError
        where no file can be made.
        """
        self._path = folder / NAME
        self._file = -1
        self._take()

    def _take(self) -> None:
        while True:
            file = self._open()
            try:
                taken = _lock(file)
            except BaseException:
                os.close(file)
                raise
            if not taken:
                holder = os.read(file, 200).decode(errors="replace").strip()
                os.close(file)
                raise UsageError(
                    f"{self._path.parent} is being written by another run ({holder or 'unknown'})",
                    hint="wait for it, or choose another --out",
                )
            self._file = file
            if paths.names(self._path, self._file):
                break
            os.close(file)  # the one before let go of it, and took the file away
            self._file = -1
        with suppress(OSError):  # a full disk: the lock holds without its name
            os.ftruncate(self._file, 0)
            os.write(
                self._file, f"process {os.getpid()} on {socket.gethostname()}\n".encode(errors="replace")
            )

    def _open(self) -> int:
        """The file and no other: what is written to it must not end up where a link leads to."""
        try:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT | paths.CAREFUL, 0o666)
        except OSError:
            if os.path.lexists(self._path) and not stat.S_ISREG(os.lstat(self._path).st_mode):
                raise self._taken_name() from None
            raise
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1 or os.path.islink(self._path):
            os.close(file)
            raise self._taken_name()
        return file

    def _taken_name(self) -> UsageError:
        return UsageError(
            f"{units.quoted(self._path, 200)} is a link or no file; a run makes that file itself",
            hint="remove it, or choose another --out",
        )

    def renew(self) -> None:
        """Take it anew where the folder was removed and made again. Raises as ``__init__``."""
        if self._file < 0 or paths.names(self._path, self._file):
            return
        os.close(self._file)
        self._file = -1
        self._take()

    def release(self) -> None:
        """Let go of the folder; more than once is once."""
        if self._file < 0:
            return
        with suppress(OSError):
            if paths.names(self._path, self._file):  # else it is another's, in a folder that was made again
                os.unlink(self._path)
        os.close(self._file)
        self._file = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


class Locks:
    """The locks of several folders, each once, taken in an order that is the same for everybody."""

    def __init__(self, *folders: Path) -> None:
        """Take them all, or none. Raises as ``Lock``."""
        self._held: list[Lock] = []
        named = {os.path.realpath(folder): folder for folder in reversed(folders)}
        try:
            for _, folder in sorted(named.items()):
                self._held.append(Lock(folder))
        except BaseException:
            self.release()
            raise

    def renew(self) -> None:
        """As ``Lock.renew``."""
        for lock in self._held:
            lock.renew()

    def release(self) -> None:
        """Let go of the folders; more than once is once."""
        for lock in self._held:
            lock.release()


def _lock(file: int) -> bool:
    """Lock it if nobody has; False if somebody has. Where a file system has no locks, nobody has."""
    return _lock_on_windows(file) if os.name == "nt" else paths.lock(file) is not False


def _lock_on_windows(file: int) -> bool:
    msvcrt: Any = importlib.import_module("msvcrt")
    try:
        os.lseek(file, 2**30, os.SEEK_SET)  # a byte beyond the text, which others may read
        msvcrt.locking(file, msvcrt.LK_NBLCK, 1)
    except OSError:
        return False
    finally:
        os.lseek(file, 0, os.SEEK_SET)
    return True
