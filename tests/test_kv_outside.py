"""flash-v1 and flash-v2-atomic are right, forward and backward, and move to the byte what their models say.

On a machine without a GPU this runs in Triton's interpreter, on one the compiled kernels.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools

import pytest
import torch
from attention import SHAPES, exact, problem, run
from tiers import every_second
from torch import Tensor

from flashbench import iomodel, kernels
from flashbench import tracing as joined
from flashbench._cli import io_request
from flashbench.kernels import Target, _triton
from flashbench.kernels._backward import forward_backward_call
from flashbench.kernels._inputs import make_inputs
from flashbench.kernels._reference import Reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
NAMES = ("flash-v1", "flash-v2-atomic")
DTYPES = ("fp32", "tf32", "fp16", "bf16")
TILES = {
    "flash-v1": {"fwd": (32, 16), "bwd": (16, 32)},
    "flash-v2-atomic": {"fwd": (32, 16), "delta": (16, 16), "bwd": (16, 32)},
}
"""Tiles of other shapes than the interpreter's 64x64, so that small problems have ragged and whole ones."""

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else None
TARGET = Target(device=DEVICE, capability=CAPABILITY)
for _name in NAMES:
    # anything else that keeps the kernels from running is a failure: skipped, they would go untested
    _reason = kernels.get(_name).why_unavailable(TARGET)
    assert _reason is None, _reason

MODULES = {name: _triton.load(DEVICE, "_" + name.replace("-", "_")) for name in NAMES}
interpreted = pytest.mark.skipif(DEVICE != "cpu", reason="with a GPU the kernels are compiled")
both = pytest.mark.parametrize("name", NAMES)


def small(**changes):
    return problem(
        **{"batch": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "head_dim_v": 32, **changes}
    )


def tiles_of(name: str) -> dict[str, int]:
    fields = "block_q", "block_k", "num_warps", "num_stages"
    return {
        f"{kernel}_{field}": value
        for kernel, rows in TILES[name].items()
        for field, value in zip(fields, (*rows, 4, 1), strict=True)
    }


def assert_within_budget(name: str, p, tiles: dict[str, int] | None = None) -> None:
    row = kernels.get(name)
    if tiles is not None:
        tiled = row.prepare_tiles
        row = dataclasses.replace(row, prepare=lambda p, inputs: tiled(p, inputs, tiles))
    inputs = make_inputs(p, DEVICE, 0)
    if DEVICE == "cpu" or row.why_unsupported(p, "bwd", TARGET) is None:
        o, *gradients = run(row, p, inputs)
        accuracy = Reference(p, inputs).compare(o, gradients)
    else:
        assert (name, p.dtype) == ("flash-v2-atomic", "tf32")  # the only gradients that a card refuses
        accuracy = Reference(p, inputs).compare(row.prepare(p, inputs.detached(grad=False))())
    assert accuracy.ok, f"{name} {p.key}: {accuracy}"


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def gradients(name: str, tensors: tuple[Tensor, ...], dout: Tensor, causal: bool = True):
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    return torch.autograd.grad(MODULES[name].flash_attention(*leaves, causal=causal), leaves, dout)


def grid():
    """Every dtype with head dims of one piece and of several; lengths, masks and groups change."""
    others = itertools.cycle(
        itertools.product(((1, 1), (65, 65), (130, 65), (7, 129), (129, 70)), (False, True), (1, 2))
    )
    dims = (16, 16), (40, 40), (64, 96), (1, 3), (128, 128), (256, 192)
    for name, dtype, (head_dim, head_dim_v) in itertools.product(NAMES, DTYPES, dims):
        (seqlen_q, seqlen_k), causal, kv_heads = next(others)
        yield name, small(
            seqlen_q=seqlen_q, seqlen_k=seqlen_k, head_dim=head_dim, head_dim_v=head_dim_v, dtype=dtype,
            causal=causal, num_kv_heads=kv_heads,
        )  # fmt: skip


@pytest.mark.parametrize(("name", "p"), list(grid()), ids=lambda x: getattr(x, "key", x))
@pytest.mark.usefixtures("poisoned")
def test_every_dtype_and_head_dim_is_within_budget(name: str, p) -> None:
    assert_within_budget(name, p)


