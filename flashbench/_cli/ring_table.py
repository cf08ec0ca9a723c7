"""How attention across cards is shown: what ``ring`` measured, and what the model says of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashbench.console import Column

_ALIKE = ("gpu", "dtype", "causal", "batch", "num_heads", "num_kv_heads", "head_dim", "head_dim_v",
          "world_size", "link", "local_step")  # fmt: skip
"""In the title where all rows agree, else a column."""

_RAW = ("tokens_per_s", "peak_bytes", "model_compute_s", "model_one_card_s", "link_tensors", "max_abs_error",
        "budget", "samples_s", "sent_by_rank", "device", "query_rows", "key_rows")  # fmt: skip
"""In JSON and CSV only."""


def show(rows: Sequence[Mapping[str, Any]], title: str, *, json: bool, csv: bool, quiet: bool) -> None:
    """The table, JSON or CSV of what was measured."""
    notes = [
        "efficiency: one card's time over all cards' time together; overlap: of the shorter of compute and"
        " link, the share that costs no time; sent: by the rank that sends most, equal to the model's",
    ]
    _show(rows, _measured(), title, notes, json=json, csv=csv, quiet=quiet)


def show_model(rows: Sequence[Mapping[str, Any]], *, json: bool, csv: bool, quiet: bool) -> None:
    """The table, JSON or CSV of what the model says."""
    notes = ["bytes: sent by the rank that sends most, exact; one way at the data sheet's rate, NCCL reaches"
             " less of it"]  # fmt: skip
    if any(row.get("model_time_s") is None and not row.get("reason") for row in rows):
        notes.append("times need a card whose links are known: --gpu h100-sxm")
    _show(rows, _modelled(), "attention across cards, modelled", notes, json=json, csv=csv, quiet=quiet)


def _show(
    rows: Sequence[Mapping[str, Any]], columns: list[Column], title: str, notes: list[str], *, json: bool,
    csv: bool, quiet: bool,
) -> None:  # fmt: skip
    from flashbench import console

    if not (json or csv):
        alike = {name: values.pop() for name in _ALIKE if len(values := {row.get(name) for row in rows}) == 1}
        title = ", ".join(
            [title, *(_word(name, value) for name, value in alike.items() if value is not None)]
        )
        empty = {c.name for c in columns if all(row.get(c.name) is None for row in rows)}
        columns = [c for c in columns if c.name not in {*alike, *_RAW, *empty}]
    console.show_table(columns, rows, json=json, csv=csv, title=title, notes=[] if quiet else notes)


def _word(name: str, value: Any) -> str:
    words = {
        "num_heads": "{} heads", "num_kv_heads": "{} K/V heads", "head_dim": "d {}", "head_dim_v": "dv {}",
        "batch": "batch {}", "world_size": "{} rank" if value == 1 else "{} ranks", "link": "over {}",
        "local_step": "by {}",
    }  # fmt: skip
    if name == "causal":
        return "causal" if value else "full"
    return words.get(name, "{}").format(value)


def _column(name: str, header: str, format: Any = str) -> Column:
    from flashbench.console import Column

    return Column(name=name, header=header, format=format, justify="right")


def _problem() -> list[Column]:
    from flashbench import units
    from flashbench.console import Column

    return [
        Column(name="implementation", header="algorithm"), Column(name="pass", header="pass"),
        Column(name="dtype", header="dtype"),
        Column(name="causal", header="causal", format=lambda value: "yes" if value else "no"),
        _column("world_size", "ranks"), _column("batch", "batch"),
        _column("seqlen", "seqlen", units.format_length), _column("num_heads", "heads"),
        _column("num_kv_heads", "kv heads"), _column("head_dim", "d"), _column("head_dim_v", "dv"),
    ]  # fmt: skip


def _measured() -> list[Column]:
    from flashbench import units
    from flashbench.console import Column

    seconds, share, size = units.format_seconds, "{:.0%}".format, units.format_bytes
    return [
        *_problem(), Column(name="device", header="device"), Column(name="local_step", header="step by"),
        Column(name="status", header="status"), _column("time_s", "time", seconds),
        _column("flops_per_s", "FLOP/s", partial(units.format_rate, unit="FLOP/s")),
        _column("tokens_per_s", "tokens/s", "{:,.0f}".format),
        _column("one_card_s", "one card", seconds), _column("speedup", "speed-up", "{:.2f}x".format),
        _column("efficiency", "efficiency", share), _column("compute_s", "compute alone", seconds),
        _column("link_s", "link alone", seconds), _column("overlap", "overlap", share),
        _column("sent_bytes", "sent", size), _column("link_bytes", "model's bytes", size),
        _column("link_bytes_per_s", "link rate", partial(units.format_rate, unit="B/s")),
        _column("peak_bytes", "peak memory", size), *_times(),
        _column("max_abs_error", "error"), _column("budget", "budget"), _column("query_rows", "query rows"),
        _column("key_rows", "key rows"), _column("samples_s", "samples"),
        _column("sent_by_rank", "sent by rank"), Column(name="reason", header="reason"),
    ]  # fmt: skip


def _times() -> list[Column]:
    from flashbench import units

    seconds = units.format_seconds
    return [
        _column("model_one_card_s", "one card, model", seconds),
        _column("model_compute_s", "compute, model", seconds),
        _column("model_link_s", "link, model", seconds),
        _column("model_exposed_s", "not hidden", seconds), _column("model_time_s", "time, model", seconds),
        _column("model_efficiency", "efficiency, model", "{:.0%}".format),
    ]  # fmt: skip


def _modelled() -> list[Column]:
    from flashbench import units
    from flashbench.console import Column

    return [
        Column(name="gpu", header="card"), Column(name="link", header="link"), *_problem(),
        _column("link_bytes", "bytes sent", units.format_bytes), _column("link_tensors", "by tensor"),
        *_times(),
        Column(name="hidden", header="hidden", format=lambda value: "yes" if value else "no"),
        _column("hidden_from", "hidden from", "{:,} tokens".format), Column(name="reason", header="reason"),
    ]  # fmt: skip
