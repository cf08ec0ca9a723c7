"""flash is within the budget, forward and backward, whatever the lengths, head dims, dtypes and strides.

On a machine without a GPU this runs in Triton's interpreter, on one the compiled kernels.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import itertools
import os
import subprocess
import sys

import pytest
import torch
from attention import exact, problem, run
from torch import Tensor

from flashbench import kernels
from flashbench.kernels import Target, _triton
from flashbench.kernels._inputs import make_inputs
from flashbench.kernels._reference import Reference

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
FLASH = kernels.get("flash")
DTYPES = ("fp32", "tf32", "fp16", "bf16")
HEAD_DIMS = (16, 40, 64, 80, 96, 128, 192, 256)
LENGTHS = (1, 7, 63, 64, 65, 127, 128, 129)
CAPABILITY = torch.cuda.get_device_capability() if DEVICE == "cuda" else None

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)
# anything else that keeps the kernels from running is a failure: skipped, they would go untested
REASON = FLASH.why_unavailable(Target(device=DEVICE, capability=CAPABILITY))
assert REASON is None, REASON

flash = _triton.load(DEVICE)
attention = flash.flash_attention


def small(**changes):
    return problem(
        **{"batch": 1, "num_heads": 2, "num_kv_heads": 2, "head_dim": 32, "head_dim_v": 32, **changes}
    )


def assert_within_budget(p, seed: int = 0) -> None:
    inputs = make_inputs(p, DEVICE, seed)
    o, *gradients = run(FLASH, p, inputs)
    accuracy = Reference(p, inputs).compare(o, gradients)
    assert accuracy.ok, f"{p.key}: {accuracy}"


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def gradients(q: Tensor, k: Tensor, v: Tensor, dout: Tensor, causal: bool = True) -> tuple[Tensor, ...]:
    q, k, v = (x.detach().requires_grad_() for x in (q, k, v))
    return torch.autograd.grad(attention(q, k, v, causal=causal), (q, k, v), dout)


def grid():
    """Every dtype with every head dim, over lengths, masks and groups that differ from cell to cell."""
    pairs = itertools.cycle(itertools.product(LENGTHS, (False, True), (1, 2)))
    for dtype, dim in itertools.product(DTYPES, HEAD_DIMS):
        for _ in range(2 if dim < 128 and dtype != "tf32" else 1):
            length, causal, kv_heads = next(pairs)
            yield small(
                seqlen_q=length, seqlen_k=length, head_dim=dim, head_dim_v=dim,
                dtype=dtype, causal=causal, num_kv_heads=kv_heads,
            )  # fmt: skip


@pytest.mark.parametrize("p", list(grid()), ids=lambda p: p.key)
@pytest.mark.usefixtures("poisoned")
def test_every_dtype_and_head_dim_is_within_budget(p) -> None:
    assert_within_budget(p)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", [(1, 129), (129, 1), (7, 65), (65, 7), (192, 128), (130, 65), (100, 229)])
@pytest.mark.usefixtures("poisoned")
def test_any_two_lengths(lengths: tuple[int, int], causal: bool) -> None:
    seqlen_q, seqlen_k = lengths
    assert_within_budget(
        small(seqlen_q=seqlen_q, seqlen_k=seqlen_k, causal=causal, num_kv_heads=1, dtype="fp16")
    )


@pytest.mark.parametrize("dims", [(64, 16), (16, 80), (96, 40), (8, 100), (1, 3)])
def test_values_may_have_another_width(dims: tuple[int, int]) -> None:
    assert_within_budget(small(seqlen_q=70, seqlen_k=70, head_dim=dims[0], head_dim_v=dims[1]))


@pytest.mark.parametrize("kv_heads", [1, 2, 3, 6])
def test_groups_sum_their_gradients(kv_heads: int) -> None:
    assert_within_budget(small(batch=2, num_heads=6, num_kv_heads=kv_heads, seqlen_q=40, seqlen_k=66))


def test_query_heads_of_a_group_are_adjacent() -> None:
    q, k = random(1, 4, 3, 16), random(1, 2, 5, 16)
    v = torch.tensor([1.0, 2.0], device=DEVICE)[None, :, None, None].repeat(1, 1, 5, 16)
    assert torch.allclose(attention(q, k, v, causal=False)[0, :, 0, 0].cpu(), torch.tensor([1.0, 1, 2, 2]))


def test_the_last_query_sees_every_key() -> None:
    q, k = torch.zeros(1, 1, 2, 16, device=DEVICE), torch.zeros(1, 1, 5, 16, device=DEVICE)
    v = torch.arange(5.0, device=DEVICE)[None, None, :, None].repeat(1, 1, 1, 16)
    assert torch.allclose(attention(q, k, v, causal=True)[0, 0, :, 0].cpu(), torch.tensor([1.5, 2.0]))


@pytest.mark.usefixtures("poisoned")
def test_rows_without_keys_are_zero_and_move_nothing() -> None:
    empty, seqlen_q, seqlen_k = 95, 100, 5  # a tile of 64 rows holds rows with and without keys
    q, k, v, dout = (random(2, 2, n, 32, seed=n) for n in (seqlen_q, seqlen_k, seqlen_k, seqlen_q))
    q.requires_grad_()
    o, lse = attention(q, k, v, causal=True, return_lse=True)
    (dq,) = torch.autograd.grad(o, q, dout)
    assert (o[:, :, :empty] == 0).all()
    assert (lse[:, :, :empty] == -torch.inf).all()
    assert (dq[:, :, :empty] == 0).all()
    for tensor in (o, lse[:, :, empty:], dq, *gradients(q, k, v, dout)[1:]):
        assert tensor.isfinite().all()
    alone = attention(q[:, :, empty:], k, v, causal=True)
    assert torch.allclose(o[:, :, empty:], alone, atol=1e-6)


def test_a_single_key_leaves_no_gradient_behind() -> None:
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        q, k, v, dout = (random(1, 2, n, 96, dtype=dtype, seed=i) for i, n in enumerate((3, 1, 1, 3)))
        dq, dk, _ = gradients(q, k, v, dout, causal=False)
        assert (dq == 0).all()
        assert (dk == 0).all()


@pytest.mark.parametrize("causal", [False, True])
def test_lse_is_the_natural_log_of_the_sum(causal: bool) -> None:
    q, k, v = (random(1, 2, n, 40, seed=n) for n in (70, 131, 131))
    _, lse = attention(q, k, v, causal=causal, return_lse=True)
    scores = q.double() @ k.double().transpose(-1, -2) * 40**-0.5
    if causal:
        scores.masked_fill_(torch.ones(70, 131, device=DEVICE).triu(131 - 70 + 1).bool(), -torch.inf)
    assert lse.dtype == torch.float32
    assert (lse - scores.logsumexp(-1)).abs().max() < 2e-6


def test_parts_merge_by_their_lse_to_the_whole() -> None:
    q, k, v = (random(1, 1, n, 64, seed=n) for n in (9, 100, 101))
    v = v[:, :, :100]
    whole, lse = attention(q, k, v, causal=False, return_lse=True)
    parts = [
        attention(q, k[:, :, s], v[:, :, s], causal=False, return_lse=True)
        for s in (slice(90), slice(90, 100))
    ]
    weights = [torch.exp(part_lse - lse)[..., None] for _, part_lse in parts]
    merged = sum(weight * o for weight, (o, _) in zip(weights, parts, strict=True))
    assert torch.allclose(merged, whole, atol=1e-6)


def test_lse_is_differentiable() -> None:
    q, k, v, dout = (random(1, 2, n, 24, seed=i).requires_grad_() for i, n in enumerate((20, 33, 33, 20)))
    dlse = random(1, 2, 20, seed=9)
    mine = torch.autograd.grad(attention(q, k, v, causal=False, return_lse=True), (q, k, v), (dout, dlse))
    exact_q, exact_k, exact_v = (x.detach().double().requires_grad_() for x in (q, k, v))
    scores = exact_q @ exact_k.transpose(-1, -2) * 24**-0.5
    outputs = scores.softmax(-1) @ exact_v, scores.logsumexp(-1)
    theirs = torch.autograd.grad(outputs, (exact_q, exact_k, exact_v), (dout.double(), dlse.double()))
    for a, b in zip(mine, theirs, strict=True):
        assert torch.allclose(a.double(), b, atol=3e-6)


def test_large_logits_do_not_overflow() -> None:
    q = torch.full((1, 1, 70, 128), 32.0, device=DEVICE, dtype=torch.float16)
    v = random(1, 1, 70, 128, dtype=torch.float16)
    mean = v.double().mean(2, keepdim=True).expand(1, 1, 70, 128)
    assert (attention(q, q, v, causal=False).double() - mean).abs().max() < 1e-3
    x = torch.full((1, 1, 1, 64), 133120.0, device=DEVICE, dtype=torch.bfloat16)
    assert (attention(x, x, x, causal=True) == 133120).all()
    two = x.expand(1, 1, 90, 64)
    assert (attention(two, two, two, causal=True) == 133120).all()


def test_softmax_scale_is_taken() -> None:
    q, k, v = (random(1, 1, 20, 16, seed=i) for i in range(3))
    expected = (q.double() @ k.double().transpose(-1, -2) * 0.7).softmax(-1) @ v.double()
    assert torch.allclose(attention(q, k, v, causal=False, softmax_scale=0.7).double(), expected, atol=1e-6)


def _views(base: Tensor) -> dict[str, Tensor]:
    """The same values (1, 4, 70, 32) in other memory layouts."""
    heads = base.transpose(1, 2).contiguous().transpose(1, 2)
    fused = torch.zeros(1, 70, 4, 3, 32, device=base.device, dtype=base.dtype)
    fused[:, :, :, 1] = base.transpose(1, 2)
    columns = base.transpose(2, 3).contiguous().transpose(2, 3)
    every_second = torch.zeros(1, 4, 70, 64, device=base.device, dtype=base.dtype)
    every_second[..., ::2] = base
    odd = torch.zeros(1, 4, 71, 33, device=base.device, dtype=base.dtype)
    odd[:, :, 1:, 1:] = base
    return {
        "heads after rows": heads,
        "slice of fused qkv": fused[:, :, :, 1].transpose(1, 2),
        "columns first": columns,
        "every second column": every_second[..., ::2],
        "odd offset and stride": odd[:, :, 1:, 1:],
    }


@pytest.mark.parametrize("layout", _views(torch.zeros(1, 4, 70, 32)))
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_layouts_do_not_change_a_bit(layout: str, dtype: torch.dtype) -> None:
    tensors = [random(1, 4, 70, 32, dtype=dtype, seed=i) for i in range(4)]
    views = [_views(x)[layout] for x in tensors]
    if views[0].stride(-1) != 1:  # of q, k and v refused, of dout, which autograd makes, taken
        views[:3] = tensors[:3]
    o = attention(*tensors[:3], causal=True)
    assert o.is_contiguous()
    assert torch.equal(attention(*views[:3], causal=True), o)
    for a, b in zip(gradients(*tensors), gradients(*views), strict=True):
        assert torch.equal(a, b)


def test_expanded_tensors_are_read_through_their_zero_strides() -> None:
    q, k = random(1, 4, 66, 32), random(1, 1, 66, 32, seed=1)
    wide = k.expand(1, 4, 66, 32)
    dout = torch.ones(1, 1, 1, 1, device=DEVICE).expand(1, 4, 66, 32)
    assert torch.equal(attention(q, wide, wide, causal=True), attention(q, k, k, causal=True))
    copied = gradients(q, wide.contiguous(), wide.contiguous(), dout.contiguous())
    for a, b in zip(gradients(q, wide, wide, dout), copied, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("shape", "strides"),
    [
        ((1, 1, 34, 16), (0, 0, 2**26)),  # rows of one tile
        ((1, 1, 66, 16), (0, 0, 2**25)),  # tiles
        ((1, 3, 34, 16), (0, 2**30, 16)),  # heads
        ((3, 1, 34, 16), (2**30, 0, 16)),  # batches
        ((2, 1, 34, 16), (2**31 + 16, 0, 16)),
    ],
)
@pytest.mark.skipif(DEVICE != "cpu", reason="needs gigabytes that nobody touches: virtual memory")
def test_offsets_are_64_bit(shape: tuple[int, ...], strides: tuple[int, ...]) -> None:
    """Elements that lie 2^31 elements apart and more."""
    span = sum((n - 1) * stride for n, stride in zip(shape, strides, strict=False)) + 16
    far = torch.as_strided(torch.empty(span, dtype=torch.float16), shape, (*strides, 1))
    near = random(*shape, dtype=torch.float16)
    far.copy_(near)
    dout = random(*shape, dtype=torch.float16, seed=1)
    assert torch.equal(attention(far, far, far, causal=True), attention(near, near, near, causal=True))
    for a, b in zip(gradients(far, far, far, dout), gradients(near, near, near, dout), strict=True):
        assert torch.equal(a, b)


def _guarded(x: Tensor) -> tuple[Tensor, Tensor]:
    """(NaN-filled tensor like x inside a buffer of sevens, the buffer)."""
    buffer = torch.full((x.numel() + 4096,), 7.0, dtype=x.dtype, device=x.device)
    inside = buffer[2048 : 2048 + x.numel()].view(x.shape)
    inside.fill_(float("nan"))
    return inside, buffer


@pytest.mark.parametrize("causal", [False, True])
def test_nothing_outside_the_outputs_is_written_and_nothing_inside_is_left(causal: bool) -> None:
    q, k, v, do = (random(1, 2, n, 40, dtype=torch.float16, seed=i) for i, n in enumerate((67, 45, 45, 67)))
    call = flash.Call(causal=causal, scale=0.2)
    o, lse, forward = flash.forward_launch(q, k, v, call)
    forward.run()
    work = flash.backward_launches(flash.Saved(q=q, k=k, v=v, o=o, lse=lse, do=do), call)
    replaced = {id(x): _guarded(x) for x in (o, lse, work.delta, *work.gradients)}
    for launch in (forward, *work.launches):
        args = tuple(replaced[id(x)][0] if id(x) in replaced else x for x in launch.args)
        dataclasses.replace(launch, args=args).run()
    for inside, buffer in replaced.values():
        assert not inside.isnan().any()
        assert (buffer[:2048] == 7).all()
        assert (buffer[-2048:] == 7).all()


def test_every_run_gives_the_same_bits() -> None:
    shape = (2, 4, 500, 64) if DEVICE == "cuda" else (1, 1, 130, 16)
    tensors = [random(*shape, dtype=torch.bfloat16, seed=i) for i in range(4)]
    first = attention(*tensors[:3], causal=True), *gradients(*tensors)
    for _ in range(10 if DEVICE == "cuda" else 1):
        again = attention(*tensors[:3], causal=True), *gradients(*tensors)
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))


def test_permuted_keys_are_the_same_keys() -> None:
    q, k, v = (random(1, 2, n, 48, seed=n) for n in (50, 140, 140))
    order = torch.randperm(140, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    moved = attention(q, k[:, :, order], v[:, :, order], causal=False)
    assert torch.allclose(moved, attention(q, k, v, causal=False), atol=2e-6)


def test_equals_a_loop_over_rows() -> None:
    p = small(num_heads=4, seqlen_q=17, seqlen_k=12, dtype="fp32")
    inputs = make_inputs(p, DEVICE, seed=3)
    for mine, theirs in zip(run(FLASH, p, inputs), exact(p, inputs), strict=True):
        assert torch.allclose(mine.double(), theirs, atol=3e-6)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 3, 8, 16), "v": (1, 3, 8, 16)}, "num_heads 4 is not divisible by num_kv_heads 3"),
        ({"q": (1, 4, 8, 300), "k": (1, 4, 8, 300)}, "head dims must be 1 to 256"),
        ({"q": (4, 8, 16)}, "4 dimensions"),
        ({"v": (1, 4, 9, 16)}, "seqlen_k or head_dim differ"),
    ],
)
def test_shapes_that_do_not_fit_are_named(change: dict, message: str) -> None:
    shapes = {"q": (1, 4, 8, 16), "k": (1, 4, 8, 16), "v": (1, 4, 8, 16), **change}
    with pytest.raises(ValueError, match=message):
        attention(*(torch.zeros(shape, device=DEVICE) for shape in shapes.values()), causal=False)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan")])
def test_a_scale_that_is_not_positive_is_refused(scale: float) -> None:
    x = torch.zeros(1, 1, 1, 16, device=DEVICE)
    with pytest.raises(ValueError, match="softmax_scale"):
        attention(x, x, x, causal=False, softmax_scale=scale)


@pytest.mark.gpu
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", HEAD_DIMS)
def test_long_ragged_grid_on_a_gpu(dim: int, dtype: str, causal: bool) -> None:
    p = small(seqlen_q=1021, seqlen_k=1021, head_dim=dim, head_dim_v=dim, dtype=dtype, causal=causal)
    assert_within_budget(dataclasses.replace(p, num_heads=4, num_kv_heads=2))


@pytest.mark.gpu
def test_more_elements_than_32_bits_count() -> None:
    shape = (9, 32, 65536, 128)
    generator = torch.Generator("cuda").manual_seed(0)
    q, k, v = (torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    last = slice(8, 9)
    alone = attention(q[last].clone(), k[last].clone(), v[last].clone(), causal=True)
    assert torch.equal(attention(q, k, v, causal=True)[last], alone)


def _in_new_process(code: str) -> str:
    environment = {name: value for name, value in os.environ.items() if name != _triton.VARIABLE}
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_triton_imported_for_the_other_device_is_a_reason() -> None:
    code = """
