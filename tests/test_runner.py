"""Whatever happens to a cell becomes a record with its reason; nothing raises or leaks out of a sweep."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import sys
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import faults
import pytest
import torch
from attention import problem

from flashbench import environment, kernels, plan, profilers, runfile, runner
from flashbench._runner import outcomes
from flashbench.kernels import Implementation, Target
from flashbench.problem import PASSES, Cell
from flashbench.profilers import Policy
from flashbench.record import Record
from flashbench.runner import RunOptions

CPU = Target()
QUICK = Policy(limit_s=0.001, min_samples=3, max_samples=3, warmup=1)
NAIVE = kernels.registry()["naive"]


def fake(name: str, prepare: Callable[..., Any] = NAIVE.prepare, **fields: Any) -> Implementation:
    return Implementation(name=name, summary="", prepare=prepare, io_model=None, **fields)


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def use(*rows: Implementation) -> None:
        monkeypatch.setattr(kernels, "registry", lambda: {row.name: row for row in (NAIVE, *rows)})

    return use


def sweep(*cells: Cell, target: Target = CPU, **options: Any) -> list[Record]:
    records: list[Record] = []
    options.setdefault("environment", {"device_name": "CPU"})
    runner.run_cells(cells, target, RunOptions(policy=QUICK, **options), records.append)
    return records


def cell(name: str, pass_: str = "fwd", **changes: Any) -> Cell:
    return Cell(implementation=name, problem=problem(**changes), pass_=pass_)


def raising(error: BaseException, *, late: bool = False) -> Callable[..., Any]:
    def prepare(*_):
        def call():
            raise error

        if not late:
            raise error
        return call

    return prepare


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_a_right_implementation_is_checked_then_timed(pass_: str, dtype: str) -> None:
    [record] = sweep(cell("naive", pass_, dtype=dtype, num_kv_heads=2))
    assert (record.status, record.reason) == ("ok", None)
    assert record.accuracy is not None
    assert set(record.accuracy.budget) == ({"o"} if pass_ == "fwd" else {"o", "dq", "dk", "dv"})
    assert record.samples is not None
    assert len(record.samples.samples_s) == 3
    p = record.cell.problem
    assert record.memory is not None
    assert record.memory.inputs_bytes == plan.input_bytes(p, pass_)
    q, kv = 2 * 4 * 16 * 8, 2 * 2 * 16 * 8
    assert record.memory.outputs_bytes == p.dtype_bytes * (q if pass_ == "fwd" else q + 2 * kv)
    assert record.environment["device_name"] == "CPU"
    assert record.wall_s > 0


def test_records_come_in_the_order_given_one_before_the_next_starts() -> None:
    events: list[str] = []
    cells = [cell("naive", seqlen_q=n) for n in (3, 1, 2)]
    runner.run_cells(
        cells, CPU, RunOptions(policy=QUICK, environment={}),
        lambda record: events.append(f"done {record.cell.problem.seqlen_q}"),
        lambda index, total, one: events.append(f"{index}/{total} {one.problem.seqlen_q}"),
    )  # fmt: skip
    assert events == ["0/3 3", "done 3", "1/3 1", "done 1", "2/3 2", "done 2"]


@pytest.mark.parametrize(
    ("row", "status", "reason"),
    [
        (fake("x", why_unavailable=lambda _: "needs a magnet"), "unavailable", "needs a magnet"),
        (fake("x", why_unsupported=lambda *_: "odd head dim"), "unsupported", "odd head dim"),
        (fake("x", raising(ValueError("bad\nmore"))), "failed", "ValueError: bad (test_runner.py:"),
        (fake("x", raising(KeyError("k"), late=True)), "failed", "KeyError: 'k' (test_runner.py:"),
        (fake("x", raising(AssertionError())), "failed", "AssertionError: no message"),
        (fake("x", raising(MemoryError("big"))), "oom", "MemoryError: big"),
        (fake("x", raising(torch.OutOfMemoryError("CUDA out of memory. Tried"))), "oom", "OutOfMemoryError:"),
        (fake("x", raising(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory"))),
         "oom", "RuntimeError:"),
        (fake("x", interpreted=lambda _: True), "checked", "Triton's interpreter: correct, not timed"),
        (fake("x", why_unsupported=raising(OSError("disk"))), "failed", "OSError: disk"),
        (fake("x", backend=raising(OSError("disk"))), "failed", "OSError: disk"),
    ],
)  # fmt: skip
def test_what_does_not_run_says_why_and_the_next_cell_does(
    install: Callable[..., None], row: Implementation, status: str, reason: str
) -> None:
    install(row)
    first, second = sweep(cell("x"), cell("naive"))
    assert first.status == status
    assert (first.reason or "").startswith(reason)
    assert first.samples is None
    assert "\n" not in (first.reason or "")
    assert second.status == "ok"


def test_a_wrong_result_is_never_timed(install: Callable[..., None]) -> None:
    calls = []

    def prepare(p, inputs):
        right = NAIVE.prepare(p, inputs)

        def call():
            calls.append(1)
            return right() * 1.01

        return call

    install(fake("x", prepare))
    [record] = sweep(cell("x"))
    assert record.status == "wrong"
    assert record.reason is not None
    assert record.reason.startswith("o is off by 0.0")
    assert record.accuracy is not None
    assert record.samples is None
    assert len(calls) == 1


def test_a_wrong_gradient_alone_is_wrong(install: Callable[..., None]) -> None:
    class Double(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            return gradient * 1.02

    install(fake("x", lambda p, inputs: NAIVE.prepare(p, replace(inputs, k=Double.apply(inputs.k)))))
    forward, backward, both = sweep(*(cell("x", pass_) for pass_ in PASSES))
    assert forward.status == "ok"
    for record in (backward, both):
        assert record.status == "wrong"
        assert (record.reason or "").startswith("dk is off")


@pytest.mark.parametrize(
    "result",
    [lambda q: q[:, :, :-1], lambda q: q.double(), lambda q: q * float("nan")],
    ids=["shape", "dtype", "nan"],
)
def test_another_shape_or_dtype_or_nan_is_wrong(install: Callable[..., None], result: Callable) -> None:
    install(fake("x", lambda p, inputs: lambda: result(inputs.q)))
    [record] = sweep(cell("x"))
    assert record.status == "wrong"
    assert record.reason


def test_without_timing_a_right_cell_is_checked() -> None:
    [record] = sweep(cell("naive", "bwd"), time=False)
    assert (record.status, record.samples, record.memory) == ("checked", None, None)
    assert record.accuracy is not None


def test_a_cell_that_cannot_fit_is_skipped_with_both_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "free_bytes", lambda _: 79 * 10**9)
    big = {
        "batch": 1, "num_heads": 16, "num_kv_heads": 16, "seqlen_q": 65536, "seqlen_k": 65536,
        "head_dim": 128, "head_dim_v": 128, "dtype": "bf16", "causal": False,
    }  # fmt: skip
    first, second = sweep(cell("naive", **big), cell("naive"))
    assert (first.status, first.reason) == ("skipped", "needs 276 GB of memory, 79.0 GB free")
    assert second.status == "ok"


def test_the_time_budget_leaves_rows_that_say_so(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(
        runner, "time", SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
    )

    def prepare(p, inputs):
        now[0] += 0.2
        return NAIVE.prepare(p, inputs)

    install(fake("x", prepare))
    records = sweep(*(cell("x", seqlen_q=n) for n in (1, 2, 3)), time_budget_s=0.1)
    assert [record.status for record in records] == ["ok", "skipped", "skipped"]
    assert records[1].reason == "time budget of 0.1s spent"
    assert not runfile.is_final(records[1])


@pytest.mark.parametrize(("seconds", "said"), [(300, "5m"), (90, "1m30s"), (5400, "1h30m"), (0.5, "0.5s")])
def test_a_budget_is_named_as_it_is_typed(seconds: float, said: str) -> None:
    assert outcomes.duration(seconds) == said


def test_a_call_over_its_limit_is_a_timeout(install: Callable[..., None]) -> None:
    def prepare(p, inputs):
        right = NAIVE.prepare(p, inputs)

        def call():
            time.sleep(0.05)
            return right()

        return call

    install(fake("x", prepare))
    [record] = sweep(cell("x"), call_limit_s=0.01)
    assert record.status == "timeout"
    assert (record.reason or "").startswith("one call took")


def test_after_a_failure_nothing_keeps_its_tensors(install: Callable[..., None]) -> None:
    made: list[weakref.ref] = []

    def prepare(p, inputs):
        scratch = torch.zeros(1000)
        made.append(weakref.ref(scratch))

        def call():
            inner = scratch + 1
            made.append(weakref.ref(inner))
            try:
                raise ValueError("first")
            except ValueError as error:
                raise torch.OutOfMemoryError("CUDA out of memory") from error

        return call

    install(fake("x", prepare))
    seen: list[int] = []

    def look(record: Record) -> None:
        seen.append(sum(ref() is not None for ref in made))

    runner.run_cells([cell("x"), cell("naive")], CPU, RunOptions(policy=QUICK, environment={}), look)
    assert len(made) == 2
    assert seen == [0, 0]


def test_a_keyboard_interrupt_comes_out_with_the_finished_rows_kept(install: Callable[..., None]) -> None:
    install(fake("x", raising(KeyboardInterrupt())))
    records: list[Record] = []
    with pytest.raises(KeyboardInterrupt):
        runner.run_cells(
            [cell("naive"), cell("x", seqlen_q=5)],
            CPU,
            RunOptions(policy=QUICK, environment={}),
            records.append,
        )
    assert [record.status for record in records] == ["ok"]


def test_cells_of_one_problem_share_its_inputs_and_reference(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from flashbench.kernels import _inputs

    seen: list[int] = []
    made = []
    real = _inputs.make_inputs
    monkeypatch.setattr(_inputs, "make_inputs", lambda *a: (made.append(a), real(*a))[1])

    def prepare(p, inputs):
        seen.append(inputs.q.untyped_storage().data_ptr())
        return NAIVE.prepare(p, inputs)

    install(fake("x", prepare), fake("y", prepare))
    sweep(cell("x"), cell("y"), cell("x", "bwd"), cell("y", seqlen_k=17))
    assert len(made) == 2
    assert len(set(seen[:3])) == 1


def test_memory_stays_flat_over_backward_repetitions() -> None:
    grads = []

    def prepare(p, inputs):
        grads.append(inputs.leaves)
        return NAIVE.prepare(p, inputs)

    cells = [cell("x", "bwd"), cell("x", "fwd+bwd")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "registry", lambda: {"x": fake("x", prepare)})
        assert all(record.status == "ok" for record in sweep(*cells))
    assert all(tensor.grad is None for leaves in grads for tensor in leaves)


def test_the_forward_is_timed_without_grad_and_inside_its_context(install: Callable[..., None]) -> None:
    from contextlib import contextmanager

    inside = []
    seen = []

    @contextmanager
    def context(p):
        inside.append(1)
        yield
        inside.pop()

    def prepare(p, inputs):
        right = NAIVE.prepare(p, inputs)

        def call():
            seen.append((torch.is_grad_enabled(), inputs.q.requires_grad, bool(inside)))
            return right()

        return call

    install(fake("x", prepare, context=context))
    sweep(cell("x"))
    assert set(seen) == {(False, False, True)}
    seen.clear()
    sweep(cell("x", "fwd+bwd"))
    assert set(seen) == {(True, True, True)}
    assert not inside


# --- implementations of one work, timed together ---------------------------------------------------------


TURNS = Policy(limit_s=0.02, min_samples=6, max_samples=30, warmup=1, precision=1e-9, round_s=1e-9)
"""Rounds of one sample each."""


def together(cells: list[Cell], **options: Any) -> list[Record]:
    records: list[Record] = []
    runner.run_cells(
        cells, CPU, RunOptions(policy=TURNS, environment={}, seed=3, **options), records.append
    )  # fmt: skip
    return records


def noting(name: str, log: list[str], then: Callable[[], None] = lambda: None) -> Implementation:
    def prepare(p, inputs):
        right = NAIVE.prepare(p, inputs)

        def call():
            log.append(name)
            then()
            return right()

        return call

    return fake(name, prepare)


def test_implementations_of_one_work_are_timed_in_turns_and_told_in_order(
    install: Callable[..., None],
) -> None:
    install(*(noting(name, []) for name in "xyz"))
    records = together([cell(name) for name in "xyz"] + [cell("x", seqlen_q=5)])
    assert [record.cell.implementation for record in records] == ["x", "y", "z", "x"]
    assert all(record.status == "ok" for record in records)
    first, *_, last = records
    rounds = len(first.timing["rounds"])
    assert first.timing["schedule"] == "interleaved"
    assert last.timing["schedule"] == "alone"
    assert "alone_because" not in last.timing
    assert rounds > 3
    places = [[one["place"] for one in record.timing["rounds"]] for record in records[:3]]
    shared = min(map(len, places))
    assert all(sorted(one) == [0, 1, 2] for one in list(zip(*places, strict=False))[: shared // 2])
    assert len({tuple(one) for one in zip(*places, strict=False)}) > 1


def test_the_order_of_the_rounds_is_that_of_its_seed(install: Callable[..., None]) -> None:
    install(*(noting(name, []) for name in "xy"))
    one, again = (together([cell(name) for name in "xy"])[0] for _ in range(2))
    assert one.timing["order_seed"] == again.timing["order_seed"]
    assert one.timing["order_seed"].startswith("3 ")
    assert one.timing["rounds"][0]["place"] == again.timing["rounds"][0]["place"]
    assert one.samples is not None
    assert one.samples.load == "burst"


def test_what_does_not_fit_together_is_timed_one_after_the_other(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    install(noting("x", []), noting("y", []))
    cells = [cell("x", "bwd"), cell("y", "bwd")]
    alone = max(plan.needs_bytes(one, CPU) for one in cells)
    assert plan.together_bytes(cells, CPU) > alone
    monkeypatch.setattr(environment, "free_bytes", lambda _: alone)
    records = together(cells)
    assert [record.status for record in records] == ["ok", "ok"]
    for record in records:
        assert record.timing["schedule"] == "alone"
        assert record.timing["alone_because"].startswith("needs ")
    monkeypatch.setattr(environment, "free_bytes", lambda _: 2 * alone)
    assert {record.timing["schedule"] for record in together(cells)} == {"interleaved"}


@pytest.mark.parametrize("when", [0, 4])
def test_out_of_memory_beside_others_is_tried_once_more_alone(
    install: Callable[..., None], when: int
) -> None:
    """While x is ready, y finds no room: at its first call, or while it is timed."""
    held: list[object] = []
    calls: list[int] = []

    def holding(p, inputs):
        right = NAIVE.prepare(p, inputs)

        class Call:
            def __init__(self):
                held.append(weakref.ref(self))

            def __call__(self):
                return right()

        return Call()

    def crowd() -> None:
        calls.append(1)
        if len(calls) > when and any(ref() is not None for ref in held):
            raise torch.OutOfMemoryError("CUDA out of memory")

    install(fake("x", holding), noting("y", [], crowd), noting("z", []))
    started: list[str] = []
    records: list[Record] = []
    runner.run_cells(
        [cell(name) for name in "xyz"], CPU, RunOptions(policy=TURNS, environment={}), records.append,
        lambda index, total, one: started.append(f"{index} {one.implementation}"),
    )  # fmt: skip
    assert [(record.cell.implementation, record.status) for record in records] == [
        ("x", "ok"), ("y", "ok"), ("z", "ok")
    ]  # fmt: skip
    assert {record.timing["alone_because"] for record in records} == {"together they ran out of memory"}
    assert started == ["0 x", "1 y", "2 z"]


def test_out_of_memory_alone_is_final_and_the_others_are_timed_together(install: Callable[..., None]) -> None:
    calls: list[int] = []

    def full() -> None:
        calls.append(1)
        raise torch.OutOfMemoryError("CUDA out of memory")

    install(noting("x", [], full), noting("y", []), noting("z", []))
    first, *others = together([cell(name) for name in "xyz"])
    assert first.status == "oom"
    assert len(calls) == 1
    assert [record.timing["schedule"] for record in others] == ["interleaved"] * 2


def test_one_that_fails_in_the_middle_of_the_rounds_ends_alone(install: Callable[..., None]) -> None:
    calls: list[int] = []

    def late() -> None:
        calls.append(1)
        if len(calls) == 9:
            raise ValueError("late")

    install(noting("x", []), noting("y", [], late))
    good, bad = together([cell("x"), cell("y")])
    assert good.status == "ok"
    assert (bad.status, bad.samples) == ("failed", None)
    assert (bad.reason or "").startswith("ValueError: late (test_runner.py:")


def test_each_row_says_where_its_time_went(
    install: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    real, asleep_s = time.perf_counter, [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: real() + asleep_s[0])

    def slow(p, inputs):
        asleep_s[0] += 1e5  # longer than any machine takes for the rest
        return NAIVE.prepare(p, inputs)

    install(fake("x", slow))
    start = time.perf_counter()
    record, other = together([cell("x", "bwd"), cell("naive", "bwd")])
    took = time.perf_counter() - start
    assert record.spent["prepare_s"] > 1e5 > other.spent["prepare_s"]
    assert {"inputs_s", "reference_s", "check_s", "memory_s", "warmup_s", "rounds_s"} <= set(record.spent)
    assert record.spent["samples_s"] <= record.spent["rounds_s"]
    assert record.wall_s + other.wall_s <= took


def resumable(out: Path, *more: str) -> list[str]:
    return [
        sys.executable, faults.__file__, "run", "--device", "cpu", "--impls", "sdpa,sdpa-cudnn,held",
        "--seqlens", "64,128,192", "--passes", "fwd,bwd", "--dtypes", "fp32", "--head-dims", "16",
        "--out", str(out), *more,
    ]  # fmt: skip


@pytest.mark.slow
def test_killed_in_the_middle_then_resumed_equals_an_uninterrupted_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, killed, held = tmp_path / "whole", tmp_path / "killed", tmp_path / "held"
    monkeypatch.setenv(faults.HELD, str(held))
    done = subprocess.run(resumable(whole), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    wanted = {record.cell.key for record in runfile.load(whole / "results.jsonl").records}

    path = killed / "results.jsonl"
    held.touch()
    process = subprocess.Popen(resumable(killed), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (path.exists() and path.read_bytes().count(b"\n") > 3):
        assert process.poll() is None, "finished before it could be killed"
        time.sleep(0.005)  # else it takes a processor from the run that it waits for
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    held.unlink()
    before = {record.cell.key: record for record in runfile.load(path).records}
    assert 3 <= len(before) < len(wanted)  # what was written when it was killed, and later ones

    done = subprocess.run(resumable(killed, "--resume"), capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    after = runfile.load(path)
    assert {record.cell.key for record in after.records} == wanted == set(after.header["cells"])
    assert path.read_bytes().count(b"\n") == 1 + len(wanted) + 1  # header, rows, where the time went
    assert all(record == before.get(record.cell.key, record) for record in after.records)


def test_what_a_refused_way_of_timing_breaks_is_found_in_the_cells_that_broke_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A replay of a graph once broke the device, and the next cells were said to have done it."""
    device = ["fine"]
    real = profilers.time_together

    def breaking(*args: Any) -> list[Any]:
        device[0] = "broken"
        return [replace(one, how={**one.how, "method_refused": "graph: it breaks"}) for one in real(*args)]

    def recover(session: runner.Session, of: Cell) -> None:
        if device[0] == "broken":
            session.lost = f"{runner.LOST} in {of.key}: an illegal access"

    monkeypatch.setattr(profilers, "time_together", breaking)
    monkeypatch.setattr(runner.Session, "_recover", recover)
    first, second = sweep(cell("naive"), cell("naive", pass_="bwd"))
    assert first.status == "ok"
    assert second.reason == f"{runner.LOST} in {first.cell.key}: an illegal access"


