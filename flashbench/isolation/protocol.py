"""What the two processes say to each other: JSON, one message a line, so that nothing read is ever executed.

How a line is told from what an implementation writes to the pipe says ``wire.py``.

To the worker, first ``{"target", "options", "elapsed_s", "times", "implementations"}``, then any of

    {"do": "overheads", "cupti": bool}
    {"do": "precompile", "cells": [...]}
    {"do": "cells", "cells": [...], "alone": why one is measured apart from the others, or null}

From the worker ``{"ready": true, "pid": …, "thread": the one that measures}``, then for each of these any
number of

    {"at": cell}          whose turn it is; the last one is to blame for what happens next
    {"record": record}    what became of a cell
    {"warning": text}     what its log says

and at last ``{"done": …}``, ``{"lost": why}``, ``{"left": bytes, "done": …}`` or ``{"raised": why}``; after
each but the first the process is of no more use. What is none of that, or comes out of turn, is held
against the cell whose turn it is (``told``).
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from flashbench import tuned
from flashbench.isolation import death
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.profilers import Policy
from flashbench.record import Record, Samples
from flashbench.record_json import json_able, record_from_json
from flashbench.runner import RunOptions, what

Message = Mapping[str, Any]


def told(message: Message, cells: Collection[Cell], measured: Collection[Cell]) -> Cell | Record | None:
    """Whose turn it is or what became of one of the cells; None for what ends them, all or some.

    measured: those that have their record. Raises death.Ended for what is no such message.
    """
    try:
        if message.keys() == {"at"}:
            cell = Cell.from_json(message["at"])
            if cell in cells:
                return cell
        elif message.keys() == {"record"}:
            record = record_from_json(message["record"])
            if record.cell in cells and record.cell not in measured:
                return record
        elif _ends(message) and (message.keys() != {"done"} or len(measured) == len(cells)):
            return None
    except Exception as error:  # as many kinds as there are ways to be wrong
        raise death.Ended(said=f"its process said what cannot be: {what(error)}") from None
    raise death.Ended(said=f"its process said what cannot be: {repr([*message])[:100]}")


def _ends(message: Message) -> bool:
    if message.keys() == {"left", "done"}:
        return type(message["left"]) is int and 0 <= message["left"] < 2**63
    why = message.keys() in ({"lost"}, {"raised"})
    return message.keys() == {"done"} or (why and all(isinstance(said, str) for said in message.values()))


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
