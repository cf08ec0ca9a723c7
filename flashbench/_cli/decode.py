"""``flashbench decode``: how near decoding comes to the memory's speed, beside the model."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flashbench._cli import decode_counters, interrupt, options
from flashbench.errors import GateError, SpecError, UnavailableError, UsageError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.decoding import Step
    from flashbench.kernels import Target
    from flashbench.presets import Preset
    from flashbench.tuned import Tuned

DEFAULTS = {"model": "llama-3-8b", "kv_lens": "1k-128k", "batch": "1,16", "page_size": "0", "splits": "auto",
            "dtype": "bf16", "queries": "1", "seed": "0"}  # fmt: skip
CHECKED = {"kv_lens": "1,65,300", "batch": "2"}
"""What --check decodes on a CPU, in the interpreter, unless told otherwise."""

AUTO = "auto"


def _dtypes(incomplete: str) -> list[str]:
    return options.complete_names(("bf16", "fp16", "fp32", "fp8"), incomplete)


def decode(
    model: Annotated[
        str | None,
        typer.Option(
            help="Published models, a comma list; 'flashbench list presets' shows all. Default: llama-3-8b.",
            metavar="NAMES",
            autocompletion=options.models,
        ),
    ] = None,
    kv_lens: Annotated[
        str | None,
        typer.Option(help="Keys in the cache of each sequence. Default: 1k-128k.", metavar="LENGTHS"),
    ] = None,
    batch: Annotated[str | None, typer.Option(help="Sequences, a list. Default: 1,16.", metavar="N")] = None,
    queries: Annotated[
        str | None,
        typer.Option(help="New tokens per sequence, more than 1 for speculation. Default: 1.", metavar="N"),
    ] = None,
    page_size: Annotated[
        str | None,
        typer.Option(help="Keys per page, a list; 0 is a contiguous cache. Default: 0.", metavar="N"),
    ] = None,
    splits: Annotated[
        str | None,
        typer.Option(help="Thread blocks that share a sequence's keys: auto or a number.", metavar="auto|N"),
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option(
            "--dtype",
            "--dtypes",
            help="bf16, fp16, fp32, or fp8 (a cache in e4m3, queries in bf16): a comma list. Default: bf16.",
            metavar="NAMES",
            autocompletion=_dtypes,
        ),
    ] = None,
    check: Annotated[
        bool, typer.Option("--check", help="Compare with fp64 and time nothing; needs no GPU.")
    ] = False,
    pairs: Annotated[
        bool,
        typer.Option(
            "--pairs",
            help="With --check: every feature of caches and queries alone, and every pair of features.",
        ),
    ] = False,
    device: options.Device = None,
    seed: options.Seed = None,
    tuned: options.Tuned = None,
    counters: Annotated[
        str | None,
        typer.Option(
            help="Afterwards count each step's traffic with Nsight Compute; folder for its own files.",
            metavar="DIR",
        ),
    ] = None,
    out: Annotated[
        str | None, typer.Option(help="File for all rows with samples and environment, JSON.", metavar="FILE")
    ] = None,
    json: options.Json = False,
    csv: options.Csv = False,
    quiet: options.Quiet = False,
) -> None:
    """Time one layer's attention of a decode step: µs, GB/s, share of a measured copy, beside the model.

    Each row is checked against fp64 before it is timed. Exits 5 if one is wrong or failed, 3 without a GPU.

    With --check --pairs pages, splits, fp8 caches, appends, lengths, heads, dtypes and the rest are checked
    alone and each with every other, at three points on a GPU and one on a CPU.
    """
    line = options.given(locals())
    if pairs:
        from flashbench._cli import decode_pairs

        decode_pairs.show(line)
        return
    names = {name: value for name, value in locals().items() if isinstance(value, str)}
    given = {name: names[name] for name in DEFAULTS if name in names}
    options.one_format(json, csv)
    path = None if out is None else options.out_file(out, [tuned])
    number, configurations = _seed(given), None if tuned is None else Path(tuned)
    from flashbench import console, environment, sweep

    asked = sweep.OPTIONS["device"].parse
    assert asked is not None
    steps_on = {
        kind: parse_steps({**DEFAULTS, **(CHECKED if kind == "cpu" else {}), **given})
        for kind in ("cpu", "cuda")
    }
    target = environment.target(None if device is None else asked(device, "--device", ()))
    _ready(target, check)
    raw = decode_counters.folder(counters, target)
    steps = steps_on[target.type]
    console.listen(quiet=quiet)
    found = options.tuned(configurations, target, quiet=quiet)
    served = [(step, None) if found is None else found.step(step) for step in steps]
    rows, copy = list[dict[str, Any]](), None
    with interrupt.interruptible() as stop:
        copy = None if check else _copy(target)
        _measure(rows, served, target, found, copy, check=check, seed=number, quiet=quiet)
        if raw is not None:
            decode_counters.add(rows, [step for step, _ in served], target, raw, number)
    kept = path is not None and (not stop() or (bool(rows) and not path.exists()))
    if path is not None and kept:
        _save(path, rows, target, copy)
    hidden = ("samples_s", "clocks", "counters")
    shown = [{name: value for name, value in row.items() if name not in hidden} for row in rows]
    columns = _columns(rows, raw=json or csv)
    title = f"decode on {target.name}"
    console.show_table(
        columns, shown, json=json, csv=csv, title=title, notes=[] if quiet or stop() else _notes(copy, check)
    )
    if stop():
        where = "" if path is None else f"; {path} {'holds them' if kept else 'was not written'}"
        raise interrupt.interrupted(
            f"{len(rows)} of {len(steps)} rows were {'checked' if check else 'measured'}{where}"
        )
    _verdict(rows)


def _copy(target: Target) -> dict[str, Any]:
    from flashbench import calibrate

    return calibrate.measure_one("copy_bytes_per_s", target)


def _save(path: Path, rows: list[dict[str, Any]], target: Target, copy: dict[str, Any] | None) -> None:
    """Write the file of --out."""
    import json

    from flashbench import console, decoding

    document = console.raw_value(decoding.document(rows, target, copy, argv=["flashbench", *sys.argv[1:]]))
    options.write_out(path, json.dumps(document) + "\n")


def _measure(
    rows: list[dict[str, Any]],
    served: Sequence[tuple[Step, str | None]],
    target: Target,
    tuned: Tuned | None,
    copy: Mapping[str, Any] | None,
    *,
    check: bool,
    seed: int,
    quiet: bool,
) -> None:
    """Add row after row, held to the copy; one whose configuration is the file's says so."""
    from flashbench import console, decoding

    with console.progress(len(served), quiet=quiet) as tick:
        found = decoding.run(
            [step for step, _ in served],
            target,
            copy_bytes_per_s=copy["value"] if copy else None,
            seed=seed,
            only_check=check,
        )
        for done, (step, case) in enumerate(served):
            tick(done, step.problem.key)
            source = {} if tuned is None or case is None else {"tuned": str(tuned.path), "tuned_case": case}
            rows.append(next(found) | source)


