"""``flashbench.attention`` past torch's dispatcher: where it goes there, and that both ways are one."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.autograd.graph import saved_tensors_hooks
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import flashbench
from flashbench import environment, flash_attn, kernels
from flashbench.kernels import _eager, _op

TARGET = environment.target(None)
REASON = kernels.get("flash").why_unavailable(TARGET)
runs = pytest.mark.skipif(REASON is not None, reason=str(REASON))
DEVICE = TARGET.device
SHAPE = 1, 2, 8, 16
STARTS = torch.tensor([0, 3, 8], dtype=torch.int32, device=DEVICE)
PACKED: dict[str, Any] = {"cu_seqlens_q": STARTS, "cu_seqlens_k": STARTS}
LONGEST = {"max_seqlen_q": 5, "max_seqlen_k": 5}


@pytest.fixture
def ways(monkeypatch: pytest.MonkeyPatch) -> Ways:
    return Ways(monkeypatch)


class Ways:
    """What a call comes to, and by which way: seen has whether each asked for it was a plain one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.seen: list[bool] = []
        self.by_operator = False
        own = _op.plain

        def plain(tensors: tuple[Any, ...]) -> bool:
            if not torch.compiler.is_compiling():
                self.seen.append(own(tensors))
            return own(tensors) and not self.by_operator

        monkeypatch.setattr(_op, "plain", plain)

    def agree(self, call: Callable[[], Any]) -> Any:
        """Both ways come to the same, which is returned: tensors, or what was raised."""
        found = outcome(call)
        seen, self.by_operator = list(self.seen), True
        wanted = outcome(call)
        self.seen, self.by_operator = seen, False
        assert described(found) == described(wanted)
        return found


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return type(error), str(error)


def described(found: Any) -> Any:
    """Of tensors all that can be told, values too."""
    if isinstance(found, tuple | list):
        return [described(x) for x in found]
    if not isinstance(found, Tensor):
        return found
    kind = type(found), found.dtype, found.stride(), found.requires_grad, found.is_inference(), found.shape
    return *kind, found.detach().tolist()


def tensors(grad: bool = True, **more: Any) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = (torch.randn(SHAPE, generator=generator).to(DEVICE, **more) for _ in "qkv")
    return [x.requires_grad_(grad) for x in made]


def differentiated(function: Callable[..., Any]) -> list[Any]:
    """What it returns and gradients of q, k and v."""
    leaves = tensors()
    found = function(*leaves)
    o = found[0] if isinstance(found, tuple) else found
    return [found, *torch.autograd.grad((o * torch.arange(o.shape[-1], device=DEVICE)).sum(), leaves)]


OPTIONS: list[Any] = [
    {}, {"window": [2, 1], "softcap": 2}, {"layout": "bshd"}, {**PACKED, **LONGEST, "causal": True},
    {"window": (True, 0)},
    *(pytest.param(more, marks=pytest.mark.slow) for more in (
        {"causal": True, "scale": 0.3}, {"scale": torch.tensor(0.3)}, PACKED,
        {"alibi_slopes": torch.tensor([0.5, 0.1], device=DEVICE), "causal": True},
    )),
]  # fmt: skip
WRONG: list[dict[str, Any]] = [
    {"scale": 0}, {"scale": float("nan")}, {"scale": "x"}, {"softcap": -1}, {"softcap": float("inf")},
    {"alibi_slopes": torch.ones(3, device=DEVICE)}, {"window": (1.5, 0)}, {"causal": "top-left"},
    {**PACKED, "max_seqlen_q": 5.0, "max_seqlen_k": 5},
    pytest.param({**PACKED, "max_seqlen_q": 2, "max_seqlen_k": 2},
                 marks=pytest.mark.skipif(DEVICE != "cpu", reason="the host does not read them")),
    {"cu_seqlens_q": STARTS}, {**PACKED, "max_seqlen_q": -1},
]  # fmt: skip


