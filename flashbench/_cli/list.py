"""``flashbench list``: what there is, and what of it this machine cannot use and why."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from flashbench._cli import options
from flashbench.errors import UnavailableError, UsageError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.devices import Device
    from flashbench.metrics import Metric, Row
    from flashbench.problem import Problem

SUBJECTS = ("implementations", "devices", "metrics", "models", "presets")


def list_(
    subject: Annotated[
        str | None,
        typer.Argument(
            help="implementations, devices, metrics, models or presets. Default: all.",
            metavar="[SUBJECT]",
            autocompletion=lambda incomplete: [name for name in SUBJECTS if name.startswith(incomplete)],
        ),
    ] = None,
    impl: options.Impl = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No notes.")] = False,
) -> None:
    """List implementations, devices, metrics, models and presets, each with why it is not available here."""
    from flashbench import console, units

    options.one_format(json, csv)
    _known(impl or ())
    if subject is not None:
        units.parse_choice(subject, "SUBJECT", SUBJECTS)
        table = _TABLES[subject]()
        columns = table.columns if json or csv else table.shown
        notes = () if json or csv or quiet else table.notes
        console.show_table(columns, table.rows, json=json, csv=csv, title=subject, notes=notes)
        return
    if csv:
        raise UsageError(f"--csv prints one table; accepted: 'list SUBJECT --csv' with {', '.join(SUBJECTS)}")
    tables = {name: make() for name, make in _TABLES.items()}
    if json:
        console.show_json({name: [table.picked(row) for row in table.rows] for name, table in tables.items()})
        return
    for name, table in tables.items():
        console.show_table(table.shown, table.rows, title=name, notes=() if quiet else table.notes)


def _known(specs: Iterable[str]) -> None:
    """From here on the functions of --impl are implementations like the others. Raises UsageError."""
    from flashbench import kernels

    options.own(specs)
    for spec in specs:
        kernels.get(spec)


@dataclass(frozen=True)
class _Table:
    columns: list[Column]
    rows: list[dict[str, Any]]
    raw_only: frozenset[str] = frozenset()
    """Columns of JSON and CSV that a person's table does without."""
    notes: tuple[str, ...] = ()
    """What a person reads beside the table."""

    @property
    def shown(self) -> list[Column]:
        return [column for column in self.columns if column.name not in self.raw_only]

    def picked(self, row: dict[str, Any]) -> dict[str, Any]:
        return {column.name: row[column.name] for column in self.columns}


def _availability() -> list[Column]:
    from flashbench.console import Column

    return [
        Column(name="available", header="here", format=lambda value: "yes" if value else "no"),
        Column(name="why_not", header="why not"),
    ]


def _implementations() -> _Table:
    from flashbench import environment, kernels
    from flashbench.console import Column

    try:
        target, without = environment.target(None), None
    except UnavailableError as error:
        target, without = kernels.Target(), str(error)
    rows = []
    for row in kernels.registry().values():
        why_not = without or row.why_unavailable(target)
        interpreted = why_not is None and row.interpreted(target)
        io_model = row.io_model if why_not or row.origin is None else row.model(_problem(), target)
        mode = "interpreted: checked, not timed" if interpreted else "timed"
        rows.append({
            "name": row.name, "available": why_not is None, "why_not": why_not,
            "mode": None if why_not else mode, "io_model": io_model, "deterministic": row.deterministic,
            "exact": row.exact, "summary": row.summary,
        })  # fmt: skip
    columns = [
        Column(name="name", header="implementation"),
        *_availability(),
        Column(name="mode", header="mode"),
        Column(name="io_model", header="model"),
        Column(name="deterministic", header="deterministic"),
        Column(name="exact", header="exact", format=lambda value: "yes" if value else "no"),
        Column(name="summary", header="summary"),
    ]
    return _Table(columns, rows, frozenset({"deterministic"}))


