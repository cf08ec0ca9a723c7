"""CSV files of Nsight Compute: each kernel's metrics, in base units, whoever made the file.

Two layouts exist. Wide (``--page raw``): a row per kernel, a column per metric, the units in the second
row. Long (``--page raw`` of older versions): a row per metric, its unit beside it, which may differ from
row to row. Numbers may carry thousands separators; what the profiler's own lines say (``==PROF== …``) is
passed over. A number whose meaning is not plain is refused, not guessed.
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from flashbench.errors import RunFileError

NAME, METRIC, UNIT, VALUE = "Kernel Name", "Metric Name", "Metric Unit", "Metric Value"
_RANGES = re.compile(r"(?:Push/Pop|Start/Stop)_Range")

PREFIXES = {"": 1.0, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
"""Of bytes, instructions, hertz: Nsight Compute's multiples are decimal."""

BINARY = {"K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}
"""Of bytes written KiB, MiB, …, as other tools do."""

FIELD_LIMIT = 2**24
"""Characters of one cell; csv's own limit, 131072, is less than some kernels' names."""

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


def parse(
    text: str, *, source: str = "ncu's output", on_lost: Callable[[int], None] = lambda _: None
) -> tuple[Kernel, ...]:
    """The kernels of a CSV file, in order; none where the profiler saw none.

    on_lost: told how many rows are not whole (cut off, a stray quote), if any. Raises RunFileError, naming
    the source, for a text that holds something else.
    """
    csv.field_size_limit(FIELD_LIMIT)
    try:
        return _parse(text, source, on_lost)
    except csv.Error as error:
        raise RunFileError(f"{source}: no CSV: {error}") from None
    except _Unclear as error:
        raise RunFileError(f"{source}: {error}") from None


class _Unclear(Exception):
    """A table whose numbers could mean several things."""


def _parse(text: str, source: str, on_lost: Callable[[int], None]) -> tuple[Kernel, ...]:
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
    whole, lost = [], 0
    for row in rows:
        if len(row) != len(names):  # cut off in the middle, as when the profiler was killed
            lost += 1
        elif row != names:  # the header of a second output in the same file
            whole.append(row)
    kernels = tuple(_long(names, whole) if METRIC in names else _wide(names, whole))
    if lost:
        on_lost(lost)
    return kernels


def _header(line: str) -> bool:
    return NAME in line and NAME in [cell.strip() for cell in next(csv.reader([line]), [])]


def _wide(names: list[str], rows: Iterable[list[str]]) -> Iterator[Kernel]:
    """A row per kernel. The row of units comes first and has no kernel's name."""
    units = [""] * len(names)
    known = False
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        if not cells[NAME]:
            units, known = row, True
            continue
        if not known:
            raise _Unclear("no row of units under the header, so its numbers could be of any unit")
        metrics = {
            name: number(text, unit, name)
            for name, text, unit in zip(names, row, units, strict=True)
            if "__" in name and not name.startswith("device__")
        }
        yield _kernel(cells, metrics)


def _long(names: list[str], rows: Iterable[list[str]]) -> Iterator[Kernel]:
    """A row per metric; a kernel is what shares ID, process and name."""
    for name in (VALUE, UNIT):
        if name not in names:
            raise _Unclear(f"it has a column {METRIC!r} but none {name!r}")
    found: dict[tuple[str, ...], tuple[dict[str, str], dict[str, float | None]]] = {}
    for row in rows:
        cells = dict(zip(names, row, strict=True))
        if not cells[NAME]:
            continue
        key = (cells.get("Process ID", ""), cells.get("ID", ""), cells[NAME])
        _, metrics = found.setdefault(key, (cells, {}))
        if cells[METRIC]:  # empty where the row is a rule's advice
            metrics[cells[METRIC]] = number(cells[VALUE], cells[UNIT], cells[METRIC])
    if found and not any("__" in name for _, metrics in found.values() for name in metrics):
        raise _Unclear("a page of headings, not of metrics; make the file with 'ncu --csv --page raw'")
    for cells, metrics in found.values():
        yield _kernel(cells, metrics)


def _kernel(cells: Mapping[str, str], metrics: Mapping[str, float | None]) -> Kernel:
    ranges = [part for name, cell in cells.items() if _RANGES.search(name) for part in _range_names(cell)]
    return Kernel(
        name="".join(letter for letter in cells[NAME] if letter.isprintable()),
        grid=cells.get("Grid Size", ""),
        block=cells.get("Block Size", ""),
        ranges=tuple(ranges),
        metrics=metrics,
    )


def _range_names(cell: str) -> list[str]:
    """The names in `` "2:<default domain>:NAME:none:none:none:none:none:none" …``."""
    found = re.findall(r'"?[^":]*:?<default domain>:(.*?)(?::[^:"]*){6}"?(?=\s|$)', cell)
    return [str(name) for name in found]


def number(text: str, unit: str, metric: str = "a metric") -> float | None:
    """The value in base units; None for n/a, an empty cell and what is no finite number.

    ``("500", "Mbyte")`` is 5e8: the multiples are decimal. ``("1,024", "sector")`` is 1024. Commas that part
    no thousands, a negative count and a unit that is not known are refused.
    """
    text = text.strip().replace("\u202f", "").replace("'", "")
    if "," in text and not re.fullmatch(r"[+-]?\d{1,3}(,\d{3})+(\.\d+)?", text):
        if re.fullmatch(r"[+-]?[\d.,]+", text):
            raise _Unclear(f"{metric} is {text!r}; a decimal point and commas between thousands are taken")
        return None
    try:
        value = float(text.replace(",", ""))
    except ValueError:
        return None
    if not math.isfinite(value):
        return None
    if value < 0:
        raise _Unclear(f"{metric} is {text!r}; no counter is negative")
    return value * factor(unit, metric)


def factor(unit: str, metric: str = "a metric") -> float:
    """What one of the unit is in base units: ``Kbyte/block`` 1000, ``usecond`` 1e-6, ``sector`` 1."""
    base = unit.strip().split("/")[0]
    if base in SECONDS:
        return SECONDS[base]
    if found := re.fullmatch(r"([KMGTP]?)(bytes?|B|inst|Hz|hz|cycles?)", base):
        return PREFIXES[found.group(1)]
    if found := re.fullmatch(r"([KMGT])iB", base):
        return BINARY[found.group(1)]
    if re.fullmatch(r"[KMGTPkmgtpuµn]i?(b|B|bit|byte|s|sec|Hz).*", base):
        raise _Unclear(f"{metric} is in {unit!r}, a unit that is not known here")
    return 1.0
