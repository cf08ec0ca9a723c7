"""A sweep through Slurm: what jobs and driver leave in their folder, submitit's jobs as real processes."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import fake_slurm
import faults
import processes
import pytest
from attention import problem
from test_fleet import DEAD, cli_code
from test_stopped import Run

from flashbench import __version__, environment, kernels, runfile
from flashbench.errors import SpecError, UnavailableError, UsageError
from flashbench.fleet import mailbox, slurm_queue
from flashbench.fleet.mailbox import Mailbox
from flashbench.fleet.slurm_queue import _asked
from flashbench.isolation import Bench
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.profilers import Policy
from flashbench.record import Record
from flashbench.record_json import record_to_json
from flashbench.runner import LOST, RunOptions

QUICK = Policy(limit_s=0.001, min_samples=3, max_samples=3, warmup=1)

# --- the folder


@pytest.fixture
def box(tmp_path: Path) -> Mailbox:
    made = Mailbox(tmp_path / "box")
    made.make()
    return made


def deal(box: Mailbox, count: int) -> None:
    for number in range(count):
        box.write(f"todo/{number:06d}.json", {"cells": [number]})


def test_a_group_is_one_jobs_however_many_reach_for_it(box: Mailbox) -> None:
    deal(box, 60)
    got: list[tuple[int, str]] = []

    def take(name: str) -> None:
        while (claimed := box.claim(name)) is not None:
            number, value = claimed
            assert value == {"cells": [number]}
            got.append((number, name))
            box.answer(number, name, {"rows": [name]})

    threads = [threading.Thread(target=take, args=(f"10_{index}",)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(number for number, _ in got) == list(range(60))
    assert box.numbers("done") == dict(got)
    assert not box.numbers("todo")
    assert not box.numbers("taken")


def test_what_a_job_gives_back_is_the_first_that_another_gets(box: Mailbox) -> None:
    deal(box, 3)
    assert box.claim("a") == (0, {"cells": [0]})
    assert box.claim("b") == (1, {"cells": [1]})
    assert box.give_back("a") == [0]
    assert box.give_back("a") == []
    assert box.claim("b") == (0, {"cells": [0]})
    assert box.withdraw(2)
    assert not box.withdraw(1)
    assert box.claim("c") is None


def test_a_file_is_whole_or_not_there(box: Mailbox) -> None:
    box.write("done/000001@a.json", {"rows": [1.5]})
    assert box.read("done/000001@a.json") == {"rows": [1.5]}
    path = box.folder / "done/000001@a.json"
    path.write_bytes(path.read_bytes().replace(b"1.5", b"1.6"))
    assert box.read("done/000001@a.json") is None
    assert box.read("done/000002@a.json") is None


def test_who_lives_is_told_without_clocks_that_agree(box: Mailbox, monkeypatch: pytest.MonkeyPatch) -> None:
    now, path = [1e6], box.folder / "beats/a"
    monkeypatch.setattr(mailbox, "time", SimpleNamespace(monotonic=lambda: now[0], time_ns=lambda: 5))
    pulse = mailbox.Pulse(box, "a")
    now[0] += 7.0
    assert (pulse.silent_s, pulse.begun) == (7.0, False)
    for number in (5, 6):
        path.write_text(f"{number}\n")
        os.utime(path, (1, 1))
        assert (pulse.silent_s, pulse.begun) == (0.0, True)
        now[0] += 7.0
        assert pulse.silent_s == 7.0
        os.utime(path)
        assert pulse.silent_s == 7.0


def beats(box: Mailbox, after: str) -> str:
    """What is in its file once that is another than before."""
    path, deadline = box.folder / "beats/a", time.monotonic() + 60
    while (found := path.read_text() if path.exists() else after) == after:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return found


def test_a_beat_changes_until_it_ends_and_is_never_read_half_written(
    box: Mailbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who has opened it goes on to read what it was."""
    monkeypatch.setattr(mailbox, "BEAT_S", 0.01)
    with mailbox.Beat(box, "a"):
        first = beats(box, "")
        for _ in range(5):
            with (box.folder / "beats/a").open() as read:
                beats(box, now := read.read())
                read.seek(0)
                assert read.read() == now
    last = (box.folder / "beats/a").read_text()
    assert int(first) < int(last)
    time.sleep(0.05)
    assert (box.folder / "beats/a").read_text() == last


# --- what is asked of sbatch


