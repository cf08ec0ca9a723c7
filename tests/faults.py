"""Implementations that break what measures them, and ``flashbench`` with them.

python tests/faults.py run --impls naive,segfault …      as flashbench, with these beside naive and sdpa
python tests/faults.py --quick run …                     the same without torch: nothing is computed
python tests/faults.py --worker                          the worker of the first
python tests/faults.py --light                           that of the second: it calls the faults alone

A test that is to do something in the middle of a sweep holds it there (``HELD``) instead of being quick.
"""

from __future__ import annotations

import ctypes
import gc
import os
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from flashbench import kernels
from flashbench._runner import leftover
from flashbench._runner.outcomes import failure, what
from flashbench.isolation import Bench, child, death, worker
from flashbench.kernels import Implementation
from flashbench.problem import Cell, Problem
from flashbench.record import Record, Samples
from flashbench.runner import LOST, RunOptions

WORKER, LIGHT = ((sys.executable, __file__, kind) for kind in ("--worker", "--light"))
DONE: dict[str, Any] = {}
"""What faults did that a process has once."""
HELD, ENDING = "FAULTS_HELD", "FAULTS_ENDING"
"""Environment variables that name a file. While the one is there, "held" waits in every problem but the first
to which it came; while the other is, a command that is over does not end."""


class Unsayable(Exception):
    """Has no message that anybody could read."""

    def __str__(self) -> str:
        raise ValueError("no")


class OutOfMemoryError(RuntimeError):
    """As torch calls it."""


def _segfault() -> None:
    ctypes.string_at(1)


def _segfault_beside_many() -> None:
    for _ in range(120):
        threading.Thread(target=lambda: time.sleep(600), daemon=True).start()
    ctypes.string_at(1)


def _hang(name: str = "hang") -> None:
    """Says by a file that it does, for ``patience``."""
    if "FAULTS_ONCE" in os.environ:
        os.close(os.open(_that_it(name), os.O_CREAT, 0o600))
    time.sleep(600)


def _that_it(name: str) -> str:
    return os.environ["FAULTS_ONCE"] + f".{name}s"


def _hang_deaf() -> None:
    """Having said more than is kept."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    os.write(2, b"x" * 2 * worker.TAIL)
    _hang("hang-deaf")


def _retried() -> None:
    """Says, the second time, how many cells its process was given before."""
    _first_time(_segfault, "retried")()
    raise RuntimeError(f"after {DONE['given'] - 1} others")


def _abort() -> None:
    sys.stderr.write("CUDA error: device-side assert triggered\n")
    sys.stderr.flush()
    os.abort()


def _out_of_memory() -> None:
    raise OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")


def _raise_unsayable() -> None:
    raise Unsayable


def _leak() -> None:
    import torch

    if "leak" not in DONE:  # once, as a cache that is never emptied
        DONE["leak"] = torch.ones(2**24)


def _oom_and_leak() -> None:
    _leak()
    _out_of_memory()


def _fork() -> None:
    """The copy comes back into the sweep, as a careless fork does."""
    if "fork" not in DONE:
        DONE["fork"] = True
        os.fork()


def _fork_sleeper() -> None:
    """What it starts would live for long, and keeps the pipes of the worker open."""
    if "sleeper" not in DONE:
        DONE["sleeper"] = ctypes.CDLL(None).fork()  # by C: Python knows nothing of it
        if not DONE["sleeper"]:
            time.sleep(600)
            os._exit(0)


def _detached() -> None:
    """In a session of its own, out of reach of its group."""
    if "detached" not in DONE:
        DONE["detached"] = subprocess.Popen(["sleep", "222"], start_new_session=True)


def _daemon() -> None:
    """Forked twice, in a session of its own, with nothing in its environment that flashbench put there."""
    if "daemon" not in DONE:
        DONE["daemon"] = "(setsid sleep 222 > /dev/null 2>&1 &)"
        bare = {name: text for name, text in os.environ.items() if name != "FLASHBENCH_WORKER"}
        subprocess.run(["sh", "-c", DONE["daemon"]], env=bare, check=True)


def _detached_and_guard_killed() -> None:
    """Then the process that would end what it started is gone, and it with that."""
    _detached()
    os.kill(os.getppid(), 9)
    time.sleep(600)


def _garbage() -> None:
    print('{"record": 1}\n{"at"\x00\x1b[2J')
    os.write(1, b'{"done": true}\n')
    os.write(2, os.urandom(2**17))


def _to_the_pipe(data: bytes) -> Callable[[], None]:
    """To whatever may be the pipe of the worker's messages."""

    def write() -> None:
        for file in range(3, 40):
            with suppress(OSError):
                if stat.S_ISFIFO(os.fstat(file).st_mode):
                    os.write(file, data)

    return write