@runs
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_both_ways_compute_the_same(options: dict[str, Any], ways: Ways) -> None:
    packed = "cu_seqlens_q" in options
    found = ways.agree(
        lambda: differentiated(lambda *x: flashbench.attention(*x, **options, return_lse=True))
    )
    (o, lse), *gradients = found
    assert o.requires_grad
    assert not lse.requires_grad
    assert len(gradients) == 3
    assert ways.seen == [True, True]
    if not packed:
        plain = ways.agree(lambda: flashbench.attention(*tensors(False), **options))
        assert torch.equal(plain, o)
        assert not plain.requires_grad


@runs
@pytest.mark.parametrize("options", WRONG, ids=str)
def test_both_ways_refuse_the_same(options: dict[str, Any], ways: Ways) -> None:
    kind, said = ways.agree(lambda: flashbench.attention(*tensors(), **options))
    assert issubclass(kind, (ValueError, RuntimeError))
    assert said


@runs
@pytest.mark.parametrize(
    "turn",
    [
        lambda q, k, v: (q, k[:, :1].expand(SHAPE), v), lambda q, k, v: (q[:, :, :0], k, v),
        lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), lambda q, k, v: (q.detach(), k.detach(), v),
        lambda q, k, v: (q, k.half(), v), lambda q, k, v: (q[0], k, v), lambda q, k, v: (q, k[..., :8], v),
        lambda q, k, v: (q[..., :0], k[..., :0], v), lambda q, k, v: (q.mT.contiguous().mT, k, v),
        lambda q, k, v: (q, [1], v), lambda q, k, v: (q.to(torch.float64),) * 3,
    ],
)  # fmt: skip
def test_both_ways_take_and_refuse_the_same_tensors(turn: Callable[..., Any], ways: Ways) -> None:
    def call() -> Any:
        leaves = tensors()
        found = flashbench.attention(*turn(*leaves), return_lse=True)
        return found, *torch.autograd.grad(found[0].sum(), leaves, allow_unused=True, materialize_grads=True)

    ways.agree(call)
    assert ways.seen


@runs
def test_both_ways_save_the_same_and_differentiate_once(ways: Ways) -> None:
    packs: list[list[Any]] = []

    def hooked() -> Any:
        packs.append([])
        leaves = tensors()
        with saved_tensors_hooks(lambda x: packs[-1].append(described(x)) or x, lambda x: x * 1):
            o = flashbench.attention(*leaves, causal=True)
        return o, *torch.autograd.grad(o.sum(), leaves)

    ways.agree(hooked)
    assert packs[0] == packs[1]
    assert len(packs[0]) == 5
    assert ways.seen == [True, True]

    def twice(*, create_graph: bool) -> Any:
        leaves = tensors()
        first = torch.autograd.grad(flashbench.attention(*leaves).sum(), leaves, create_graph=create_graph)
        return torch.autograd.grad(first[0].sum(), leaves)

    for create_graph in (True, False):
        assert ways.agree(lambda of=create_graph: twice(create_graph=of))[0] is RuntimeError

    def written() -> Any:
        leaves = tensors()
        q = leaves[0] * 1
        o = flashbench.attention(q, *leaves[1:])
        q.add_(1)
        return torch.autograd.grad(o.sum(), leaves)

    kind, said = ways.agree(written)
    assert kind is RuntimeError
    assert "inplace" in said
    of_lse = ways.agree(
        lambda: torch.autograd.grad(flashbench.attention(*tensors(), return_lse=True)[1].sum(), tensors())
    )
    assert of_lse[0] is RuntimeError


@runs
def test_checkpoints_autocast_and_dual_numbers_are_the_same(ways: Ways) -> None:
    for again in (True, False):  # where inner tensors are recomputed, autograd.grad is refused
        ways.agree(
            lambda of=again: differentiated(
                lambda *x: checkpoint(lambda *x: flashbench.attention(*x) * 1, *x, use_reentrant=of)
            )
        )

    def cast() -> Any:
        with torch.autocast(DEVICE.split(":")[0], dtype=torch.bfloat16):
            return differentiated(flashbench.attention)

    assert ways.agree(cast)[0].dtype == torch.float32, "what it is given"

    def dual(grad: bool) -> Any:
        with forward_ad.dual_level():
            q, k, v = tensors(grad)
            return flashbench.attention(forward_ad.make_dual(q, torch.ones_like(q)), k, v)

    for grad in (True, False):
        assert ways.agree(lambda of=grad: dual(of))[0] is NotImplementedError
    assert all(ways.seen)


