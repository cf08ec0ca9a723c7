"""What ``flashbench tune`` prints: the winners beside the table, and with --dry-run the candidates."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashbench.errors import UnavailableError

if TYPE_CHECKING:
    from flashbench._cli.tune import Request
    from flashbench.console import Column


def found(document: Mapping[str, Any], *, json: bool, csv: bool) -> None:
    """A row per case; notes count what was dropped, and warn of what was wrong."""
    from flashbench import console, tuning, units
    from flashbench.console import Column

    rows = tuning.outcome(document)
    if json:
        console.show_json(rows)
    else:
        columns = [
            Column(name="case", header="case"),
            _right("time_s", "fastest", units.format_seconds),
            _right("table_s", "table", units.format_seconds), _right("gain", "gain", "{:.3f}×".format),
            Column(name="config", header="configuration", format=pairs),
            Column(name="table", header="the table's", format=pairs),
            *(_right(name, name, str) for name in ("timed", "wrong", "dropped", "waiting")),
            Column(name="reason", header="why not"),
        ]  # fmt: skip
        flat = [row | {name: pairs(row[name]) for name in ("config", "table") if row[name]} for row in rows]
        title = f"tuned on {document['key']['gpu']}, Triton {document['key']['triton']}"
        console.show_table(columns, flat if csv else rows, csv=csv, title=title)
    wrong = [trial for case in document["cases"] for trial in case["trials"] if trial["status"] == "wrong"]
    if wrong:
        first = f"{wrong[0]['kernel']} {pairs(wrong[0]['config'])}: {wrong[0]['reason']}"
        console.warn(
            f"{len(wrong)} configurations are wrong or do not run, and were not timed; first: {first}"
        )


def candidates(request: Request, *, json: bool, csv: bool, quiet: bool) -> None:
    """Compile the candidates of every case and print a row for each.

    Raises UnavailableError where no case has any.
    """
    from flashbench import console, tuning
    from flashbench._cli.interrupt import interrupted, interruptible

    budget = request.options.budget_s
    deadline = math.inf if budget is None else time.monotonic() + budget
    with interruptible() as stop, console.progress(1, quiet=quiet) as tick:
        every = tuning.candidates(
            request.cases, request.target, request.options, deadline,
            lambda done, total, text: tick(0, f"{text}: {done} of {total}"),
        )  # fmt: skip
    if stop():
        raise interrupted("not all candidates were compiled")
    rows = [
        {"case": tried.case.name, **trial.to_json()}
        for tried in every
        for trials in tried.of.values()
        for trial in trials
    ]
    for row in rows:
        row["status"] = "candidate" if row["status"] == "waiting" and not row["reason"] else row["status"]
        row["own"] = "own" if row["own"] else None
        row["config"] = row["config"] if json else pairs(row["config"])
        del row["time_s"]
    refused = [f"{one.case.name}: {one.case.why_not(request.target)}" for one in every if not one.of]
    notes = [*refused, f"{len(rows)} candidates of {len(every)} cases, compiled for {request.target.name};"
             " nothing was run"]  # fmt: skip
    console.show_table(
        _candidate_columns(), rows, json=json, csv=csv, title=f"candidates on {request.target.name}",
        notes=() if quiet else notes,
    )  # fmt: skip
    if every and len(refused) == len(every):
        raise UnavailableError(f"nothing could be tuned: {refused[0]}")


def _candidate_columns() -> Sequence[Column]:
    from flashbench.console import Column

    return [
        Column(name="case", header="case"), Column(name="kernel", header="kernel"),
        Column(name="config", header="configuration"), Column(name="own", header="table's"),
        _right("registers", "registers", str), _right("spills", "spills", str),
        _right("shared_bytes", "shared bytes", str), Column(name="status", header="status"),
        Column(name="reason", header="why not"),
    ]  # fmt: skip


def pairs(config: Mapping[str, Any]) -> str:
    """A configuration in a line, names without what all of a kernel's share: ``fwd 128,64,8,3``."""
    kernels: dict[str, list[str]] = {}
    for name, value in config.items():
        kernels.setdefault(name.partition("_")[0], []).append(str(int(value)))
    return " ".join(f"{kernel} {','.join(values)}" for kernel, values in kernels.items())


def _right(name: str, header: str, format: Any) -> Column:
    from flashbench.console import Column

    return Column(name=name, header=header, format=format, justify="right")
