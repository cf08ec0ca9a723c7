"""flash-v3's forward compiles for sm_90 within a block's shared memory, and its machine code overlaps.

No GPU is needed: Triton compiles for an architecture by name.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
from attention import FEATURES, featured, problem
from hopper_ptxas import complaints
from hopper_sass import exponentials_in_flight, loops, softmax_order

from flashbench import hopper_configs
from flashbench._profilers import sass
from flashbench.hopper_configs import SHARED_LIMIT, TABLE, Row, Tiles, shared_bytes
from flashbench.kernels import Target, _compile, _triton, get

pytest.importorskip("triton")
HERE = Path(__file__).resolve().parent

WIDE = "2w.n64.s2.q1"
FULL, CAUSAL = "2w.n128.s2.q1.pingpong.guard1", "2w.n128.s2.q2.guard1"
SPILLS_ALLOWED = {
    (3, 6): {
        (96, False, FULL): 14, (96, True, CAUSAL): 14,
        (128, False, FULL): 32, (128, True, CAUSAL): 58,
    },
    (3, 7): {
        (64, False, "3w.n128.s2.q1.pingpong.guard2"): 118,
        (96, False, FULL): 14, (96, True, CAUSAL): 42,
        (128, False, FULL): 62, (128, True, CAUSAL): 77,
        (256, False, WIDE): 88, (256, True, WIDE): 63,
    },
}  # fmt: skip
SPILLS_ALLOWED[3, 8] = SPILLS_ALLOWED[3, 7] | {(96, False, FULL): 12}
"""Instructions that spill, by first version of Triton and (head dim, causal, tiles); else none.