@both
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_many_visits_of_a_row_round_no_more_than_one(name: str, dtype: str) -> None:
    """40 K/V tiles: what is accumulated in memory is in fp32."""
    p = small(num_heads=1, num_kv_heads=1, seqlen_q=16, seqlen_k=640, dtype=dtype, causal=False)
    assert_within_budget(name, p, tiles_of(name))


@both
@pytest.mark.parametrize("kv_heads", [1, 3])
def test_groups_sum_their_gradients(name: str, kv_heads: int) -> None:
    p = small(batch=2, num_heads=6, num_kv_heads=kv_heads, seqlen_q=40, seqlen_k=66)
    inputs = make_inputs(p, DEVICE, seed=3)
    for mine, theirs in zip(run(kernels.get(name), p, inputs), exact(p, inputs), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=3e-6)


@both
@pytest.mark.usefixtures("poisoned")
def test_rows_without_keys_are_zero_and_move_nothing(name: str) -> None:
    empty, seqlen_q, seqlen_k = 95, 100, 5
    q, k, v, dout = (random(2, 2, n, 32, seed=n) for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q))
    attention = MODULES[name].flash_attention
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    dq, dk, dv = gradients(name, (q, k, v), dout)
    assert (o[:, :, :empty] == 0).all()
    assert (lse[:, :, :empty] == -torch.inf).all()
    assert (dq[:, :, :empty] == 0).all()
    for tensor in (o, lse[:, :, empty:], dq, dk, dv):
        assert tensor.isfinite().all()


@both
def test_a_single_key_leaves_no_gradient_behind(name: str) -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v, dout = (random(1, 2, n, 96, dtype=dtype, seed=i) for i, n in enumerate((3, 1, 1, 3)))
        dq, dk, _ = gradients(name, (q, k, v), dout, causal=False)
        assert (dq == 0).all()
        assert (dk == 0).all()


@both
@pytest.mark.parametrize("causal", [False, True])
def test_lse_is_the_natural_log_of_the_sum_and_differentiable(name: str, causal: bool) -> None:
    q, k, v, dout = (random(1, 2, n, 24, seed=i).requires_grad_() for i, n in enumerate((20, 83, 83, 20)))
    dlse = random(1, 2, 20, seed=9)
    mine = MODULES[name].flash_attention(q, k, v, causal=causal, return_lse=True)
    leaves = tuple(x.detach().double().requires_grad_() for x in (q, k, v))
    scores = leaves[0] @ leaves[1].transpose(-1, -2) * 24**-0.5
    if causal:
        hidden = torch.ones(20, 83, device=DEVICE).triu(83 - 20 + 1).bool()
        scores = scores.masked_fill(hidden, -torch.inf)
    theirs = scores.softmax(-1) @ leaves[2], scores.logsumexp(-1)
    assert mine[1].dtype == torch.float32
    assert (mine[1] - theirs[1]).abs().max() < 2e-6
    found = torch.autograd.grad(mine, (q, k, v), (dout, dlse))
    for a, b in zip(found, torch.autograd.grad(theirs, leaves, (dout.double(), dlse.double())), strict=True):
        assert torch.allclose(a.double(), b, atol=3e-6)


@both
def test_large_logits_do_not_overflow(name: str) -> None:
    q = torch.full((1, 1, 70, 128), 32.0, device=DEVICE, dtype=torch.float16)
    v = random(1, 1, 70, 128, dtype=torch.float16)
    mean = v.double().mean(2, keepdim=True).expand(1, 1, 70, 128)
    o = MODULES[name].flash_attention(q, q, v, causal=False)
    assert (o.double() - mean).abs().max() < 1e-3


@both
def test_any_strides_give_the_same(name: str) -> None:
    tensors = tuple(random(1, 4, 70, 32, dtype=torch.float16, seed=i) for i in range(3))
    dout = random(1, 4, 70, 32, dtype=torch.float16, seed=3)
    fused = torch.stack([x.transpose(1, 2) for x in tensors], 3)
    views = tuple(fused[:, :, :, i].transpose(1, 2) for i in range(3))
    heads_last = dout.transpose(1, 2).contiguous().transpose(1, 2)
    for a, b in zip(gradients(name, tensors, dout), gradients(name, views, heads_last), strict=True):
        # atomic additions have no order on a GPU
        assert torch.equal(a, b) or (DEVICE == "cuda" and torch.allclose(a, b, atol=1e-3))
    wide = tensors[1][:, :1].expand(1, 4, 70, 32)
    attention = MODULES[name].flash_attention
    one = attention(tensors[0], tensors[1][:, :1], tensors[1][:, :1], causal=True)
    assert torch.equal(attention(tensors[0], wide, wide, causal=True), one)


