"""flash-v3's backward compiles for sm_90 within a block's shared memory, and its products overlap.

No GPU is needed: Triton compiles for an architecture by name.
"""

from __future__ import annotations

import re

import pytest
from attention import problem
from hopper_ptxas import complaints

from flashbench import hopper_configs
from flashbench.hopper_configs import SHARED_LIMIT, BackwardTiles, pieces
from flashbench.kernels import _compile, _triton

pytest.importorskip("triton")

SPILLS_ALLOWED = {(3, 6): (2, 2), (3, 7): (25, 80)}
"""Instructions that spill in a warpgroup's loop over tiles, by first version of Triton; the second: where K
and V are held in registers."""

WIDE_SPILLS_ALLOWED: dict[tuple[int, int], dict[tuple[str, int], int]] = {
    (3, 6): {}, (3, 7): {("v3_dq", 256): 20},
}  # fmt: skip
"""The same of wide heads, by kernel and head dim of Q and K; else none."""


def ask(kernel: str, dim: int, causal: bool, dtype: str = "bf16", **changes) -> _compile.Task:
    p = problem(
        **{"num_heads": 16, "num_kv_heads": 4, "seqlen_q": 4096, "seqlen_k": 4096, "head_dim": dim,
           "head_dim_v": dim, "dtype": dtype, "causal": causal, **changes}
    )  # fmt: skip
    return _compile.Task(kernel, p, (9, 0), SHARED_LIMIT, implementation="flash-v3")


CORE = [
    ask("v3_bwd", 64, False), ask("v3_bwd", 128, True, "fp16"), ask("v3_dkdv", 256, True, "fp16"),
    ask("v3_dq", 256, False),
]  # fmt: skip
OTHERS = [
    ask("v3_bwd", 64, True), ask("v3_bwd", 128, False), ask("v3_bwd", 64, True, "fp16", seqlen_k=512),
    ask("v3_bwd", 64, False, "fp16", seqlen_k=512),
    ask("v3_bwd", 96, True), ask("v3_bwd", 40, False),
    ask("v3_bwd", 64, False, head_dim_v=128), ask("v3_prepare", 64, False), ask("v3_prepare", 128, False),
    ask("v3_convert", 64, False), ask("v3_convert", 96, False), ask("v3_prepare", 256, False),
    *(ask(kernel, dim, causal, head_dim_v=dim_v) for kernel in ("v3_dkdv", "v3_dq")
      for dim, dim_v, causal in ((256, 256, True), (256, 256, False), (192, 192, True), (192, 128, False))),
]  # fmt: skip


def tiles_of(task: _compile.Task) -> BackwardTiles:
    p = task.problem
    return hopper_configs.choose_backward(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)


def name(task: _compile.Task) -> str:
    return f"{task.kernel} {task.problem.key}"


@pytest.fixture(scope="module")
def core() -> dict[_compile.Task, _compile.Compiled]:
    return {done.task: done for done in _compile.compile_all(CORE, inspect=True)}


@pytest.fixture(scope="module")
def others() -> dict[_compile.Task, _compile.Compiled]:
    return {done.task: done for done in _compile.compile_all(OTHERS, inspect=True)}


@pytest.mark.parametrize("task", CORE, ids=name)
def test_the_core_compiles_as_it_was_chosen(task, core) -> None:
    holds(core[task])


@pytest.mark.slow
@pytest.mark.parametrize("task", OTHERS, ids=name)
def test_every_kernel_compiles_as_it_was_chosen(task, others) -> None:
    holds(others[task])


def holds(done: _compile.Compiled) -> None:
    assert not done.error
    assert done.shared_bytes <= SHARED_LIMIT
    assert complaints(done.ptx) == []
    if done.unread:
        pytest.skip(done.unread)
    if done.task.kernel in ("v3_dkdv", "v3_dq"):
        holds_wide(done)
    if done.task.kernel != "v3_bwd":
        return
    assert "USETMAXREG" in done.sass, "the producer's registers go to the consumers"
    assert "UTMAREDG" in done.sass, "dQ is added to its accumulator by TMA"
    loops = loops_of_products(done.sass)
    assert len(loops) == 2, "one per warpgroup"
    tiles, version = tiles_of(done.task), _triton._numbers(_triton._version())
    allowed = SPILLS_ALLOWED[max(v for v in SPILLS_ALLOWED if v <= version)][tiles.held]
    for loop in loops:
        assert len(re.findall(r"\b(?:STL|LDL)\b", loop)) <= allowed, "in a loop over tiles"
        # had ptxas serialised them (C7510 to C7520), it would wait for all after each
        waits = [int(n) for n in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", loop)]
        assert waits[0] == in_flight(tiles)
        assert loop.count("HGMMA") >= 4 * len(waits)


def holds_wide(done: _compile.Compiled) -> None:
    """As ``holds``, of the kernels of wide heads."""
    assert "USETMAXREG" in done.sass, "the producer's registers go to the consumers"
    loops = loops_of_products(done.sass, 16)
    assert len(loops) == 2, "one per warpgroup"
    version = _triton._numbers(_triton._version())
    kernel, p = done.task.kernel, done.task.problem
    allowed = WIDE_SPILLS_ALLOWED[max(v for v in WIDE_SPILLS_ALLOWED if v <= version)]
    of_q, of_v = (sum(width > 0 for width in pieces(dim)) for dim in (p.head_dim, p.head_dim_v))
    in_flight = [of_v, 0] if kernel == "v3_dkdv" else [of_q, of_v, 0]
    for loop in loops:
        spills = len(re.findall(r"\b(?:STL|LDL)\b", loop))
        assert spills <= allowed.get((kernel, p.head_dim), 0), "in a loop over tiles"
        # had ptxas serialised them, it would wait for all after each
        waits = [int(n) for n in re.findall(r"WARPGROUP\.DEPBAR\.LE gsb0, 0x(\d)", loop)]
        assert waits == in_flight, "products that run on under exponentials and hand-overs"


def in_flight(tiles: BackwardTiles) -> int:
    """Products that a warpgroup leaves in flight when it takes the exponentials of a tile's first scores."""
    if tiles.width == 128:
        return 1
    return 2 if tiles.held else 3


def loops_of_products(code: str, at_least: int = 32) -> list[str]:
    """The shortest loops of the machine code with many products, none of them a part of another.

    A branch back from where a wait goes on, at the end of the code, spans more than its loop.
    """
    lines = code.splitlines()
    at = {found[1]: i for i, line in enumerate(lines) if (found := re.match(r"\s*(\.L_x_\d+):", line))}
    ends = ((at.get(found[1], i), i) for i, line in enumerate(lines)
            if (found := re.search(r"BRA.*(\.L_x_\d+)", line)))  # fmt: skip
    spans = sorted((end - start, start, end) for start, end in ends if start < end)
    loops: list[tuple[int, int]] = []
    for _, start, end in spans:
        apart = all(end < first or last < start for first, last in loops)
        if apart and sum("HGMMA" in line for line in lines[start:end]) >= at_least:
            loops.append((start, end))
    return ["\n".join(lines[start:end]) for start, end in loops]
