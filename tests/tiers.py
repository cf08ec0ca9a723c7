"""What of a long list the fast tier takes, and what of it was chosen."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def tiers(fast: Iterable[Any], slow: Iterable[Any]) -> list[Any]:
    """Parameters of a test, the second list's in the full suite only. A tuple is several arguments."""
    return [*fast, *(_slow(one) for one in slow)]


def every_second(pairs: list[tuple[Any, Any]]) -> list[Any]:
    """Of a shape's two dtypes one in the fast tier, the other one for the shape beside it."""
    first = [index % 4 in (0, 3) for index in range(len(pairs))]
    return [one if fast else _slow(one) for one, fast in zip(pairs, first, strict=True)]


def _slow(one: Any) -> Any:
    return pytest.param(*(one if type(one) is tuple else (one,)), marks=pytest.mark.slow)


def chosen(request: pytest.FixtureRequest, name: str) -> list[Any]:
    """Values of an argument, each once, that the tests of this module which were chosen have."""
    items = (item for item in request.session.items if getattr(item, "module", None) is request.module)
    params = (item.callspec.params for item in items if hasattr(item, "callspec"))
    return list(dict.fromkeys(found[name] for found in params if name in found))
