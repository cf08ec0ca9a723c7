"""The model's bytes and FLOPs of ``flash`` are its kernels' own, counted load by load in the interpreter."""

from __future__ import annotations

import importlib.util
import itertools
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from attention import SHAPES, problem
from tiers import every_second
from traced import TILES, assert_exact, run

from flashbench import iomodel, kernels
from flashbench import tracing as joined
from flashbench._profilers import trace as tracing
from flashbench.errors import UnavailableError
from flashbench.kernels import Target, _triton
from flashbench.kernels._inputs import make_inputs

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled, not interpreted", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
REASON = kernels.get("flash").why_unavailable(Target(device="cpu", capability=None))
assert REASON is None, REASON

flash = _triton.load("cpu")

PROFILE = Path(__file__).resolve().parent.parent / "docs" / "profile.md"

MORE_SHAPES = {
    "a tile's length": {"seqlen_q": 32, "seqlen_k": 64},
    "one key": {"seqlen_q": 37, "seqlen_k": 1},
    "one query": {"seqlen_q": 1, "seqlen_k": 45, "num_kv_heads": 2},
    "many rows without keys": {"seqlen_q": 70, "seqlen_k": 9},
    "first rows in the last tile": {"seqlen_q": 17, "seqlen_k": 1},
    "head dims in pieces": {"head_dim": 96, "head_dim_v": 80, "seqlen_q": 33, "seqlen_k": 35},
    "ragged and shared": {"seqlen_q": 77, "seqlen_k": 101, "num_kv_heads": 2, "head_dim": 40},
}


SHAPED = {**SHAPES, **MORE_SHAPES}


# bf16 moves what fp16 does; the interpreter computes it in fp32. tf32 moves what fp32 does.
CELLS = [*itertools.product(SHAPED, ("fp16", "fp32")), ("ragged and shared", "tf32")]


@pytest.mark.parametrize(("shape", "dtype"), every_second(CELLS))
def test_every_byte_and_product_of_the_kernels_is_in_the_model(shape: str, dtype: str) -> None:
    for causal in (False, True):
        assert_exact(problem(**{"batch": 1, **SHAPED[shape]}, dtype=dtype, causal=causal), TILES)


def test_with_the_tiles_that_the_interpreter_takes() -> None:
    p = problem(batch=2, num_heads=2, num_kv_heads=1, seqlen_q=130, seqlen_k=70, dtype="fp16")
    tiles = iomodel.estimate("flash", p, "fwd+bwd").tiles
    found = {name: (tiles[f"{name}_block_q"], tiles[f"{name}_block_k"]) for name in TILES}
    assert set(found.values()) == {(64, 64)}
    assert_exact(p, found)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(31, 33), (64, 16), (5, 90)], ids=str)
def test_any_tile_shape(lengths: tuple[int, int], causal: bool) -> None:
    p = problem(batch=1, num_heads=2, num_kv_heads=1, causal=causal, dtype="fp16")
    p = replace(p, seqlen_q=lengths[0], seqlen_k=lengths[1])
    for block_q, block_k in ((16, 16), (16, 64), (64, 16)):
        assert_exact(p, dict.fromkeys(TILES, (block_q, block_k)))


@pytest.mark.parametrize("dtype", ["fp16", "fp32", "tf32"])
def test_the_predicted_memory_is_that_of_the_backwards_own_tensors(dtype: str) -> None:
    p = problem(dtype=dtype, num_kv_heads=2, seqlen_k=40)
    inputs = make_inputs(p, "cpu", 0)
    (q, k, v), dout = inputs.leaves, inputs.dout
    call = flash.Call(causal=p.causal, scale=p.softmax_scale, tf32=dtype == "tf32")
    o, lse, _ = flash.forward_launch(q, k, v, call)
    work = flash.backward_launches(flash.Saved(q=q, k=k, v=v, o=o, lse=lse, do=dout), call)
    args = [arg for launch in work.launches for arg in launch.args if isinstance(arg, torch.Tensor)]
    known = {x.data_ptr() for x in (q, k, v, o, lse, dout)}
    new = {x.data_ptr(): x.nbytes for x in (*work.gradients, work.delta, *args) if x.data_ptr() not in known}
    assert sum(new.values()) == iomodel.estimate("flash", p, "bwd").extra_bytes
    assert o.nbytes + lse.nbytes == iomodel.estimate("flash", p, "fwd").extra_bytes


