"""Kernels made ready for a layout, whose launches cost the host little. Import through ``_triton.load``.

For each launch Triton goes over all arguments in Python, to find the compiled kernel and to make TMA
descriptors; for short sequences that takes longer than the kernel. Here

- a kernel is made ready once for tensors of one layout. What tells it from others is the key of the plan that
  holds it: shapes, strides, dtypes, the device and options. The compiled kernel, its grid, all integers and
  the descriptors but for their addresses follow from those;
- what changes from call to call is addresses, scales and the stream. They are read anew at each launch, so
  that it does not matter which tensors are freed, overlap or lie where others did;
- a descriptor follows from its layout and an address, whatever lies there: the latest are kept.

Triton's own launcher is handed the rest. Where a hook is to be told of launches, or an address is none that
the kernel was compiled for, Triton launches as ever.

A CUDA graph has the address of a kernel's schedule, too, and may be replayed after the plan that holds the
schedule was dropped for later ones: of launches that are captured it is kept for good.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache, partial
from inspect import signature
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from triton import knobs
from triton.backends.nvidia.driver import make_tensordesc_arg
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.runtime import driver

from flashbench.kernels._call import Launch, rehearsing

KEPT = 64
"""Descriptors that are kept of each argument, the latest ones."""
ALIGNED = 16
"""Triton compiles for addresses that are multiples of so many bytes, and apart for others."""
_OF_GRAPHS: dict[int, torch.Tensor] = {}
"""Schedules of launches that were captured, by address."""


class Ready:
    """A kernel for tensors of one layout; it is compiled once.

    boxes: of the first arguments, which are tensors or None: a descriptor without an address, None for one
    that the kernel takes as it is. fixed: the next arguments, integers, maybe a tensor before them; scales
    follow. constants: compile-time constants, in the order of the parameters. warps: of the kernel's first
    partition.
    """

    def __init__(
        self, name: str, kernel: Any, programs: int, boxes: tuple[TensorDescriptor | None, ...],
        fixed: tuple[Any, ...], constants: dict[str, Any], warps: int = 4,
    ) -> None:  # fmt: skip
        self.name, self.kernel, self.programs = name, kernel, programs
        self.boxes, self.fixed, self.constants = boxes, fixed, constants
        self.options = {**constants, "num_warps": warps, "enable_fp_fusion": True}
        self._known: _Known | None = None

    def run(self, tensors: tuple[torch.Tensor | None, ...], *scales: float) -> None:
        """As ``launch(…).run()``, which is made only where somebody wants to see it."""
        if rehearsing() or not self.programs or not self.start(tensors, scales):
            self.launch(tensors, *scales).run()

    def launch(self, tensors: tuple[torch.Tensor | None, ...], *scales: float) -> Launch:
        """Over tensors in the order of the boxes."""
        scales = tuple(map(float, scales))  # of an integer 1 Triton would make a constant
        args = *tensors, *self.fixed, *scales
        return ReadyLaunch(self.name, self.kernel, self.programs, args, self.options, self, tensors, scales)

    def keep(self) -> None:
        """For good, what a launch reads that no caller holds."""
        _OF_GRAPHS.update((x.data_ptr(), x) for x in self.fixed if isinstance(x, torch.Tensor))

    def start(self, tensors: tuple[torch.Tensor | None, ...], scales: tuple[float, ...]) -> bool:
        """Launch on the current device, which is the tensors', and stream; False where Triton is to do so."""
        if _capturing():
            self.keep()
        known = self._known or self._learnt(tensors, scales)
        if known is None or _hooked():
            return False
        args: list[Any] = []
        for x, descriptor in zip(tensors, known.descriptors, strict=True):
            address = None if x is None else x.data_ptr()
            if descriptor is not None:
                args += descriptor(address)
            elif address is None or address % ALIGNED == 0:
                args.append(address)
            else:
                return False
        stream = known.stream(known.device())
        known.launcher(stream, *known.head, *args, *known.fixed, *scales, *known.constants)
        return True

    def _learnt(self, tensors: tuple[torch.Tensor | None, ...], scales: tuple[float, ...]) -> _Known | None:
        """From the first launch that Triton compiles for addresses that are multiples of ``ALIGNED``."""
        for x, box in zip(tensors, self.boxes, strict=True):
            if x is not None and box is None and x.data_ptr() % ALIGNED:
                return None
        compiled = self.launch(tensors, *scales).compile()
        metas = iter(getattr(compiled.metadata, "tensordesc_meta", None) or ())
        launcher = _launcher(compiled, tuple(0 if box is None else len(box.shape) for box in self.boxes))
        self._known = _Known(
            compiled,
            partial(launcher, self.programs, 1, 1),
            tuple(
                None if box is None else lru_cache(KEPT)(partial(_described, box, next(metas)))
                for box in self.boxes
            ),
            tuple(x.data_ptr() if isinstance(x, torch.Tensor) else x for x in self.fixed),
            (compiled.function, compiled.packed_metadata, None, None, None),
            tuple(self.constants.values()),
            driver.active.get_current_stream,
            driver.active.get_current_device,
        )
        return self._known


