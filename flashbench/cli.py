"""``flashbench``: the commands put together, and the one place where errors become exit codes.

Exit codes: 0 done, 2 bad input, 3 unavailable on this machine or out of its memory, 4 a file that is not what
it should be, 5 a wrong or failed result or a regression, 6 missing, incomparable or undecided, 130
interrupted, 141 the reader of stdout went away."""

from __future__ import annotations

import difflib
import errno
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Annotated, Any, NoReturn

import typer

from flashbench import console, units
from flashbench._cli import baseline, interrupt, stray, streams
from flashbench._cli.bisect import EXIT_ABORT, EXIT_BAD, EXIT_SKIP, bisect
from flashbench._cli.block import block
from flashbench._cli.calibrate import calibrate
from flashbench._cli.check import check
from flashbench._cli.claims import claims
from flashbench._cli.compare import compare
from flashbench._cli.decode import decode
from flashbench._cli.doctor import doctor
from flashbench._cli.gate import gate
from flashbench._cli.history import history
from flashbench._cli.io_model import io_model
from flashbench._cli.kv_cache import kv_cache
from flashbench._cli.list import list_
from flashbench._cli.new_impl import new_impl
from flashbench._cli.noise import noise
from flashbench._cli.profile import profile
from flashbench._cli.report import report
from flashbench._cli.ring import ring
from flashbench._cli.run import run
from flashbench._cli.tune import tune
from flashbench._cli.verify import verify
from flashbench.errors import EXIT_INTERRUPTED, FlashbenchError, UnavailableError, UsageError

EXIT_BROKEN_PIPE = 141
NO_THREAD = "can't start new thread"
"""What Python says where the system gives no thread."""
FEW_THREADS = "raise the limits that 'ulimit -u' and 'ulimit -v' show, or lower the stack's of 'ulimit -s'"

app = typer.Typer(
    name="flashbench",
    help="Measure attention on this machine and set it beside a model of its memory traffic.",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command("run")(run)
app.command("io-model")(io_model)
app.command("kv-cache")(kv_cache)
app.command("decode")(decode)
app.command("block")(block)
app.command("ring")(ring)
app.command("calibrate")(calibrate)
app.command("tune")(tune)
app.command("check")(check)
app.command("new-impl")(new_impl)
app.command("compare")(compare)
app.command("noise")(noise)
app.command("gate")(gate)
app.add_typer(baseline.app, name="baseline")
app.command("history")(history)
app.command("bisect")(bisect)
app.command("profile")(profile)
app.command("report")(report)
app.command("verify")(verify)
app.command("claims")(claims)
app.command("list")(list_)
app.command("doctor")(doctor)


def _version(wanted: bool) -> None:
    if wanted:
        from flashbench import __version__

        typer.echo(f"flashbench {__version__}")
        raise typer.Exit


@app.callback(invoke_without_command=True)
def top(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", "-V", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[
        bool, typer.Option("--debug", help="Show the traceback of an error; may stand anywhere.")
    ] = False,
) -> None:
    """Measure attention on this machine and set it beside a model of its memory traffic."""
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit. Deliberate errors are one ``error:`` line on stderr."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in arguments
    arguments = [argument for argument in arguments if argument != "--debug"]
    streams.settle()
    if not debug:
        stray.told_in_a_line()
    if arguments[:1] == ["bisect"]:
        sys.exit(_for_git(lambda: _answered(arguments, debug=debug)))
    sys.exit(_answered(arguments, debug=debug))


def _for_git(answered: Callable[[], int]) -> int:
    """The exit code of a step of a bisection, of which git takes 1 to 124 for a bad commit."""
    try:
        code = answered()
    except FlashbenchError:  # with --debug
        traceback.print_exc()
        return EXIT_ABORT
    except Exception:
        traceback.print_exc()
        return EXIT_SKIP
    except SystemExit as stop:  # by what a command line has imported
        code = stop.code if isinstance(stop.code, int) else EXIT_ABORT
        return EXIT_ABORT if 0 < code < EXIT_SKIP else code
    return EXIT_ABORT if EXIT_BAD < code < EXIT_SKIP else code