def test_16_bit_is_flash_v2_in_two_kernels() -> None:
    p = problem(dtype="bf16", num_kv_heads=2, seqlen_q=200, seqlen_k=300)
    tiles = {"fwd_block_q": 32, "fwd_block_k": 64, "dq_block_q": 32, "dkdv_block_k": 32}
    one, two = (iomodel.estimate(name, p, "fwd+bwd", tiles=tiles) for name in ("flash", "flash-v2"))
    two = iomodel.estimate("flash-v2", p, "fwd+bwd", tiles=one.tiles)
    assert (one.requested, one.extra_bytes) == (two.requested, two.extra_bytes)


def test_slices_of_one_tensor_are_told_apart_and_masked_lanes_do_not_count() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(A, B, TO, count, BLOCK: tl.constexpr):
        lanes = tl.arange(0, BLOCK)
        a = tl.load(A + lanes * 2, mask=lanes < count, other=0.0)
        b = tl.load(B + lanes * 2)
        tl.atomic_add(TO + lanes, a + b, mask=lanes < 3)
        tl.store(TO, 0.0)

    both = torch.zeros(16, 2)
    (launch,) = tracing.trace(lambda: kernel[(2,)](both[:, 0], both[:, 1], torch.zeros(16), 5, BLOCK=16))
    a, b, to = (launch.arguments[name] for name in ("A", "B", "TO"))
    assert (a.loaded, b.loaded, to.stored, to.atomic) == (10, 32, 2, 6)
    assert (a.loaded_bytes, to.atomic_bytes, launch.flops) == (40, 24, 0)
    assert tracing.OUTSIDE not in launch.arguments


@pytest.mark.parametrize(("offset", "first", "second"), [(0, 16, 0), (4, 12, 4), (16, 8, 8)])
def test_an_address_that_two_arguments_hold_counts_under_the_first(
    offset: int, first: int, second: int
) -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(A, B, BLOCK: tl.constexpr):
        lanes = tl.arange(0, BLOCK)
        tl.store(B + lanes, tl.load(A + lanes))

    whole = torch.zeros(32)
    a, b = whole[:8], whole[offset : offset + 8]
    (launch,) = tracing.trace(lambda: kernel[(1,)](a, b, BLOCK=8))
    held = [launch.arguments[name] for name in ("A", "B")]
    assert [one.loaded + one.stored for one in held] == [first, second]


def test_exponentials_and_programs_are_counted_in_whole_tiles() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(X, Y, count, BLOCK: tl.constexpr):
        lanes = tl.arange(0, BLOCK)
        x = tl.load(X + lanes, mask=lanes < count, other=0.0)
        tl.store(Y + lanes, tl.exp(x) + tl.exp2(tl.max(x, 0)), mask=lanes < count - 4)

    (launch,) = tracing.trace(lambda: kernel[(2, 3)](torch.zeros(16), torch.zeros(16), 12, BLOCK=16))
    assert (launch.programs, launch.exps) == (6, 6 * (16 + 1))
    x, y = launch.arguments["X"], launch.arguments["Y"]
    assert (x.loaded, x.masked, x.masked_share) == (6 * 12, 6 * 4, 0.25)
    assert (y.stored, y.masked, y.masked_share) == (6 * 8, 6 * 8, 0.5)
    assert tracing.Moved().masked_share == 0.0


def test_the_exponentials_of_flash_are_the_models_and_one_per_row_and_visit() -> None:
    """The model counts scores; the forward also rescales rows, the fp32 backward has its own polynomial."""
    p = problem(batch=1, num_heads=2, num_kv_heads=1, seqlen_q=70, seqlen_k=90, dtype="fp16")
    tiles = {f"{k}_block_{x}": n for k, rows in TILES.items() for x, n in zip("qk", rows, strict=True)}
    row = iomodel.estimate("flash", p, "fwd+bwd", tiles=tiles)
    scores = {step.name: step.exps for step in row.steps}
    scores["forward"] += scores["forward"] // TILES["fwd"][1]
    assert {joined.STEPS[launch.kernel]: launch.exps for launch in run(p, TILES)} == scores
    fp32 = run(replace(p, dtype="fp32"), TILES)
    assert [launch.exps for launch in fp32] == [scores["forward"], 0, 0, 0]