These were the fastest on an H200 or, of 256, an H100 in spite of them, with Triton 3.6.
"""

HOT_SPILLS = {
    (3, 6): {}, (3, 7): {(64, False): 34, (96, True): 2}, (3, 8): {(64, False): 42, (96, True): 2},
    (3, 9): {(64, False): 34, (96, True): 2},
}  # fmt: skip
"""How many of them are in loops over tiles that need no mask, likewise."""

MOVED_ALLOWED = {
    (3, 6): {(64, True, "2w.n128.s2.q2.max3.e4"): 20},
    (3, 7): {
        (64, True, "2w.n128.s2.q2.max3"): 11, (64, True, "2w.n128.s2.q2.max3.e4"): 20,
        (128, False, "2w.n128.s2.q1.pingpong.max3"): 7,
    },
}  # fmt: skip
MOVED_ALLOWED[3, 8] = MOVED_ALLOWED[3, 7] | {(64, True, "2w.n128.s2.q2.max3.e4"): 19}
"""Exponentials of a tile and thread that ptxas moves behind the wait for P V, likewise; else a tenth."""


def ask(row: Row, dim: int, dtype: str = "bf16", **changes) -> _compile.Task:
    keys = int(min(row.max_keys, 16384))
    p = problem(
        **{"num_heads": 16, "num_kv_heads": 4, "seqlen_q": keys, "seqlen_k": keys, "head_dim": dim,
           "head_dim_v": dim, "dtype": dtype, "causal": row.causal, **changes}
    )  # fmt: skip
    return _compile.Task("v3_fwd", p, (9, 0), SHARED_LIMIT, implementation="flash-v3")


def tiles_of(task: _compile.Task) -> hopper_configs.Tiles:
    p = task.problem
    return hopper_configs.choose(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k, fp16=p.dtype == "fp16")


ROWS = {(row.max_dim, row.causal): row for row in TABLE}
"""By head dim and mask, of the most keys."""
EMULATED = [row for row in TABLE if row.fp16]
CORE = [ask(EMULATED[0], 64, "fp16"), ask(ROWS[64, True], 64), ask(ROWS[128, True], 128, "fp16")]
OTHERS = [
    *(ask(row, row.max_dim) for row in TABLE),
    *(ask(row, row.max_dim, "fp16") for row in TABLE if row.tiles.guarded),
    *(ask(row, 96) for row in TABLE if row.max_dim == 128),
    *(
        ask(ROWS[256, causal], dim, head_dim_v=dim_v)
        for dim, dim_v, causal in (
            (192, 192, False),
            (192, 192, True),
            (192, 128, False),
            (256, 64, True),
            (256, 192, False),
            (224, 96, True),
        )
    ),
    ask(ROWS[256, False], 64, head_dim_v=256),
    ask(ROWS[128, False], 80, head_dim_v=24, num_kv_heads=16),
]


@pytest.fixture(scope="module")
def core() -> dict[_compile.Task, _compile.Compiled]:
    return {done.task: done for done in _compile.compile_all(CORE, inspect=True)}


@pytest.fixture(scope="module")
def others() -> dict[_compile.Task, _compile.Compiled]:
    return {done.task: done for done in _compile.compile_all(OTHERS, inspect=True)}


def name(task: _compile.Task) -> str:
    return task.problem.key


@pytest.mark.parametrize("task", CORE, ids=name)
def test_the_core_compiles_as_it_was_chosen(task, core) -> None:
    holds(core[task])


@pytest.mark.slow
@pytest.mark.parametrize("task", OTHERS, ids=name)
def test_every_configuration_compiles_as_it_was_chosen(task, others) -> None:
    holds(others[task])


def holds(done: _compile.Compiled) -> None:
    assert not done.error
    p, tiles = done.task.problem, tiles_of(done.task)
    bound = shared_bytes(tiles, p.head_dim, p.head_dim_v)
    assert bound - 2048 <= done.shared_bytes <= bound <= SHARED_LIMIT
    assert (done.options["BLOCK_M"], done.options["BLOCK_N"]) == (tiles.block_q, tiles.block_k)
    # of a specialised kernel Triton counts whole warpgroups
    assert tiles.num_warps <= done.options["num_warps"] < tiles.num_warps + 4
    assert complaints(done.ptx) == []
    if done.unread:
        pytest.skip(done.unread)
    code = sass.count(done.sass)
    assert "USETMAXREG" in done.sass, "the producer's registers go to the consumers"
    assert code.counts["tma"] >= 4
    assert ("VIMNMX3" in done.sass) == tiles.max3
    if tiles.max3:  # a row's maximum carries a NaN to the threads that have none
        assert not re.search(r"\bFMNMX(?!\.NAN)", done.sass)
    dim = max(p.head_dim, p.head_dim_v)
    assert code.spills <= _of_version(SPILLS_ALLOWED).get((dim, p.causal, tiles.name), 0)
    if tiles.guarded:
        guarded_holds(tiles, done.sass, _of_version(HOT_SPILLS).get((dim, p.causal), 0))
        return
    between = exponentials_in_flight(done.sass)
    assert len(between) == tiles.warpgroups
    if dim <= 128:  # of 256 ptxas moves them behind the products
        each = hopper_configs.ROWS * tiles.block_k // 128 * (8 - tiles.emulated) // 8
        moved = _of_version(MOVED_ALLOWED).get((dim, p.causal, tiles.name), each / 10)
        whole = [count for count in between if count >= each - moved]
        assert len(whole) >= 2, f"exponentials while P V is in flight, by warpgroup: {between}"


def guarded_holds(tiles: Tiles, code: str, spilled: int) -> None:
    """A tile's exponentials lie among its sums and conversions, later tiles' in a loop without masks."""
    each = hopper_configs.ROWS * tiles.block_k // 128
    orders = softmax_order(code)
    assert len(orders) == 3 * tiles.warpgroups, "a program's first tile, its tile of queries', and later ones"
    while_in_flight = [order for flying, order in orders if flying]
    assert len(while_in_flight) == (2 * tiles.warpgroups if tiles.guarded == 1 else 0)
    for order in while_in_flight or [order for _, order in orders]:
        assert order.count("m") >= each
        again = each // 4 if tiles.guarded > 1 else 0  # of the first part, by another base
        assert order.count("c") >= each // 2 + again, "none is behind the wait for P V"
        alone = max(map(len, re.findall("m+", order)))
        assert alone < each // 2, f"sums and conversions are beside powers of two: {order}"
    hot = ["\n".join(loop) for loop in loops(code)]
    hot = [text for text in hot if "HGMMA" in text and text.count("MUFU.EX2") >= each]
    hot = [text for text in hot if text.count("FSEL") < each // 4]  # a mask is one each, a base four
    assert len(hot) == tiles.warpgroups
    assert sum(text.count(word) for text in hot for word in ("LDL", "STL")) <= spilled


def _of_version(allowed: Mapping[tuple[int, int], dict]) -> dict:
    """What is allowed with this Triton."""
    return allowed[max(first for first in allowed if first <= _triton._numbers(_triton._version()))]


def test_every_head_dim_fits() -> None:
    """Each of q and k beside each of v that is cut in another way."""
    both = False, True
    for dim, dim_v in product(range(1, 257), (1, 64, 80, 96, 128, 160, 192, 200, 256)):
        for keys, causal, fp16 in product((1, 1000, 100_000), both, both):
            tiles = hopper_configs.choose(dim, dim_v, causal, keys, fp16=fp16)
            assert shared_bytes(tiles, dim, dim_v) <= SHARED_LIMIT


def test_a_refusal_names_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "interpreted", lambda _: False)  # as where Triton was imported for a GPU
    hopper = Target(device="cuda", capability=(9, 0), smem_per_block_bytes=SHARED_LIMIT)
    ampere = Target(device="cuda", capability=(8, 0), smem_per_block_bytes=166912)
    row = get("flash-v3")

    def why(target: Target = hopper, **changes) -> str | None:
        return row.why_unsupported(problem(**{"dtype": "bf16", "head_dim": 64, **changes}), "fwd", target)

    assert why() is None
    assert why(ampere) == "it needs an sm90 GPU (H100, H200), this is sm80"
    assert why(Target()) == "it needs an sm90 GPU (H100, H200), this is a CPU"
    assert why(dtype="fp32") == "it takes fp16 and bf16, not fp32"
    assert why(softcap=30.0) == "it does not take softcap"
    assert why(head_dim=264) == "head_dim 264 is larger than 256"
    assert why(head_dim=100) == "head_dim 100 is not a multiple of 8, as TMA wants"
    assert row.why_unavailable(Target()) == "it needs an sm90 GPU (H100, H200), this is a CPU"


def test_the_configuration_of_a_row_is_one_that_can_be_asked_for() -> None:
    for row in TABLE:
        own = replace(row.tiles, stages=row.tiles.stages + 1, block_k=64, warpgroups=5 - row.tiles.warpgroups)
        assert hopper_configs.given(hopper_configs.described(own), row.tiles) == own
        assert hopper_configs.given({"fwd_block_q": 64, "fwd_block_k": 64}, row.tiles) is None


def test_the_row_says_which_kernels_run() -> None:
    hopper = Target(device="cuda", capability=(9, 0), smem_per_block_bytes=SHARED_LIMIT)

    def config(dim: int, **changes) -> Mapping[str, object]:
        p = problem(dtype="bf16", head_dim=dim, head_dim_v=dim, causal=True, **changes)
        return get("flash-v3").describe(p, "fwd+bwd", hopper)

    own, repeatable, wide = config(128), config(128, deterministic=True), config(192)
    assert own["fwd_block_q"] == 128
    assert (own["bwd_block_q"], own["bwd_block_k"], own["bwd_kernels"]) == (64, 128, "flash-v3")
    assert "dq_block_q" not in own
    assert repeatable["bwd_kernels"] == "flash-v3, dq by flash-v2: deterministic"
    assert (repeatable["bwd_block_q"], "dq_block_q" in repeatable, "dkdv_block_q" in repeatable) == (64, 1, 0)
    assert wide["bwd_kernels"] == "flash-v3"
    assert (wide["dkdv_block_k"], wide["dq_block_q"], "bwd_block_q" in wide) == (64, 128, False)
    assert config(192, deterministic=True) == wide


@pytest.mark.parametrize("feature", FEATURES)
@pytest.mark.parametrize("dim", [136, 256])
def test_flash_takes_the_portable_backward_of_wide_heads_for_what_flash_v3_refuses(
    monkeypatch: pytest.MonkeyPatch, feature: str, dim: int
) -> None:
    monkeypatch.setattr(_triton, "interpreted", lambda _: False)  # as where Triton was imported for a GPU
    hopper = Target(device="cuda", capability=(9, 0), smem_per_block_bytes=SHARED_LIMIT)
    p, row = featured(feature, dtype="bf16", head_dim=dim, head_dim_v=dim), get("flash")
    config = row.describe(p, "bwd", hopper)
    task = _compile.Task("", p, (9, 0), SHARED_LIMIT, implementation="flash")
    kernels = _compile.bundled(task).kernels["bwd"]
    if feature in ("bshd", "deterministic"):
        assert (config["kernels"], row.runs(p, hopper)) == ("flash-v3", "flash-v3")
        assert (config["bwd_kernels"], kernels) == ("flash-v3", ("v3_prepare", "v3_dkdv", "v3_dq"))
    else:
        assert config["kernels"].startswith("flash-v2: it does not take ")
        assert feature in config["kernels"]
        assert row.runs(p, hopper) is None
        assert ("bwd_kernels" in config, kernels) == (False, ("delta", "dkdv", "dq"))


NOT_V3 = """
from attention import problem
from flashbench.hopper_configs import SHARED_LIMIT
from flashbench.kernels import Target, _compile, get