@pytest.mark.parametrize(
    ("text", "wanted"),
    [
        ("", {}),
        ("partition=gpu,time=2:00:00", {"partition": "gpu", "time": "2:00:00"}),
        ("nodelist=a,b,qos=high", {"nodelist": "a,b", "qos": "high"}),
        ("--mem_per_cpu=4G, exclusive=true", {"mem-per-cpu": "4G", "exclusive": "true"}),
    ],
)
def test_options_of_sbatch(text: str, wanted: dict[str, str]) -> None:
    assert slurm_queue.parse(text, "--slurm-args") == wanted


@pytest.mark.parametrize(
    "text", ["gpu", "=1", "a=", "a=1,a=2", "output=x", "a b=1", "a=1,,", "time=soon", "time=0:00", "a=x\ny"]
)
def test_other_options_are_refused_with_what_is_accepted(text: str) -> None:
    with pytest.raises(SpecError, match=r"--slurm-args .*accepted: "):
        slurm_queue.parse(text, "--slurm-args")


@pytest.mark.parametrize(
    ("text", "wanted"),
    [("90", 90), ("30:00", 30), ("2:00:00", 120), ("1-02:30:00", 1590), ("0:30", 1), ("1:00:01", 61)],
)
def test_time_is_in_minutes(text: str, wanted: int) -> None:
    assert slurm_queue.minutes(text, "--slurm-args") == wanted


