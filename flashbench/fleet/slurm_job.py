"""What runs in a job of a Slurm cluster: a bench of the card that Slurm gave to it."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from flashbench import environment
from flashbench.fleet.mailbox import SILENT_S, Beat, Mailbox, Pulse
from flashbench.isolation import Bench, protocol
from flashbench.problem import Cell
from flashbench.record import Record
from flashbench.record_json import json_able, record_to_json
from flashbench.runner import LOST

DRIVER = "driver"
"""The name of the process that deals groups out, among those that show life."""
LOOK_EVERY_S = 0.5

_CARDS = ("SLURM_STEP_GPUS", "SLURM_JOB_GPUS", "CUDA_VISIBLE_DEVICES")
"""Where Slurm says which card of the host the job has, the surest first."""


@dataclass(frozen=True, kw_only=True)
class Job:
    """Takes groups from the mailbox in folder until there is none. submitit pickles it, and calls it there.

    target_type: ``cuda`` or ``cpu``. command: starts a worker, for tests. Called, it returns how many groups
    it measured, and raises where its card can measure nothing.
    """

    folder: str
    target_type: str
    command: Sequence[str] | None = None

    def __call__(self) -> int:
        """Measure until nothing is left, the sweep is over, or nobody is there to take rows."""
        box, name = Mailbox(Path(self.folder)), _me()
        if box.over:
            return 0
        box.give_back(name)  # of this job before it was started again
        with Beat(box, name):
            target = environment.target(self.target_type)
            facts = {**environment.collect(target), "device": _device(self.target_type)}
            box.write(f"cards/{name}.json", {"target": asdict(target), "facts": json_able(facts)})
            driver = Pulse(box, DRIVER)
            while (setup := box.read("setup.json")) is None:
                if box.over or driver.silent_s > SILENT_S:
                    return 0
                time.sleep(LOOK_EVERY_S)
            options = protocol.options_from_json(setup["options"], target)
            # the time budget is the driver's to keep: it knows when the sweep began
            options = replace(options, environment=facts, time_budget_s=None)
            with Bench(target, options, command=self.command) as bench:
                return _measured(box, name, bench, driver)

    def checkpoint(self) -> Any:
        """What submitit asks for when Slurm wants the card back: the job goes to the queue again, as it was.

        The group at work is the next that somebody gets.
        """
        import submitit

        Mailbox(Path(self.folder)).give_back(_me())
        return submitit.helpers.DelayedSubmission(self)


def _measured(box: Mailbox, name: str, bench: Bench, driver: Pulse) -> int:
    count = 0
    while not box.over and driver.silent_s <= SILENT_S and (claimed := box.claim(name)):
        number, group = claimed
        start, rows = time.monotonic(), list[Record]()
        bench.run([Cell.from_json(cell) for cell in group["cells"]], rows.append)
        skipped = [row.reason or "" for row in rows if row.status == "skipped"]
        if lost := next((reason for reason in skipped if reason.startswith(LOST)), None):
            raise RuntimeError(lost)  # the group is another card's to try
        said = {"rows": [record_to_json(row) for row in rows], "wall_s": time.monotonic() - start}
        box.answer(number, name, {**said, "facts": bench.options.environment})
        count += 1
    return count


def _me() -> str:
    """The job's number, as the driver knows it."""
    import submitit

    return str(submitit.JobEnvironment().job_id)


def _device(target_type: str) -> str:
    """The card by its number on the host, where Slurm tells; on the CPU this process."""
    if target_type == "cpu":
        return f"cpu:{os.getpid()}"
    told = next((os.environ[name] for name in _CARDS if os.environ.get(name)), "0")
    return f"cuda:{told.split(',')[0]}"
