"""``flashbench claims``: the literature's claims beside what was measured."""

from __future__ import annotations

from typing import Annotated

import typer

from flashbench._cli import options

DEFAULT = "reports/h100-sxm"
"""As in a clone; elsewhere nothing is measured."""


def claims(
    file: Annotated[
        str | None,
        typer.Argument(help="Claims in TOML. Default: those that come along, configs/claims.toml."),
    ] = None,
    results: Annotated[
        str | None,
        typer.Option(
            "--results",
            metavar="DIR",
            help="Folder of results files that the claims name. Default: reports/h100-sxm, if it is there.",
        ),
    ] = None,
    measured: Annotated[
        bool,
        typer.Option(
            "--measured", help="Only claims that cells of a card tell: no data sheets, no training runs."
        ),
    ] = False,
    markdown: Annotated[bool, typer.Option("--markdown", help="A Markdown table.")] = False,
    json: options.Json = False,
) -> None:
    """Hold the literature's claims to results files: what is seen, with its spread, and whether they hold.

    Each verdict is computed from the files; a claim without any names those that are missing and the command
    that makes them. Needs neither GPU nor torch.
    """
    from flashbench import claims as claiming
    from flashbench import console
    from flashbench.errors import UsageError

    if json and markdown:
        raise UsageError("--json and --markdown exclude each other; accepted: one of them")
    folder = DEFAULT if results is None else options.folder(results, "--results")
    judged = claiming.judge(claiming.load(file), folder)
    judged = [one for one in judged if one.of_a_card or not measured]
    if json:
        console.show_json([one.row() for one in judged])
    elif markdown:
        console.show_text(claiming.markdown(judged))
    else:
        console.show_lines(
            line for one in judged for line in (f"{one.verdict}: {one.claim.says}", f"    {one.shown}")
        )
