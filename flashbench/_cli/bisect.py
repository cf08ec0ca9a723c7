"""``flashbench bisect``: one step of ``git bisect run``, with the exit codes that git wants."""

from __future__ import annotations

import os
import signal
import subprocess
import uuid
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from flashbench import userdata
from flashbench._cli.baseline import Store
from flashbench._cli.compare import allowances, compare, measures
from flashbench.errors import EXIT_GATE, EXIT_OK, FlashbenchError, UsageError
from flashbench.signals import postponed

EXIT_GOOD, EXIT_BAD, EXIT_SKIP = 0, 1, 125
EXIT_ABORT = 128
"""From here on git stops bisecting, as it should where the command line is wrong at every commit."""
ENDING_S = 3.0
"""What COMMAND is given to end by itself once this process is interrupted."""
OUT = "{out}"
RESULTS = (".json", ".jsonl", ".csv")


def bisect(
    command: Annotated[
        list[str],
        typer.Argument(
            help="After '--': what builds and measures; '{out}' in it stands for a new, empty folder.",
            metavar="COMMAND",
        ),
    ],
    base: Annotated[
        str | None,
        typer.Option(help="Runs of a good commit: files, folders or globs.", metavar="BASE"),
    ] = None,
    baseline: Annotated[
        str | None,
        typer.Option(
            help="Instead, what 'flashbench baseline' keeps, by name or folder.", metavar="NAME|DIR"
        ),
    ] = None,
    store: Store = None,
    metric: Annotated[str | None, typer.Option(help="As in 'compare'.", metavar="NAMES")] = None,
    fail: Annotated[str | None, typer.Option(help="As in 'compare'.", metavar="SHARE")] = None,
    noise: Annotated[str | None, typer.Option(help="As in 'compare'.", metavar="SHARE|FILE")] = None,
    allow: Annotated[str | None, typer.Option(help="As in 'compare'.", metavar="NAMES")] = None,
    runs: Annotated[int, typer.Option(help="How often to measure.", min=1, max=100, metavar="N")] = 1,
) -> None:
    """Tell 'git bisect run' whether the commit that is checked out is worse than a good one.

    Exits 0 where no cell is worse by more than --fail, 1 where one is, and 125 (git skips the commit) where
    the command fails or nothing can be judged. A wrong command line exits 128, which ends the search.

    Example: git bisect run flashbench bisect --base good.jsonl -- flashbench run --config c.toml --out {out}
    """
    _check(command, metric)
    _look(base, baseline, store, allowances(allow))
    with userdata.temporary("flashbench-bisect-") as folder:
        new = _measured(command, Path(folder), runs)
        code = _judged({
            **({"base": base, "new": new} if base else {"base": new, "baseline": baseline}),
            "store": store, "metric": metric, "fail": fail, "noise": noise, "allow": allow,
        })  # fmt: skip
    raise typer.Exit({EXIT_OK: EXIT_GOOD, EXIT_GATE: EXIT_BAD}.get(code, EXIT_SKIP))


def _check(command: list[str], metric: str | None) -> None:
    """Find now what is wrong at every commit alike. Raises UsageError."""
    if not any(OUT in word for word in command):
        said = " ".join(command)
        raise UsageError(f"COMMAND {said!r} names no {OUT}; accepted: {OUT} where its results go")
    measures(metric)


def _look(base: str | None, baseline: str | None, store: str | None, allowed: Collection[str]) -> None:
    """The same of the good side. Raises UsageError, RunFileError."""
    from flashbench import baselines, judge

    if (base is None) == (baseline is None):
        raise UsageError("--base and --baseline: needed is the good side; accepted: one of the two")
    if base is not None:
        judge.load_side(base, "BASE", allowed)
    else:
        for one in baselines.named(str(baseline), baselines.store(store)):
            one.side(allowed=allowed)


def _measured(command: list[str], folder: Path, runs: int) -> str:
    """Run the command, each time with a folder of its own: its results. Exits 125 where there are none."""
    for number in range(runs):
        out = folder / str(number)
        out.mkdir()
        try:
            code = _run([word.replace(OUT, str(out)) for word in command])
        except OSError as error:
            _skip(f"{command[0]!r} cannot be run: {error.strerror or error}")
        if code:
            _skip(f"{command[0]!r} ended with exit code {code}")
    files = sorted(str(path) for path in folder.rglob("*") if path.suffix in RESULTS)
    if not files:
        _skip(f"{command[0]!r} wrote no results below {OUT}")
    return ",".join(files)


def _run(command: list[str]) -> int:
    """Its exit code; nothing that it started in its group is left, of an interrupted one nothing at all."""
    from flashbench.isolation import lifeline

    mark = uuid.uuid4().hex
    process: subprocess.Popen[bytes] | None = None
    try:
        with postponed():  # until it is known what there is to end
            process = subprocess.Popen(
                command, env={**os.environ, lifeline.MARK: mark}, start_new_session=True
            )
        if hasattr(os, "waitid"):  # not reaped: its number stays its own until its group is ended
            os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        else:
            process.wait()
        with postponed():
            _end(process)
        return process.wait()
    except KeyboardInterrupt:
        with postponed():
            if process is not None:
                _end(process, patience_s=ENDING_S)
            lifeline.end_marked(mark)
        raise


def _end(process: subprocess.Popen[bytes], patience_s: float = 0.0) -> None:
    """End its group, which has so long to do so by itself."""
    if not hasattr(os, "killpg"):
        process.kill()
        return
    with suppress(OSError):
        if patience_s:
            os.killpg(process.pid, signal.SIGTERM)
            with suppress(subprocess.TimeoutExpired):
                process.wait(patience_s)
        os.killpg(process.pid, signal.SIGKILL)


def _judged(options: Mapping[str, str | None]) -> int:
    """The exit code of ``compare``; whatever stops it judges nothing."""
    from flashbench import console

    try:
        compare(**options)  # type: ignore[arg-type]
    except typer.Exit as stop:
        return stop.exit_code
    except FlashbenchError as problem:
        console.error(problem)
        return EXIT_SKIP
    return EXIT_OK


def _skip(text: str) -> NoReturn:
    from flashbench import console

    console.warn(f"{text}; this commit is skipped")
    raise typer.Exit(EXIT_SKIP)
