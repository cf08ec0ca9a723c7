"""CSV files of Nsight Compute: each kernel's metrics, in base units, whoever made the file.

Two layouts exist. Wide (``--page raw``): a row per kernel, a column per metric, the units in the second
row (the first below the header, of no kernel and no ID). Long (``--page details`` and the default page): a
row per metric, its unit beside it, which may differ from row to row. Numbers may carry thousands separators;
what the profiler's own lines say (``==PROF== …``) is passed over. A file may hold several outputs, one after
the other.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from flashbench._profilers.ncu_units import expected, fits, number
from flashbench.errors import RunFileError

NAME, METRIC, UNIT, VALUE = "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"
UNNAMED = "(no name)"
"""A kernel whose name is empty."""
_RANGES = re.compile(r"(?:Push/Pop|Start/Stop)_Range")
_FIELD_BYTES = 2**24
"""Longest cell that is read: kernel names of templates pass the csv module's own 128 KiB."""
AGAIN = "make one with 'ncu --csv --page raw --log-file FILE …' or 'ncu --import REP --page raw --csv'"
"""How to get a file that can be read."""


@dataclass(frozen=True, kw_only=True)
class Kernel:
    """One launch as the profiler saw it.

    metrics: by Nsight Compute's names, in bytes, seconds, sectors, …; a percentage stays in percent.
    None where the profiler gave no number. ranges: names of the NVTX ranges that were open.
    """

    name: str
    grid: str = ""
    block: str = ""
    ranges: tuple[str, ...] = ()
    metrics: Mapping[str, float | None] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Profiled:
    """What a file holds.

    dropped: lines below the header that are no whole rows of its table, or of no kernel. twice: metrics that
    one kernel has more than once, in order; the last counts. unread: metrics that have something else than a
    number (``n/a``, ``(!) nan``, ``inf``), and what; an empty cell is none.
    """

    kernels: tuple[Kernel, ...] = ()
    dropped: int = 0
    twice: tuple[str, ...] = ()
    unread: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


def parse(
    text: str, *, source: str = "ncu's output", only: Collection[str] | None = None
) -> tuple[Kernel, ...]:
    """The kernels of ``read``."""
    return read(text, source=source, only=only).kernels


def read(text: str, *, source: str = "ncu's output", only: Collection[str] | None = None) -> Profiled:
    """The kernels of a CSV file, in order; none where the profiler saw none.

    only: the metrics to read, all by default; what the others hold does not matter. Raises RunFileError,
    naming the source, for a text that holds something else, and for a cell that has no certain value.
    """
    kernels: list[Kernel] = []
    dropped = 0
    twice: dict[str, None] = {}
    unread: dict[str, dict[str, None]] = {}
    try:
        tables = _tables(text, source)
        for names, rows in tables:
            table = _Table(names, source, only)
            kernels += table.long(rows) if METRIC in names or VALUE in names else table.wide(rows)
            dropped += table.dropped
            twice |= table.twice
            for name, texts in table.unread.items():
                unread[name] = unread.get(name, {}) | texts
    except csv.Error as error:
        raise RunFileError(
            f"{source}: {error}; accepted: cells of {_FIELD_BYTES} characters", AGAIN
        ) from None
    return Profiled(
        kernels=tuple(kernels),
        dropped=dropped,
        twice=tuple(twice),
        unread={name: tuple(texts) for name, texts in unread.items()},
    )


def _tables(text: str, source: str) -> list[tuple[list[str], list[list[str]]]]:
    """Each header with the rows below it. A line that is no CSV is an empty row."""
    lines = [
        line
        for line in re.split(r"\r\n|\n|\r", text.lstrip("\ufeff"))
        if line.strip() and not line.startswith("==")
    ]
    tables: list[tuple[list[str], list[list[str]]]] = []
    for line in lines:
        row = _cells(line)
        if NAME in line and NAME in (names := [cell.strip() for cell in row]):
            tables.append((names, []))
        elif tables:
            tables[-1][1].append(row)
    if lines and not tables:
        page = re.search(r"^\s+Section: |^\s*Metric Name\s+Metric Unit\s+Metric Value", text, re.MULTILINE)
        what = "the text of ncu's details page" if page else "no table of Nsight Compute"
        raise RunFileError(
            f"{source}: {what}; accepted: the CSV of 'ncu --page raw --csv', with a column {NAME!r}", AGAIN
        )
    return tables


