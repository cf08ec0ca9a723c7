"""The model's bytes and FLOPs of ``flash`` are its kernels' own, counted load by load in the interpreter."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from attention import SHAPES, problem

from flashbench import iomodel, kernels
from flashbench._profilers import trace as tracing
from flashbench.errors import UnavailableError
from flashbench.flash_configs import Config
from flashbench.kernels import Target, _triton
from flashbench.kernels._reference import make_inputs
from flashbench.problem import Problem

if torch.cuda.is_available():
    pytest.skip("with a GPU the kernels are compiled, not interpreted", allow_module_level=True)
if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
REASON = kernels.get("flash").why_unavailable(Target(device="cpu", capability=None))
assert REASON is None, REASON

flash = _triton.load("cpu")

STEPS = {"forward": "forward", "delta_rows": "delta", "backward_dq": "dq", "backward_dkdv": "dkdv"}
"""Kernel → step of the model. An argument is named as the model's tensor, in capitals."""

TILES = {"fwd": (32, 16), "dq": (16, 32), "dkdv": (32, 16), "delta": (16, 16)}
"""Tiles of other shapes than the interpreter's 64x64, so that small problems have ragged and whole ones."""

MORE_SHAPES = {
    "a tile's length": {"seqlen_q": 32, "seqlen_k": 64},
    "one key": {"seqlen_q": 37, "seqlen_k": 1},
    "one query": {"seqlen_q": 1, "seqlen_k": 45, "num_kv_heads": 2},
    "many rows without keys": {"seqlen_q": 70, "seqlen_k": 9},
    "first rows in the last tile": {"seqlen_q": 17, "seqlen_k": 1},
    "head dims in pieces": {"head_dim": 96, "head_dim_v": 80, "seqlen_q": 33, "seqlen_k": 35},
    "ragged and shared": {"seqlen_q": 77, "seqlen_k": 101, "num_kv_heads": 2, "head_dim": 40},
}


def run(p: Problem, tiles: dict[str, tuple[int, int]]) -> tuple[tracing.Launch, ...]:
    """Forward and backward of the real kernels with those tiles, traced."""
    q, k, v, dout = make_inputs(p, "cpu", 0)
    leaves = tuple(x.detach().requires_grad_() for x in (q, k, v))
    configs = tuple((name, Config(*rows, 4, 1)) for name, rows in tiles.items())
    call = flash.Call(causal=p.causal, scale=p.softmax_scale, tf32=p.dtype == "tf32", configs=configs)

    def both() -> None:
        o, _ = flash._FlashAttention.apply(*leaves, call)
        torch.autograd.grad(o, leaves, dout)

    return tracing.trace(both)


def moved(launch: tracing.Launch, kind: str) -> dict[str, int]:
    found = {name.lower(): getattr(arg, kind) for name, arg in launch.arguments.items()}
    return {name: count for name, count in found.items() if count}


def assert_exact(p: Problem, tiles: dict[str, tuple[int, int]]) -> None:
    named = {f"{name}_block_q": rows[0] for name, rows in tiles.items()}
    named |= {f"{name}_block_k": rows[1] for name, rows in tiles.items()}
    row = iomodel.estimate("flash", p, "fwd+bwd", tiles=named)
    launches = run(p, tiles)
    assert [STEPS[launch.kernel] for launch in launches] == [step.name for step in row.steps]
    for launch, step in zip(launches, row.steps, strict=True):
        counted = tuple(moved(launch, f"{kind}_bytes") for kind in ("loaded", "stored", "atomic"))
        said = tuple({name: n for name, n in part.items() if n} for part in step[1:4])
        assert counted == said, f"{p.key}: {step.name}"
        assert launch.flops == step.flops, f"{p.key}: {step.name}"


SHAPED = {**SHAPES, **MORE_SHAPES}


# bf16 moves what fp16 does; the interpreter computes it in fp32. tf32 moves what fp32 does.
CELLS = [*((shape, dtype) for shape in SHAPED for dtype in ("fp16", "fp32")), ("ragged and shared", "tf32")]


