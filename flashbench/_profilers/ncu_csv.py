"""CSV files of Nsight Compute: each kernel's metrics, in base units, whoever made the file.

Two layouts exist. Wide (``--page raw``): a row per kernel, a column per metric, the units in the second
row. Long (``--page details`` and the default page): a row per metric, its unit beside it, which may
differ from row to row. Numbers may carry thousands separators; what the profiler's own lines say
(``==PROF== …``) is passed over.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flashbench.errors import RunFileError

NAME, METRIC, UNIT, VALUE = "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"
_RANGES = re.compile(r"(?:Push/Pop|Start/Stop)_Range")

PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
"""Of bytes, instructions, hertz: Nsight Compute's multiples are decimal."""

SECONDS = {
    "ns": 1e-9, "nsecond": 1e-9, "us": 1e-6, "usecond": 1e-6, "ms": 1e-3, "msecond": 1e-3,
    "s": 1.0, "second": 1.0,
}  # fmt: skip


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


def parse(text: str, *, source: str = "ncu's output") -> tuple[Kernel, ...]:
    """The kernels of a CSV file, in order; none where the profiler saw none.

    Raises RunFileError, naming the source, for a text that holds something else.
    """
    lines = [line for line in text.lstrip("\ufeff").splitlines() if line and not line.startswith("==")]
    start = next((at for at, line in enumerate(lines) if _header(line)), None)
    if start is None:
        if any(line.strip() for line in lines):
            raise RunFileError(
                f"{source}: no table of Nsight Compute; accepted: the CSV of 'ncu --csv', with a column"
                f" {NAME!r}",
                hint="make one with 'ncu --csv --page raw --log-file FILE …' or 'ncu --import REP --csv'",
            )
        return ()
    rows = csv.reader(lines[start:])
    names = [name.strip() for name in next(rows)]
    kernels = _long(names, rows) if METRIC in names and VALUE in names else _wide(names, rows)
    return tuple(kernels)


def _header(line: str) -> bool:
    return NAME in line and NAME in [cell.strip() for cell in next(csv.reader([line]), [])]


def _wide(names: list[str], rows: Iterable[list[str]]) -> Iterator[Kernel]:
    """A row per kernel. The row of units comes first and has no kernel's name."""
    units = [""] * len(names)
    for row in rows:
        if len(row) != len(names):  # cut off in the middle, as when the profiler was killed
            continue
        cells = dict(zip(names, row, strict=True))
        if not cells[NAME]:
            units = row
            continue
        metrics = {
            name: number(text, unit)
            for name, text, unit in zip(names, row, units, strict=True)
            if "__" in name and not name.startswith("device__")
        }
        yield _kernel(cells, metrics)


def _long(names: list[str], rows: Iterable[list[str]]) -> Iterator[Kernel]:
    """A row per metric; a kernel is what shares ID, process and name."""
    found: dict[tuple[str, ...], tuple[dict[str, str], dict[str, float | None]]] = {}
    for row in rows:
        if len(row) != len(names):
            continue
        cells = dict(zip(names, row, strict=True))
        if not cells[NAME]:
            continue
        key = (cells.get("Process ID", ""), cells.get("ID", ""), cells[NAME])
        _, metrics = found.setdefault(key, (cells, {}))
        if cells[METRIC]:  # empty where the row is a rule's advice
            metrics[cells[METRIC]] = number(cells[VALUE], cells.get(UNIT, ""))
    for cells, metrics in found.values():
        yield _kernel(cells, metrics)


def _kernel(cells: Mapping[str, str], metrics: Mapping[str, float | None]) -> Kernel:
    ranges = [part for name, cell in cells.items() if _RANGES.search(name) for part in _range_names(cell)]
    return Kernel(
        name=cells[NAME],
        grid=cells.get("Grid Size", ""),
        block=cells.get("Block Size", ""),
        ranges=tuple(ranges),
        metrics=metrics,
    )


def _range_names(cell: str) -> list[str]:
    """The names in `` "2:<default domain>:NAME:none:none:none:none:none:none" …``."""
    found = re.findall(r'"?[^":]*:?<default domain>:(.*?)(?::[^:"]*){6}"?(?=\s|$)', cell)
    return [str(name) for name in found]


def number(text: str, unit: str) -> float | None:
    """The value in base units; None for n/a, an empty cell and what is no finite number.

    ``("500", "Mbyte")`` is 5e8: the multiples are decimal. ``("1,024", "sector")`` is 1024.
    """
    try:
        value = float(text.strip().replace(",", "").replace("\u202f", "").replace("'", ""))
    except ValueError:
        return None
    return value * factor(unit) if math.isfinite(value) else None


def factor(unit: str) -> float:
    """What one of the unit is in base units: ``Kbyte/block`` 1000, ``usecond`` 1e-6, ``sector`` 1."""
    base = unit.strip().split("/")[0]
    if base in SECONDS:
        return SECONDS[base]
    found = re.fullmatch(r"([KMGTP]?)(byte|inst|Hz|hz)", base)
    return PREFIXES[found.group(1)] if found else 1.0
