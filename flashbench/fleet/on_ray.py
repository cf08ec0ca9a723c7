"""A sweep on a cluster, through Ray: an actor per card, and a group of cells per call.

    with OnRay(target_type=None, address="auto") as fleet:
        fleet.options = RunOptions(environment=fleet.facts)
        fleet.run(cells, on_record, on_progress)

An actor holds its card for the sweep (``num_gpus=1``; on the CPU a core): no task of somebody else comes in
between, and one worker with torch imported and kernels compiled serves every group (``ray_actor.py``). Rows
come back when a call is done: a group, or some short ones. What was at work on a node that is lost is
measured elsewhere, from its start; as its rows were never told, each cell has one. Actors are asked for again
as nodes come and go. Where the process that called ``run`` is lost, its file has what was done, and resuming
it measures the rest.
"""

from __future__ import annotations

import logging
import os
import re
import socket
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from flashbench import runner
from flashbench._runner.outcomes import duration, what
from flashbench.errors import UnavailableError
from flashbench.fleet import ray_actor
from flashbench.fleet.cards import refuse_other, row_facts
from flashbench.fleet.deal import Group, Neighbours, expected, longest_first
from flashbench.isolation import Bench, protocol
from flashbench.problem import Cell
from flashbench.record import Record
from flashbench.record_json import record_from_json
from flashbench.runner import LOST, OnProgress, OnRecord, RunOptions

log = logging.getLogger("flashbench")

EXTRA = "pip install 'flashbench[ray]'"
TRIES = 3
"""A group that was lost with its actor so often has rows that say so."""
STARTS = 10
"""So many actors in a row that do not start are the end of the sweep."""
CALL_S, CALLS = 1.0, 4
"""Short groups are sent together, as long as they are expected to take CALL_S; but so that each card has
CALLS calls of what is left, as the cards are to finish together."""
LOOK_EVERY_S = 1.0
"""So often the cluster is looked at for more cards, and whether to stop."""
KNOCK_S = 10.0
"""What the head of a cluster has to take a connection."""
PROBE_S = 300.0
"""What the first card is waited for."""


@dataclass(eq=False, kw_only=True)
class _Hand:
    """An actor and what it does. facts: of its card, once it is there. group: what it measures,
    which is several where they are short."""

    actor: Any
    facts: Mapping[str, Any] | None = None
    group: Group = ()

    @property
    def place(self) -> tuple[str, str]:
        """Host and card."""
        assert self.facts is not None
        return str(self.facts["host"]), str(self.facts["device"])


def _ray() -> Any:
    """The package. Raises UnavailableError, naming the extra."""
    try:
        import ray
    except ImportError as error:
        raise UnavailableError(f"--executor 'ray': {what(error)}", hint=EXTRA) from None
    return ray


def _knock(address: str) -> None:
    """Raise OSError where nobody listens at HOST:PORT; Ray asks for minutes. Other addresses are Ray's."""
    if found := re.fullmatch(r"([^:/]+):([0-9]+)", address):
        socket.create_connection((found[1], int(found[2])), timeout=KNOCK_S).close()


