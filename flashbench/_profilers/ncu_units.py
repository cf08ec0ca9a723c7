"""Nsight Compute's numbers and units: a cell's text in bytes, seconds, hertz or plain counts.

What could be read in two ways is refused rather than guessed: a decimal comma, a unit that is not known.
"""

from __future__ import annotations

import math
import re

DECIMAL = {"": 1.0, "K": 1e3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
"""Nsight Compute's multiples are decimal, also of bytes: Kbyte, KB."""
BINARY = {"Ki": 2.0**10, "Mi": 2.0**20, "Gi": 2.0**30, "Ti": 2.0**40, "Pi": 2.0**50}

SECONDS = {
    **dict.fromkeys(("ps", "psecond"), 1e-12),
    **dict.fromkeys(("ns", "nsec", "nsecond"), 1e-9),
    **dict.fromkeys(("us", "µs", "μs", "usec", "usecond"), 1e-6),
    **dict.fromkeys(("ms", "msec", "msecond"), 1e-3),
    **dict.fromkeys(("s", "sec", "second"), 1.0),
}  # fmt: skip

COUNTS = ("inst", "instruction", "cycle", "sector", "request", "wavefront", "warp", "thread", "block",
          "register", "wave", "hz", "Hz", "bit", "SM", "grid", "op", "flop", "access", "event", "sample",
          "cluster", "device", "pass", "%", "ratio")  # fmt: skip
"""What is counted one by one; no conversion, but the multiples."""

_BYTES = re.compile(r"([KkMGTP]?)bytes?|([KMGTPk]?i?)B")
_COUNTED = re.compile(rf"([KkMGTP]?)(?:{'|'.join(sorted(COUNTS, key=len, reverse=True))})s?")
_NONE = ("", "(!)", "n/a")
_NUMBER = re.compile(r"[-+]?(?:\d+|\d{1,3}(?:[,'\u202f\u00a0]\d{3})+)(?:\.\d*)?(?:[eE][-+]?\d+)?|[-+]?\.\d+")
_NUMERIC = re.compile(r"[-+]?\d[\d.,'\u202f\u00a0 ]*")


def number(text: str, unit: str) -> float | None:
    """The value in base units; None for n/a, an empty cell and what is no finite number.

    ``("500", "Mbyte")`` is 5e8: the multiples are decimal. ``("1,024", "sector")`` is 1024. Raises
    ValueError for a unit that is not known, a number that a decimal comma makes ambiguous
    (``1.234,5``) and one below zero, as nothing that is counted is.
    """
    text = text.strip()
    if not _NUMBER.fullmatch(text):
        if _NUMERIC.fullmatch(text):
            raise ValueError(
                f"{text!r} is ambiguous; accepted: a decimal point, and commas between thousands"
            )
        return None
    value = float(re.sub(r"[,'\u202f\u00a0]", "", text))
    if not math.isfinite(value):
        return None
    if value < 0:
        raise ValueError(f"{text!r} is below zero; accepted: what a counter can be")
    return value * factor(unit)


def expected(metric: str) -> str:
    """What a metric is counted in, by its name: ``byte``, ``second`` or, of all others, ``""``."""
    if "per_" in metric or metric.endswith((".pct", ".ratio")):
        return ""
    if "bytes" in metric:
        return "byte"
    return "second" if metric.startswith("gpu__time_duration") else ""


def fits(metric: str, unit: str) -> bool:
    """Whether a unit, if it is one at all, is of the kind that the metric is counted in.

    A metric of neither bytes nor time may be in anything but those. Shares of something (``Kbyte/block``)
    are of its kind.
    """
    one, of = unit.partition("/")[0].strip(), expected(metric)
    found = "byte" if _BYTES.fullmatch(one) else "second" if one in SECONDS else ""
    if "/" in unit and unit.split("/")[1].strip() in SECONDS:
        found = ""  # a rate
    if of:
        return found == of
    return not found or "per_" in metric or metric.endswith((".pct", ".ratio")) or "size" in metric


def factor(unit: str) -> float:
    """What one of the unit is in base units: ``Kbyte/block`` 1000, ``usecond`` 1e-6, ``sector`` 1.

    Raises ValueError for a unit that is not known.
    """
    above, *below = (part.strip() for part in unit.split("/"))
    if unit.strip() in _NONE:
        return 1.0
    found = [_single(part) for part in (above or "inst", *below)]
    if None in found or len(found) > 2:
        raise ValueError(
            f"the unit {unit!r} is not known; accepted: byte, B, second, cycle, inst, sector, … with the"
            " multiples of Nsight Compute (Kbyte, MB, MiB, usecond), and such a unit per another"
        )
    return math.prod([found[0] or 1.0, *(1 / (one or 1.0) for one in found[1:])])


def _single(unit: str) -> float | None:
    if unit in SECONDS:
        return SECONDS[unit]
    if found := _BYTES.fullmatch(unit):
        return (DECIMAL | BINARY).get(found.group(1) or found.group(2) or "")
    if found := _COUNTED.fullmatch(unit):
        return DECIMAL[found.group(1)]
    return None
