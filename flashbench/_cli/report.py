"""``flashbench report``: results files in, one self-contained HTML page out."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flashbench import paths
from flashbench._cli import options
from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench.report.data import Results
    from flashbench.runfile import RunFile

_QUIET = typer.Option("--quiet", "-q", help="No notes.")
_FILES = typer.Argument(
    help="Results of 'flashbench run' (or 'block', 'ring', 'decode --out'), or folders with them; several"
    " overlay."
)
_CLAIMS = typer.Option(metavar="DIR", help="Hold the literature's claims to the results below this folder.")


def report(
    files: Annotated[list[str], _FILES],
    output: Annotated[
        str | None,
        typer.Option(
            "--output", "-o", metavar="FILE", help="The page. Default: report.html beside the first file."
        ),
    ] = None,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Print GitHub's Markdown instead, for a README or a PR.")
    ] = False,
    terminal: Annotated[
        bool, typer.Option("--terminal", help="Draw plots in the terminal instead (package plotext).")
    ] = False,
    figures: Annotated[
        str | None,
        typer.Option("--figures", help="Write each figure of each selection alone instead.", metavar="DIR"),
    ] = None,
    format_: Annotated[
        str,
        typer.Option(
            "--format",
            metavar="NAMES",
            help="Of --figures, beside JSON and CSV of each: svg, png, pdf (package kaleido and a Chromium).",
        ),
    ] = "",
    figure: Annotated[
        list[str] | None,
        typer.Option("--figure", metavar="NAME", help="Of --figures, this section alone; may be repeated."),
    ] = None,
    style: Annotated[str, typer.Option(help="Of --figures: paper or slide.", metavar="NAME")] = "paper",
    timeline: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Kernels of these cells: 'profile --timeline --json' in a file."),
    ] = None,
    ceilings: Annotated[
        list[str] | None,
        typer.Option(metavar="FILE", help="Roofs as 'calibrate' measured them, for cards of that name."),
    ] = None,
    claims: Annotated[str | None, _CLAIMS] = None,
    quiet: Annotated[bool, _QUIET] = False,
) -> None:
    """Build the HTML report of one or more results files. Needs neither GPU nor torch."""
    from flashbench import console, runfile, units

    _refuse(output, markdown, terminal, figures, extra=bool(format_ or figure or style != "paper"))
    page = _page(output, files := _files(files), [*(timeline or ()), *(ceilings or ())])
    loaded = [runfile.load(name, documents=True) for name in files]
    results = results_of(loaded, timeline or (), ceilings or (), claims)
    for text in () if quiet else (text for file in loaded for text in file.notes):
        console.note(text)
    if markdown or terminal or figures:
        _show(results, markdown=markdown, figures=figures, formats=format_, names=figure or [], style=style)
        return
    page = page or Path(files[0]).with_name("report.html")
    options.spare(page, f"--output {units.quoted(page, 400)}")
    write(results, page)
    console.show_text(str(page))


def _refuse(output: str | None, markdown: bool, terminal: bool, figures: str | None, *, extra: bool) -> None:
    given = [
        name
        for name, value in (
            ("--output", output is not None), ("--markdown", markdown), ("--terminal", terminal),
            ("--figures", figures is not None),
        )
        if value
    ]  # fmt: skip
    if figures is not None:
        options.path(figures, "--figures", "the path of a folder")
    if len(given) > 1:
        raise UsageError(f"{' and '.join(given)} exclude each other; accepted: one of them")
    if extra and figures is None:
        raise UsageError("--format, --figure and --style are of --figures; accepted: --figures DIR with them")


def _files(texts: Sequence[str]) -> list[str]:
    """Files as they are, and of folders the results in them, as ``compare`` takes them. Raises UsageError."""
    from flashbench.judge import sides

    for text in texts:
        options.path(text, "FILE", "results files, or folders with them")
    given = [(text, Path(text)) for text in texts]
    return [
        str(one)
        for text, path in given
        for one in (sides.in_folder(path, "FILE") if path.is_dir() else [text])
    ]


def _page(output: str | None, files: Sequence[str], others: Sequence[str]) -> Path | None:
    """Where --output says. others: files that are read beside the results. Raises UsageError for a folder, a
    results file, a file that is read and a file given twice."""
    from flashbench import units

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
        seen.add(path)
    if page is not None:
        options.spare(page, f"--output {units.quoted(output, 400)}", [*files, *others])
    return page


def _show(
    results: Results,
    *,
    markdown: bool,
    figures: str | None,
    formats: str,
    names: list[str],
    style: str,
) -> None:
    """What is no page. Raises UsageError, UnavailableError."""
    from flashbench import console
    from flashbench.report import export, text

    if figures is not None:
        wanted = [name.strip() for name in formats.split(",") if name.strip()]
        for path in export.write(results, Path(figures), formats=wanted, names=names, style=style):
            console.show_text(str(path))
    elif markdown:
        console.show_lines(text.markdown(results))
    else:
        import shutil

        console.show_lines(text.terminal(results, width=shutil.get_terminal_size().columns))


def results_of(
    files: Sequence[RunFile],
    timelines: Sequence[str] = (),
    ceilings: Sequence[str] = (),
    claims: str | None = None,
) -> Results:
    """What the sections of a report are made from. timelines, ceilings: paths of files beside the results;
    claims: a folder of results that the literature's are held to, in place of the files.

    Raises RunFileError for a path that is not such a file, UsageError for what is no folder.
    """
    from flashbench import ceilings as ceilings_
    from flashbench import claims as claims_
    from flashbench import table
    from flashbench.report import timelines as timelines_
    from flashbench.report.data import Results

    return Results(
        table=table.build(files), headers=table.headers(files), numerics=table.numerics(files),
        blocks=table.blocks(files), ring=table.ring(files), decode=table.decode(files),
        ceilings=table.ceilings(files, list(map(ceilings_.load, ceilings))),
        timelines={key: one for path in timelines for key, one in timelines_.load(path).items()},
        claims=() if claims is None else claims_.judge(claims_.load(), options.folder(claims, "--claims")),
    )  # fmt: skip


def write_page(files: Sequence[RunFile], page: Path) -> None:
    """Write the report of the files, into the folder of --out. Raises UsageError where that fails."""
    write(results_of(files), page, "--out")


def write(results: Results, page: Path, option: str = "--output") -> None:
    """Write the report of the results. option: what named the page. Raises UsageError where the page cannot
    be written.
    """
    from flashbench import report as report_

    try:
        paths.put(page, report_.of(results))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error)
        raise UsageError(f"{option} {str(page)!r}: {reason}; accepted: a path that can be written") from None
