"""What a Triton kernel really loads and stores, per argument: counted in Triton's interpreter, on a CPU.

    launches = trace(call)
    launches[0].arguments["K"].loaded_bytes

Every load, store and atomic of every program is seen with its addresses and its mask; a masked lane
moves nothing. Nothing is estimated, so this is what a model of requested bytes is held to.
"""

from __future__ import annotations

import inspect
import math
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, NamedTuple

from flashbench.errors import UnavailableError

OUTSIDE = ""
"""The argument to which an address in no tensor of the launch counts: an access out of bounds."""

_BUILDER = {
    "create_masked_load": ("ptrs", "mask"),
    "create_masked_store": ("ptrs", "value", "mask"),
    "create_atomic_rmw": ("rmwOp", "ptr", "val", "mask"),
    "create_atomic_cas": ("ptr",),
    "create_dot": ("a", "b"),
    "create_exp": ("arg",),
    "create_exp2": ("arg",),
    "set_grid_idx": ("x", "y", "z"),
}
_HOOKS: dict[str, dict[str, tuple[str, ...]]] = {
    "InterpreterBuilder": _BUILDER,
    "GridExecutor": {"_init_args_hst": ("args_dev", "kwargs")},
    "Autotuner": {"_bench": ("args", "config")},
}
"""What of the interpreter is listened to, with the parameters that each begins with, and what of the
autotuner stands still meanwhile; the same in every Triton from 3.6 on. Plain loads and stores, block
pointers, tensor descriptors (also gathers and scatters) and atomic loads and stores end in masked loads and
stores there, so they are seen too."""

_ONE_AT_A_TIME = threading.RLock()
"""Held while the interpreter, of which a process has one, is listened to: other threads wait their turn."""


@dataclass
class Moved:
    """What a launch moved of one argument, over all its programs.

    loaded, stored, atomic (added, exchanged or compared): elements, each as often as it was moved; the
    same in bytes, of the width of the access, which is not the tensor's where a kernel recasts a pointer.

    masked: lanes of loads, stores and atomics that moved nothing, by the argument of the same
    access's other lanes; of an access with no other lanes, by the argument that its addresses lie in.
    """

    loaded: int = 0
    stored: int = 0
    atomic: int = 0
    masked: int = 0
    loaded_bytes: int = 0
    stored_bytes: int = 0
    atomic_bytes: int = 0

    @property
    def masked_share(self) -> float:
        """Masked lanes over all lanes; 0 where nothing was accessed."""
        lanes = self.loaded + self.stored + self.atomic + self.masked
        return self.masked / lanes if lanes else 0.0


@dataclass
class Launch:
    """One kernel launch. arguments: what was moved, by the name of the tensor argument, untouched ones too.

    A tensor descriptor has its argument's name, a tensor within a tuple ``NAME[index]``. An address that
    two arguments hold counts to the first of them. flops: of the matrix products.
    exps: elements whose exponential (exp or exp2) was taken. programs: program instances that ran.
    """

    kernel: str
    arguments: dict[str, Moved] = field(default_factory=dict)
    flops: int = 0
    exps: int = 0
    programs: int = 0


def trace(call: Callable[[], object]) -> tuple[Launch, ...]:
    """Run the call and return its launches in order.

    A kernel under ``triton.autotune`` runs with the first of its configurations that its own pruning keeps,
    as nothing can be timed here; it stays with it in this process. A trace within a trace counts for both;
    one in another thread waits until this one has ended.

    Raises UnavailableError where this process does not interpret Triton, or interprets with a Triton
    whose inside is unknown here.
    """
    recorder = _Recorder()
    with _ONE_AT_A_TIME, _listening(_interpreter(), recorder):
        call()
    return tuple(recorder.launches)


def why_unavailable() -> str | None:
    """Why nothing can be traced in this process, one sentence, or None."""
    try:
        _interpreter()
    except UnavailableError as error:
        return str(error)
    return None