def _ready(target: Target, check: bool) -> None:
    """Raise UnavailableError where nothing can be timed, or decoded."""
    from flashbench import environment, kernels

    if target.type == "cpu" and not check:
        status = environment.gpu_status()
        raise UnavailableError(
            f"no GPU to time decoding on: {status.message}",
            hint="'--check' decodes small caches in Triton's interpreter",
        )
    options.settle(["flash-decode"], target)
    environment.need_torch()
    if reason := kernels.get("flash-decode").why_unavailable(target):
        raise UnavailableError(f"flash-decode: {reason}")


def parse_steps(texts: Mapping[str, str]) -> list[Step]:
    """One step per model, dtype, batch, page size and length, the length innermost. Raises UsageError."""
    from flashbench import decode_configs, units
    from flashbench.decoding import DTYPES, Step
    from flashbench.presets import PRESETS
    from flashbench.problem import MAX_SEQLEN
    from flashbench.sweep import MAX_CELLS

    names = units.parse_names(texts["model"], "--model", [row.name for row in PRESETS])
    models = [_decoder(name) for name in names]
    dtypes = units.parse_names(texts["dtype"], "--dtype", DTYPES)
    batches = units.parse_axis(texts["batch"], "--batch", maximum=2**20)
    pages = units.parse_axis(texts["page_size"], "--page-size", minimum=0, maximum=2**20)
    lengths = units.parse_axis(texts["kv_lens"], "--kv-lens", maximum=MAX_SEQLEN)
    queries = units.parse_int(texts["queries"], "--queries", maximum=2**16)
    splits = texts["splits"].strip()
    try:
        count = (
            0 if splits == AUTO else units.parse_int(splits, "--splits", maximum=decode_configs.MAX_SPLITS)
        )
    except SpecError:
        raise SpecError(
            f"--splits {units.quoted(splits)}: accepted: {AUTO}, or 1 to {decode_configs.MAX_SPLITS}"
        ) from None
    sizes = {"--model": len(models), "--dtypes": len(dtypes), "--batch": len(batches),
             "--page-size": len(pages), "--kv-lens": len(lengths)}  # fmt: skip
    units.limit(sizes, MAX_CELLS, "rows")
    return [
        Step(
            preset=model, kv_len=length, batch=batch, page_size=page, dtype=dtype, splits=count,
            queries=queries,
        )
        for model in models for dtype in dtypes for batch in batches for page in pages for length in lengths
    ]  # fmt: skip


