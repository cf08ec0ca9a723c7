"""CSV tables of attention benchmarks as runs: cuDNN frontend's and flash-attention's.

Both print one time per row in milliseconds and no samples, so their noise is what ``compare`` assumes.
Cells are named by the table's own columns and labels."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from flashbench.errors import RunFileError
from flashbench.judge.foreign import measured, texts
from flashbench.judge.sides import Measured, Run

CUDNN, FLASH = "cuDNN frontend's benchmarks (CSV)", "flash-attention's benchmarks (CSV)"
KINDS = (CUDNN, FLASH)
COLUMNS = {
    "cuDNN frontend": (
        {"backend", "batch_size", "time_ms"},
        {"backend", "batch_size", "fwd_time_ms", "bwd_time_ms"},
    ),
    "flash-attention": ({"nheads", "fwd(ms)", "bwd(ms)"},),
}
"""By tool the columns that each of its tables has; cuDNN frontend's older one has both passes in a row."""
PASSES = ("fwd", "bwd")
NAME = re.compile(r"[\w(][\w ./()%-]{0,60}")
"""Of a column; a line of JSON or of bytes has others."""

_CUDNN_KEY = (
    "model_name", "phase", "backend", "data_type", "kv_cache_dtype", "attn_mask", "kind", "batch_size",
    "q_seqlen", "kv_seqlen", "q_tokens", "kv_len", "num_q_heads", "num_kv_heads", "head_dim_qk",
    "head_dim_vo", "sliding_window_size", "page_size", "profile_pass", "deterministic_bwd",
)  # fmt: skip
_FLASH_KEY = ("dtype", "batch size", "seqlen", "nheads", "embedding dim", "causal", "dropout")


def matches(data: bytes) -> bool:
    """True where the first line is the header of a table, of whatever benchmark."""
    header = _header(data)
    names = [name.strip() for name in header]
    return len(header) > 1 and all(NAME.fullmatch(name) for name in names) and not names[0].isdigit()


def read(path: Path, data: bytes) -> Run:
    """The run of a table.

    Raises RunFileError for a table of no benchmark that is known, and for a row that is no row of it.
    """
    header = _header(data)
    kind = _kind(header)
    if kind is None:
        wanted = (
            f"{' or '.join(', '.join(sorted(columns)) for columns in tables)} ({tool}'s)"
            for tool, tables in COLUMNS.items()
        )
        raise RunFileError(f"{path}: CSV of no known benchmark; accepted: columns {'; '.join(wanted)}")
    rows = csv.DictReader(io.StringIO(data.decode("utf-8-sig", errors="replace")))
    cells: dict[str, Measured] = {}
    devices, versions = set[str](), dict[str, str]()
    for number, row in _numbered(path, rows):
        if None in row or None in row.values():
            raise RunFileError(f"{path}, line {number}: {len(header)} columns are wanted")
        try:
            for key, cell in _cudnn(row) if kind == CUDNN else _flash(row):
                if key in cells:
                    raise ValueError(f"a second row for {key}")
                cells[key] = cell
        except ValueError as error:
            raise RunFileError(f"{path}, line {number}: {error}") from None
        devices |= {row["gpu_name"]} if row.get("gpu_name") else set()
        versions |= texts(row, {"cudnn_version": "cudnn frontend", "cudnn_backend_version": "cudnn"})
    return Run(
        path=path, kind=str(kind), cells=cells, measures=("time_s", "flops_per_s"), versions=versions,
        conditions={"estimator": "median" if kind == CUDNN else "mean"}
        | ({"device": " and ".join(sorted(devices))} if devices else {}),
    )  # fmt: skip


def _numbered(path: Path, rows: Iterable[dict[str, str]]) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows with the number of their line, the header's being 1. Raises RunFileError for what is no CSV."""
    number = 1
    try:
        for row in rows:
            number += 1
            yield number, row
    except csv.Error as error:
        raise RunFileError(f"{path}, line {number + 1}: {error}") from None


def _header(data: bytes) -> list[str]:
    first = data.split(b"\n", 1)[0].decode("utf-8-sig", errors="replace").strip()
    try:
        return next(csv.reader([first]), [])
    except csv.Error:  # a carriage return inside
        return []


def _kind(header: list[str]) -> str | None:
    has = {tool: any(columns <= set(header) for columns in tables) for tool, tables in COLUMNS.items()}
    return CUDNN if has["cuDNN frontend"] else FLASH if has["flash-attention"] else None


def _cudnn(row: Mapping[str, str]) -> Iterator[tuple[str, Measured]]:
    if "time_ms" in row:
        yield _cudnn_cell(row, "time_ms", "tflops")
        return
    asked = row.get("profile_pass")
    for pass_ in [one for one in PASSES if asked in (one, "both", "", None)]:
        yield _cudnn_cell({**row, "profile_pass": pass_}, f"{pass_}_time_ms", f"{pass_}_tflops")


def _cudnn_cell(row: Mapping[str, str], time: str, rate: str) -> tuple[str, Measured]:
    """The cell whose figures are in these columns."""
    key = " ".join(f"{name}={row[name]}" for name in _CUDNN_KEY if row.get(name))
    groups = texts(row, {"backend": "implementation", "profile_pass": "pass", "data_type": "dtype"})
    status = "ok" if row.get("success", "True") == "True" else "failed"
    if row.get("skipped") == "True":
        status = "skipped"
    if status != "ok":
        return key, measured({}, status=status, reason=row.get("error_message") or "", groups=groups)
    values = {"time_s": [_number(row[time], time) / 1e3]}
    if row.get(rate):
        values["flops_per_s"] = [_number(row[rate], rate) * 1e12]
    return key, measured(values, groups=groups)


def _flash(row: Mapping[str, str]) -> Iterator[tuple[str, Measured]]:
    shape = " ".join(f"{name}={row[name]}" for name in _FLASH_KEY if row.get(name))
    for pass_ in PASSES:
        values = {"time_s": [_number(row[f"{pass_}(ms)"], f"{pass_}(ms)") / 1e3]}
        if row.get(f"{pass_}(tflops)"):
            values["flops_per_s"] = [_number(row[f"{pass_}(tflops)"], f"{pass_}(tflops)") * 1e12]
        groups = {"implementation": "flash-attention", "pass": pass_, **texts(row, {"dtype": "dtype"})}
        yield f"{pass_} {shape}", measured(values, groups=groups)


def _number(text: str, name: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise ValueError(f"{name} is {text!r}; a number is wanted") from None
