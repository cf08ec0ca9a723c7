"""What raises where nobody can catch it, in a thread or when Python ends, is one line as any other error."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from flashbench import console
from flashbench.errors import in_words

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


def told_in_a_line() -> None:
    """From now on, until the process ends; where somebody else tells of them already, that stays."""
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = _of_thread
    if sys.unraisablehook is sys.__unraisablehook__:
        sys.unraisablehook = _of_nobody


def _of_thread(told: threading.ExceptHookArgs) -> None:
    if told.exc_value is not None and not isinstance(told.exc_value, SystemExit):
        _warn("a thread raised", told.exc_value, told.exc_traceback)


def _of_nobody(told: UnraisableHookArgs) -> None:
    if told.exc_value is not None:
        _warn(f"{(told.err_msg or 'ignored').lower()}:", told.exc_value, told.exc_traceback)


def _warn(what: str, error: BaseException, trace: TracebackType | None) -> None:
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    place = f" ({Path(trace.tb_frame.f_code.co_filename).name}:{trace.tb_lineno})" if trace else ""
    console.warn(f"{what} {in_words(error, 300)}{place}")
