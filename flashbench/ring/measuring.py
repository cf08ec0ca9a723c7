"""What a rank does with a cell: run it on its shard, have rank 0 check the whole, time it and its parts.

Each sample begins at once on all ranks and is as long as that of the slowest. compute: the same call with a
link that moves nothing; link: the same messages without compute. One card's time is rank 0's alone with the
whole problem, while the others wait without their GPU.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from flashbench._iomodel import across, shards
from flashbench.problem import Cell, Problem
from flashbench.ring import gathered, ring_attention, torch_cp, ulysses
from flashbench.ring.link import Link, Still, replay
from flashbench.ring.step import Rank, Step, padded, rows_of, whole

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

ALGORITHMS: Mapping[str, Any] = {
    "ring": ring_attention,
    "ulysses": ulysses,
    "allgather": gathered,
    torch_cp.NAME: torch_cp,
}
"""Modules of ``step.Algorithm``, in the model's order, then the peer."""

ENOUGH_S, LEAST, MOST = 1.0, 2, 20
"""Samples of each kind: as many as take so long, but within these numbers."""

Call = Callable[[], object]


class Session:
    """One rank, with the group joined. device: its own, as torch names it."""

    def __init__(self, *, rank: int, ranks: int, device: str, seed: int) -> None:
        self.rank, self.ranks, self.device, self.seed = rank, ranks, device, seed
        self._alone: dict[tuple[Problem, str], list[float]] = {}

    def cell(self, cell: Cell, *, timed: bool) -> dict[str, Any]:
        """What became of a cell: of rank 0 all, of others what they counted. Raises what it raises."""
        from flashbench.kernels._inputs import make_inputs

        self._compile(cell)
        every = make_inputs(cell.problem, self.device, self.seed)
        work = Work(self, cell, every)
        inputs = None if self.rank else every
        del every
        with work.context():
            row = work.checked(inputs)
            if timed and self.agree(row.get("status", "ok") == "ok"):
                row |= self._timed(work, inputs)
        if self.device != "cpu":
            import torch

            torch.cuda.empty_cache()
        return row

    def _compile(self, cell: Cell) -> None:
        """Have rank 0 compile the kernels of a cell's blocks in parallel; others find them in the cache."""
        if self.device == "cpu" or cell.implementation == torch_cp.NAME:
            return
        if not self.rank:
            from flashbench import environment, runner

            rows = cell.problem.seqlen_q // self.ranks
            shard = replace(cell.problem, seqlen_q=rows, seqlen_k=rows)
            needed = [cell.problem, shard, replace(shard, causal=False)]
            blocks = [Cell(implementation="flash", problem=p, pass_=cell.pass_) for p in needed]
            runner.precompile(blocks, environment.target(self.device))
        self.largest(0.0)

    def _timed(self, work: Work, inputs: Inputs | None) -> dict[str, Any]:
        both = self.together(work.call(work.link))
        row: dict[str, Any] = {"peak_bytes": self.largest(self._peak(work.call(work.link)))}
        compute = link = None
        if work.name != torch_cp.NAME:
            messages = work.messages
            compute = self.together(work.call(Still(self.rank, self.ranks)))
            link = self.together(lambda: replay(work.link, messages, self.device))
        alone = self.alone(work, inputs)
        return row | times(both, compute, link, alone, self.ranks) if not self.rank else row

    def together(self, call: Call) -> list[float]:
        """Seconds of calls that all ranks make at once, each as long as the slowest."""
        return self._samples(call, self._start, self.largest)

    def alone(self, work: Work, inputs: Inputs | None) -> list[float]:
        """Seconds of the pass on one card, by rank 0; on others empty."""
        key = work.cell.problem, work.cell.pass_
        if inputs is not None and key not in self._alone:
            call = one_card(work.cell, inputs)
            call()
            self._alone[key] = self._samples(call, self._wait, float)
        self.largest(0.0)
        return self._alone.get(key, [])

    def _samples(self, call: Call, ready: Call, joined: Callable[[float], float]) -> list[float]:
        first = joined(self._once(call, ready))
        count = min(MOST, max(LEAST, round(ENOUGH_S / max(first, 1e-6))))
        found = [joined(self._once(call, ready)) for _ in range(count - 1)]
        return found if count > LEAST else [first, *found]  # the first one of many warms up

    def _once(self, call: Call, ready: Call) -> float:
        ready()
        if self.device == "cpu":
            began = time.perf_counter()
            call()
            return time.perf_counter() - began
        import torch

        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        call()
        last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def _start(self) -> None:
        """Once all ranks are here, hosts first, then streams."""
        self._wait()
        self.largest(0.0)
        if self.device != "cpu":
            import torch

            torch.distributed.all_reduce(torch.zeros(1, device=self.device))

    def _wait(self) -> None:
        if self.device != "cpu":
            import torch

            torch.cuda.synchronize()

    def _peak(self, call: Call) -> float:
        """Most bytes allocated on this card during a call, what it began with included; 0 on a CPU."""
        if self.device == "cpu":
            call()
            return 0.0
        import torch

        torch.cuda.reset_peak_memory_stats()
        call()
        self._wait()
        return float(torch.cuda.max_memory_allocated())

    def largest(self, value: float) -> float:
        """Of all ranks; through the hosts, so that no GPU waits."""
        import torch

        found = torch.tensor([value], dtype=torch.float64)
        torch.distributed.all_reduce(found, op=torch.distributed.ReduceOp.MAX)
        return float(found)

    def agree(self, value: bool) -> bool:
        """Whether it holds on all ranks."""
        return not self.largest(float(not value))


