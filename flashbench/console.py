"""Tables, JSON and CSV on stdout; notes, warnings, errors and progress on stderr.

rich is imported inside the functions that draw, so that ``--json`` and ``--csv`` do without it.
Nothing here crashes on an output that cannot encode a character: tables fall back to ASCII
boxes and characters that do not fit become ``?``.
"""

from __future__ import annotations

import csv as csv_
import json as json_
import math
import os
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, TextIO

from flashbench import fitted, units
from flashbench.errors import FlashbenchError

if TYPE_CHECKING:
    from rich.console import Console

MOST = 1400
"""Characters of an error at most: what it quotes may be anything."""
LEAST = 20
"""Columns of a table's lines at least, which a terminal that is narrower wraps."""
WIDE = 4000
"""Columns assumed where stdout is no terminal and COLUMNS is not set: nothing is cut or wrapped."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """One column of a table: ``name`` keys the raw value (unit in the name), ``header`` is shown.

    ``format`` makes text of a value that is not missing.
    """

    name: str
    header: str
    format: Callable[[Any], str] = str
    justify: Literal["left", "right", "center"] = "left"


def show_table(
    columns: Sequence[Column],
    rows: Sequence[Mapping[str, Any]],
    *,
    json: bool = False,
    csv: bool = False,
    title: str = "",
    notes: Sequence[str] = (),
) -> None:
    """Print rows to stdout as a table, a JSON array (strict: null, never NaN) or CSV of raw values.

    Missing values (None, NaN, absent) are ``-`` in the table, null in JSON, empty in CSV. Notes
    go to stderr, one line each.
    """
    plain = [{column.name: raw_value(row.get(column.name)) for column in columns} for row in rows]
    if json:
        show_json(plain)
    elif csv:
        _write_csv([column.name for column in columns], plain)
    else:
        _draw_table(columns, plain, title)
    sys.stdout.flush()
    for text in notes:
        note(text)


def show_lines(lines: Iterable[str]) -> None:
    """Print lines of result to stdout, once the last one is there."""
    text = "\n".join(map(printable, lines))
    tolerate(sys.stdout)
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def show_json(value: Any) -> None:
    """Print one strict JSON document to stdout."""
    tolerate(sys.stdout)
    ascii_only = not (sys.stdout.encoding or "").lower().startswith("utf")
    print(json_.dumps(raw_value(value), indent=1, allow_nan=False, ensure_ascii=ascii_only))


def show_text(text: str) -> None:
    """Print one line of result to stdout."""
    tolerate(sys.stdout)
    print(text)


def raw_value(value: Any) -> Any:
    """The value as strict JSON can hold it: NaN, infinities and NA are None, numpy scalars Python's."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): raw_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [raw_value(item) for item in value]
    if hasattr(value, "item"):
        return raw_value(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return None if str(value) in ("<NA>", "NaT") else str(value)


def _write_csv(names: Sequence[str], rows: Sequence[Mapping[str, Any]]) -> None:
    tolerate(sys.stdout)
    writer = csv_.writer(sys.stdout, lineterminator="\n")
    writer.writerow(names)
    for row in rows:
        writer.writerow([_csv_cell(row[name]) for name in names])


def _csv_cell(value: Any) -> Any:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, list):
        return ";".join(str(item) for item in value)
    if isinstance(value, dict):
        return json_.dumps(value, allow_nan=False) if value else ""
    return "" if value is None else value


def _draw_table(columns: Sequence[Column], rows: Sequence[Mapping[str, Any]], title: str) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    out = rich_console(sys.stdout)
    cells = [[_shown(column, row[column.name]) for column in columns] for row in rows]
    headers, numeric = [one.header for one in columns], [one.justify == "right" for one in columns]
    found = fitted.Plan(columns=tuple(range(len(columns))))
    if out.width < WIDE and columns:
        found = fitted.plan(headers, cells, numeric, room=out.width)
    # not as rich's title, which would wrap where a narrow table ends
    for text in filter(None, (title, found.same and f"in all rows: {found.same}")):
        out.print(Text(text, style="italic"))
    if found.lines:
        rule = "─" if shows("─") else "-"
        head, body = fitted.flowed(headers, cells, numeric, found, room=out.width, rule=rule)
        for line in head:
            out.print(Text(line, style="bold"))
        for line in body:
            out.print(Text(line))
        return
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for place, at in enumerate(found.columns):
        width = found.widths[place] if found.widths else None
        table.add_column(
            Text(columns[at].header), justify=columns[at].justify, overflow="fold", width=width
        )  # fmt: skip
    for row in cells:
        table.add_row(*(Text(row[at]) for at in found.columns))
    out.print(table)


def _shown(column: Column, value: Any) -> str:
    return "-" if value is None else printable(column.format(value))


def rich_console(stream: TextIO) -> Console:
    """A rich console on ``stream`` that never cuts text where the stream is no terminal."""
    from rich.console import Console

    tolerate(stream)
    file: Any = Forgiving(stream) if stream is sys.stderr else stream
    columns = os.environ.get("COLUMNS", "")
    shown = _terminal_columns(stream) if stream.isatty() else WIDE
    width = max(LEAST, min(int(columns) if is_size(columns) else shown, WIDE))
    return Console(file=file, width=width, highlight=False, emoji=False, markup=False)


