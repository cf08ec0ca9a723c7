"""Launches once more what was launched before over the same addresses, without Triton's part in Python.

For each launch Triton makes TMA descriptors anew and goes over the arguments several times, which takes
longer than the driver's launch. What it hands its launcher in the end depends on addresses and numbers alone,
and is kept. Import through ``_triton.load``.
"""

from __future__ import annotations

import threading
from copy import copy
from types import CellType, FunctionType
from typing import Any

from triton import knobs
from triton.runtime import driver

KEPT = 64
"""Launches of a kernel that are kept, the latest ones."""


class Again:
    """The launches of one compiled kernel, by what they are told apart by: addresses and numbers."""

    def __init__(self, compiled: Any, programs: int) -> None:
        self.launcher, self._made = _split(compiled.run)
        self._head = programs, 1, 1
        self._compiled = compiled
        self._kept: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def start(self, key: tuple[Any, ...]) -> bool:
        """Launch what was kept under the key; False where nothing was, or is to be by Triton."""
        kept = self._kept.get((_stream(), key))
        if kept is None or _hooked():
            return False
        self.launcher(*kept)
        return True

    def keep(self, key: tuple[Any, ...], args: tuple[Any, ...]) -> bool:
        """Launch, and keep how; args: addresses for tensors. False where Triton is to do it."""
        if _hooked():
            return False
        stream, own = _stream(), self._compiled
        self._made(*self._head, stream, own.function, own.packed_metadata, None, None, None, *args)
        if len(self._kept) >= KEPT:
            self._kept.pop(next(iter(self._kept)), None)
        self._kept[stream, key] = _LAST.args
        self.launcher(*_LAST.args)
        return True


def possible(compiled: Any) -> bool:
    """Whether this Triton has its launcher where ``Again`` looks for it, and the kernel no scratch memory."""
    run = compiled.run
    launch = getattr(run, "launch", None)
    there = isinstance(launch, FunctionType) and _NAME in launch.__code__.co_freevars
    return there and not (run.global_scratch_size or run.profile_scratch_size)


_NAME = "launcher"
"""What Triton's closure that makes descriptors calls the compiled launcher."""
_LAST = threading.local()


def _split(run: Any) -> tuple[Any, Any]:
    """(the compiled launcher, Triton's part, which leaves in ``_LAST`` what it would call that with)."""
    launch = run.launch
    closure = list(launch.__closure__)
    at = launch.__code__.co_freevars.index(_NAME)
    launcher, closure[at] = closure[at].cell_contents, CellType(_note)
    made = copy(run)
    made.launch = FunctionType(launch.__code__, launch.__globals__, closure=tuple(closure))
    return launcher, made


def _note(*args: Any) -> None:
    _LAST.args = args


def _stream() -> int:
    active = driver.active
    stream: int = active.get_current_stream(active.get_current_device())
    return stream


def _hooked() -> bool:
    """Whether a profiler, say, is to be told of launches."""
    of = knobs.runtime
    return _called(of.launch_enter_hook) or _called(of.launch_exit_hook)


def _called(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))
