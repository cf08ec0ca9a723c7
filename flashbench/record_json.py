"""A record as the JSON object of its line in a results file, and back."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import asdict, fields
from typing import Any

from flashbench import units
from flashbench.errors import FlashbenchError, RunFileError
from flashbench.problem import Cell
from flashbench.record import FLUSH_BEFORE, STATUSES, Accuracy, Memory, Record, Samples
from flashbench.record_shape import MAX_NUMBER


def record_to_json(record: Record) -> dict[str, Any]:
    """A record as the JSON object of its line; non-finite numbers become null."""
    values: dict[str, Any] = {field.name: getattr(record, field.name) for field in fields(record)}
    cell = values.pop("cell")
    for name in ("samples", "memory", "accuracy"):
        values[name] = asdict(values[name]) if values[name] is not None else None
    return {"type": "record", "key": cell.key, "cell": json_able(cell.to_json()), **json_able(values)}


def record_from_json(value: Mapping[str, Any], where: str = "record") -> Record:
    """The record of a line. Raises RunFileError naming ``where`` and the field that is wrong."""
    if value.get("type") != "record":
        raise RunFileError(f"{where}: type is {units.quoted(value.get('type'))}; 'record' is wanted")
    try:
        optional = {
            name: value[name]
            for name in (
                "reason", "io_model", "stated", "exact", "apart", "backend", "config", "tuned", "clocks",
                "counters", "trace", "energy", "timing", "spent", "environment", "device_type",
                "started_at", "wall_s",
            )
            if value.get(name) is not None
        }  # fmt: skip
        return Record(
            cell=Cell.from_json(value["cell"]),
            status=_known(value["status"], STATUSES, "status"),
            flags=tuple(value.get("flags", ())),
            samples=_samples(value.get("samples")),
            memory=Memory(**value["memory"]) if value.get("memory") else None,
            accuracy=_accuracy(value.get("accuracy")),
            **optional,
        )
    except KeyError as error:
        raise RunFileError(f"{where}: the field {error} is missing") from None
    except (TypeError, ValueError, AttributeError, AssertionError, FlashbenchError) as error:
        raise RunFileError(f"{where}: {error}") from None


def _known(value: Any, names: Collection[str], field: str) -> str:
    if value not in names:
        raise ValueError(f"{field} is {units.quoted(value)}; known: {', '.join(names)}")
    return str(value)


def _samples(value: Mapping[str, Any] | None) -> Samples | None:
    if value is None:
        return None
    for time in value["samples_s"] or [None]:
        if type(time) not in (int, float) or not 0 <= time <= MAX_NUMBER:
            raise ValueError(f"samples_s holds {units.quoted(time)}; seconds are wanted")
    times = tuple(float(time) for time in value["samples_s"])
    cache, method = (value.get(name) or "unknown" for name in ("cache", "method"))
    flush = value.get("flush", FLUSH_BEFORE if cache == "cold" else None)
    return Samples(samples_s=times, cache=cache, method=method, flush=flush, load=value.get("load"))


def _accuracy(value: Mapping[str, Any] | None) -> Accuracy | None:
    if value is None:
        return None
    maxima = {
        name: {key: math.nan if number is None else float(number) for key, number in value[name].items()}
        for name in ("max_abs_error", "budget")
    }
    if missing := maxima["max_abs_error"].keys() - maxima["budget"].keys():
        raise ValueError(f"accuracy has no budget for {', '.join(sorted(missing))}")
    return Accuracy(**maxima, query_rows=value["query_rows"], key_rows=value["key_rows"])


def json_able(value: Any) -> Any:
    """A copy of plain data that strict JSON takes: tuples to lists, NaN and infinities to null."""
    if isinstance(value, Mapping):
        return {str(key): json_able(item) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [json_able(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value if isinstance(value, str | int | float | bool | None) else str(value)