def _flood() -> None:
    while True:
        _to_the_pipe(b"x" * 2**16)()


def _forged(**message: Any) -> Callable[[], None]:
    """As the worker itself would say it."""

    def send() -> None:
        [channel] = [found for found in gc.get_objects() if isinstance(found, child.Channel)]
        channel.send(**message)

    return send


def _lost_device() -> None:
    """What a sticky CUDA error looks like from torch."""
    raise RuntimeError("CUDA error: an illegal memory access was encountered")


def _on_gpu(kind: str) -> Callable[[], None]:
    """What a broken kernel does to its device."""

    def fault() -> None:
        import torch

        here = torch.zeros(4, device="cuda")
        if kind == "assert":
            here[torch.tensor([9], device="cuda")] = 1.0
        elif kind == "illegal":
            import triton
            import triton.language as tl

            def store(pointer, off: tl.constexpr) -> None:
                tl.store(pointer + off, 1.0)

            triton.jit(store)[(1,)](here, off=2**40)
        elif kind == "hang":
            import triton
            import triton.language as tl

            def wait(pointer) -> None:
                while tl.load(pointer, volatile=True) == 0:
                    pass

            triton.jit(wait)[(1,)](here)
        elif kind == "exit":
            torch.cuda._sleep(10**9)
            os._exit(7)  # with the kernel at work
        elif kind == "oom":
            DONE[len(DONE)] = torch.ones(2**29, device="cuda")
            torch.empty(2**50, device="cuda", dtype=torch.uint8)
        elif kind not in DONE:
            DONE[kind] = torch.ones(2**29, device="cuda")
        torch.cuda.synchronize()

    return fault


def _first_time(then: Callable[[], None], name: str = "") -> Callable[[], None]:
    """Only in the first process that comes here."""

    def once() -> None:
        mark = Path(os.environ["FAULTS_ONCE"] + name)
        if not mark.exists():
            mark.touch()
            then()

    return once


def _wait_for(variable: str) -> None:
    """Until nobody has the file of that name any more, if the variable names one."""
    while os.path.isfile(os.environ.get(variable, "")):
        time.sleep(0.005)


def _held(work: Problem) -> None:
    if os.path.isfile(path := os.environ.get(HELD, "")):
        with suppress(FileExistsError):
            os.symlink(work.key, f"{path}.free")
        if os.readlink(f"{path}.free") != work.key:
            _wait_for(HELD)


FAULTS: dict[str, Callable[[], object]] = {
    "segfault": _segfault,
    "segfault-many": _segfault_beside_many,
    "hang-deaf": _hang_deaf,
    "retried": _retried,
    "abort": _abort,
    "os-exit": lambda: os._exit(7),
    "exit": lambda: sys.exit("bye"),
    "hang": _hang,
    "killed": lambda: os.kill(os.getpid(), 9),
    "oom": _out_of_memory,
    "leak": _leak,
    "oom-leak": _oom_and_leak,
    "garbage": _garbage,
    "pipe-done": _to_the_pipe(b'{"done": true}\n'),
    "pipe-broken": _to_the_pipe(b"\xff\x1b[2J"),
    "pipe-flood": _flood,
    "forged-done": _forged(done=True),
    "unsayable": _raise_unsayable,
    "fork": _fork,
    "fork-sleeper": _fork_sleeper,
    "detached": _detached,
    "daemon": _daemon,
    "guard-killed": _detached_and_guard_killed,
    "lost": _lost_device,
    "once": _first_time(_segfault),
    "cuda-assert": _on_gpu("assert"),
    "cuda-illegal": _on_gpu("illegal"),
    "cuda-leak": _on_gpu("leak"),
    "cuda-hang": _on_gpu("hang"),
    "cuda-exit": _on_gpu("exit"),
    "oom-cuda": _on_gpu("oom"),
    "right": lambda: None,
    "no-row": lambda: None,
    "warning": lambda: os.write(2, b"RuntimeWarning: Enable tracemalloc to get the allocation traceback\n"),
}
"""What the call of that name does before it computes attention."""

LATE = 6
"""The number of the call in which a fault of the name ``late-…`` happens: while it is timed."""


def _faulty(name: str, fault: Callable[[], object], first: int = 1) -> Implementation:
    def prepare(p: Any, inputs: Any) -> Callable[[], Any]:
        right, calls = kernels.get("naive").prepare(p, inputs), [0]

        def call() -> Any:
            calls[0] += 1
            if calls[0] >= first:
                fault()
            return right()

        return call

    return Implementation(name=name, summary="", prepare=prepare, io_model=None)


def _overwriting(p: Any, inputs: Any) -> Callable[[], Any]:
    """Writes to memory that is not its own: the inputs, which other cells share."""
    right = kernels.get("naive").prepare(p, inputs)

    def call() -> Any:
        o = right()
        inputs.k.data.fill_(3.0)
        return o

    return call


