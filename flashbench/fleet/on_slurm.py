"""A sweep on a Slurm cluster: jobs of one card each, which take groups from a folder (``mailbox.py``).

    with OnSlurm(jobs=8, folder=Path("sweep/slurm/1")) as fleet:
        fleet.options = RunOptions(environment=fleet.facts)
        fleet.run(cells, on_record, on_progress)

Jobs are submitted at once, as an array, and begin whenever Slurm has a card for them: those that come late
find fewer groups left. A job holds its card until nothing is left to take, and keeps one worker. This process
collects the rows of a group when it is done. A job that is preempted or out of time gives its group back and
goes to the queue again; one that is lost is replaced, and its group measured elsewhere, from its start. Where
this process is lost, jobs end with their groups, and resuming its file measures the rest.
"""

from __future__ import annotations

import logging
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from flashbench import runner, units
from flashbench._runner.outcomes import duration, what
from flashbench.errors import UnavailableError
from flashbench.fleet.cards import refuse_other, row_facts
from flashbench.fleet.deal import Group, longest_first
from flashbench.fleet.mailbox import SILENT_S, Beat, Mailbox, Pulse
from flashbench.fleet.slurm_job import DRIVER, Job
from flashbench.fleet.slurm_queue import Queue, how_it_ended
from flashbench.isolation import Bench, protocol
from flashbench.problem import Cell
from flashbench.record import Record
from flashbench.record_json import record_from_json
from flashbench.runner import LOST, OnProgress, OnRecord, RunOptions

log = logging.getLogger("flashbench")

TRIES = 3
"""A group that was lost with its job so often has rows that say so."""
FAILURES = 5
"""So many jobs in a row that end without a row are the end of the sweep."""
LOOK_EVERY_S = 0.5
WAITING = ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SUSPENDED")
"""States of a job that will begin (again) by itself."""
GO_HOME_S = 10.0
"""What jobs are given to end by themselves once all is measured."""


@dataclass(eq=False, kw_only=True)
class _Hand:
    """A job that was submitted. facts: of its card, once it has one."""

    job: Any
    pulse: Pulse
    facts: Mapping[str, Any] | None = None

    @property
    def name(self) -> str:
        return str(self.job.job_id)


