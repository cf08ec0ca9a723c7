"""``flashbench profile --known``: kernels of known traffic under the counters, and what the L2 keeps."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench import paths
from flashbench._cli.profile_counters import RAW
from flashbench.errors import UnavailableError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.counting import Counters
    from flashbench.kernels import Target

FILE = "known.json"


def show(target: Target, out: Path, *, json: bool, csv: bool, quiet: bool) -> None:
    """Count them, keep them in a file, print expected beside counted.

    Raises UnavailableError where nothing can be counted here.
    """
    from flashbench import console, counting, environment
    from flashbench.console import Column
    from flashbench.counting import known

    if reason := counting.why_unavailable(target):
        raise UnavailableError(f"no counters: {reason}")
    jobs = known.jobs(target)
    found: list[Counters] = [{}] * len(jobs)

    def keep(index: int, counters: Counters) -> None:
        found[index] = counters

    counting.count_jobs(jobs, target, folder=out / RAW, on_count=keep)
    rows = known.rows(jobs, found)
    about = environment.row_fields(environment.collect(target))
    document = {"type": "known", "schema": 1, "environment": about, "l2_bytes": target.l2_bytes, "rows": rows}
    import json as json_

    paths.put(out / FILE, json_.dumps(document, indent=1) + "\n")
    columns = [*_columns(), Column(name="clocks", header="clocks")] if json else _columns()
    console.show_table(columns, rows, json=json, csv=csv, title="Known traffic, expected and counted")
    if not quiet:
        console.note(f"results: {out / FILE}")
    if all(row["reason"] for row in rows):
        raise UnavailableError(f"nothing was counted: {rows[0]['reason']}")


def _columns() -> list[Column]:
    from flashbench import units
    from flashbench.console import Column

    def size(name: str, header: str) -> Column:
        return Column(name=name, header=header, format=units.format_bytes, justify="right")

    def share(value: Any) -> str:
        return f"{value:.3f}"

    return [
        Column(name="kernel", header="kernel"), size("size_bytes", "set"),
        size("expected_read_bytes", "reads, expected"), size("counted_read_bytes", "counted"),
        size("expected_write_bytes", "writes, expected"), size("counted_write_bytes", "counted"),
        size("dram_read_bytes", "DRAM read"), size("dram_write_bytes", "DRAM write"),
        Column(name="hit", header="found in L2", format=share, justify="right"),
        Column(name="reason", header="why not"),
    ]  # fmt: skip
