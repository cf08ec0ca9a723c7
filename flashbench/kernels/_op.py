"""``flashbench.attention``: the bundled kernels as one operator of torch, with autograd and under
torch.compile.

The operators are ``flashbench::attention`` and ``flashbench::attention_backward``; fake kernels say what they
return, so that ``torch.compile(fullgraph=True)`` keeps them whole. Where nothing but a plain call is asked
for (_eager.py) the same functions are called without torch's dispatcher, which costs the host more than they
do: ``_forward``, ``_backward`` and what is saved between them are the operators' own.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any, Literal, NamedTuple, overload

import torch
from torch import Tensor
from torch.autograd import forward_ad

from flashbench import hopper_configs
from flashbench.kernels import Target, _hopper_row, _triton
from flashbench.kernels._eager import below_autograd, plain, refuse_forward_mode
from flashbench.kernels._layout import Layout, layout, unit_stride
from flashbench.kernels._misfits import check_mask, check_tensors
from flashbench.problem import LAYOUTS, Problem

TENSORS = (
    "Tensor q, Tensor k, Tensor v, Tensor? alibi_slopes=None, Tensor? cu_seqlens_q=None,"
    " Tensor? cu_seqlens_k=None"
)
OPTIONS = (
    "bool causal=False, int left=-1, int right=-1, float? scale=None, float softcap=0.0,"
    " SymInt max_seqlen_q=-1, SymInt max_seqlen_k=-1"
)
_UNLIMITED = (-1, -1)
_HALF = {torch.float16: "fp16", torch.bfloat16: "bf16"}


class Options(NamedTuple):
    """As in the schema: window sides of -1 are unlimited, lengths of -1 unknown, scale None head_dim**-0.5.

    Torch leaves out what has its default at the end of an operator's arguments.
    """

    causal: bool = False
    left: int = -1
    right: int = -1
    scale: float | None = None
    softcap: float = 0.0
    max_seqlen_q: int = -1
    max_seqlen_k: int = -1

    def scale_of(self, q: Tensor) -> float:
        """What scores are multiplied by; of no columns, which are refused elsewhere, 1 by default."""
        return float(max(q.shape[-1], 1) ** -0.5) if self.scale is None else self.scale


def required(schema: str) -> str:
    """The same arguments without defaults."""
    return re.sub(r"=[^,]+", "", schema)


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., scale: float | None = ...,
    window: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., layout: str = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., return_lse: Literal[False] = ...,
) -> Tensor: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., scale: float | None = ...,
    window: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., layout: str = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., return_lse: Literal[True],
) -> tuple[Tensor, Tensor]: ...  # fmt: skip


@overload
def attention(
    q: Tensor, k: Tensor, v: Tensor, *, causal: bool = ..., scale: float | None = ...,
    window: tuple[int, int] = ..., softcap: float = ..., alibi_slopes: Tensor | None = ..., layout: str = ...,
    cu_seqlens_q: Tensor | None = ..., cu_seqlens_k: Tensor | None = ..., max_seqlen_q: int | None = ...,
    max_seqlen_k: int | None = ..., return_lse: bool,
) -> Tensor | tuple[Tensor, Tensor]: ...  # fmt: skip


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    scale: float | None = None,
    window: tuple[int, int] = _UNLIMITED,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    layout: str = LAYOUTS[0],
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    return_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """softmax(q kᵀ · scale) v by the best of the bundled kernels for the card; differentiable in q, k and v.

    layout bhsd: q (batch, num_heads, seqlen_q, head_dim), k (batch, num_kv_heads, seqlen_k, head_dim),
    v (batch, num_kv_heads, seqlen_k, head_dim_v); bshd: seqlens before heads. fp16, bf16 or fp32, any
    strides with a unit last one, head dims up to 256. Query head h uses K/V head h // (num_heads //
    num_kv_heads).

    causal: keys up to j = i + seqlen_k - seqlen_q: the last query sees every key. window: (left, right), keys
    from ``left`` before that diagonal to ``right`` after it, -1 unlimited. scale: head_dim**-0.5 by default.
    softcap c > 0: c · tanh(s / c). alibi_slopes: fp32 (num_heads,) or (sequences, num_heads). Packed
    sequences: cu_seqlens_q and cu_seqlens_k, int32 (sequences + 1,), and q (total_q, num_heads, head_dim) in
    bshd, with a leading 1 and heads first in bhsd; max_seqlen_*: the longest or more, and cu_seqlens on a GPU
    are then not read by the host: wrong ones reach past the tensors. Without, the device is asked and they
    are checked, as on a CPU always.

    Returns o, shaped as q with head_dim_v, in q's dtype; with return_lse also lse (batch, num_heads,
    seqlen_q), fp32, natural log, which is not differentiable here. Rows without keys: o = 0, lse = -inf. On a
    CPU the kernels run in Triton's interpreter. Raises ValueError for a misfit, UnavailableError without
    Triton.
    """
    if layout not in LAYOUTS:
        raise ValueError(f"layout {layout!r} is not known; it must be {' or '.join(LAYOUTS)}")
    if window is not _UNLIMITED or type(causal) is not bool:
        check_mask(causal, window)
        window = int(window[0]), int(window[1])  # of a bool kernels would be compiled anew
    if not (alibi_slopes is cu_seqlens_q is cu_seqlens_k is max_seqlen_q is max_seqlen_k is None):
        _check(alibi_slopes, (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k))
    swapped, packed = layout != LAYOUTS[0], cu_seqlens_q is not None
    if swapped and packed:
        q, k, v = q[None], k[None], v[None]
    if swapped:
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
    scale = max(q.shape[-1], 1) ** -0.5 if scale is None else float(scale)
    options = Options(
        causal, *window, scale, float(softcap),
        -1 if max_seqlen_q is None else max_seqlen_q, -1 if max_seqlen_k is None else max_seqlen_k,
    )  # fmt: skip
    o, lse = _call((q, k, v, alibi_slopes, cu_seqlens_q, cu_seqlens_k), options)
    if swapped:
        o = o.transpose(1, 2)
        o = o[0] if packed else o
    return (o, lse) if return_lse else o


def _check(slopes: Tensor | None, cu: tuple[Tensor | None, ...], longest: tuple[int | None, ...]) -> None:
    """What the operator's schema would refuse in words of its own, or take in silence."""
    check_tensors(alibi_slopes=slopes, cu_seqlens_q=cu[0], cu_seqlens_k=cu[1])
    if slopes is not None and slopes.requires_grad:
        raise ValueError("alibi_slopes have no gradient; accepted: alibi_slopes.detach()")
    if (cu[0] is None) != (cu[1] is None):
        raise ValueError("cu_seqlens_q and cu_seqlens_k must be given together")
    for side, length in zip("qk", longest, strict=True):
        if length is not None and (length < 0 or cu[0] is None):
            raise ValueError(f"max_seqlen_{side} {length} must be 0 or more, beside cu_seqlens")


