"""The key of a kernel in Triton's cache, made the same in every process.

Triton's key of a function takes in the globals of the functions that it calls, but of those only whose own
key was made before (triton/runtime/jit.py, ``DependenciesFinder._update_hash``, in 3.6). So it depends on
what else the process has launched, and a kernel compiled in a worker would be compiled again by its launch.
With keys made from the called to the calling it depends on the kernel alone.
"""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from typing import Any

from triton.runtime.jit import JITCallable


def settle(kernel: Any) -> None:
    """Make the key of a kernel, after those of all that it calls. Does nothing for an interpreted one."""
    if getattr(kernel, "hash", "") is not None:
        return
    for one in _called(kernel):
        settle(one)
    kernel.cache_key  # noqa: B018 - making it is what reading does


def _called(kernel: Any) -> Iterator[Any]:
    names = {**kernel.__globals__, **inspect.getclosurevars(kernel.fn).nonlocals}
    for node in ast.walk(kernel.parse()):
        if isinstance(node, ast.Name | ast.Attribute):
            value = _value(node, names)
            if isinstance(value, JITCallable):
                yield value


def _value(node: ast.expr, names: dict[str, Any]) -> Any:
    """What a dotted name stands for, None where it is not one or is local."""
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):
        return getattr(_value(node.value, names), node.attr, None)
    return None