@runs
@pytest.mark.parametrize("outer", [True, False])
@pytest.mark.parametrize("inner", [True, False])
def test_inference_mode_is_plain_outside_and_in(outer: bool, inner: bool, ways: Ways) -> None:
    def call() -> Any:
        with torch.inference_mode(outer):
            made = tensors(False)
        with torch.inference_mode(inner):
            return flashbench.attention(*made, return_lse=True)

    o, _ = ways.agree(call)
    assert o.is_inference() == inner
    assert ways.seen == [True]
    q, (_, k, v) = torch.zeros(SHAPE, device=DEVICE, requires_grad=True), tensors(False)
    with torch.inference_mode():
        k = k * 1
    assert ways.agree(lambda: flashbench.attention(q, k, v))[0] is RuntimeError, "it cannot be saved"


class Sub(Tensor):
    """As a DTensor is no ordinary tensor."""


class Dispatching(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


class Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def test_a_call_of_ordinary_tensors_is_plain() -> None:
    q, k, v = tensors()
    assert _eager.plain((q, k, v))
    assert _eager.plain((q, k, v, None, STARTS))
    with torch.no_grad(), torch.autocast(DEVICE.split(":")[0]):
        assert _eager.plain((q, k, v))
    with saved_tensors_hooks(lambda x: x, lambda x: x), torch.autograd.detect_anomaly(check_nan=False):
        assert _eager.plain((q, k, v))


@pytest.mark.parametrize(
    "mode",
    [Dispatching, Functions, lambda: torch.device("cpu"), torch.profiler.profile,
     torch.autograd.profiler.profile],
    ids=["dispatch", "function", "device", "profiler", "autograd profiler"],
)  # fmt: skip
def test_what_follows_operators_is_shown_one(mode: Callable[[], AbstractContextManager[Any]]) -> None:
    made = tensors()
    with mode():
        assert not _eager.plain(tuple(made))
    assert _eager.plain(tuple(made))


@pytest.mark.parametrize(
    "odd",
    [
        torch._neg_view, torch._to_functional_tensor, lambda x: x.detach().as_subclass(Sub),
        lambda x: torch.nn.Parameter(x.detach()), lambda x: x.detach()[0, 0].to_sparse(),
        lambda x: x.to("meta"), lambda x: torch._efficientzerotensor(SHAPE, device=DEVICE), lambda x: 1.0,
    ],
    ids=["negated", "functional", "subclass", "parameter", "sparse", "meta", "zeros", "number"],
)  # fmt: skip
@pytest.mark.parametrize("place", [0, 1, 2])
def test_tensors_that_are_no_ordinary_ones_are_not_plain(odd: Callable[[Tensor], Any], place: int) -> None:
    made: list[Any] = tensors()
    made[place] = odd(made[place])
    assert not _eager.plain(tuple(made))


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: torch.vmap(f), lambda f: torch.func.grad(lambda x: f(x).sum()),
        lambda f: lambda x: torch.func.jvp(f, (x,), (x,)), torch.func.functionalize, make_fx,
        lambda f: make_fx(f, pre_dispatch=True), lambda f: make_fx(f, tracing_mode="symbolic"),
        lambda f: lambda x: torch.jit.trace(f, x, check_trace=False),
        lambda f: torch.compile(f, fullgraph=True, backend="eager"),
    ],
    ids=["vmap", "grad", "jvp", "functionalize", "make_fx", "pre_dispatch", "symbolic", "trace", "compile"],
)  # fmt: skip
@pytest.mark.filterwarnings("ignore")
def test_what_is_transformed_or_traced_is_not_plain(transform: Callable[..., Any]) -> None:
    """Not its own tensors, nor those that it closes over."""
    inner, found = torch.ones(3), list[bool]()

    def function(x: Tensor) -> Tensor:
        found.extend((_eager.plain((x,)), _eager.plain((inner,))))
        return x * 2

    transform(function)(torch.ones(3))
    assert found
    assert not any(found)
    assert _eager.plain((inner,))


