"""Every kernel compiles for every architecture within its shared memory, and the tuned ones do not spill.

No GPU is needed: Triton compiles for an architecture by name.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import processes
import pytest
import torch
from attention import FEATURES, featured, problem, run
from tiers import chosen, tiers

from flashbench import flash_configs, kernels
from flashbench._profilers import occupancy, sass, static
from flashbench.flash_configs import TABLE, choose, math_of, shared_bytes, split, widest
from flashbench.kernels import Target, _compile, _triton
from flashbench.kernels._inputs import make_inputs

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ("fwd", "dkdv", "dq", "delta")

pytest.importorskip("triton")

LIMITS = {(8, 0): 166912, (8, 6): 101376, (9, 0): 232448, (10, 0): 232448}
"""Shared memory that a block may have, bytes, by compute capability (CUDA C++ Programming Guide)."""

SPILLS_ALLOWED = {("dq", 64): 10, ("dkdv", 64): 8, ("dkdv", 128): 40}
"""Instructions that spill in a tuned configuration: these were the fastest on an H100 in spite of them."""

SPARSE_SPILLS_ALLOWED = {
    ("fwd", 128, (9, 0)): 40, ("dq", 128, (9, 0)): 10, ("dkdv", 128, (9, 0)): 12, ("dkdv", 64, (9, 0)): 24,
    ("dq", 64, (9, 0)): 24,
}  # fmt: skip
"""The same with a block mask: stores before the loop, loads where a partial block's bits are looked at."""


def ask(kernel: str, capability: tuple[int, int], dtype: str, head_dim: int, causal: bool = True, **changes):
    heads = {"num_heads": 16, "num_kv_heads": 16, "seqlen_q": 4096, "seqlen_k": 4096}
    p = problem(
        **{**heads, "head_dim": head_dim, "head_dim_v": head_dim, "dtype": dtype, "causal": causal, **changes}
    )
    return _compile.Task(kernel, p, capability, LIMITS[capability])


TASKS = [
    *(
        ask(kernel, (9, 0), "bf16", head_dim)
        for kernel, head_dim in itertools.product(("fwd", "dq", "dkdv"), (64, 128))
    ),
    ask("fwd", (9, 0), "bf16", 128, softcap=30.0),
    *(ask(kernel, (9, 0), "fp16", 256) for kernel in ("fwd", "delta")),
    *(ask(kernel, (8, 0), "bf16", 128, num_kv_heads=4) for kernel in ("fwd", "dq", "dkdv")),
    ask("fwd", (8, 6), "fp32", 80, head_dim_v=48),
    ask("fwd", (9, 0), "tf32", 96, head_dim_v=80),
    *(ask(kernel, (10, 0), "bf16", 128) for kernel in ("fwd", "dq", "dkdv")),
]
MORE = [
    *(
        ask(kernel, (9, 0), "bf16", head_dim, False)
        for kernel, head_dim in itertools.product(("fwd", "dq", "dkdv"), (64, 128))
    ),
    *(ask(kernel, (9, 0), "fp16", 256) for kernel in ("dq", "dkdv")),
    *(ask(kernel, (9, 0), "fp32", 256) for kernel in ("fwd", "dq", "dkdv", "delta")),
    *(ask(kernel, (9, 0), "tf32", 96, head_dim_v=80) for kernel in ("dq", "dkdv")),
    ask("dkdv", (8, 6), "fp32", 80, head_dim_v=48),
    *(ask(kernel, (8, 6), "bf16", 256) for kernel in ("fwd", "dkdv")),
    *(ask(kernel, (10, 0), "fp16", 64, False) for kernel in ("dq", "dkdv")),
]
"""Of the full suite: a compile takes seconds."""


def sparse(capability: tuple[int, int], head_dim: int) -> list[_compile.Task]:
    return [
        ask(kernel, capability, "bf16", head_dim, False, block_mask="causal")
        for kernel in ("fwd", "dq", "dkdv")
    ]


SPARSE = sparse((9, 0), 128)
MORE_SPARSE = [*sparse((8, 0), 128), *sparse((9, 0), 64), *sparse((10, 0), 64)]


