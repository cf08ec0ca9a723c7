"""Parse what people type ("64k", "1k-64k", "192KB", "5m") and format what they read.

The only place that scales: everywhere else values are SI base units and whole bytes. In lengths
``k`` and ``m`` are powers of 1024; in parsed sizes ``KB`` is 1024 bytes (as data sheets write
on-chip memory); in printed sizes GB is 1e9 and GiB is 2**30, and the text says which.

Every parse error is a SpecError (or UnknownName) that names the option, quotes the value and
says what is accepted.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from fractions import Fraction

from flashbench.errors import SpecError, UnknownName

MAX_INT = 2**31 - 1
MAX_VALUES = 4096
"""Most values that one axis may have."""

_INT_SUFFIX = {"": 1, "k": 1024, "m": 1024**2}
_BYTE_SUFFIX = {
    "": 1, "b": 1, "kb": 2**10, "kib": 2**10, "mb": 2**20, "mib": 2**20,
    "gb": 2**30, "gib": 2**30, "tb": 2**40, "tib": 2**40,
}  # fmt: skip
_SECONDS = {"h": 3600.0, "m": 60.0, "s": 1.0, "ms": 1e-3}

_INT = re.compile(r"(-?[0-9]{1,40})([km]?)", re.IGNORECASE)
_RANGE = re.compile(r"([^-+]+)-([^-+]+)(?:\+([^-+]+))?")
_BYTES = re.compile(r"([0-9]{1,18}(?:\.[0-9]{1,18})?) ?([kmgt]?i?b|)", re.IGNORECASE)
_DURATION_PART = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?)(ms|h|m|s)")

_INT_ACCEPTED = "a whole number such as 512 or 64k (k = 1024, m = 1024k)"
_AXIS_ACCEPTED = "512,1k,3k or 1k-64k (doubling) or 1k-8k+1k (step)"


def quoted(text: object, limit: int = 60) -> str:
    """The value as error messages show it: quoted, on one line, cut after ``limit`` characters."""
    return repr(cut(str(text), limit))


def cut(text: str, limit: int = 60) -> str:
    """The text, with ``...`` for what is beyond ``limit`` characters."""
    return text if len(text) <= limit else text[:limit] + "..."


def _to_int(text: str) -> int | None:
    found = _INT.fullmatch(text.strip())
    return int(found[1]) * _INT_SUFFIX[found[2].lower()] if found else None


def parse_int(text: str, option: str, *, minimum: int = 1, maximum: int = MAX_INT) -> int:
    """A whole number, "64k" being 65536. Raises SpecError, also outside minimum..maximum."""
    value = _to_int(text)
    if value is None:
        raise SpecError(f"{option} {quoted(text)}: not a whole number; accepted: {_INT_ACCEPTED}")
    if not minimum <= value <= maximum:
        raise SpecError(f"{option} {quoted(text)}: out of range; accepted: {minimum} to {maximum}")
    return value


def parse_axis(text: str, option: str, *, minimum: int = 1, maximum: int = MAX_INT) -> tuple[int, ...]:
    """The values of an axis in the order given: "512,1k,3k", "1k-64k" (doubling), "1k-8k+1k" (step).

    The forms mix by comma. Raises SpecError for an empty list, a value given twice, a range that
    does not land on its end, a value outside minimum..maximum, and more than MAX_VALUES values.
    """
    values: list[int] = []
    for item in _items(text, option, _AXIS_ACCEPTED):
        for value in _axis_item(item, text, option):
            if not minimum <= value <= maximum:
                raise SpecError(
                    f"{option} {quoted(text)}: {value} is out of range; accepted: {minimum} to {maximum}"
                )
            values.append(value)
            if len(values) > MAX_VALUES:
                raise SpecError(f"{option} {quoted(text)}: too many values; accepted: at most {MAX_VALUES}")
    _no_duplicates(values, text, option)
    return tuple(values)


def _axis_item(item: str, text: str, option: str) -> Iterable[int]:
    single = _to_int(item)
    if single is not None:
        return (single,)
    span = _RANGE.fullmatch(item)
    start, end, step = (_to_int(part or "") for part in span.groups()) if span else (None, None, None)
    if span is None or start is None or end is None or (span[3] and step is None):
        raise SpecError(f"{option} {quoted(text)}: {quoted(item)} is no value; accepted: {_AXIS_ACCEPTED}")
    if start < 1 or end <= start:
        raise SpecError(
            f"{option} {quoted(text)}: {quoted(item)} must rise from 1 or more; accepted: {_AXIS_ACCEPTED}"
        )
    if step == 0:
        raise SpecError(f"{option} {quoted(text)}: the step of {quoted(item)} is 0; accepted: 1 or more")
    if step is None:
        return _doubling(start, end, text, option)
    return _stepping((start, end, step), text, option)


def _doubling(start: int, end: int, text: str, option: str) -> Iterator[int]:
    value = start
    while value < end:
        yield value
        value *= 2
    if value != end:
        raise SpecError(
            f"{option} {quoted(text)}: doubling from {start} passes {end} without reaching it;"
            f" accepted: {_AXIS_ACCEPTED}",
            hint=f"end at {format_length(value // 2)} or {format_length(value)}, or list the values",
        )
    yield value


def _stepping(span: tuple[int, int, int], text: str, option: str) -> Iterator[int]:
    start, end, step = span
    if (end - start) % step:
        below = end - (end - start) % step
        raise SpecError(
            f"{option} {quoted(text)}: steps of {step} from {start} pass {end} without reaching it;"
            f" accepted: {_AXIS_ACCEPTED}",
            hint=f"end at {format_length(below)} or {format_length(below + step)}, or list the values",
        )
    return iter(range(start, end + 1, step))


PROBLEMS = "--seqlens, --head-dims and other axes"
"""For ``limit``: of problems that were multiplied out already."""


def limit(sizes: Mapping[str, int], most: int, what: str) -> None:
    """Raise SpecError, naming the longest, where axes multiply to more than most. sizes: by option."""
    count = math.prod(sizes.values())
    if count > most:
        longest = max(sizes, key=lambda option: sizes[option])
        raise SpecError(
            f"{longest}: {sizes[longest]} values, and the axes multiply to {count} {what}; accepted: at most"
            f" {most}"
        )


def parse_names(text: str, option: str, known: Collection[str] | None) -> tuple[str, ...]:
    """Names from a comma list, in the order given, each among ``known``; None: any.

    Raises SpecError for an empty list or a name given twice, UnknownName for an unknown one.
    """
    names = list(_items(text, option, f"a comma list of {', '.join(known or ('names',))}"))
    for name in names:
        if known is not None and name not in known:
            raise UnknownName(option, cut(name), known)
    _no_duplicates(names, text, option)
    return tuple(names)


def parse_choice(text: str, option: str, known: Collection[str]) -> str:
    """One of ``known``. Raises UnknownName."""
    if text.strip() not in known:
        raise UnknownName(option, cut(text), known)
    return text.strip()


def _items(text: str, option: str, accepted: str) -> Iterable[str]:
    items = [item.strip() for item in text.split(",")]
    if items == [""]:
        raise SpecError(f"{option} {quoted(text)}: the list is empty; accepted: {accepted}")
    if "" in items:
        raise SpecError(f"{option} {quoted(text)}: a comma without a value; accepted: {accepted}")
    return items


def _no_duplicates(values: Iterable[object], text: str, option: str) -> None:
    seen: set[object] = set()
    for value in values:
        if value in seen:
            raise SpecError(f"{option} {quoted(text)}: {value} is given twice; accepted: every value once")
        seen.add(value)


def parse_bytes(text: str, option: str) -> int:
    """Bytes: "192KB", "192KiB", "196608", "0.1875MiB" are all 196608 (KB = 1024 bytes).

    Raises SpecError unless it is a whole number of bytes, 1 or more.
    """
    accepted = "a size such as 192KB, 192KiB or 196608 (KB = KiB = 1024 bytes)"
    found = _BYTES.fullmatch(text.strip())
    if found is None:
        raise SpecError(f"{option} {quoted(text)}: not a size; accepted: {accepted}")
    value = Fraction(found[1]) * _BYTE_SUFFIX[found[2].lower()]
    if value.denominator != 1 or value < 1:
        raise SpecError(f"{option} {quoted(text)}: not a whole number of bytes above 0; accepted: {accepted}")
    return int(value)


def parse_byte_axis(text: str, option: str) -> tuple[int, ...]:
    """Sizes in the order given: "64KB,192KB" lists, "16KB-512KB" doubles and must land on its end.

    Raises SpecError for an empty list, a size given twice, and a range that misses its end.
    """
    accepted = "sizes such as 64KB,192KB or 16KB-512KB (doubling)"
    values: list[int] = []
    for item in _items(text, option, accepted):
        low, dash, high = item.partition("-")
        label = f"{option} {quoted(text)}:" if low.strip() != text.strip() else option
        start = parse_bytes(low, label)
        end = parse_bytes(high, label) if dash else start
        if dash and end <= start:
            raise SpecError(f"{option} {quoted(text)}: {quoted(item)} must rise; accepted: {accepted}")
        value = start
        while value < end:
            values.append(value)
            value *= 2
        if value != end:
            raise SpecError(
                f"{option} {quoted(text)}: doubling from {low.strip()} passes {high.strip()} without reaching"
                f" it; accepted: {accepted}"
            )
        values.append(value)
        if len(values) > MAX_VALUES:
            raise SpecError(f"{option} {quoted(text)}: too many values; accepted: at most {MAX_VALUES}")
    _no_duplicates(values, text, option)
    return tuple(values)


def parse_duration(text: str, option: str) -> float:
    """Seconds: "5m", "90s", "1h30m", "1.5h". Raises SpecError without a unit or for 0."""
    accepted = "a time such as 90s, 5m or 1h30m"
    rest, seconds, order = text.strip(), 0.0, list(_SECONDS)
    while found := _DURATION_PART.match(rest):
        if found[2] not in order:
            break
        seconds += float(found[1]) * _SECONDS[found[2]]
        order, rest = order[order.index(found[2]) + 1 :], rest[found.end() :]
    if rest or not text.strip():
        raise SpecError(f"{option} {quoted(text)}: not a time; accepted: {accepted}")
    if seconds <= 0:
        raise SpecError(f"{option} {quoted(text)}: must be above 0; accepted: {accepted}")
    return seconds


def many(count: int, noun: str) -> str:
    """``1 cell``, ``0 cells``, ``2 cells``."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def format_length(value: int) -> str:
    """A length as it is typed: 65536 -> "64k", 1000 -> "1000", 1048576 -> "1m"."""
    for suffix, scale in (("m", 1024**2), ("k", 1024)):
        if value and value % scale == 0:
            return f"{value // scale}{suffix}"
    return str(value)