def test_energy_that_fails_leaves_the_time_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure_energy(call: Callable[[], object], **_: Any) -> dict[str, Any]:
        call()
        raise MemoryError("no room")

    monkeypatch.setattr(profilers, "measure_energy", measure_energy)
    [record] = sweep(cell("naive"), energy=True)
    assert record.status == "ok"
    assert record.samples is not None
    assert record.energy == {"reason": "MemoryError: no room"}
    assert sweep(cell("naive"))[0].energy == {}


@pytest.mark.gpu
def test_a_gpu_cell_has_its_energy() -> None:
    target = environment.target("cuda:0")
    p = {"dtype": "bf16", "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": 64, "head_dim_v": 64}
    about = environment.collect(target)
    [record] = sweep(cell("sdpa-flash", **p), target=target, environment=about, energy=True)
    assert record.status == "ok", record.reason
    assert record.energy["joules_per_call"] > 0


@pytest.mark.gpu
def test_a_gpu_cell_has_memory_clocks_and_a_config() -> None:
    target = environment.target("cuda:0")
    p = {"dtype": "bf16", "seqlen_q": 1024, "seqlen_k": 1024, "head_dim": 64, "head_dim_v": 64}
    [record] = sweep(cell("sdpa-flash", **p), target=target, environment=environment.collect(target))
    assert record.status == "ok", record.reason
    assert record.memory is not None
    assert record.memory.peak_extra_bytes is not None
    assert record.memory.peak_extra_bytes >= record.memory.outputs_bytes
    assert record.clocks["before"].keys() == record.clocks["after"].keys()
    assert record.samples is not None
    assert record.samples.method == "events"