def _interpreter() -> Any:
    """Triton's interpreter module. Raises UnavailableError."""
    language = sys.modules.get("triton.language")
    if language is None or type(getattr(language, "cdiv", None)).__name__ != "InterpretedFunction":
        raise UnavailableError(
            "trace: triton does not interpret in this process; set TRITON_INTERPRET=1 before it starts"
        )
    from triton.runtime import autotuner, interpreter

    for owner, methods in _HOOKS.items():
        home = autotuner if owner == "Autotuner" else interpreter
        for name, begins in methods.items():
            if problem := _why_unknown(getattr(getattr(home, owner, None), name, None), begins):
                import triton

                raise UnavailableError(
                    f"trace: triton {triton.__version__} has {problem} {owner}.{name}; install triton 3.6,"
                    " which is tested, or a newer flashbench"
                )
    return interpreter


def _why_unknown(method: Any, begins: tuple[str, ...]) -> str | None:
    """What is wrong with a method of the interpreter, or None."""
    if method is None:
        return "no"
    named = tuple(inspect.signature(method).parameters)[1 : 1 + len(begins)]
    return None if named == begins else f"another kind ({', '.join(named)}) of"


class _Span(NamedTuple):
    """The addresses of one argument: first, one past the last, and all of them where others lie between."""

    name: str
    first: int
    stop: int
    exact: Any = None

    def holds(self, addresses: Any) -> Any:
        """Which of the addresses are its own."""
        import numpy as np

        if self.exact is not None:
            return np.isin(addresses, self.exact)
        return (addresses >= self.first) & (addresses < self.stop)


