"""Every deliberate error, its exit code and its hint.

    FlashbenchError
    ├─ UsageError         exit 2   bad option, config key, path or value
    │  ├─ SpecError                a value that does not parse or is out of range
    │  └─ UnknownName              a name that is not in the list of known ones
    ├─ UnavailableError   exit 3   this machine lacks something; says what fixes it
    ├─ RunFileError       exit 4   a file that opens but is not what it should be
    └─ GateError          exit 5   a check or a gate failed

Exit code 1 is left to Python's own crashes, so that a crash never reads as a verdict.
Exit code 6 (missing, incomparable or undecided) and 130 (interrupted) are set by the commands.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable

EXIT_OK = 0
EXIT_USAGE = 2
EXIT_UNAVAILABLE = 3
EXIT_UNREADABLE = 4
EXIT_GATE = 5
EXIT_UNDECIDED = 6
EXIT_INTERRUPTED = 130

RAISED = (Exception, SystemExit)
"""What somebody else's code raises that ends what is done with it and nothing else: ``sys.exit``, too, with
which no command may end as if it were done."""

_OFFERED = 4
"""Most names that a message offers in place of an unknown one."""


def message(error: BaseException) -> str:
    """What the error says; of a foreign one also that it cannot be said."""
    try:
        return str(error)
    except Exception:  # of a class of somebody's own, whose __str__ may do anything
        return UNSAID


def in_words(error: BaseException, most: int | None = None) -> str:
    """Class and message of a foreign error on one line, of the message so many characters at most."""
    return f"{type(error).__name__}: {' '.join(message(error).split())[:most]}"


UNSAID = "its message could not be made"


class FlashbenchError(Exception):
    """Base of all deliberate errors; never raised bare.

    ``str(error)`` is one line that names the option, the value and what is accepted;
    ``error.hint`` is one imperative line or empty.
    """

    exit_code = EXIT_USAGE

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint


class UsageError(FlashbenchError):
    """What the user asked for cannot be understood or is not allowed."""

    exit_code = EXIT_USAGE


class SpecError(UsageError):
    """A value does not parse or is out of its range."""


class UnknownName(UsageError):
    """A name is not among the known ones; the message offers those that start with it, else the nearest."""

    def __init__(self, kind: str, name: str, known: Iterable[str]) -> None:
        names = list(known)
        close = [known for known in names if name and known.startswith(name)][:_OFFERED]
        close = close or difflib.get_close_matches(name, names, n=1, cutoff=0.5)
        nearest = f"; did you mean {' or '.join(map(repr, close))}?" if close else ""
        super().__init__(f"{kind} {name!r} is not known{nearest} (known: {', '.join(names)})")


class UnavailableError(FlashbenchError):
    """This machine lacks something that the request needs."""

    exit_code = EXIT_UNAVAILABLE


class RunFileError(FlashbenchError):
    """A results file opens but cannot be read as one."""

    exit_code = EXIT_UNREADABLE


class GateError(FlashbenchError):
    """A check found a wrong result, or a gate a regression."""

    exit_code = EXIT_GATE
