"""Triton's interpreter at about twice its pace, with the same results; and whether it ran.

A kernel that is interpreted finds every function of ``triton.language`` replaced. Triton (3.6 to 3.9 at
least) does that at each call of a device function, of which a program makes hundreds, though it lasts for
the whole launch: as much time as all of the arithmetic.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, wraps
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashbench.kernels import Implementation, Target


@cache
def hasten() -> None:
    """Replace the language once a launch. Does nothing where this Triton has no such step."""
    from triton import language
    from triton.runtime import interpreter

    step = getattr(interpreter, "_patch_lang", None)
    if step is not None and hasattr(interpreter, "_LangPatchScope"):
        interpreter._patch_lang = _once_a_launch(step, (language, language.core), interpreter._LangPatchScope)


def _once_a_launch(
    step: Callable[[Any], Any], modules: tuple[ModuleType, ...], nothing: Callable[[], Any]
) -> Callable[[Any], Any]:
    """The step for a function whose modules another one of the launch has not had replaced yet.

    A launch begins with a call whose result's ``restore`` ends it; those of device functions are not kept.
    """
    replaced: set[str] = set()

    @cache
    def seen(function: Any) -> frozenset[str]:
        return frozenset(one.__name__ for one in modules if one in function.__globals__.values())

    @wraps(step)
    def once(function: Any) -> Any:
        if replaced and seen(function) <= replaced:
            return nothing()
        begins = not replaced
        scope = step(function)
        replaced.update(seen(function))
        if begins:
            restore = scope.restore

            def end() -> None:
                replaced.clear()
                restore()

            scope.restore = end
        return scope

    return once


_LAUNCHES = [0]
"""By the interpreter, in this process since ``watched``."""
_COUNTS = "counts for flashbench"


def watched() -> bool:
    """Have the interpreter's launches counted from now on; False where none is known: nobody has imported it,
    or this Triton launches in another way.
    """
    executor: Any = getattr(sys.modules.get("triton.runtime.interpreter"), "GridExecutor", None)
    launch: Any = None if executor is None else vars(executor).get("__call__")
    if launch is None:
        return False
    if not hasattr(launch, _COUNTS):

        @wraps(launch)
        def counted(*args: Any, **options: Any) -> Any:
            _LAUNCHES[0] += 1
            return launch(*args, **options)

        setattr(counted, _COUNTS, True)
        executor.__call__ = counted
    return True


@contextmanager
def noticing() -> Iterator[Callable[[], bool]]:
    """Gives a function that says whether the interpreter has run a kernel since, whoever launched it.

    Who imports Triton meanwhile is noticed from the next ``watched`` on.
    """
    watched()
    before = _LAUNCHES[0]
    yield lambda: _LAUNCHES[0] > before


def computed(implementation: Implementation, target: Target, *, ran: bool) -> bool:
    """Whether the interpreter did what the implementation has computed. ran: as ``noticing`` told; of what
    somebody else wrote that alone counts, whatever stands in its module, where launches are known.
    """
    if implementation.origin is not None and watched():
        return ran
    return ran or implementation.interpreted(target)