def test_tensor_descriptors_are_counted_by_their_tensor() -> None:
    import triton
    import triton.language as tl
    from triton.tools.tensor_descriptor import TensorDescriptor

    @triton.jit
    def made(X, Y, rows, cols, BLOCK: tl.constexpr):
        x = tl.make_tensor_descriptor(X, [rows, cols], [cols, 1], [BLOCK, BLOCK])
        y = tl.make_tensor_descriptor(Y, [rows, cols], [cols, 1], [BLOCK, BLOCK])
        y.store([0, 0], x.load([0, 0]))

    @triton.jit
    def given(X, Y):
        Y.store([0, 0], X.load([0, 0]))

    @triton.jit
    def picked(X, Y, WHICH, rows, cols, BLOCK: tl.constexpr):
        x = tl.make_tensor_descriptor(X, [rows, cols], [cols, 1], [1, BLOCK])
        y = tl.make_tensor_descriptor(Y, [rows, cols], [cols, 1], [1, BLOCK])
        which = tl.load(WHICH + tl.arange(0, 8))
        y.scatter(x.gather(which, 0), which, 0)

    x, y = torch.rand(5, 8), torch.zeros(5, 8)
    boxes = [TensorDescriptor.from_tensor(tensor, [8, 8]) for tensor in (x, y)]
    which = torch.arange(8, dtype=torch.int32) % 5
    launches = tracing.trace(
        lambda: (made[(1,)](x, y, 5, 8, BLOCK=8), given[(1,)](*boxes), picked[(1,)](x, y, which, 5, 8, 8))
    )
    assert torch.equal(x, y)
    for launch, rows in zip(launches, (5, 5, 8), strict=True):
        a, b = launch.arguments["X"], launch.arguments["Y"]
        assert (a.loaded_bytes, a.stored, b.loaded, b.stored_bytes) == (32 * rows, 0, 0, 32 * rows)
        assert a.masked == b.masked == 64 - 8 * rows
        assert tracing.OUTSIDE not in launch.arguments


