"""Alternatives to exact attention: closed forms against walks over their loops, names, crossovers."""

from __future__ import annotations

import itertools
import math
import re
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from flashbench import crossover, iomodel
from flashbench._iomodel import alternatives
from flashbench._iomodel.approximate import BLOCK_Q, Linformer, Longformer, Reformer
from flashbench._iomodel.recurrent import LinearAttention, Mamba, Mamba2
from flashbench.cli import main
from flashbench.errors import SpecError, UnknownName
from flashbench.problem import Problem


def problem(
    n: int = 1024, *, causal: bool = False, heads: int = 4, kv_heads: int = 4, **changes: object
) -> Problem:
    row = Problem(
        batch=2, num_heads=heads, num_kv_heads=kv_heads, seqlen_q=n, seqlen_k=n, head_dim=16, head_dim_v=8,
        dtype="bf16", causal=causal,
    )  # fmt: skip
    return replace(row, **changes)


problems = st.builds(
    lambda n, heads, group, d, dv, dtype, causal: Problem(
        batch=2, num_heads=heads * group, num_kv_heads=heads, seqlen_q=n, seqlen_k=n, head_dim=d,
        head_dim_v=dv, dtype=dtype, causal=causal,
    ),
    st.integers(1, 700), st.integers(1, 2), st.integers(1, 2), st.integers(1, 8), st.integers(1, 8),
    st.sampled_from(["fp16", "fp32"]), st.booleans(),
)  # fmt: skip


class Tally:
    """Bytes per tensor, FLOPs and exponentials that a walk counts."""

    def __init__(self) -> None:
        self.read: dict[str, int] = {}
        self.write: dict[str, int] = {}
        self.flops = self.exps = 0

    def load(self, **sizes: int) -> None:
        for name, size in sizes.items():
            self.read[name] = self.read.get(name, 0) + size

    def store(self, **sizes: int) -> None:
        for name, size in sizes.items():
            self.write[name] = self.write.get(name, 0) + size

    def product(self, rows: int, inner: int, columns: int) -> None:
        self.flops += 2 * rows * inner * columns


def assert_same(steps: tuple, tally: Tally) -> None:
    merged = Tally()
    for step in steps:
        merged.load(**step.read)
        merged.store(**step.write)
        merged.flops += step.flops
        merged.exps += step.exps

    def counted(sizes: dict[str, int]) -> dict[str, int]:
        return {name: size for name, size in sizes.items() if size}

    assert counted(merged.read) == counted(tally.read)
    assert counted(merged.write) == counted(tally.write)
    assert (merged.flops, merged.exps) == (tally.flops, tally.exps)


def tiles(n: int, block: int) -> list[range]:
    return [range(start, min(n, start + block)) for start in range(0, n, block)]


@settings(max_examples=60, deadline=None)
@given(problems, st.integers(1, 400))
def test_linformer_walks(p: Problem, rank: int) -> None:
    p = replace(p, causal=False)
    e, k = p.dtype_bytes, min(rank, p.seqlen_k)
    walk = Tally()
    for _ in range(p.batch * p.num_kv_heads):
        for tile in tiles(k, BLOCK_Q):
            factor = len(tile) * p.seqlen_k * e
            walk.load(k=p.seqlen_k * p.head_dim * e, v=p.seqlen_k * p.head_dim_v * e, e=factor, f=factor)
            walk.store(k_projected=len(tile) * p.head_dim * e, v_projected=len(tile) * p.head_dim_v * e)
            walk.product(len(tile), p.seqlen_k, p.head_dim)
            walk.product(len(tile), p.seqlen_k, p.head_dim_v)
    for _ in range(p.batch * p.num_heads):
        for tile in tiles(p.seqlen_q, BLOCK_Q):
            rows = len(tile)
            walk.load(
                q=rows * p.head_dim * e, k_projected=k * p.head_dim * e, v_projected=k * p.head_dim_v * e
            )
            walk.product(rows, p.head_dim, k)
            walk.product(rows, k, p.head_dim_v)
            walk.exps += rows * k
            walk.store(o=rows * p.head_dim_v * e, lse=rows * 4)
    assert_same(Linformer(rank=rank).steps(p), walk)