def name(task: _compile.Task) -> str:
    return f"{task.kernel} sm{task.capability[0]}{task.capability[1]} {task.problem.key}"


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[_compile.Task, _compile.Compiled]:
    return {done.task: done for done in _compile.compile_all(chosen(request, "task"), inspect=True)}


@pytest.mark.parametrize("task", tiers(TASKS, MORE), ids=name)
def test_compiles_within_the_shared_memory_it_was_chosen_for(task, compiled) -> None:
    done = compiled[task]
    assert not done.error
    p = task.problem
    shape = math_of(p.dtype), p.head_dim, p.head_dim_v
    config = choose(task.kernel, *shape, task.capability, task.limit)
    assert done.shared_bytes <= shared_bytes(task.kernel, config, *shape, task.capability) <= task.limit
    tuned = task.capability == (9, 0) and p.dtype == "bf16" and p.head_dim in (64, 128)
    if tuned and done.sass:
        assert sass.count(done.sass).spills <= SPILLS_ALLOWED.get((task.kernel, p.head_dim), 0)


@pytest.mark.parametrize("task", tiers(SPARSE, MORE_SPARSE), ids=name)
def test_a_block_mask_compiles_as_tightly(task, compiled) -> None:
    done, p = compiled[task], task.problem
    assert not done.error
    shape = math_of(p.dtype), p.head_dim, p.head_dim_v
    config = choose(task.kernel, *shape, task.capability, task.limit)
    assert done.shared_bytes <= shared_bytes(task.kernel, config, *shape, task.capability) <= task.limit
    allowed = SPARSE_SPILLS_ALLOWED.get((task.kernel, p.head_dim, task.capability), 0)
    assert not done.sass or sass.count(done.sass).spills <= allowed


def sent_addends(code: str) -> list[str]:
    """The multiply-adds that add what another lane has sent."""
    sent: set[str] = set()
    found = []
    for opcode, operands in re.findall(r"\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)\s+(.*?)\s*;", code):
        registers = re.findall(r"\bR\d+", operands)
        if opcode.startswith("FFMA") and registers[-1] in sent and operands.endswith(registers[-1]):
            found.append(f"{opcode} {operands}")
        if opcode.startswith("SHFL"):
            sent.add(registers[0])
        elif registers and not opcode.startswith("ST"):
            sent.discard(registers[0])
    return found


def test_the_lanes_of_a_row_agree_on_its_delta() -> None:
    """They write it to one place. Of rows that are not aligned, as of 72 numbers, each has one product."""
    tasks = [ask("delta", (9, 0), "fp32", 24, head_dim_v=dim_v) for dim_v in (24, 72)]
    for done in _compile.compile_all(tasks, inspect=True):
        assert not done.error
        if done.unread:
            pytest.skip(done.unread)
        assert done.sass.count("SHFL") >= 5
        assert sent_addends(done.sass) == []
    assert sent_addends("/*0*/ SHFL.BFLY PT, R4, R3, 0x10, 0x1f ;\n/*10*/ FFMA R3, R1, R2, R4 ;")


def test_a_kernel_that_does_not_compile_is_a_result() -> None:
    task = ask("fwd", (9, 0), "bf16", 64)
    odd = _compile.Task("fwd", task.problem, (9, 0), None, flash_configs.Config(48, 64, 4, 1))
    (done,) = _compile.compile_all([odd])
    assert "power of 2" in done.error


@pytest.mark.slow
def test_one_process_compiles_for_several_architectures() -> None:
    tasks = [ask("delta", capability, "bf16", 64) for capability in ((8, 0), (9, 0), (10, 0), (8, 0))]
    done = _compile.compile_all(tasks, workers=1, inspect=True)
    assert all(one.sass for one in done), [one.error or one.unread for one in done]
    found = [re.search(r"(?i)(?:target\s+|EF_CUDA_)sm_?(\d+)", one.sass) for one in done]
    assert [match and match[1] for match in found] == ["80", "90", "100", "80"]


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "tf32"])
@pytest.mark.parametrize("capability", LIMITS)
def test_every_head_dim_fits_every_card(capability: tuple[int, int], dtype: str) -> None:
    for kernel, head_dim in itertools.product(KERNELS, range(1, 257)):
        shape = math_of(dtype), head_dim, 256 - head_dim or 1
        config = choose(kernel, *shape, capability, LIMITS[capability])
        assert shared_bytes(kernel, config, *shape, capability) <= LIMITS[capability]


