"""Whatever a cell does to the process that measures it, its row says so and every other cell is measured."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import processes
import pytest
from attention import problem

from flashbench import kernels, runner
from flashbench.isolation import Bench, death, lifeline, protocol, supply, wire, worker
from flashbench.isolation.limit import Limit
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.profilers import Policy
from flashbench.record import Record, Samples
from flashbench.record_json import record_to_json
from flashbench.runner import RunOptions

pytestmark = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="looks for children in /proc")

QUICK = Policy(limit_s=0.001, min_samples=3, max_samples=3, warmup=1)
OPTIONS: dict[str, Any] = {"policy": QUICK, "environment": {"device_name": "CPU"}, "cell_timeout_s": 20.0}

WROTE = "it wrote to the pipe of its process's messages:"
EXPECTED = {
    "segfault": ("failed", "its process was killed by SIGSEGV"),
    "segfault-many": ("failed", "its process was killed by SIGSEGV: Segmentation fault (__init__.py:"),
    "hang-deaf": ("timeout", "no sign of life for 0.5s (faults.py:"),
    "retried": ("failed", "RuntimeError: after 0 others (faults.py:"),
    "abort": ("failed", "its process was killed by SIGABRT: CUDA error: device-side assert triggered (fau"),
    "killed": ("failed", "its process was killed by SIGKILL"),
    "os-exit": ("failed", "its process exited with code 7"),
    "exit": ("failed", "SystemExit: bye"),
    "hang": ("timeout", "no sign of life for 0.5s (faults.py:"),
    "oom": ("oom", "OutOfMemoryError: CUDA out of memory"),
    "lost": ("failed", "RuntimeError: CUDA error: an illegal memory access was encountered (faults.py:"),
    "once": ("ok", None),
    "garbage": ("ok", None),
    "pipe-done": ("failed", f"""{WROTE} b'{{"done": true}}\\n'"""),
    "pipe-broken": ("failed", f"{WROTE} b'\\xff\\x1b[2J"),
    "pipe-flood": ("failed", f"{WROTE} b'xxxxx"),
    "forged-done": ("failed", "its process said what cannot be: ['done']"),
    "fork": ("ok", None),
    "fork-sleeper": ("ok", None),
    "guard-killed": ("failed", "its process was killed by SIGKILL"),
    "detached": ("ok", None),
    "daemon": ("ok", None),
    "late-segfault": ("failed", "its process was killed by SIGSEGV"),
    "late-lost": ("failed", "RuntimeError: CUDA error: an illegal memory access"),
    "no-row": ("failed", "TypeError: no row of it can be made"),
}  # fmt: skip
"""Status and how the reason begins."""


class Swept:
    """A sweep in which each fault has a problem of its own, between two that are right."""

    def __init__(self, names: list[str], command: tuple[str, ...], folder: Path, **options: Any) -> None:
        self.tag, surroundings = processes.tagged()
        surroundings["FAULTS_ONCE"] = str(folder / "once")
        self.cells = [
            Cell(implementation=one, problem=problem(seqlen_q=number + 1), pass_="fwd")
            for number, name in enumerate(names)
            for one in ("naive", name, "sdpa")
        ]
        self.records: list[Record] = []
        self.begun: list[Cell] = []
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "registry", faults.registry)
            patch.setattr(os, "environ", surroundings)
            faults.patience(patch)
            with Bench(Target(), RunOptions(**{**OPTIONS, **options}), command=command) as bench:
                self.spent = bench.run(
                    self.cells, self.records.append, lambda *told: self.begun.append(told[2])
                )
        self.left = processes.left(self.tag)

    def of(self, name: str) -> list[Record]:
        """The rows of the problem in which the fault is: naive, the fault, sdpa."""
        work = next(cell.problem for cell in self.cells if cell.implementation == name)
        rows = {record.cell.implementation: record for record in self.records if record.cell.problem == work}
        return [rows["naive"], rows[name], rows["sdpa"]]


@pytest.fixture(scope="module")
def swept(tmp_path_factory: pytest.TempPathFactory) -> Swept:
    """All faults, by a worker that calls them in place of attention."""
    return Swept(list(EXPECTED), faults.LIGHT, tmp_path_factory.mktemp("once"), cell_timeout_s=0.5)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_row_says_what_became_of_its_cell_and_the_others_are_measured(swept: Swept, name: str) -> None:
    before, record, after = swept.of(name)
    status, reason = EXPECTED[name]
    assert (before.status, after.status) == ("ok", "ok")
    assert record.status == status, record.reason
    assert (record.reason or "").startswith(reason or "")
    assert "\n" not in (record.reason or "")


def test_what_detaches_itself_ends_with_its_worker_and_nothing_else_does(tmp_path: Path) -> None:
    """Also where the worker is replaced by nobody's fault; a child of the test's own is left alone."""
    with subprocess.Popen(["sleep", "222"]) as own:
        for name in ("detached", "daemon", "guard-killed"):
            assert Swept([name], faults.LIGHT, tmp_path).left == [], name
        assert own.poll() is None
        own.kill()


LATE_SHOWN = """
import os, sys  # LATE
print(flush=True)
sys.stdin.readline()
more = {"arguments": [""] * 200_000, "variables": {str(n): "" for n in range(90_000)}}[sys.argv[1]]
if sys.argv[1] == "arguments":
    os.execv("/bin/sh", ["sh", "-c", "sleep 222; :", *more])
