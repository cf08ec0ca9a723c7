"""``flashbench block``: a model's layers with each implementation's attention, trained and run."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import interrupt, options
from flashbench.errors import GateError, SpecError, UsageError

if TYPE_CHECKING:
    from flashbench.blocks import Task
    from flashbench.console import Column
    from flashbench.kernels import Target
    from flashbench.presets import Preset

DEFAULTS = {"model": "gpt2-medium", "impls": "naive,sdpa,flash", "modes": "train,infer", "seqlens": "1k",
            "batch": "1", "layers": "1", "dtype": "bf16"}  # fmt: skip


Impls = Annotated[
    str | None,
    typer.Option(
        help="Implementations, a comma list; none: --impl alone. Default: naive,sdpa,flash.", metavar="NAMES"
    ),
]
Impl = Annotated[
    list[str] | None,
    typer.Option(
        help="A function of your own beside them, FILE.py:FUNCTION or MODULE:FUNCTION; repeatable.",
        metavar="SPEC",
    ),
]


def block(
    model: Annotated[
        str | None,
        typer.Option(
            help="Models with known layers, a comma list, or tiny. Default: gpt2-medium.",
            metavar="NAMES",
            autocompletion=options.models,
        ),
    ] = None,
    impls: Impls = None,
    impl: Impl = None,
    modes: Annotated[
        str | None,
        typer.Option(
            help="train (forward and backward), infer (forward), or both. Default: both.", metavar="NAMES"
        ),
    ] = None,
    seqlens: Annotated[
        str | None, typer.Option(help="Tokens of a sequence, a list. Default: 1k.", metavar="LENGTHS")
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Sequences. Default: 1.", metavar="N")] = None,
    layers: Annotated[
        str | None,
        typer.Option(help="Layers in the stack, or all of the model's. Default: 1.", metavar="N|all"),
    ] = None,
    dtype: Annotated[
        str | None, typer.Option(help="bf16, fp16, fp32 or tf32, of weights and activations.", metavar="NAME")
    ] = None,
    device: options.Device = None,
    seed: options.Seed = None,
    out: Annotated[
        str | None,
        typer.Option(
            help="A new results file, which 'report' reads; each row as it is done.", metavar="FILE"
        ),
    ] = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Time layers of a model with random weights: a training step and a forward, with attention's share.

    One layer is checked against fp64 before a stack is timed. Exits 5 if one is wrong or failed.
    """
    names = {name: value for name, value in locals().items() if isinstance(value, str)}
    texts = DEFAULTS | {name: names[name] for name in DEFAULTS if name in names}
    if impl:
        texts["impl"] = ",".join(impl)
    options.one_format(json, csv)
    from flashbench import units

    number = units.parse_int(names.get("seed", "0"), "--seed", minimum=0)
    path, tasks = _new_file(out), parse_tasks(texts)
    target = _target(device, tasks)
    found, stopped = _measure(tasks, target, path, texts, seed=number, quiet=quiet)
    _show(found, target, json=json, csv=csv)
    if stopped:
        raise interrupt.interrupted(f"{len(found)} of {len(tasks)} rows were measured")
    _verdict(found)


def _target(device: str | None, tasks: list[Task]) -> Target:
    """Where the stacks run, as the implementations see it."""
    from flashbench import environment, sweep

    asked = sweep.OPTIONS["device"].parse
    assert asked is not None
    target = environment.target(None if device is None else asked(device, "--device", ()))
    options.settle(dict.fromkeys(task.implementation for task in tasks), target)
    return target


def _verdict(found: list[dict[str, Any]]) -> None:
    """Raise GateError where a row is wrong or failed."""
    bad = [row for row in found if row["status"] in ("wrong", "failed")]
    if bad:
        raise GateError(f"{len(bad)} of {len(found)} rows: {bad[0]['status']}, {bad[0]['reason']}")


def _new_file(out: str | None) -> Path | None:
    from flashbench import runfile

    if out is None:
        return None
    if runfile.rowless(out):
        return Path(out)
    path = options.out_file(out)
    if path.exists():
        raise UsageError(f"--out {out!r}: exists and is not overwritten; accepted: the path of a new file")
    return path


