"""A model of what flash-v3's kernels ask of Hopper: their roles as threads over torch tensors.

A child process runs it, with modules in Triton's place: mbarriers with their phases and bytes, named ones
with their threads, TMA that writes from when it is asked on, products and TMA's stores that read from when
they are asked until they are waited for, and waits of random length. A buffer that is handed on too soon is
an error or a wrong number, a barrier that does not meet its other side an error. What it does not know:
layouts, and the machine code.

A role of several warpgroups (``launch``) is as many threads here, none of which waits for another: each
computes all rows in memory of its own and writes those that are its. So barriers that Triton puts between
them, which are its to place, are not relied on.
"""

from __future__ import annotations

import importlib
import math
import random
import sys
import threading
import time
import types
from collections.abc import Callable
from typing import Any

import torch
from hopper_named import Named
from hopper_turns import Turns
from torch import Tensor

HANG_S = 60
_OWN = threading.local()
_ADDING = threading.Lock()
_RANDOM = random.Random(0)
_MBARRIERS: list[Barrier] = []
_NAMED: list[Named] = []
_PASSED: set[int] = set()
"""Named barriers at which turns were passed: the last turn is nobody's."""
_LAUNCH = {"programs": 0, "program": 0, "warpgroups": 1}
ORDER: list[Any] = [None]
"""In which order roles go on (``hopper_turns.Turns``); None: as the threads do."""


def _pause() -> None:
    if _OWN.turns:
        _OWN.turns.switch(_OWN.role)
    elif _RANDOM.random() < 0.3:
        time.sleep(_RANDOM.random() * 3e-4)


