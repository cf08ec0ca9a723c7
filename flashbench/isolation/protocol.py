"""What the two processes say to each other: JSON, one message a line, so that nothing read is ever executed.

To the worker, first ``{"target", "options", "elapsed_s", "times", "implementations"}``, then any of

    {"do": "overheads", "cupti": bool}
    {"do": "precompile", "cells": [...]}
    {"do": "cells", "cells": [...], "alone": why one is measured apart from the others, or null}

From the worker ``{"ready": true, "pid": …}``, then for each of these any number of

    {"at": cell}          whose turn it is; the last one is to blame for what happens next
    {"record": record}    what became of a cell
    {"warning": text}     what its log says

and at last ``{"done": …}``, ``{"lost": why}``, ``{"left": bytes, "done": …}`` or ``{"raised": why}``; after
each but the first the process is of no more use.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from flashbench import tuned
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.profilers import Policy
from flashbench.record import Record, Samples
from flashbench.record_json import json_able
from flashbench.runner import RunOptions

Message = Mapping[str, Any]


def setup_to_json(
    target: Target, options: RunOptions, *, elapsed_s: float, timed: Iterable[Record], names: Iterable[str]
) -> dict[str, Any]:
    """The first message. timed: rows so far, whose times later ones are held to."""
    plain = {field.name: getattr(options, field.name) for field in fields(options)}
    plain["policy"] = asdict(options.policy) if options.policy else None
    plain["tuned"] = str(options.tuned.path) if options.tuned else None
    return {
        "target": asdict(target),
        "options": json_able(plain),
        "elapsed_s": elapsed_s,
        "times": [
            {"cell": record.cell.to_json(), "samples": asdict(record.samples)}
            for record in timed
            if record.samples
        ],
        "implementations": list(names),
    }


def target_from_json(value: Message) -> Target:
    """The target of the first message."""
    capability = value["capability"]
    return Target(**{**value, "capability": None if capability is None else tuple(capability)})


def options_from_json(value: Message, target: Target) -> RunOptions:
    """The options of the first message, the file of --tuned read anew."""
    policy, file = value["policy"], value["tuned"]
    return RunOptions(
        **{
            **value,
            "policy": Policy(**policy) if policy else None,
            "tuned": tuned.read(Path(file), target) if file else None,
        }
    )


def times_from_json(values: Iterable[Message]) -> dict[Cell, Samples]:
    """Times of earlier cells."""
    return {Cell.from_json(one["cell"]): samples_from_json(one["samples"]) for one in values}


def samples_from_json(value: Message) -> Samples:
    """Samples as ``asdict`` has them."""
    return Samples(**{**value, "samples_s": tuple(value["samples_s"])})
