"""What a type checker must see of the public functions: read by mypy in ``test_typing.py``, never run."""

from typing import assert_type

from torch import Tensor

import flashbench
from flashbench.flash_attn import (
    flash_attn_func,
    flash_attn_kvpacked_func,
    flash_attn_qkvpacked_func,
    flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func,
    flash_attn_varlen_qkvpacked_func,
    flash_attn_with_kvcache,
)

Pair = tuple[Tensor, Tensor]
More = tuple[Tensor, Tensor, Tensor | None]


def of_attention(q: Tensor, k: Tensor, v: Tensor, both: bool) -> None:
    o = flashbench.attention(q, k, v, causal=True)
    o.sum().backward()
    assert_type(flashbench.attention(q, k, v, return_lse=False), Tensor)
    assert_type(flashbench.attention(q, k, v, return_lse=True), Pair)
    assert_type(flashbench.attention(q, k, v, return_lse=both), Tensor | Pair)


def of_dense(q: Tensor, k: Tensor, v: Tensor, both: bool) -> None:
    flash_attn_func(q, k, v).sum()
    assert_type(flash_attn_func(q, k, v, 0.0, None, True), Tensor)
    assert_type(flash_attn_func(q, k, v, causal=True, return_attn_probs=True), More)
    assert_type(flash_attn_func(q, k, v, return_attn_probs=both), Tensor | More)
    assert_type(flash_attn_func(q, k, v, 0.0, None, True, (-1, -1), 0.0, None, False, False), Tensor)
    flash_attn_kvpacked_func(q, k).sum()
    assert_type(flash_attn_kvpacked_func(q, k, return_attn_probs=True), More)
    flash_attn_qkvpacked_func(q).sum()
    assert_type(flash_attn_qkvpacked_func(q, return_attn_probs=True), More)


def of_packed_and_cached(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> None:
    flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, causal=True).sum()
    assert_type(flash_attn_varlen_func(q, k, v, cu, cu, 7, 7, return_attn_probs=True), More)
    flash_attn_varlen_kvpacked_func(q, k, cu, cu, 7, 7).sum()
    assert_type(flash_attn_varlen_kvpacked_func(q, k, cu, cu, 7, 7, return_attn_probs=True), More)
    flash_attn_varlen_qkvpacked_func(q, cu, 7).sum()
    assert_type(flash_attn_varlen_qkvpacked_func(q, cu, 7, return_attn_probs=True), More)
    flash_attn_with_kvcache(q, k, v, cache_seqlens=7).sum()
    assert_type(flash_attn_with_kvcache(q, k, v, return_softmax_lse=True), Pair)
