"""Importing what is somebody else's, which may do anything: whatever that is, it is one line."""

from __future__ import annotations

import difflib
import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from flashbench.aside import copy_of, stdout_to_stderr, unclosed
from flashbench.errors import UsageError, message
from flashbench.kernels import _own_crash


class _Exit(BaseException):
    """``os._exit`` was called, which would have ended the command without a word."""


def imported(spec: str, where: str) -> Any:
    """What a spec of the right form names. where: how complaints begin. Raises UsageError in one line."""
    place, _, name = spec.rpartition(":")
    nothing = object()
    try:
        with _own_crash.told(where), _contained():
            module = _of_file(Path(place)) if place.endswith(".py") else _of_module(place)
            found = getattr(module, name, nothing)  # a module may have a __getattr__ of its own
    except KeyboardInterrupt:  # as a Ctrl-C meanwhile
        raise
    except _Exit as error:
        raise UsageError(f"{where}: importing it called os._exit({error})") from None
    except BaseException as error:  # whatever a module does when it is imported
        said = " ".join(message(error).split())[:200] or "no message"
        line = _line_in(error, place)
        raise UsageError(f"{where}: importing it raised {type(error).__name__}: {said}{line}") from None
    if found is nothing:
        names = [key for key, value in vars(module).items() if inspect.isfunction(value)]
        close = difflib.get_close_matches(name, names, n=1)
        hint = f"; did you mean {close[0]!r}?" if close else f"; it has {', '.join(names) or 'no function'}"
        raise UsageError(f"{where}: {place} has no {name!r}{hint}")
    return found


@contextmanager
def _contained() -> Iterator[None]:
    """What is printed goes to stderr, as stdout is for results; none of the two stays closed. ``os._exit``
    raises, but in other threads and in a fork; a fork that comes back ends here. The working directory is the
    same afterwards, as paths of the command line are below it.
    """
    real, mine = os._exit, (os.getpid(), threading.get_ident())
    folder = _folder()

    def leave(status: int) -> NoReturn:
        if (os.getpid(), threading.get_ident()) != mine:
            real(status)
        raise _Exit(status)

    shown = sys.stderr
    with _kept_open(1), _kept_open(2):
        try:
            os._exit = leave
            sys.stderr = unclosed(shown)
            with stdout_to_stderr():
                yield
        finally:
            if os.getpid() != mine[0]:
                real(0)
            os._exit = real
            sys.stderr = shown
            if folder is not None and _folder() != folder:
                os.chdir(folder)


def _folder() -> str | None:
    """The working directory, or None where it is gone."""
    try:
        return os.getcwd()
    except OSError:
        return None


@contextmanager
def _kept_open(number: int) -> Iterator[None]:
    """The file of that number is there afterwards, too, if it was."""
    copy = copy_of(number)
    if copy is None:
        yield
        return
    try:
        yield
    finally:
        try:
            os.fstat(number)
        except OSError:
            os.dup2(copy, number)
        os.close(copy)


def _line_in(error: BaseException, place: str) -> str:
    """Where in the file it was raised, as " (FILE:LINE)"; empty where that was elsewhere."""
    if isinstance(error, SyntaxError):
        return f" ({Path(error.filename or place).name}:{error.lineno})"
    trace, found = error.__traceback__, ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        if file.name == Path(place).name:
            found = f" ({file.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return found


def _of_file(path: Path) -> ModuleType:
    """The module of a file, which may import its neighbours; one module per file and process."""
    path = path.resolve()
    name = f"flashbench_own_{path.stem}_{hashlib.sha256(os.fsencode(path)).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    _reach(path.parent)
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _of_module(name: str) -> ModuleType:
    _reach(Path.cwd())
    return importlib.import_module(name)


def _reach(folder: Path) -> None:
    """Last in the path, so that a file there shadows no package."""
    if str(folder) not in sys.path:
        sys.path.append(str(folder))
