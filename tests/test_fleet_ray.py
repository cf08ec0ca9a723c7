"""A sweep on a real Ray cluster of several nodes, each with processes of its own, all on this host."""

from __future__ import annotations

import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import faults
import pytest
from attention import problem
from test_stopped import Run

from flashbench import runfile
from flashbench.problem import Cell
from flashbench.profilers import Policy
from flashbench.record import Record
from flashbench.runner import RunOptions

pytestmark = pytest.mark.slow
ray = pytest.importorskip("ray", reason="the package ray is not installed (flashbench[ray])")

QUICK = Policy(limit_s=0.001, min_samples=3, max_samples=3, warmup=1)
MOST_MS = 50.0
"""Of the time of a cell, what scheduling may take."""


def cells_of(problems: int) -> list[Cell]:
    small = [
        problem(batch=1, num_heads=heads, num_kv_heads=heads, seqlen_q=n)
        for heads in range(1, problems // 16 + 2)
        for n in range(1, 17)
    ]
    return [
        Cell(implementation=name, problem=one, pass_="fwd")
        for one in small[:problems]
        for name in ("naive", "sdpa")
    ]  # fmt: skip


class Nodes:
    """A head without cores, and nodes with one core each."""

    def __init__(self, count: int) -> None:
        from ray.cluster_utils import Cluster

        head = {"num_cpus": 0, "include_dashboard": False}
        self.cluster = Cluster(initialize_head=True, head_node_args=head)
        self.nodes = [self.cluster.add_node(num_cpus=1) for _ in range(count)]

    @property
    def address(self) -> str:
        return str(self.cluster.address)

    def kill(self) -> None:
        """The last node dies at once with its processes."""
        self.cluster.remove_node(self.nodes.pop(), allow_graceful=False)


@pytest.fixture
def nodes(request: pytest.FixtureRequest) -> Iterator[Nodes]:
    made = Nodes(request.param)
    yield made
    ray.shutdown()
    made.cluster.shutdown()


def fleet_on(nodes: Nodes, **options: Any) -> Any:
    from flashbench.fleet.on_ray import OnRay

    made = OnRay(target_type="cpu", address=nodes.address, command=options.pop("command", None))
    made.options = RunOptions(environment=made.facts, policy=QUICK, **options)
    return made


def gather(fleet: Any) -> None:
    """Wait until every card is there: the first would do a short sweep alone while others import torch."""
    ray.wait(list(fleet._hands), num_returns=len(fleet._hands), timeout=240.0)


@pytest.mark.parametrize("nodes", [3], indirect=True)
def test_a_node_that_is_killed_costs_no_cell_and_none_is_measured_twice(nodes: Nodes) -> None:
    cells, rows = cells_of(200), list[Record]()

    def keep(record: Record) -> None:
        if not rows:
            gather(fleet)
        rows.append(record)
        at_work = {one.environment["device"] for one in rows}
        if len(at_work) == 3 and len(nodes.nodes) == 3:
            nodes.kill()

    with fleet_on(nodes, command=faults.LIGHT) as fleet:
        spent = fleet.run(cells, keep)
    assert len(nodes.nodes) == 2, "three cards were at work, and one was killed"
    assert Counter(one.cell.key for one in rows) == Counter(cell.key for cell in cells)
    assert {one.status for one in rows} == {"ok"}
    assert spent["workers"] == 3
    groups = {(one.cell.problem, one.environment["device"]) for one in rows}
    assert len(groups) == 200, "a group stays on one card"


@pytest.mark.parametrize("nodes", [2], indirect=True)
def test_the_driver_is_killed_and_resume_measures_the_rest(nodes: Nodes, tmp_path: Path) -> None:
    line = [
        sys.executable, "-m", "flashbench", "run", "--executor", "ray", "--address", nodes.address,
        "--device", "cpu", "--impls", "naive,sdpa", "--seqlens", "16-256", "--head-dims", "16", "--dtypes",
        "fp32", "--causal", "both", "--passes", "fwd,bwd", "--out", str(tmp_path), "--verbose",
    ]  # fmt: skip
    run = Run(line)
    run.until("[7/")
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    before = runfile.load(tmp_path / "results.jsonl").records
    total = len(runfile.load(tmp_path / "results.jsonl").header["cells"])
    assert 7 <= len(before) < total
    again = Run([*line, "--resume"])
    said = again.end()
    assert again.process.returncode == 0, said
    found = runfile.load(tmp_path / "results.jsonl")
    assert len(found.records) == total == len({one.cell.key for one in found.records})
    assert found.records[: len(before)] == before
    assert found.notes == ()
    assert runfile.verify(tmp_path / "results.jsonl").ok


@pytest.mark.parametrize("nodes", [4], indirect=True)
def test_a_thousand_tiny_cells_on_four_workers(nodes: Nodes, record_property: Any) -> None:
    cells, rows, begin = cells_of(500), list[Record](), list[tuple[float, float, int]]()

    def keep(record: Record) -> None:
        if not rows:
            gather(fleet)
            start = time.monotonic()
            done = [ray.get(ref)["wall_s"] for ref, hand in fleet._hands.items() if hand.group]
            begin.append((start, fleet.calls_s + sum(done), len(fleet._left)))
        rows.append(record)

    with fleet_on(nodes) as fleet:
        spent = fleet.run(cells, keep)
        end = time.monotonic()
    assert Counter(one.cell.key for one in rows) == Counter(cell.key for cell in cells)
    assert {one.status for one in rows} == {"ok"}
    assert spent["workers"] == 4
    # from when all four are there and idle to the end: what they did beside measuring
    start, before_s, groups = begin[0]
    overhead_s = (4 * (end - start) - (fleet.calls_s - before_s)) / (2 * groups)
    print(f"{2 * groups} cells in {end - start:.1f} s: scheduling takes {1e3 * overhead_s:.1f} ms a cell")
    record_property("overhead_ms", 1e3 * overhead_s)
    assert 2 * groups > 900
    assert 0 < 1e3 * overhead_s <= MOST_MS