class Work:
    """One cell on one rank: its shards, its end of the link, the call of its pass."""

    def __init__(self, session: Session, cell: Cell, inputs: Inputs) -> None:
        p, ranks = cell.problem, session.ranks
        self.session, self.cell, self.name = session, cell, cell.implementation
        peer = self.name == torch_cp.NAME
        cut = shards.shards(p.seqlen_q, ranks, zigzag=True) if peer else across.shards_of(self.name, p, ranks)
        self.link = Link(session.rank, ranks)
        self.at = Rank(problem=p, cut=cut, link=self.link, step=Step(p.softmax_scale))
        mine = cut[session.rank]
        self.q, self.k, self.v, self.do = (
            rows_of(x, mine) for x in (inputs.q, inputs.k, inputs.v, inputs.dout)
        )
        self.messages: list[Any] = []

    def context(self) -> AbstractContextManager[object]:
        """What the calls must be inside of."""
        if self.name != torch_cp.NAME:
            return nullcontext()
        return torch_cp.entered(self.cell.problem, self.session.ranks, self.session.device)

    def call(self, link: Link) -> Call:
        """The pass over that link. A backward starts from what a forward kept."""
        algorithm, at = ALGORITHMS[self.name], replace(self.at, link=link)

        def forward() -> Any:
            return algorithm.forward(at, self.q, self.k, self.v)

        if self.cell.pass_ == "fwd":
            return _without_grad(forward)
        if self.cell.pass_ == "bwd":
            saved = forward()[1]
            return lambda: algorithm.backward(at, saved, self.do)
        return lambda: algorithm.backward(at, forward()[1], self.do)

    def checked(self, inputs: Inputs | None) -> dict[str, Any]:
        """Bytes against the model on every rank; on rank 0 the whole result against fp64, on sampled rows."""
        algorithm = ALGORITHMS[self.name]
        o, saved = algorithm.forward(self.at, self.q, self.k, self.v)
        grads = algorithm.backward(self.at, saved, self.do) if self.cell.pass_ != "fwd" else ()
        del saved
        row = self._counted()
        found = [self._whole(x) for x in (o, *grads)]
        if inputs is None:
            return row
        from flashbench.kernels._reference import Reference

        reference = Reference(self.cell.problem, inputs, seed=self.session.seed)
        accuracy = reference.compare(found[0], found[1:] or None)
        row |= {
            "local_step": self._step(), "query_rows": accuracy.query_rows, "key_rows": accuracy.key_rows,
            "max_abs_error": dict(accuracy.max_abs_error), "budget": dict(accuracy.budget),
        }  # fmt: skip
        bad = [name for name, error in accuracy.max_abs_error.items() if not error <= accuracy.budget[name]]
        if bad:
            off = f"{accuracy.max_abs_error[bad[0]]:.3g}, allowed {accuracy.budget[bad[0]]:.3g}"
            row |= {"status": "wrong", "reason": f"{bad[0]} is off by {off}"}
        return row

    def _counted(self) -> dict[str, Any]:
        """Bytes that the pass sends from here, and whether they are the model's."""
        if self.name == torch_cp.NAME:
            return {}
        call = self.call(self.link)
        self.link.forget()
        call()
        self.messages, counted = list(self.link.messages), self.link.sent_bytes
        sent = across.sent(self.name, self.cell.problem, self.cell.pass_, self.session.ranks)
        expected = sum(sent[self.session.rank].values())
        row: dict[str, Any] = {"sent_bytes": counted}
        if counted != expected:
            reason = f"rank {self.session.rank} sent {counted} bytes, the model says {expected}"
            row |= {"status": "wrong", "reason": reason}
        return row

    def _step(self) -> str | None:
        """What computes the blocks of a shard."""
        from flashbench.kernels import _local

        if self.name == torch_cp.NAME:
            return None
        p, pass_ = self.cell.problem, "fwd" if self.cell.pass_ == "fwd" else "bwd"
        tensors = self.q, self.k, self.v
        return _local.runs(*tensors, causal=p.causal, scale=p.softmax_scale, pass_=pass_)

    def _whole(self, x: Tensor) -> Tensor:
        """The whole sequence of a result, on every rank."""
        link, rows = Link(self.session.rank, self.session.ranks), shards.longest(self.at.cut)
        return whole(link.gather(padded(x, rows)), self.at.cut)