def test_block_pointers_are_counted_where_triton_has_them() -> None:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter.InterpreterBuilder, "create_make_block_ptr"):
        pytest.skip("this Triton has no block pointers")

    @triton.jit
    def kernel(X, Y, rows, BLOCK: tl.constexpr):
        x = tl.make_block_ptr(X, (rows, BLOCK), (BLOCK, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
        y = tl.make_block_ptr(Y, (rows, BLOCK), (BLOCK, 1), (0, 0), (BLOCK, BLOCK), (1, 0))
        tl.store(y, tl.load(x, boundary_check=(0,)), boundary_check=(0,))

    (launch,) = tracing.trace(lambda: kernel[(1,)](torch.zeros(5, 8), torch.zeros(5, 8), 5, BLOCK=8))
    x, y = launch.arguments["X"], launch.arguments["Y"]
    assert (x.loaded, x.masked, y.stored, y.masked) == (40, 24, 40, 24)


def test_recast_pointers_and_tuples_of_tensors() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(PAIR, BLOCK: tl.constexpr):
        lanes = tl.arange(0, BLOCK)
        wide = PAIR[0].to(tl.pointer_type(tl.int32), bitcast=True)
        tl.store(PAIR[1] + lanes, tl.load(wide + lanes))

    pair = torch.zeros(16, dtype=torch.float16), torch.zeros(8, dtype=torch.int32)
    (launch,) = tracing.trace(lambda: kernel[(1,)](pair, BLOCK=8))
    one, two = launch.arguments["PAIR[0]"], launch.arguments["PAIR[1]"]
    assert (one.loaded, one.loaded_bytes, two.stored_bytes) == (8, 32, 32)
    assert tracing.OUTSIDE not in launch.arguments


@pytest.mark.parametrize("packed", [False, True])
def test_scaled_products_are_counted_where_triton_interprets_them(packed: bool) -> None:
    import triton
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter.InterpreterBuilder, "create_dot_scaled"):
        pytest.skip("this Triton does not interpret tl.dot_scaled")

    @triton.jit
    def kernel(A, B, SCALE, C, INNER: tl.constexpr, FORMAT: tl.constexpr):
        rows, inner, group = tl.arange(0, 16), tl.arange(0, INNER), tl.arange(0, 2)
        a = tl.load(A + rows[:, None] * INNER + inner[None, :])
        b = tl.load(B + inner[:, None] * 16 + rows[None, :])
        scale = tl.load(SCALE + rows[:, None] * 2 + group[None, :])
        c = tl.dot_scaled(a, scale, FORMAT, b, scale, FORMAT)
        tl.store(C + rows[:, None] * 16 + rows[None, :], c)

    inner, format_ = (32, "e2m1") if packed else (64, "e5m2")
    bytes_ = [torch.zeros(shape, dtype=torch.uint8) for shape in ((16, inner), (inner, 16), (16, 2))]
    (launch,) = tracing.trace(lambda: kernel[(1,)](*bytes_, torch.zeros(16, 16), inner, format_))
    assert launch.flops == 2 * 16 * 16 * 64


@pytest.mark.parametrize(("kept", "blocks"), [(8, 5), (32, 2)])
def test_an_autotuned_kernel_runs_once_with_the_first_config_that_its_pruning_keeps(
    kept: int, blocks: int
) -> None:
    import triton
    import triton.language as tl

    def prune(configs, *_, **__):
        return [one for one in configs if one.kwargs["BLOCK"] >= kept]

    @triton.autotune(
        configs=[triton.Config({"BLOCK": size}) for size in (8, 32, 64)],
        key=["n"],
        prune_configs_by={"early_config_prune": prune},
    )
    @triton.jit
    def double(X, n, BLOCK: tl.constexpr):
        lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        tl.store(X + lanes, 2 * tl.load(X + lanes, mask=lanes < n), mask=lanes < n)

    x = torch.ones(40)
    before = dict(vars(triton.runtime.Autotuner))
    launches = tracing.trace(lambda: double[lambda meta: (triton.cdiv(40, meta["BLOCK"]),)](x, 40))
    assert [(one.kernel, one.programs, one.arguments["X"].loaded) for one in launches] == [
        ("double", blocks, 40)
    ]
    assert torch.equal(x, torch.full((40,), 2.0)), "what runs to be timed would double it again"
    assert dict(vars(triton.runtime.Autotuner)) == before


EXAMPLE = re.search(r"```python\n(.*?)```", PROFILE.read_text(encoding="utf-8"), re.DOTALL)


def test_the_documented_example_prints_what_it_says(tmp_path: Path) -> None:
    assert EXAMPLE
    file = tmp_path / "example.py"
    file.write_text(EXAMPLE[1])
    done = subprocess.run([sys.executable, str(file)], capture_output=True, text=True, check=False)
    assert done.stdout.splitlines() == re.findall(r"# prints (.*)", EXAMPLE[1]), done.stderr


def test_the_interpreter_is_as_before_afterwards() -> None:
    from triton.runtime import interpreter

    before = dict(vars(interpreter.InterpreterBuilder)), dict(vars(interpreter.GridExecutor))
    with pytest.raises(ZeroDivisionError):
        tracing.trace(lambda: 1 / 0)
    assert (dict(vars(interpreter.InterpreterBuilder)), dict(vars(interpreter.GridExecutor))) == before


def test_a_trace_within_a_trace_counts_for_both_and_threads_take_turns() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def copy(X, Y, BLOCK: tl.constexpr):
        lanes = tl.arange(0, BLOCK)
        tl.store(Y + lanes, tl.load(X + lanes))

    def call() -> None:
        x = torch.ones(16)
        copy[(1,)](x, torch.empty_like(x), BLOCK=16)

    def loaded(launches: tuple[tracing.Launch, ...]) -> list[int]:
        return [one.arguments["X"].loaded_bytes for one in launches]

    inner: list[tuple[tracing.Launch, ...]] = []
    outer = tracing.trace(lambda: (call(), inner.append(tracing.trace(call))))
    assert (loaded(outer), loaded(inner[0])) == ([64, 64], [64])

    def slowly() -> None:
        call()
        time.sleep(0.05)
        call()

    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(tracing.trace, [slowly, slowly]))
    assert [loaded(one) for one in found] == [[64, 64], [64, 64]]
    assert tracing.why_unavailable() is None


def test_an_interpreter_of_another_make_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    assert tracing.why_unavailable() is None
    monkeypatch.delattr(interpreter.InterpreterBuilder, "create_masked_load")
    assert "has no InterpreterBuilder.create_masked_load; install" in str(tracing.why_unavailable())
    with pytest.raises(UnavailableError, match=r"create_masked_load; install triton 3\.6"):
        tracing.trace(lambda: None)


def test_an_interpreter_with_other_parameters_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    monkeypatch.setattr(
        interpreter.InterpreterBuilder, "create_masked_store", lambda self, mask, ptrs, value: None
    )
    reason = str(tracing.why_unavailable())
    assert "another kind (mask, ptrs, value) of InterpreterBuilder.create_masked_store; install" in reason


def test_without_an_interpreter_it_says_so() -> None:
    code = "from flashbench._profilers import trace; print(trace.why_unavailable())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == (
        "trace: triton does not interpret in this process; set TRITON_INTERPRET=1 before it starts"
    )