row = get("flash")
asked = ({}, {"deterministic": True}, {"head_dim": 136, "head_dim_v": 136}, {"softcap": 30.0},
         {"head_dim": 192, "head_dim_v": 256, "softcap": 30.0}, {"head_dim": 132, "head_dim_v": 132})
for capability, changes in (*(((9, 0), one) for one in asked), ((8, 0), {})):
    target = Target(device="cuda", capability=capability, smem_per_block_bytes=SHARED_LIMIT)
    p = problem(**{"dtype": "bf16", "head_dim": 64, "head_dim_v": 64, **changes})
    for pass_ in ("fwd", "bwd"):
        config = row.describe(p, pass_, target)
        task = _compile.Task("", p, capability, SHARED_LIMIT, implementation="flash")
        launched = _compile.rehearse(task, pass_)
        for one in launched:
            if hasattr(one, "ready"):  # it is started with its constants in the order of the parameters
                assert one.kernel.arg_names[len(one.args):] == list(one.ready.constants)
        assert changes.get("deterministic") or {one.name for one in launched} == {
            name for pass_s in ("fwd", pass_) for name in _compile.bundled(task).kernels[pass_s]
        }
        names = " ".join(one.name for one in launched)
        print(row.model(p, target), config.get("kernels"), config.get("bwd_kernels"), names, sep="; ")