def test_the_table_has_a_row_for_every_kernel_and_dtype() -> None:
    for kernel, math in itertools.product(KERNELS, ("half", "ieee", "tf32")):
        assert any(
            (row.kernel, row.family, row.math, row.max_dim) == (kernel, "any", math, 256) for row in TABLE
        )


def test_the_table_asks_for_powers_of_two() -> None:
    for config in itertools.chain.from_iterable(row.configs for row in TABLE):
        sizes = config.block_q, config.block_k, config.num_warps
        assert all(size & (size - 1) == 0 for size in sizes)
        assert config.block_q >= 16 <= config.block_k


@pytest.mark.parametrize("math", ["half", "ieee", "tf32"])
def test_pieces_cover_a_head_dim_without_gap_or_much_waste(math: str) -> None:
    for dim in range(1, 257):
        pieces = split(dim, widest(math))
        assert all(width in (32, 64, 128, 256) and width <= widest(math) for _, width in pieces)
        starts = [start for start, _ in pieces]
        ends = [start + width for start, width in pieces]
        assert starts == [0, *ends[:-1]]
        assert pieces[-1][0] < dim <= ends[-1]
        assert ends[-1] < max(33, 2 * dim)


def test_precompile_needs_a_gpu_to_compile_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_compile, "compile_all", lambda tasks: pytest.fail("compiled for a CPU"))
    _compile.precompile([], Target())


LACKING = """
import sys
sys.path.insert(0, sys.argv[1])
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
import triton.compiler.compiler as compiler
from flashbench.kernels import _compile
from test_flash_aot import ask
driver.set_active(_compile._NoDevice(GPUTarget("cuda", 90, 32)))
compiled = []
real = compiler.ASTSource.make_ir
compiler.ASTSource.make_ir = lambda self, *args: compiled.append(self.name) or real(self, *args)
tasks = [ask("delta", (9, 0), dtype, 64) for dtype in ("bf16", "fp32")]
print(len(_compile.lacking(tasks)), len(compiled))
_compile.launch(tasks[1]).compile()
print([tasks.index(task) for task in _compile.lacking(tasks)], len(compiled))
"""


