"""``flashbench decode --check --pairs``: a covering array of decodes, checked against fp64."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench._cli import interrupt, options
from flashbench.errors import GateError, UnavailableError, UsageError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.covering import Array
    from flashbench.decode_cases import Case
    from flashbench.kernels import Target

TAKES = ("dtype", "device", "seed", "out", "check", "json", "csv", "quiet")
"""Options of ``decode`` that mean something here."""

TENSORS = ("o", "lse", "cache")
BAD = ("wrong", "failed")
NAME = "flash-decode"


def show(given: Mapping[str, Any]) -> None:
    """Check the array on the device of the line and print the worst errors. given: the options of the line.

    Raises UsageError, SpecError, UnavailableError, GateError where anything is wrong.
    """
    _refuse_others(given)
    as_json, as_csv, quiet = (bool(given[name]) for name in ("json", "csv", "quiet"))
    options.one_format(as_json, as_csv)
    path = options.out_file(given["out"]) if "out" in given else None
    from flashbench import console, decode_cases, decoding, kernels, sweep, units

    names = units.parse_names(given.get("dtype", ",".join(decode_cases.QUERY_DTYPES)), "--dtype",
                              decode_cases.QUERY_DTYPES)  # fmt: skip
    typed = sweep.parse({name: given[name] for name in ("device", "seed") if name in given}, options.on_line,
                        kernels.registry())  # fmt: skip
    target, seed = _target(typed.get("device")), typed.get("seed", 0)
    found = decode_cases.array(
        lambda case: decoding.why_not(case, target) is None, decode_cases.SCALES[target.type], names
    )
    if not found.problems:
        raise UsageError(f"--dtype: {NAME} takes none of {', '.join(names)} here; accepted: another --dtype")
    console.listen(quiet=quiet)
    if not quiet:
        console.note(f"{NAME}: {found.words}")
        console.note(f"checking {len(found.problems)} cells on {target.name}")
    rows: list[dict[str, Any]] = []
    with interrupt.interruptible() as stop:
        _check(found, target, seed, rows, quiet=quiet)
    _end(rows, found, target, path, seed)
    _print(rows, as_json=as_json, as_csv=as_csv)
    if stop():
        bad = sum(row["status"] in BAD for row in rows)
        raise interrupt.interrupted(
            f"{len(rows)} of {len(found.problems)} cells were checked, {bad} are wrong or failed"
        )
    if not quiet and path is not None:
        console.note(f"results: {path}")
    _verdict(rows)


def _refuse_others(given: Mapping[str, Any]) -> None:
    """Raise UsageError for an option that has no meaning here, and without --check."""
    for name, value in given.items():
        if name not in TAKES and name != "pairs" and value is not False:
            accepted = ", ".join(options.on_line(one) for one in TAKES)
            raise UsageError(f"{options.on_line(name)}: has no meaning with --pairs; accepted: {accepted}")
    if not given["check"]:
        raise UsageError("--pairs: is of --check, nothing is timed; accepted: --check beside it")


def _target(device: str | None) -> Target:
    from flashbench import environment, kernels

    target = environment.target(device)
    options.settle([NAME], target)
    environment.need_torch()
    if reason := kernels.get(NAME).why_unavailable(target):
        raise UnavailableError(f"{NAME}: {reason}")
    return target


def _check(found: Array[Case], target: Target, seed: int, rows: list[dict[str, Any]], *, quiet: bool) -> None:
    """Check case after case; each row is in rows before the next begins."""
    from flashbench import console, decoding

    with console.progress(len(found.problems), quiet=quiet) as tick:
        for done, case in enumerate(found.problems):
            tick(done, case.key)
            rows.append(decoding.check_case(case, target, seed))


def _end(
    rows: list[dict[str, Any]], found: Array[Case], target: Target, path: Path | None, seed: int
) -> None:
    """Write the file of --out."""
    if path is None:
        return
    from flashbench import console, decoding

    covered = sorted(" + ".join(sorted(one)) for one in found.covered)
    covers = {"points": found.points, "covered": covered, "seed": seed}
    value = console.raw_value(decoding.document(rows, target, None, **covers))
    head, _, _ = json.dumps({**value, "rows": []}).rpartition("[]")
    lines = ",\n".join(map(json.dumps, value["rows"]))  # a line for each, so that changes can be seen
    options.write_out(path, f"{head}[\n{lines}\n]}}\n")


def _print(rows: Sequence[Mapping[str, Any]], *, as_json: bool, as_csv: bool) -> None:
    from flashbench import console
    from flashbench._cli import worst
    from flashbench.console import Column

    if as_json or as_csv:
        flat = [_raw(row) for row in rows]
        columns = [Column(name=name, header=name) for name in _names(flat)]
        console.show_table(columns, flat, json=as_json, csv=as_csv)
        return
    compared = [
        worst.Checked(
            implementation=NAME, dtype=row["dtype"], at=row["case"], max_abs_error=row["max_abs_error"],
            budget=row["budget"],
        )
        for row in rows if "budget" in row
    ]  # fmt: skip
    console.show_table(worst.columns(), worst.by_tensor(compared, TENSORS), title=worst.TITLE)
    bad = [row for row in rows if row["status"] in BAD]
    if bad:
        console.show_table(_failure_columns(), bad, title="wrong or failed")


def _raw(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with a column for each tensor's error and budget."""
    flat = {name: value for name, value in row.items() if name not in ("max_abs_error", "budget")}
    for tensor in TENSORS:
        for name in ("max_abs_error", "budget"):
            flat[f"{name}_{tensor}"] = row.get(name, {}).get(tensor)
    return flat


def _names(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Every column in its order; a row that failed lacks some."""
    return list(dict.fromkeys(name for row in sorted(rows, key=len, reverse=True) for name in row))


def _failure_columns() -> list[Column]:
    from flashbench.console import Column

    return [
        Column(name="case", header="case"),
        Column(name="status", header="status"),
        Column(name="reason", header="reason"),
    ]


def _verdict(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise GateError where anything is wrong or failed."""
    bad = [row for row in rows if row["status"] in BAD]
    if bad:
        raise GateError(
            f"{len(bad)} of {len(rows)} cells are wrong or failed; the first: {bad[0]['case']}:"
            f" {bad[0]['reason']}"
        )