"""


def test_flash_runs_flash_v3_where_it_can_and_says_why_not() -> None:
    """In a process of its own: where Triton was imported as an interpreter, nothing runs flash-v3."""
    environment = {name: value for name, value in os.environ.items() if name != _triton.VARIABLE}
    environment["PYTHONPATH"] = os.pathsep.join(
        [str(HERE), str(HERE.parent), environment.get("PYTHONPATH", "")]
    )
    done = subprocess.run(
        [sys.executable, "-c", NOT_V3], capture_output=True, text=True, check=False, env=environment
    )
    repeatable = "flash-v3, dq by flash-v2: deterministic; v3_fwd v3_prepare v3_bwd delta dq"
    capped = "flash-v2: it does not take softcap"
    odd = "flash-v2: head_dim 132 is not a multiple of 8, as TMA wants"
    assert done.stdout.splitlines() == [
        "flash-v3-gluon; flash-v3; None; v3_fwd",
        "flash-v3-gluon; flash-v3; flash-v3; v3_fwd v3_prepare v3_bwd v3_convert",
        "flash-v3-gluon; flash-v3; None; v3_fwd",
        f"flash-v3-gluon; flash-v3; {repeatable}",
        "flash-v3-gluon; flash-v3; None; v3_fwd",
        "flash-v3-gluon; flash-v3; flash-v3; v3_fwd v3_prepare v3_dkdv v3_dq",
        f"flash; {capped}; None; fwd",
        f"flash; {capped}; None; fwd delta dq dkdv",
        f"flash; {capped}; None; fwd",
        f"flash; {capped}; None; fwd delta dq dkdv",
        f"flash; {odd}; None; fwd",
        f"flash; {odd}; None; fwd delta dq dkdv",
        "flash; None; None; fwd",
        "flash; None; None; fwd delta dq dkdv",
    ], done.stderr