def parse_tasks(texts: dict[str, str]) -> list[Task]:
    """One task per model, length, mode and implementation, that innermost. Raises UsageError, SpecError."""
    from flashbench import kernels, sweep, units
    from flashbench.blocks import MODES, Task

    models = [_known(name) for name in units.parse_names(texts["model"], "--model", _names())]
    named = {name: text for name, text in texts.items() if name in ("impls", "impl")}
    given = sweep.parse(named, options.on_line, kernels.registry())
    options.own(given.get("impl", ()))
    impls = sweep.implementations(given)
    modes = units.parse_names(texts["modes"], "--modes", MODES)
    units.parse_choice(texts["dtype"], "--dtype", ("bf16", "fp16", "fp32", "tf32"))
    lengths = units.parse_axis(texts["seqlens"], "--seqlens", maximum=2**24)
    batch = units.parse_int(texts["batch"], "--batch", maximum=2**20)
    return [
        Task(
            preset=model, implementation=name, mode=mode, batch=batch, seqlen=length,
            layers=_layers(texts["layers"], model), dtype=texts["dtype"],
        )
        for model in models for length in lengths for mode in modes for name in impls
    ]  # fmt: skip


def _names() -> list[str]:
    from flashbench.presets import PRESETS, TINY

    return [row.name for row in (*PRESETS, TINY) if row.intermediate]


def _known(name: str) -> Preset:
    from flashbench import presets

    return presets.TINY if name == presets.TINY.name else presets.find(name)


def _layers(text: str, model: Preset) -> int:
    from flashbench import units

    if text.strip() == "all":
        return model.layers
    try:
        return units.parse_int(text, "--layers", maximum=2**10)
    except SpecError:
        raise SpecError(f"--layers {units.quoted(text)}: accepted: all, or 1 to {2**10}") from None


def _measure(
    tasks: list[Task], target: Target, path: Path | None, texts: dict[str, str], *, seed: int, quiet: bool
) -> tuple[list[dict[str, Any]], bool]:
    """The tasks' rows, and whether it was stopped before all were there."""
    from flashbench import blocks, console, environment
    from flashbench._cli.rows_file import kept

    found: list[dict[str, Any]] = []
    about = partial(environment.collect, target)
    with (
        interrupt.interruptible() as stop,
        kept(found, path, "blocks", about=about, texts=texts, planned=len(tasks)) as keep,
        console.progress(len(tasks), quiet=quiet) as tick,
    ):
        tick(0, "the first stack")
        for row in blocks.rows(tasks, target, seed=seed):
            keep(row)
            tick(len(found), f"{row['model']} {row['implementation']} {row['mode']}")
    return found, stop()


def _show(found: list[dict[str, Any]], target: Target, *, json: bool, csv: bool) -> None:
    from flashbench import console
    from flashbench.record import hosts_share, layer_flags, spread_of

    timed = [
        {**row, "spread": spread_of(row["samples_s"]), "flags": layer_flags(row)}
        if "samples_s" in row
        else row
        for row in found
    ]
    notes = [said] if (said := hosts_share(found)) else []
    console.show_table(_columns(), timed, json=json, csv=csv, title=f"layers on {target.name}", notes=notes)


def _columns() -> list[Column]:
    from functools import partial

    from flashbench import units
    from flashbench.console import Column

    def number(name: str, header: str, format: Any = str) -> Column:
        return Column(name=name, header=header, format=format, justify="right")

    return [
        Column(name="model", header="model"), Column(name="mode", header="step"),
        Column(name="implementation", header="attention"), Column(name="dtype", header="dtype"),
        number("batch", "batch"), number("seqlen", "seqlen", units.format_length), number("layers", "layers"),
        Column(name="status", header="status"), number("time_s", "time", units.format_seconds),
        number("spread", "spread", "{:.1%}".format),
        number("tokens_per_s", "tokens/s", "{:,.0f}".format),
        number("flops_per_s", "FLOP/s", partial(units.format_rate, unit="FLOP/s")),
        number("mfu", "MFU", "{:.1%}".format),
        number("peak_bytes", "peak memory", units.format_bytes),
        number("attention_share", "attention", "{:.0%}".format),
        Column(name="flags", header="flags", format=", ".join), Column(name="reason", header="reason"),
    ]  # fmt: skip