@settings(max_examples=60, deadline=None)
@given(problems, st.integers(1, 3), st.integers(1, 90))
def test_reformer_walks(p: Problem, rounds: int, chunk: int) -> None:
    p = replace(p, num_kv_heads=p.num_heads)
    method = Reformer(rounds=rounds, chunk=chunk)
    n, d, dv, e = p.seqlen_q, p.head_dim, p.head_dim_v, p.dtype_bytes
    buckets, (first, second) = method.buckets(n)
    assert first * second >= buckets
    assert first % 2 == second % 2 == 0
    walk = Tally()
    o, lse = ("o", "lse") if rounds == 1 else ("o_rounds", "lse_rounds")
    for _ in range(p.batch * p.num_heads * rounds):
        columns = first // 2 + second // 2  # a hash is the largest of xR and -xR
        walk.load(q=n * d * e, rotations=d * columns * e, buckets=4 * n)
        walk.store(buckets=4 * n)
        walk.product(n, d, columns)
        done = 0
        while 2**done < buckets:
            walk.load(keys=8 * n)
            walk.store(keys=8 * n)
            done += 8
        chunks = tiles(n, chunk)
        for index, mine in enumerate(chunks):
            keys = len(mine) + (len(chunks[index - 1]) if len(chunks) > 1 else 0)
            walk.load(q=len(mine) * d * e, k=keys * d * e, v=keys * dv * e, order=4 * keys)
            walk.product(len(mine), d, keys)
            walk.product(len(mine), keys, dv)
            walk.exps += len(mine) * keys
            walk.store(**{o: len(mine) * dv * e, lse: 4 * len(mine)})
    if rounds > 1:
        for _ in range(p.batch * p.num_heads):
            walk.load(o_rounds=rounds * n * dv * e, lse_rounds=rounds * n * 4)
            walk.exps += rounds * n
            walk.store(o=n * dv * e, lse=4 * n)
    assert_same(method.steps(p), walk)


def window_of(i: int, window: int, *, causal: bool) -> range:
    """The keys that Longformer's window shows to query i, beyond the edges too."""
    after = 0 if causal else window - window // 2
    return range(i + after - window, i + after + 1)


@settings(max_examples=80, deadline=None)
@given(problems, st.integers(1, 800), st.integers(0, 300))
def test_longformer_walks(p: Problem, window: int, everywhere: int) -> None:
    method = Longformer(window=window, globals=0 if p.causal else everywhere)
    n, d, dv, e = p.seqlen_q, p.head_dim, p.head_dim_v, p.dtype_bytes
    seen = min(method.globals, n)
    walk = Tally()
    for _ in range(p.batch * p.num_heads):
        for tile in tiles(n, BLOCK_Q):
            keys = {key for i in tile for key in window_of(i, window, causal=p.causal) if 0 <= key < n}
            rows = len(keys) + seen
            walk.load(q=len(tile) * d * e, k=rows * d * e, v=rows * dv * e)
            walk.product(len(tile), d, rows)
            walk.product(len(tile), rows, dv)
            walk.exps += len(tile) * rows
            walk.store(o=len(tile) * dv * e, lse=4 * len(tile))
        for tile in tiles(seen, BLOCK_Q):
            walk.load(q_global=len(tile) * d * e, k_global=n * d * e, v_global=n * dv * e)
            walk.product(len(tile), d, n)
            walk.product(len(tile), n, dv)
            walk.exps += len(tile) * n
            walk.store(o=len(tile) * dv * e, lse=4 * len(tile))
    assert_same(method.steps(p), walk)