def _holding(p: Any, inputs: Any) -> Callable[[], Any]:
    _held(p)
    return kernels.get("naive").prepare(p, inputs)


def _at_import(*_: object) -> Any:
    raise ImportError("no module named 'flash_extension'")


def _import_dies(*_: object) -> Any:
    os._exit(11)


def registry() -> dict[str, Implementation]:
    """naive, sdpa, one that a CPU lacks, and the faulty ones."""
    real = {name: _REAL()[name] for name in ("naive", "sdpa", "sdpa-cudnn")}
    rows = [_faulty(name, fault) for name, fault in FAULTS.items()]
    rows += [_faulty(f"late-{name}", fault, LATE) for name, fault in FAULTS.items()]
    for name, prepare in (
        ("overwrite", _overwriting), ("held", _holding), ("import", _at_import), ("import-dies", _import_dies)
    ):  # fmt: skip
        rows.append(Implementation(name=name, summary="", prepare=prepare, io_model=None))
    for name, config in (("no-config", 3), ("unreadable", {"blocks": (128, 64)})):
        rows.append(replace(_faulty(name, FAULTS["right"]), describe=lambda *_, config=config: config))
    return real | {row.name: row for row in rows}


_REAL = kernels.registry


class Light:
    """What a worker does of a session, with a fault in place of the attention: starts within 0.2 s."""

    def __init__(self, target: Any, options: RunOptions, *, at: Callable[[Cell], None], **_: Any) -> None:
        self.target, self.options, self.at = target, options, at
        self.lost: str | None = None
        self.left = 0

    def left_behind(self, before: Problem | None = None) -> int:
        return self.left

    def records(self, cells: Sequence[Cell], begin: object, alone: str | None) -> Iterator[Record]:
        found = {cell: self._call(cell, cell.implementation) for cell in cells}
        for cell in cells:
            if found[cell]["status"] == "ok":
                found[cell] = self._call(cell, cell.implementation.removeprefix("late-")) | {
                    "timing": {"alone_because": alone} if alone else {}
                }
        for cell, outcome in found.items():
            if cell.implementation == "no-row":
                self.at(cells[0])  # in turns the last one is anybody's
                raise TypeError("no row of it can be made")
            yield Record(cell=cell, device_type="cpu", **outcome)

    def _call(self, cell: Cell, name: str) -> dict[str, Any]:
        if self.lost is not None:
            return {"status": "skipped", "reason": self.lost}
        self.at(cell)
        DONE["given"] = DONE.get("given", 0) + 1
        if name == "held":
            _held(cell.problem)
        try:
            FAULTS.get(name, lambda: None)()
        except Exception as error:
            if "illegal memory access" in what(error):
                self.lost = f"{LOST} in {cell.key}: {what(error)}"
            return failure(error)
        time.sleep(0.002)
        return {"status": "ok", "samples": Samples(samples_s=(1e-3,) * 3, cache="hot", method="wall")}


def _spare_torch() -> None:
    """Leave out what a run does before and after it measures."""
    from flashbench import environment
    from flashbench._cli import measure

    environment.collect = lambda _: {"device_name": "CPU"}  # type: ignore[assignment]
    measure.write_page = measure._show = lambda *_: None  # type: ignore[assignment]


def patience(patch: Any) -> None:
    """For benches of this process: the time limit is of cells that hang, once they do. What others take, and
    whom the kernel kills for want of memory, is of whatever else the machine does.
    """
    limit_s = Bench._limit_s

    def of_hanging(bench: Bench, cell: Cell) -> float:
        name = cell.implementation.removeprefix("late-")
        if not name.startswith("hang"):
            return 600.0
        while not os.path.exists(_that_it(name)):
            time.sleep(0.005)
        return limit_s(bench, cell)

    patch.setattr(Bench, "_limit_s", of_hanging)
    patch.setattr(worker, "DUMP_S", 60.0)
    patch.setattr(death, "oom_kills", lambda: 0)


def install() -> None:
    """Let this process know them."""
    kernels.registry = registry  # type: ignore[assignment]


def main(arguments: Sequence[str]) -> None:
    install()
    if HELD not in os.environ:  # else nothing leaks, and torch's own growth would cost new processes
        leftover.WORTH = 2**25
    if arguments[0] == "--worker":
        child.main()
    elif arguments[0] == "--light":
        child.main(Light)
    else:
        from flashbench.cli import main as flashbench

        quick = arguments[0] == "--quick"
        worker.COMMAND = LIGHT if quick else WORKER
        if quick:
            _spare_torch()
        try:
            flashbench(arguments[quick:])
        finally:
            _wait_for(ENDING)


if __name__ == "__main__":
    main(sys.argv[1:])
