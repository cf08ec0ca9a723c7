"""Values to words: the only place of the report that formats. All text it returns is safe as HTML."""

from __future__ import annotations

import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

from flashbench.report.data import FILTERS
from flashbench.units import format_bytes, format_length, format_rate, format_seconds

_PLAIN = (float, int, str, bool)


def known(value: Any) -> bool:
    """False for None, NaN and NA."""
    if value is None or type(value) in _PLAIN:
        return value is not None and value == value
    import pandas as pd

    return not bool(pd.isna(value))


def seconds(value: float) -> str:
    """1.23 ms, 4.30 µs."""
    return format_seconds(value).replace(" us", " µs")


def bytes_text(value: float) -> str:
    """8.65 MB (GB = 1e9)."""
    return format_bytes(float(value))


def rate(value: float) -> str:
    """650 TFLOP/s."""
    return format_rate(value, "FLOP/s")


def _tick(value: float, unit: str) -> str:
    """A round value with an SI prefix and no more digits than it has: "200 µs", "1 GB"."""
    prefixes = {-9: "n", -6: "µ", -3: "m", 0: "", 3: "k", 6: "M", 9: "G", 12: "T", 15: "P", 18: "E"}
    power = min(18, max(-9, 3 * math.floor(math.log10(value * (1 + 1e-9)) / 3)))
    return f"{value / 10**power:g} {prefixes[power]}{unit}"


def seconds_tick(value: float) -> str:
    """A tick in seconds: "200 µs"."""
    return _tick(value, "s")


def bytes_tick(value: float) -> str:
    """A tick in bytes: "50 MB"."""
    return _tick(value, "B")


def rate_tick(value: float) -> str:
    """A tick in FLOP/s, whose unit stands at the axis: "50 T"."""
    return _tick(value, "")


def times(value: float) -> str:
    """2.1×."""
    return f"{value:.3g}×" if value < 1000 else f"{value:.0f}×"


def percent(value: float) -> str:
    """62 %."""
    return f"{100 * value:.3g} %"


def lengths(values: Iterable[int]) -> str:
    """1k, 2k, 4k."""
    return ", ".join(format_length(int(value)) for value in values)


def filter_label(key: str, value: str) -> str:
    """The name of a filter's value as the control bar shows it, escaped."""
    row = next(item for item in FILTERS if item.key == key)
    return escape(row.names.get(value, value))


def panel(where: Mapping[str, Any]) -> str:
    """A selection in words: "forward, bf16, head dim 128, causal"."""
    parts = []
    for row in FILTERS:
        if row.key not in where or not known(where[row.key]):
            continue
        value = str(where[row.key])
        label = filter_label(row.key, value)
        if row.key == "dims":
            parts.append(f"head dim {label}")
        elif row.key == "queries":
            parts += [] if value == "same" else [f"{label} queries"]
        elif row.key == "options":
            parts += [] if value == "none" else [label]
        elif row.key == "kv":
            parts += [] if value == "MHA" else [label]
        else:
            parts.append(label)
    return ", ".join(parts)


def short_reason(reason: Any, limit: int = 44) -> str:
    """The first clause of a reason, not escaped."""
    text = str(reason) if known(reason) else "no reason recorded"
    text = text.replace("\n", " ").split(";")[0].split(" (")[0].strip()
    return text if len(text) <= limit else text[: limit - 1].rstrip() + "…"


def lane_label(series: str, rows: Sequence[Any]) -> str:
    """What stands beside the crosses of a series, not escaped: "naive: memory wall at 64k, needs 275 GB"."""
    reasons = list(dict.fromkeys(short_reason(row.reason) for row in rows))
    statuses = list(dict.fromkeys(row.status for row in rows))
    if all(out_of_memory(row) for row in rows):
        needs = _NEEDS.match(str(rows[0].reason))
        said = needs[0] if needs else reasons[0]
        return f"{series}: memory wall at {format_length(int(rows[0].seqlen))}, {said}"
    if len(statuses) > 1:
        return f"{series}: {', '.join(statuses)}"
    if statuses == ["checked"]:
        return f"{series}: checked, not timed"
    return f"{series}: {reasons[0]}" + (", …" if len(reasons) > 1 else "")


