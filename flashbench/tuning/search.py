"""One case: every candidate checked and timed once, then the best in turn, beside the table's own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice, product
from typing import Any

from flashbench import tuned
from flashbench.kernels import Target
from flashbench.profilers import Policy, measure_time
from flashbench.tuning.cases import Attempt, Config, WrongResult
from flashbench.tuning.compiling import TIMED, WAITING, WRONG, Trial, Tried

POLICY = Policy(limit_s=0.05, min_samples=3, max_samples=20, warmup=1)
ROUNDS = 5
"""Of the final; two where time is short."""

BEST_OF_ONE, BEST_OF_MANY = 4, 2
"""Trials of a kernel that reach the final: of a pass with one kernel, and of one with more, combined."""

MARGIN = 0.01
"""A configuration replaces the table's where it is faster by more; medians differ by about as much."""

SCREENING = 0.7
"""Of a case's time, before its final begins."""

SPENT = "not tried: the time was spent"


class DeviceLost(Exception):
    """The device answers no more; nothing further can be measured in this process."""


@dataclass
class Finalist:
    """A whole configuration in the final. rounds_s: the median of each round, seconds."""

    config: Config
    call: Callable[[], object]
    rounds_s: list[float] = field(default_factory=list)

    @property
    def time_s(self) -> float:
        """The median of its rounds."""
        return statistics.median(self.rounds_s)

    def to_json(self, table_s: float | None) -> dict[str, Any]:
        """What the file says of it; gain: the table's time over its own."""
        gain = table_s / self.time_s if table_s and self.time_s else None
        return {"config": dict(self.config), "time_s": self.time_s, "rounds_s": self.rounds_s, "gain": gain}


@dataclass
class Search:
    """The search of one case. found: its entry of the file, kept up to date; on_change: called after each
    measurement."""

    tried: Tried
    target: Target
    found: dict[str, Any]
    on_change: Callable[[], None]

    def run(self, attempt: Attempt, until: float) -> None:
        """Search, with an end at about ``until`` (of time.monotonic). Raises DeviceLost."""
        start = time.monotonic()
        table = {name: value for trials in self.tried.of.values() for name, value in
                 trials[0].candidate.tiles.items()}  # fmt: skip
        self._screen(attempt, table, start + SCREENING * (until - start))
        finalists = self._finalists(attempt, table)
        if finalists:
            self._final(finalists, table, until)

    def _screen(self, attempt: Attempt, table: Config, until: float) -> None:
        own = [trials[0] for trials in self.tried.of.values()]
        self._try(attempt, table, own)
        for trial in self.tried.ranked:
            if trial.status == WAITING and trial.reason is None:
                if time.monotonic() < until:
                    self._try(attempt, {**table, **trial.candidate.tiles}, [trial])
                else:
                    trial.reason = SPENT
        self._save()

    def _try(self, attempt: Attempt, config: Config, trials: Sequence[Trial]) -> None:
        """Check the configuration, then time it, for the trials that it stands for."""
        try:
            seconds = self._seconds(attempt(config))
        except WrongResult as error:
            for trial in trials:
                trial.status, trial.reason = WRONG, str(error)
            self._look_whether_alive()
        else:
            for trial in trials:
                trial.status, trial.reason, trial.time_s = TIMED, None, seconds
        self._save()

    def _seconds(self, call: Callable[[], object]) -> float:
        return measure_time(call, device=self.target.device, policy=POLICY).samples.median_s

    def _look_whether_alive(self) -> None:
        if self.target.type != "cuda":
            return
        import torch

        try:
            torch.cuda.synchronize(self.target.device)
        except Exception as error:  # an illegal access poisons the context for good
            raise DeviceLost(f"the device was lost: {str(error).splitlines()[0]}") from None

    def _finalists(self, attempt: Attempt, table: Config) -> list[Finalist]:
        """The table's own and every combination of the fastest trials of each kernel, checked as a whole."""
        most = BEST_OF_ONE if len(self.tried.of) == 1 else BEST_OF_MANY
        fastest = [
            sorted((trial for trial in trials if trial.time_s is not None), key=_time)[:most] or [trials[0]]
            for trials in self.tried.of.values()
        ]
        found = []
        for config in _once([table, *(_joined(table, trials) for trials in product(*fastest))]):
            try:
                found.append(Finalist(config, attempt(config)))
            except WrongResult as error:
                self.found["wrong"].append({"config": dict(config), "reason": str(error)})
                self._look_whether_alive()
        return found

    def _final(self, finalists: list[Finalist], table: Config, until: float) -> None:
        """Time them in turn, each round beginning with another one; then choose."""
        for number in range(ROUNDS):
            if number >= 2 and time.monotonic() > until:
                break
            first = number % len(finalists)
            for one in (*finalists[first:], *finalists[:first]):
                one.rounds_s.append(self._seconds(one.call))
                self.found["rounds"] = [
                    {"config": dict(other.config), "rounds_s": other.rounds_s} for other in finalists
                ]
                self._save()
        self.found |= chosen(finalists, table)
        del self.found["rounds"]
        self._save()

    def _save(self) -> None:
        self.found["trials"] = [trial.to_json() for trials in self.tried.of.values() for trial in trials]
        self.on_change()


def chosen(finalists: Sequence[Finalist], table: Config) -> dict[str, Any]:
    """winner, runners_up and table of the finalists: the fastest, but the table's within MARGIN of it."""
    own = next((one for one in finalists if one.config == table), None)
    ranked = sorted(finalists, key=lambda one: one.time_s)
    if own is not None and own.time_s <= (1 + MARGIN) * ranked[0].time_s:
        ranked = [own, *(one for one in ranked if one is not own)]
    table_s = own.time_s if own else None
    rows = [one.to_json(table_s) for one in ranked]
    return {
        "winner": rows[0],
        "runners_up": rows[1:],
        "table": own.to_json(table_s) if own else {"config": dict(table), "time_s": None},
    }


def entry(tried: Tried) -> dict[str, Any]:
    """The case's entry of a file, with nothing found yet."""
    case = tried.case
    return {
        "case": case.name,
        "shape": case.shape,
        "point": tuned.point_of(case.cell.problem),
        "reason": None,
        "winner": None,
        "runners_up": [],
        "table": None,
        "wrong": [],
        "trials": [],
    }


def _time(trial: Trial) -> float:
    assert trial.time_s is not None
    return trial.time_s


def _joined(table: Config, trials: Iterable[Trial]) -> dict[str, Any]:
    return {**table, **{name: value for trial in trials for name, value in trial.candidate.tiles.items()}}


def _once(configs: Iterable[Mapping[str, Any]], most: int = 9) -> list[Mapping[str, Any]]:
    """Each once, in their order, at most so many."""
    return list(islice({tuple(sorted(config.items())): config for config in configs}.values(), most))
