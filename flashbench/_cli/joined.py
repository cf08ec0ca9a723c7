"""Model, trace and counters of cells that ran: traced after they were counted, shown in one table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.devices import Device
    from flashbench.kernels import Target
    from flashbench.record import Record
    from flashbench.runfile import Writer

RAN = frozenset({"ok", "checked", "profiled"})
"""Statuses of cells whose kernels ran, with the tiles that their rows name."""


def trace(records: Sequence[Record], writer: Writer, *, limit: int, seed: int, quiet: bool) -> None:
    """Trace those that ran and have no trace yet, each in a process of its own, and attach what is found.

    limit: tile visits at most. A cell that is not traced gets the reason, and its row stays as it is.
    """
    from flashbench import console
    from flashbench.tracing.apart import trace_apart

    asked = [one for one in records if one.status in RAN and "total" not in (one.trace or {})]
    with console.progress(len(asked), quiet=quiet) as tick:
        for index, record in enumerate(asked):
            tick(index, record.cell.key)
            found = trace_apart(record.cell, record.config, limit=limit, seed=seed)
            writer.attach(record.cell.key, "trace", found)


def show(
    records: Sequence[Record], target: Target, *, kernels: bool = False, detail: bool = False,
    json: bool = False, csv: bool = False,
) -> None:  # fmt: skip
    """Print a row per cell and level, if any; kernels: one per kernel too. JSON, CSV: everything.

    kernels, detail: what else was counted in a table of its own, in JSON and CSV as rows of a level more.
    """
    from flashbench import console, devices
    from flashbench._cli import hardware

    device = devices.match(target.name, sms=None, memory_bytes=target.total_bytes)
    whole = json or csv
    table = rows(records, device, kernels=kernels or whole)
    if not table and not whole:
        return
    traced = any(row["traced"] is not None for row in table)
    counted = any(row["counted"] is not None for row in table)
    measured = [name for name, there in (("traced", traced), ("counted", counted)) if there]
    columns = _columns(kernels=kernels or whole, traced=traced or whole, whole=whole)
    beside = hardware.rows(records) if kernels or detail else []
    more = hardware.columns(beside, whole=whole) if beside else []
    console.show_table(
        [*columns, *more] if whole else columns, [*table, *beside] if whole else table, json=json, csv=csv,
        title=f"Bytes predicted beside {' and '.join(measured)} (each kernel from a cold L2)",
    )  # fmt: skip
    if more and not whole:
        named = [column for column in _columns(kernels=True, traced=False, whole=False)
                 if column.name in ("cell", "kernel")]  # fmt: skip
        console.show_table([*named, *more], beside, title="What else was counted")


def rows(records: Sequence[Record], device: Device | None, *, kernels: bool) -> list[dict[str, Any]]:
    """Model, trace and counters, a row per cell and level; kernels: also one per kernel and level."""
    from flashbench import compared

    found: list[dict[str, Any]] = []
    for record in records:
        identity = {
            "cell": record.cell.key, "model": record.io_model,
            "traced_share": (record.trace or {}).get("traced_share"),
            "not_traced": compared.why_not_traced(record.trace),
            "not_counted": record.counters.get("reason"),
        }  # fmt: skip
        levels = compared.compare(
            record.cell, record.counters, record.io_model, record.config, device, record.trace
        )
        found += [{**identity, **level.row()} for level in levels if kernels or not level.kernel]
    return found


def _columns(*, kernels: bool, traced: bool, whole: bool) -> list[Column]:
    from flashbench import units
    from flashbench.console import Column

    def size(name: str, header: str) -> Column:
        return Column(name=name, header=header, format=units.format_bytes, justify="right")

    kernel = Column(name="kernel", header="kernel", format=lambda name: str(name)[:48] or "all")
    trace = [
        size("traced", "traced"),
        Column(
            name="difference", header="traced-predicted (B)", format=lambda x: f"{x:+,}" if x else "0",
            justify="right",
        ),
    ]  # fmt: skip
    rest = [Column(name=name, header=name) for name in ("traced_share", "not_traced", "not_counted")]
    return [
        Column(name="cell", header="cell"), Column(name="model", header="model"),
        *([kernel] if kernels else []),
        Column(name="level", header="level"),
        size("low", "least"), size("value", "predicted"), size("high", "most"),
        *(trace if traced else []),
        size("counted", "counted"),
        Column(name="ratio", header="counted/predicted", format=lambda x: f"{x:.3f}", justify="right"),
        Column(name="within", header="in band", format=lambda x: "yes" if x else "NO"),
        *(rest if whole else []),
    ]  # fmt: skip


def notes(records: Sequence[Record], target: Target) -> list[str]:
    """How many cells were counted and traced, how many of them not as modelled, and why not all."""
    from flashbench import compared, devices, units

    device = devices.match(target.name, sms=None, memory_bytes=target.total_bytes)
    missed = {
        row["cell"] for row in rows(records, device, kernels=False)
        if row["level"].startswith("DRAM") and row["within"] is False
    }  # fmt: skip
    texts = []
    if counted := sum("total" in record.counters for record in records):
        texts.append(f"{units.many(counted, 'cell')} counted, {len(missed)} outside the model's band at DRAM")
    if traced := sum("total" in (record.trace or {}) for record in records):
        texts.append(f"{units.many(traced, 'cell')} traced, of them not as modelled: {len(wrong(records))}")
    return texts + reasons([compared.why_not_traced(record.trace) for record in records], "traced")


def reasons(found: Iterable[str | None], verb: str) -> list[str]:
    """Why cells were not counted or traced, each reason once with how often; None is no reason."""
    from flashbench import units

    counts = Counter(reason for reason in found if reason)
    return [f"{units.many(count, 'cell')} not {verb}: {reason}" for reason, count in counts.items()]


def wrong(records: Sequence[Record]) -> list[str]:
    """The cells whose kernels move or compute other than their model says, or raise, with what it is."""
    from flashbench._cli.profile_trace import why_wrong

    traced = [record for record in records if record.trace and "reason" not in record.trace]
    found = [(record.cell.key, why_wrong(record.trace or {})) for record in traced]
    return [f"{key}: {why}" for key, why in found if why]
