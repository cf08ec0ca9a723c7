"""One thing that ``doctor`` looked at."""

from __future__ import annotations

from dataclasses import dataclass

OK, WARN, PROBLEM = "ok", "warn", "problem"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """state: ok, warn or problem; todo says what to do unless it is ok."""

    name: str
    state: str
    detail: str
    todo: str = ""