@settings(max_examples=60, deadline=None)
@given(problems, st.integers(1, 90))
def test_linear_attention_walks(p: Problem, chunk: int) -> None:
    n, d, dv, e = p.seqlen_q, p.head_dim, p.head_dim_v, p.dtype_bytes
    walk = Tally()
    if p.causal:
        for _ in range(p.batch * p.num_heads):
            for rows in map(len, tiles(n, chunk)):
                walk.load(q=rows * d * e, k=rows * d * e, v=rows * dv * e)
                for product in ((rows, d, rows), (rows, rows, dv), (rows, d, dv), (d, rows, dv)):
                    walk.product(*product)
                walk.store(o=rows * dv * e)
    else:
        state = (d * dv + d) * 4
        for _ in range(p.batch * p.num_kv_heads):
            walk.load(k=n * d * e, v=n * dv * e)
            walk.product(d, n, dv)
            walk.store(state=state)
        for _ in range(p.batch * p.num_heads):
            for rows in map(len, tiles(n, BLOCK_Q)):
                walk.load(q=rows * d * e, state=state)
                walk.product(rows, d, dv)
                walk.store(o=rows * dv * e)
    assert_same(LinearAttention(chunk=chunk).steps(p), walk)


@settings(max_examples=40, deadline=None)
@given(problems, st.integers(1, 2), st.integers(1, 5), st.integers(1, 9000))
def test_mamba_walks(p: Problem, expand: int, state: int, length: int) -> None:
    p = replace(p, seqlen_q=length, seqlen_k=length)
    e = p.dtype_bytes
    walk = Tally()
    for _ in range(p.batch * expand * p.num_heads * p.head_dim_v):
        walk.load(d=4, delta_bias=4)
        for rows in map(len, tiles(length, 2048)):
            walk.load(u=rows * e, delta=rows * e, z=rows * e)
            for _ in range(state):
                walk.load(a=4, b=rows * e, c=rows * e)
                walk.flops += 9 * rows
                walk.exps += rows
                walk.store(states=8)
            walk.flops += 2 * rows
            walk.store(out=rows * e, out_z=rows * e)
    assert_same(Mamba(expand=expand, state=state).steps(p), walk)


@settings(max_examples=60, deadline=None)
@given(problems, st.integers(1, 5), st.integers(1, 90), st.sampled_from([1, 2]))
def test_mamba2_walks(p: Problem, state: int, chunk: int, groups: int) -> None:
    p = replace(p, head_dim_v=4)
    method = Mamba2(state=state, channels=4, chunk=chunk, groups=groups)
    heads, n, e = 2 * p.num_heads, p.seqlen_q, p.dtype_bytes
    walk = Tally()
    walk.load(a=4 * heads, d=4 * heads)
    for _ in range(p.batch):
        for rows in map(len, tiles(n, chunk)):
            for _ in range(groups):
                walk.load(b=2 * rows * state * e, c=2 * rows * state * e, cb=rows * rows * 4)
                walk.store(cb=rows * rows * 4)
                walk.product(rows, state, rows)
            for _ in range(heads):
                walk.load(dt=rows * e, dt_fp32=8 * rows, decay=8 * rows + 4, x=2 * rows * 4 * e)
                walk.load(states=4 * state * 4, states_in=4 * state * e)
                walk.store(dt_fp32=4 * rows, decay=4 * rows, out=rows * 4 * e)
                walk.store(states=4 * state * 4, states_in=4 * state * e)
                for product in ((state, rows, 4), (rows, state, 4), (rows, rows, 4)):
                    walk.product(*product)
                walk.flops += 2 * 4 * state
                walk.exps += 2 * rows + 1 + rows * rows
        walk.store(state_out=heads * 4 * state * 4)
    assert_same(method.steps(p), walk)


def decode(n: int, **changes: object) -> Problem:
    return replace(problem(n, **changes), seqlen_q=1)


