"""flash-v2's kernels with dropout, and with a backward that adds in one order, as an operator of torch.

``flashbench::attention_portable`` has, beside ``flashbench::attention`` (_op.py), what these kernels do and
the best ones for a card do not. Dropout's seed is a tensor on the CPU, which the host reads in each call: a
compiled call draws anew each time; torch's compiler keeps the operator out of CUDA graphs, which would not.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flashbench.kernels._eager import plain, refuse_forward_mode
from flashbench.kernels._op import (
    OPTIONS,
    TENSORS,
    Options,
    fake_backward,
    fake_forward,
    portable,
    portable_gradients,
    required,
)

_DROPOUT = "Tensor? seed=None, float dropout_p=0.0"
_INPUTS = 6 + 2 + len(Options._fields)


def draw_seed() -> Tensor:
    """A seed, 0 to 2**63 - 2, from torch's default generator of the CPU.

    In a form that torch's compilers know for random: they draw it in each call, one for each call of this in
    a graph, and again where a checkpoint computes again.
    """
    empty = torch.empty((), dtype=torch.int64, device="cpu")
    drawn: Tensor = torch.ops.aten.random.to(empty, 2**63 - 1)
    return drawn


def attention_portable(
    tensors: tuple[Any, ...], options: Options, seed: Tensor | None, dropout_p: float
) -> tuple[Tensor, Tensor]:
    """(o, lse) of q, k, v, alibi_slopes, cu_seqlens_q and cu_seqlens_k; lse has no gradient.

    By the operator, or past it where the call is a plain one.
    """
    refuse_forward_mode(*tensors[:4])
    if plain(tensors):  # the seed is on the CPU, wherever they are
        o, lse = _forward(*tensors, seed, dropout_p, *options)
        return o, lse.detach()
    o, lse = torch.ops.flashbench.attention_portable(*tensors, seed, dropout_p, *options)
    return o, lse


def _forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    slopes: Tensor | None = None,
    cu_q: Tensor | None = None,
    cu_k: Tensor | None = None,
    seed: Tensor | None = None,
    dropout_p: float = 0.0,
    *rest: Any,
) -> tuple[Tensor, Tensor]:
    """With gradients of its own where autograd is not left out, as in an operator's kernel."""
    options = Options(*rest)
    return portable((q, k, v, slopes, cu_q, cu_k), options, options.scale, dropout_p, _number(seed))


def _backward(*args: Any) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk and dv, contiguous, of (do, o, lse, and the arguments of the forward), without atomics."""
    (do, o, lse, q, k, v, *beside, seed, dropout_p), options = args[:11], Options(*args[11:])
    return portable_gradients((q, k, v, o, lse, do), options, tuple(beside), dropout_p, _number(seed))


def _number(seed: Tensor | None) -> int:
    return 0 if seed is None else int(seed)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    o, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(o, lse, *inputs[:7])
    ctx.options = inputs[7:]


def _gradients(ctx: Any, do: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    found = torch.ops.flashbench.attention_portable_backward(do, *ctx.saved_tensors, *ctx.options)
    return (*found, *[None] * (_INPUTS - 3))


_op = torch.library.custom_op(
    "flashbench::attention_portable",
    _forward,
    mutates_args=(),
    schema=f"({TENSORS}, {_DROPOUT}, {OPTIONS}) -> (Tensor, Tensor)",
    tags=(torch.Tag.cudagraph_unsafe,),  # by itself torch 2.11 refuses it
)
_op.register_fake(fake_forward)
_op.register_autograd(_gradients, setup_context=_keep)
torch.library.custom_op(
    "flashbench::attention_portable_backward",
    _backward,
    mutates_args=(),
    schema=(
        f"(Tensor do, Tensor o, Tensor lse, {required(f'{TENSORS}, {_DROPOUT}, {OPTIONS}')})"
        " -> (Tensor, Tensor, Tensor)"
    ),
    tags=(torch.Tag.cudagraph_unsafe,),  # by itself torch 2.11 refuses it
).register_fake(fake_backward)
