"""What is behind an object that can be called: its parameters, its declaration and its file are those of the
function that does the work, not those of a wrapper.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

MOST = 16
"""Wrappers around one another that are looked through."""


def layers(function: Callable[..., Any]) -> Iterator[Any]:
    """The object and what it calls in turn, outermost first.

    Looked through: ``functools.partial``, torch's modules and what ``torch.compile`` makes of them and of
    functions, wrappers that say what they wrap, and objects with a ``__call__``.
    """
    found: Any = function
    for _ in range(MOST):
        if found is None:
            return
        yield found
        found = _within(found)


def signature(function: Callable[..., Any]) -> inspect.Signature:
    """The parameters that a call of it has. Raises TypeError or ValueError where they cannot be read."""
    return inspect.signature(_plain(function))


def _plain(function: Any) -> Any:
    """What ``inspect`` reads as it stands: of a module its ``forward``, also inside of a partial."""
    if isinstance(function, partial):
        return partial(_plain(function.func), *function.args, **function.keywords)
    return _plain(_behind(function)) if _is_module(function) else function


def _within(function: Any) -> Any:
    if isinstance(function, partial):
        return function.func
    if _is_module(function):
        return _behind(function)
    wrapped = getattr(function, "__wrapped__", None)
    if wrapped is not None or inspect.isroutine(function) or inspect.isclass(function):
        return wrapped
    call = getattr(function, "__call__", None)  # noqa: B004
    return call if inspect.ismethod(call) else None


def _behind(module: Any) -> Any:
    """What a module of torch runs: the module that was compiled, or its forward."""
    compiled = module._modules.get("_orig_mod")
    return module.forward if compiled is None else compiled


def _is_module(function: Any) -> bool:
    torch = sys.modules.get("torch")  # whoever has a module has imported it
    return torch is not None and isinstance(function, torch.nn.Module)