def test_only_what_tritons_cache_lacks_is_compiled_and_looking_compiles_nothing(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != _triton.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", LACKING, str(Path(__file__).parent)],
        capture_output=True, text=True, check=False, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["2 0", "[0] 1"], done.stderr


KEYS = """
import sys
sys.path.insert(0, sys.argv[1])
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from flashbench.kernels import _compile
from test_flash_aot import ask
driver.set_active(_compile._NoDevice(GPUTarget("cuda", 90, 32)))
tasks = [ask(kernel, (9, 0), "bf16", 32) for kernel in ("delta", "fwd", "dq", "dkdv")]
for task in tasks[::int(sys.argv[2])]:
    print(task.kernel, _compile.launch(task).compile().hash)
"""


@pytest.mark.slow
def test_a_kernels_place_in_tritons_cache_does_not_depend_on_what_was_compiled_before(tmp_path: Path) -> None:
    """Else what a worker compiled would be compiled again by its launch."""
    environment = {name: value for name, value in os.environ.items() if name != _triton.VARIABLE}
    found = [
        subprocess.run(
            [sys.executable, "-c", KEYS, str(Path(__file__).parent), step],
            capture_output=True, text=True, check=True,
            env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
        ).stdout.splitlines()
        for step in ("1", "-1")
    ]  # fmt: skip
    assert len(found[0]) == 4
    assert found[0] == found[1][::-1]


LAUNCHERS = """
import sys, threading
sys.path.insert(0, sys.argv[1])
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from flashbench.kernels import _compile
from test_flash_aot import ask
built, both = [], threading.Barrier(2, timeout=240)
def build(source, metadata):
    both.wait()  # as neither goes on alone, they are built at once
    built.append(source.name)
    if source.name == "delta_rows":
        raise RuntimeError("no C compiler")
device = _compile._NoDevice(GPUTarget("cuda", 90, 32))
device.launcher_cls = build
driver.set_active(device)
_compile.build_launchers([ask(kernel, (9, 0), "bf16", 64) for kernel in ("delta", "fwd")])
print(sorted(built))
"""


@pytest.mark.slow
def test_launchers_are_built_at_once_and_one_that_fails_is_left(tmp_path: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != _triton.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", LAUNCHERS, str(Path(__file__).parent)],
        capture_output=True, text=True, check=False, env={**environment, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert done.stdout.splitlines() == ["['delta_rows', 'forward']"], done.stderr


COMPILING = """
import sys

sys.path.insert(0, sys.argv[1])
from flashbench.kernels import _compile
from test_flash_aot import ask

for done in _compile.compile_each([ask("fwd", (9, 0), "bf16", dim) for dim in (32, 64, 128)], workers=2):
    print(done.error or "compiled", flush=True)
"""


@pytest.mark.slow
def test_no_compiling_process_outlives_one_that_is_killed(tmp_path: Path) -> None:
    tag, surroundings = processes.tagged()
    run = subprocess.Popen(
        [sys.executable, "-c", COMPILING, str(Path(__file__).parent)],
        stdout=subprocess.PIPE, env={**surroundings, "TRITON_CACHE_DIR": str(tmp_path)},
    )  # fmt: skip
    assert run.stdout is not None
    assert run.stdout.readline() == b"compiled\n"
    run.kill()
    run.wait()
    run.stdout.close()
    assert processes.left(tag) == []


@pytest.mark.gpu
def test_workers_start_for_what_is_missing_only(monkeypatch: pytest.MonkeyPatch) -> None:
    from flashbench import environment
    from flashbench.problem import Cell

    target = environment.target("cuda:0")
    p = problem(seqlen_q=64, seqlen_k=64, head_dim=32, head_dim_v=32, dtype="bf16")
    cells = [Cell(implementation="flash", problem=p, pass_="bwd")]
    _compile.precompile(cells, target)
    monkeypatch.setattr(_compile, "compile_all", lambda tasks: pytest.fail("compiled what was there"))
    _compile.precompile(cells, target)


def test_load_refuses_what_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "why_unavailable", lambda target: "triton is not installed")
    with pytest.raises(_triton.UnavailableError, match="flash: triton is not installed"):
        _triton.load("cpu", "_not_loaded_yet")


@pytest.mark.parametrize("name", FEATURES)
def test_what_is_compiled_ahead_is_what_the_runner_launches(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same kernels, constants and specialisations, a feature's own among them."""
    from flashbench.kernels import _call

    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = featured(name, dtype="fp16", num_kv_heads=2)
    launched: list[_call.Launch] = []
    monkeypatch.setattr(_call.Launch, "run", lambda launch: launched.append(launch))
    if device == "cuda":
        ready = _triton.load("cuda", "_hopper_ready")
        monkeypatch.setattr(ready.Ready, "start", lambda *_: False)
    run(kernels.get("flash"), p, make_inputs(p, device, 0))
    monkeypatch.undo()
    task = _compile.Task("", p, *_call.card(torch.device(device)))
    ahead = _compile.rehearse(task, "bwd")
    assert {one.key for one in launched} == {one.key for one in ahead}
    plain = _compile.rehearse(dataclasses.replace(task, problem=problem(dtype="fp16", num_kv_heads=2)), "bwd")
    assert ({one.key for one in launched} != {one.key for one in plain}) == (name != "deterministic")


@pytest.mark.slow
def test_what_versions_1_and_2_spill_is_what_is_committed() -> None:
    """The evidence of a claim (``configs/claims.toml``), made by the Triton that its rows name."""
    import triton

    committed = json.loads((ROOT / "reports" / "static" / "versions.json").read_text(encoding="utf-8"))
    if triton.__version__ != committed[0]["triton_version"]:
        pytest.skip(f"the rows are of Triton {committed[0]['triton_version']}")
    grid = static.Grid(
        implementations=("flash-v1", "flash-v2"), head_dims=(64, 128), dtypes=("bf16",), causal=(False, True),
        passes=("fwd", "bwd"), limits={one: occupancy.LIMITS[one] for one in ((8, 0), (9, 0))},
    )  # fmt: skip
    assert static.profile(grid) == committed
