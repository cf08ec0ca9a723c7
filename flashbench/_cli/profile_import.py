"""``flashbench profile --import FILE``: the kernels of a CSV file that Nsight Compute wrote elsewhere."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench import paths
from flashbench.errors import RunFileError, UsageError

if TYPE_CHECKING:
    from flashbench.console import Column

SHOWN = ("time_s", "dram_read_bytes", "dram_write_bytes", "l2_read_bytes", "l2_write_bytes",
         "l2_atomic_bytes")  # fmt: skip


def show(path: str, *, json: bool, csv: bool, quiet: bool) -> None:
    """Print each kernel's counters, in bytes and seconds. Raises UsageError, RunFileError."""
    from flashbench import console, units
    from flashbench._profilers import counters, ncu_csv

    if not path:
        raise UsageError("--import '': no name; accepted: a CSV file that 'ncu --csv' wrote")
    found = ncu_csv.read(_read(Path(path)), source=f"--import {path!r}", only=counters.READ)
    counted = counters.count(found.kernels)
    if found.dropped and not quiet:
        console.note(
            f"left out, as no whole rows (cut off?): {units.many(found.dropped, 'line')} below the header"
        )
    if found.unread and not quiet:
        console.note(f"without a number: {_named(found.unread)}")
    if found.twice and not quiet:
        console.note(f"given more than once for a kernel: {', '.join(found.twice)}; the last one counts")
    if not counted:
        raise RunFileError(f"--import {path!r}: the profiler saw no kernel; accepted: a CSV with kernels")
    if not any(value is not None for row in counted for value in row.counters.values()):
        raise RunFileError(
            f"--import {path!r}: {units.many(len(counted), 'kernel')}, but {_nothing(found.unread)}",
            hint="print the whole report by 'ncu --import REP --page raw --csv' (the default page has other"
            f" names), or profile with --metrics {','.join(counters.metrics(detail=False))}",
        )
    everything = json or csv
    names = [c.name for c in counters.COUNTERS if c.name in counted[0].counters]
    rows: list[dict[str, Any]] = [
        {"kernel": row.kernel, "grid": row.grid, "block": row.block, **row.counters} for row in counted
    ]
    shown = names if everything else [name for name in names if name in SHOWN]
    console.show_table(_columns(shown, everything), rows, json=json, csv=csv)
    if not quiet:
        console.note(f"{units.many(len(rows), 'kernel')}; times are the profiler's, no benchmark")


def _named(unread: Mapping[str, Sequence[str]]) -> str:
    return ", ".join(f"{name} ({', '.join(map(repr, texts))})" for name, texts in unread.items())


def _nothing(unread: Mapping[str, Sequence[str]]) -> str:
    """Why no counter has a value."""
    if not unread:
        return "none of the metrics that flashbench reads"
    return f"no counter can be made of what is no number: {_named(unread)}"


def _read(path: Path) -> str:
    try:
        data = paths.whole(path)
    except OSError as error:
        what = "is a folder" if path.is_dir() else error.strerror or str(error)
        raise UsageError(
            f"--import {str(path)!r}: {what}; accepted: a CSV file that 'ncu --csv' wrote"
        ) from None
    wide = data.startswith((b"\xff\xfe", b"\xfe\xff"))  # what a shell of Windows redirects into a file
    return data.decode("utf-16" if wide else "utf-8", errors="replace")


def _columns(names: list[str], everything: bool) -> list[Column]:
    from flashbench import units
    from flashbench._profilers.counters import BY_NAME
    from flashbench.console import Column

    formats = {"B": units.format_bytes, "s": units.format_seconds}
    identity = [Column(name="kernel", header="kernel", format=lambda name: str(name)[:60])]
    if everything:
        identity += [Column(name="grid", header="grid"), Column(name="block", header="block")]
    return identity + [
        Column(
            name=name,
            header=name.removesuffix("_bytes").removesuffix("_s").replace("_", " "),
            format=formats.get(BY_NAME[name].unit, str),
            justify="right",
        )
        for name in names
    ]
