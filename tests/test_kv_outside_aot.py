"""The kernels with K/V outside compile for every architecture within the shared memory that was foreseen.

No GPU is needed: Triton compiles for an architecture by name.
"""

from __future__ import annotations

import itertools
import re

import pytest
from test_flash_aot import LIMITS, ask

from flashbench._profilers import sass
from flashbench.flash_configs import TABLE, choose, math_of, shared_bytes
from flashbench.kernels import _compile

triton = pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # many compiles

KERNELS = ("v1_fwd", "v1_bwd", "atomic")
IMPLEMENTATION = {"v1_fwd": "flash-v1", "v1_bwd": "flash-v1"}

SPILLS = {
    ("v1_fwd", (9, 0), "fp16", 256): 2,
    ("v1_bwd", (9, 0), "fp16", 256): 2,
    ("v1_bwd", (8, 0), "bf16", 128): 12,
}
"""Instructions that spill, where any do: of dK, dV, dQ and what is multiplied, registers hold no more."""

if triton.__version__.startswith("3.6."):
    SPILLS |= {
        ("v1_fwd", (9, 0), "bf16", 64): 2,
        ("v1_fwd", (9, 0), "fp16", 256): 4,
        ("v1_bwd", (8, 0), "bf16", 128): 22,
        ("v1_bwd", (9, 0), "bf16", 128): 23,
        ("v1_bwd", (9, 0), "fp16", 256): 41,
        ("v1_bwd", (9, 0), "fp32", 64): 18,
        ("atomic", (9, 0), "fp32", 64): 7,
    }


def task(kernel: str, capability: tuple[int, int], dtype: str, head_dim: int, **changes) -> _compile.Task:
    asked = ask(kernel, capability, dtype, head_dim, **changes)
    name = IMPLEMENTATION.get(kernel, "flash-v2-atomic")
    return _compile.Task(kernel, asked.problem, capability, asked.limit, implementation=name)


TASKS = [
    *(task(kernel, card, "bf16", 128) for kernel in KERNELS for card in ((8, 0), (9, 0), (10, 0))),
    *(task(kernel, (9, 0), "bf16", 64, causal=False, num_kv_heads=4) for kernel in KERNELS),
    *(task(kernel, (9, 0), "fp16", 256) for kernel in KERNELS),
    *(task(kernel, (9, 0), "fp32", 64) for kernel in KERNELS),
    *(task(kernel, (9, 0), "tf32", 96, head_dim_v=80) for kernel in KERNELS),
    *(task(kernel, (9, 0), "bf16", 64) for kernel in ("clear", "convert")),
]


def name(asked: _compile.Task) -> str:
    return f"{asked.kernel} sm{asked.capability[0]}{asked.capability[1]} {asked.problem.key}"


@pytest.fixture(scope="module")
def compiled() -> dict[_compile.Task, _compile.Compiled]:
    return {done.task: done for done in _compile.compile_all(TASKS, inspect=True)}


@pytest.mark.parametrize("asked", TASKS, ids=name)
def test_compiles_within_the_shared_memory_it_was_chosen_for_and_spills_no_more_than_known(
    asked, compiled
) -> None:
    done, p = compiled[asked], asked.problem
    assert not done.error
    if asked.kernel in KERNELS:
        shape = math_of(p.dtype), p.head_dim, p.head_dim_v
        config = choose(asked.kernel, *shape, asked.capability, asked.limit)
        foreseen = shared_bytes(asked.kernel, config, *shape, asked.capability)
        assert done.shared_bytes <= foreseen <= asked.limit
    else:
        assert done.shared_bytes == 0
    if done.sass:
        allowed = SPILLS.get((asked.kernel, asked.capability, p.dtype, p.head_dim), 0)
        assert sass.count(done.sass).spills <= allowed


def test_version_1_reads_past_l1_and_the_atomic_backward_alone_adds_atomically(compiled) -> None:
    for asked in TASKS:
        code = compiled[asked].sass
        if not code:
            pytest.skip(compiled[asked].unread)
        past = re.findall(r"\bLDG\S*\.STRONG\.GPU", code)  # ld.global.cg
        assert bool(past) == asked.kernel.startswith("v1_"), name(asked)
        assert (sass.count(code).counts["atomic"] > 0) == (asked.kernel == "atomic"), name(asked)


@pytest.mark.parametrize("dtype", ["bf16", "fp32", "tf32"])
@pytest.mark.parametrize("capability", LIMITS)
def test_every_head_dim_fits_every_card(capability: tuple[int, int], dtype: str) -> None:
    for kernel, head_dim in itertools.product(KERNELS, range(1, 257)):
        shape = math_of(dtype), head_dim, 256 - head_dim or 1
        config = choose(kernel, *shape, capability, LIMITS[capability])
        assert shared_bytes(kernel, config, *shape, capability) <= LIMITS[capability]
    for kernel in KERNELS:
        shape = math_of(dtype), 256, 256
        config = choose(kernel, *shape, capability, LIMITS[capability])
        assert shared_bytes(kernel, config, *shape, capability) <= LIMITS[capability]


def test_the_table_has_a_row_for_every_kernel_and_dtype_and_version_1_prefetches_nothing() -> None:
    for kernel, math in itertools.product(KERNELS, ("half", "ieee", "tf32")):
        assert any(
            (row.kernel, row.family, row.math, row.max_dim) == (kernel, "any", math, 256) for row in TABLE
        )
    configs = [config for row in TABLE if row.kernel.startswith("v1_") for config in row.configs]
    assert {config.num_stages for config in configs} == {1}
