"""``flashbench check --numerics``: errors against fp64 by dtype, length and range of scores, as a table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench._cli import interrupt, options
from flashbench.errors import SpecError, UnavailableError, UsageError

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.kernels import Target
    from flashbench.numerics import Grid

TAKES = ("seqlens", "head_dims", "dtypes", "impls", "heads", "ranges", "device", "seed", "out", "json", "csv",
         "quiet")  # fmt: skip
"""Options of ``check`` that mean something here."""

DEFAULTS: Mapping[str, Mapping[str, str]] = {
    "cuda": {"seqlens": "1k,4k,16k,64k,256k,1M", "head_dims": "64,128", "dtypes": "fp32,tf32,fp16,bf16,fp8",
             "impls": "flash,sdpa,naive", "heads": "16", "ranges": "plain,outliers,large"},
    "cpu": {"seqlens": "256,1k", "head_dims": "64", "dtypes": "fp32,fp16,bf16,fp8",
            "impls": "flash,sdpa,naive", "heads": "1", "ranges": "plain,outliers,large"},
}  # fmt: skip
"""What is measured on each kind of device, as it would be typed."""

QUERIES = {"cuda": 128, "cpu": 64}
"""Rows that are compared of every head."""


def show(values: Mapping[str, Any]) -> None:
    """Measure, print and, with --out, write what the options ask; values: those of ``check``.

    Raises UsageError, SpecError or UnknownName for bad options, UnavailableError where nothing ran; leaves
    with exit code 130 when stopped, after what was measured.
    """
    line = {name: value for name, value in values.items() if value not in (None, False)}
    for name in line:
        if name not in TAKES:
            accepted = ", ".join(options.on_line(one) for one in TAKES)
            raise UsageError(f"{options.on_line(name)}: has no meaning with --numerics; accepted: {accepted}")
    json, csv, quiet = (bool(line.pop(name, False)) for name in ("json", "csv", "quiet"))
    options.one_format(json, csv)
    grids, target, out, texts = _resolve(line)
    found: list[dict[str, Any]] = []
    stopped = _measure(grids, target, out, texts, found, quiet=quiet)
    _print(found, target, json=json, csv=csv, quiet=quiet)
    from flashbench import console

    if stopped:
        raise interrupt.interrupted(f"{len(found)} of {sum(grid.count for grid in grids)} rows were measured")
    if out is not None and not quiet:
        console.note(f"results: {out}")
    if found and not any(row["status"] in ("ok", "nonfinite") for row in found):
        raise UnavailableError(f"none of the {len(found)} rows was measured: {found[0]['reason']}")


def _resolve(line: dict[str, str]) -> tuple[tuple[Grid, ...], Target, Path | None, Mapping[str, str]]:
    """A grid for each head dim, where it runs, the file, and the options as they would be typed."""
    from flashbench import environment, kernels, numerics, sweep, units

    known = kernels.registry()
    dtypes, ranges = (line.pop(name, None) for name in ("dtypes", "ranges"))
    named = {"dtypes": (dtypes, numerics.DTYPES), "ranges": (ranges, numerics.RANGES)}
    given = {
        name: units.parse_names(text, options.on_line(name), names)
        for name, (text, names) in named.items()
        if text is not None
    }
    typed = sweep.parse(line, options.on_line, known)
    out = _free(typed.get("out"))
    target = environment.target(typed.get("device"))
    texts = {**DEFAULTS[target.type], **line, **({"dtypes": dtypes} if dtypes else {}),
             **({"ranges": ranges} if ranges else {})}  # fmt: skip
    rest = {name: text for name, text in DEFAULTS[target.type].items() if name not in ("dtypes", "ranges")}
    merged = {**sweep.parse(rest, options.on_line, known), **typed}
    options.settle([*merged["impls"], *numerics.IN_FP8.values()], target)
    environment.need_torch()
    grids = tuple(
        numerics.Grid(
            impls=merged["impls"],
            dtypes=given.get("dtypes") or tuple(texts["dtypes"].split(",")),
            ranges=given.get("ranges") or tuple(texts["ranges"].split(",")),
            seqlens=merged["seqlens"],
            head_dim=head_dim,
            heads=merged["heads"],
            queries=QUERIES[target.type],
            seed=merged.get("seed", 0),
        )
        for head_dim in merged["head_dims"]
    )
    if not grids[0].count:
        raise SpecError(
            f"--impls {texts['impls']!r} with --dtypes {texts['dtypes']!r}: nobody takes these;"
            " accepted: flash for fp8"
        )
    return grids, target, out, {k: v for k, v in texts.items() if k not in ("device", "out")}


def _free(out: Path | None) -> Path | None:
    """Refuse a file that is there, before anything is measured. Raises UsageError."""
    from flashbench import runfile, units

    if out is None:
        return None
    label = f"--out {units.quoted(out, 400)}"
    if out.is_dir():
        raise UsageError(f"{label}: a folder; accepted with --numerics: the path of a new file")
    if out.exists() and not runfile.rowless(out):
        raise UsageError(f"{label}: exists and is not overwritten; accepted: the path of a new file")
    return out


def _measure(
    grids: Sequence[Grid],
    target: Target,
    out: Path | None,
    texts: Mapping[str, str],
    found: list[dict[str, Any]],
    *,
    quiet: bool,
) -> bool:
    """Add row after row to found, and to the file if one is asked for; whether it was stopped."""
    from flashbench import console, environment, numerics
    from flashbench._cli.rows_file import kept

    count = sum(grid.count for grid in grids)
    about = partial(environment.collect, target)
    with (
        interrupt.interruptible() as stop,
        kept(found, out, "numerics", about=about, texts=texts, planned=count) as keep,
    ):
        if not quiet:
            grid = grids[0]
            sampled = f"{grid.queries} queries of {grid.heads} heads"
            console.note(f"{count} errors against fp64 on {target.name}: {sampled}")
        with console.progress(count, quiet=quiet) as tick:
            for grid in grids:
                for row in numerics.rows(grid, target, lambda text: tick(len(found), text)):
                    keep(row)
    return stop()


def _print(found: list[dict[str, Any]], target: Target, *, json: bool, csv: bool, quiet: bool) -> None:
    from flashbench import console, numerics

    if json or csv:
        console.show_table(_raw_columns(), found, json=json, csv=csv)
        return
    shown = [row | {"dtype_shown": dtype_shown(row)} for row in found]
    measured = [row for row in shown if row["status"] == "ok"]
    console.show_table(_columns(), measured, title=f"errors against fp64 on {target.name}")
    if quiet:
        return
    ranges = dict.fromkeys(row["range"] for row in found)
    for name in ranges:
        console.note(f"{name}: {numerics.RANGES[name]}")
    reasons: dict[str, int] = {}
    for row in found:
        if row["status"] != "ok":
            text = f"{row['implementation']} {row['status']}: {row['reason']}"
            reasons[text] = reasons.get(text, 0) + 1
    for text, count in reasons.items():
        console.note(f"{count} rows of {text}")


def dtype_shown(row: Mapping[str, Any]) -> str:
    """fp8 with what shares a scale, and whether it is rotated; other dtypes as they are."""
    words = [row["dtype"], row["fp8_scale"], "rotated" if row["hadamard"] else ""]
    return " ".join(word for word in words if word)


def _raw_columns() -> list[Column]:
    from flashbench.console import Column

    names = ("range", "implementation", "backend", "dtype", "fp8_scale", "hadamard", "seqlen_k", "seqlen_q",
             "num_heads", "head_dim", "status", "reason", "rmse", "max_abs_error", "input_rmse",
             "reference_rms")  # fmt: skip
    return [Column(name=name, header=name) for name in names]


def _columns() -> list[Column]:
    from flashbench.console import Column
    from flashbench.units import format_length

    def number(name: str, header: str, text: Any) -> Column:
        return Column(name=name, header=header, format=text, justify="right")

    return [
        Column(name="range", header="range"),
        number("head_dim", "head dim", str),
        number("seqlen_k", "keys", format_length),
        Column(name="dtype_shown", header="dtype"),
        Column(name="implementation", header="implementation"),
        number("rmse", "RMSE", "{:.2e}".format),
        number("max_abs_error", "max |error|", "{:.2e}".format),
        number("input_rmse", "RMSE of rounded inputs", "{:.2e}".format),
        number("reference_rms", "RMS of o", "{:.2e}".format),
    ]