def _call(tensors: tuple[Any, ...], options: Options) -> tuple[Tensor, Tensor]:
    """(o, lse) by the operator, or past it where the call is a plain one."""
    if forward_ad._current_level >= 0:
        refuse_forward_mode(*tensors[:4])
    if plain(tensors) and type(options.max_seqlen_q) is type(options.max_seqlen_k) is int:
        q, k, v = tensors[:3]
        if not (torch.is_grad_enabled() and (q.requires_grad or k.requires_grad or v.requires_grad)):
            return _computed(tensors, options)
        if not below_autograd():
            found: tuple[Tensor, Tensor] = _Attention.apply(*tensors, *options)
            return found
    o, lse = torch.ops.flashbench.attention(*tensors, *options)
    return o, lse


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    return _computed((q, k, v, slopes, cu_q, cu_k), Options(*rest))


def _computed(tensors: tuple[Any, ...], options: Options) -> tuple[Tensor, Tensor]:
    """``_forward`` of arguments that are taken together already."""
    q, k, v, slopes, cu_q, _ = tensors
    scale = options.scale_of(q) if options.scale is None else options.scale
    if slopes is cu_q is None and _bare(options):
        own = _v3(layout(q, k, v), options.causal)
        if own is not None and own.takes(q, k, v):
            ready: tuple[Tensor, Tensor] = own.attention(q, k, v, scale)
            return ready
    return portable(tensors, options, scale)


