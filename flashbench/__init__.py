"""flashbench: attention implementations measured beside an I/O model. Importing this costs nothing."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashbench.api import Judgement, Modelled, Results, compare, io_model, run
    from flashbench.declared import implementation
    from flashbench.errors import FlashbenchError
    from flashbench.iomodel import Estimate, Traffic, estimate
    from flashbench.kernels._op import attention
    from flashbench.kernels._philox import dropout_mask
    from flashbench.problem import Cell, Problem
    from flashbench.record import Record
    from flashbench.sweep import Sweep
    from flashbench.whatif import IoTable, io_table

__version__ = "0.1.0"

_HOME = {
    "Cell": "problem",
    "Judgement": "api",
    "Modelled": "api",
    "Results": "api",
    "attention": "kernels._op",
    "compare": "api",
    "dropout_mask": "kernels._philox",
    "io_model": "api",
    "run": "api",
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
    "Judgement",
    "Modelled",
    "Problem",
    "Record",
    "Results",
    "Sweep",
    "Traffic",
    "__version__",
    "attention",
    "compare",
    "dropout_mask",
    "estimate",
    "implementation",
    "io_model",
    "io_table",
    "run",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    found = getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = found  # from now on a plain attribute, which torch.compile looks up, too
    return found


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