@interpreted
@both
@pytest.mark.parametrize("strides", [(0, 0, 2**26), (0, 2**30, 16)], ids=["rows", "heads"])
def test_offsets_are_64_bit(name: str, strides: tuple[int, int, int]) -> None:
    shape = (1, 3, 34, 16) if strides[1] else (1, 1, 34, 16)
    span = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=False)) + 16
    far = torch.as_strided(torch.empty(span, dtype=torch.float16), shape, (*strides, 1))
    near = random(*shape, dtype=torch.float16)
    far.copy_(near)
    dout = random(*shape, dtype=torch.float16, seed=1)
    for a, b in zip(gradients(name, (far,) * 3, dout), gradients(name, (near,) * 3, dout), strict=True):
        assert torch.equal(a, b)


def test_backwards_that_add_say_that_they_are_not_deterministic() -> None:
    found = {name for name, row in kernels.registry().items() if not row.deterministic}
    assert found == {"flash", "flash-v2-atomic", "flash-v3"}


def test_flash_says_which_kernel_it_is() -> None:
    assert kernels.get("flash").backend(lambda: None) in kernels.registry()


@both
def test_what_the_kernels_do_not_take_is_a_sentence(name: str) -> None:
    row, target = kernels.get(name), Target(device=DEVICE, capability=CAPABILITY)
    for change, word in (
        ({"dropout_p": 0.1}, "dropout"), ({"window": (4, 0)}, "window"), ({"softcap": 1.0}, "softcap"),
        ({"alignment": "top-left"}, "top-left"), ({"head_dim": 300}, "300"), ({"sinks": True}, "sinks"),
        ({"lengths": ((7, 9),)}, "varlen"),
    ):  # fmt: skip
        p = small(**{"seqlen_q": 7, "seqlen_k": 9, **change})
        assert word in (row.why_unsupported(p, "fwd", target) or "")
    repeatable = row.why_unsupported(small(deterministic=True), "bwd", target) is None
    assert repeatable == row.deterministic


# bf16 moves what fp16 does; the interpreter computes it in fp32. tf32 moves what fp32 does.
TRACED = {
    **SHAPES,
    "gqa": {"num_heads": 4},
    "one key": {"seqlen_q": 37, "seqlen_k": 1},
    "many rows without keys": {"seqlen_q": 70, "seqlen_k": 9},
    "head dims in pieces": {"head_dim": 96, "head_dim_v": 80, "seqlen_q": 33, "seqlen_k": 35},
    "ragged and shared": {"seqlen_q": 77, "seqlen_k": 101, "num_kv_heads": 1, "head_dim": 40},
}
ONE = {"batch": 1, "num_heads": 2, "num_kv_heads": 2}
CELLS = list(itertools.product(TRACED, ("fp16", "fp32")))


@interpreted
@both
@pytest.mark.parametrize(("shape", "dtype"), every_second(CELLS))
def test_every_byte_and_product_is_in_the_model(name: str, shape: str, dtype: str) -> None:
    from flashbench._profilers.trace import trace

    row = kernels.get(name)
    for causal in (False, True):
        p = problem(**{**ONE, **TRACED[shape]}, dtype=dtype, causal=causal)
        inputs = make_inputs(p, "cpu", 0).detached(grad=True)
        launches = trace(forward_backward_call(row.prepare_tiles(p, inputs, tiles_of(name)), inputs))
        estimate = iomodel.estimate(row.io_model, p, "fwd+bwd", tiles=tiles_of(name))
        names = [joined.STEPS.get(launch.kernel, launch.kernel) for launch in launches]
        assert names == [step.name for step in estimate.steps]
        found = joined.compare(launches, estimate)
        assert (found["difference_bytes"], found["difference_flops"]) == (0, 0), f"{p.key}: {found}"
        assert {launch.programs for launch in launches} >= {step.ctas for step in estimate.steps if step.ctas}