def _decoder(name: str) -> Preset:
    from flashbench import presets
    from flashbench.decode_configs import MAX_HEAD_DIM

    row = presets.find(name)
    why = None
    if row.latent_dim:
        why = "it caches a latent (MLA), which the bundled kernels do not decode from"
    elif not row.causal:
        why = "it is an encoder and keeps no cache"
    elif not row.num_heads:
        why = "its query heads are not known"
    elif max(row.head_dim, row.head_dim_v) > MAX_HEAD_DIM:
        why = f"its head dim is above {MAX_HEAD_DIM}"
    if why is not None:
        raise UsageError(f"--model '{name}': {why}; accepted: a decoder with K/V heads, such as llama-3-8b")
    return row


def _seed(given: Mapping[str, str]) -> int:
    from flashbench import units

    return units.parse_int(given.get("seed", "0"), "--seed", minimum=0)


def _columns(rows: Sequence[Mapping[str, Any]], *, raw: bool) -> list[Column]:
    from functools import partial

    from flashbench import units
    from flashbench.console import Column

    def number(name: str, header: str, format: Any = str) -> Column:
        return Column(name=name, header=header, format=format, justify="right")

    def microseconds(value: float) -> str:
        return f"{value * 1e6:.1f}"

    rate = partial(units.format_rate, unit="B/s")
    columns = [
        Column(name="model", header="model"), Column(name="dtype", header="cache"),
        number("batch", "batch"), number("kv_len", "keys", units.format_length), number("queries", "queries"),
        number("page_size", "page"), number("splits", "splits"),
        number("time_s", "µs", microseconds), number("bytes_per_s", "GB/s", rate),
        number("copy_fraction", "of a copy", "{:.1%}".format),
        number("model_s", "model µs", microseconds), number("bound_s", "bound µs", microseconds),
        number("bytes", "bytes", units.format_bytes),
        number("requested_bytes", "requested", units.format_bytes),
        number("counted_bytes", "counted", units.format_bytes),
        number("counted_ratio", "counted/requested", "{:.3f}".format),
        number("max_abs_error", "error", "{:.1e}".format), number("budget", "budget", "{:.1e}".format),
        Column(name="status", header="status"), Column(name="reason", header="why"),
        Column(name="flags", header="flags", format=", ".join),
        Column(name="tuned", header="tuned by"), Column(name="not_counted", header="why not counted"),
    ]  # fmt: skip
    extra = ("num_heads", "num_kv_heads", "head_dim", "head_dim_v", "cache_bytes", "split_keys", "block_k",
             "num_warps", "num_stages", "tuned_case")  # fmt: skip
    if raw:
        return [*columns, *(number(name, name) for name in extra)]
    return [column for column in columns if any(row.get(column.name) not in (None, []) for row in rows)]


def _notes(copy: Mapping[str, Any] | None, check: bool) -> list[str]:
    from flashbench import units

    if check:
        return ["checked against fp64, not timed"]
    if not copy or not copy["value"]:
        return [f"no copy to compare with: {(copy or {}).get('reason')}"]
    return [
        f"a copy reaches {units.format_rate(copy['value'], 'B/s')} here, now; GB/s are of the bytes that no"
        " kernel can avoid (K, V, q, o, lse, block table once); bound: those at the data sheet's bandwidth"
    ]


def _verdict(rows: Sequence[Mapping[str, Any]]) -> None:
    """Raise GateError for a wrong or failed row, UnavailableError where nothing ran."""
    bad = [row for row in rows if row["status"] in ("wrong", "failed")]
    if bad:
        first = bad[0]
        why = first.get("reason") or f"error {first['max_abs_error']:.2e} above {first['budget']:.2e}"
        raise GateError(
            f"{len(bad)} of {len(rows)} rows {first['status']}; the first: batch {first['batch']},"
            f" {first['kv_len']} keys, page {first['page_size']}, {first['dtype']}: {why}"
        )
    if all(row["status"] == "skipped" for row in rows):
        raise UnavailableError(f"nothing could run: {rows[0]['reason']}")
