"""The summary in words: cards of headline numbers, and a paragraph per selection. Text is safe as HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from html import escape
from typing import TYPE_CHECKING, Any

from flashbench.report import words
from flashbench.units import format_length

if TYPE_CHECKING:
    from pandas import DataFrame

    from flashbench.report.sections import Section

CLAIMS: Mapping[str, tuple[str, Callable[[Any], str]]] = {
    "fastest": ("fastest, or level with the fastest", lambda row: escape(str(row["implementation"]))),
    "timed": ("cells timed", lambda row: f"{row['value']:.0f} of {row['of']:.0f}"),
    "flops_per_s": ("highest rate", lambda row: words.rate(row["value"])),
    "roof_fraction": ("of its roof, the nearest", lambda row: words.percent(row["value"])),
    "speedup_over_naive": ("largest speed-up over naive", lambda row: words.times(row["value"])),
    "memory_saving": ("less extra memory than naive", lambda row: words.times(row["value"])),
    "memory_wall": ("the memory wall", lambda row: format_length(int(row["value"]))),
}
"""How each claim of summary.headline reads: its caption, its value."""


def headline(_: Section, frame: DataFrame) -> str:
    """The big numbers as cards."""
    cards = []
    for caption, value, detail in claims(frame):
        cards.append(
            f'<div class="card"><strong>{value}</strong><span>{caption}</span><small>{detail}</small></div>'
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def claims(frame: DataFrame) -> Iterable[tuple[str, str, str]]:
    """Caption, value and detail of each headline number."""
    for item in frame.to_dict("records"):
        caption, value = CLAIMS[item["claim"]]
        rest = item["rest"] if isinstance(item["rest"], dict) else {}
        detail = ", ".join(f"{count} {escape(name)}" for name, count in rest.items())
        if item["claim"] == "timed" and words.known(item["reason"]):
            detail += f"; first of all: {escape(words.short_reason(item['reason'], 90))}"
        if item["claim"] == "fastest":
            detail = _lead(item)
        elif words.known(item["implementation"]):
            name, length = escape(str(item["implementation"])), format_length(int(item["seqlen"]))
            detail = f"{name} at {length}, {words.panel(item)}"
            if item["claim"] == "memory_wall":
                detail += f": {escape(words.short_reason(item['reason'], 60))}"
        yield caption, value(item), detail


def _lead(item: Mapping[str, Any]) -> str:
    """Of how many problems, by which backend, and how far before the next kernel."""
    parts = [f"in {item['value']:.0f} of {item['of']:.0f} problems"]
    if words.known(item["ran"]):
        parts.append(f"backend {escape(str(item['ran']))}")
    if words.known(item["lead"]):
        low, high = words.times(item["lead_low"]), words.times(item["lead_high"])
        span = f", from {low} to {high}" if low != high else ""
        parts.append(f"median {words.times(item['lead'])} the speed of the next kernel{span}")
    return "; ".join(parts)


def regimes(_: Section, frame: DataFrame) -> str:
    """A paragraph per combination of the filters."""
    several = frame["run"].nunique() > 1
    items = [
        f"<li><b>{place(item, several)}</b>: {paragraph(item)}</li>" for item in frame.to_dict("records")
    ]
    return f'<ul class="regimes">{"".join(items)}</ul>'


def place(item: Mapping[str, Any], several: bool) -> str:
    """The selection in words, with the run where there are several."""
    return words.panel(item) + (f", {escape(str(item['run']))}" if several else "")


def paragraph(item: Mapping[str, Any], strong: Callable[[str], str] = "<em>{}</em>".format) -> str:
    """Who is fastest where, how near the limit, by how much, with how much memory, what has no time.

    strong: marks the name of an implementation, which is escaped already.
    """
    parts = [_fastest(item, strong), _faster(item), _memory(item)]
    parts += [_untimed(*one) for one in item["untimed"]]
    return " ".join(filter(None, parts))


def _fastest(item: Mapping[str, Any], strong: Callable[[str], str]) -> str:
    spans = [f"{strong(escape(name))} {_span(first, last)}" for name, first, last in item["spans"]]
    beside = [f"{escape(name)} at {_at(lengths)}" for name, lengths in item["level"]]
    if beside:
        first = [name for name, *_ in item["spans"]].index(item["fastest"])
        spans[first] += f" (level with {_list(beside)})"
    ran = f" (backend {escape(str(item['ran']))}{_as(item['twins'])})" if words.known(item["ran"]) else ""
    best = words.rate(item["flops_per_s"])
    limits = []
    if words.known(item["peak_fraction"]):
        limits.append(f"{words.percent(item['peak_fraction'])} of peak")
    if words.known(item["roof_fraction"]) and item["roof_fraction"] != item["peak_fraction"]:
        limits.append(f"{words.percent(item['roof_fraction'])} of its roof")
    near = f" ({', '.join(limits)})" if limits else ""
    best_at = format_length(item["best_seqlen"])
    return (
        f"fastest {'is' if len(spans) == 1 else 'are'} {_list(spans)}; {escape(item['fastest'])}{ran}"
        f" reaches {best}{near} at {best_at}."
    )


def _as(twins: list[str]) -> str:
    return f", as {_list([escape(name) for name in twins])}" if twins else ""


def _at(lengths: list[int]) -> str:
    return f"{len(lengths)} lengths" if len(lengths) > 4 else words.lengths(lengths)


def _span(first: int, last: int) -> str:
    return (
        f"at {format_length(first)}"
        if first == last
        else f"from {format_length(first)} to {format_length(last)}"
    )


def _faster(item: Mapping[str, Any]) -> str:
    name = escape(item["fastest"])
    said = []
    if item["next_best"] != "naive":
        lead, spread = item["lead"], item["lead_spread"]
        rival, at = escape(item["next_best"]), format_length(item["lead_seqlen"])
        if words.known(spread) and abs(lead - 1) <= spread * lead:
            said.append(f"level with {rival} at {at} ({_give(lead, spread)}, within the spread)")
        else:
            said.append(f"at {_give(lead, spread)} the speed of {rival} at {at}")
    if words.known(item["speedup_high"]):
        low, high = words.times(item["speedup_low"]), _give(item["speedup_high"], item["speedup_spread"])
        lowest = "" if low == words.times(item["speedup_high"]) else f"{low} to "
        said.append(f"at {lowest}{high} that of naive" if said else f"at {lowest}{high} the speed of naive")
    return f"{name} is {_list(said)}." if said else ""


def _give(ratio: float, spread: float) -> str:
    if not words.known(spread) or not spread:
        return words.times(ratio)
    return f"{words.times(ratio)} ± {100 * spread:{'.2g' if spread < 0.995 else '.0f'}} %"


def _memory(item: Mapping[str, Any]) -> str:
    if not words.known(item["memory_ratio"]):
        return ""
    ratio, at = item["memory_ratio"], format_length(int(item["memory_seqlen"]))
    less = f"{words.times(ratio)} less" if ratio >= 1 else f"{words.times(1 / ratio)} more"
    return f"It takes {less} extra memory than naive at {at}."


def _untimed(name: str, status: str, lengths: list[int], reason: str) -> str:
    said = escape(words.short_reason(reason, 90))
    return f"{escape(name)} has no time at {_at(lengths)}: {escape(status)}, {said}."


def _list(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
