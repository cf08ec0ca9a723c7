"""Ranks as threads of this process, with queues for links: any number of them in milliseconds."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from flashbench._iomodel import across
from flashbench.kernels._inputs import Inputs
from flashbench.problem import Problem
from flashbench.ring.link import Link, Shape, Shift
from flashbench.ring.measuring import ALGORITHMS
from flashbench.ring.step import Rank, Step, rows_of, whole

PATIENCE_S = 60.0


class Mail:
    """A queue from each rank to each."""

    def __init__(self, ranks: int) -> None:
        self.boxes = {(a, b): queue.Queue[Any]() for a in range(ranks) for b in range(ranks)}


class Coming(Shift):
    def __init__(self, box: queue.Queue[Any], shapes: Sequence[Shape]) -> None:
        self._box, self._shapes = box, shapes

    def wait(self) -> tuple[Tensor, ...]:
        found = self._box.get(timeout=PATIENCE_S)
        assert [tuple(x.shape) for x in found] == [tuple(shape) for shape in self._shapes]
        return tuple(found)


class ThreadLink(Link):
    def __init__(self, rank: int, ranks: int, mail: Mail) -> None:
        super().__init__(rank, ranks)
        self.mail = mail.boxes

    def shift(self, tensors: Sequence[Tensor], shapes: Sequence[Shape]) -> Shift:
        sent = [x.clone() for x in tensors]
        self.mail[self.rank, (self.rank + 1) % self.ranks].put(sent)
        self._count("shift", tensors, shapes, sent)
        return Coming(self.mail[(self.rank - 1) % self.ranks, self.rank], shapes)

    def gather(self, x: Tensor) -> list[Tensor]:
        found = self._swap([x] * self.ranks)
        self._count("gather", [x], (), [x] * (self.ranks - 1))
        return found

    def exchange(self, parts: Sequence[Tensor], shapes: Sequence[Shape]) -> list[Tensor]:
        found = self._swap(parts)
        assert [tuple(x.shape) for x in found] == [tuple(shape) for shape in shapes]
        others = [x for rank, x in enumerate(parts) if rank != self.rank]
        self._count("exchange", parts, shapes, others)
        return found

    def _swap(self, parts: Sequence[Tensor]) -> list[Tensor]:
        for rank, part in enumerate(parts):
            self.mail[self.rank, rank].put(part.clone())
        return [self.mail[rank, self.rank].get(timeout=PATIENCE_S) for rank in range(self.ranks)]


def run(
    name: str, problem: Problem, inputs: Inputs, ranks: int
) -> tuple[tuple[Tensor, ...], list[list[int]]]:
    """(o, dq, dk, dv) of the whole sequence, and the bytes that each rank sent forward and backward."""
    cut, mail = across.shards_of(name, problem, ranks), Mail(ranks)
    parts: list[Any] = [None] * ranks
    sent: list[list[int]] = [[] for _ in range(ranks)]

    def rank(number: int) -> None:
        link = ThreadLink(number, ranks, mail)
        at = Rank(problem=problem, cut=cut, link=link, step=Step(problem.softmax_scale))
        q, k, v, do = (rows_of(x, cut[number]) for x in (inputs.q, inputs.k, inputs.v, inputs.dout))
        o, saved = ALGORITHMS[name].forward(at, q, k, v)
        sent[number].append(link.sent_bytes)
        link.forget()
        parts[number] = (o, *ALGORITHMS[name].backward(at, saved, do))
        sent[number].append(link.sent_bytes)

    _all(rank, ranks)
    return tuple(whole(x, cut) for x in zip(*parts, strict=True)), sent


def _all(rank: Callable[[int], None], ranks: int) -> None:
    failures = []

    def guarded(number: int) -> None:
        try:
            rank(number)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(number,), daemon=True) for number in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(2 * PATIENCE_S)
    if failures:
        raise failures[0]
