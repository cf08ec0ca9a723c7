"""torch's scaled_dot_product_attention: what torch picks, and each of its backends by force."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from flashbench.kernels import Call, Implementation, Target, unsupported_features
from flashbench.problem import ALIGNMENTS, UNLIMITED, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

_BACKENDS = {
    "flash": "FLASH_ATTENTION",
    "cudnn": "CUDNN_ATTENTION",
    "efficient": "EFFICIENT_ATTENTION",
    "math": "MATH",
}
_RAN = (
    ("flash_attention", "flash"),
    ("cudnn_attention", "cudnn"),
    ("efficient_attention", "efficient"),
    ("scaled_dot_product", "other"),
)
"""A part of the aten operator that ran, and the backend it stands for; none of them is math."""

_ANY_MASK = frozenset({"bshd", "top-left", "window", "bias"})
TAKEN = {
    None: _ANY_MASK,
    "math": _ANY_MASK,
    "flash": frozenset({"bshd", "top-left"}),
    "cudnn": frozenset({"bshd", "top-left"}),
    "efficient": frozenset({"bshd", "top-left", "bias"}),
}
"""Features (``unsupported_features``) that each backend takes without a tensor made in every call."""


def _mask_kind(forced: str | None, problem: Problem, device_type: str) -> str:
    """How the call says its mask: torch's ``is_causal`` is top-left.

    ``bias``: the problem's, as an additive mask. ``lower-right``: torch's causal_lower_right bias, which
    the CUDA flash and efficient kernels know. ``dense``: a boolean mask, where they cannot run; made in
    prepare, since torch would otherwise build it from the bias in every call.
    """
    if problem.bias:
        return "bias"
    if not problem.masked:
        return "none"
    if problem.window != (UNLIMITED, UNLIMITED):
        return "dense"
    if problem.seqlen_q == problem.seqlen_k or problem.alignment != ALIGNMENTS[0]:
        return "is_causal"
    return "dense" if forced == "math" or device_type == "cpu" else "lower-right"


def _prepare(forced: str | None, problem: Problem, inputs: Inputs) -> Call:
    """The call of torch's attention; run it inside ``context(problem)``, which forces the backend.

    q (batch, num_heads, seqlen_q, head_dim), k and v (batch, num_kv_heads, seqlen_k, head_dim or
    head_dim_v); returns (batch, num_heads, seqlen_q, head_dim_v) in q's dtype.
    """
    import torch
    from torch.nn.attention.bias import causal_lower_right
    from torch.nn.functional import scaled_dot_product_attention

    from flashbench.kernels._terms import Terms

    q, k, v = inputs.q, inputs.k, inputs.v
    kind = _mask_kind(forced, problem, q.device.type)
    options: dict[str, Any] = {"is_causal": kind == "is_causal"}
    if kind == "lower-right":
        options["attn_mask"] = causal_lower_right(problem.seqlen_q, problem.seqlen_k)
    elif kind == "dense":
        rows, columns = (torch.arange(n, device=q.device) for n in (problem.seqlen_q, problem.seqlen_k))
        options["attn_mask"] = Terms(problem, inputs).visible(rows, columns)
    elif kind == "bias":
        options["attn_mask"] = inputs.bias
    if problem.group > 1:
        options["enable_gqa"] = True
    return partial(scaled_dot_product_attention, q, k, v, **options)


@contextmanager
def _context(forced: str | None, problem: Problem) -> Iterator[None]:
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from flashbench.kernels._precision import precision

    with precision(problem):
        if forced is None:
            yield
            return
        with sdpa_kernel(getattr(SDPBackend, _BACKENDS[forced])):
            yield


def _why_unavailable(forced: str | None, target: Target) -> str | None:
    if target.type == "cpu" and forced in ("cudnn", "efficient"):
        return f"torch's {forced} backend needs a GPU"
    return None


def _why_unsupported(forced: str | None, problem: Problem, pass_: str, target: Target) -> str | None:
    taken = TAKEN[forced]
    if pass_ == "fwd" or target.type == "cpu" or forced == "math":
        taken |= {"deterministic"}  # the fused backwards may add to dq with atomics
    if reason := unsupported_features(problem, taken):
        return reason
    if problem.rows_without_keys:
        return (
            f"{problem.rows_without_keys} query rows see no key (causal, seqlen_q > seqlen_k);"
            " torch returns NaN for them"
        )
    if problem.bias and problem.masked:
        return "torch takes a bias or a causal mask, not both; a sum of the two would be made in every call"
    if problem.bias[3:] == "1" and forced != "math":
        return f"bias {problem.bias!r} is broadcast over keys; torch's fused backends need each key's own"
    if problem.dtype == "tf32":
        if target.type != "cuda":
            return "TF32 products exist on NVIDIA GPUs only; fp32 runs here"
        if forced == "efficient":
            return "torch's efficient backend has no TF32 products; it splits fp32 into three of them"
    if forced in (None, "math"):
        return None  # both can fall back to, or are, plain tensor operations
    if forced == "cudnn" and _mask_kind(forced, problem, target.type) == "lower-right":
        return "torch's cuDNN backend aligns causal top-left; seqlen_q and seqlen_k must be equal"
    if forced == "flash" and target.type == "cpu":
        return _why_cpu_flash_refuses(problem)
    return _torchs_own_reason(forced, problem, pass_, target) if target.type == "cuda" else None


def _why_cpu_flash_refuses(problem: Problem) -> str | None:
    if problem.head_dim != problem.head_dim_v:
        return (
            "torch's flash backend needs equal head dims;"
            f" head_dim is {problem.head_dim}, head_dim_v {problem.head_dim_v}"
        )
    return None


def _torchs_own_reason(forced: str, problem: Problem, pass_: str, target: Target) -> str | None:
    """Ask torch whether the backend takes one K/V head of this problem; its warnings are the reason."""
    import torch
    from torch.backends import cuda

    from flashbench.kernels._precision import torch_dtype

    ask = getattr(cuda, f"can_use_{forced}_attention", None)
    if ask is None:
        return f"this torch ({torch.__version__}) cannot say whether its {forced} backend can run"

    def tensor(heads: int, rows: int, width: int) -> Tensor:
        return torch.empty(
            (1, heads, rows, width), dtype=torch_dtype(problem.dtype), device=target.device
        ).requires_grad_(pass_ != "fwd")

    q = tensor(problem.group, problem.seqlen_q, problem.head_dim)
    k = tensor(1, problem.seqlen_k, problem.head_dim)
    v = tensor(1, problem.seqlen_k, problem.head_dim_v)
    is_causal = _mask_kind(forced, problem, target.type) == "is_causal"
    mask = None
    if problem.bias:
        heads, rows = (1 if problem.bias[at] == "1" else q.shape[at] for at in (1, 2))
        mask = tensor(heads, rows, problem.seqlen_k).expand(1, *q.shape[1:3], problem.seqlen_k)
    with _context(forced, problem), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        parameters = cuda.SDPAParams(q, k, v, mask, 0.0, is_causal, problem.group > 1)
        if ask(parameters, True):
            return None
    reasons = [_sentence(str(warning.message)) for warning in said]
    reasons = [reason for reason in reasons if reason and not reason.endswith("because:")]
    return "; ".join(dict.fromkeys(reasons)) or f"torch's {forced} backend refuses it without a reason"


def _sentence(warning: str) -> str:
    return re.sub(r"\s*\(Triggered internally.*", "", warning, flags=re.DOTALL).strip().rstrip(".")


def _describe(forced: str | None, problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    config: dict[str, Any] = {}
    if problem.masked:
        config["causal_mask"] = _mask_kind(forced, problem, target.type)
    if problem.group > 1:
        config["gqa"] = "enable_gqa"
    return config


def _ran(call: Callable[[], object]) -> str | None:
    """Which backend the call dispatches to, read from the aten operators that it runs."""
    from torch.utils._python_dispatch import TorchDispatchMode

    seen: list[str] = []

    class Listen(TorchDispatchMode):  # type: ignore[misc]
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    with Listen():
        call()
    for part, backend in _RAN:
        if any(part in name for name in seen):
            return backend
    return "math"


def _dense_mask_bytes(forced: str | None, problem: Problem, pass_: str, target: Target) -> int:
    dense = _mask_kind(forced, problem, target.type) == "dense"
    return problem.seqlen_q * problem.seqlen_k if dense else 0


def _row(name: str, forced: str | None, summary: str, io_model: str | None) -> Implementation:
    def context(problem: Problem) -> AbstractContextManager[object]:
        return _context(forced, problem)

    return Implementation(
        name=name,
        summary=summary,
        prepare=partial(_prepare, forced),
        io_model=io_model,
        why_unavailable=partial(_why_unavailable, forced),
        why_unsupported=partial(_why_unsupported, forced),
        describe=partial(_describe, forced),
        backend=_ran,
        context=context,
        prepared_bytes=partial(_dense_mask_bytes, forced),
    )


# sdpa-flash is FlashAttention-2 with its published tiles; cuDNN's are not published, but counters show them
# (docs/counters.md). The efficient kernel has tiles of its own, so a model of it would be a guess; math
# up-casts half precision and is not the textbook op list; sdpa may be any of them.
IMPLEMENTATIONS = (
    _row("sdpa", None, "torch's scaled_dot_product_attention, the backend that torch picks", None),
    _row("sdpa-flash", "flash", "torch's FlashAttention-2 backend", "sdpa-flash"),
    _row("sdpa-cudnn", "cudnn", "torch's cuDNN backend", "sdpa-cudnn"),
    _row("sdpa-efficient", "efficient", "torch's memory-efficient (CUTLASS) backend", None),
    _row("sdpa-math", "math", "torch's math backend; up-casts fp16 and bf16 to fp32", None),
)