def portable(
    tensors: tuple[Any, ...], options: Options, scale: float | None, dropout_p: float = 0.0, seed: int = 0
) -> tuple[Tensor, Tensor]:
    """(o, lse) by flash-v2's kernels, with gradients of its own where autograd is not left out."""
    q, k, v, slopes, cu_q, cu_k = tensors
    o, lse = _triton.load(q.device.type).flash_attention(
        q, k, v, causal=options.causal, window=(options.left, options.right), softmax_scale=scale,
        softcap=options.softcap, alibi_slopes=slopes, dropout_p=dropout_p, seed=seed, cu_seqlens_q=cu_q,
        cu_seqlens_k=cu_k, max_seqlen_q=known(options.max_seqlen_q),
        max_seqlen_k=known(options.max_seqlen_k), return_lse=True,
    )  # fmt: skip
    return o, lse


@lru_cache(maxsize=256)
def _v3(of: Layout, causal: bool) -> Any:
    """flash-v3's forward made ready for q, k and v laid out so; None where flash-v2's kernels take them.

    What TMA does not take as it lies is left to flash-v2, which needs no copy of it.
    """
    shapes, _, dtypes, devices = zip(*of, strict=True)
    alike = dtypes[0] == dtypes[1] == dtypes[2] and devices[0] == devices[1] == devices[2]
    if not alike or not _fits_v3(shapes, dtypes[0], devices[0], causal, "fwd"):
        return None
    return _triton.load(devices[0].type, "_flash_v3").plan(of, causal, None)


def known(length: int) -> int | None:
    """A length, None where it is unknown."""
    return None if length < 0 else length


def _takes_v3(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    beside: tuple[Tensor | None, Tensor | None],
    options: Options,
    pass_: str,
) -> bool:
    """Whether flash-v3's own kernels run the pass on this card; beside: slopes and lengths, if there are.

    What TMA does not take as it lies is left to flash-v2, which needs no copy of it.
    """
    bare = beside[0] is beside[1] is None and _bare(options)
    if not bare or not _fits_v3((q.shape, k.shape, v.shape), q.dtype, q.device, options.causal, pass_):
        return False
    return all(map(_triton.load(q.device.type, "_hopper_plan").takes, (q, k, v)))


def _bare(options: Options) -> bool:
    """Whether they ask for nothing but scores and a causal mask."""
    return not options.softcap and options.left == options.right == -1


@lru_cache(maxsize=1024)
def _fits_v3(
    shapes: tuple[torch.Size, ...], dtype: torch.dtype, device: torch.device, causal: bool, pass_: str
) -> bool:
    """The same, of q, k and v of these shapes; shapes that fit nothing are left to the checks of flash-v2.

    Kept: a call of the same shapes costs the host a look-up.
    """
    q, k, v = shapes
    if (
        device.type != "cuda"
        or dtype not in _HALF
        or not len(q) == len(k) == len(v) == 4
        or 0 in (*q, *k, *v)
        or q[1] % k[1]
    ):
        return False
    problem = Problem(
        batch=q[0], num_heads=q[1], num_kv_heads=k[1], seqlen_q=q[2], seqlen_k=k[2], head_dim=q[3],
        head_dim_v=v[3], dtype=_HALF[dtype], causal=causal,
    )  # fmt: skip
    target = Target(device="cuda", capability=torch.cuda.get_device_capability(device))
    if pass_ != "fwd" and hopper_configs.why_portable(q[3], v[3]):
        return False
    return _hopper_row.why_unsupported(problem, pass_, target) is None


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous, of (do, o, lse, and the arguments of the forward).

    By flash-v3's kernels where they ran the forward and have a backward of their own, else by flash-v2's,
    without atomics. flash-v3 adds dq of head dims up to 128 in no order, but where torch is to be
    deterministic (``torch.use_deterministic_algorithms``).
    """
    (do, o, lse, q, k, v, slopes, cu_q, cu_k), options = args[:9], Options(*args[9:])
    if _takes_v3(q, k, v, (slopes, cu_q), options, "bwd"):
        return _backward_v3((q, k, v, o, lse, do), options)
    return portable_gradients((q, k, v, o, lse, do), options, (slopes, cu_q, cu_k))


def portable_gradients(
    saved: tuple[Tensor, ...],
    options: Options,
    beside: tuple[Any, ...],
    dropout_p: float = 0.0,
    seed: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv by flash-v2's kernels, without atomics. beside: slopes and lengths."""
    kernels, (slopes, *cu) = _triton.load(saved[0].device.type), beside
    call = kernels.Call(
        causal=options.causal, window=(options.left, options.right), scale=options.scale_of(saved[0]),
        softcap=options.softcap, dropout_p=dropout_p, seed=seed,
    )  # fmt: skip
    found: tuple[Tensor, Tensor, Tensor] = kernels.gradients(
        saved, call, alibi_slopes=slopes, cu_seqlens=tuple(cu),
        longest=(known(options.max_seqlen_q), known(options.max_seqlen_k)),
    )  # fmt: skip
    return found