def _devices() -> _Table:
    from functools import partial

    from flashbench import units
    from flashbench.console import Column
    from flashbench.devices import DEVICES

    here, why_none = _gpu_here()
    rows = [_device(row, here, why_none) for row in DEVICES]
    gib = partial(units.format_bytes, binary=True)
    flops, bandwidth = (partial(units.format_rate, unit=unit) for unit in ("FLOP/s", "B/s"))
    headers: dict[str, tuple[str, Callable[[Any], str]]] = {
        "num_sms": ("SMs", str), "smem_per_sm_bytes": ("SRAM/SM", gib), "l2_bytes": ("L2", gib),
        "hbm_bytes": ("memory", gib), "hbm_bytes_per_s": ("bandwidth", bandwidth),
        "fp16_flops_per_s": ("fp16 dense", flops),
    }  # fmt: skip
    text: dict[str, tuple[str, Callable[[Any], str]]] = {
        "name": ("device", str), "arch": ("arch", str), "uncertain": ("uncertain", lambda _: "yes"),
    }  # fmt: skip
    availability = {column.name: column for column in _availability()}
    columns = []
    for name in rows[0]:
        header, format_ = (headers | text).get(name, (name, str))
        justify: Literal["left", "right"] = "right" if name in headers else "left"
        plain = Column(name=name, header=header, format=format_, justify=justify)
        columns.append(availability.get(name, plain))
    raw_only = frozenset(rows[0]) - {"available", *headers, *text}
    return _Table(columns, rows, raw_only, _device_notes(here, why_none))


def _device(row: Device, here: Device | None, why_none: str) -> dict[str, Any]:
    """Every field of a row, with its unit in its name."""
    mine = here is not None and row.name == here.name
    return {
        "name": row.name, "available": mine,
        "why_not": None if mine else why_none or "this machine has another GPU",
        "arch": row.arch,
        "capability": ".".join(map(str, row.capability)) if row.capability else None,
        "reported": "; ".join(row.reported), "num_sms": row.num_sms,
        "smem_per_sm_bytes": row.smem_per_sm_bytes, "smem_per_block_bytes": row.smem_per_block_bytes,
        "registers_per_sm_bytes": row.registers_per_sm_bytes, "l2_bytes": row.l2_bytes,
        "l2_bytes_per_s": row.l2_bytes_per_s, "hbm_bytes": row.hbm_bytes,
        "hbm_bytes_per_s": row.hbm_bytes_per_s,
        **{f"{dtype}_flops_per_s": row.peak_flops_per_s.get(dtype) for dtype in _PEAKS},
        "mufu_per_clk_per_sm": row.mufu_per_clk_per_sm, "clock_hz": row.clock_hz, "tdp_w": row.tdp_w,
        "uncertain": row.uncertain or None, "source": row.source, **_links(row.name),
    }  # fmt: skip


def _links(name: str) -> dict[str, Any]:
    """What the card sends to another, one way, and whose word that is."""
    from flashbench import links

    row = links.of(name)
    rates = {f"{kind}_bytes_per_s": getattr(row, kind) for kind in links.KINDS}
    return rates | {"links_uncertain": row.uncertain or None, "links_source": row.source}


_PEAKS = ("fp16", "bf16", "tf32", "fp32", "fp8")


def _device_notes(here: Device | None, why_none: str) -> tuple[str, ...]:
    """Which card is here, where the other fields are, and each doubt once with the cards that share it."""
    from flashbench.devices import DEVICES

    doubts: dict[str, list[str]] = {}
    for row in DEVICES:
        if row.uncertain:
            doubts.setdefault(row.uncertain, []).append(row.name)
    return (
        f"here: {here.name if here else f'none of them: {why_none}'}",
        "--json and --csv have every field: SRAM per block, registers, bandwidth of L2, peaks in"
        f" {', '.join(_PEAKS)}, exponentials per clock, clock, TDP, source",
        *(f"{', '.join(names)}: uncertain: {doubt}" for doubt, names in doubts.items()),
    )


def _gpu_here() -> tuple[Device | None, str]:
    """The row of this machine's first GPU, and why there is none; asks the driver, not torch."""
    from flashbench import devices
    from flashbench._cli.driver import look

    found = look()
    if not found.gpus:
        return None, found.why_none.partition(" (")[0]
    name = found.gpus[0].name or ""
    return devices.match(name), f"this machine has {name!r}"


def _metrics() -> _Table:
    from flashbench.console import Column
    from flashbench.metrics import METRICS

    here, why_none = _gpu_here()
    rows = []
    for row in METRICS:
        why_not = _why_not(row, here, why_none)
        rows.append({
            "name": row.name, "available": why_not is None, "why_not": why_not, "unit": row.unit,
            "better": row.better or None, "help": row.help,
        })  # fmt: skip
    columns = [
        Column(name="name", header="metric"),
        Column(name="unit", header="unit"),
        Column(name="better", header="better"),
        *_availability(),
        Column(name="help", header="what it is"),
    ]
    return _Table(columns, rows)


