"""The decode kernels compile for every architecture within their shared memory, and do not spill.

No GPU is needed: Triton compiles for an architecture by name.
"""

from __future__ import annotations

import os
import subprocess
import sys
from itertools import product

import pytest
from attention import problem
from tiers import chosen, tiers

pytest.importorskip("triton")

from flashbench import decode_configs
from flashbench._profilers import sass
from flashbench.decode_configs import Shape, choose, shared_bytes
from flashbench.kernels import _compile, _triton
from flashbench.problem import Problem

LIMITS = {(8, 0): 166912, (8, 6): 101376, (9, 0): 232448, (10, 0): 232448}
"""Shared memory that a block may have, bytes, by compute capability (CUDA C++ Programming Guide)."""


def llama(**changes) -> Problem:
    shape = {"num_heads": 32, "num_kv_heads": 8, "seqlen_q": 1, "seqlen_k": 32768, "head_dim": 128,
             "head_dim_v": 128, "dtype": "bf16"}  # fmt: skip
    return problem(**{**shape, **changes})


def ask(kernel: str, capability: tuple[int, int], p: Problem) -> _compile.Task:
    return _compile.Task(kernel, p, capability, LIMITS[capability], implementation="flash-decode")


TASKS = [
    *(ask("decode", capability, llama()) for capability in LIMITS),
    *(ask("merge", capability, llama()) for capability in ((8, 0), (10, 0))),
    ask("decode", (9, 0), llama(seqlen_q=16)),
]
MORE = [
    ask("decode", (9, 0), llama(head_dim=192, seqlen_q=5)),
    ask("decode", (8, 6), llama(head_dim=256, head_dim_v=256)),
    ask("decode", (9, 0), llama(dtype="fp32", head_dim_v=256)),
    ask("decode", (9, 0), llama(dtype="tf32")),
]


@pytest.fixture(scope="module")
def compiled(request: pytest.FixtureRequest) -> dict[_compile.Task, _compile.Compiled]:
    return {done.task: done for done in _compile.compile_all(chosen(request, "task"), inspect=True)}


@pytest.mark.parametrize(
    "task", tiers(TASKS, MORE), ids=lambda t: f"{t.kernel} sm{t.capability} {t.problem.key}"
)
def test_compiles_within_the_shared_memory_it_was_chosen_for(task, compiled) -> None:
    done, p = compiled[task], task.problem
    assert not done.error
    shape = Shape(decode_configs.math_of(p.dtype), p.head_dim, p.head_dim_v, p.dtype_bytes)
    bound = shared_bytes(choose(shape, task.capability, task.limit), shape)
    assert done.shared_bytes <= bound <= task.limit
    if done.sass and p.dtype == "bf16":
        assert sass.count(done.sass).spills == 0


@pytest.mark.parametrize("task", TASKS[2:3], ids=lambda t: f"{t.kernel} sm{t.capability}")
def test_the_cache_is_copied_16_bytes_at_a_time_into_a_pipeline(task, compiled) -> None:
    done = compiled[task]
    if not done.sass:
        pytest.skip(done.unread)
    copies = [line for line in done.sass.splitlines() if "LDGSTS" in line]
    assert len(copies) >= 32
    assert all(".128" in line for line in copies)


@pytest.mark.parametrize("task", TASKS[:6], ids=lambda t: f"{t.kernel} sm{t.capability}")
def test_the_merge_is_launched_early_where_the_card_can(task, compiled) -> None:
    """PREEXIT lets what depends on a kernel start, ACQBULK waits for what the kernel depends on."""
    done = compiled[task]
    if not done.sass:
        pytest.skip(done.unread)
    able = task.capability >= (9, 0)
    wanted = (able, False) if task.kernel == "decode" else (False, able)
    assert ("PREEXIT" in done.sass, "ACQBULK" in done.sass) == wanted


def test_each_kind_of_cache_has_its_row_and_fp8_its_own_on_every_card() -> None:
    def chosen(kv_bytes: int, page_size: int, capability=(9, 0)) -> decode_configs.DecodeConfig:
        return choose(Shape("half", 128, 128, kv_bytes, page_size), capability, LIMITS[capability])

    contiguous, small, large = (chosen(2, page) for page in (0, 16, 256))
    assert contiguous == large != small
    assert (contiguous.resident, small.resident) == (1, 2)
    assert {chosen(1, page, card) for page in (0, 16, 256) for card in LIMITS if card != (8, 6)} == {
        chosen(1, 0)
    }
    assert chosen(2, 0, (10, 0)).resident == 2


@pytest.mark.parametrize("math", ["half", "ieee", "tf32"])
@pytest.mark.parametrize("capability", LIMITS)
def test_every_head_dim_fits_every_card(capability: tuple[int, int], math: str) -> None:
    own = 2 if math == "half" else 4
    caches = [(own, 0), (own, 16), *([(1, 0), (1, 16)] if math == "half" else ())]
    for dim, (kv_bytes, page_size) in product(range(1, 257), caches):
        shape = Shape(math, dim, 257 - dim, kv_bytes, page_size)
        assert shared_bytes(choose(shape, capability, LIMITS[capability]), shape) <= LIMITS[capability]


OTHERS = """
import sys, torch, triton
from triton.backends.compiler import GPUTarget
from flashbench.kernels import _compile
triton.runtime.driver.set_active(_compile._NoDevice(GPUTarget("cuda", 90, 32)))
from flashbench.kernels import _flash_decode as decode

def meta(*shape, dtype):
    return torch.empty(*shape, dtype=dtype, device="meta")

lengths, q = meta(2, dtype=torch.int32), meta(2, 32, 2, 128, dtype=torch.bfloat16)
scale = meta(8, dtype=torch.float32)
for page_size, dtype in ((16, q.dtype), (256, q.dtype), (16, decode.FP8)):
    k = meta(64, page_size, 8, 128, dtype=dtype)
    scales = {"k_descale": scale, "v_descale": scale} if dtype == decode.FP8 else {}
    table = meta(2, 4096 // page_size, dtype=torch.int32)
    cache = decode.Cache(k=k, v=k, seqused_k=lengths, block_table=table, **scales)
    call = decode.Call(causal=True, scale=0.1, num_splits=2, card=((9, 0), 232448, 132))
    kernel = decode.launches(q, cache, call)[2][0].compile()
    print("cp.async.cg.shared.global" in kernel.asm["ptx"])
new = meta(2, 8, 1, 128, dtype=q.dtype)
for launch in decode.append_launches(cache, new, new):
    print(launch.compile().metadata.shared >= 0)
"""


def test_paged_and_fp8_caches_and_the_append_compile() -> None:
    environment = {name: value for name, value in os.environ.items() if name != _triton.VARIABLE}
    done = subprocess.run(
        [sys.executable, "-c", OTHERS], capture_output=True, text=True, check=False, env=environment
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["True"] * 4
