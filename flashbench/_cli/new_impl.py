"""``flashbench new-impl``: a commented file to put a kernel of one's own into."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from flashbench.errors import UsageError

PLAIN = '''\
"""A kernel of your own for flashbench. As it stands it is right and slow; put yours in its place.

    flashbench check --impl {spec}        right? (awkward shapes, against fp64)
    flashbench run --impl {spec}          how fast, beside the others?
"""

from collections import Counter

import torch

import flashbench


def traffic(problem, pass_):
    """Bytes that one call moves and FLOPs that it does, for the model columns. Optional."""
    p, read, write, flops = problem, Counter(), Counter(), 0
    q, o = (p.batch * p.num_heads * p.seqlen_q * d * p.dtype_bytes for d in (p.head_dim, p.head_dim_v))
    kv = p.batch * p.num_kv_heads * p.seqlen_k * (p.head_dim + p.head_dim_v) * p.dtype_bytes
    if "fwd" in pass_:  # which is "fwd", "bwd" or "fwd+bwd"
        read.update(q=q, kv=kv)
        write.update(o=o)
        flops += 2 * p.visible_pairs * (p.head_dim + p.head_dim_v)
    if "bwd" in pass_:
        read.update(q=q, kv=kv, o=o, do=o)
        write.update(dq=q, dkv=kv)
        flops += 2 * p.visible_pairs * (3 * p.head_dim + 2 * p.head_dim_v)
    return {{"read": read, "write": write, "flops": flops}}


# All of the decorator is optional; without it the signature says what the function takes.
@flashbench.implementation(
    layout="bhsd",  # order of the dimensions of q, k, v and o; or "bshd" (batch, seqlen, heads, head_dim)
    # passes=("fwd",),  # no backward: those cells are "unsupported" instead of tried
    # dtypes=("fp16", "bf16"),  # others are "unsupported"
    # supports=lambda problem, pass_: problem.head_dim <= 128 or "head dims up to 128",
    # io_model="flash-v2",  # the model of 'flashbench list models' that describes its traffic,
    # io_model=traffic,  # or one of your own, as above
    # config={{"block_q": 128}},  # shown in table and report
)
def attention(q, k, v, causal=False, scale=None):
    """q (batch, num_heads, seqlen_q, head_dim); k, v (batch, num_kv_heads, seqlen_k, …), contiguous.

    Returns o like q, in q's dtype. causal: the last query sees every key. scale: of the scores.
    Parameters that you may add, by these names: window=(left, right), softcap, alibi_slopes, bias,
    sinks, top_left, enable_gqa, deterministic, and cu_seqlens_q, cu_seqlens_k, max_seqlen_q,
    max_seqlen_k for packed sequences. Compile in the first call: it is not timed.
    """
    group = q.shape[1] // k.shape[1]  # query heads that share a K/V head
    k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    scores = (q @ k.transpose(-2, -1)) * scale
    if causal:
        rows = torch.arange(q.shape[2], device=q.device)[:, None] + k.shape[2] - q.shape[2]
        hidden = torch.arange(k.shape[2], device=q.device) > rows
        scores = scores.masked_fill(hidden, float("-inf"))
    return scores.softmax(-1).nan_to_num(0.0) @ v  # a row without keys is 0
'''

TRITON = '''\
"""A Triton kernel of your own for flashbench. As it stands it is a small FlashAttention-2 forward.

    flashbench check --impl {spec} --passes fwd       right? (without a GPU: interpreted)
    flashbench profile --trace --impl {spec} --passes fwd    bytes, load by load, no GPU needed
    flashbench run --impl {spec} --passes fwd         how fast, beside the others?