class OnSlurm:
    """Where cells are measured, as a Bench.

    jobs: how many. folder: on a file system that all nodes have; it is made, and gone once all went well.
    arguments: of sbatch (``slurm_queue.parse``). target_type: ``cuda`` or ``cpu``. command: starts a worker,
    executor: makes one of submitit's of a folder, both for tests. Waits for the first card as long as it
    takes; raises UnavailableError where no job can be submitted, or none gets that far.

    target, facts: of the first card. options: to be set before ``run``. calls_s: what groups took in jobs.
    """

    def __init__(
        self, *, jobs: int, folder: Path, arguments: Mapping[str, str] | None = None,
        target_type: str = "cuda", command: Sequence[str] | None = None, executor: Any = None,
    ) -> None:  # fmt: skip
        self._box = Mailbox(folder.resolve())
        self._wanted = jobs
        self._queue = Queue(
            self._box.folder / "jobs", on_gpu=target_type == "cuda", arguments=arguments or {},
            executor=executor,
        )  # fmt: skip
        self._job = Job(folder=str(self._box.folder), target_type=target_type, command=command)
        self._hands: dict[str, _Hand] = {}
        self._cards: dict[str, Mapping[str, Any]] = {}
        self._open: dict[int, Group] = {}
        self._begun = set[int]()
        self._worked = set[tuple[str, str]]()
        self._beside = defaultdict[int, set[str]](set)
        self._lost = defaultdict[int, list[str]](list)
        self._failed, self._whole = 0, True
        self.options = RunOptions()
        self.calls_s = 0.0
        self._box.make()
        self._beat = Beat(self._box, DRIVER)
        self._beat.__enter__()
        try:
            self._submit(jobs)
            self.target, self.facts = self._first()
        except BaseException:
            self._whole = False
            self._end()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._whole &= kind is None
        self._end()

    def overheads(self, *, cupti: bool) -> dict[str, Any]:
        """Nothing: they would be those of one card of several."""
        return {}

    def run(
        self,
        cells: Sequence[Cell],
        on_record: OnRecord,
        on_progress: OnProgress = lambda *_: None,
        stop: Callable[[], bool] = runner.never,
    ) -> dict[str, float]:
        """Measure the cells as Bench.run does, rows of a group together when it is done.

        Of what it returns, workers is how many cards measured something.
        """
        start, told = time.monotonic(), 0
        close_earlier(self._box.folder)
        self._deal(longest_first(cells, self.target, self.options))
        while self._open:
            if stop():
                self._withdrawn()
            for row in self._over_budget(time.monotonic() - start):
                on_record(row)
            for group in self._look():
                on_progress(told, len(cells), group[0])
                told += len(group)
            for rows in (self._collected(), self._gone()):
                for row in rows:
                    on_record(row)
            if self._open:
                time.sleep(LOOK_EVERY_S)
        return {"wall_s": time.monotonic() - start, "workers": float(len(self._worked))}

    def _submit(self, count: int) -> None:
        for job in self._queue.submit(count, self._job):
            name = str(job.job_id)
            self._hands[name] = _Hand(job=job, pulse=Pulse(self._box, name))

    def _first(self) -> tuple[Any, Mapping[str, Any]]:
        """Target and facts of the first card that a job has."""
        while True:
            for hand in list(self._hands.values()):
                if self._card(hand):
                    card = self._box.read(f"cards/{hand.name}.json")
                    assert card is not None
                    return protocol.target_from_json(card["target"]), card["facts"]
                if (reason := self._over(hand)) is not None:
                    self._fail(hand, reason or f"job {hand.name} left before it had a card")
            time.sleep(LOOK_EVERY_S)

    def _deal(self, groups: Iterable[Group]) -> None:
        """Put groups where jobs find them, the longest first, and say that they may begin."""
        for number, group in enumerate(groups):
            self._open[number] = tuple(group)
            self._put(number)
        setup = protocol.setup_to_json(self.target, self.options, elapsed_s=0.0, timed=(), names=())
        self._box.write("setup.json", {"options": setup["options"]})

    def _put(self, number: int) -> None:
        self._box.write(f"todo/{number:06d}.json", {"cells": [cell.to_json() for cell in self._open[number]]})

    def _card(self, hand: _Hand) -> bool:
        """Whether the job has told of its card."""
        if hand.facts is None and (card := self._box.read(f"cards/{hand.name}.json")):
            refuse_other(card["facts"], "slurm")
            hand.facts = self._cards[hand.name] = card["facts"]
        return hand.facts is not None

    def _look(self) -> list[Group]:
        """See who is at work beside whom; the groups that were begun since."""
        here = {**self._box.numbers("done"), **self._box.numbers("taken")}
        for hand in self._hands.values():
            self._card(hand)
        hosts = {
            number: (facts["host"], str(facts["device"]))
            for number, job in here.items()
            if (facts := self._cards.get(job))
        }
        for number, (host, device) in hosts.items():
            self._beside[number] |= {one for there, one in hosts.values() if there == host} - {device}
        begun = [number for number in here if number in self._open and number not in self._begun]
        self._begun.update(begun)
        return [self._open[number] for number in begun]

    def _collected(self) -> Iterable[Record]:
        """The rows that jobs have put down; of a group that two have measured those of one."""
        for number, name in self._box.numbers("done").items():
            if (said := self._box.read(f"done/{number:06d}@{name}.json")) is None:
                continue  # a network file system shows it before its content
            if number in self._open:
                self._cards[name] = said["facts"]  # of a job that began again, another than before
                refuse_other(said["facts"], "slurm")
                self._worked.add((said["facts"]["host"], said["facts"]["device"]))
                more = row_facts(said["facts"], sorted(self._beside[number]))
                self._failed = 0
                self.calls_s += said["wall_s"]
                del self._open[number]
                for row in said["rows"]:
                    yield replace(record_from_json(row), environment=more)
            if number not in self._open:
                self._box.forget(number, name)

    def _gone(self) -> Iterable[Record]:
        """See which jobs are over, have their groups measured elsewhere; rows of those lost too often."""
        for hand in list(self._hands.values()):
            if (reason := self._over(hand)) is None:
                continue
            self._free(hand, reason)
            if hand.job.state in WAITING:
                hand.pulse = Pulse(self._box, hand.name)
            elif reason:
                self._fail(hand, reason)
            else:
                del self._hands[hand.name]
        for number in [one for one, why in self._lost.items() if len(why) >= TRIES and one in self._open]:
            if self._box.withdraw(number):
                said = f"{LOST}: {TRIES} times with the job it ran in: {self._lost[number][-1]}"
                yield from self._rows(self._open.pop(number), {"status": "skipped", "reason": said})
        left = len(self._box.numbers("todo"))
        if (more := min(self._wanted - len(self._hands), left)) > 0:
            self._submit(more)

    def _over(self, hand: _Hand) -> str | None:
        """None while the job waits or lives; else why it is gone, or "" where it had nothing left to do."""
        if hand.pulse.silent_s > SILENT_S and hand.pulse.begun:
            with suppress(Exception):
                hand.job.get_info(mode="force")
            if hand.job.state not in WAITING:
                with suppress(Exception):
                    hand.job.cancel(check=False)
            return f"job {hand.name} has shown no life for {duration(SILENT_S)}"
        return how_it_ended(hand.job) if hand.job.done() else None

    def _free(self, hand: _Hand, reason: str) -> None:
        """What the job has taken is somebody else's to take."""
        for number in self._box.give_back(hand.name):
            self._lost[number].append(reason or f"job {hand.name} left it")

    def _fail(self, hand: _Hand, reason: str) -> None:
        """A job that came to nothing, or was lost. Raises UnavailableError after too many in a row."""
        self._whole = False
        self._failed += 1
        del self._hands[hand.name]
        facts = self._cards.get(hand.name)
        where = f"{facts['device']} on {facts['host']}" if facts else "a job without a card"
        log.warning("%s: %s; its cells are measured elsewhere", where, reason)
        if self._failed >= FAILURES or (not self._hands and not self._cards):
            raise UnavailableError(
                f"--executor 'slurm': {units.many(self._failed, 'job')} came to nothing, last: {reason}",
                hint=f"the jobs' logs are in {self._box.folder / 'jobs'}",
            )

    def _withdrawn(self) -> list[Group]:
        """Take back what nobody has begun."""
        return [self._open.pop(number) for number in list(self._open) if self._box.withdraw(number)]

    def _over_budget(self, elapsed_s: float) -> Iterable[Record]:
        """Rows of what does not start any more."""
        outcome = runner.over_budget(self.options, elapsed_s)
        if outcome is None:
            return ()
        return [row for group in self._withdrawn() for row in self._rows(group, outcome)]

    def _rows(self, group: Group, outcome: Mapping[str, Any]) -> list[Record]:
        bench = Bench(self.target, replace(self.options, environment=self.facts))
        return [bench.row(cell, outcome) for cell in group]

    def _end(self) -> None:
        """Send everybody home; the folder stays where something went wrong, with the jobs' logs."""
        self._box.close()
        jobs = [hand.job for hand in self._hands.values()]
        deadline = time.monotonic() + (GO_HOME_S if self._whole else 0.0)
        while (jobs := [job for job in jobs if not _done(job)]) and time.monotonic() < deadline:
            jobs = [job for job in jobs if not self._waits(job)]
            time.sleep(LOOK_EVERY_S / 5)
        for hand in self._hands.values():
            if not _done(hand.job):
                with suppress(Exception):
                    hand.job.cancel(check=False)
        self._beat.__exit__(None, None, None)
        if self._whole:
            shutil.rmtree(self._box.folder, ignore_errors=True)
            with suppress(OSError):
                self._box.folder.parent.rmdir()

    def _waits(self, job: Any) -> bool:
        """Whether the job is still in the queue."""
        return not self._hands[str(job.job_id)].pulse.begun


def _done(job: Any) -> bool:
    try:
        return bool(job.done())
    except Exception as error:
        log.warning("job %s: %s", job.job_id, what(error))
        return True


def close_earlier(folder: Path) -> None:
    """End what jobs of an earlier process, which was lost, still do in folders beside this one."""
    for other in folder.parent.glob("*/setup.json"):
        if other.parent != folder:
            Mailbox(other.parent).close()
