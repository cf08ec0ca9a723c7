"""flashbench: attention implementations measured beside an I/O model. Importing this costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashbench.declared import implementation
    from flashbench.errors import FlashbenchError
    from flashbench.iomodel import Estimate, Traffic, estimate
    from flashbench.problem import Cell, Problem
    from flashbench.record import Record
    from flashbench.sweep import Sweep
    from flashbench.whatif import IoTable, io_table

__version__ = "0.1.0"

_HOME = {
    "Cell": "problem",
    "Estimate": "iomodel",
    "FlashbenchError": "errors",
    "IoTable": "whatif",
    "Problem": "problem",
    "Record": "record",
    "Sweep": "sweep",
    "Traffic": "iomodel",
    "estimate": "iomodel",
    "implementation": "declared",
    "io_table": "whatif",
}

__all__ = [
    "Cell",
    "Estimate",
    "FlashbenchError",
    "IoTable",
    "Problem",
    "Record",
    "Sweep",
    "Traffic",
    "__version__",
    "estimate",
    "implementation",
    "io_table",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
