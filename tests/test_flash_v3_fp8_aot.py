"""flash-v3-fp8 compiles for sm_90 within a block's shared memory; P moves nowhere, and products overlap.

Where both warpgroups run one copy of their code, neither waits for the other between products.

No GPU is needed: Triton compiles for an architecture by name.
"""

from __future__ import annotations

import re

import pytest
from attention import problem
from hopper_ptxas import complaints
from hopper_sass import Flow, exponentials_between, exponentials_in_flight

from flashbench import hopper_configs
from flashbench._profilers import sass
from flashbench.hopper_configs import FP8_TABLE, SHARED_LIMIT, Row, shared_bytes_fp8
from flashbench.kernels import _compile, _triton

pytest.importorskip("triton")

SPILLS_ALLOWED = {
    (3, 6): {(64, False, "2w.n256.s2.q2"): 61, (64, True, "2w.n256.s2.q2"): 69},
    (3, 7): {
        (64, False, "2w.n256.s2.q2"): 110,
        (64, True, "2w.n256.s2.q2"): 120,
        (128, False, "2w.n128.s4.q1.max3.e2"): 11,
        (128, False, "2w.n128.s4.q1.max3.e3"): 11,
    },
}
"""Instructions that spill, by first version of Triton and (head dim, causal, tiles); else none.

These were the fastest on an H100 in spite of them, with Triton 3.6.
"""


def ask(row: Row, dim: int, dtype: str = "fp8", **changes: object) -> _compile.Task:
    keys = int(min(row.max_keys, 16384))
    p = problem(
        **{"num_heads": 16, "num_kv_heads": 4, "seqlen_q": keys, "seqlen_k": keys, "head_dim": dim,
           "head_dim_v": dim, "dtype": dtype, "causal": row.causal, **changes}
    )  # fmt: skip
    return _compile.Task("v3_fp8", p, (9, 0), SHARED_LIMIT, implementation="flash-v3-fp8")


CORE = [ask(FP8_TABLE[-1], 128)]
OTHERS = [
    *(ask(row, row.max_dim) for row in FP8_TABLE[:-1]),
    *(ask(row, row.max_dim, "fp8-e5m2") for row in FP8_TABLE[3::4]),
    ask(FP8_TABLE[-1], 80, head_dim_v=48),
    ask(FP8_TABLE[-1], 128, "fp8-e5m2"),
]


@pytest.fixture(scope="module")
def core() -> dict[_compile.Task, _compile.Compiled]:
    return {done.task: done for done in _compile.compile_all(CORE, inspect=True)}


@pytest.fixture(scope="module")
def others() -> dict[_compile.Task, _compile.Compiled]:
    return {done.task: done for done in _compile.compile_all(OTHERS, inspect=True)}


@pytest.mark.parametrize("task", CORE, ids=lambda task: task.problem.key)
def test_head_dim_128_compiles_as_it_was_chosen(task, core) -> None:
    holds(core[task])


@pytest.mark.slow
@pytest.mark.parametrize("task", OTHERS, ids=lambda task: task.problem.key)
def test_every_configuration_compiles_as_it_was_chosen(task, others) -> None:
    holds(others[task])


