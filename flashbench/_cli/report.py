"""``flashbench report``: results files in, one self-contained HTML page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench.runfile import RunFile

_QUIET = typer.Option("--quiet", "-q", help="No notes.")


def report(
    files: Annotated[
        list[str], typer.Argument(help="Results files (results.jsonl) of 'flashbench run'; several overlay.")
    ],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The page. Default: report.html beside the first file."
        ),
    ] = None,
    quiet: Annotated[bool, _QUIET] = False,
) -> None:
    """Build the HTML report of one or more results files. Needs neither GPU nor torch."""
    from flashbench import console, runfile, units

    page = Path(output) if output else None
    if output is not None and (page is None or page.is_dir()):
        raise UsageError(
            f"--output {units.quoted(output, 400)}: a folder; accepted: the path of an HTML file"
        )
    seen: set[Path] = set()
    for name in files:
        path = Path(name).absolute()
        if path in seen:
            raise UsageError(f"FILE {units.quoted(name, 400)}: given twice; accepted: every file once")
        if page is not None and path == page.absolute():
            raise UsageError(
                f"--output {units.quoted(output, 400)}: is a results file; accepted: another path"
            )
        seen.add(path)
    loaded = [runfile.load(name) for name in files]
    if not quiet:
        for file in loaded:
            for text in file.notes:
                console.note(text)
    page = page or Path(files[0]).with_name("report.html")
    write_page(loaded, page)
    console.show_text(str(page))


def write_page(files: Sequence[RunFile], page: Path) -> None:
    """Write the report of the files. Raises UsageError where the page cannot be written."""
    from flashbench import report as report_
    from flashbench import table

    more = table.numerics(files), table.blocks(files)
    text = report_.build(table.build(files), table.headers(files), *more)
    try:
        page.write_text(text, encoding="utf-8", newline="\n")
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"--output {str(page)!r}: {reason}; accepted: a path that can be written") from None