class OnRay:
    """Where cells are measured, as a Bench.

    target_type: ``cuda``, ``cpu``, or None for GPUs where the cluster has some. address: of a cluster, None
    for RAY_ADDRESS or else one that is started here. accelerator_type: cards of that kind alone, as Ray
    calls it (``H100``). command: starts a worker, for tests. Raises UnavailableError where no such cluster
    or card is.

    target, facts: of the first card that answered, by which the sweep is planned. options: to be set before
    ``run``. calls_s: what calls took on their nodes so far; what cards waited beside it is scheduling.
    """

    def __init__(
        self, *, target_type: str | None = None, address: str | None = None,
        accelerator_type: str | None = None, command: Sequence[str] | None = None,
    ) -> None:  # fmt: skip
        self._ray = _ray()
        self._kind = accelerator_type
        self._command = command
        self._connect(address)
        self._type = target_type or ("cuda" if self._has("GPU") else "cpu")
        self.options = RunOptions()
        self._hands: dict[Any, _Hand] = {}
        self._left = deque[Group]()
        self._expected: Mapping[Cell, float] = {}
        self._cards = 1
        self.calls_s = 0.0
        self._lost = Counter[Group]()
        self._failed, self._looked = 0, 0.0
        self._neighbours = Neighbours()
        self.target, self.facts = self._probe()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._ray.shutdown()

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

        Of what it returns, workers is how many cards were at work at most.
        """
        start, most, begun = time.monotonic(), 0, 0
        self._left = deque(map(tuple, longest_first(cells, self.target, self.options)))
        self._expected = expected(cells, self.target, self.options)
        while self._left or any(hand.group for hand in self._hands.values()):
            if stop():
                self._left.clear()
            for record in self._over_budget(time.monotonic() - start):
                on_record(record)
            self._hire()
            for hand, answer in self._answers():
                for record in self._taken(hand, answer):
                    on_record(record)
                if hand.facts is not None and self._left:
                    self._give(hand)
                    on_progress(begun, len(cells), hand.group[0])
                    begun += len(hand.group)
            most = max(most, sum(bool(hand.group) for hand in self._hands.values()))
        return {"wall_s": time.monotonic() - start, "workers": float(most)}

    def _connect(self, address: str | None) -> None:
        try:
            _knock(address or os.environ.get("RAY_ADDRESS", ""))
            self._ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (OSError, OverflowError, RuntimeError, ValueError) as error:
            said = f"no cluster at --address {address!r}" if address else "no cluster starts"
            raise UnavailableError(f"--executor 'ray': {said}: {what(error)}") from None

    def _has(self, resource: str) -> int:
        """How many of a resource the living nodes with cards of the kind asked for have together."""
        kind = f"accelerator_type:{self._kind}"
        nodes = [node["Resources"] for node in self._ray.nodes() if node["Alive"]]
        return int(sum(node.get(resource, 0) for node in nodes if self._kind is None or kind in node))

    def _new(self) -> Any:
        """An actor that waits for its card."""
        gpus = 1 if self._type == "cuda" else 0
        asked: dict[str, Any] = {"num_gpus": gpus, "num_cpus": 1, "scheduling_strategy": "SPREAD"}
        if self._kind is not None:
            asked["accelerator_type"] = self._kind
        made = self._ray.remote(ray_actor.Measurer).options(**asked)
        return made.remote(self._type, self._command)

    def _probe(self) -> tuple[Any, Mapping[str, Any]]:
        """Target and facts of a first card, whose actor stays."""
        asked = self._type == "cuda" or self._kind is not None
        if asked and not self._has("GPU" if self._type == "cuda" else "CPU"):
            kind = f"of accelerator type {self._kind!r}" if self._kind else "with a GPU"
            raise UnavailableError(f"--executor 'ray': the cluster has no node {kind}")
        actor = self._new()
        about = actor.about.remote()
        try:
            found = self._ray.get(about, timeout=PROBE_S)
        except self._ray.exceptions.GetTimeoutError:
            raise UnavailableError(
                f"--executor 'ray': no card was free for {duration(PROBE_S)}", hint="see 'ray status'"
            ) from None
        except self._ray.exceptions.RayError as error:
            raise UnavailableError(f"--executor 'ray': the first card failed: {what(error)}") from None
        self._hands[about] = _Hand(actor=actor)
        return protocol.target_from_json(found["target"]), found["facts"]

    def _hire(self) -> None:
        """Ask for as many actors as there are cards for, and groups; not more often than LOOK_EVERY_S."""
        if self._hands and time.monotonic() - self._looked < LOOK_EVERY_S:
            return
        self._looked = time.monotonic()
        waiting = sum(not hand.group for hand in self._hands.values())
        self._cards = self._has("GPU" if self._type == "cuda" else "CPU")
        room = self._cards - len(self._hands)
        for _ in range(min(room, len(self._left) - waiting)):
            actor = self._new()
            self._hands[actor.about.remote()] = _Hand(actor=actor)

    def _answers(self) -> list[tuple[_Hand, Any]]:
        """Who is done, with what was answered, or the error with which its actor was lost."""
        found = list[tuple[_Hand, Any]]()
        if not self._hands:
            time.sleep(LOOK_EVERY_S)
            return found
        done, _ = self._ray.wait(list(self._hands), timeout=LOOK_EVERY_S)
        for ref in done:
            hand = self._hands.pop(ref)
            try:
                found.append((hand, self._ray.get(ref)))
            except self._ray.exceptions.RayError as error:
                found.append((hand, error))
        return found

    def _taken(self, hand: _Hand, answer: Any) -> Iterable[Record]:
        """The rows of an answer; of one that is lost none, and its group is the next that somebody gets."""
        if hand.facts is None and not isinstance(answer, BaseException):
            refuse_other(answer["facts"], "ray")
            hand.facts, self._failed = answer["facts"], 0
            return ()
        group, hand.group = hand.group, ()
        rows: list[Record] = []
        reason = what(answer) if isinstance(answer, BaseException) else ""
        if hand.facts is not None:
            neighbours = self._neighbours.of(*hand.place) if group else []
            self._neighbours.end(*hand.place)
            more = row_facts(hand.facts, neighbours)
            rows = [] if reason else [record_from_json(row) for row in answer["rows"]]
            self.calls_s += 0.0 if reason else answer["wall_s"]
            rows = [replace(row, environment=more) for row in rows]
            reason = reason or next((row.reason or "" for row in rows if _is_lost(row)), "")
        if not reason:
            return rows
        self._failed += hand.facts is None
        if self._failed >= STARTS:
            raise UnavailableError(f"--executor 'ray': {STARTS} cards in a row did not start, last: {reason}")
        where = " on ".join(reversed(hand.place)) if hand.facts else "a card that did not start"
        log.warning("%s: %s; its cells are measured elsewhere", where, reason)
        hand.facts = None
        with suppress(Exception):
            self._ray.kill(hand.actor)
        self._lost[group] += bool(group)
        if group and self._lost[group] < TRIES:
            self._left.appendleft(group)
            return ()
        said = f"{LOST}: {TRIES} times with the card it ran on: {reason}"
        return self._rows(group, {"status": "skipped", "reason": said})

    def _give(self, hand: _Hand) -> None:
        """Have it measure the next group, or some short ones."""
        more = len(self._left) // (CALLS * max(1, self._cards))
        hand.group = self._left.popleft()
        while more > 1 and sum(self._expected[cell] for cell in hand.group) < CALL_S:
            hand.group = (*hand.group, *self._left.popleft())
            more -= 1
        self._neighbours.begin(*hand.place)
        setup = protocol.setup_to_json(self.target, self.options, elapsed_s=0.0, timed=(), names=())
        cells = [cell.to_json() for cell in hand.group]
        self._hands[hand.actor.measure.remote(setup["options"], cells)] = hand

    def _over_budget(self, elapsed_s: float) -> Iterable[Record]:
        """Rows of what does not start any more."""
        outcome = runner.over_budget(self.options, elapsed_s)
        if outcome is None:
            return ()
        groups = list(self._left)
        self._left.clear()
        return [row for group in groups for row in self._rows(group, outcome)]

    def _rows(self, group: Group, outcome: Mapping[str, Any]) -> list[Record]:
        bench = Bench(self.target, replace(self.options, environment=self.facts))
        return [bench.row(cell, outcome) for cell in group]


def _is_lost(record: Record) -> bool:
    """Whether the row is of a card that could measure nothing."""
    return record.status == "skipped" and (record.reason or "").startswith(LOST)
