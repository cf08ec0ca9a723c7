"""The fp8 kernel compiles to fp8 products within the shared memory that it was chosen for, without spills."""

from __future__ import annotations

import re

import pytest
from attention import problem

from flashbench._profilers import sass
from flashbench.flash_configs import choose, shared_bytes
from flashbench.kernels import _compile

pytest.importorskip("triton")

LIMITS = {(9, 0): 232448, (10, 0): 232448}
PRODUCTS = {(9, 0): r"\bQGMMA\.64x\d+x32\.F32\.E4M3\.E4M3\b", (10, 0): r"\bUTCQMMA\b"}
"""The instruction that multiplies e4m3 and sums in fp32, by compute capability."""


def task(capability: tuple[int, int], head_dim: int, causal: bool) -> _compile.Task:
    heads = {"num_heads": 16, "num_kv_heads": 4, "seqlen_q": 4096, "seqlen_k": 4096}
    p = problem(**heads, head_dim=head_dim, head_dim_v=head_dim, dtype="fp8", causal=causal)
    return _compile.Task("fwd", p, capability, LIMITS[capability], implementation="flash-v2-fp8")


TASKS = [task((9, 0), 128, False), task((9, 0), 256, True), task((10, 0), 128, True)]


@pytest.fixture(scope="module")
def compiled() -> dict[_compile.Task, _compile.Compiled]:
    return {done.task: done for done in _compile.compile_all(TASKS, inspect=True)}


@pytest.mark.parametrize(
    "asked", TASKS, ids=lambda t: f"sm{t.capability[0]}{t.capability[1]} {t.problem.key}"
)
def test_compiles_to_fp8_products(
    asked: _compile.Task, compiled: dict[_compile.Task, _compile.Compiled]
) -> None:
    done, dim = compiled[asked], asked.problem.head_dim
    assert not done.error
    config = choose("fwd", "fp8", dim, dim, asked.capability, asked.limit)
    assert done.shared_bytes <= shared_bytes("fwd", config, "fp8", dim, dim, asked.capability) <= asked.limit
    if done.unread:
        pytest.skip(done.unread)
    # S is a product of its own, and so is every piece of P.V
    assert len(re.findall(PRODUCTS[asked.capability], done.sass)) >= 4
    assert not re.search(r"\bU?T?C?HG?MMA\b", done.sass), "no 16-bit product"
    assert sass.count(done.sass).spills == 0


@pytest.mark.parametrize("capability", [(8, 9), *LIMITS])
def test_every_head_dim_has_tiles_that_fit(capability: tuple[int, int]) -> None:
    limit = LIMITS.get(capability, 101376)
    for dim in range(1, 257):
        shape = "fp8", dim, 257 - dim
        config = choose("fwd", *shape, capability, limit)
        assert shared_bytes("fwd", config, *shape, capability) <= limit
        assert config.block_k % 32 == 0  # an fp8 product sums 32 at a time
