"""What Nsight Compute counts besides bytes by level, a row per call and kernel (``profile --counters``)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashbench._profilers import counters

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.record import Record

LEVEL = "hardware"
"""Level of these rows, where they stand among those of the joined table."""


def rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """Of each counted cell the call (kernel ``""``) and then its kernels in order."""
    found: list[dict[str, Any]] = []
    for record in records:
        total = record.counters.get("total")
        if total is None:
            continue
        found += [
            {
                "cell": record.cell.key, "kernel": kernel["kernel"], "level": LEVEL,
                "time_share": _share(kernel.get("time_s"), total.get("time_s")),
                **counters.derived(kernel), **{name: kernel.get(name) for name in SHOWN},
            }
            for kernel in ({**total, "kernel": ""}, *record.counters.get("kernels", ()))
        ]  # fmt: skip
    return found


def _share(part: float | None, whole: float | None) -> float | None:
    return part / whole if part is not None and whole else None


SHOWN = ("tensor_share", "mufu_share", "occupancy", "shared_bytes", "bank_conflicts", "tma_read_bytes",
         "registers_per_thread", "spill_write_bytes", "spill_read_bytes")  # fmt: skip
"""Counters that are shown as they are."""


def columns(found: Sequence[Mapping[str, Any]], *, whole: bool) -> list[Column]:
    """Columns of what was counted in any row; whole: of everything."""
    from flashbench import units
    from flashbench.console import Column

    def share(value: float) -> str:
        return f"{value:.1%}"

    formats: dict[str, Any] = {
        "time_share": share, **dict.fromkeys(counters.DERIVED, share),
        "sectors_per_request": lambda value: f"{value:.2f}",
    }  # fmt: skip
    for name in SHOWN:
        unit = counters.BY_NAME[name].unit
        formats[name] = {"fraction": share, "B": units.format_bytes}.get(unit, lambda value: f"{value:,.0f}")
    return [
        Column(
            name=name, header=name.removesuffix("_share").removesuffix("_bytes").replace("_", " "),
            format=format_, justify="right",
        )
        for name, format_ in formats.items()
        if whole or any(row[name] is not None for row in found)
    ]  # fmt: skip