def out_of_memory(row: Any) -> bool:
    """Whether a cell has no time because it did not fit."""
    return row.status == "oom" or (row.status == "skipped" and bool(_NEEDS.match(str(row.reason))))


_NEEDS = re.compile(r"needs [\d.,]+ \w+")


def untimed_note(row: Any) -> str:
    """Hover text of a cell that was not timed."""
    reason = escape(str(row.reason)) if known(row.reason) else "no reason recorded"
    return f"{escape(row.status)}: {reason}"


NOTE = 72
"""Characters of a line of a hover text: plotly.js breaks none, and cuts what leaves the figure."""


def cell_note(row: Any) -> str:
    """What every hover text says of a cell: samples, what ran with which configuration, what limits it."""
    parts = []
    if known(row.num_samples):
        spread = f", ± {percent(row.spread / 2)}" if known(row.spread) else ""
        parts.append(f"{row.num_samples} samples{spread}")
    for name, text in (("backend", "runs {}"), ("config", "{}"), ("limiting", "limit: {} (model)"),
                       ("flags", "flag: {}")):  # fmt: skip
        value = getattr(row, name)
        if known(value) and value:
            parts.append(text.format(value))
    lines = textwrap.wrap(" · ".join(parts), NOTE, break_on_hyphens=False)
    return "<br>".join(map(escape, lines))


def time_note(row: Any) -> str:
    """Hover text of a latency: time and spread."""
    if not known(row.value):
        return ""
    return seconds(row.value) + (f" ± {percent(row.spread / 2)}" if known(row.spread) else "")


def of_peak(fraction: Any) -> str:
    """(62 % of peak), or nothing where the peak is unknown."""
    return f" ({percent(fraction)} of peak)" if known(fraction) else ""


def rate_note(row: Any) -> str:
    """Hover text of a FLOP/s value."""
    if not known(row.value):
        return ""
    return rate(row.value) + of_peak(row.peak_fraction)


def speedup_note(row: Any) -> str:
    """Hover text of a speed-up."""
    return f"{times(row.value)} in {seconds(row.time_s)}" if known(row.value) else ""


def memory_note(row: Any) -> str:
    """Hover text of measured memory."""
    return bytes_text(row.value) if known(row.value) else ""


def predicted_note(row: Any) -> str:
    """Hover text of predicted memory."""
    return bytes_text(row.predicted) if known(row.predicted) else ""


def traffic_note(row: Any) -> str:
    """Hover text of model bytes: total, and how often the compulsory bytes."""
    tiles = f", tiles {escape(row.tiles)}" if row.tiles else ""
    return f"{bytes_text(row.value)}, {times(row.value / row.compulsory)} compulsory{tiles}"


def roof_note(row: Any) -> str:
    """Hover text of a roofline point beside its rate and intensity."""
    parts = [format_length(int(row.seqlen)) + (" (bytes counted)" if row.counted else "")]
    if known(row.roof_fraction):
        parts.append(f"{percent(row.roof_fraction)} of roof")
    if known(row.measured_fraction):
        parts.append(f"{percent(row.measured_fraction)} of measured")
    return ", ".join(parts)


def counted_note(row: Any) -> str:
    """Hover text of counted over modelled."""
    return f"{row.value:.4f} of what the model says"


def ratio_note(row: Any) -> str:
    """Hover text of one time over another."""
    return f"{row.value:.2f} ({seconds(row.time_s)} over {seconds(row.other_s)})"


def spread_note(row: Any) -> str:
    """Hover text of a spread: of which median."""
    return f"{percent(row.value)} of {seconds(row.time_s)}" if known(row.value) else ""


def energy_note(row: Any) -> str:
    """Hover text of joules per nominal TFLOP."""
    return f"{row.value:.3g} J/TFLOP" if known(row.value) else ""


def clock_note(row: Any) -> str:
    """Hover text of a clock."""
    return f"{row.value / 1e9:.3f} GHz" if known(row.value) else ""
