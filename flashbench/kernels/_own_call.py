"""The call of a function of somebody else's: its layout made beforehand, its first call watched, on copies.

What it does to its inputs shows on the copies, so that no other implementation ever sees it.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from flashbench.aside import stdout_to_stderr
from flashbench.declared import Stated, declares
from flashbench.errors import RAISED, SpecError, in_words
from flashbench.kernels import RENEW, WATCH, WRITES, Call, Misbehaviour, Refusal, _interpreter
from flashbench.kernels._backward import kept_graphs
from flashbench.kernels._inputs import Inputs
from flashbench.problem import LAYOUTS, Problem

if TYPE_CHECKING:
    from flashbench.kernels._own import Loaded


def prepare(own: Loaded, problem: Problem, inputs: Inputs) -> Call:
    """The call that is timed, after a first one on copies of the inputs that nobody times.

    Tensors are contiguous in the layout that the function declares, made here: bhsd (batch, heads, rows,
    columns), bshd (batch, rows, heads, columns), a packed batch without its leading 1 in bshd. Raises Refusal
    where it has no gradient, Misbehaviour for an o of another type, shape or dtype and for changed inputs.
    """
    _try(own, problem, inputs)
    _interpreter.watched()  # which its first call may have imported
    handed = _handed(own, problem, inputs)
    call = _call(own, problem, inputs, handed)
    setattr(call, WATCH, lambda: _changed(own, problem, inputs, handed))
    setattr(call, RENEW, lambda: _renew(own, problem, inputs, handed))
    return call


def within(own: Loaded, problem: Problem) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Its o of q, k, v inside a layer, unwatched: a contiguous copy in its layout is part of each call."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        inputs = Inputs(q=q, k=k, v=v, dout=q)
        return _call(own, problem, inputs, _handed(own, problem, inputs))()

    return attend


def stated(model: object, name: str, problem: Problem, pass_: str) -> Stated:
    """What a model of the author's own says, {} where that is none. name: of the implementation.

    Raises Misbehaviour where the model raises, and where it gives no bytes.
    """
    if not callable(model):
        return {}
    from flashbench import iomodel

    try:
        with stdout_to_stderr():
            found = model(problem, pass_)
    except RAISED as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f" ({Path(last.filename).name}:{last.lineno} in {last.name})"
        raise Misbehaviour(f"the io_model of {name} raised {in_words(error, 200)}{where}") from None
    try:
        return iomodel.stated_numbers(name, found)
    except SpecError as error:
        raise Misbehaviour(str(error)) from None


def _changed(
    own: Loaded, problem: Problem, inputs: Inputs, handed: tuple[Tensor, Tensor, Tensor]
) -> list[str]:
    """Which of the copies in its layout are not the inputs any more."""
    return [
        name
        for name, given in zip("qkv", handed, strict=True)
        if not _same(_theirs(own, problem, getattr(inputs, name)), given)
    ]


def _renew(own: Loaded, problem: Problem, inputs: Inputs, handed: tuple[Tensor, Tensor, Tensor]) -> None:
    """Give the copies in its layout what the inputs hold by now."""
    with torch.no_grad():
        for name, given in zip("qkv", handed, strict=True):
            x = _theirs(own, problem, getattr(inputs, name))
            if x.data_ptr() != given.data_ptr():
                given.copy_(x)


def _theirs(own: Loaded, problem: Problem, x: Tensor) -> Tensor:
    """A view of an input in the function's layout."""
    swapped = own.declared.layout != LAYOUTS[0]
    x = x.transpose(1, 2) if swapped else x
    return x[0] if swapped and problem.lengths else x


def _handed(own: Loaded, problem: Problem, inputs: Inputs) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v as the function gets them."""
    q, k, v = (_theirs(own, problem, x).contiguous() for x in (inputs.q, inputs.k, inputs.v))
    return q, k, v


def _call(own: Loaded, problem: Problem, inputs: Inputs, handed: tuple[Tensor, Tensor, Tensor]) -> Call:
    q, k, v = handed
    function, arguments = own.function, own.arguments(problem, inputs)
    packed = bool(problem.lengths)
    if own.declared.layout == LAYOUTS[0]:
        return lambda: function(q, k, v, **arguments)  # type: ignore[no-any-return]

    def call() -> Tensor:
        o: Any = function(q, k, v, **arguments)
        if not isinstance(o, Tensor) or o.ndim != q.ndim:
            return o  # type: ignore[no-any-return]
        return (o[None] if packed else o).transpose(1, 2)

    return call


def _try(own: Loaded, problem: Problem, inputs: Inputs) -> None:
    """Call it once on copies. Raises as ``prepare``."""
    grad = inputs.q.requires_grad
    copies = replace(inputs, **{name: x.detach().clone() for name, x in _tensors(inputs).items()})
    copies = copies.detached(grad=grad)
    with torch.set_grad_enabled(grad), kept_graphs() if grad else nullcontext():
        handed = _handed(own, problem, copies)
        o = _call(own, problem, copies, handed)()
        if reason := _why_no_output(o, problem, inputs):
            raise Misbehaviour(f"{reason}{_hint(own, o, inputs)}")
        if grad and not o.requires_grad:
            raise Refusal("its o has no gradient: it has a forward only")
        if grad:
            _backward(o, copies)
    before = _tensors(inputs) | dict(zip("qkv", _handed(own, problem, inputs), strict=True))
    after = _tensors(copies) | dict(zip("qkv", handed, strict=True))
    for name, x in before.items():
        if not _same(x, after[name]):
            raise Misbehaviour(WRITES.format(name))


def _backward(o: Tensor, inputs: Inputs) -> None:
    """Raises Misbehaviour where o has no gradient of an input: whoever trains with it would not learn."""
    gradients = torch.autograd.grad(o, inputs.leaves, inputs.dout, allow_unused=True, retain_graph=True)
    missing = [name for name, x in zip(inputs.differentiable(), gradients, strict=True) if x is None]
    if missing:
        raise Misbehaviour(f"its o has no gradient of {', '.join(missing)}")


def _tensors(inputs: Inputs) -> dict[str, Tensor]:
    names = ("q", "k", "v", "dout", "bias", "sinks", "alibi_slopes", "cu_seqlens_q", "cu_seqlens_k")
    return {name: x for name in names if (x := getattr(inputs, name)) is not None}


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit; a NaN is itself."""
    one, other = one.detach(), other.detach()
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    return bool(torch.equal(one.view(integers), other.view(integers)))


def _why_no_output(o: Any, problem: Problem, inputs: Inputs) -> str | None:
    if not isinstance(o, Tensor):
        return f"it returns {type(o).__name__}; wanted: o alone, a tensor"
    shape = tuple(inputs.dout.shape)
    if tuple(o.shape) != shape:
        return f"its o has the shape {tuple(o.shape)} in the order (b, h, s, d); wanted: {shape}"
    if o.dtype != inputs.q.dtype or o.device != inputs.q.device:
        return f"its o is {o.dtype} on {o.device}; wanted: {inputs.q.dtype} on {inputs.q.device}"
    return None


def _hint(own: Loaded, o: Any, inputs: Inputs) -> str:
    """What may be behind a shape that is wrong."""
    if isinstance(o, Tensor) and o.ndim == 4 and o.transpose(1, 2).shape == inputs.dout.shape:
        other = LAYOUTS[own.declared.layout == LAYOUTS[0]]
        return f"; if it wants the layout {other}: {declares(other)}"
    return ""
