"""flash-v3-fp8 moves to the byte what its model says: a walk over its schedule, box by box."""

from __future__ import annotations

import itertools
from collections import Counter
from pathlib import Path

import pytest
from attention import problem
from hypothesis import given, settings
from hypothesis import strategies as st

from flashbench import hopper_configs, iomodel, kernels
from flashbench.errors import SpecError
from flashbench.hopper_configs import PROGRAMS, ROWS, Tiles
from flashbench.kernels import Target, _compile, _triton
from flashbench.kernels import _hopper_schedule as schedule
from flashbench.problem import Problem

SIZES = [1, 31, 33, 64, 65, 127, 128, 129, 191, 200, 320, 333]
GROUP = 32


@st.composite
def asked(draw: st.DrawFn) -> Problem:
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    return problem(
        batch=draw(st.integers(1, 2)), num_heads=kv_heads * group, num_kv_heads=kv_heads,
        seqlen_q=draw(st.sampled_from(SIZES)), seqlen_k=draw(st.sampled_from(SIZES)),
        head_dim=16 * draw(st.integers(1, 8)), head_dim_v=16 * draw(st.integers(1, 8)),
        dtype=draw(st.sampled_from(["fp8", "fp8-e5m2"])), causal=draw(st.booleans()),
    )  # fmt: skip


TILES = st.builds(Tiles, warpgroups=st.just(2), block_k=st.sampled_from([64, 128, 256]))


def asks(**changes: object) -> Problem:
    return problem(**{"dtype": "fp8", "head_dim": 64, "head_dim_v": 64, **changes})


def inside(start: int, size: int, length: int) -> int:
    return max(0, min(start + size, length) - start)


def walk(p: Problem, tiles: Tiles) -> tuple[Counter[str], Counter[str]]:
    """Bytes read and written by tensor: what of each box lies in the tensor; v is padded to whole groups."""
    shape = schedule.Shape(
        heads=p.batch * p.num_heads, group=p.group, seqlen_q=p.seqlen_q, seqlen_k=p.seqlen_k,
        block_m=tiles.block_q, block_n=tiles.block_k, causal=p.causal, kv_bytes=0,
    )  # fmt: skip
    table = schedule.table(shape, PROGRAMS)
    padded = -(-p.seqlen_k // GROUP) * GROUP
    centred = hopper_configs.choose_fp8(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k).promote
    box = 64 if p.head_dim_v <= 64 else 128
    read, write = Counter[str](), Counter[str]()
    for program, total in enumerate(table[0]):
        read["schedule"] += 8 * (1 + 3 * tiles.warpgroups)  # first and next entries
        j = tile = 0
        while j < total:
            tile += 1
            entry = table[tile][program]
            read["schedule"] += 8 * (1 if tile == 1 else 1 + tiles.warpgroups)
            start = entry % shape.tiles * tiles.block_q
            for row in range(start, start + tiles.block_q, ROWS):
                read["q"] += inside(row, ROWS, p.seqlen_q) * p.head_dim
                read["q_scale"] += 4
                read["v_mean"] += 2 * box if centred else 0
                write["o"] += 2 * inside(row, ROWS, p.seqlen_q) * p.head_dim_v
                write["lse"] += 4 * inside(row, ROWS, p.seqlen_q)
            for n in range(shape.blocks(entry % shape.tiles)):
                read["k"] += inside(n * tiles.block_k, tiles.block_k, p.seqlen_k) * p.head_dim
                read["v"] += inside(n * tiles.block_k, tiles.block_k, padded) * p.head_dim_v
                for name in ("k_scale", "v_scale"):
                    read[name] += 4 * tiles.warpgroups
                j += 1
        assert j == total
    return read, write


@settings(max_examples=200, deadline=None)
@given(asked(), TILES)
def test_the_walk_and_the_model_agree_to_the_byte(p: Problem, tiles: Tiles) -> None:
    given_tiles = {"fwd_block_q": tiles.block_q, "fwd_block_k": tiles.block_k}
    row = iomodel.estimate("flash-v3-fp8", p, "fwd", tiles=given_tiles)
    read, write = walk(p, tiles)
    assert row.requested.read == dict(+read)
    assert row.requested.write == dict(write)
    assert not row.requested.atomic


@pytest.mark.parametrize(("dim_v", "causal"), [(128, False), (112, True), (48, False)])
def test_so_they_do_where_v_is_without_its_mean(dim_v: int, causal: bool) -> None:
    p = asks(num_heads=4, num_kv_heads=2, seqlen_q=333, seqlen_k=2061, head_dim=128, head_dim_v=dim_v,
             causal=causal)  # fmt: skip
    tiles = hopper_configs.choose_fp8(128, dim_v, causal, p.seqlen_k)
    assert tiles.promote
    read, write = walk(p, tiles)
    found = iomodel.estimate("flash-v3-fp8", p, "fwd").requested
    assert read["v_mean"]
    assert (found.read, found.write) == (dict(read), dict(write))


def test_the_model_names_both_kernels_and_which_runs_what() -> None:
    """The second is that whose tiles have promote (_flash_v3_fp8.py)."""
    row = next(model for model in iomodel.MODELS if model.name == "flash-v3-fp8")
    sources = "; flashbench/kernels/_hopper_fp8_kernels.py, or flashbench/kernels/_hopper_fp8_sums.py for"
    assert row.source.endswith(f"{sources} head dims over 64 and more than 2k keys")
    for dim, causal, keys in itertools.product((48, 64, 80, 128), (False, True), (1, 2048, 2049, 2**17)):
        promote = hopper_configs.choose_fp8(dim, dim, causal, keys).promote
        assert bool(promote) == (dim > 64 and keys > 2048)
    text = iomodel.explain(iomodel.estimate("flash-v3-fp8", asks(seqlen_q=4096, seqlen_k=4096), "fwd"))
    assert f"  source: {row.source}\n" in text
    files = (word.strip(",") for word in row.source.split() if word.startswith("flashbench/"))
    root = Path(kernels.__file__).parents[2]
    assert all((root / name).is_file() for name in files)


def test_the_model_has_the_tiles_that_the_row_says() -> None:
    row = kernels.get("flash-v3-fp8")
    for dim, keys in itertools.product((64, 128), (1024, 4096)):
        p = asks(head_dim=dim, head_dim_v=dim, seqlen_k=keys, causal=False)
        config = row.describe(p, "fwd", Target(device="cuda", capability=(9, 0)))
        tiles = iomodel.estimate("flash-v3-fp8", p, "fwd").tiles
        assert tiles == {name: config[name] for name in tiles}
        own = hopper_configs.choose_fp8(dim, dim, False, keys)
        plain = Tiles(max3=own.max3, emulated=own.emulated, promote=own.promote)
        assert (hopper_configs.given(config, plain), config["fwd_cut"]) == (own, own.name)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "bf16"}, "the bundled fp8 kernel does not take bf16"),
        ({"head_dim": 144}, "the bundled Gluon kernel of fp8: head_dim 144 is larger than 128"),
        ({"head_dim_v": 40}, "head_dim 40 is not a multiple of 16"),
        ({"window": (4, 0)}, "no window"),
    ],
)
def test_what_it_does_not_take_is_named(changes: dict[str, object], why: str) -> None:
    with pytest.raises(SpecError, match=why):
        iomodel.estimate(
            "flash-v3-fp8", problem(**{"dtype": "fp8", "head_dim": 64, "head_dim_v": 64, **changes}), "fwd"
        )