@pytest.mark.parametrize("causal", [False, True])
def test_a_decode_step_moves_the_state_both_ways_whatever_came_before(causal: bool) -> None:
    for name in ("linear-attention", "mamba", "mamba2"):
        short, long = (
            iomodel.estimate(name, decode(n, causal=causal, head_dim_v=64), "fwd") for n in (64, 65_536)
        )
        assert short.requested == long.requested == replace(short.compulsory, level="requested")
        assert short.flops == long.flops
        state = alternatives.find(name).method.decode_bytes(short.problem)
        assert short.requested.read["state"] == short.requested.write["state"] == 2 * state
        assert short.extra_bytes == short.requested.write_bytes - 2 * state


def test_decode_steps_walk() -> None:
    p = decode(100, heads=4, kv_heads=2)
    walk = Tally()
    for _ in range(p.batch * p.num_kv_heads):
        walk.load(k=16 * 2, v=8 * 2, state=(16 * 8 + 16) * 4)
        walk.store(state=(16 * 8 + 16) * 4)
        walk.product(16, 1, 8)
    for _ in range(p.batch * p.num_heads):
        walk.load(q=16 * 2)
        walk.product(1, 16, 8)
        walk.store(o=8 * 2)
    assert_same(LinearAttention().steps(p), walk)
    walk = Tally()
    channels = 2 * 4 * 8
    walk.load(a=channels * 16 * 4, d=channels * 4, delta_bias=channels * 4)
    for _ in range(p.batch):
        walk.load(b=16 * 2, c=16 * 2)
        for _ in range(channels):
            walk.load(u=2, delta=2, z=2, state=16 * 4)
            walk.store(out_z=2, state=16 * 4)
            walk.flops += 9 * 16 + 2
            walk.exps += 16
    assert_same(Mamba().steps(p), walk)
    walk = Tally()
    walk.load(a=16 * 4, d=16 * 4)
    for _ in range(p.batch):
        walk.load(b=128 * 2, c=128 * 2)
        for _ in range(channels // 4):
            walk.load(dt=2, x=4 * 2, state=4 * 128 * 4)
            walk.store(out=4 * 2, state=4 * 128 * 4)
            walk.flops += 5 * 4 * 128
            walk.exps += 1
    assert_same(Mamba2(channels=4).steps(p), walk)


@settings(max_examples=150, deadline=None)
@given(problems, st.sampled_from(alternatives.names()))
def test_requested_is_never_less_than_compulsory(p: Problem, name: str) -> None:
    p = replace(p, num_kv_heads=p.num_heads, head_dim_v=64)
    method = alternatives.find(name).method
    assume(method.refuses(p) is None)
    row = iomodel.estimate(name, p, "fwd")
    for tensor, size in row.compulsory.read.items():
        assert row.requested.read[tensor] >= size, tensor
    for tensor, size in row.compulsory.write.items():
        assert row.requested.write[tensor] >= size, tensor
    assert row.extra_bytes >= row.compulsory.write_bytes
    assert row.flops > 0


@pytest.mark.parametrize("name", alternatives.names())
def test_cost_rises_with_the_length_and_at_most_linearly(name: str) -> None:
    lengths = [2**power for power in range(12, 21)]
    rows = [iomodel.estimate(name, problem(n, heads=16, kv_heads=16, head_dim_v=64), "fwd") for n in lengths]
    for quantity in crossover.QUANTITIES.values():
        values = [quantity(row) for row in rows]
        assert values == sorted(values)
        steepest = {"reformer": 2.2, "block-sparse": 2.4}.get(name, 2.05)
        for before, after in itertools.pairwise(values):
            # above linear: a sort by one more pass, hashes with sqrt(N) columns; a window cut at the edges;
            # a butterfly with one block more in each row
            assert after <= steepest * before


def test_the_formulas_of_the_literature() -> None:
    n, d, w, k = 65_536, 128, 512, 256
    p = Problem(batch=1, num_heads=1, num_kv_heads=1, seqlen_q=n, seqlen_k=n, head_dim=d, head_dim_v=d,
                dtype="bf16", causal=False)  # fmt: skip
    linformer = iomodel.estimate("linformer", p, "fwd")
    assert linformer.flops == 8 * n * k * d
    assert linformer.exps == n * k
    assert linformer.compulsory.total_bytes == 2 * (4 * n * d + 2 * k * n) + 4 * n
    longformer = iomodel.estimate("longformer:globals=64", p, "fwd")
    assert longformer.flops == pytest.approx(4 * n * (w + 2 * 64) * d, rel=0.25)
    assert Longformer(window=w).band(p, 1)[1] == n * (w + 1) - 2 * sum(range(1, w // 2 + 1))
    reformer = iomodel.estimate("reformer:rounds=2:chunk=64", p, "fwd")
    assert reformer.steps[2].flops == 4 * 2 * n * 2 * 64 * d
    assert iomodel.estimate("linear-attention", p, "fwd").flops == 4 * n * d * d
    mamba = iomodel.estimate("mamba", p, "fwd")
    assert mamba.exps == n * 2 * d * 16
    assert mamba.flops == n * 2 * d * (9 * 16 + 2)
    # a scan that is not fused writes the state of every position: 20 to 40 times the compulsory bytes
    ratio = 2 * Mamba().materialised_bytes(p) / mamba.compulsory.total_bytes
    assert 10 < ratio < 40


def test_names_carry_parameters() -> None:
    assert alternatives.find("longformer:globals=64:window=1k").name == "longformer:window=1024:globals=64"
    assert alternatives.find("linformer:rank=256").name == "linformer"
    assert iomodel.estimate("linformer:rank=64", problem(), "fwd").model == "linformer:rank=64"
    exact = [row.name for row in iomodel.MODELS]
    assert alternatives.parse_names("flash-v2, mamba:state=32", "--models", exact) == (
        "flash-v2",
        "mamba:state=32",
    )


@pytest.mark.parametrize(
    ("name", "error", "text"),
    [
        ("linformr", UnknownName, "did you mean 'linformer'"),
        ("linformer:rnk=3", UnknownName, "parameter of linformer 'rnk' is not known; did you mean 'rank'"),
        ("linformer:rank=0", SpecError, "rank '0': out of range; accepted: 1 to"),
        ("linformer:rank", SpecError, "'rank'; accepted: rank=N"),
        ("linformer:", SpecError, "a parameter is missing after ':'; accepted: linformer[:rank=N]"),
        ("linformer:rank=1:rank=2", SpecError, "'rank=2'; accepted: rank=N, once"),
    ],
)
def test_a_bad_name_is_explained(name: str, error: type, text: str) -> None:
    with pytest.raises(error) as caught:
        alternatives.find(name)
    assert text in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("flash-v2,", "a name is missing"),
        ("mamba,mamba:state=16", "given twice"),
        ("flash-v9", "'flash-v9' is not known"),
    ],
)
def test_a_bad_list_is_explained(text: str, words: str) -> None:
    with pytest.raises((SpecError, UnknownName), match=words):
        alternatives.parse_names(text, "--models", [row.name for row in iomodel.MODELS])


@pytest.mark.parametrize(
    ("name", "changes", "pass_", "words"),
    [
        ("linformer", {"causal": True}, "fwd", "mixes later keys"),
        ("linformer", {}, "bwd", "only its forward"),
        ("reformer", {"num_kv_heads": 2}, "fwd", "one per head"),
        ("reformer", {"seqlen_q": 5}, "fwd", "seqlen_q is seqlen_k"),
        ("longformer:globals=1", {"causal": True}, "fwd", "see later keys"),
        ("mamba", {"seqlen_k": 5}, "fwd", "it scans one sequence"),
        ("mamba2:channels=7", {}, "fwd", "64 channels are not heads of 7"),
        ("mamba2:groups=3", {"head_dim_v": 64}, "fwd", "8 heads are not 3 groups"),
        ("mamba", {"window": (4, 4)}, "fwd", "without a window"),
    ],
)
def test_what_is_not_covered_is_said(name: str, changes: dict, pass_: str, words: str) -> None:
    with pytest.raises(SpecError, match=words):
        iomodel.estimate(name, problem(**changes), pass_)


def test_the_command_says_where_they_cross(capsys: pytest.CaptureFixture[str]) -> None:
    line = ["io-model", "--models", "flash-v2,linformer:rank=128", "--seqlens", "1k"]
    decode_line = [
        "io-model",
        "--mode",
        "decode",
        "--model",
        "llama-3-8b",
        "--models",
        "flash-v2,mamba,linformer",
    ]
    for argv, words in (
        (
            line,
            "linformer:rank=128 is no exact attention; against flash-v2 forward, d = 128: fewer FLOPs from",
        ),
        (decode_line, "mamba is no exact attention; from 129 cached tokens on"),
        (decode_line, "linformer is no exact attention; not compared with flash-v2"),
    ):
        with pytest.raises(SystemExit) as stop:
            main(argv)
        captured = capsys.readouterr()
        assert not stop.value.code, captured.err
        assert words in captured.err


@pytest.mark.parametrize("name", alternatives.names())
@pytest.mark.parametrize("quantity", crossover.QUANTITIES)
def test_a_crossover_is_where_it_says(name: str, quantity: str) -> None:
    p = problem(heads=16, kv_heads=16, head_dim=128, head_dim_v=128)
    found = crossover.length(name, p, quantity)
    value = crossover.QUANTITIES[quantity]

    def less(n: int) -> bool:
        at = replace(p, seqlen_q=n, seqlen_k=n)
        return value(iomodel.estimate(name, at, "fwd")) < value(iomodel.estimate("flash-v2", at, "fwd"))

    if found.seqlen is None:
        assert not less(crossover.LONGEST)
        return
    assert all(less(n) for n in range(found.seqlen, found.seqlen + 100))
    assert all(less(found.seqlen * 2**power) for power in range(10))
    if found.seqlen > crossover.SHORTEST:
        assert not less(found.seqlen - 1)
    assert crossover.WORDS[quantity] in str(found)


def test_known_crossovers() -> None:
    p = problem(heads=16, kv_heads=16, head_dim=128, head_dim_v=128)
    # 8Nkd < 4N²d from N = 2k on; linear attention 4Nd² < 4N²d from N = d on
    assert crossover.length("linformer", p, "flops").seqlen == 2 * 256 + 1
    assert crossover.length("linear-attention", p, "flops").seqlen == 128 + 1
    # D·n exponentials per position against H·N
    assert crossover.length("mamba", p, "exps").seqlen == 2 * 16 * 128 * 16 // 16 + 1


def test_a_state_is_smaller_than_a_cache_from_128_tokens_on() -> None:
    p = Problem(batch=1, num_heads=32, num_kv_heads=8, seqlen_q=1, seqlen_k=1, head_dim=128, head_dim_v=128,
                dtype="bf16", causal=False)  # fmt: skip
    assert crossover.decode_length("mamba", p) == 128 + 1
    assert crossover.decode_length("mamba2", p) == math.floor(8192 * 128 * 4 / 4096) + 1
    with pytest.raises(SpecError, match="no state of fixed size"):
        crossover.decode_length("linformer", p)


def test_an_unknown_quantity_is_named() -> None:
    with pytest.raises(UnknownName, match="'flop'"):
        crossover.length("mamba", problem(), "flop")


def test_the_crossovers_of_the_documentation() -> None:
    p = problem(batch=1, heads=16, kv_heads=16, head_dim=128, head_dim_v=128)
    text = (Path(__file__).parent.parent / "docs" / "alternatives.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| ([a-z0-9-]+)(?:, [^|]*)? \| ([^|]+) \| ([^|]+) \| ([^|]+) \|$", text, re.MULTILINE
    )
    table = {row[0]: row[1:] for row in rows if row[0] in alternatives.names()}
    assert set(table) == set(alternatives.names())
    for name, cells in table.items():
        for quantity, cell in zip(("flops", "exps", "requested"), cells, strict=True):
            expected = crossover.SHORTEST if cell == "always" else int(cell.replace(",", ""))
            assert crossover.length(name, p, quantity).seqlen == expected, (name, quantity)