os.execvpe("sleep", ["sleep", "222"], {**os.environ, **more})
"""
"""Begins a program whose many arguments or variables the kernel lays out before /proc shows the latter."""


@pytest.mark.parametrize("many", ["arguments", "variables"])
def test_what_just_begins_a_program_is_known_by_its_mark_once_that_can_be_told(
    many: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever starts a program goes on before /proc shows its environment."""
    monkeypatch.setattr(lifeline, "LOOKING_S", 60.0)
    met = 0
    for _ in range(30):
        with subprocess.Popen(
            [sys.executable, "-S", "-c", LATE_SHOWN, many], env={**os.environ, lifeline.MARK: "mine"},
            start_new_session=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        ) as child:  # fmt: skip
            assert child.stdin is not None
            assert child.stdout is not None
            monkeypatch.setattr(lifeline, "_processes", lambda pid=child.pid: [pid, os.getpid()])
            here = Path(f"/proc/{child.pid}")
            child.stdout.readline()
            child.stdin.close()
            while (shown := (here / "environ").read_bytes()) and b"LATE" in (here / "cmdline").read_bytes():
                pass
            lifeline.end_marked("mine")
            try:
                assert child.wait(60.0) == -signal.SIGKILL
            finally:
                with suppress(OSError):
                    os.killpg(child.pid, signal.SIGKILL)
        if (met := met + (not shown)) == 3:
            return
    pytest.skip("the moment in which it is not shown was never met")


def test_who_looks_for_marked_processes_and_is_held_up_still_finds_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    late = iter(range(0, 10**9, 1000))
    with subprocess.Popen(["sleep", "222"], env={**os.environ, lifeline.MARK: "held up"}) as own:
        monkeypatch.setattr(lifeline, "time", SimpleNamespace(monotonic=lambda: next(late), sleep=time.sleep))
        lifeline.end_marked("held up")
        try:
            assert own.wait(60.0) == -signal.SIGKILL
        finally:
            own.kill()