import os
import triton.language
os.environ["TRITON_INTERPRET"] = "1"
from flashbench.kernels import Target, get
print(get("flash").why_unavailable(Target()))
"""
    assert "start a new process with TRITON_INTERPRET=1" in _in_new_process(code)


def test_a_missing_or_broken_triton_is_a_reason() -> None:
    missing = 'import sys; sys.modules["triton"] = None\n'
    broken = """
import sys
class Broken:
    def find_spec(self, name, path=None, target=None):
        if name == "triton.language":
            raise ImportError("libtriton.so: cannot open shared object file")
sys.meta_path.insert(0, Broken())
"""
    ask = 'from flashbench.kernels import Target, get; print(get("flash").why_unavailable(Target()))'
    assert "triton is not installed" in _in_new_process(missing + ask)
    assert "cannot open shared object file" in _in_new_process(broken + ask)


def test_asking_imports_no_torch() -> None:
    code = """
import sys
from flashbench.kernels import Target, get
from flashbench.problem import Problem
flash = get("flash")
p = Problem(
    batch=1, num_heads=1, num_kv_heads=1, seqlen_q=8, seqlen_k=8,
    head_dim=64, head_dim_v=64, dtype="bf16", causal=True,
)
h100 = Target(device="cuda", capability=(9, 0), smem_per_block_bytes=232448)
print(flash.why_unsupported(p, "fwd+bwd", h100), *sorted(flash.describe(p, "fwd", h100)))
print("torch" in sys.modules)
"""
    names = "fwd_block_k fwd_block_q fwd_cut fwd_num_stages fwd_num_warps fwd_q_stages kernels"
    assert _in_new_process(code) == f"None {names}\nFalse"


def _refusal(pass_: str, capability: tuple[int, int], limit: int, **changes) -> str | None:
    code = f"""
from flashbench.kernels import Target, get
from flashbench.problem import Problem
p = Problem(**{dataclasses.asdict(small(**changes))!r})
target = Target(device="cuda", capability={capability!r}, smem_per_block_bytes={limit})
print(get("flash").why_unsupported(p, {pass_!r}, target))
"""
    reason = _in_new_process(code)
    return None if reason == "None" else reason


def test_refusals_name_the_limit() -> None:
    assert _refusal("fwd", (7, 5), 65536, dtype="bf16") == "bf16 needs sm80, this is sm75"
    assert _refusal("fwd", (7, 5), 65536, dtype="fp16") is None
    assert "head_dim 300 is larger than 256" in (_refusal("fwd", (9, 0), 232448, head_dim=300) or "")
    reason = _refusal("fwd+bwd", (8, 0), 1000, dtype="fp32", head_dim=256) or ""
    assert "B of shared memory per block, limit 1000 B" in reason
    for dtype, head_dim in itertools.product(DTYPES, (64, 256)):
        assert (
            _refusal("fwd+bwd", (8, 6), 101376, dtype=dtype, head_dim=head_dim, head_dim_v=head_dim) is None
        )