def _three_digits(value: float) -> str:
    """About three significant digits, without an exponent: 1.23, 12.3, 123, 1234."""
    magnitude = abs(value)
    decimals = 2 if magnitude < 9.995 else 1 if magnitude < 99.95 else 0
    return f"{value:.{decimals}f}"


def _scaled(value: float, base: float, prefixes: tuple[str, ...]) -> tuple[float, str]:
    index = 0
    while index + 1 < len(prefixes) and abs(value) >= base * (1 - 0.0005):
        value, index = value / base, index + 1
    return value, prefixes[index]


_SI = ("", "k", "M", "G", "T", "P", "E")


def format_count(value: float, unit: str = "") -> str:
    """A count with an SI prefix (k = 1000): 4.295e9, "FLOP" -> "4.29 GFLOP"; below 1000 as it is."""
    scaled, prefix = _scaled(value, 1000.0, _SI)
    text = str(int(value)) if not prefix and float(value).is_integer() else _three_digits(scaled)
    return f"{text} {prefix}{unit}".rstrip()


def format_rate(value: float, unit: str) -> str:
    """A rate with an SI prefix: 6.5e14, "FLOP/s" -> "650 TFLOP/s"; 3.35e12, "B/s" -> "3.35 TB/s"."""
    return format_count(value, unit)


def format_bytes(value: float, *, binary: bool = False) -> str:
    """Bytes for reading: "275 GB" (GB = 1e9), or with ``binary`` "256 GiB" (GiB = 2**30)."""
    if not binary:
        return format_count(value, "B")
    scaled, prefix = _scaled(value, 1024.0, ("", "Ki", "Mi", "Gi", "Ti", "Pi", "Ei"))
    return f"{_three_digits(scaled) if prefix else str(int(value))} {prefix}B"


def format_seconds(value: float) -> str:
    """Seconds for reading: "4.30 us", "1.23 ms", "12.3 s", "1m 30s", "2h 05m"."""
    if value >= 3599.5:
        minutes = round(value / 60)
        return f"{minutes // 60}h {minutes % 60:02d}m"
    if value >= 99.5:
        return f"{round(value) // 60}m {round(value) % 60:02d}s"
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if value >= scale * (1 - 0.0005):
            return f"{_three_digits(value / scale)} {unit}"
    return f"{_three_digits(value / 1e-9)} ns" if value else "0 s"
