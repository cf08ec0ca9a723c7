"""Rows that are of no cell (``block``, ``ring``, ``check --numerics``), kept as they are measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

Row = Mapping[str, Any]


@contextmanager
def kept(
    found: list[dict[str, Any]],
    path: Path | None,
    kind: str,
    *,
    about: Callable[[], dict[str, Any]],
    texts: Mapping[str, str],
    planned: int,
) -> Iterator[Callable[[Row], None]]:
    """What takes a row: it is in found and, where a path is given, in a results file there, or in neither.

    kind: of the rows. about: collects the environment for the file. texts: options as they were typed.
    planned: how many rows there are to be. Raises UsageError where the file cannot be begun.
    """
    from flashbench import runfile
    from flashbench.signals import postponed

    writer = None
    if path is not None:
        argv = ["flashbench", *sys.argv[1:]]
        head = runfile.header(argv=argv, options=dict(texts), environment=about(), cells=())
        writer = runfile.create(path, {**head, "planned": planned})

    def keep(row: Row) -> None:
        with postponed():
            if writer is not None:
                writer.put({"type": kind, **row})
            found.append(dict(row))

    with writer or nullcontext():
        yield keep