def holds(done: _compile.Compiled) -> None:
    assert not done.error
    p = done.task.problem
    tiles = hopper_configs.choose_fp8(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
    bound = shared_bytes_fp8(tiles, p.head_dim, p.head_dim_v)
    assert bound - 2048 <= done.shared_bytes <= bound
    assert complaints(done.ptx) == []
    if done.unread:
        pytest.skip(done.unread)
    code = sass.count(done.sass)
    allowed = SPILLS_ALLOWED[max(v for v in SPILLS_ALLOWED if v <= _triton._numbers(_triton._version()))]
    assert code.spills <= allowed.get((max(p.head_dim, p.head_dim_v), p.causal, tiles.name), 0)
    own, others = map(hex, tiles.registers)
    assert {own, others} <= {*re.findall(r"USETMAXREG\S+ .*?(0x\w+) ;", done.sass)}
    cast = "E5M2" if p.dtype == "fp8-e5m2" else "E4M3"
    assert len(re.findall(rf"QGMMA\S*\.F32\.{cast}\.{cast}", done.sass)) >= 4
    assert "HGMMA" not in done.sass
    copies = 1 if tiles.promote else tiles.warpgroups  # of the consumers' code
    words = len(re.findall(r"F2FP\.SATFINITE", done.sass))  # twice as many conversions
    assert words == 2 * copies * tiles.block_k // 4, "in the loop and behind it"
    pairs = 2 * copies * hopper_configs.ROWS * tiles.block_k // 256 * tiles.emulated // 8
    means = re.findall(r"PRMT \S+, \S+, 0x7632, ", done.sass)  # the upper of two, at three ends
    assert len(means) <= (3 * hopper_configs.width(p.head_dim_v, p.head_dim_v) // 8 if tiles.promote else 0)
    moved = done.sass.count("PRMT") - pairs - len(means)
    carried = 3 * copies if tiles.promote else 1 if tiles.emulated else 0  # by a loop, as a byte
    assert moved <= carried, "no byte of P but of emulated pairs"
    assert ("VIMNMX3" in done.sass) == tiles.max3
    if tiles.max3:  # a row's maximum carries a NaN to the threads that have none; scales are held above 0
        assert len(re.findall(r"\bFMNMX(?!\.NAN)", done.sass)) <= 2 * copies
    expected = hopper_configs.ROWS * tiles.block_k // 128 * (8 - tiles.emulated) // 8
    found = (exponentials_between if tiles.promote else exponentials_in_flight)(done.sass)
    assert all(count >= expected for count in found), "while P V is in flight"
    assert len(found) == copies
    if tiles.promote:
        waits_for_no_other_warpgroup(Flow(done.sass), expected)


def waits_for_no_other_warpgroup(flow: Flow, exponentials: int) -> None:
    """In the consumers' code, and where two of its accesses to memory need both."""
    from flashbench.kernels._hopper_fp8_sums import MET, WARPS

    consumers, in_flight = flow.partition(), flow.in_flight()
    assert in_flight < consumers
    assert len(flow.find("MUFU.EX2", in_flight)) >= exponentials
    barriers = flow.find("BAR", in_flight)
    assert barriers, "K and V are waited for"
    assert all(f", {MET.value:#x} " in flow.steps[n] for n in barriers), "P V to scores, no barrier of all"
    looks = r"SYNCS\.PHASECHK"
    assert not flow.find(looks, consumers), "Triton has all warps meet before they look at an mbarrier"
    assert flow.find(looks), "others wait in their place"
    both = rf"BAR\.SYNC\S* 0x\w+(?:, {32 * WARPS.value:#x})? ;"
    for first, then in (
        (r"DEPBAR\.LE SB", "STS"),  # O has left: only the thread that sent it knows
        ("STS", "UTMASTG"),
        ("LDS", "STSM"),  # what was set aside, by other threads' O
    ):
        assert flow.find(first, consumers)
        assert flow.find(then, consumers)
        assert not flow.unguarded(first, then, both), f"{then} after {first}"


@pytest.mark.parametrize(
    ("text", "other"),
    [
        (r"BAR\.SYNC(\S*) (\w+), 0xa0", r"BAR.SYNC\1 \2, 0x100"),
        (r"BAR\.SYNC\S* 0x0, 0x100", "NOP"),
        (r"WARPGROUP\.ARRIVE", "SYNCS.PHASECHK.TRANS64.TRYWAIT P0, [R4], R5"),
    ],
)
def test_a_wait_that_is_too_many_or_missing_is_found(text: str, other: str, core) -> None:
    code = core[CORE[0]].sass
    if not code:
        pytest.skip(core[CORE[0]].unread)
    waits_for_no_other_warpgroup(Flow(code), 1)
    changed, times = re.subn(text, other, code)
    assert times
    with pytest.raises(AssertionError):
        waits_for_no_other_warpgroup(Flow(changed), 1)


def test_every_head_dim_fits_with_o_in_fp32_too() -> None:
    for dim in range(16, 129, 16):
        for keys in (1, 1000, 100_000):
            for causal in (False, True):
                tiles = hopper_configs.choose_fp8(dim, 144 - dim, causal, keys)
                assert shared_bytes_fp8(tiles, dim, 144 - dim, o_bytes=4) <= SHARED_LIMIT