def _why_not(metric: Metric, here: Device | None, why_none: str) -> str | None:
    """What the metric lacks on this machine: found by computing it for a cell as it would be here."""
    from flashbench.devices import DEVICES

    gpu = here is not None or "has" in why_none
    if metric.compute(_example(gpu=gpu, device=here)) is not None:
        return None
    if metric.compute(_example(gpu=True, device=here)) is not None:
        return f"measured on a GPU only: {why_none}"
    if metric.compute(_example(gpu=gpu, device=DEVICES[0])) is not None or not gpu:
        return f"needs the roofs of a GPU of 'flashbench list devices': {why_none}"
    return "not known here"


def _problem() -> Problem:
    from flashbench.problem import Problem

    return Problem(
        batch=8, num_heads=16, num_kv_heads=16, seqlen_q=4096, seqlen_k=4096, head_dim=64, head_dim_v=64,
        dtype="fp16", causal=False,
    )  # fmt: skip


def _example(*, gpu: bool, device: Device | None) -> Row:
    """A row with everything that such a machine measures."""
    from flashbench import iomodel
    from flashbench.metrics import COUNTED, Row
    from flashbench.problem import Cell
    from flashbench.record import Accuracy, Memory, Record, Samples

    problem = _problem()
    moved = {f"{kind}_bytes": 1 for kind in ("read", "write", "atomic")}
    record = Record(
        cell=Cell(implementation="naive", problem=problem, pass_="bwd"),
        status="ok",
        samples=Samples(samples_s=(1.0,) * 5, cache="cold", method="events"),
        memory=Memory(
            inputs_bytes=1,
            outputs_bytes=1,
            peak_extra_bytes=1 if gpu else None,
            reserved_bytes=1 if gpu else None,
        ),
        accuracy=Accuracy(max_abs_error={"o": 0.0}, budget={"o": 1.0}, query_rows=1, key_rows=1),
        timing={"rounds": [{"samples": 5, "sm_clock_mhz": 1.0}]} if gpu else {},
        apart={"max_abs_error": 0.0, "relative": 0.0},
        energy={"joules_per_call": 1.0} if gpu else {},
        counters={"total": dict.fromkeys((*COUNTED, "tensor_share"), 1), "kernels": []} if gpu else {},
        trace={"difference_bytes": 0, "traced_share": 1.0, "total": moved, "kernels": []},
    )
    estimate = iomodel.estimate("flash-v2-atomic", problem, "bwd")
    return Row(
        record=record,
        estimate=estimate,
        compulsory_bytes=estimate.compulsory.total_bytes,
        device=device,
        naive_time_s=1.0,
    )


def _models() -> _Table:
    from flashbench import iomodel
    from flashbench._iomodel import alternatives
    from flashbench.console import Column

    known: list[iomodel.Model | alternatives.Alternative] = [
        *iomodel.MODELS, *(alternatives.find(name) for name in alternatives.names())
    ]  # fmt: skip
    rows = [
        {"name": row.name, "available": True, "why_not": None, "summary": row.summary, "source": row.source}
        for row in known
    ]
    columns = [
        Column(name="name", header="model"),
        *_availability(),
        Column(name="summary", header="summary"),
        Column(name="source", header="source"),
    ]
    return _Table(columns, rows)


def _presets() -> _Table:
    from flashbench.console import Column
    from flashbench.presets import PRESETS

    rows = [
        {
            "name": row.name, "available": True, "why_not": None, "attention": row.kind, "layers": row.layers,
            "num_heads": row.num_heads, "num_kv_heads": row.num_kv_heads, "head_dim": row.head_dim,
            "head_dim_v": row.head_dim_v, "window": row.window,
            "windowed_layers": row.windowed_layers or None, "source": row.source,
            "uncertain": row.uncertain or None,
        }
        for row in PRESETS
    ]  # fmt: skip
    numbers = {"layers": "layers", "num_heads": "heads", "num_kv_heads": "kv", "head_dim": "d",
               "head_dim_v": "dv", "window": "window", "windowed_layers": "windowed layers"}  # fmt: skip
    columns = [
        Column(name="name", header="preset"),
        *_availability(),
        Column(name="attention", header="kind"),
        *(Column(name=name, header=header, justify="right") for name, header in numbers.items()),
        Column(name="source", header="source"),
        Column(name="uncertain", header="uncertain"),
    ]
    hidden = frozenset({"available", "why_not", "windowed_layers", "uncertain"})
    return _Table(columns, rows, hidden)


_TABLES: dict[str, Callable[[], _Table]] = {
    "implementations": _implementations,
    "devices": _devices,
    "metrics": _metrics,
    "models": _models,
    "presets": _presets,
}