@pytest.mark.gpu
def test_an_oom_in_the_middle_changes_nothing_for_the_next_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    target = environment.target("cuda:0")
    monkeypatch.setattr(environment, "free_bytes", lambda _: None)  # so that the cell is tried
    small = {
        "dtype": "bf16",
        "batch": 1,
        "seqlen_q": 1024,
        "seqlen_k": 1024,
        "head_dim": 64,
        "head_dim_v": 64,
    }
    large = {**small, "num_heads": 64, "num_kv_heads": 64, "seqlen_q": 65536, "seqlen_k": 65536}
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    first, middle, last = sweep(
        cell("naive", **small), cell("naive", **large), cell("naive", **small), target=target, environment={}
    )
    gc.collect()
    assert middle.status == "oom"
    assert first.memory is not None
    assert last.memory is not None
    assert first.memory.peak_extra_bytes == last.memory.peak_extra_bytes
    # the cuBLAS workspace stays allocated for good
    assert torch.cuda.memory_allocated() - start < 2**27


@pytest.mark.gpu
def test_forward_and_backward_add_up() -> None:
    target = environment.target("cuda:0")
    p = {"dtype": "bf16", "batch": 4, "num_heads": 16, "num_kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096,
         "head_dim": 64, "head_dim_v": 64, "causal": False}  # fmt: skip
    records: list[Record] = []
    runner.run_cells(
        [cell("sdpa-flash", pass_, **p) for pass_ in PASSES], target, RunOptions(), records.append
    )
    times = [record.samples.median_s for record in records if record.samples]
    assert times[0] + times[1] == pytest.approx(times[2], rel=0.1)
