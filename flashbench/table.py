"""The one join of measured and modelled: run files in, a data frame with a row per record out.

Values are SI base units and whole bytes, the unit is in the column's name, missing is NA (None in
``rows``, empty in CSV) and never 0. Formatting belongs to whoever shows the table.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench import ceilings as measured
from flashbench import compared, devices, iomodel
from flashbench._iomodel.time import Prediction
from flashbench.ceilings import Ceilings
from flashbench.errors import FlashbenchError, RunFileError
from flashbench.iomodel import Estimate
from flashbench.metrics import METRICS, Row
from flashbench.problem import Cell, Problem
from flashbench.record import Record
from flashbench.runfile import RunFile

if TYPE_CHECKING:
    from pandas import DataFrame

PROBLEM_COLUMNS = (
    "batch", "num_heads", "num_kv_heads", "seqlen_q", "seqlen_k", "head_dim", "head_dim_v", "dtype", "causal",
)  # fmt: skip
"""What a sweep varies of a problem; ``options`` says what else differs from the defaults."""

IDENTITY_COLUMNS = (
    "run", "implementation", "exact", "pass", *PROBLEM_COLUMNS, "options", "status", "reason", "flags",
    "backend", "config", "tuned", "cache", "method", "load", "flush", "device", "not_counted", "not_traced",
    "band_missed", "limiting", "card", "uuid", "key",
)  # fmt: skip
COLUMNS = IDENTITY_COLUMNS + tuple(metric.name for metric in METRICS)
"""Every column, in order."""

_NAIVE = "naive"


def run_names(paths: Sequence[Path | str]) -> list[str]:
    """A short name per run file, all different: the stem, or the folder where the stem says nothing.

    ``reports/h100-sxm/results.jsonl`` is "h100-sxm"; names that would collide get "#2", "#3", ….
    """
    names: list[str] = []
    for path in map(Path, paths):
        folder = path.resolve().parent.name
        base = folder if path.stem in {"results", "run", "-"} and folder else path.stem
        name, count = base, 1
        while name in names:
            count += 1
            name = f"{base}#{count}"
        names.append(name)
    return names


def named(files: Sequence[RunFile]) -> list[tuple[str, RunFile]]:
    """Each file by its run name; one with rows of several kinds of card is as many, named after kinds too.

    The header of such a part says of the machine only what its rows do: the rest is of another card.
    """
    found = []
    for name, file in zip(run_names([file.path for file in files]), files, strict=True):
        usual = (file.header.get("environment") or {}).get("device_name")
        kinds: dict[Any, list[Record]] = {}
        for record in file.records:
            kinds.setdefault(record.environment.get("device_name") or usual, []).append(record)
        if len(kinds) < 2:
            found.append((name, file))
            continue
        for kind, rows in kinds.items():
            header = {key: value for key, value in file.header.items() if key != "calibration"}
            header |= {"environment": dict(rows[0].environment), "cells": [one.cell.key for one in rows]}
            found.append((f"{name} on {kind}", replace(file, header=header, records=tuple(rows))))
            file = replace(file, numerics=(), blocks=(), timings=())  # of the first alone
    return found


def headers(files: Sequence[RunFile]) -> dict[str, Mapping[str, Any]]:
    """The header of each file by the run name that its rows carry."""
    return {name: file.header for name, file in named(files)}


def numerics(files: Sequence[RunFile]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The rows of ``check --numerics`` of each file that has some, by run name."""
    return {name: file.numerics for name, file in named(files) if file.numerics}


