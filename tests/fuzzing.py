"""One command line in this process, with everything that measures left out, and what it may answer.

``answer`` runs a line, and ``fault`` says what is wrong with the answer: another exit code than the
documented ones, a traceback, a hang, more memory than a file may ask for, or an error that is not one line
that names an option or a file.
"""

from __future__ import annotations

import contextlib
import io
import re
import resource
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import typer

from flashbench import blocks, calibrate, counting, decoding, gating, numerics, tracing, tuning
from flashbench._cli import baseline, bisect, measure
from flashbench._profilers import static
from flashbench.cli import main
from flashbench.console import printable
from flashbench.errors import UnavailableError
from flashbench.isolation import Bench
from flashbench.problem import Cell
from flashbench.record import Record
from flashbench.ring import rows as ring_rows

DOCUMENTED = {0, 2, 3, 4, 5, 6, 130, 141}
OF_BISECT = {0, 1, 125, 128}
"""What git reads; a wrong line is 128."""
HANG_S = 60
COMMAND = cache(typer.main.get_command)
"""Of an app; typer builds it anew for each line, which takes longer than most of them."""
ROOM_BYTES = 3 * 2**30
"""What a line may take beside what the process has, by far."""


class Hung(BaseException):
    """A line that took longer than HANG_S."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """How a command line ended; crash: the traceback of what it let through."""

    argv: Sequence[str]
    code: int
    out: str
    err: str
    crash: str = ""


def answer(argv: Sequence[str]) -> Answer:
    """Run the line in the present folder."""
    out, err, crash, code = io.StringIO(), io.StringIO(), "", 0
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), _bounded():
        try:
            main(argv)
        except SystemExit as stop:
            code = int(stop.code or 0)
        except (Exception, Hung):
            crash, code = traceback.format_exc(), 1
    return Answer(argv=argv, code=code, out=out.getvalue(), err=err.getvalue(), crash=crash)


@contextlib.contextmanager
def _bounded() -> Iterator[None]:
    def ring(_: int, frame: FrameType | None) -> None:
        raise Hung(f"took over {HANG_S} s, at {frame}")

    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    before = signal.signal(signal.SIGALRM, ring)
    pages = int(Path("/proc/self/statm").read_text().split()[0]) if Path("/proc/self/statm").exists() else 0
    if pages:
        resource.setrlimit(resource.RLIMIT_AS, (pages * resource.getpagesize() + ROOM_BYTES, hard))
    signal.alarm(HANG_S)
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(typer.main, "get_command", COMMAND)
            yield
    finally:
        signal.alarm(0)
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
        signal.signal(signal.SIGALRM, before)


def fault(found: Answer, names: Sequence[str] = ()) -> str:
    """What is wrong with the answer, or empty. names: one of them or an option must stand in the error of
    bad input or of a bad file."""
    if found.crash or "Traceback (most" in found.err:
        return f"traceback: {found.crash or found.err}"
    if found.err.startswith("error: out of memory"):
        return f"takes more than {ROOM_BYTES} bytes"
    if found.code not in (OF_BISECT if found.argv[:1] == ["bisect"] else DOCUMENTED):
        return f"exit code {found.code}"
    errors = [line for line in found.err.splitlines() if line.startswith("error: ")]
    if found.code in (2, 3, 4, 128) and len(errors) != 1:
        return f"exit code {found.code} with {len(errors)} error lines: {found.err!r}"
    words = [
        shown for word in found.argv for shown in (word, ascii(word), ascii(word)[1:-1], printable(word))
    ]
    begins = tuple(f"error: {word}" for word in words if word)  # what cannot be read comes first
    named = bool(errors) and (re.search(r"--[a-z]", errors[0]) or errors[0].startswith(begins))
    as_shown = [*names, *(ascii(name)[1:-1] for name in names)]  # what is no text stands escaped
    if found.code in (2, 4, 128) and not named and not any(name in errors[0] for name in as_shown):
        return f"names neither an option nor a file: {errors[0]}"
    if errors and len(errors[0]) > 1500:
        return f"an error of {len(errors[0])} characters: {errors[0][:200]}"
    return ""


def check(argv: Sequence[str], names: Sequence[str] = ()) -> Answer:
    """The answer to a line, held to be one that is documented."""
    found = answer(argv)
    wrong = fault(found, names)
    assert not wrong, f"flashbench {' '.join(map(ascii, argv))}\n{wrong}"
    return found


def _refuse(*_: Any, **__: Any) -> Any:
    raise UnavailableError("nothing is measured here")


def _measured(
    bench: Bench, cells: Sequence[Cell], keep: Callable[[Record], None], begin: Any, stop: Any
) -> dict[str, Any]:
    for one in cells[:4]:
        keep(Record(cell=one, status="failed", reason="nothing is measured here"))
    return {}


LEFT_OUT: Sequence[tuple[Any, str, Any]] = (
    (Bench, "__enter__", lambda bench: bench),
    (Bench, "__exit__", lambda *_: None),
    (Bench, "overheads", lambda *_, **__: {}),
    (Bench, "run", _measured),
    (measure, "_trace", lambda *_: None),
    (counting, "count_cells", _refuse),
    (tracing, "trace_cell", _refuse),
    (static, "profile", _refuse),
    (gating, "document", _refuse),
    (calibrate, "measure", _refuse),
    (calibrate, "measure_one", _refuse),
    (decoding, "run", _refuse),
    (decoding, "check_case", _refuse),
    (tuning, "candidates", _refuse),
    (blocks, "_check", _refuse),
    (ring_rows, "Group", _refuse),
    (numerics, "rows", lambda *_: iter(())),
    (bisect, "_measured", lambda *_: "results.jsonl"),
    (baseline, "_head", lambda: "0" * 40),
)
"""What measures, compiles or starts a process, and what stands for it."""


@pytest.fixture(scope="module")  # other files measure
def nothing_measured() -> Iterator[None]:
    """Nothing is measured, and a line stays below its folder."""
    with pytest.MonkeyPatch.context() as patch:
        for owner, name, stand_in in LEFT_OUT:
            patch.setattr(owner, name, stand_in)
        for name in ("HOME", "XDG_DATA_HOME", "FLASHBENCH_NOISE", "FLASHBENCH_CALIBRATION"):
            patch.setenv(name, "home")
        patch.setattr(sys, "argv", ["flashbench"])
        yield