class _Known(NamedTuple):
    """What launches of a compiled kernel share.

    launcher: with the grid. descriptors: by address, what the launcher takes for one. head: what it takes
    after the stream: the function, its metadata, nothing of hooks. fixed: with addresses for tensors.
    stream: the current one of a device; device: the current one.
    """

    compiled: Any
    launcher: Any
    descriptors: tuple[Any, ...]
    fixed: tuple[Any, ...]
    head: tuple[Any, ...]
    constants: tuple[Any, ...]
    stream: Any
    device: Any


@dataclass(frozen=True)
class ReadyLaunch(Launch):
    """A launch of a kernel that is made ready; args: tensors where the kernel takes descriptors of them."""

    ready: Ready
    tensors: tuple[torch.Tensor | None, ...]
    scales: tuple[float, ...]

    def start(self) -> None:
        """Launch on the current device, which is the tensors', and stream."""
        if not self.ready.start(self.tensors, self.scales):
            self.described().start()

    def compile(self) -> Any:
        """Compile only; arguments may be meta tensors."""
        return self.described().compile()

    def described(self) -> Launch:
        """The same as Triton launches it, with descriptors."""
        boxes = self.ready.boxes
        first = (x if box is None else _of(box, x) for x, box in zip(self.args, boxes, strict=False))
        args = *first, *self.args[len(boxes) :]
        return Launch(self.name, self.kernel, self.programs, args, self.options)


class _At(NamedTuple):
    """As much of a tensor as a descriptor is made of."""

    address: int

    def data_ptr(self) -> int:
        return self.address


def _of(box: TensorDescriptor, base: Any) -> TensorDescriptor:
    """A copy with an address, as one that is kept must not keep a tensor alive."""
    own = object.__new__(TensorDescriptor)
    own.__dict__.update(box.__dict__, base=base)
    return own


def _described(box: TensorDescriptor, meta: Any, address: int) -> tuple[Any, ...]:
    """What the launcher takes in place of a descriptor: the driver's form of it, its shape and strides."""
    return tuple(make_tensordesc_arg(_of(box, _At(address)), meta, *_MORE))


_MORE = (None,) * (len(signature(make_tensordesc_arg).parameters) - 2)
"""From Triton 3.8 on, of im2col."""


@lru_cache(maxsize=256)
def _launcher(compiled: Any, ranks: tuple[int, ...]) -> Any:
    """Triton's launcher of the kernel, taking descriptors that are made; its own makes them each time.

    ranks: of descriptors, 0 of other arguments. To Triton it is that of a kernel whose signature has the
    parts of each descriptor, which is what it expands a signature to.
    """
    own = compiled.run  # loads the kernel
    if not any(ranks):
        return own
    kinds = list(compiled.src.signature.values())
    parts = [
        part
        for kind, rank in zip(kinds, (*ranks, *[0] * (len(kinds) - len(ranks))), strict=True)
        for part in (("nvTmaDesc", *["i32"] * rank, *["i64"] * rank) if rank else (kind,))
    ]
    src = SimpleNamespace(fn=compiled.src.fn, constants={}, signature=dict(enumerate(parts)))
    return driver.active.launcher_cls(src, compiled.metadata._replace(tensordesc_meta=[]))


def _capturing() -> bool:
    """Whether the current stream is being captured; torch without CUDA has no answer."""
    return bool(torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing())


def _hooked() -> bool:
    """Whether a profiler, say, is to be told of launches."""
    of = knobs.runtime
    return _called(of.launch_enter_hook) or _called(of.launch_exit_hook)


def _called(hook: Any) -> bool:
    return hook is not None and bool(getattr(hook, "calls", True))
