"""Triton's interpreter at about twice its pace, with the same results.

A kernel that is interpreted finds every function of ``triton.language`` replaced. Triton (3.6 to 3.9 at
least) does that at each call of a device function, of which a program makes hundreds, though it lasts for
the whole launch: as much time as all of the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, wraps
from types import ModuleType
from typing import Any


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
