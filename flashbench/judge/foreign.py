"""What the readers of other tools' results share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from flashbench.judge.sides import Measured


def measured(values: Mapping[str, Sequence[float]], **more: Any) -> Measured:
    """A cell with samples by measure; without any and without a status it failed."""
    found = {name: tuple(map(float, samples)) for name, samples in values.items() if samples}
    if not found:
        more = {"status": "failed", "reason": "no value", **more}
    return Measured(samples=_getter(found), **more)


def _getter(values: Mapping[str, Sequence[float]]) -> Callable[[str], Sequence[float]]:
    return lambda name: values.get(name, ())


def texts(values: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, str]:
    """Those of ``values`` that are there, as text, by the name that ``names`` gives each."""
    return {
        ours: str(values[theirs]) for theirs, ours in names.items() if values.get(theirs) not in (None, "")
    }