@pytest.mark.parametrize(("shape", "dtype"), CELLS)
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
    q, k, v, dout = make_inputs(p, "cpu", 0)
    call = flash.Call(causal=p.causal, scale=p.softmax_scale, tf32=dtype == "tf32")
    o, lse, _ = flash.forward_launch(q, k, v, call)
    refine = q.element_size() == 4
    grads, delta, launches = flash.backward_launches(q, k, v, o, lse, dout, call, refine)
    args = [arg for launch in launches for arg in launch.args if isinstance(arg, torch.Tensor)]
    known = {x.data_ptr() for x in (q, k, v, o, lse, dout)}
    new = {x.data_ptr(): x.nbytes for x in (*grads, delta, *args) if x.data_ptr() not in known}
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


def test_exponentials_programs_and_masked_lanes_are_counted() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(A, TO, count, BLOCK: tl.constexpr):
        lanes = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        a = tl.load(A + lanes, mask=lanes < count, other=0.0)
        tl.store(TO + lanes, tl.exp(a) + tl.exp2(a), mask=lanes < count)
        tl.load(A + lanes, mask=lanes > 99, other=0.0)

    (launch,) = tracing.trace(lambda: kernel[(3,)](torch.zeros(40), torch.zeros(40), 40, BLOCK=16))
    a, to = launch.arguments["A"], launch.arguments["TO"]
    assert (launch.programs, launch.exps) == (3, 2 * 3 * 16)
    assert (a.loaded, a.masked, to.stored, to.masked) == (40, 8 + 48, 40, 8)
    assert a.masked_share == 56 / 96


def test_tensor_descriptors_are_seen() -> None:
    """They end in masked accesses in the interpreter; what lies past an edge moves nothing."""
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(A, TO, rows, BLOCK: tl.constexpr):
        a = tl.make_tensor_descriptor(A, [rows, 16], [16, 1], [BLOCK, 16])
        to = tl.make_tensor_descriptor(TO, [rows, 16], [16, 1], [BLOCK, 16])
        to.store([0, 0], a.load([0, 0]))

    (launch,) = tracing.trace(lambda: kernel[(1,)](torch.zeros(5, 16), torch.zeros(5, 16), 5, BLOCK=8))
    assert launch.arguments["A"].loaded == launch.arguments["TO"].stored == 5 * 16
    assert tracing.OUTSIDE not in launch.arguments


def test_block_pointers_are_seen_where_triton_has_them() -> None:
    import triton
    import triton.language as tl

    @triton.jit
    def kernel(A, TO, rows, BLOCK: tl.constexpr):
        a = tl.make_block_ptr(A, (rows, 16), (16, 1), (0, 0), (BLOCK, 16), (1, 0))
        to = tl.make_block_ptr(TO, (rows, 16), (16, 1), (0, 0), (BLOCK, 16), (1, 0))
        tl.store(to, tl.load(a, boundary_check=(0,)), boundary_check=(0,))

    a, to = torch.zeros(5, 16), torch.zeros(5, 16)

    def call() -> None:
        kernel[(1,)](a, to, 5, BLOCK=8)

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        with pytest.raises(Exception, match="Block pointers have been removed"):
            call()
        return
    (launch,) = tracing.trace(call)
    assert launch.arguments["A"].loaded == launch.arguments["TO"].stored == 5 * 16


def test_the_interpreter_is_as_before_afterwards() -> None:
    from triton.runtime import interpreter

    before = dict(vars(interpreter.InterpreterBuilder)), dict(vars(interpreter.GridExecutor))
    with pytest.raises(ZeroDivisionError):
        tracing.trace(lambda: 1 / 0)
    assert (dict(vars(interpreter.InterpreterBuilder)), dict(vars(interpreter.GridExecutor))) == before


def test_an_interpreter_of_another_make_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import interpreter

    assert tracing.why_unavailable() is None
    monkeypatch.delattr(interpreter.InterpreterBuilder, "create_masked_load")
    assert "has no InterpreterBuilder.create_masked_load" in str(tracing.why_unavailable())
    with pytest.raises(UnavailableError, match="create_masked_load"):
        tracing.trace(lambda: None)


def test_without_an_interpreter_it_says_so() -> None:
    code = "from flashbench._profilers import trace; print(trace.why_unavailable())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "trace: triton does not interpret in this process"