"""

import torch
import triton
import triton.language as tl

import flashbench

BLOCK_Q, BLOCK_K = 64, 32


@triton.jit
def forward(Q, K, V, O, scale, num_heads, group, seqlen_q, seqlen_k, CAUSAL: tl.constexpr, D: tl.constexpr,
            DIM: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr):
    """One program: one tile of queries of one head. All tensors are contiguous."""
    head = tl.program_id(1)
    kv_head = (head // num_heads) * (num_heads // group) + head % num_heads // group
    rows = tl.program_id(0) * BLOCK_Q + tl.arange(0, BLOCK_Q)
    columns, dims = tl.arange(0, BLOCK_K), tl.arange(0, D)
    at_q = (head * seqlen_q + rows)[:, None] * DIM + dims[None, :]
    mask_q = (rows < seqlen_q)[:, None] & (dims < DIM)[None, :]
    q = tl.load(Q + at_q, mask_q, 0.0)
    diagonal = rows + seqlen_k - seqlen_q
    largest = tl.full([BLOCK_Q], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_Q], tl.float32)
    o = tl.zeros([BLOCK_Q, D], tl.float32)
    for start in range(0, seqlen_k, BLOCK_K):
        keys = start + columns
        at_k = (kv_head * seqlen_k + keys)[:, None] * DIM + dims[None, :]
        mask_k = (keys < seqlen_k)[:, None] & (dims < DIM)[None, :]
        k = tl.load(K + at_k, mask_k, 0.0)
        v = tl.load(V + at_k, mask_k, 0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        seen = (keys < seqlen_k)[None, :]
        if CAUSAL:
            seen = seen & (keys[None, :] <= diagonal[:, None])
        s = tl.where(seen, s, float("-inf"))
        new = tl.maximum(largest, tl.max(s, 1))
        shift = tl.where(new == float("-inf"), 0.0, new)
        p = tl.exp(s - shift[:, None])
        kept = tl.exp(largest - shift)
        total = total * kept + tl.sum(p, 1)
        o = o * kept[:, None] + tl.dot(p.to(v.dtype), v, input_precision="ieee")
        largest = new
    o = o / tl.where(total > 0, total, 1.0)[:, None]
    tl.store(O + at_q, o.to(O.dtype.element_ty), mask_q)


# All of the decorator is optional; 'flashbench new-impl' without --triton shows the rest of it.
@flashbench.implementation(
    passes=("fwd",),
    dtypes=("fp16", "fp32"),
    supports=lambda problem, pass_: problem.head_dim == problem.head_dim_v or "head_dim_v is head_dim",
    config={{"fwd_block_q": BLOCK_Q, "fwd_block_k": BLOCK_K}},
)
def attention(q, k, v, causal=False, scale=None):
    """q (batch, num_heads, seqlen_q, head_dim); k, v (batch, num_kv_heads, seqlen_k, head_dim)."""
    batch, heads, seqlen_q, dim = q.shape
    o = torch.empty_like(q)
    grid = (triton.cdiv(seqlen_q, BLOCK_Q), batch * heads)
    forward[grid](
        q, k, v, o, scale, heads, heads // k.shape[1], seqlen_q, k.shape[2], CAUSAL=causal,
        D=max(16, triton.next_power_of_2(dim)), DIM=dim, BLOCK_Q=BLOCK_Q, BLOCK_K=BLOCK_K,
    )
    return o
'''


def new_impl(
    file: Annotated[str, typer.Argument(help="The file to write, such as my_kernels.py.")],
    triton: Annotated[bool, typer.Option("--triton", help="Start from a small Triton kernel.")] = False,
) -> None:
    """Write a commented file for a kernel of your own; it runs as it is. An existing file is not touched."""
    from flashbench import console
    from flashbench._cli import options

    path = Path(options.path(file, "FILE", "a new file that ends in .py"))
    if path.suffix != ".py":
        raise UsageError(f"FILE {file!r}: no Python file; accepted: a new file that ends in .py")
    spec = shlex.quote(f"{path}:attention")
    # in a docstring, which ends at three quotes
    told = spec.replace("\\", "\\\\").replace('"', '\\"')
    text = (TRITON if triton else PLAIN).format(spec=told)
    try:
        with path.open("x", encoding="utf-8", errors="backslashreplace") as stream:
            stream.write(text)
    except FileExistsError:
        raise UsageError(f"FILE {file!r}: is there already; accepted: a new file") from None
    except OSError as error:
        raise UsageError(f"FILE {file!r}: {error.strerror}; accepted: a file to write") from None
    console.note(f"{path} is there; check it: flashbench check --impl {spec}")