def _terminal_columns(stream: TextIO) -> int:
    """Those of the terminal; 80 where it does not say."""
    try:
        return os.get_terminal_size(stream.fileno()).columns or 80
    except (OSError, ValueError):
        return 80


def is_size(text: str) -> bool:
    """Whether a variable's text is a number of columns or lines; 0 and digits of other scripts are none."""
    return text.isascii() and text.isdecimal() and 0 < int(text[:10]) < 10**9


class Forgiving:
    """A stream whose writes never fail: once it takes no more, what is written is dropped."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        """As the stream's."""
        try:
            return self._stream.write(text)
        except (OSError, ValueError):
            give_up(self._stream)
            return len(text)

    def flush(self) -> None:
        """As the stream's."""
        try:
            self._stream.flush()
        except (OSError, ValueError):
            give_up(self._stream)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def give_up(stream: TextIO) -> None:
    """Point a stream that takes no more nowhere, so that neither the next write nor that at exit fails."""
    with suppress(OSError, ValueError, AttributeError), open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), stream.fileno())


def takes(descriptor: int) -> bool:
    """Whether a device takes writes, of no bytes."""
    try:
        os.write(descriptor, b"")
    except OSError:
        return False
    return True


def printable(text: str, *, json: bool = False) -> str:
    """The text with what would steer a terminal or turn the order of letters escaped, as ``\\x1b``, or as
    JSON has it; names in files are anybody's."""
    if text.isprintable():  # a look at the whole: tables have a hundred thousand lines
        return text
    steering = {character for character in text if unicodedata.category(character) in ("Cc", "Cf", "Cs")}
    escaped = json_.dumps if json else ascii
    return text.translate({ord(character): escaped(character)[1:-1] for character in steering - set("\t\n")})


def tolerate(stream: TextIO) -> None:
    """Make characters that the stream cannot encode come out as ``?`` instead of raising; in UTF-8 these are
    lone surrogates, of names that are none, and come out escaped."""
    reconfigure = getattr(stream, "reconfigure", None)
    if reconfigure is not None:
        utf = (stream.encoding or "").lower().startswith("utf")
        reconfigure(errors="backslashreplace" if utf else "replace")


def shows(text: str) -> bool:
    """Whether stdout can encode it."""
    try:
        text.encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return False
    return True


def error(problem: FlashbenchError) -> None:
    """Print ``error: …`` and, where there is one, ``hint: …`` to stderr."""
    _line("error", units.cut(str(problem), MOST), "31")
    if problem.hint:
        _line("hint", problem.hint, "36")


def warn(text: str) -> None:
    """Print ``warning: …`` to stderr."""
    _line("warning", text, "33")


def note(text: str) -> None:
    """Print ``note: …`` to stderr."""
    _line("note", text, "2")


def listen(*, quiet: bool = False) -> None:
    """Show what lower layers log under ``flashbench`` as warnings on stderr; with ``quiet`` nothing."""
    import logging

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            warn(record.getMessage())

    logger = logging.getLogger("flashbench")
    logger.handlers = [logging.NullHandler() if quiet else Handler()]
    logger.propagate = False


def _line(label: str, text: str, color: str) -> None:
    if sys.stderr is None:  # of a process in which Python runs without a console
        return
    tolerate(sys.stderr)
    if sys.stderr.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb":
        label = f"\x1b[{color}m{label}:\x1b[0m"
    else:
        label += ":"
    print(label, " ".join(printable(text).split()), file=Forgiving(sys.stderr), flush=True)


Tick = Callable[[int, str], None]
"""Tells the progress line how far the work is: how many are done, and what is under way."""


NOTE_EVERY_S = 30.0
"""Seconds between notes of progress off a terminal, at least."""


def _sparse_notes(total: int) -> Tick:
    from flashbench import units

    began = told = time.monotonic()

    def tick(done: int, text: str) -> None:
        nonlocal told
        now = time.monotonic()
        if now - told >= NOTE_EVERY_S:
            told = now
            note(f"{done} of {total} done after {units.format_seconds(now - began)}; next: {text}")

    return tick


def lively() -> bool:
    """Whether stderr is a terminal that lines can be redrawn on; in CI it is none, whatever it says."""
    shown = sys.stderr is not None and sys.stderr.isatty()
    return shown and not os.environ.get("CI") and os.environ.get("TERM") != "dumb"


@contextmanager
def progress(total: int, *, quiet: bool = False) -> Iterator[Tick]:
    """A progress line on stderr, or where it is not lively a note every NOTE_EVERY_S; none with ``quiet``."""
    if quiet or not total:
        yield lambda done, text: None
        return
    if not lively():
        yield _sparse_notes(total)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    bar = Progress(
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.description}", markup=False),
        console=rich_console(sys.stderr),
        transient=True,
        redirect_stdout=False,
    )
    with bar:
        task = bar.add_task("", total=total)
        yield lambda done, text: bar.update(task, completed=done, description=text)