class Product:
    """A product in flight: known once it was waited for."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        self.compute, self.value = compute, None

    def get(self) -> Tensor:
        self.value = self.compute() if self.value is None else self.value
        return self.value


class Shared:
    """Shared memory, or a view of it."""

    type = types.SimpleNamespace(layout=None)

    def __init__(self, data: Tensor) -> None:
        self.data, self.dtype = data, data.dtype

    def index(self, i: int) -> Shared:
        assert 0 <= i < len(self.data)
        return Shared(self.data[i])

    def reshape(self, shape: list[int]) -> Shared:
        return Shared(self.data.view(shape))

    def permute(self, order: tuple[int, ...]) -> Shared:
        return Shared(self.data.permute(*order))

    def slice(self, start: int, length: int, dim: int) -> Shared:
        return Shared(self.data.narrow(dim, start, length))

    def load(self, layout: Any) -> Tensor:
        return self.data.clone()

    def store(self, x: Tensor) -> None:
        assert (x.shape, x.dtype) == (self.data.shape, self.data.dtype)
        self.data.copy_(x)


class Barrier:
    """An mbarrier: a phase ends when all have arrived and all bytes that were announced have come."""

    def __init__(self) -> None:
        self.condition = threading.Condition()
        self.phase = self.bytes = self.arrived = self.count = 0

    def change(self, arrivals: int = 0, more: int = 0) -> None:
        with self.condition:
            self.arrived += arrivals
            self.bytes += more
            assert self.arrived <= self.count
            if self.arrived == self.count and not self.bytes:
                self.arrived = 0
                self.phase += 1
                self.condition.notify_all()


class Descriptor:
    """A TMA descriptor: boxes of a tensor, 0 outside of it."""

    layout = None

    def __init__(self, data: Tensor, box: list[int]) -> None:
        self.data, self.box, self.dtype = data, box, data.dtype

    def clip(self, at: list[int], box: list[int]) -> tuple[tuple[slice, ...], tuple[slice, ...]]:
        sizes = [max(0, min(b, n - a)) for a, b, n in zip(at, box, self.data.shape, strict=True)]
        return tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True)), tuple(map(slice, sizes))


class Pointer:
    def __init__(self, data: Any, at: Any = 0) -> None:
        self.data, self.at = data, at

    def __add__(self, n: Any) -> Pointer:
        return Pointer(self.data, self.at + n)


class Number(int):
    """What is loaded: Triton's numbers have a type."""

    def __floordiv__(self, other: int) -> Number:
        return Number(int(self) // other)

    def __and__(self, other: int) -> Number:
        return Number(int(self) & other)

    def __rshift__(self, other: int) -> Number:
        return Number(int(self) >> other)

    def __mul__(self, other: Any) -> Any:
        return _typed(int(self) * other)

    def __add__(self, other: Any) -> Any:
        return _typed(int(self) + other)

    def to(self, dtype: torch.dtype) -> Number:
        return self


def _typed(x: Any) -> Any:
    return Number(x) if isinstance(x, int) else x


class Typed(Tensor):
    type = types.SimpleNamespace(layout=None)


class Layout:
    def __init__(self, *args: Any, **options: Any) -> None:
        pass

    @staticmethod
    def get_default_for(*args: Any) -> None:
        pass


class BarrierLayout(Layout):
    pass


def _threads(warps: int) -> int:
    """Of so many warps, all of the role's, those that this thread stands for."""
    assert warps == _OWN.warps * _OWN.of
    return 32 * _OWN.warps


def _named(number: int) -> Named:
    from flashbench.kernels import _hopper_asm as asm

    assert asm.NAMED_FROM <= number < len(_NAMED)
    return _NAMED[number]


def _named_arrive(number: int, of: int, warps: int) -> None:
    from flashbench.kernels import _hopper_asm as asm

    _pause()
    _named(asm.NAMED_FROM + number).arrive(_OWN.role, _threads(warps), of)


def _meet(number: int, of: int) -> None:
    _pause()
    barrier = _named(number)
    phase = barrier.arrive(_OWN.role, 32 * _OWN.warps, of)
    if _OWN.turns:
        _OWN.turns.switch(_OWN.role, lambda: barrier.phase != phase)
    else:
        barrier.wait(phase, HANG_S)


def _named_sync(number: int, of: int, warps: int) -> None:
    from flashbench.kernels import _hopper_asm as asm

    _threads(warps)
    _meet(asm.NAMED_FROM + number, of)


def _meet_alone(number: int, of: int) -> None:
    _named_sync(number, of, 1)


def _by_warpgroup(number: int, warps: int) -> int:
    from flashbench.kernels import _hopper_asm as asm

    assert _threads(warps) == 128
    return asm.NAMED_FROM + number + _OWN.part


def _turn_pass(number: int, here: bool) -> None:
    from flashbench.kernels import _hopper_asm as asm

    if here:
        _PASSED.add(asm.NAMED_FROM + number)
        _named_arrive(number, 256, 4)


def _wait(barrier: Barrier, phase: int, pred: bool = True) -> None:
    if _OWN.turns:
        _OWN.turns.switch(_OWN.role, lambda: not pred or barrier.phase & 1 != phase)
        return
    _pause()
    with barrier.condition:
        if pred and not barrier.condition.wait_for(lambda: barrier.phase & 1 != phase, HANG_S):
            raise RuntimeError("a barrier was waited for in vain")


def _arrive(barrier: Barrier, pred: bool = True) -> None:
    _pause()
    if pred:
        barrier.change(1)


def _still(x: Tensor) -> Callable[[], Tensor]:
    """What reads memory later, or now: NaN where that is not the same."""
    now = x.contiguous().view(torch.uint8).clone()

    def read() -> Tensor:
        same = torch.equal(x.contiguous().view(torch.uint8), now)
        return x.float() if same else torch.full(x.shape, math.nan)

    return read


def _load(desc: Descriptor, at: list[int], barrier: Barrier, to: Shared) -> None:
    _pause()
    to.data.view(desc.box).view(torch.uint8).fill_(255)  # NaN of every dtype: it may write from now on

    def load() -> None:
        box = to.data.view(desc.box).zero_()
        source, place = desc.clip(at, desc.box)
        box[place] = desc.data[source]
        barrier.change(more=-to.data.nbytes)

    if _OWN.turns:
        _OWN.turns.flying.append(load)
    else:
        load()


def _store(desc: Descriptor, at: list[int], source: Shared) -> None:
    _pause()
    rows = desc.box[-2] // _OWN.of
    own = source.data.view(desc.box).narrow(-2, _OWN.part * rows, rows)
    place, box = desc.clip([*at[:-2], at[-2] + _OWN.part * rows, at[-1]], list(own.shape))
    read = _still(own)
    _OWN.stores.append(lambda: desc.data[place].copy_(read()[box]))


def _add(desc: Descriptor, at: list[int], source: Shared) -> None:
    place, box = desc.clip(at, desc.box)
    read = _still(source.data)

    def add() -> None:
        with _ADDING:
            desc.data[place] += read()[box]

    _OWN.stores.append(add)


def _store_wait(pending: int) -> None:
    if _OWN.turns:
        _OWN.turns.switch(_OWN.role)
    for store in _OWN.stores:
        store()
    _OWN.stores.clear()


def _multiply(
    a: Any, b: Shared, acc: Any, use_acc: bool = True, is_async: bool = False
) -> Product:  # fmt: skip
    first, second = _still(a.data if isinstance(a, Shared) else a), _still(b.data)

    def compute() -> Tensor:
        product = first() @ second()
        before = acc.get() if isinstance(acc, Product) else acc
        assert product.shape == before.shape
        return product + before if use_acc else product

    _OWN.products.append(Product(compute))
    return _OWN.products[-1]


def _multiply_wait(pending: int, deps: list[Any]) -> Any:
    if _OWN.turns:  # products read what they read now, after whatever else could happen
        _OWN.turns.switch(_OWN.role)
    while len(_OWN.products) > pending:
        _OWN.products.pop(0).get()
    flying = _OWN.products
    done = [x.value if isinstance(x, Product) and x not in flying else x for x in deps]
    return done[0] if len(done) == 1 else tuple(done)


def _allocate(dtype: torch.dtype, shape: list[int], layout: Any) -> Any:
    if isinstance(layout, BarrierLayout):
        bars = [Barrier() for _ in range(shape[0])]
        _MBARRIERS.extend(bars)
        return types.SimpleNamespace(index=bars.__getitem__)
    return Shared(torch.full(shape, math.nan, dtype=dtype))


def _apart(role: Callable[..., None], args: tuple[Any, ...], others: list[Any]) -> list[tuple[Any, ...]]:
    """The role once for each of its warpgroups; memory that none of the others has is a thread's own."""
    given = {id(x) for _, more in others for x in more}

    def own(x: Any) -> Any:
        return Shared(x.data.clone()) if isinstance(x, Shared) and id(x) not in given else x

    return [(role, tuple(map(own, args))) for _ in range(_LAUNCH["warpgroups"])]


def _specialize(
    roles: list[tuple[Callable[..., None], tuple[Any, ...]]], warps: list[int], registers: list[int]
) -> None:
    assert len(registers) == len(warps) == len(roles) - 1
    errors: list[BaseException] = []
    _NAMED[:] = [Named() for _ in range(16)]
    _PASSED.clear()
    of = _LAUNCH["warpgroups"]
    parts = [*_apart(*roles[0], roles[1:]), *roles[1:]]
    numbers = [*((4, part, of) for part in range(of)), *((n, 0, 1) for n in warps)]
    turns = None if ORDER[0] is None else Turns(ORDER[0], len(parts))

    def run(number: int, role: Callable[..., None], args: tuple[Any, ...]) -> None:
        _OWN.stores, _OWN.products, _OWN.turns, _OWN.role = [], [], turns, number
        _OWN.warps, _OWN.part, _OWN.of = numbers[number]
        before = len(errors)
        try:
            if turns:
                turns.enter(number)
            role(*args)
            assert not _OWN.products
            assert not _OWN.stores
        except BaseException as error:  # the other thread's reason, too
            errors.append(error)
        if turns:
            turns.leave(number, len(errors) > before)

    threads = [threading.Thread(target=run, args=(n, *role)) for n, role in enumerate(parts)]
    for thread in threads:
        thread.start()
    if turns:
        turns.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    assert not (turns and turns.flying), "a load that nobody waited for"
    assert not any(barrier.bytes for barrier in _MBARRIERS), "a load that was not announced, or not made"
    left = [number for number, barrier in enumerate(_NAMED) if barrier.arrived and number not in _PASSED]
    assert not left, f"named barriers {left} are left half arrived at"


def _load_where(pointer: Pointer, mask: Any = None, other: float = 0.0) -> Any:
    if mask is None and isinstance(pointer.at, Tensor):
        return pointer.data[pointer.at]
    if mask is None:
        number = pointer.data[pointer.at]
        return Number(number) if isinstance(number, int) else float(number)
    return torch.full(mask.shape, other).masked_scatter(mask, pointer.data[pointer.at[mask]])


def _store_where(pointer: Pointer, x: Tensor, mask: Tensor) -> None:
    own = torch.arange(len(mask)) // (len(mask) // _OWN.of) == _OWN.part
    pointer.data[pointer.at[mask & own]] = x[mask & own]


def _mask(s: Tensor, last: Tensor, columns: int) -> Tensor:
    return s.masked_fill(torch.arange(columns) > last[:, None], -math.inf)


def _mask_before(s: Tensor, first: Tensor, columns: int) -> Tensor:
    return s.masked_fill(torch.arange(columns) < first[:, None], -math.inf)


def _four(x0: Tensor, x1: Tensor, x2: Tensor, x3: Tensor, e5m2: bool) -> Tensor:
    cast = torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn
    limit = torch.finfo(cast).max
    rounded = torch.stack((x0, x1, x2, x3), -1).clamp(max=limit).to(cast)
    return rounded.view(torch.int32).squeeze(-1)


def _taken_apart(words: Tensor, e5m2: bool) -> Tensor:
    """Of column c byte c % 4."""
    bytes_ = words.contiguous().view(torch.uint8).reshape(*words.shape, 4)
    place = torch.arange(words.shape[1]) % 4
    own = bytes_[:, torch.arange(words.shape[1]), place].contiguous()
    return own.view(torch.float8_e5m2 if e5m2 else torch.float8_e4m3fn)


def _power(x: Tensor, cubic: bool) -> Tensor:
    """2**x in fp16 numbers as the multiply-add units compute it (``_hopper_exp2``), but for its roundings."""
    from flashbench.kernels import _hopper_exp2 as fast

    fixed = ((x.double() + 15) / 32).nan_to_num(0).clamp(0, 1).mul(2**15).round() / 2**10
    m, whole = fixed % 1 + 1, fixed.floor()
    factors = fast.CUBIC if cubic else fast.QUADRATIC
    q = sum(c * m**n for n, c in enumerate(factors))
    if cubic:
        found = torch.where(whole == 0, 0.0, q * torch.exp2(whole - 15))
    else:
        found = q * torch.where(whole == 0, (m - 1) * 2.0**-14, m * torch.exp2(whole - 15))
    return found.half().float()


def _half_parts(s: Tensor, base: Tensor, unit: float, columns: int, share: int) -> tuple[Tensor, ...]:
    from flashbench.kernels import _hopper_exp2 as fast

    x = s * unit + base[:, None]
    register = 2 * (torch.arange(columns) // 8) + (torch.arange(64)[:, None] % 16 >= 8)
    emulated = torch.tensor([n in fast._spread(share) for n in range(8)])[register % 8]
    p = torch.where(emulated, _power(x, True), torch.exp2(x))
    sums = p.reshape(64, columns // 8, 4, 2).sum((1, 3)).as_subclass(Typed)
    return p.half(), p, sums


def _eight_words(
    s: Tensor, base: Tensor, factor: float, columns: int, share: int, e5m2: bool
) -> tuple[Tensor, Tensor]:
    from flashbench.kernels import _hopper_fp8_kernels

    x = s * factor + base[:, None]
    emulated = torch.arange(columns) % 16 >= 8 if share else torch.zeros(columns, dtype=torch.bool)
    p = torch.where(emulated, _power(x, False), torch.exp2(x))
    sums = p.reshape(64, columns // 8, 4, 2).sum((1, 3)).as_subclass(Typed)
    return _hopper_fp8_kernels.packed(p, e5m2, columns), sums


def _scalar(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function of tensors that takes Python's numbers, too."""

    def call(*args: Any) -> Any:
        if any(isinstance(x, Tensor) for x in args):
            return function(*args)
        return function(*map(torch.tensor, args)).item()

    return call


def _over(row: Tensor, like: Tensor) -> Tensor:
    """A number per row and thread over the columns that the thread has."""
    return row.repeat_interleave(2, 1).repeat(1, like.shape[1] // 8).as_subclass(Typed)


def _guarded(
    s: Tensor, total: Tensor, top: Tensor, factor: float, first: bool, columns: int, share: int, e5m2: bool
) -> tuple[Tensor, ...]:
    """``_hopper_guard.words``."""
    from flashbench.kernels import _hopper_fp8_kernels
    from flashbench.kernels import _hopper_guard as guard

    def computed(base: Tensor) -> tuple[Tensor, Tensor]:
        x = s * factor + _over(base, s)
        emulated = torch.arange(columns) % 16 >= 8 if share else torch.zeros(columns, dtype=torch.bool)
        p = torch.where(emulated, _power(x, False), torch.exp2(x))
        p = torch.where(x > 16, math.inf, p)  # fp16's largest
        return p, p.reshape(-1, columns // 8, 4, 2).sum((1, 3))

    p, sums = computed(guard.SHIFT - top)
    limit = guard.LIMIT["e5m2x2" if e5m2 else "e4m3x2"]
    most = (guard.GROWN * total).clamp(2 ** (guard.SHIFT + guard.NEAR), limit)
    found = (~(sums <= most)).reshape(-1, 64).any(1).repeat_interleave(16)[:, None] | first
    highest = s.amax(1, keepdim=True) * factor
    close = (1 + (s * factor - highest) / 4).nan_to_num(0).clamp(0, 1)
    close = close.reshape(-1, columns // 8, 4, 2).sum((1, 3)).amax(1, keepdim=True)
    lift = (guard.ROOM - close.log2()).floor().clamp(0, guard.LIFT)
    new = torch.where(found & ~(highest - top <= guard.NEAR), highest - lift, top)
    alpha = torch.where((new == top) | (top == -math.inf), 1.0, torch.exp2(top - new))
    again, more = computed(guard.SHIFT - torch.where(new == -math.inf, 0.0, new))
    p, sums = torch.where(found, again, p), torch.where(found, more, sums)
    words = torch.cat([_hopper_fp8_kernels.packed(rows, e5m2, columns) for rows in p.split(64)])
    return words, sums, new, alpha


def _guarded16(
    s: Tensor, top: Tensor, total: Tensor, unit: float, first: float, columns: int, half: torch.dtype,
    parts: int, hot: bool,
) -> tuple[Tensor, ...]:  # fmt: skip
    """``_hopper_guard16.softmax``. hot: as of no tile that is the first."""
    from flashbench.kernels import _hopper_guard16 as guard

    assert not (hot and (first or top.isneginf().any()))
    words: list[Tensor] = []
    alpha, sums = torch.ones_like(top), torch.zeros_like(top)
    for part in s.split(columns // parts, 1):

        def computed(top: Tensor, part: Tensor = part) -> tuple[Tensor, Tensor]:
            p = torch.exp2(part * unit - _over(top, part))
            return p, p.reshape(len(p), -1, 4, 2).sum((1, 3))

        p, own = computed(top)
        found = (~(own <= guard.LIMIT)).reshape(-1, 64).any(1).repeat_interleave(16)[:, None]
        found |= bool(first) and not words
        highest = (part.amax(1, keepdim=True) * unit - guard.SHIFT).clamp(min=guard.LEAST)
        new = torch.where(found & ~(highest - top <= guard.NEAR), highest, top)
        turned = torch.where((new == top) | (top == -math.inf), 1.0, torch.exp2(top - new))
        p, own = (torch.where(found, *both) for both in zip(computed(new), (p, own), strict=True))
        words = [*((x * _over(turned, x)).to(half) for x in words), p.to(half)]
        alpha, sums, top = alpha * turned, sums * turned + own, new
    return torch.cat(words, 1), alpha, top, (total * alpha + sums).as_subclass(Typed)


def _module(name: str, **names: Any) -> None:
    module = types.ModuleType(name)
    module.__dict__.update(names, __path__=[])
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def _itself(x: Any = None, **options: Any) -> Any:
    return x if x is not None else _itself


def _holds(condition: bool, message: str) -> None:
    assert condition, message


def install(module: str) -> Any:
    """The module of a kernel over this model, in a process that has not imported Triton."""
    gluon = "triton.experimental.gluon"
    for name in ("triton", "triton.experimental"):
        _module(name)
    _module(gluon, jit=_itself)
    _module(
        f"{gluon}.language", constexpr=_itself, float32=torch.float32, int64=torch.int64, int32=torch.int32,
        NVMMADistributedLayout=Layout, NVMMASharedLayout=Layout, SliceLayout=Layout, DotOperandLayout=Layout,
        BlockedLayout=Layout, SwizzledSharedLayout=Layout,
        num_programs=lambda axis: _LAUNCH["programs"], program_id=lambda axis: _LAUNCH["program"],
        load=_load_where, store=_store_where, maximum=max, minimum=min,
        zeros=lambda shape, dtype, layout: torch.zeros(shape, dtype=dtype),
        arange=lambda start, end, layout: torch.arange(start, end), where=_scalar(torch.where),
        exp2=_scalar(torch.exp2), DistributedLinearLayout=Layout,
        convert_layout=lambda x, layout, assert_trivial=False: x.clone(), reshape=torch.reshape,
        permute=torch.permute, split=lambda x: x.unbind(-1), join=lambda x, y: torch.stack((x, y), -1),
        float8e5=torch.float8_e5m2,
        static_range=range, static_assert=_holds, max=torch.amax, sum=torch.sum, log2=torch.log2,
        full=lambda shape, x, dtype, layout: torch.full(shape, x, dtype=dtype).as_subclass(Typed),
        broadcast=torch.broadcast_tensors,
        allocate_shared_memory=_allocate, warp_specialize=_specialize,
    )  # fmt: skip
    _module(f"{gluon}.language._core", builtin=_itself, _unwrap_if_constexpr=_itself)
    _module(f"{gluon}.language.nvidia")
    _module(
        f"{gluon}.language.nvidia.hopper",
        fence_async_shared=lambda: None,
        mbarrier=types.SimpleNamespace(
            MBarrierLayout=BarrierLayout, init=lambda bar, count: setattr(bar, "count", count), wait=_wait,
            arrive=_arrive, expect=lambda bar, more: bar.change(1, more),
        ),
        tma=types.SimpleNamespace(async_load=_load, async_store=_store, store_wait=_store_wait),
        warpgroup_mma=_multiply, warpgroup_mma_wait=_multiply_wait,
    )  # fmt: skip
    _module("triton.language", PropagateNan=types.SimpleNamespace(ALL=None))
    _module("triton._C")
    _module("triton._C.libtriton", ir=None)
    _module("triton.runtime")
    _module("triton.runtime.jit", constexpr_function=_itself)
    from flashbench.kernels import (
        _hopper_asm,
        _hopper_backward_tiles,
        _hopper_exp2,
        _hopper_guard,
        _hopper_guard16,
        _hopper_tiles,
    )

    _hopper_asm.mask, _hopper_asm.mask_before = _mask, _mask_before
    _hopper_asm.log2, _hopper_asm.inverse = _scalar(torch.log2), torch.reciprocal
    _hopper_asm.arrive, _hopper_asm.sync = _named_arrive, _named_sync
    _hopper_asm.by_warpgroup = _by_warpgroup
    _hopper_asm.meet, _hopper_asm.meet_alone = _meet, _meet_alone
    _hopper_asm.turn_pass = _turn_pass
    _hopper_backward_tiles.tma_add = _add
    _hopper_backward_tiles.retiled = lambda memory, shape, layout, dtype=None: Shared(
        memory.data.view(dtype or memory.dtype).view(shape)
    )
    _hopper_asm.rescale = lambda acc, alpha, columns: acc * alpha[:, None]
    _hopper_asm.four, _hopper_asm.taken_apart = _four, _taken_apart
    _hopper_asm.known = lambda words, columns: words
    _hopper_asm.normalise = lambda acc, factor, columns: torch.where(
        factor[:, None] != 0, acc * factor[:, None], 0.0
    )
    _hopper_asm.normalise_and_add = lambda acc, factor, more, columns: torch.where(
        factor[:, None] != 0, acc * factor[:, None] + more, 0.0
    )
    _hopper_exp2.row_max = lambda s, columns: s.amax(1)
    _hopper_exp2.half_parts, _hopper_exp2.eight_words = _half_parts, _eight_words
    _hopper_exp2.joined = lambda first, second, columns, share, layout: first
    _hopper_guard.words, _hopper_guard.over = _guarded, _over
    _hopper_guard.rescale = lambda acc, alpha, columns: acc * _over(alpha, acc)
    _hopper_guard16.softmax = _guarded16
    partial_sums = _hopper_tiles.partial_sums
    _hopper_tiles.partial_sums = lambda p, columns: partial_sums(p, columns).as_subclass(Typed)
    return importlib.import_module(f"flashbench.kernels.{module}")


def launch(kernel: Any, programs: int, *args: Any, warpgroups: int = 1) -> None:
    """Run the programs one after the other; warpgroups: of the kernel's first role."""
    for program in range(programs):
        _LAUNCH.update(programs=programs, program=program, warpgroups=warpgroups)
        _MBARRIERS.clear()
        kernel(*args)