def _answered(arguments: list[str], *, debug: bool) -> int:
    """Run the command line; the exit code. What is no deliberate error comes out, with debug all."""
    code: int | None
    try:
        with interrupt.terminable():
            _check_text(arguments)
            streams.check_folder(arguments)
            code = _run(arguments)
            sys.stdout.flush()
    except FlashbenchError as problem:
        if debug:
            raise
        console.error(problem)
        code = problem.exit_code
    except BrokenPipeError:
        console.give_up(sys.stdout)
        code = EXIT_BROKEN_PIPE
    except OSError as problem:
        named = problem.filename is not None  # else it is of a stream or a socket
        if debug or not (named or problem.errno in streams.FULL or problem.errno == errno.ENOMEM):
            raise
        if problem.errno == errno.ENOMEM:
            code = None
        else:
            if named:
                said = f"path {units.quoted(problem.filename)}: {problem.strerror}"
            else:
                console.give_up(sys.stdout)
                said = f"the output cannot be written: {streams.why_unwritable(problem)}"
            console.error(UsageError(said))
            code = UsageError.exit_code
    except KeyboardInterrupt:
        code = EXIT_INTERRUPTED
    except MemoryError:
        if debug:
            raise
        code = None
    except RuntimeError as problem:
        if debug or NO_THREAD not in str(problem):
            raise
        console.error(
            UnavailableError(f"{problem}: processes or memory are at their limit", hint=FEW_THREADS)
        )
        code = UnavailableError.exit_code
    return _out_of_memory() if code is None else code  # here, where what took the memory is let go of


def _out_of_memory() -> int:
    """Say it; the exit code."""
    console.error(
        UnavailableError(
            "out of memory: the machine, or the limit of this process, has too little for what was asked",
            hint="raise the limit that 'ulimit -v' shows, or give smaller files; --debug shows where",
        )
    )
    return UnavailableError.exit_code


def _check_text(arguments: Sequence[str]) -> None:
    """Refuse words that are no text a path could be; a shell gives none, a caller in Python may."""
    for before, argument in pairwise(["", *arguments]):
        try:
            os.fsencode(argument)
        except UnicodeEncodeError:
            option = f"{before} " if before.startswith("--") else ""
            raise UsageError(f"{option}{argument!a}: is no text; accepted: words in Unicode") from None


def _run(arguments: list[str]) -> int:
    """The exit code of the command line; a usage error that Typer raised becomes one of ours."""
    try:
        code = app(args=arguments, prog_name="flashbench", standalone_mode=False)
    except typer.Abort:
        return EXIT_INTERRUPTED
    except SystemExit as stop:  # Typer turns a closed pipe into exit code 1
        if stop.code == 1:
            raise BrokenPipeError from None
        raise
    except Exception as problem:
        if not hasattr(problem, "format_message"):
            raise
        raise _usage_error(problem, arguments) from None
    return code if isinstance(code, int) else 0


def _usage_error(problem: Any, arguments: Sequence[str]) -> UsageError:
    """Typer's multi-line box as one line, with the nearest name or the help to read as a hint."""
    context = getattr(problem, "ctx", None)
    path = context.command_path if context else _command_path(arguments)
    text = " ".join(str(problem.format_message()).split()).rstrip(".")
    wanted, known = "", list[str]()
    if getattr(problem, "possibilities", None) is not None or text.startswith("No such option"):
        wanted = problem.option_name
        known = [name for row in context.command.params for name in row.opts] if context else []
        text = f"{wanted} is not an option of '{path}'"
    elif context and text.startswith("No such command"):
        wanted, known = text.split("'")[1], context.command.list_commands(context)
        text = f"{wanted!r} is not a command; accepted: {', '.join(known)}"
    hint = f"'{path} --help' lists what is accepted"
    close = difflib.get_close_matches(wanted, [name for name in known if len(name) > 2], n=1, cutoff=0.5)
    if close:
        hint = f"did you mean {close[0]}? {hint}"
    return UsageError(text[0].lower() + text[1:], hint=hint)


def _command_path(arguments: Sequence[str]) -> str:
    named = [name for name in arguments[:1] if not name.startswith("-")]
    return " ".join(["flashbench", *named])
