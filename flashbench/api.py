"""flashbench from Python: what the commands do, with results as values instead of text.

found = flashbench.run(impls=["naive", my_function], seqlens=[512, 1024], heads=4, batch=1)
found.to_pandas()
found.to_html("report.html")
flashbench.compare("base/results.jsonl", found).to_html("comparison.html")
flashbench.io_model("standard,flash-v2", seqlens="1k-64k").to_pandas()
"""

from __future__ import annotations

import functools
import inspect
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ParamSpec, TypeAlias

from flashbench import paths as paths_
from flashbench import units, whatif
from flashbench.errors import SpecError, UsageError
from flashbench.judge import Comparison, Rules
from flashbench.problem import DTYPES
from flashbench.whatif import IoTable

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.judge import Side
    from flashbench.record import Record
    from flashbench.runfile import RunFile

__all__ = ["Judgement", "Modelled", "Results", "compare", "io_model", "run"]

_Given = ParamSpec("_Given")

Asked: TypeAlias = str | Callable[..., Any] | Sequence[str | Callable[..., Any]] | None
"""Implementations: one, or a sequence of them."""

_LEFT_OUT = ("counters", "trace", "cycles", "timings", "dry_run", "json", "csv", "quiet", "verbose", "strict")
"""Options of the command that are about what is shown, or that run other processes."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """What a run measured. records: one per cell, in order; path: its file, None where none was asked for."""

    file: RunFile
    path: Path | None = None

    @property
    def records(self) -> tuple[Record, ...]:
        """One per cell, in order."""
        return self.file.records

    def to_pandas(self) -> DataFrame:
        """The joined table, a row per cell: table.COLUMNS, in SI base units."""
        from flashbench import table

        return table.build([self.file])

    def _repr_html_(self) -> str:
        """What a notebook shows: who is fastest where, and the times as tables."""
        from flashbench._cli.report import results_of
        from flashbench.report import notebook

        return notebook.html(results_of([self.file]))

    def to_html(self, path: str | Path | None = None) -> str:
        """The report as text; also written to the path, if given. Raises UsageError where that fails."""
        from flashbench import report
        from flashbench._cli.report import results_of

        return _kept(report.of(results_of([self.file])), path)


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """One side against another by one measure. ok: whether cells were compared and none got worse by more
    than the rules allow."""

    comparison: Comparison
    sides: tuple[Side, Side] = field(repr=False)

    @property
    def ok(self) -> bool:
        """Whether cells were compared and none fails."""
        return self.comparison.compared and not self.comparison.failing

    def to_pandas(self) -> DataFrame:
        """A row per cell: cell, verdict, reason, base, new (medians), change, and the ratio's interval."""
        import pandas as pd

        rows = []
        for cell in self.comparison.cells:
            ratio = cell.ratio
            rows.append({
                "cell": cell.cell, "verdict": cell.verdict, "reason": cell.reason, "base": cell.base,
                "new": cell.new, "change": cell.change, "fails": cell.fails,
                "ratio_low": ratio.low if ratio else None, "ratio_high": ratio.high if ratio else None,
            })  # fmt: skip
        names = ("cell", "verdict", "reason", "base", "new", "change", "fails", "ratio_low", "ratio_high")
        return pd.DataFrame(rows, columns=list(names))

    def to_html(self, path: str | Path | None = None) -> str:
        """The page of ``compare -o html=…`` as text; also written to the path, if given. Raises UsageError
        where that fails.
        """
        from flashbench._cli import compare_output

        return _kept(compare_output.page(self.comparison, *self.sides), path)


class Modelled(IoTable):
    """Rows of the model, in the order asked for, with the page of ``io-model --html``."""

    def to_html(self, path: str | Path | None = None) -> str:
        """The page as text, over lengths, cards and models of the rows; also written to the path, if given.
        Raises UsageError where that fails.
        """
        from flashbench.report import io_page

        asked = [row.estimate for row in self.rows]
        sizes = tuple(dict.fromkeys(row.sram_bytes for row in self.rows if row.sram_bytes is not None))
        blocks = tuple(dict.fromkeys(row.block for row in self.rows if row.block is not None))
        study = whatif.study(
            list(dict.fromkeys(one.problem for one in asked)),
            list(dict.fromkeys(one.pass_ for one in asked)),
            list(dict.fromkeys(one.model for one in asked)),
            list({row.device.name: row.device for row in self.rows if row.device is not None}.values()),
            sram=sizes if len(sizes) > 1 else (), blocks=blocks if len(blocks) > 1 else (),
            variant=self.variant,
        )  # fmt: skip
        return _kept(io_page.build(study), path)


def _kept(page: str, path: str | Path | None) -> str:
    """The page, also written to the path, if given."""
    if path is not None:
        try:
            paths_.put(path, page)
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise UsageError(
                f"to_html({str(path)!r}): {reason}; accepted: a path that can be written"
            ) from None
    return page


def _modelled(table: Callable[_Given, IoTable]) -> Callable[_Given, Modelled]:
    @functools.wraps(table)
    def io_model(*args: _Given.args, **options: _Given.kwargs) -> Modelled:
        found = table(*args, **options)
        return Modelled(found.rows, found.variant)

    # of what it wraps all but what it returns
    io_model.__annotations__ = {**table.__annotations__, "return": Modelled}
    signature = inspect.signature(table).replace(return_annotation=Modelled)
    io_model.__signature__ = signature  # type: ignore[attr-defined]
    return io_model


io_model = _modelled(whatif.io_table)
"""The model over axes, in one call: ``flashbench.io_table``, whose rows also have a page."""


