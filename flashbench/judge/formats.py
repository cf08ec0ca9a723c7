"""Which reader a file needs: told by what it holds, not by its name."""

from __future__ import annotations

from pathlib import Path

from flashbench import runfile
from flashbench.judge import native
from flashbench.judge.sides import Run, Side, paths_of


def load_side(texts: str, name: str) -> Side:
    """The side of a comma list of files, folders and globs.

    Raises UsageError for what matches nothing or cannot be opened, RunFileError for a file of no known
    format."""
    return Side(name=name.lower(), runs=tuple(load_run(path) for path in paths_of(texts, name)))


def load_run(path: Path) -> Run:
    """One file as a run."""
    return native.run_of(runfile.load(path))
