"""A sweep on cards of this host: a worker process for each, served by a thread; one process writes."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Self

from flashbench import runner
from flashbench.fleet.cards import Card, row_facts
from flashbench.fleet.deal import Deal, Group, Neighbours, longest_first
from flashbench.isolation import Bench
from flashbench.problem import Cell
from flashbench.record import Record
from flashbench.runner import LOST, OnProgress, OnRecord, RunOptions

log = logging.getLogger("flashbench")

_Event = Cell | Record | Mapping[str, float] | BaseException
"""What a card's thread tells: a cell begins, its row, where its time went once it is done, an error."""


@dataclass(kw_only=True)
class _Seat:
    """A card and the bench that measures on it. lost: why it can measure no more."""

    card: Card
    bench: Bench
    lost: str | None = None

    @property
    def place(self) -> tuple[str, str]:
        """Host and name."""
        return str(self.card.facts.get("host")), self.card.name


class Local:
    """Where cells are measured, as a Bench. command: starts a worker, for tests."""

    def __init__(
        self, cards: Sequence[Card], options: RunOptions, *, command: Sequence[str] | None = None
    ) -> None:
        self.target = cards[0].target
        self._options = options
        self._seats = [
            _Seat(card=card, bench=Bench(
                card.target, replace(options, environment=card.facts), command=command,
                surroundings=card.surroundings,
            ))
            for card in cards
        ]  # fmt: skip
        self._halted = False
        self._neighbours = Neighbours()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for seat in self._seats:
            seat.bench.drop()

    def overheads(self, *, cupti: bool) -> dict[str, Any]:
        """As of Bench, on the first card, while the workers of the others start."""
        if self.target.type != "cuda":
            return {}
        others = [threading.Thread(target=seat.bench.ready, daemon=True) for seat in self._seats[1:]]
        for other in others:
            other.start()
        try:
            return self._seats[0].bench.overheads(cupti=cupti)
        finally:
            for other in others:
                other.join()

    def run(
        self,
        cells: Sequence[Cell],
        on_record: OnRecord,
        on_progress: OnProgress = lambda *_: None,
        stop: Callable[[], bool] = runner.never,
    ) -> dict[str, float]:
        """Measure the cells as Bench.run does; both callbacks are called in this thread alone.

        Of what it returns, precompile_s and starting_s are of all workers together; workers: how many.
        """
        start = time.monotonic()
        deal = Deal(longest_first(cells, self.target, self._options), len(self._seats))
        events = queue.SimpleQueue[_Event]()

        def stopped() -> bool:
            return self._halted or stop()

        threads = [
            threading.Thread(target=self._serve, args=(number, cells, deal, events, stopped), daemon=True)
            for number in range(len(self._seats))
        ]
        try:
            for thread in threads:
                thread.start()
            spent = self._listen(events, len(cells), on_record, on_progress)
        finally:
            self._halt(threads)
        for record in () if stop() else self._nobodys(deal):
            on_record(record)
        return {"wall_s": time.monotonic() - start, **spent, "workers": float(len(self._seats))}

    def _listen(
        self, events: queue.SimpleQueue[_Event], cells: int, on_record: OnRecord, on_progress: OnProgress
    ) -> dict[str, float]:
        """Pass on what the cards tell until all have ended; the sum of what each says of its time."""
        spent = {"precompile_s": 0.0, "starting_s": 0.0}
        ended = begun = 0
        while ended < len(self._seats):
            event = events.get()
            if isinstance(event, Cell):
                on_progress(begun, cells, event)
                begun += 1
            elif isinstance(event, Record):
                on_record(event)
            elif isinstance(event, BaseException):
                raise event
            else:
                ended += 1
                spent = {name: seconds + event.get(name, 0.0) for name, seconds in spent.items()}
        return spent

    def _serve(
        self, number: int, cells: Sequence[Cell], deal: Deal, events: queue.SimpleQueue[_Event],
        stop: Callable[[], bool],
    ) -> None:  # fmt: skip
        """What the thread of a card does."""
        seat = self._seats[number]

        def keep(record: Record) -> None:
            reason = record.reason or ""
            if record.status == "skipped" and reason.startswith(LOST):
                seat.lost = reason  # the generator of groups gives the cell back
            elif not self._halted:
                neighbours = self._neighbours.of(*seat.place)
                measured.add(record.cell)
                events.put(replace(record, environment=row_facts(seat.card.facts, neighbours)))

        measured = set[Cell]()
        names = list(dict.fromkeys(cell.implementation for cell in cells))[number :: len(self._seats)]
        try:
            events.put(seat.bench.run(
                cells, keep, lambda _, __, cell: events.put(cell), stop,
                groups=self._groups(seat, deal, measured, stop),
                ahead=[cell for cell in cells if cell.implementation in names],
            ))  # fmt: skip
        except BaseException as error:
            events.put(error)
        finally:
            deal.leave()

    def _groups(
        self, seat: _Seat, deal: Deal, measured: set[Cell], stop: Callable[[], bool]
    ) -> Iterator[Group]:
        """What the card measures, until there is no more or it is lost."""
        deal.gather(stop)
        while (group := deal.take(stop)) is not None:
            self._neighbours.begin(*seat.place)
            yield group
            self._neighbours.end(*seat.place)
            if seat.lost is not None:
                log.warning("%s: %s; the other cards go on", seat.card.name, seat.lost)
                deal.done([cell for cell in group if cell not in measured])
                return
            deal.done()

    def _nobodys(self, deal: Deal) -> Iterator[Record]:
        """Rows of what is left once every card is lost."""
        reasons = [seat.lost for seat in self._seats if seat.lost]
        for group in deal.left:
            for cell in group:
                yield self._seats[0].bench.row(cell, {"status": "skipped", "reason": reasons[-1]})

    def _halt(self, threads: Sequence[threading.Thread]) -> None:
        """End every thread, and what it has at work; nothing to do where all have come to their end."""
        self._halted = True
        for thread, seat in zip(threads, self._seats, strict=True):
            while thread.ident is not None and thread.is_alive():
                thread.join(0.05)
                seat.bench.drop()