def test_a_process_with_another_mark_or_without_an_environment_is_left_alone() -> None:
    with subprocess.Popen(["sleep", "222"], env={**os.environ, lifeline.MARK: "mine"}) as own:
        lifeline.end_marked("min")
        assert own.poll() is None
        own.kill()
    with subprocess.Popen(["cat"], env={}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as empty:
        assert empty.stdin is not None
        assert empty.stdout is not None
        empty.stdin.write(b"\n")
        empty.stdin.flush()
        empty.stdout.read(1)  # its program has begun
        assert lifeline._carries(empty.pid, b"x") is False
        empty.stdin.close()
        os.waitid(os.P_PID, empty.pid, os.WEXITED | os.WNOWAIT)
        assert lifeline._carries(empty.pid, b"x") is False


def test_every_cell_has_one_row_and_begins_once_and_no_process_is_left(swept: Swept) -> None:
    assert sorted(one.cell.key for one in swept.records) == sorted(cell.key for cell in swept.cells)
    assert sorted(cell.key for cell in swept.begun) == sorted(cell.key for cell in swept.cells)
    assert swept.left == []


def test_a_crash_that_does_not_come_again_leaves_a_time_and_says_why_it_is_apart(swept: Swept) -> None:
    first, record, _ = swept.of("once")
    assert record.samples is not None
    assert record.timing["alone_because"].startswith(
        "its first try failed: its process was killed by SIGSEGV"
    )
    assert "alone_because" not in first.timing


def test_what_an_earlier_cell_said_is_no_reason_of_a_crash(tmp_path: Path) -> None:
    _, record, _ = Swept(["warning", "once"], faults.LIGHT, tmp_path).of("once")
    told = "its first try failed: its process was killed by SIGSEGV: Segmentation fault (__init__.py:"
    assert record.timing["alone_because"].startswith(told)


REAL = {
    "late-segfault": ("failed", "its process was killed by SIGSEGV: Segmentation fault (__init__.py:"),
    "oom-leak": ("oom", "OutOfMemoryError: CUDA out of memory. Tried to allocate 20.00 GiB; "),
    "unsayable": ("failed", "Unsayable: its message could not be made (faults.py:"),
    "overwrite": ("wrong", "it changes its input k; an attention leaves its inputs as they are"),
    "no-config": ("failed", "ValueError: config is '3'; an object is wanted"),
    "unreadable": ("failed", "ValueError: config.blocks is '[128, 64]'; text, a number, true or false is w"),
}
MORE = {
    "leak": ("ok", None),
    "import": ("failed", "ImportError: no module named 'flash_extension' (faults.py:"),
    "import-dies": ("failed", "its process exited with code 11"),
    "late-abort": ("failed", "its process was killed by SIGABRT: CUDA error: device-side assert triggered"),
    "late-hang": ("timeout", "no sign of life for 20s (faults.py:"),
    "late-garbage": ("ok", None),
    "late-pipe-done": ("failed", f"{WROTE} b'"),
    "late-fork": ("ok", None),
    "fork-sleeper": ("ok", None),
    "late-os-exit": ("failed", "its process exited with code 7"),
    "late-exit": ("failed", "SystemExit: bye"),
    "late-once": ("ok", None),
}


@pytest.mark.slow
@pytest.mark.parametrize("wanted", [REAL, MORE], ids=["few", "all"])
def test_cells_that_are_really_timed_survive_their_neighbours(wanted: dict, tmp_path: Path) -> None:
    swept = Swept(list(wanted), faults.WORKER, tmp_path)
    for name, (status, reason) in wanted.items():
        before, record, after = swept.of(name)
        assert (record.status, before.status, after.status) == (status, "ok", "ok"), (name, record.reason)
        assert (record.reason or "").startswith(reason or ""), name
        assert before.accuracy is not None
        assert before.samples is not None
    if "oom-leak" in wanted:
        assert (swept.of("oom-leak")[1].reason or "").endswith(
            "stayed allocated, and its process was replaced"
        )
    assert swept.left == []


def test_one_worker_serves_a_sweep_without_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    started, real = [], worker.Worker
    monkeypatch.setattr(worker, "Worker", lambda *of: started.append(of) or real(*of))
    swept = Swept(["right"] * 8, faults.LIGHT, tmp_path)
    assert {record.status for record in swept.records} == {"ok"}
    assert [record.cell for record in swept.records] == swept.cells
    assert len(started) == 1
    assert 0 < swept.spent["starting_s"] < swept.spent["wall_s"]


def test_where_no_worker_starts_cells_are_rows_that_resume_measures(tmp_path: Path) -> None:
    from flashbench import runfile

    command = (sys.executable, "-c", "raise SystemExit('no torch here')")
    swept = Swept(["right"], command, tmp_path)
    assert {record.status for record in swept.records} == {"skipped"}
    reason = swept.records[0].reason or ""
    assert reason == f"{runner.LOST}: no process to measure in: its process exited with code 1: no torch here"
    assert not any(map(runfile.is_final, swept.records))


def test_where_no_thread_is_left_the_cells_say_so_and_the_sweep_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    start, refused = threading.Thread.start, list[str]()

    def limited(self: threading.Thread) -> None:
        if len(refused) < supply.STARTS:
            refused.append(self.name)
            raise RuntimeError("can't start new thread")
        start(self)

    monkeypatch.setattr(threading.Thread, "start", limited)
    swept = Swept(["garbage", "fork"], faults.LIGHT, tmp_path)
    told = "the device was lost: no process to measure in: no thread is left to listen to it: can't start new"
    assert [(one.status, (one.reason or "")[: len(told)]) for one in swept.records[:3]] == [
        ("skipped", told)
    ] * 3
    assert [one.status for one in swept.records[3:]] == ["ok"] * 3
    assert swept.left == []


def test_a_stop_lets_the_group_finish_and_starts_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "registry", faults.registry)
    cells = [
        Cell(implementation=name, problem=problem(seqlen_q=n), pass_="fwd")
        for n in (1, 2)
        for name in ("naive", "sdpa")
    ]
    for in_process in (False, True):
        records: list[Record] = []
        with Bench(Target(), RunOptions(**OPTIONS), in_process=in_process, command=faults.LIGHT) as bench:
            bench.run(cells, records.append, stop=lambda found=records: bool(found))
        assert [record.cell for record in records] == cells[:2]


