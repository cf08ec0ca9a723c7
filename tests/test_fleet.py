"""A sweep on several cards of a host: each cell once, groups whole, cards apart, whatever happens to one."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections import defaultdict
from dataclasses import replace
from pathlib import Path
from typing import Any

import faults
import processes
import pytest
import synthetic
from attention import problem
from test_stopped import CELLS, Run, command, held

from flashbench import cli, environment, fleet, kernels, runfile, runner, table
from flashbench.errors import SpecError, UnavailableError
from flashbench.fleet import cards, deal, on_ray
from flashbench.judge.cards import across
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.profilers import Policy
from flashbench.record import Record
from flashbench.runfile import RunFile
from flashbench.runner import LOST, RunOptions

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for children in /proc")

OPTIONS: dict[str, Any] = {"cell_timeout_s": 20.0}
assert held  # a fixture
DEAD = (sys.executable, "-c", "raise SystemExit('no card here')")


def card(number: int, **facts: Any) -> fleet.Card:
    about = {"host": "here", "device": f"cpu:{number}", "device_name": "CPU", **facts}
    return fleet.Card(name=about["device"], target=Target(), facts=about, surroundings={"WHICH": str(number)})


def cells_of(names: list[str]) -> list[Cell]:
    """A problem for each name, in which the fault is between two that are right."""
    return [
        Cell(implementation=one, problem=problem(seqlen_q=number + 1), pass_="fwd")
        for number, name in enumerate(names)
        for one in ("naive", name, "sdpa")
    ]


class Swept:
    """A sweep on so many cards, by workers that call the faults alone."""

    def __init__(
        self, names: list[str], folder: Path, *, dead: tuple[int, ...] = (), workers: int = 2, **options: Any
    ) -> None:
        self.tag, surroundings = processes.tagged()
        surroundings["FAULTS_ONCE"] = str(folder / "once")
        self.cells = cells_of(names)
        self.records: list[Record] = []
        self.threads = set[int]()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "registry", faults.registry)
            patch.setattr(os, "environ", surroundings)
            faults.patience(patch)
            known = RunOptions(**{**OPTIONS, **options})
            made = fleet.Local([card(n) for n in range(workers)], known, command=faults.LIGHT)
            for number in dead:
                made._seats[number].bench._supply._command = DEAD
            with made:
                self.spent = made.run(self.cells, self._keep)
        self.left = processes.left(self.tag)

    def _keep(self, record: Record) -> None:
        self.threads.add(threading.get_ident())
        self.records.append(record)

    @property
    def where(self) -> dict[Any, set[str]]:
        """The cards on which each group was measured."""
        found = defaultdict(set)
        for record in self.records:
            found[record.cell.problem, record.cell.pass_].add(record.environment["device"])
        return found


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    names = ["right", "segfault", "right", "once", "killed", "hang", *["right"] * 10]
    return Swept(names, tmp_path_factory.mktemp("once"), cell_timeout_s=0.5)


def test_every_cell_has_one_row_whatever_becomes_of_workers(swept: Swept) -> None:
    assert sorted(one.cell.key for one in swept.records) == sorted(cell.key for cell in swept.cells)
    bad = {row.cell.implementation: row.status for row in swept.records if row.status != "ok"}
    assert bad == {"segfault": "failed", "killed": "failed", "hang": "timeout"}
    assert swept.left == []
    assert swept.spent["workers"] == 2


def test_a_group_stays_on_one_card_and_both_are_at_work(swept: Swept) -> None:
    assert all(len(where) == 1 for where in swept.where.values())
    assert set.union(*swept.where.values()) == {"cpu:0", "cpu:1"}


def test_rows_come_to_the_thread_that_asked_and_say_where_they_were_measured(swept: Swept) -> None:
    assert swept.threads == {threading.get_ident()}
    for row in swept.records:
        about = row.environment
        assert (about["host"], about["device_name"]) == ("here", "CPU")
        assert about["device"] in ("cpu:0", "cpu:1")
        assert set(about["neighbours"]) <= {"cpu:0", "cpu:1"} - {about["device"]}
    assert sum(bool(row.environment["neighbours"]) for row in swept.records) > len(swept.records) / 2


def test_the_groups_of_a_card_that_is_lost_are_measured_by_another(tmp_path: Path) -> None:
    swept = Swept(["right"] * 6, tmp_path, dead=(0,))
    assert sorted(one.cell.key for one in swept.records) == sorted(cell.key for cell in swept.cells)
    assert {one.status for one in swept.records} == {"ok"}
    assert set.union(*swept.where.values()) == {"cpu:1"}


def test_where_every_card_is_lost_resume_measures_the_cells(tmp_path: Path) -> None:
    swept = Swept(["right"] * 3, tmp_path, dead=(0, 1))
    # those that a card had when it was lost are another's, and nobody's in the end
    assert sorted(one.cell.key for one in swept.records) == sorted(cell.key for cell in swept.cells)
    assert not any(map(runfile.is_final, swept.records))
    assert all((one.reason or "").startswith(LOST) for one in swept.records)


def test_a_stop_finishes_the_groups_at_work_and_an_interrupt_ends_all(tmp_path: Path, held: Path) -> None:
    tag, surroundings = processes.tagged()
    surroundings[faults.HELD] = str(held)
    cells = cells_of(["held"] * 40)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "registry", faults.registry)
        patch.setattr(os, "environ", surroundings)
        rows: list[Record] = []

        def keep(record: Record) -> None:
            rows.append(record)  # by which a stop is asked for
            held.unlink(missing_ok=True)

        with fleet.Local([card(0), card(1)], RunOptions(**OPTIONS), command=faults.LIGHT) as made:
            made.run(cells, keep, stop=lambda: bool(rows))
        assert 0 < len(rows) <= 4 * 3  # on each card the group at work, and one more that it may have begun
        assert len(rows) % 3 == 0

        def interrupt(_: Record) -> None:
            raise KeyboardInterrupt

        hanging = cells_of([*["hang"] * 4, "right"])  # the longest comes first
        with (
            pytest.raises(KeyboardInterrupt),
            fleet.Local([card(0), card(1)], RunOptions(**OPTIONS), command=faults.LIGHT) as made,
        ):
            made.run(hanging, interrupt)
    assert processes.left(tag) == []


def fleet_command(out: Path, *more: str) -> list[str]:
    argv = command(out, *more)
    at = argv.index("--device")
    return [*argv[:at], "--executor", "local", "--devices", "cpu,cpu", *argv[at + 2 :]]


def test_killed_in_the_middle_a_sweep_resumes_to_one_row_a_cell(tmp_path: Path, held: Path) -> None:
    out = tmp_path / "out"
    run = Run(fleet_command(out), **{faults.HELD: held})
    run.until("[3/")
    run.process.send_signal(signal.SIGKILL)
    run.end()
    before = runfile.load(out / "results.jsonl").records
    assert 3 <= len(before) < CELLS
    run = Run(fleet_command(out, "--resume"))
    run.end()
    found = runfile.load(out / "results.jsonl")
    assert found.notes == ()
    assert len({one.cell.key for one in found.records}) == len(found.records) == CELLS
    assert found.records[: len(before)] == before
    assert found.header["options"]["executor"] == "local"


@pytest.mark.slow
def test_two_real_workers_share_the_cpu_and_its_cores() -> None:
    quick = Policy(limit_s=0.001, min_samples=3, max_samples=3, warmup=1)
    cells = [
        Cell(implementation=name, problem=problem(seqlen_q=n), pass_="fwd")
        for n in range(1, 7)
        for name in ("naive", "sdpa")
    ]
    two = cards.cards_of(("cpu", "cpu"))
    rows: list[Record] = []
    with fleet.Local(two, RunOptions(policy=quick)) as made:
        made.run(cells, rows.append)
    assert sorted(one.cell.key for one in rows) == sorted(cell.key for cell in cells)
    assert {one.status for one in rows} == {"ok"}
    assert {one.environment["device"] for one in rows} == {"cpu:0", "cpu:1"}
    threads = max(1, len(os.sched_getaffinity(0)) // 2)
    assert {one.environment["cpu_threads"] for one in rows} == {threads}
    assert all(one.environment["host"] and one.environment["torch"] for one in rows)


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("0,1", ("cuda:0", "cuda:1")), ("cuda:3", ("cuda:3",)), ("cpu, cpu", ("cpu", "cpu")), ("all", ("all",))],
)
def test_devices_are_gpus_or_workers_on_the_cpu(text: str, wanted: tuple[str, ...]) -> None:
    assert cards.parse(text, "--devices") == wanted


@pytest.mark.parametrize("text", ["", "0,", "cpu,0", "0,0", "0,cuda:0", "-1", "all,0", "mps"])
def test_other_devices_are_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(SpecError, match=r"--devices .*; accepted: "):
        cards.parse(text, "--devices")


@pytest.mark.parametrize(("devices", "said"), [(("cuda:0", "cuda:1"), "'cuda:0'"), (("all",), "'all'")])
def test_a_card_that_is_not_there_is_told_by_the_option_that_named_it(
    devices: tuple[str, ...], said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    none = environment.GpuStatus(kind="no-gpu", message="no card")
    monkeypatch.setattr(environment, "gpu_status", lambda: none)
    with pytest.raises(UnavailableError, match=rf"^--devices {said}: no card"):
        cards.cards_of(devices)
    line = () if devices == ("all",) else ("--devices", "cuda:0")
    with pytest.raises(SystemExit) as ended:
        cli.main(["run", "--executor", "local", *line])
    assert ended.value.code == 3
    assert capsys.readouterr().err.startswith(f"error: --devices {said}: no card")


class FakeRay:
    """A cluster of one node with cores."""

    def init(self, **_: object) -> None:
        return

    def nodes(self) -> list[dict[str, Any]]:
        return [{"Alive": True, "Resources": {"CPU": 2.0}}]


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"target_type": "cpu", "address": "127.0.0.1:1"},
            "no cluster at --address '127.0.0.1:1': Connection",
        ),
        ({"target_type": "cpu", "address": "127.0.0.1:99999"}, "no cluster at --address '127.0.0.1:99999'"),
        ({"target_type": "cpu", "accelerator_type": "H100"}, "no node of accelerator type 'H100'"),
        ({"target_type": "cuda"}, "no node with a GPU"),
    ],
)
def test_a_cluster_or_kind_that_is_not_there_is_told_at_once(
    asked: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(on_ray, "_ray", FakeRay)
    with pytest.raises(UnavailableError, match=said):
        on_ray.OnRay(**asked)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--devices", "0"], "--devices '0': is of another; accepted: with --executor local"),
        (["--address", "auto", "--executor", "local"], "--address 'auto'"),
        (["--executor", "pbs"], "--executor 'pbs' is not known (known: local, ray, slurm)"),
        (["--executor", "local", "--device", "cpu"], "--device 'cpu'"),
        (["--executor", "local", "--devices", "cpu,cpu", "--in-process"], "--in-process"),
        (["--executor", "local", "--devices", "cpu,cpu", "--counters"], "--counters"),
    ],
    ids=" ".join,
)
def test_options_that_do_not_go_together_are_one_line(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_code("run", *line) == 2
    told = capsys.readouterr().err
    assert said in told.replace("\n", " ")


def cli_code(*line: str) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["flashbench", *line])
        with pytest.raises(SystemExit) as stop:
            cli.main()
    return int(stop.value.code or 0)


def test_without_ray_its_executor_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    assert cli_code("run", "--executor", "ray") == 3
    assert "flashbench[ray]" in capsys.readouterr().err


def test_groups_are_dealt_longest_first_and_whole() -> None:
    cells = [
        Cell(implementation=name, problem=problem(seqlen_q=n, seqlen_k=n), pass_="fwd")
        for n in (2048, 8192, 512, 4096)
        for name in ("naive", "sdpa")
    ]
    groups = deal.longest_first(cells, Target(), RunOptions())
    assert [group[0].problem.seqlen_q for group in groups] == [8192, 4096, 2048, 512]
    assert all([cell.implementation for cell in group] == ["naive", "sdpa"] for group in groups)


def test_nobody_goes_home_while_a_group_may_come_back() -> None:
    [group] = runner.groups(cells_of(["right"]))
    dealt, found = deal.Deal([group], 2), []
    first = dealt.take(runner.never)
    other = threading.Thread(target=lambda: found.append(dealt.take(runner.never)))
    other.start()
    time.sleep(0.05)
    assert not found
    assert first == group
    dealt.done(group[1:])
    other.join(60.0)
    assert found == [group[1:]]
    dealt.done()
    assert dealt.take(runner.never) is None


def test_neighbours_are_of_the_same_host_and_time() -> None:
    seen = deal.Neighbours()
    seen.begin("a", "cuda:0")
    seen.begin("b", "cuda:0")
    seen.begin("a", "cuda:1")
    seen.end("a", "cuda:1")
    seen.begin("a", "cuda:2")
    assert seen.of("a", "cuda:0") == ["cuda:1", "cuda:2"]
    assert seen.of("a", "cuda:2") == ["cuda:0"]
    assert seen.of("b", "cuda:0") == []


H200 = "NVIDIA H200"


def on(record: Record, uuid: str, host: str = "one", **facts: Any) -> Record:
    about = {"device_name": synthetic.H100, "host": host, "uuid": uuid, "device": "cuda:0", **facts}
    return replace(record, environment=about)


def file_of(records: list[Record], name: str = "a") -> RunFile:
    header = {
        "environment": {"device_name": synthetic.H100, "host": "one", "uuid": "GPU-1", "num_sms": 132,
                        "power_limit_w": 700.0},
        "options": {}, "cells": [record.cell.key for record in records],
    }  # fmt: skip
    return RunFile(path=Path(f"{name}.jsonl"), header=header, records=tuple(records))


def test_rows_of_two_kinds_of_card_are_two_runs_each_with_its_own_card() -> None:
    rows = [
        on(synthetic.record("sdpa", 1024), "GPU-1"),
        on(synthetic.record("sdpa", 2048), "GPU-2", "two", device_name=H200, num_sms=132),
    ]
    frame = table.build([file_of(rows)])
    assert list(frame["run"]) == [f"a on {synthetic.H100}", f"a on {H200}"]
    assert list(frame["device"]) == [synthetic.H100, H200]
    assert list(frame["card"]) == ["one cuda:0", "two cuda:0"]
    assert set(table.headers([file_of(rows)])) == set(frame["run"])


def test_no_ratio_is_of_two_cards() -> None:
    naive, sdpa = synthetic.record("naive", 1024), synthetic.record("sdpa", 1024)
    same = table.build([file_of([on(naive, "GPU-1"), on(sdpa, "GPU-1")])])
    mixed = table.build([file_of([on(naive, "GPU-1"), on(sdpa, "GPU-2")])])
    assert same["speedup_over_naive"].notna().all()
    assert mixed["speedup_over_naive"].isna()[1]


def test_a_table_is_in_the_order_of_the_plan() -> None:
    rows = [on(synthetic.record("sdpa", n), "GPU-1") for n in (4096, 1024, 2048)]
    file = file_of(rows)
    asked = [rows[1].cell.key, rows[2].cell.key, rows[0].cell.key]
    planned = replace(file, header={**file.header, "cells": asked})
    assert list(table.build([planned])["key"]) == asked


def slower(record: Record, factor: float) -> Record:
    assert record.samples
    times = tuple(time * factor for time in record.samples.samples_s)
    return replace(record, samples=replace(record.samples, samples_s=times))


def cards_at(factors: dict[str, float]) -> list[RunFile]:
    return [
        file_of([on(slower(synthetic.record("sdpa", n), factor), uuid, host=uuid.lower())
                 for n in (1024, 2048, 4096)], uuid)
        for uuid, factor in factors.items()
    ]  # fmt: skip


def test_the_card_that_stands_apart_is_named() -> None:
    found = across(cards_at({"GPU-1": 1.0, "GPU-2": 1.002, "GPU-3": 1.06, "GPU-4": 0.998}), 0.02)
    assert found.odd is not None
    assert (found.odd.uuid, found.odd.name, found.odd.cells) == ("GPU-3", "gpu-3 cuda:0", 3)
    assert found.odd.ratio == pytest.approx(1.06, abs=1e-3)
    assert found.spread == pytest.approx(1.06 / 0.998 - 1, abs=4e-3)


def test_cards_that_are_alike_or_two_alone_name_none() -> None:
    assert across(cards_at({"GPU-1": 1.0, "GPU-2": 1.004, "GPU-3": 0.997}), 0.02).odd is None
    two = across(cards_at({"GPU-1": 1.0, "GPU-2": 1.1}), 0.02)
    assert two.odd is None
    assert two.spread == pytest.approx(1.1**2 - 1)


FLEET = Path(__file__).resolve().parent.parent / "reports" / "h200-sxm-x2" / "fleet"


def test_two_cards_halve_the_committed_sweep() -> None:
    one, two = (runfile.load(FLEET / name / "results.jsonl") for name in ("one", "two"))
    assert {row.cell for row in one.records} == {row.cell for row in two.records}
    assert len(one.records) == len(two.records) == 240
    assert {row.environment["device_name"] for row in (*one.records, *two.records)} == {"NVIDIA H200"}
    measured = [row for row in two.records if row.status == "ok"]
    assert len({row.environment["uuid"] for row in measured}) == 2
    assert all(row.environment["neighbours"] for row in measured)
    [alone], [shared] = one.timings, two.timings
    assert alone["wall_s"] >= 1.8 * shared["wall_s"]
    said = (FLEET.parents[2] / "docs" / "fleet.md").read_text(encoding="utf-8")
    faster = f"{alone['wall_s'] / shared['wall_s']:.1f} times as fast"
    assert f"took {shared['wall_s']:.0f} s, on one of them {alone['wall_s']:.0f} s" in said
    assert faster in said