@interpreted
@both
@pytest.mark.parametrize("dtype", ["fp16", "fp32"])
def test_the_predicted_memory_is_that_of_the_kernels_own_tensors(name: str, dtype: str) -> None:
    p = problem(dtype=dtype, num_kv_heads=2, seqlen_k=40)
    inputs = make_inputs(p, "cpu", 0)
    q, k, v, dout = inputs.q, inputs.k, inputs.v, inputs.dout
    module, call = MODULES[name], MODULES[name].Call(causal=p.causal, scale=p.softmax_scale)

    def fresh(launches, known) -> int:
        tensors = (arg for launch in launches for arg in launch.args if isinstance(arg, Tensor))
        own = {x.data_ptr() for x in known}
        return sum({x.data_ptr(): x.nbytes for x in tensors if x.data_ptr() not in own}.values())

    if name == "flash-v1":
        o, l, m, forward = module.forward_launch(q, k, v, call)  # noqa: E741
        _, launch = module.backward_launch((q, k, v, o, dout), (l, m, None), call)
        launches, saved = (launch,), (o, l, m)
    else:
        o, lse, forward = module.forward_launch(q, k, v, call)
        kept = module.Saved(q=q, k=k, v=v, o=o, lse=lse, do=dout)
        launches = module.backward_launches(kept, call).launches
        saved = (o, lse)
    told = [iomodel.estimate(kernels.get(name).io_model, p, pass_) for pass_ in ("fwd", "bwd")]
    assert fresh((forward,), (q, k, v)) == told[0].extra_bytes
    assert sum(x.nbytes for x in saved) == told[0].saved_bytes
    assert fresh(launches, (q, k, v, dout, *saved)) == told[1].extra_bytes


def test_what_version_1_reads_again_is_what_version_2_saved() -> None:
    """With the same tiles the whole difference of two forwards is in O and its statistics, Q and K, V."""
    p = problem(seqlen_q=2048, seqlen_k=2048, head_dim=64, head_dim_v=64, causal=False, dtype="fp32")
    tiles = {"block_q": 64, "block_k": 128}
    one, two = (
        iomodel.estimate(name, p, "fwd", tiles=tiles).requested for name in ("flash-v1-triton", "flash")
    )
    passes, heads = 2048 // 128, p.batch * p.num_heads
    o = heads * 2048 * 64 * 4
    assert one.write_bytes - two.write_bytes == passes * (o + heads * 2048 * 8) + heads * 2048 * 4
    assert one.read["o"] == one.read["q"] == passes * o
    assert two.read["k"] == one.read["k"] * 2048 // 64


def test_io_model_means_the_papers_rows_by_the_names_that_they_share() -> None:
    names = "flash-v1,flash-v2,flash-v2-atomic,flash-v1-triton,flash"
    assert io_request._models(names)[1] == {"flash-v1-triton": "flash-v1-triton", "flash": "flash"}


@pytest.mark.gpu
@both
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [40, 64, 128, 256])
def test_long_and_ragged_on_a_gpu(name: str, dim: int, dtype: str, causal: bool) -> None:
    p = small(seqlen_q=1021, seqlen_k=1147, head_dim=dim, head_dim_v=dim, dtype=dtype, causal=causal)
    assert_within_budget(name, dataclasses.replace(p, num_heads=4, num_kv_heads=2))


@pytest.mark.gpu
@both
def test_sixteen_thousand_keys_on_a_gpu(name: str) -> None:
    long = {"seqlen_q": 16384, "seqlen_k": 16384, "head_dim": 128, "head_dim_v": 128}
    assert_within_budget(name, small(**long, dtype="bf16", causal=False))


@pytest.mark.gpu
def test_version_1_gives_the_same_bits_every_time_on_a_gpu() -> None:
    """Its threads read what others wrote: a missing barrier would show as bits that differ."""
    tensors = tuple(random(2, 4, 1021, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    dout = random(2, 4, 1021, 64, dtype=torch.bfloat16, seed=3)
    first = gradients("flash-v1", tensors, dout)
    for _ in range(50):
        again = gradients("flash-v1", tensors, dout)
        assert all(torch.equal(a, b) for a, b in zip(again, first, strict=True))