def test_the_time_budget_is_that_of_the_sweep_and_not_of_a_worker() -> None:
    options = RunOptions(**OPTIONS, time_budget_s=60.0)
    cell = Cell(implementation="naive", problem=problem(), pass_="fwd")
    bench = Bench(Target(), options)
    bench._began -= 61.0
    elapsed_s = bench._setup()["elapsed_s"]
    [record] = runner.Session(Target(), options, elapsed_s=elapsed_s).records([cell], lambda _: None)
    assert (record.status, record.reason) == ("skipped", "time budget of 1m spent")


def test_a_cell_is_given_more_time_where_more_is_expected() -> None:
    bench = Bench(Target(), RunOptions())
    small, large = (
        bench._limit_s(Cell(implementation="naive", problem=problem(seqlen_q=n, seqlen_k=n), pass_="fwd"))
        for n in (16, 2**17)
    )
    assert small == 300.0
    assert large > 3000.0
    assert Bench(Target(), RunOptions(cell_timeout_s=7.0))._limit_s(
        Cell(implementation="naive", problem=problem(), pass_="fwd")
    ) == 7.0  # fmt: skip


def test_options_and_times_arrive_as_they_were_sent() -> None:
    target = Target(device="cuda:1", name="card", capability=(9, 0), total_bytes=5)
    options = RunOptions(seed=3, policy=QUICK, environment={"device_name": "card"}, energy=True)
    samples = Samples(samples_s=(1.0, 2.0), cache="cold", method="events", flush="read", load="burst")
    row = Record(
        cell=Cell(implementation="naive", problem=problem(), pass_="bwd"), status="ok", samples=samples
    )
    sent = protocol.setup_to_json(target, options, elapsed_s=1.5, timed=[row], names=["naive"])
    found = protocol.target_from_json(sent["target"])
    assert found == target
    assert protocol.options_from_json(sent["options"], found) == options
    assert protocol.times_from_json(sent["times"]) == {row.cell: samples}


