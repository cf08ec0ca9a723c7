"""``flashbench verify``: whether results files are as they were written."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from flashbench._cli import options
from flashbench.errors import RunFileError

if TYPE_CHECKING:
    from flashbench.runfile import Verdict

MOST = 20
"""Damaged lines that are shown of each file."""


def verify(
    files: Annotated[list[str], typer.Argument(help="Results files (results.jsonl).")],
    json: options.Json = False,
    quiet: options.Quiet = False,
) -> None:
    """Find lines of results files that were edited or damaged since they were written, by their checksums.

    Exits 0 where every whole line is as it was written, 4 otherwise. A last line that a kill tore off is no
    damage. Needs neither GPU nor torch.
    """
    from flashbench import console, runfile

    found = [runfile.verify(options.path(name, "FILE", "results files")) for name in files]
    if json:
        console.show_json([_row(verdict) for verdict in found])
    elif not quiet:
        console.show_lines(line for verdict in found for line in _lines(verdict))
    if bad := [verdict for verdict in found if not verdict.ok]:
        number, what = bad[0].damage[0]
        said = f"{len(bad)} of {len(found)} files are damaged, first: {bad[0].path}, line {number}: {what}"
        raise RunFileError(said, hint=_hint(bad[0], what))


def _hint(verdict: Verdict, what: str) -> str:
    """What to do about a file whose first damage that is."""
    if "CRLF" in what or "byte order mark" in what:
        return "make it UTF-8 with LF line endings and no byte order mark again, as it was written"
    if verdict.schema is None:
        return "without its header it is no results file: take a copy that is whole, or measure anew"
    if verdict.others:
        return f"measure anew: no run goes on with rows of {next(iter(verdict.others))}"
    return "'flashbench run --resume' measures the cells of such lines again, and keeps a copy of the file"


def _row(verdict: Verdict) -> dict[str, object]:
    return {
        "file": str(verdict.path), "ok": verdict.ok, "schema": verdict.schema, "rows": verdict.rows,
        "other_rows": dict(verdict.others),
        "missing": verdict.missing, "unsealed_lines": verdict.unsealed, "torn": verdict.torn,
        "damaged": verdict.damaged,
        "damage": [{"line": number, "what": what} for number, what in verdict.damage],
    }  # fmt: skip


def _lines(verdict: Verdict) -> list[str]:
    from flashbench import units

    notes = [f"{units.many(count, 'row')} of {command}" for command, count in verdict.others.items()]
    if verdict.rows or not notes:
        notes.insert(0, units.many(verdict.rows, "row"))
    if verdict.missing:
        notes.append(f"{verdict.missing} planned cells have none")
    if verdict.unsealed:
        notes.append(f"{verdict.unsealed} lines are from before there were checksums")
    if verdict.torn:
        notes.append("the last line was torn off and is ignored")
    said = "as written" if verdict.ok else f"{verdict.damaged} damaged lines"
    shown = [f"  line {number}: {what}" for number, what in verdict.damage[:MOST]]
    if verdict.damaged > MOST:
        shown.append(f"  {verdict.damaged - MOST} more")
    return [f"{verdict.path}: {said}; {', '.join(notes)}", *shown]