class _Recorder:
    """Collects launches; ``launch`` begins one, the others add to the last."""

    def __init__(self) -> None:
        self.launches: list[Launch] = []
        self._spans: list[_Span] = []

    def launch(self, kernel: str, tensors: Mapping[str, Any]) -> None:
        """A launch begins, with its tensor arguments as the programs see them."""
        self._spans = _spans(tensors)
        self.launches.append(Launch(kernel, {name: Moved() for name in tensors}))

    def access(self, pointers: Any, mask: Any, kind: str) -> None:
        """Addresses that are loaded, stored or updated (kind: a field of Moved) where the mask is true."""
        import numpy as np

        addresses = np.asarray(pointers.data)
        lanes, left = addresses.size, addresses.ravel()
        if mask is not None:
            left = addresses[np.broadcast_to(np.asarray(mask.data, dtype=bool), addresses.shape)].ravel()
        masked, owner = lanes - left.size, ""
        for span in self._spans:
            if not left.size:
                break
            mine = span.holds(left)
            count = int(mine.sum())
            owner = owner or (span.name if count else "")
            self._add(span.name, kind, count, pointers)
            left = left[~mine]
        self._add(OUTSIDE, kind, left.size, pointers)
        if masked:
            self._add(owner or self._owner(addresses), "masked", masked, pointers)

    def _owner(self, addresses: Any) -> str:
        """The argument that the first of the addresses lies in, of an access whose every lane is masked."""
        first = addresses.ravel()[:1]
        return next((span.name for span in self._spans if span.holds(first).any()), OUTSIDE)

    def _add(self, name: str, kind: str, count: int, pointers: Any) -> None:
        if count:
            moved = self.launches[-1].arguments.setdefault(name, Moved())
            setattr(moved, kind, getattr(moved, kind) + count)
            if kind != "masked":
                width = max(1, pointers.get_element_ty().primitive_bitwidth // 8)
                setattr(moved, f"{kind}_bytes", getattr(moved, f"{kind}_bytes") + count * width)

    def product(self, result: Any, inner: int) -> None:
        """A matrix product of two tiles, over so many products per element of the result."""
        self.launches[-1].flops += 2 * result.data.size * inner

    def exponential(self, x: Any) -> None:
        """Exponentials of a tile."""
        self.launches[-1].exps += x.data.size

    def program(self) -> None:
        """A program instance begins."""
        self.launches[-1].programs += 1


def _spans(tensors: Mapping[str, Any]) -> list[_Span]:
    """The spans of the arguments; exact ones where two of them overlap, such as slices of one tensor."""
    spans = []
    for name, tensor in tensors.items():
        reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
        first = tensor.data_ptr()
        size = (reach + 1) * tensor.element_size() if math.prod(tensor.shape) else 0
        spans.append(_Span(name, first, first + size))

    def overlaps(one: _Span) -> bool:
        return any(
            one.first < other.stop and other.first < one.stop for other in spans if other.name != one.name
        )

    return [span._replace(exact=_addresses(tensors[span.name])) if overlaps(span) else span for span in spans]


def _addresses(tensor: Any) -> Any:
    """The address of every element."""
    import numpy as np

    offsets = np.zeros((1,) * len(tensor.shape), dtype=np.uint64)
    for axis, (size, step) in enumerate(zip(tensor.shape, tensor.stride(), strict=True)):
        shape = [1] * len(tensor.shape)
        shape[axis] = size
        offsets = offsets + (np.arange(size, dtype=np.uint64) * np.uint64(step)).reshape(shape)
    return np.uint64(tensor.data_ptr()) + offsets.ravel() * np.uint64(tensor.element_size())


def _tensors(name: str, argument: Any) -> Iterator[tuple[str, Any]]:
    """The tensors of an argument of a launch: itself, that of a tensor descriptor, those of a tuple."""
    if hasattr(argument, "data_ptr"):
        yield name, argument
    elif hasattr(argument, "block_shape"):
        yield name, argument.base
    elif isinstance(argument, tuple):
        for index, part in enumerate(argument):
            yield from _tensors(f"{name}[{index}]", part)


@contextmanager
def _listening(interpreter: Any, recorder: _Recorder) -> Iterator[None]:
    """The interpreter tells the recorder of launches, accesses and products while this is open."""
    from triton.runtime.autotuner import Autotuner

    builder, executor = interpreter.InterpreterBuilder, interpreter.GridExecutor

    def launch(result: Any, self: Any, *_: Any) -> None:
        positional, named = result
        arguments = {**dict(zip(self.arg_names, positional, strict=False)), **named}
        tensors = [found for name, argument in arguments.items() for found in _tensors(name, argument)]
        recorder.launch(self.fn.__name__, dict(tensors))

    def load(_: Any, __: Any, pointers: Any, mask: Any, *___: Any) -> None:
        recorder.access(pointers, mask, "loaded")

    def store(_: Any, __: Any, pointers: Any, ___: Any, mask: Any, *____: Any) -> None:
        recorder.access(pointers, mask, "stored")

    def update(_: Any, __: Any, ___: Any, pointers: Any, ____: Any, mask: Any, *_____: Any) -> None:
        recorder.access(pointers, mask, "atomic")

    def exchange(_: Any, __: Any, pointers: Any, *___: Any) -> None:
        recorder.access(pointers, None, "atomic")

    def product(result: Any, _: Any, a: Any, *__: Any) -> None:
        recorder.product(result, a.data.shape[-1])

    def scaled(result: Any, _: Any, a: Any, __: Any, format_: Any, *rest: Any) -> None:
        packed = rest[4] and format_ == interpreter._ir.ScaleDotElemTypeTY.E2M1  # two to a byte
        recorder.product(result, a.data.shape[-1] * (2 if packed else 1))

    def exponential(_: Any, __: Any, x: Any, *___: Any) -> None:
        recorder.exponential(x)

    def program(*_: Any) -> None:
        recorder.program()

    listeners: tuple[Callable[..., None], ...] = (
        load, store, update, exchange, product, exponential, exponential, program,
    )  # fmt: skip
    with ExitStack() as stack:
        for name, listener in zip(_BUILDER, listeners, strict=True):
            stack.enter_context(_heard(builder, name, listener))
        if hasattr(builder, "create_dot_scaled"):  # not in 3.6, which does not interpret it
            stack.enter_context(_heard(builder, "create_dot_scaled", scaled))
        stack.enter_context(_heard(executor, "_init_args_hst", launch))
        stack.enter_context(_instead(Autotuner, "_bench", lambda *_, **__: [0.0]))  # all alike: the first
        yield


@contextmanager
def _heard(owner: Any, name: str, listener: Callable[..., None]) -> Iterator[None]:
    """Calls of a method go on as they are; then the listener gets the result and the arguments."""
    original = getattr(owner, name)

    def method(*arguments: Any, **named: Any) -> Any:
        result = original(*arguments, **named)
        listener(result, *arguments, *named.values())
        return result

    with _instead(owner, name, method):
        yield


@contextmanager
def _instead(owner: Any, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """The owner has this method in place of its own, with the signature of its own."""
    original = getattr(owner, name)
    setattr(owner, name, wraps(original)(method))
    try:
        yield
    finally:
        setattr(owner, name, original)