def blocks(files: Sequence[RunFile]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The rows of ``block`` of each file that has some, by run name."""
    return {name: file.blocks for name, file in named(files) if file.blocks}


def ring(files: Sequence[RunFile]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The rows of ``ring`` of each file that has some, by run name."""
    return {name: file.ring for name, file in named(files) if file.ring}


def decode(files: Sequence[RunFile]) -> dict[str, Sequence[Mapping[str, Any]]]:
    """The rows of ``decode --out`` of each file that has some, by run name."""
    return {name: file.decode for name, file in named(files) if file.decode}


def ceilings(files: Sequence[RunFile], given: Sequence[Ceilings] = ()) -> dict[str, Ceilings]:
    """What each run's card was measured to reach, by run name; a run without is left out.

    given: of a card of that name, they win over what the header holds of the run's own machine.
    """
    found = {}
    for name, header in headers(files).items():
        card = (header.get("environment") or {}).get("device_name")
        one = next((row for row in given if row.device_name == card), None)
        with suppress(RunFileError):  # a header is anybody's
            one = one or measured.parse(header.get("calibration"), "the header")
        if one is not None and one.device_name == card:
            found[name] = one
    return found


def build(files: Sequence[RunFile]) -> DataFrame:
    """One row per record with the columns ``COLUMNS``; several files are told apart by ``run``.

    In the order of the plan, in which several cards do not measure.

    Whole metrics are nullable integers, the others floats with NaN for missing.
    """
    join = _Join()
    return _frame([row for name, file in named(files) for row in _as_planned(join.rows(name, file), file)])


def _as_planned(rows: list[dict[str, Any]], file: RunFile) -> list[dict[str, Any]]:
    place = {key: number for number, key in enumerate(file.header.get("cells") or ())}
    return sorted(rows, key=lambda row: place.get(row["key"], len(place)))


def models(table: DataFrame) -> DataFrame:
    """What each algorithm would move: one row per problem and pass of the table and model.

    Of problems without options. Columns: model, pass, the problem's, then requested_bytes,
    compulsory_bytes, extra_bytes and tiles as text. Tiles are the model's defaults.
    """
    import pandas as pd

    plain = table[table["options"].isna()]
    asked = plain[["pass", *PROBLEM_COLUMNS]].drop_duplicates()
    rows = []
    for cell in asked.to_dict("records"):
        problem = Problem(**{name: cell[name] for name in PROBLEM_COLUMNS})
        for model in (row for row in iomodel.MODELS if row.shown):
            estimate = _estimate(model.name, problem, cell["pass"])
            if estimate is None:
                continue
            rows.append({
                "model": model.name, "pass": cell["pass"], **asdict(problem), "options": None,
                "requested_bytes": estimate.requested.total_bytes,
                "compulsory_bytes": estimate.compulsory.total_bytes,
                "extra_bytes": estimate.extra_bytes, "tiles": _pairs(estimate.tiles),
            })  # fmt: skip
    numbers = ["requested_bytes", "compulsory_bytes", "extra_bytes"]
    return pd.DataFrame(rows, columns=["model", "pass", *PROBLEM_COLUMNS, "options", *numbers, "tiles"])


def rows(table: DataFrame) -> list[dict[str, Any]]:
    """The table as JSON-able dicts: Python ints, floats, bools and text, None where missing."""
    import pandas as pd

    return [
        {name: None if pd.isna(value) else value for name, value in row.items()}
        for row in table.astype(object).to_dict("records")
    ]


def values_of(file: RunFile) -> Callable[[Record, str], float | None]:
    """A function of a record of the file and a metric's name: its value, None where it has none."""
    join = _Join()
    found: dict[str, dict[str, Any]] = {}

    def value(record: Record, metric: str) -> float | None:
        if not found:
            rows = join.rows("", file)
            found.update({record.cell.key: row for record, row in zip(file.records, rows, strict=True)})
        number: float | None = found[record.cell.key].get(metric)
        return number

    return value


def to_csv(table: DataFrame) -> str:
    """The table as CSV: units in the column names only, empty where missing."""
    return str(table.to_csv(index=False, lineterminator="\n"))


class _Join:
    """Looks up what rows share once: devices, estimates, naive times."""

    def __init__(self) -> None:
        self._estimates: dict[tuple[Any, ...], Estimate | None] = {}
        self._predictions: dict[tuple[int, str], tuple[Estimate, Prediction | None]] = {}

    def rows(self, run: str, file: RunFile) -> list[dict[str, Any]]:
        naive = {
            _same_work(record): record.samples.median_s
            for record in file.records
            if record.cell.implementation == _NAIVE and record.samples
        }
        machine = file.header.get("environment") or {}
        return [
            self.row(run, record, _where(record, machine), naive.get(_same_work(record)))
            for record in file.records
        ]

    def row(
        self, run: str, record: Record, environment: Mapping[str, Any], naive_time_s: float | None
    ) -> dict[str, Any]:
        """The columns of one record."""
        cell, samples = record.cell, record.samples
        model, config = record.io_model, record.config
        device = _device(environment)
        estimate = self._estimate(model, cell, config, device) if model else _stated(record)
        own = estimate if estimate and not record.exact else None
        row = Row(
            record=record,
            estimate=estimate,
            compulsory_bytes=(
                own.compulsory if own else iomodel.compulsory(cell.problem, cell.pass_)
            ).total_bytes,
            device=device,
            naive_time_s=naive_time_s,
            prediction=self._predict(estimate, device),
        )
        return {
            "run": run, "implementation": cell.implementation, "exact": record.exact, "pass": cell.pass_,
            **asdict(cell.problem), "options": cell.problem.options_text.strip() or None,
            "status": record.status, "reason": record.reason, "flags": " ".join(record.flags) or None,
            "backend": record.backend,
            "config": _pairs(config) or None, "tuned": record.tuned.get("file"),
            "cache": samples.cache if samples else None, "method": samples.method if samples else None,
            "load": samples.load if samples else None,
            "flush": samples.flush if samples else None,
            "device": environment.get("device_name"),
            "not_counted": record.counters.get("reason"),
            "not_traced": compared.why_not_traced(record.trace),
            "band_missed": ", ".join(name for name, one in row.levels.items() if one.within is False) or None,
            "limiting": row.prediction.limiting if samples and row.prediction else None,
            "card": _card(environment), "uuid": environment.get("uuid"),
            "key": cell.key,
            **{metric.name: metric.compute(row) for metric in METRICS},
        }  # fmt: skip

    def _predict(self, estimate: Estimate | None, device: devices.Device | None) -> Prediction | None:
        """What the time model makes of it on the device, None where it has no say."""
        if estimate is None or device is None or not estimate.steps:
            return None
        key = (id(estimate), device.name)
        if key not in self._predictions:
            try:
                found = iomodel.predict(estimate, device)
            except FlashbenchError:
                found = None
            self._predictions[key] = estimate, found  # kept, so that no other takes its place
        return self._predictions[key][1]

    def _estimate(
        self, model: str, cell: Cell, tiles: Mapping[str, Any], device: devices.Device | None
    ) -> Estimate | None:
        card = (device.name, device.num_sms) if device else None  # it may decide tiles and splits
        key = (model, cell.problem, cell.pass_, repr(sorted(tiles.items())), card)
        if key not in self._estimates:
            options = {"tiles": tiles or None, "device": device}
            self._estimates[key] = _estimate(model, cell.problem, cell.pass_, **options)
        return self._estimates[key]


def _estimate(model: str, problem: Problem, pass_: str, **options: Any) -> Estimate | None:
    """The model's estimate, None where this version does not know the model or cannot size its tiles."""
    try:
        return iomodel.estimate(model, problem, pass_, **options)
    except FlashbenchError:
        return None


def _stated(record: Record) -> Estimate | None:
    """The estimate of a model of the implementation's author, None without one or where it cannot be read."""
    if not record.stated:
        return None
    try:
        return iomodel.stated(
            record.cell.implementation, record.cell.problem, record.cell.pass_, record.stated
        )
    except FlashbenchError:
        return None


def _pairs(values: Mapping[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _same_work(record: Record) -> tuple[Any, ...]:
    """What two rows share whose times make a ratio: the card as well."""
    samples, where = record.samples, record.environment
    how = (samples.cache, samples.method, samples.load) if samples else None
    return record.cell.problem, record.cell.pass_, how, where.get("host"), where.get("uuid")


def _where(record: Record, machine: Mapping[str, Any]) -> Mapping[str, Any]:
    """What is known of where a row was measured: of the header's machine only what holds for its card too."""
    own = record.environment
    same = own.get("host") in (None, machine.get("host")) and own.get("uuid") == machine.get("uuid")
    return {**machine, **own} if same or "uuid" not in own else own


def _card(environment: Mapping[str, Any]) -> str | None:
    """Host and card, such as "node7 cuda:1"; None for files that do not tell."""
    host, device = environment.get("host"), environment.get("device")
    return f"{host} {device}" if host and device else None


def _device(environment: Mapping[str, Any]) -> devices.Device | None:
    """The card that the row ran on; what the driver reports of its size wins over the data sheet."""
    name = environment.get("device_name")
    if not isinstance(name, str) or not name:
        return None
    return devices.match(name, sms=environment.get("num_sms"), memory_bytes=environment.get("total_bytes"))


def _frame(rows: list[dict[str, Any]]) -> DataFrame:
    import pandas as pd

    frame = pd.DataFrame(rows, columns=list(COLUMNS), dtype=object)
    for metric in METRICS:
        frame[metric.name] = _column(frame[metric.name], metric.whole)
    for name in PROBLEM_COLUMNS:
        if name not in {"dtype", "causal"}:
            frame[name] = frame[name].astype("int64")
    frame["causal"] = frame["causal"].astype(bool)
    return frame


def _column(values: Any, whole: bool) -> Any:
    """Nullable integers where they fit 64 bits, floats otherwise (a cell too big to run may not fit)."""
    if whole and all(value is None or abs(value) < 2**63 for value in values):
        return values.astype("Int64")
    return values.astype("float64")
