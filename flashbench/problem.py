"""What is asked, independent of who computes it: Problem, Cell, dtypes and passes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from flashbench.errors import SpecError, UnknownName

PASSES = ("fwd", "bwd", "fwd+bwd")
"""Passes that can be timed. ``bwd`` is the backward alone, from saved activations."""

MAX_SEQLEN = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class DType:
    """A dtype name of the command line and what it stands for."""

    name: str
    bytes: int
    torch_name: str
    help: str


DTYPES = {
    row.name: row
    for row in (
        DType(name="fp16", bytes=2, torch_name="float16", help="IEEE half"),
        DType(name="bf16", bytes=2, torch_name="bfloat16", help="bfloat16"),
        DType(name="fp32", bytes=4, torch_name="float32", help="IEEE single, no TF32 anywhere"),
        DType(name="tf32", bytes=4, torch_name="float32", help="fp32 storage, TF32 products"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention problem.

    Tensors: q (batch, num_heads, seqlen_q, head_dim), k (batch, num_kv_heads, seqlen_k, head_dim),
    v (batch, num_kv_heads, seqlen_k, head_dim_v), o (batch, num_heads, seqlen_q, head_dim_v).

    Causal is bottom-right aligned: query i sees keys j <= i + seqlen_k - seqlen_q, so the last
    query sees every key. A row without visible keys has o = 0, lse = -inf and zero gradients.

    Raises SpecError or UnknownName for values out of range.
    """

    batch: int
    num_heads: int
    num_kv_heads: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str
    causal: bool

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnknownName("dtype", self.dtype, DTYPES)
        for name in ("batch", "num_heads", "num_kv_heads", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} {getattr(self, name)} is out of range; it must be 1 or more")
        for name in ("seqlen_q", "seqlen_k"):
            if not 1 <= getattr(self, name) <= MAX_SEQLEN:
                raise SpecError(f"{name} {getattr(self, name)} is out of range; it must be 1 to {MAX_SEQLEN}")
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads};"
                " every K/V head serves the same number of query heads"
            )

    @property
    def group(self) -> int:
        """Query heads per K/V head: 1 is MHA, num_heads is MQA."""
        return self.num_heads // self.num_kv_heads

    @property
    def dtype_bytes(self) -> int:
        """Bytes of one element of q, k, v, o."""
        return DTYPES[self.dtype].bytes

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(head_dim)."""
        return 1 / math.sqrt(self.head_dim)

    @property
    def visible_pairs(self) -> int:
        """(query, key) pairs that the mask leaves visible, over batch and query heads."""
        nq, nk = self.seqlen_q, self.seqlen_k
        if not self.causal:
            per_head = nq * nk
        else:
            # query i sees clamp(i + 1 + nk - nq, 0, nk) keys: the series 1..nk, or its upper part
            first = max(1, nk - nq + 1)
            per_head = (first + nk) * (nk - first + 1) // 2
        return self.batch * self.num_heads * per_head

    @property
    def rows_without_keys(self) -> int:
        """Query rows per head that see no key (causal with seqlen_q > seqlen_k)."""
        return max(0, self.seqlen_q - self.seqlen_k) if self.causal else 0

    @property
    def key(self) -> str:
        """Stable text that identifies the problem, as used for resume and in messages."""
        heads = f"h{self.num_heads}" if self.group == 1 else f"h{self.num_heads}/{self.num_kv_heads}"
        rows = f"n{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"n{self.seqlen_q}x{self.seqlen_k}"
        dims = (
            f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        )
        mask = "causal" if self.causal else "full"
        return f"b{self.batch} {heads} {rows} {dims} {self.dtype} {mask}"


@dataclass(frozen=True, kw_only=True)
class Cell:
    """The identity of one measurement: who computes what, in which pass."""

    implementation: str
    problem: Problem
    pass_: str

    def __post_init__(self) -> None:
        if self.pass_ not in PASSES:
            raise UnknownName("pass", self.pass_, PASSES)

    @property
    def key(self) -> str:
        """Stable text, unique within a sweep."""
        return f"{self.implementation} {self.pass_} {self.problem.key}"