def test_where_torch_cannot_be_asked_nothing_is_plain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_eager, "KNOWN", False)
    assert not _eager.plain(tuple(tensors()))


@runs
def test_in_an_operators_kernel_autograd_is_the_operators(ways: Ways) -> None:
    def call() -> Any:
        leaves = tensors()
        with torch._C._AutoDispatchBelowAutograd():
            return flashbench.attention(*leaves)

    own = []
    ways.agree(lambda: own.append(type(call().grad_fn).__name__))
    assert own[0] == own[1]
    with torch._C._AutoDispatchBelowAutograd():
        assert _eager.below_autograd()
    assert not _eager.below_autograd()


@runs
def test_modes_and_profilers_see_the_operators(ways: Ways) -> None:
    leaves = tensors()
    with Dispatching() as mode:
        torch.autograd.grad(flashbench.attention(*leaves).sum(), leaves)
    named = [name for name in mode.names if name.startswith("flashbench")]
    assert named == ["flashbench.attention.default", "flashbench.attention_backward.default"]
    with Functions() as functions:
        flashbench.attention(*leaves)
    assert "flashbench.attention" in functions.names
    with torch.profiler.profile() as profile:
        torch.autograd.grad(flashbench.attention(*leaves).sum(), leaves)
    names = {event.key for event in profile.key_averages()}
    assert names >= {"flashbench::attention", "flashbench::attention_backward"}
    assert not any(ways.seen)


@runs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("strict", [pytest.param(True, marks=pytest.mark.slow), False])
def test_what_is_exported_or_traced_holds_the_operator(strict: bool) -> None:
    class Layer(torch.nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return flashbench.attention(q, k, v, causal=True)  # type: ignore[no-any-return]

    made = tuple(tensors(False))
    program = torch.export.export(Layer(), made, strict=strict)
    assert "flashbench.attention.default" in str(program.graph)
    assert torch.equal(program.module()(*made), Layer()(*made))
    if not strict:
        for options in ({}, {"pre_dispatch": True}):
            assert "flashbench.attention.default" in str(make_fx(Layer(), **options)(*made).graph)
        from torch._subclasses import FakeTensorMode

        with FakeTensorMode() as fake:
            o = flashbench.attention(*(torch.empty(SHAPE, device=DEVICE) for _ in "qkv"))
        assert o.shape == SHAPE
        o = flashbench.attention(*(fake.from_tensor(x) for x in made))
        assert isinstance(o, torch._subclasses.FakeTensor)


@runs
def test_transforms_do_what_they_did(ways: Ways) -> None:
    """Whatever that is; batches of gradients go by the operator."""
    q, k, v = tensors(False)
    many = torch.stack((q, q * 2))
    found = ways.agree(lambda: torch.vmap(lambda x: flashbench.attention(x, k, v))(many))
    assert torch.equal(found[1], flashbench.attention(q * 2, k, v))
    ways.seen.clear()
    for transform in (torch.func.grad, torch.func.jacrev):  # torch refuses both
        ways.agree(lambda of=transform: of(lambda x: flashbench.attention(x, k, v).sum())(q))
    assert ways.seen
    assert not any(ways.seen)

    def batched() -> Any:
        leaves = tensors()
        return torch.autograd.grad(
            flashbench.attention(*leaves), leaves, torch.ones(2, *SHAPE, device=DEVICE), is_grads_batched=True
        )

    ways.seen.clear()
    ways.agree(batched)
    assert ways.seen == [True, False]


def attended(x: Tensor, other: Tensor) -> Tensor:
    return flashbench.attention(x, other, other)


FORWARD: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "jvp": lambda x, k: torch.func.jvp(lambda y: attended(y, k), (x,), (x,)),
    "jvp of k": lambda x, k: torch.func.jvp(lambda y: attended(x, y), (k,), (k,)),
    "jacfwd": lambda x, k: torch.func.jacfwd(lambda y: attended(y, k))(x),
    "linearize": lambda x, k: torch.func.linearize(lambda y: attended(y, k), x),
    "of vmap": lambda x, k: torch.func.jvp(torch.vmap(lambda y: attended(y, k)), (x[None],), (x[None],)),
    "of jvp": lambda x, k: torch.func.jvp(
        lambda y: torch.func.jvp(lambda z: attended(y, k) * z, (x,), (x,))[0], (x,), (x,)
    ),
    "of grad": lambda x, k: torch.func.jvp(
        lambda y: torch.func.grad(lambda z: (attended(y, k) * z).sum())(x), (x,), (x,)
    ),
    "compiled": lambda x, k: torch.compile(
        lambda x: torch.func.jvp(lambda y: attended(y, k), (x,), (x,))[1], backend="eager"
    )(x),
    "deterministic": lambda x, k: torch.func.jvp(
        lambda y: flash_attn.flash_attn_func(y, k, k, deterministic=True), (x,), (x,)
    ),
    "cache": lambda x, k: torch.func.jvp(
        lambda y: flash_attn.flash_attn_with_kvcache(y, k, k), (x,), (x,)
    ),
}  # fmt: skip