def run(impls: Asked = None, **options: Any) -> Results:
    """Measure a grid of attention cells, each checked against fp64, as ``flashbench run``; prints nothing.

    impls: names as ``flashbench list implementations`` has them, specs such as ``FILE.py:FUNCTION``, or
    functions of (q, k, v, causal, scale, …) themselves; one or a sequence of them, and these alone are
    measured (the command adds the default ones to ``--impl``). None: the default ones. options: those of the
    command line with underscores, as text, numbers, booleans or sequences: seqlens, head_dims, dtypes (also
    torch's), causal, passes, batch, heads, device, cache, time_budget, in_process, config, …; out: a folder
    to keep results.jsonl in, and resume.

    Cells run in a worker process, as the command's do; where a function itself is among impls, which no other
    process could find, in this one. Returns Results; a cell that is wrong or failed is a row that says so.
    Raises as the command, in the words of the command line: UsageError, SpecError, UnknownName,
    UnavailableError; KeyboardInterrupt once the cells at work are kept.
    """
    from flashbench import environment, runfile, sweep
    from flashbench._cli.measure import sweep as measure
    from flashbench._cli.run import RESULTS, resolve

    for name in options:
        if name in _LEFT_OUT:
            raise SpecError(f"run(): {name} is of the command line; accepted: options of the grid and timing")
    config = None if options.get("config") is None else str(options["config"])
    plain = {name: _plain(value) for name, value in options.items() if value is not None and name != "config"}
    line = sweep.options_of(plain, "run()", sweep.OPTIONS) | _implementations(impls)
    request = resolve({**line, "quiet": True}, config)
    about = environment.collect(request.target)
    with tempfile.TemporaryDirectory() as scratch:
        path = (request.out or Path(scratch)) / RESULTS
        with measure(request, path, about):
            pass
        return Results(file=runfile.load(path), path=path if request.out else None)


def compare(base: Any, new: Any, metric: str = "time_s", **rules: float) -> Judgement:
    """Judge one side against another, cell by cell, as ``flashbench compare``.

    base, new: Results, paths, folders or globs of results files, or sequences of these: runs of one side.
    metric: a row of judge.MEASURES. rules: fields of judge.Rules, such as warn and fail, shares. Raises
    UsageError and RunFileError for files, UnknownName for a metric.
    """
    from flashbench.errors import UnknownName
    from flashbench.judge import MEASURES
    from flashbench.judge import compare as judge

    if metric not in MEASURES:
        raise UnknownName("metric", metric, MEASURES)
    known = Rules.__dataclass_fields__
    for name in rules:
        if name not in known:
            raise SpecError(f"compare(): {name!r} is not known; accepted: {', '.join(known)}")
    allowed: Any = rules.get("allowed", frozenset())
    sides = _side(base, "base", allowed), _side(new, "new", allowed)
    comparison = judge(*sides, MEASURES[metric], Rules(**rules))  # type: ignore[arg-type]
    return Judgement(comparison=comparison, sides=sides)


def _side(given: Any, label: str, allowed: Any) -> Any:
    from flashbench.judge import load_side

    several = given if isinstance(given, Sequence) and not isinstance(given, str) else [given]
    with tempfile.TemporaryDirectory() as scratch:
        paths = []
        for number, one in enumerate(several):
            if isinstance(one, Results):
                one = one.path or _written(one, Path(scratch) / f"{number}.jsonl")
            paths.append(str(one))
        side = load_side(",".join(paths), label, allowed)
        lost = [replace(run, path=Path("not kept")) if Path(scratch) in run.path.parents else run
                for run in side.runs]  # fmt: skip
        return replace(side, runs=tuple(lost))


def _written(results: Results, path: Path) -> Path:
    """The file of results that were not kept, once more."""
    from flashbench import runfile

    with runfile.create(path, results.file.header) as writer:
        for record in results.records:
            writer.append(record)
    return path


def _plain(value: Any) -> Any:
    """As a config file would hold it."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [_plain(one) for one in value]
    if (type(value).__module__, type(value).__name__) == ("torch", "device"):
        return str(value)
    module, _, name = str(value).partition(".")
    if module == "torch" and type(value).__name__ == "dtype":
        return next((row.name for row in DTYPES.values() if row.torch_name == name), str(value))
    return value


def _items(impls: str | Callable[..., Any] | Iterable[Any]) -> list[Any]:
    """One or several as a list. Raises SpecError where there is none."""
    accepted = "accepted: names, specs and functions"
    if callable(impls):
        return [impls]
    if not isinstance(impls, Iterable):
        raise SpecError(f"run(): impls is {units.quoted(impls)}; {accepted}, or a sequence of them")
    found = [part.strip() for part in impls.split(",")] if isinstance(impls, str) else list(impls)
    if found in ([], [""]):
        raise SpecError(f"run(): impls is empty; {accepted}, or None for the default")
    return found


def _implementations(impls: Asked) -> dict[str, str | bool]:
    """impls and impl of the command line; functions are known by their module and name from here on."""
    if impls is None:
        return {}
    from flashbench.kernels import _own
    from flashbench.sweep import NONE

    names, own = list[str](), list[str]()
    for item in _items(impls):
        if not (isinstance(item, str) or callable(item)):
            raise SpecError(f"run(): impls has {item!r}; accepted: names, specs and functions")
        name = item if isinstance(item, str) else _own.known(item, beside=own)
        (own if ":" in name else names).append(name)
    return {"impls": ",".join(names) or NONE, **({"impl": ",".join(own)} if own else {})}