def _cells(line: str) -> list[str]:
    """Empty for a line that is cut off within quotes. Raises csv.Error for a cell that is too long.

    Each line is read by itself, so that a stray quote costs its own line only.
    """
    usual = csv.field_size_limit(_FIELD_BYTES)
    try:
        return next(csv.reader([line], strict=True), [])
    except csv.Error as error:
        if "field limit" in str(error):
            raise
        return []
    finally:
        csv.field_size_limit(usual)


class _Table:
    """The rows below one header."""

    def __init__(self, names: list[str], source: str, only: Collection[str] | None) -> None:
        self.names, self.source, self.only = names, source, only
        self.dropped = 0
        self.twice: dict[str, None] = {}
        self.unread: dict[str, dict[str, None]] = {}

    def wide(self, rows: Sequence[list[str]]) -> Iterator[Kernel]:
        """A row per kernel, below the row of units."""
        asked = [name for name in self.names if "__" in name and not name.startswith("device__")]
        metrics = [name for name in asked if self.only is None or name in self.only]
        self.twice |= dict.fromkeys(name for name in metrics if metrics.count(name) > 1)
        units: Mapping[str, str] | None = None
        for index, cells in enumerate(self._whole(rows)):
            if not index and not cells[NAME] and not cells.get("ID"):
                units = cells
                continue
            if units is None and metrics:
                raise RunFileError(
                    f"{self.source}: there is no row of units below the header; accepted: the CSV of"
                    " 'ncu --page raw --csv' as it was written", AGAIN
                )  # fmt: skip
            found = {name: self._number(name, cells[name], (units or {})[name]) for name in metrics}
            if cells[NAME] or any(value is not None for value in found.values()):
                yield _kernel(cells, found)
            else:
                self.dropped += 1

    def long(self, rows: Sequence[list[str]]) -> Iterator[Kernel]:
        """A row per metric; a kernel is what shares ID, process and name."""
        for column in (METRIC, UNIT, VALUE):
            if column not in self.names:
                raise RunFileError(
                    f"{self.source}: there is no column {column!r}; accepted: the CSV of 'ncu --page raw"
                    f" --csv', or one with {METRIC!r}, {UNIT!r} and {VALUE!r}", AGAIN
                )  # fmt: skip
        found: dict[tuple[str, ...], tuple[dict[str, str], dict[str, float | None]]] = {}
        for cells in self._whole(rows):
            if not cells[NAME] and not (cells[METRIC] and cells[VALUE]):
                self.dropped += 1
                continue
            key = (cells.get("Process ID", ""), cells.get("ID", ""), cells[NAME])
            _, metrics = found.setdefault(key, (cells, {}))
            name = cells[METRIC]  # empty where the row is a rule's advice
            if name and (self.only is None or name in self.only):
                if name in metrics:
                    self.twice[name] = None
                metrics[name] = self._number(name, cells[VALUE], cells[UNIT])
        for cells, metrics in found.values():
            yield _kernel(cells, metrics)

    def _whole(self, rows: Sequence[list[str]]) -> Iterator[dict[str, str]]:
        """The rows that are as long as the header; others were cut off, as when the profiler was killed."""
        for row in rows:
            if len(row) == len(self.names):
                yield dict(zip(self.names, row, strict=True))
            else:
                self.dropped += 1

    def _number(self, name: str, text: str, unit: str) -> float | None:
        try:
            value = number(text, unit)
        except ValueError as error:
            raise RunFileError(f"{self.source}: column {name!r}: {error}", AGAIN) from None
        if value is None and text.strip():
            self.unread.setdefault(name, {})[text.strip()] = None
        if value is not None and not fits(name, unit):
            wanted = {"byte": "bytes", "second": "seconds"}.get(expected(name), "neither bytes nor seconds")
            raise RunFileError(
                f"{self.source}: column {name!r}: the unit {unit!r} is of another kind; accepted: {wanted}",
                AGAIN,
            )
        return value


def _kernel(cells: Mapping[str, str], metrics: Mapping[str, float | None]) -> Kernel:
    ranges = [part for name, cell in cells.items() if _RANGES.search(name) for part in _range_names(cell)]
    return Kernel(
        name="".join(letter for letter in cells[NAME] if letter.isprintable()) or UNNAMED,
        grid=cells.get("Grid Size", ""),
        block=cells.get("Block Size", ""),
        ranges=tuple(ranges),
        metrics=metrics,
    )


def _range_names(cell: str) -> list[str]:
    """The names in `` "2:<default domain>:NAME:none:none:none:none:none:none" …``."""
    found = re.findall(r'"?[^":]*:?<default domain>:(.*?)(?::[^:"]*){6}"?(?=\s|$)', cell)
    return [str(name) for name in found]
