"""Whether torch would do nothing with an operator but run it, so that a call may leave its dispatcher out.

A call of an operator that is written in Python goes through the dispatcher for autograd and again for the
kernel, with all arguments packed and unpacked each time. That costs the host more than the whole call of a
kernel that is made ready (_hopper_ready.py). It is what everything in torch that follows, records or
transforms calls hooks into; each of those shows in the state of the thread or in the tensors.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch._C import _functorch
from torch.autograd import forward_ad, profiler

_NEEDED = (
    "_dispatch_keys",
    "_dispatch_tls_local_include_set",
    "_dispatch_tls_is_dispatch_key_excluded",
    "_len_torch_function_stack",
)
KNOWN = all(hasattr(torch._C, name) for name in _NEEDED) and hasattr(profiler, "_is_profiler_enabled")
"""Whether this torch can be asked; in one that cannot nothing counts as plain."""

if KNOWN:
    _keys, _included, _excluded, _modes = (getattr(torch._C, name) for name in _NEEDED)
    _compiling = torch.compiler.is_compiling


def plain(tensors: tuple[Any, ...]) -> bool:
    """Whether a call with these arguments, tensors or None, is a plain one of eager mode.

    It is not where something compiles, exports or traces it, under a mode of ``__torch_dispatch__`` (fake
    tensors, counters) or ``__torch_function__`` (``torch.device`` as a context is one), in a transform of
    ``torch.func``, while a profiler runs, which is to show the operator, and of tensors of a subclass or that
    are no ordinary ones on a CPU or in CUDA: lazily negated, wrapped by a transform, sparse.
    """
    if not KNOWN or _compiling() or _modes() or profiler._is_profiler_enabled:
        return False
    if _included() not in _states():
        return False
    ordinary: tuple[Any, ...] = ()
    for x in tensors:
        if x is None:
            continue
        if type(x) is not Tensor:
            return False
        ordinary = ordinary or _ordinary(x.is_cuda)
        if _keys(x) not in ordinary:
            return False
    return True


def refuse_forward_mode(*tensors: Any) -> None:
    """Raise NotImplementedError for a tensor with a tangent, in a transform of ``torch.func``, too.

    Operators that are written in Python drop it in silence where nothing requires a gradient. There are none
    where ``forward_ad._current_level`` is below 0, which callers that are to be fast look at themselves.
    """
    if forward_ad._current_level >= 0 and any(isinstance(x, Tensor) and _has_tangent(x) for x in tensors):
        raise NotImplementedError(
            "forward-mode derivatives (torch.func.jvp, torch.autograd.forward_ad) are not supported by the"
            " bundled kernels; accepted: those of torch.autograd.grad and backward"
        )


def _has_tangent(x: Tensor) -> bool:
    """Whether it has one, or may have: of an outer ``jvp``, which cannot be asked, all that it wraps does."""
    if _functorch.is_batchedtensor(x):
        return _has_tangent(_functorch.get_unwrapped(x))
    if not _functorch.is_gradtrackingtensor(x):
        return forward_ad.unpack_dual(x).tangent is not None
    level, stack = _functorch.maybe_get_level(x), _functorch.get_interpreter_stack() or []
    if any(one.level() == level and one.key() == _functorch.TransformType.Jvp for one in stack):
        return stack[-1].level() != level or forward_ad.unpack_dual(x).tangent is not None
    return _has_tangent(_functorch.get_unwrapped(x))


def below_autograd() -> bool:
    """Whether torch has autograd left out, as in the kernel of an operator."""
    left_out: bool = _excluded(torch._C.DispatchKey.AutogradOther)
    return left_out


@lru_cache(maxsize=1)
def _states() -> tuple[Any, Any]:
    """What a thread has the dispatcher go through for every tensor: as ever, and in inference mode."""
    key = torch._C.DispatchKey
    inference = torch._C.DispatchKeySet(key.BackendSelect)
    return inference.add(key.ADInplaceOrView), inference


@lru_cache(maxsize=2)
def _ordinary(on_gpu: bool) -> tuple[Any, Any]:
    """What it goes through for tensors in CUDA or on a CPU, and for those made in inference mode; asked in a
    plain state of the thread."""
    device, found = "cuda" if on_gpu else "cpu", []
    for inference in (False, True):
        with torch.inference_mode(inference):
            found.append(_keys(torch.empty(0, device=device)))
    return found[0], found[1]