@runs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", FORWARD.values(), ids=FORWARD)
def test_forward_mode_is_refused_and_not_taken_for_zero(way: Callable[[Tensor, Tensor], Any]) -> None:
    q, k, _ = tensors(False)
    with pytest.raises(NotImplementedError, match=r"forward-mode derivatives .* are not supported"):
        way(q, k)


@runs
def test_what_has_no_tangent_is_taken_in_forward_mode() -> None:
    q, k, _ = tensors(False)
    o, tangent = torch.func.jvp(lambda x: x * attended(q, k), (q,), (torch.ones_like(q),))
    assert torch.equal(tangent, attended(q, k))
    _, tangent = torch.func.jvp(lambda x: x * attended(x.detach(), k), (q,), (torch.ones_like(q),))
    assert torch.equal(o, q * tangent)


DTENSOR = """
import torch, flashbench
import torch.distributed as dist
from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from flashbench.kernels import _op
dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
mesh = init_device_mesh("cpu", (1,))
x = distribute_tensor(torch.randn(1, 2, 8, 16), mesh, [Replicate()])
own, seen, said = _op.plain, [], []
_op.plain = lambda tensors: seen.append(own(tensors)) or seen[-1]
try:
    flashbench.attention(x, x, x)
except Exception as error:
    print(type(error).__name__, str(error)[:300])
assert seen and not any(seen), seen
"""


@runs
@pytest.mark.skipif(not torch.distributed.is_available(), reason="this torch has no torch.distributed")
@pytest.mark.slow
def test_a_dtensor_goes_by_the_operator() -> None:
    """Which has no rule of how it is sharded."""
    done = subprocess.run([sys.executable, "-c", DTENSOR], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert "shard" in done.stdout


@pytest.mark.gpu
def test_a_plain_call_is_captured_in_a_graph_and_runs_on_any_thread(ways: Ways) -> None:
    """Forward and backward; on a GPU autograd's own thread asks for the backward."""
    made = [x.detach().half() for x in tensors()]
    wanted = flashbench.attention(*made, causal=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        o = flashbench.attention(*made, causal=True)
    for x in made:
        x.mul_(2)
    graph.replay()
    assert torch.equal(o, flashbench.attention(*made, causal=True))
    assert not torch.equal(o, wanted)
    leaves = [x.requires_grad_() for x in made]
    torch.autograd.grad(flashbench.attention(*leaves, causal=True).sum(), leaves)
    assert ways.seen == [True] * 5
    ways.agree(lambda: torch.autograd.grad(flashbench.attention(*leaves, softcap=3.0).sum(), leaves))