@pytest.mark.parametrize(
    "line",
    [b"", b"5", b"[]", b"{}", b'{"done": true}', b"no token {}", b"TOKEN", b"TOKEN5", b"TOKEN[]",
     b'TOKEN"at"', b"TOKEN" + b"[" * 100_000, b"TOKEN" + b'{"a":' * 100_000, b"TOKEN\xff{}",
     b"TOKEN" + b"9" * 10_000],
)  # fmt: skip
def test_what_is_no_message_of_the_worker_is_noise(line: bytes) -> None:
    assert wire.message(b'TOKEN{"done": true}\n', b"TOKEN") == {"done": True}
    with pytest.raises(wire.Noise):
        wire.message(line + b"\n", b"TOKEN")


def test_a_message_that_cannot_be_is_the_end_of_the_worker_and_nothing_else() -> None:
    cell, other = (Cell(implementation=name, problem=problem(), pass_="fwd") for name in ("naive", "sdpa"))
    record = record_to_json(Record(cell=cell, status="failed", reason="x", device_type="cpu"))
    assert protocol.told({"at": cell.to_json()}, [cell], []) == cell
    assert protocol.told({"record": record}, [cell], []) is not None
    for last in ({"done": True}, {"lost": "why"}, {"raised": "why"}, {"left": 5, "done": False}):
        assert protocol.told(last, [cell], [cell]) is None
    for message, measured in [
        ({}, []), ({"at": 5}, []), ({"at": {"problem": 5}}, []), ({"at": other.to_json()}, []),
        ({"record": {}}, []), ({"record": []}, []), ({"record": {**record, "status": 1}}, []),
        ({"record": record}, [cell]), ({"record": {**record, "cell": other.to_json()}}, []),
        ({"done": True}, []), ({"left": "all", "done": True}, []), ({"left": 10**400, "done": True}, []),
        ({"lost": 5}, []), ({"raised": None}, []), ({"\x1b": 1}, []), ({"done": True, "lost": "x"}, [cell]),
    ]:  # fmt: skip
        with pytest.raises(death.Ended) as ended:
            protocol.told(message, [cell], measured)
        assert str(ended.value).startswith("its process said what cannot be: ")
        assert str(ended.value).isprintable()


@pytest.mark.parametrize(
    ("output", "words"),
    [
        ("", ""),
        ("one\ntwo\n\n", "two"),
        ("\x1b[31mred\x00\n", "[31mred"),
        ("why\nFatal Python error: Aborted\n\nCurrent thread 0x1 (most recent call first):\n"
         '  File "/a/x.py", line 12 in call\n  File "/a/y.py", line 1 in main\n', "why (x.py:12 in call)"),
        ("Fatal Python error: Segmentation fault\n\nThread 0x2 (most recent call first):\n"
         '  File "/a/t.py", line 3 in wait\n\nCurrent thread 0x1 (most recent call first):\n'
         '  File "/a/x.py", line 12 in call\n', "Segmentation fault (x.py:12 in call)"),
        ("Fatal Python error: Segmentation fault\n\nStack (most recent call first):\n"
         '  File "/a/x.py", line 12 in call\n', "Segmentation fault (x.py:12 in call)"),
        ("Fatal Python error: Aborted\n\nThread 0x2 (most recent call first):\n"
         '  File "/a/t.py", line 3 in wait\n...\n', "Aborted"),
        ("x" * 1000, "x" * 300),
    ],
)  # fmt: skip
def test_last_words(output: str, words: str) -> None:
    assert death.last_words(output) == words


