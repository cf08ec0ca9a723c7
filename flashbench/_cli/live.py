"""What ``run`` shows while it measures: cells done, the one at work, time left, the latest results.

On a terminal a block that is redrawn in place and gone at the end; elsewhere, and in CI, a note now and then.
"""

from __future__ import annotations

import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from flashbench import console, units

if TYPE_CHECKING:
    from rich.console import Group

    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.record import Record

LATEST = 5
"""Results that the block shows."""


class Board:
    """How far a sweep is. expected_s: a rough time by cell, by which what is left is told."""

    def __init__(self, expected_s: Mapping[Cell, float], clock: Callable[[], float] = time.monotonic) -> None:
        self._expected, self._clock, self._began = expected_s, clock, clock()
        self._done: set[Cell] = set()
        self._latest: deque[Record] = deque(maxlen=LATEST)
        self._now: Cell | None = None
        self.show: Callable[[Board], None] = lambda _: None

    def begin(self, cell: Cell) -> None:
        """A cell is at work."""
        self._now = cell
        self.show(self)

    def keep(self, record: Record) -> None:
        """A cell has its row."""
        self._done.add(record.cell)
        self._latest.append(record)
        self.show(self)

    @property
    def counts(self) -> tuple[int, int]:
        """Cells done, and all."""
        return len(self._done), len(self._expected)

    @property
    def left_s(self) -> float | None:
        """Seconds that are left: the rough time of the rest, at the pace of what is done; None before."""
        done = sum(self._expected.get(cell, 0.0) for cell in self._done)
        rest = sum(seconds for cell, seconds in self._expected.items() if cell not in self._done)
        return rest * (self._clock() - self._began) / done if done else None

    @property
    def line(self) -> str:
        """The cell at work and what is left, for one line."""
        left = self.left_s
        about = "" if left is None else f", about {duration(left)} left"
        return f"{self._now.key if self._now else ''}{about}"

    def rows(self) -> list[tuple[str, str, str]]:
        """Cell, what came out and how the chip ran, the newest last."""
        return [(one.cell.key, outcome(one), chip(one)) for one in self._latest]


def duration(seconds: float) -> str:
    """7 s, 12 min, 1 h 05 min: as rough as the forecast."""
    minutes = round(seconds / 60)
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def outcome(record: Record) -> str:
    """The median with its spread, or the status with its reason."""
    if record.samples is None:
        return f"{record.status}: {units.cut(record.reason or '', 30)}"
    return f"{units.format_seconds(record.samples.median_s)} ± {record.samples.spread / 2:.1%}"


def chip(record: Record) -> str:
    """The clock of the last round and the flags, such as "1755 MHz, throttled"."""
    rounds = record.timing.get("rounds") or ()
    clock = rounds[-1].get("sm_clock_mhz") if rounds else None
    return ", ".join([*([f"{clock:.0f} MHz"] if clock else []), *record.flags])


def expected(cells: Sequence[Cell], target: Target, **how: Any) -> dict[Cell, float]:
    """A rough time by cell (seconds), as ``--dry-run`` forecasts it. how: energy and load of the run."""
    from flashbench import plan

    found: dict[Cell, float] = {}
    checked: set[Any] = set()
    for cell in cells:
        check = (cell.problem, cell.pass_ != "fwd")
        found[cell] = plan.expected_s(cell, target, checked=check in checked, **how)
        checked.add(check)
    return found


@contextmanager
def board(expected_s: Mapping[Cell, float], *, quiet: bool = False) -> Iterator[Board]:
    """The board of a sweep, shown until the context ends; silent with ``quiet``."""
    found = Board(expected_s)
    if quiet or not expected_s or not console.lively():
        with console.progress(len(expected_s), quiet=quiet) as tick:
            found.show = lambda one: tick(one.counts[0], one.line)
            yield found
        return
    from rich.live import Live

    screen = console.rich_console(sys.stderr)
    with Live(console=screen, transient=True, refresh_per_second=4, redirect_stdout=False) as live:
        found.show = lambda one: live.update(drawn(one))
        yield found


def drawn(one: Board) -> Group:
    """The block: the latest results, a bar, the cell at work."""
    from rich.console import Group
    from rich.progress_bar import ProgressBar
    from rich.table import Table
    from rich.text import Text

    results = Table.grid(padding=(0, 2))
    for row in one.rows():
        results.add_row(*(Text(console.printable(text), overflow="ellipsis", no_wrap=True) for text in row))
    done, total = one.counts
    head = Table.grid(padding=(0, 2))
    head.add_row(ProgressBar(total=total, completed=done, width=24), Text(f"{done}/{total}"))
    return Group(results, head, Text(console.printable(one.line), overflow="ellipsis", no_wrap=True))