def _without_grad(call: Call) -> Call:
    import torch

    def quiet() -> object:
        with torch.no_grad():
            return call()

    return quiet


def one_card(cell: Cell, inputs: Inputs) -> Call:
    """The pass over the whole problem in this process alone, by the same local step."""
    p, step = cell.problem, Step(cell.problem.softmax_scale)
    q, k, v = inputs.q, inputs.k, inputs.v

    def forward() -> tuple[Tensor, Tensor]:
        return step.forward(q, k, v, p.causal)

    if cell.pass_ == "fwd":
        return forward
    if cell.pass_ == "bwd":
        saved = forward()
        return lambda: step.backward((q, k, v, *saved, inputs.dout), p.causal)
    return lambda: step.backward((q, k, v, *forward(), inputs.dout), p.causal)


def times(
    both: list[float], compute: list[float] | None, link: list[float] | None, alone: list[float], ranks: int
) -> dict[str, Any]:
    """Medians, and what follows from them. overlap: of the shorter of compute and link, the share that costs
    no time; efficiency: one card's time over all cards' time together."""
    middle = statistics.median
    row: dict[str, Any] = {"time_s": middle(both), "samples_s": both}
    if compute is not None and link is not None:
        row |= {"compute_s": middle(compute), "link_s": middle(link), "link_samples_s": link}
        shorter = min(row["compute_s"], row["link_s"])
        if shorter > 0:
            row["overlap"] = (row["compute_s"] + row["link_s"] - row["time_s"]) / shorter
    if alone:
        row |= {"one_card_s": middle(alone), "speedup": middle(alone) / row["time_s"]}
        row["efficiency"] = row["speedup"] / ranks
    return row
