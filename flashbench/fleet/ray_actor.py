"""What runs on a node of a Ray cluster: a bench of the card that Ray gave to this process."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from flashbench import environment
from flashbench.isolation import Bench, protocol
from flashbench.problem import Cell
from flashbench.record import Record
from flashbench.record_json import json_able, record_to_json


class Measurer:
    """An actor. Ray shows it one GPU (CUDA_VISIBLE_DEVICES), or none where it measures on the CPU.

    target_type: ``cuda`` or ``cpu``. command: starts a worker, for tests.
    """

    def __init__(self, target_type: str, command: Sequence[str] | None = None) -> None:
        self._target = environment.target(target_type)
        self._facts = {**environment.collect(self._target), "device": _device(target_type)}
        self._command = command
        self._bench: Bench | None = None

    def about(self) -> dict[str, Any]:
        """The card: ``target`` and ``facts`` as JSON."""
        return {"target": asdict(self._target), "facts": json_able(self._facts)}

    def measure(self, options: Mapping[str, Any], cells: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """``rows`` of the cells, and ``wall_s`` that they took here.

        options: as of protocol.setup_to_json, those of the first call.
        """
        start = time.monotonic()
        if self._bench is None:
            known = protocol.options_from_json(options, self._target)
            # the time budget is the driver's to keep: it knows when the sweep began
            own = replace(known, environment=self._facts, time_budget_s=None)
            self._bench = Bench(self._target, own, command=self._command)
        rows: list[Record] = []
        self._bench.run([Cell.from_json(cell) for cell in cells], rows.append)
        return {"rows": [record_to_json(row) for row in rows], "wall_s": time.monotonic() - start}


def _device(target_type: str) -> str:
    """The card by its number on the host; on the CPU this process."""
    if target_type == "cpu":
        return f"cpu:{os.getpid()}"
    import ray

    return f"cuda:{ray.get_gpu_ids()[0]}"