def test_refusals() -> None:
    hopper = Target(device="cuda:0", capability=(9, 0), smem_per_block_bytes=232448)
    ada = Target(device="cuda:0", capability=(8, 9))
    row = kernels.get("flash-v3-fp8")

    def why(target: Target = hopper, pass_: str = "fwd", **changes: object) -> str | None:
        return row.why_unsupported(
            problem(**{"dtype": "fp8", "head_dim": 64, "head_dim_v": 64, **changes}), pass_, target
        )

    assert why() is None
    assert why(layout="bshd", fp8_scale="head", hadamard=True) is None
    assert why(ada) == "it needs an sm90 GPU (H100, H200), this is sm89"
    assert why(dtype="fp16") == "it takes fp8 only, not fp16"
    assert why(pass_="bwd") == "attention in fp8 has no backward"
    assert why(softcap=30.0) == "it does not take softcap"
    assert why(head_dim=256) == "head_dim 256 is larger than 128"
    assert why(head_dim=40) == "head_dim 40 is not a multiple of 16, as TMA wants"


def test_flash_fp8_runs_it_where_it_can_and_says_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_triton, "interpreted", lambda _: False)  # as where Triton was imported for a GPU
    hopper = Target(device="cuda", capability=(9, 0), smem_per_block_bytes=232448)
    ada = Target(device="cuda", capability=(8, 9), smem_per_block_bytes=101376)
    row = kernels.get("flash-fp8")
    for target, p, runs, said in (
        (hopper, asks(), "flash-v3-fp8", "flash-v3-fp8"),
        (hopper, asks(head_dim=256), None, "flash-v2-fp8: head_dim 256 is larger than 128"),
        (ada, asks(), None, None),
    ):
        config = row.describe(p, "fwd", target)
        assert (row.runs(p, target), config.get("kernels")) == (runs, said)
        assert ("fwd_q_stages" in config) == bool(runs)
        assert bool(row.candidates(p, "fwd", target)) != bool(runs)
        task = _compile.Task(
            "", p, target.capability, target.smem_per_block_bytes, implementation="flash-fp8"
        )
        assert _compile.bundled(task).kernels["fwd"] == ("v3_fp8" if runs else "fwd",)
    assert "kernels" not in kernels.get("flash-v2-fp8").describe(asks(), "fwd", hopper)