def test_a_job_asks_for_a_card_unless_the_line_does() -> None:
    valid = {"gpus_per_node", "cpus_per_task", "time", "gres", "job_name", "wckey"}
    known, more = _asked(True, {}, valid)
    assert (known["gpus_per_node"], known["cpus_per_task"], known["time"]) == ("1", "2", 60)
    assert more == {"requeue": True}
    assert "gpus_per_node" not in _asked(False, {}, valid)[0]
    known, more = _asked(True, {"gres": "gpu:h100:1", "cpus-per-gpu": "8", "licenses": "a"}, valid)
    assert "gpus_per_node" not in known
    assert "cpus_per_task" not in known
    assert more == {"requeue": True, "cpus-per-gpu": "8", "licenses": "a"}


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (["--jobs", "2"], "--jobs 2: is of another; accepted: with --executor slurm"),
        (["--executor", "slurm"], "accepted: with --jobs N"),
        (["--executor", "slurm", "--jobs", "0"], "--jobs '0'"),
        (["--executor", "slurm", "--jobs", "many"], "--jobs 'many'"),
        (["--executor", "slurm", "--jobs", "2", "--slurm-args", "gpu"], "--slurm-args 'gpu'"),
        (["--executor", "slurm", "--jobs", "2", "--devices", "0"], "--devices '0'"),
        (["--executor", "slurm", "--jobs", "2", "--dry-run"], "--dry-run"),
        (["--executor", "slurm", "--jobs", "2", "--counters"], "--counters"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_options_that_do_not_go_together_are_one_line(
    line: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli_code("run", *line) == 2
    assert said in capsys.readouterr().err.replace("\n", " ")


def test_without_submitit_its_executor_names_the_extra(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "submitit", None)
    out = tmp_path / "out"
    assert cli_code("run", "--executor", "slurm", "--jobs", "1", "--out", str(out)) == 3
    assert "flashbench[slurm]" in capsys.readouterr().err
    assert not out.exists()


# --- jobs


@pytest.fixture
def submitit() -> Any:
    return pytest.importorskip("submitit", reason="the package submitit is not installed (flashbench[slurm])")


def cells_of(problems: int) -> list[Cell]:
    return [
        Cell(implementation=name, problem=problem(seqlen_q=n), pass_="fwd")
        for n in range(1, problems + 1)
        for name in ("naive", "sdpa")
    ]


def local(submitit: Any) -> Any:
    """submitit's executor for this host: jobs are processes, and all else as on a cluster."""

    def made(folder: Path) -> Any:
        executor = submitit.LocalExecutor(folder)
        executor.update_parameters(timeout_min=5)
        return executor

    return made


def fleet_on(submitit: Any, folder: Path, jobs: int = 2, command: Any = faults.LIGHT) -> Any:
    from flashbench.fleet.on_slurm import OnSlurm

    made = OnSlurm(
        jobs=jobs,
        folder=folder / "slurm" / "1",
        target_type="cpu",
        command=command,
        executor=local(submitit),
    )
    made.options = RunOptions(environment=made.facts, policy=QUICK, cell_timeout_s=20.0)
    return made


def tasks(fleet: Any) -> list[int]:
    """The processes that measure for the jobs."""
    found = []
    for hand in fleet._hands.values():
        pid = hand.job._process.pid
        found += [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return found


@pytest.fixture
def tag(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    name, surroundings = processes.tagged()
    monkeypatch.setattr(kernels, "registry", faults.registry)
    monkeypatch.setenv(processes.TAG, surroundings[processes.TAG])
    yield name
    assert processes.left(name, within_s=20.0) == []


@pytest.mark.slow
def test_jobs_that_are_killed_and_preempted_cost_no_cell(submitit: Any, tag: str, tmp_path: Path) -> None:
    cells, rows, ended = cells_of(60), list[Record](), list[str]()

    def keep(record: Record) -> None:
        rows.append(record)
        if len(ended) == 0 and len(rows) >= 4:
            ended.append("killed")
            os.kill(tasks(fleet)[0], signal.SIGKILL)
        elif len(ended) == 1 and len(rows) >= 30 and len(found := tasks(fleet)) > 0:
            ended.append("preempted")
            os.kill(found[-1], signal.SIGUSR2)

    with fleet_on(submitit, tmp_path) as fleet:
        spent = fleet.run(cells, keep)
    assert ended == ["killed", "preempted"]
    assert Counter(one.cell.key for one in rows) == Counter(cell.key for cell in cells)
    assert {one.status for one in rows} == {"ok"}
    assert spent["workers"] >= 2
    groups = {(one.cell.problem, one.environment["device"]) for one in rows}
    assert len(groups) == 60, "a group stays on one card"
    assert all(one.environment["host"] for one in rows)
    assert any(one.environment["neighbours"] for one in rows)


@pytest.mark.slow
def test_where_all_goes_well_nothing_is_left_and_a_stop_keeps_whole_groups(
    submitit: Any, tag: str, tmp_path: Path
) -> None:
    cells, rows = cells_of(200), list[Record]()
    with fleet_on(submitit, tmp_path) as fleet:
        fleet.run(cells, rows.append, stop=lambda: len(rows) > 10)
    assert 10 < len(rows) < len(cells)
    assert len(rows) % 2 == 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_cards_that_measure_nothing_end_the_sweep(submitit: Any, tag: str, tmp_path: Path) -> None:
    rows: list[Record] = []
    with pytest.raises(UnavailableError, match=LOST), fleet_on(submitit, tmp_path, 1, DEAD) as fleet:
        fleet.run(cells_of(8), rows.append)
    assert (tmp_path / "slurm" / "1" / "jobs").exists(), "the logs stay"


# --- the driver, with jobs that are threads of the test


class Job:
    """A job as submitit has them."""

    def __init__(self, number: int, box: Mailbox) -> None:
        self.number, self.job_id, self.box = number, f"7_{number}", box
        self.state, self.cancelled = "RUNNING", False
        self.paths = SimpleNamespace(result_pickle=box.folder / f"result{number}")

    def done(self) -> bool:
        return self.state not in ("RUNNING", "PENDING")

    def get_info(self, mode: str) -> dict[str, str]:
        return {}

    def stderr(self) -> str:
        return "Killed"

    def exception(self) -> None:
        return None

    def cancel(self, check: bool) -> None:
        self.cancelled = True

    def card(self, name: str) -> dict[str, Any]:
        own = {"flashbench": __version__, "source_hash": environment.source_hash()}
        facts = {**own, "host": "a", "device": name, "device_name": "CPU"}
        self.box.write(f"cards/{self.job_id}.json", {"target": asdict(Target()), "facts": facts})
        return facts

    def measured(self, number: int, group: dict[str, Any], facts: dict[str, Any]) -> None:
        bench = Bench(Target(), RunOptions(environment=facts))
        cells = map(Cell.from_json, group["cells"])
        rows = [record_to_json(bench.row(cell, {"status": "failed", "reason": "none"})) for cell in cells]
        self.box.answer(number, self.job_id, {"rows": rows, "wall_s": 0.0, "facts": facts})


class Player:
    """submitit's executor, whose jobs do as the test says, each in a thread; the last play is repeated."""

    def __init__(self, *plays: Callable[[Job], None]) -> None:
        self.plays, self.jobs = list(plays), list[Job]()

    def __call__(self, folder: Path) -> Player:
        self.box = Mailbox(folder.parent)
        return self

    def batch(self) -> Any:
        return nullcontext()

    def submit(self, _: object) -> Job:
        job = Job(len(self.jobs), self.box)
        self.jobs.append(job)
        play = self.plays[min(job.number, len(self.plays) - 1)]
        threading.Thread(target=play, args=(job,), daemon=True).start()
        return job


def ready(job: Job, name: str = "cpu:1") -> dict[str, Any]:
    """The facts of the job's card, once it may begin."""
    facts = job.card(name)
    with mailbox.Beat(job.box, job.job_id):
        while job.box.read("setup.json") is None and not job.box.over:
            time.sleep(0.01)
    return facts


def good(job: Job) -> None:
    facts = ready(job, f"cpu:{job.job_id}")
    while claimed := job.box.claim(job.job_id):
        job.measured(*claimed, facts)
    job.paths.result_pickle.touch()
    job.state = "COMPLETED"


def played(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *plays: Callable[[Job], None], **options: Any
) -> tuple[list[Record], Player]:  # fmt: skip
    from flashbench.fleet import on_slurm

    monkeypatch.setitem(sys.modules, "submitit", ModuleType("submitit"))
    monkeypatch.setattr(on_slurm, "LOOK_EVERY_S", 0.02)
    player, rows = Player(*plays), list[Record]()
    with on_slurm.OnSlurm(jobs=1, folder=folder / "slurm" / "1", target_type="cpu", executor=player) as fleet:
        fleet.options = RunOptions(environment=fleet.facts, **options)
        fleet.run(cells_of(4), rows.append)
    return rows, player


def once_each(rows: list[Record]) -> bool:
    return Counter(one.cell.key for one in rows) == Counter(cell.key for cell in cells_of(4))


def test_a_group_whose_job_is_gone_is_the_next_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def dies(job: Job) -> None:
        ready(job)
        assert job.box.claim(job.job_id)
        job.state = "NODE_FAIL"

    rows, player = played(tmp_path, monkeypatch, dies, good)
    assert once_each(rows)
    assert len(player.jobs) == 2
    assert {one.environment["device"] for one in rows} == {"cpu:7_1"}
    assert (tmp_path / "slurm" / "1" / "todo").exists(), "the folder stays where a job was lost"


def test_a_group_that_takes_every_job_with_it_has_rows_that_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def dies_of_the_first(job: Job) -> None:
        facts = ready(job)
        while claimed := job.box.claim(job.job_id):
            if claimed[0] == 0:
                job.state = "OUT_OF_MEMORY"
                return
            job.measured(*claimed, facts)
        job.paths.result_pickle.touch()
        job.state = "COMPLETED"

    rows, player = played(tmp_path, monkeypatch, dies_of_the_first)
    assert once_each(rows)
    assert len(player.jobs) == 4
    lost = [one for one in rows if one.status == "skipped"]
    assert len(lost) == 2
    assert all((one.reason or "").startswith(f"{LOST}: 3 times with the job") for one in lost)
    assert not any(map(runfile.is_final, lost))


def test_a_job_that_hangs_is_given_up_and_what_it_says_later_counts_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    clock = SimpleNamespace(monotonic=lambda: now[0], time_ns=time.time_ns)
    monkeypatch.setattr(mailbox, "time", clock)
    late, told = threading.Event(), threading.Event()

    def hangs(job: Job) -> None:
        facts = ready(job, "cpu:late")
        claimed = job.box.claim(job.job_id)
        assert claimed
        while not job.cancelled:
            now[0] += 2 * mailbox.SILENT_S
            time.sleep(0.02)
        assert late.wait(60.0)
        job.measured(*claimed, facts)
        told.set()

    def takes_over(job: Job) -> None:
        facts = ready(job, "cpu:next")
        with mailbox.Beat(job.box, job.job_id):
            while claimed := job.box.claim(job.job_id):
                late.set()  # both have the first
                assert told.wait(60.0)
                job.measured(*claimed, facts)
        job.paths.result_pickle.touch()
        job.state = "COMPLETED"

    rows, player = played(tmp_path, monkeypatch, hangs, takes_over)
    assert once_each(rows)
    assert player.jobs[0].cancelled
    assert {one.environment["device"] for one in rows} <= {"cpu:late", "cpu:next"}


def test_a_job_that_began_again_elsewhere_has_rows_of_its_new_card(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def moves(job: Job) -> None:
        facts = ready(job, "cpu:old")
        claimed = job.box.claim(job.job_id)
        assert claimed
        job.measured(*claimed, facts)
        time.sleep(0.2)
        facts = job.card("cpu:new")
        while claimed := job.box.claim(job.job_id):
            job.measured(*claimed, facts)
        job.paths.result_pickle.touch()  # first: the folder of a job that is over goes
        job.state = "COMPLETED"

    rows, _ = played(tmp_path, monkeypatch, moves)
    assert once_each(rows)
    assert Counter(one.environment["device"] for one in rows) == {"cpu:old": 2, "cpu:new": 6}
    assert not (tmp_path / "slurm").exists()


def test_what_the_time_budget_does_not_reach_is_skipped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashbench.fleet import on_slurm

    now = [0.0]
    monkeypatch.setattr(on_slurm, "time", SimpleNamespace(monotonic=lambda: now[0], sleep=time.sleep))

    def slow(job: Job) -> None:
        facts = ready(job)
        claimed = job.box.claim(job.job_id)
        assert claimed
        now[0] = 0.5
        deadline = time.monotonic() + 60
        while job.box.numbers("todo") and time.monotonic() < deadline:
            time.sleep(0.01)
        job.measured(*claimed, facts)
        good(job)

    rows, _ = played(tmp_path, monkeypatch, slow, time_budget_s=0.2)
    assert once_each(rows)
    assert Counter(one.status for one in rows) == {"failed": 2, "skipped": 6}


def test_another_flashbench_on_a_node_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def other(job: Job) -> None:
        facts = {"flashbench": "0.0", "source_hash": "x", "host": "a", "device": "cpu:1"}
        job.box.write(f"cards/{job.job_id}.json", {"target": asdict(Target()), "facts": facts})

    with pytest.raises(UsageError, match=r"--executor 'slurm': a has flashbench 0\.0"):
        played(tmp_path, monkeypatch, other)


# --- the command, on a Slurm of this host


@pytest.fixture
def slurm(submitit: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    for name, value in fake_slurm.installed(tmp_path / "fake").items():
        monkeypatch.setenv(name, value)
    return tmp_path / "fake" / "state"


def line_of(out: Path, *more: str) -> list[str]:
    return [
        sys.executable, "-m", "flashbench", "run", "--executor", "slurm", "--jobs", "2", "--device", "cpu",
        "--impls", "naive,sdpa", "--seqlens", "16-256", "--head-dims", "16", "--dtypes", "fp32",
        "--causal", "both", "--passes", "fwd,bwd", "--slurm-args", "partition=short,time=30",
        "--out", str(out), "--verbose", *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_the_driver_is_killed_and_resume_measures_the_rest(slurm: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    run = Run(line_of(out))
    run.until("[7/")
    run.process.send_signal(signal.SIGKILL)
    run.process.wait()
    asked = (slurm / "last.sbatch").read_text()
    for wanted in ("--partition=short", "--time=30", "--array=0-1%2", "--requeue", "--cpus-per-task=2"):
        assert f"#SBATCH {wanted}\n" in asked
    assert "gpus" not in asked
    before = runfile.load(out / "results.jsonl").records
    total = len(runfile.load(out / "results.jsonl").header["cells"])
    assert 7 <= len(before) < total
    again = Run(line_of(out, "--resume"))
    said = again.end()
    assert again.process.returncode == 0, said
    found = runfile.load(out / "results.jsonl")
    assert len(found.records) == total == len({one.cell.key for one in found.records})
    assert found.records[: len(before)] == before
    assert runfile.verify(out / "results.jsonl").ok
    assert processes.left(run.tag) == []


@pytest.mark.slow
def test_while_no_card_is_free_the_sweep_waits_and_an_interrupt_takes_jobs_back(
    slurm: Path, tmp_path: Path
) -> None:
    (slurm / "hold").touch()
    run = Run(line_of(tmp_path / "out"))
    run.until("waiting for the first card")
    deadline = time.monotonic() + 60
    while len(fake_slurm.jobs(slurm)) < 2:
        assert time.monotonic() < deadline
        time.sleep(0.1)
    time.sleep(1.0)
    run.process.send_signal(signal.SIGTERM)
    said = run.end()
    assert run.process.returncode == 130, said
    assert "Traceback" not in said
    assert {job["state"] for job in fake_slurm.jobs(slurm).values()} == {"CANCELLED"}


@pytest.mark.slow
def test_a_refusal_of_sbatch_and_a_host_without_it_are_one_line(
    slurm: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sbatch = slurm.parent / "bin" / "sbatch"
    sbatch.write_text("#!/bin/sh\necho 'sbatch: error: invalid partition specified: short' >&2\nexit 1\n")
    assert cli_code(*line_of(tmp_path / "out")[3:]) == 3
    said = capsys.readouterr().err
    assert "invalid partition specified: short" in said
    assert "Traceback" not in said
    bash = Path(shutil.which("bash") or "")
    monkeypatch.setenv("PATH", str(bash.parent))
    assert cli_code(*line_of(tmp_path / "other")[3:]) == 3
    said = capsys.readouterr().err
    assert "'sbatch' is not found on this host" in said
    assert "--executor local" in said