def test_a_hang_is_where_the_thread_that_measures_is() -> None:
    dump = (
        'Current thread 0x00a1 [listens] (most recent call first):\n  File "/a/c.py", line 3 in listen\n\n'
        'Thread 0x00b2 (most recent call first):\n  File "/a/x.py", line 12 in call\n  File "/a/y.py", line'
    )
    assert death.place(dump, 0xB2) == " (x.py:12 in call)"
    assert death.place(dump, 0xC3) == ""
    assert death.place(dump.partition(" in call")[0], 0xB2) == ""
    assert death.place(dump) == " (c.py:3 in listen)"


def test_killed_for_want_of_memory_is_oom_and_by_anybody_else_is_not() -> None:
    assert death.Ended(code=-9, oom_killed=True).status == "oom"
    assert death.Ended(code=-9).status == "failed"
    assert death.Ended(code=-11, oom_killed=True).status == "failed"
    assert str(death.Ended(code=-9)) == "its process was killed by SIGKILL"


def test_a_parent_that_is_killed_leaves_no_worker_though_that_hangs(tmp_path: Path) -> None:

    tag, surroundings = processes.tagged()
    run = [
        sys.executable,
        faults.__file__,
        "--quick",
        "run",
        "--device",
        "cpu",
        "--impls",
        "fork-sleeper,detached,daemon,hang",
    ]
    parent = subprocess.Popen(
        [*run, "--seqlens", "8", "--passes", "fwd", "--out", str(tmp_path / "out")],
        env=surroundings, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 120
    while len(processes.workers(tag)) < 3:  # the worker, its guard and what it forked
        assert time.monotonic() < deadline
        assert parent.poll() is None
        time.sleep(0.02)
    time.sleep(0.2)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    assert processes.left(tag) == []


def of_a_gpu(faulty: str) -> list[Record]:
    """Two shapes of naive, an implementation and SDPA on the first GPU, in the order of the cells."""
    from flashbench import environment

    target = environment.target("cuda:0")
    shape = {"dtype": "fp16", "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64, "head_dim_v": 64}
    problems = [problem(**shape, batch=batch) for batch in (2, 4)]
    cells = [
        Cell(implementation=one, problem=p, pass_="fwd")
        for p in problems
        for one in ("naive", faulty, "sdpa")
    ]
    found: list[Record] = []
    about = environment.collect(target)
    with (
        pytest.MonkeyPatch.context() as patch,
        Bench(target, RunOptions(environment=about), command=faults.WORKER) as bench,
    ):
        patch.setattr(kernels, "registry", faults.registry)
        bench.run(cells, found.append)
    order = {cell: number for number, cell in enumerate(cells)}
    return sorted(found, key=lambda record: order[record.cell])


@pytest.fixture(scope="module")
def undisturbed() -> list[Record]:
    return of_a_gpu("right")


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["late-segfault", "cuda-assert", "cuda-illegal", "cuda-leak", "oom-cuda"])
def test_on_a_gpu_the_others_measure_as_if_it_had_not_happened(name: str, undisturbed: list[Record]) -> None:
    """Memory exactly, time within noise; and the card has its memory back."""
    import torch

    free = torch.cuda.mem_get_info(0)[0]
    found = of_a_gpu(name)
    bad = [record for record in found if record.cell.implementation == name]
    assert all(record.status != "ok" or name == "cuda-leak" for record in bad), bad
    for one, other in zip(undisturbed, found, strict=True):
        if one.cell.implementation in ("naive", "sdpa"):
            assert one.samples is not None
            assert other.samples is not None, other.reason
            assert one.memory is not None
            assert other.memory is not None
            assert other.memory.peak_extra_bytes == one.memory.peak_extra_bytes
            assert other.samples.median_s == pytest.approx(one.samples.median_s, rel=0.1)
    assert free - torch.cuda.mem_get_info(0)[0] < 2**26


ANSWERS = """
import os, sys, time
token = sys.stdin.buffer.readline().strip()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
sys.stdout.buffer.write(token + b'{"done": true}\\n')
sys.stdout.flush()
open(sys.argv[1] + ".told", "x").close()
"""
WAITS = """
import sys
from flashbench.isolation import death, limit, worker
class Told(limit.Limit):
    def __init__(self, seconds):
        super().__init__(seconds)
        print("waits", flush=True)
worker.Limit, limit.MOST_S = Told, 0.05  # of what is no jump, too: the answer may be late by 20 looks
slow = worker.Worker((sys.executable, "-c", *sys.argv[1:]))
print(slow.pid, flush=True)
try:
    print(slow.receive(1.0), flush=True)
except death.Silent:
    print("silent", flush=True)
slow.kill()
"""


def test_what_is_suspended_with_its_parent_is_given_its_time(tmp_path: Path) -> None:
    """As Slurm, ``docker pause`` and a batch system suspend: all of it at once."""
    answer = tmp_path / "answer"
    command = [sys.executable, "-c", WAITS, ANSWERS, str(answer)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        slow = int(parent.stdout.readline())
        assert parent.stdout.readline() == "waits\n"
        for pid in (parent.pid, slow):
            os.kill(pid, signal.SIGSTOP)
        time.sleep(1.5)
        answer.touch()
        os.kill(slow, signal.SIGCONT)
        while not Path(f"{answer}.told").exists():  # so that it is there when its parent looks again
            time.sleep(0.01)
        os.kill(parent.pid, signal.SIGCONT)
        assert parent.stdout.readline() == "{'done': True}\n"
        assert parent.wait() == 0


HANGS = """
import faulthandler, signal, sys, threading, time
faulthandler.register(signal.SIGUSR1)
token = sys.stdin.buffer.readline().strip()
said = token + b'{"thread": %d}\\n' % threading.get_ident()
sys.stdout.buffer.write(said), sys.stdout.flush(), time.sleep(60)
"""
"""It is on its last line once it was heard."""


def test_where_a_worker_hangs_is_heard_by_a_parent_that_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    late, hangs = iter(range(0, 10**9, 1000)), worker.Worker((sys.executable, "-c", HANGS))
    try:
        thread = hangs.receive(60.0)["thread"]
        monkeypatch.setattr(worker, "time", SimpleNamespace(monotonic=lambda: next(late), sleep=time.sleep))
        assert hangs.where(hangs.pid, thread) == " (<string>:6 in <module>)"
    finally:
        hangs.kill()


SAYS = """print(input() + '{"left": 5}')"""


def test_what_a_worker_said_before_it_ended_is_heard_however_late() -> None:
    class Late(worker.Worker):
        def _hear(self, stream: Any) -> None:
            time.sleep(1.2 * worker.LOOK_EVERY_S)
            super()._hear(stream)

    says = Late((sys.executable, "-c", SAYS))
    try:
        assert says.receive(60.0) == {"left": 5}
    finally:
        says.kill()


def test_last_words_are_heard_by_a_parent_that_is_held_up(monkeypatch: pytest.MonkeyPatch) -> None:
    class Late(worker.Worker):
        def _overhear(self, stream: Any) -> None:
            time.sleep(0.2)
            super()._overhear(stream)

    real, held_up = threading.Thread.join, [True]

    def join(self: threading.Thread, timeout: float | None = None) -> None:
        if not (self is ends._readers[1] and held_up and held_up.pop()):  # all of that time, the first time
            real(self, timeout)

    monkeypatch.setattr(threading.Thread, "join", join)
    ends = Late((sys.executable, "-c", "input(); raise SystemExit('no more')"))
    with pytest.raises(death.Ended, match=r"^its process exited with code 1: no more$"):
        ends.receive(60.0)


def test_a_limit_counts_no_jump_and_what_is_looked_at_in_full(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    limit = Limit(4.0)
    for passed, left in ((0.5, 3.5), (0.5, 3.0), (70.0, 2.0), (0.25, 1.75)):
        now[0] += passed
        assert limit.left_s() == left
    limit.shorten(0.5)
    now[0] += 0.75
    assert limit.left_s() == -0.25