def _backward_v3(tensors: tuple[Tensor, ...], options: Options) -> tuple[Tensor, Tensor, Tensor]:
    from flashbench.kernels._call import Call
    from flashbench.kernels._launches import Saved

    q, k, v, o, lse, do = tensors
    q, k, v = unit_stride(q), unit_stride(k), unit_stride(v)
    saved = Saved(q=q, k=k, v=v, o=o, lse=lse, do=do)
    call = Call(causal=options.causal, scale=options.scale_of(q))
    if hopper_configs.wide(q.shape[3], v.shape[3]):
        work = _triton.load(q.device.type, "_flash_v3_wide").backward_launches(saved, call)
    else:
        exact = torch.are_deterministic_algorithms_enabled()
        launches = _triton.load(q.device.type, "_flash_v3_backward").backward_launches
        work = launches(saved, call, deterministic=exact)
    work.run(saved)
    return work.dq.contiguous(), work.dk.contiguous(), work.dv.contiguous()


def fake_forward(q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
    """Shapes and strides as ``_call.like`` makes them."""
    (batch, heads, rows), columns = q.shape[:3], v.shape[3]
    if rows > 1 < heads and q.stride(1) < q.stride(2):
        o = q.new_empty(batch, rows, heads, columns).transpose(1, 2)
    else:
        o = q.new_empty(batch, heads, rows, columns)
    return o, q.new_empty((batch, heads, rows), dtype=torch.float32)


def fake_backward(do: Tensor, o: Tensor, lse: Tensor, *args: Any) -> tuple[Tensor, ...]:
    """Three gradients, contiguous."""
    return tuple(torch.empty_like(x, memory_format=torch.contiguous_format) for x in args[:3])


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(o, lse, *inputs[:6])
    ctx.options = inputs[6:]


def _gradients(ctx: Any, do: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    tensors = do, *ctx.saved_tensors
    past = not torch.is_grad_enabled() and plain(tensors)  # with grad they are differentiated once more
    by = _backward if past else torch.ops.flashbench.attention_backward
    return (*by(*tensors, *ctx.options), *[None] * (3 + len(Options._fields)))


class _Attention(torch.autograd.Function):  # type: ignore[misc]
    """The operator past the dispatcher: (o, lse) of its arguments, with gradients."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> tuple[Tensor, Tensor]:
        found = _forward(*inputs)
        _keep(ctx, inputs, found)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> tuple[Tensor | None, ...]:
        return _gradients(ctx, *grads)


_triton.settle_mode()
_op = torch.library.custom_op(
    "flashbench::attention", _forward, mutates_args=(), schema=f"({TENSORS}, {OPTIONS}) -> (Tensor, Tensor)"
)
_op.register_fake(fake_forward)
_op.register_autograd(_gradients, setup_context=_keep)
torch.library.custom_op(
    "flashbench::attention_backward",
    _backward,
    mutates_args=(),
    schema=(
        f"(Tensor do, Tensor o, Tensor lse, {required(f'{TENSORS}, {OPTIONS}')}) -> (Tensor, Tensor, Tensor)"
    ),
).register_fake(fake_backward)
