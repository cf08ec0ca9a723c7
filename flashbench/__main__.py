"""``flashbench`` and ``python -m flashbench``: a command line, and what a signal does before and after it.

While modules are imported, and while the interpreter ends, there is nothing to keep and nothing to tell: a
signal ends the process with the exit code of what is interrupted. In between ``cli.main`` sees to signals.
"""

from __future__ import annotations

import atexit
import os
import signal
from typing import NoReturn

INTERRUPTED = 130
"""``errors.EXIT_INTERRUPTED``; a signal may come before that is imported."""
SIGNALS = ("SIGINT", "SIGTERM", "SIGHUP")
"""``signals.STOPPING``, for the same reason."""


def main() -> NoReturn:
    """Run the command line of this process and exit. Signals that are ignored stay so, as under nohup."""
    numbers = [getattr(signal, name) for name in SIGNALS if hasattr(signal, name)]
    taken = [number for number in numbers if signal.getsignal(number) is not signal.SIG_IGN]
    atexit.register(_ignore, taken)  # registered first, it runs last
    for number in taken:
        signal.signal(number, _end)
    from flashbench.cli import main as run

    run()


def _end(*_: object) -> NoReturn:
    os._exit(INTERRUPTED)


def _ignore(numbers: list[signal.Signals]) -> None:
    """For what the interpreter still frees, in which it would put the system's handlers back."""
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


if __name__ == "__main__":
    main()
