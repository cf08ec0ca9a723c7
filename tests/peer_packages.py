"""Stand-ins for other packages: their real signatures, plain torch inside, on a CPU.

Signatures as the comments in flashbench/kernels/fa2.py, fa3.py, … say where they are from.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor


def install(monkeypatch: pytest.MonkeyPatch, name: str, **contents: Any) -> ModuleType:
    """A module of that name, with its packages, for the length of a test."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        dotted = ".".join(parts[:depth])
        module = ModuleType(dotted)
        module.__path__ = []  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, dotted, module)
    vars(module).update(contents)
    return module


def attention(q: Tensor, k: Tensor, v: Tensor, *, scale: float, seen: Tensor | None = None,
              softcap: float = 0.0, added: Tensor | None = None) -> Tensor:  # fmt: skip
    """Of (batch, rows, heads, columns); seen: boolean (rows, keys). Rows without keys are 0."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    s = q @ k.mT * scale
    s = softcap * torch.tanh(s / softcap) if softcap else s
    s = s if added is None else s + added
    if seen is not None:
        s = s.masked_fill(~seen, float("-inf"))
        s = s.masked_fill(~seen.any(1)[:, None], 0.0)
    p = s.softmax(-1)
    p = p if seen is None else p * seen
    return (p @ v).transpose(1, 2)


def band(rows: int, keys: int, causal: bool, left: int | None, right: int | None, *,
         top_left: bool = False) -> Tensor:  # fmt: skip
    """What flash-attention says of window_size and causal; None or below 0: unlimited."""
    at = torch.arange(rows)[:, None] + (0 if top_left else keys - rows)
    j = torch.arange(keys)[None]
    right = 0 if causal else right
    seen = torch.ones(rows, keys, dtype=torch.bool)
    if left is not None and left >= 0:
        seen &= j >= at - left
    if right is not None and right >= 0:
        seen &= j <= at + right
    return seen


def by_sequence(q: Tensor, k: Tensor, v: Tensor, cu_q: Tensor, cu_k: Tensor, one: Any) -> Tensor:
    """one(q, k, v) of each packed sequence."""
    outputs = [
        one(q[None, a:b], k[None, c:d], v[None, c:d])[0]
        for a, b, c, d in zip(cu_q[:-1], cu_q[1:], cu_k[:-1], cu_k[1:], strict=True)
    ]
    return torch.cat(outputs)


def _flash(q: Tensor, k: Tensor, v: Tensor, scale: Any, causal: bool, window: Any, softcap: float,
           slopes: Any = None) -> Tensor:  # fmt: skip
    assert q.stride(-1) == 1
    if q.dtype == torch.float64:
        raise RuntimeError(
            "FlashAttention only support fp16 and bf16 data type\nException raised from mha_fwd"
        )
    rows, keys = q.shape[1], k.shape[1]
    added = None
    if slopes is not None:
        distance = (torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)[None]).abs()
        added = -slopes[:, None, None] * distance
    seen = band(rows, keys, causal, *window)
    return attention(q, k, v, scale=scale, seen=seen, softcap=softcap, added=added)


def fa2(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def flash_attn_func(q, k, v, dropout_p=0.0, softmax_scale=None, causal=False, window_size=(-1, -1),
                        softcap=0.0, alibi_slopes=None, deterministic=False,
                        return_attn_probs=False):  # fmt: skip
        return _flash(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p=0.0,
                               softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
                               alibi_slopes=None, deterministic=False, return_attn_probs=False,
                               block_table=None):  # fmt: skip
        assert max_seqlen_q == cu_seqlens_q.diff().max()
        one = lambda q, k, v: _flash(q, k, v, softmax_scale, causal, window_size, softcap, alibi_slopes)  # noqa: E731
        return by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, one)

    functions = (flash_attn_func, flash_attn_varlen_func)
    return install(monkeypatch, "flash_attn", __version__="2.8.4", **{f.__name__: f for f in functions})


def fa3(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def flash_attn_func(q, k, v, softmax_scale=None, causal=False, qv=None, q_descale=None, k_descale=None,
                        v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0, num_splits=1,
                        pack_gqa=None, deterministic=False, sm_margin=0,
                        return_attn_probs=False):  # fmt: skip
        return _flash(q, k, v, softmax_scale, causal, window_size, softcap)

    def flash_attn_varlen_func(q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
                               seqused_q=None, seqused_k=None, softmax_scale=None, causal=False, qv=None,
                               q_descale=None,
                               k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0,
                               softcap=0.0, num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0,
                               return_attn_probs=False):  # fmt: skip
        one = lambda q, k, v: _flash(q, k, v, softmax_scale, causal, window_size, softcap)  # noqa: E731
        return by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, one)

    functions = (flash_attn_func, flash_attn_varlen_func)
    return install(
        monkeypatch, "flash_attn_interface", __version__="3.0.0b1", **{f.__name__: f for f in functions}
    )


def fa4(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def flash_attn_func(q, k, v, qv=None, gather_kv_indices=None, softmax_scale=None, causal=False,
                        window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
                        pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None, mask_mod=None,
                        aux_tensors=None, aux_scalars=None, block_sparse_tensors=None,
                        block_sparse_tensors_bwd=None, return_lse=False):  # fmt: skip
        assert -1 not in window_size
        return _flash(q, k, v, softmax_scale, causal, window_size, softcap), None

    def flash_attn_varlen_func(q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None,
                               max_seqlen_k=None, min_seqlen_k=None, seqused_q=None, seqused_k=None,
                               gather_kv_indices=None, page_table=None, softmax_scale=None, causal=False,
                               window_size=(None, None), learnable_sink=None, softcap=0.0, num_splits=1,
                               pack_gqa=None, deterministic=False, score_mod=None, score_mod_bwd=None,
                               mask_mod=None, block_sparse_tensors=None, aux_tensors=None, aux_scalars=None,
                               return_lse=False, scheduler_metadata=None, seqlen_k_per_split=None,
                               disable_scheduler_metadata=False):  # fmt: skip
        one = lambda q, k, v: _flash(q, k, v, softmax_scale, causal, window_size, softcap)  # noqa: E731
        return by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_k, one), None

    functions = (flash_attn_func, flash_attn_varlen_func)
    return install(monkeypatch, "flash_attn.cute", __version__="4.0.0", **{f.__name__: f for f in functions})


@dataclass
class _Mask:
    """A mask that knows which keys a row of a problem sees."""

    def seen(self, rows: int, keys: int) -> Tensor:
        raise NotImplementedError


class LowerTriangularMask(_Mask):
    def seen(self, rows, keys):
        return torch.ones(rows, keys, dtype=torch.bool).tril()


class LowerTriangularFromBottomRightMask(_Mask):
    def seen(self, rows, keys):
        return band(rows, keys, True, None, None)


@dataclass
class LocalAttentionFromBottomRightMask(_Mask):
    window_left: int
    window_right: int

    def __post_init__(self):
        if self.window_left < 0 or self.window_right < 0:
            raise ValueError("Invalid window value passed to `LocalAttentionFromBottomRightMask`")

    def seen(self, rows, keys):
        return band(rows, keys, False, self.window_left, self.window_right)


@dataclass
class BlockDiagonalMask(_Mask):
    lengths: Any
    causal: bool = False

    @classmethod
    def from_seqlens(cls, q_seqlen, kv_seqlen=None, *, device=None):
        return cls(list(zip(q_seqlen, kv_seqlen or q_seqlen, strict=True)))

    def make_causal_from_bottomright(self):
        return BlockDiagonalMask(self.lengths, True)

    def seen(self, rows, keys):
        blocks = [band(q, k, self.causal, None, None) for q, k in self.lengths]
        return torch.block_diag(*[block.int() for block in blocks]).bool()


def xformers_ops(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def memory_efficient_attention(query, key, value, attn_bias=None, p=0.0, scale=None, *, op=None,
                                   output_dtype=None):  # fmt: skip
        if query.ndim == 5:
            if query.requires_grad:
                raise NotImplementedError("No operator found for `memory_efficient_attention_backward`")
            shape = query.shape[2:4]
            assert key.shape[2:4] == value.shape[2:4] == shape
            query, key, value = (x.flatten(2, 3) for x in (query, key, value))
            o = memory_efficient_attention(query, key, value, attn_bias, p, scale)
            return o.unflatten(2, shape)
        assert key.shape[2] == query.shape[2]
        added = attn_bias if isinstance(attn_bias, Tensor) else None
        seen = attn_bias.seen(query.shape[1], key.shape[1]) if isinstance(attn_bias, _Mask) else None
        return attention(query, key, value, scale=scale, seen=seen, added=added)

    masks = (LowerTriangularMask, LowerTriangularFromBottomRightMask, LocalAttentionFromBottomRightMask,
             BlockDiagonalMask)  # fmt: skip
    install(monkeypatch, "xformers.ops.fmha.attn_bias", **{mask.__name__: mask for mask in masks})
    module = sys.modules["xformers.ops"]
    module.memory_efficient_attention = memory_efficient_attention  # type: ignore[attr-defined]
    module.__version__ = "0.0.33"  # type: ignore[attr-defined]
    return module


def flashinfer(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    class BatchPrefillWithRaggedKVCacheWrapper:
        def __init__(self, float_workspace_buffer, kv_layout="NHD", use_cuda_graph=False, qo_indptr_buf=None,
                     kv_indptr_buf=None, custom_mask_buf=None, mask_indptr_buf=None, backend="auto",
                     jit_args=None, jit_kwargs=None):  # fmt: skip
            assert (float_workspace_buffer.dtype, kv_layout) == (torch.uint8, "NHD")

        def plan(self, qo_indptr, kv_indptr, num_qo_heads, num_kv_heads, head_dim_qk, head_dim_vo=None,
                 custom_mask=None, packed_custom_mask=None, causal=False, pos_encoding_mode="NONE",
                 use_fp16_qk_reduction=False, window_left=-1, logits_soft_cap=None, sm_scale=None,
                 rope_scale=None, rope_theta=None, q_data_type="float16", kv_data_type=None, o_data_type=None,
                 non_blocking=True):  # fmt: skip
            self.planned = SimpleNamespace(**locals())

        def run(self, q, k, v, *args, q_scale=None, k_scale=None, v_scale=None, o_scale=None, out=None,
                lse=None, return_lse=False, enable_pdl=None, kv_cache_sf=None):  # fmt: skip
            p = self.planned
            assert q.shape[1:] == (p.num_qo_heads, p.head_dim_qk)
            assert v.shape[1:] == (p.num_kv_heads, p.head_dim_vo)
            assert q.is_contiguous()

            def one(q, k, v):
                seen = band(q.shape[1], k.shape[1], p.causal, p.window_left, -1)
                return attention(q, k, v, scale=p.sm_scale, seen=seen, softcap=p.logits_soft_cap or 0.0)

            return by_sequence(q, k, v, p.qo_indptr, p.kv_indptr, one)

    wrapper = BatchPrefillWithRaggedKVCacheWrapper
    return install(
        monkeypatch, "flashinfer", __version__="0.6.0", BatchPrefillWithRaggedKVCacheWrapper=wrapper
    )


def transformer_engine(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    choices: dict[str, Any] = {}

    class DotProductAttention(torch.nn.Module):
        def __init__(self, num_attention_heads, kv_channels, num_gqa_groups=None, attention_dropout=0.0,
                     qkv_format="sbhd", attn_mask_type="causal", window_size=None, bottom_right_diagonal=None,
                     softcap=0.0, sequence_parallel=False, tp_size=1, get_rng_state_tracker=None,
                     tp_group=None, layer_number=None, attention_type="self", cp_group=None,
                     cp_global_ranks=None, cp_stream=None, cp_comm_type="p2p", softmax_scale=None,
                     softmax_type="vanilla", return_max_logit=False, name=None):  # fmt: skip
            super().__init__()
            assert attention_type in ("self", "cross")
            left, right = window_size
            if "causal" in attn_mask_type:
                assert left >= -1
                assert right == 0
            else:
                assert window_size == (-1, -1) or min(window_size) >= 0
            self.asked = SimpleNamespace(**locals())

        def forward(self, query_layer=None, key_layer=None, value_layer=None, attention_mask=None,
                    qkv_format=None, cu_seqlens_q=None, cu_seqlens_kv=None, cu_seqlens_q_padded=None,
                    cu_seqlens_kv_padded=None, max_seqlen_q=None, max_seqlen_kv=None, attn_mask_type=None,
                    window_size=None, bottom_right_diagonal=None, softcap=None,
                    checkpoint_core_attention=False, core_attention_bias_type="no_bias",
                    core_attention_bias=None, alibi_slopes=None, fast_zero_fill=True, inference_params=None,
                    pad_between_seqs=None, fp8_output=False, bf16_backward=False,
                    num_splits=1):  # fmt: skip
            p, (q, k, v) = self.asked, (query_layer, key_layer, value_layer)
            assert all(x.is_contiguous() for x in (q, k, v))
            assert (p.num_attention_heads, p.num_gqa_groups) == (q.shape[-2], k.shape[-2])
            widths = (q.shape[-1], v.shape[-1])
            assert p.kv_channels == (widths if widths[0] != widths[1] else widths[0])
            assert self.training == q.requires_grad
            causal = "causal" in p.attn_mask_type
            aligned = {True: False, False: p.bottom_right_diagonal is False}
            top_left = aligned[causal] or (causal and "bottom_right" not in p.attn_mask_type)
            choices.update(use_flash_attention=False, use_fused_attention=True, fused_attention_backend=1)

            def one(q, k, v):
                rows, keys = q.shape[1], k.shape[1]
                seen = band(rows, keys, causal, *p.window_size, top_left=top_left)
                added = None
                if core_attention_bias_type == "alibi":
                    diagonal = 0 if top_left else keys - rows
                    at = torch.arange(rows)[:, None] + diagonal - torch.arange(keys)[None]
                    added = -alibi_slopes[:, None, None] * at.abs()
                scale = p.softmax_scale
                return attention(q, k, v, scale=scale, seen=seen, softcap=p.softcap, added=added)

            if p.qkv_format == "bshd":
                return one(q, k, v).flatten(2)
            assert p.qkv_format == "thd"
            assert p.attn_mask_type.startswith("padding")
            assert max_seqlen_q == cu_seqlens_q.diff().max()
            return by_sequence(q, k, v, cu_seqlens_q, cu_seqlens_kv, one).flatten(1)

    path = "transformer_engine.pytorch.attention.dot_product_attention"
    install(monkeypatch, path, _attention_backends=choices)
    module = sys.modules["transformer_engine.pytorch"]
    module.DotProductAttention = DotProductAttention  # type: ignore[attr-defined]
    module.__version__ = "2.20.2"  # type: ignore[attr-defined]
    return module


class NotSupported(Exception):
    """As cuDNN's front end raises it: of no class of Python's but the widest."""


class _Port:
    """A tensor of a graph: what is declared of it."""

    def __init__(self, name="", dim=None, stride=None, data_type=None):
        self.name, self.dim, self.stride, self.data_type, self.output = name, dim, stride, data_type, False

    def set_output(self, value):
        self.output = value
        return self

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_data_type(self, dtype):
        self.data_type = dtype
        return self


class _Graph:
    """cudnn.pygraph of one operation."""

    def __init__(self, name="test_graph", io_data_type=None, intermediate_data_type=None,
                 compute_data_type=None, handle=None, sm_count=None, sm_version=None, kernel_cache=None,
                 device_property=None, is_dynamic_shape_enabled=False, is_override_shape_enabled=False,
                 cuda_graph_retention=None):  # fmt: skip
        assert (intermediate_data_type, compute_data_type, handle) == ("FLOAT", "FLOAT", "handle")
        self.built = False

    def tensor(self, dim, stride=None, data_type=None, is_virtual=False, is_pass_by_value=False,
               ragged_offset=None, reordering_type=None, name="", uid=None):  # fmt: skip
        return _Port(name, dim, stride, data_type)

    def sdpa(self, q, k, v, is_inference=None, attn_scale=None, bias=None, block_mask=None,
             use_alibi_mask=False, use_padding_mask=False, seq_len_q=None, seq_len_kv=None,
             use_causal_mask=False, use_causal_mask_bottom_right=False, sliding_window_length=None,
             diagonal_alignment="TOP_LEFT", diagonal_band_left_bound=None, diagonal_band_right_bound=None,
             dropout=None, rng_dump=None, compute_data_type=None, name="", generate_stats=None):  # fmt: skip
        self.inputs, self.outputs = [q, k, v], [_Port("o"), None if is_inference else _Port("stats")]
        self.scale = attn_scale
        self.bounds = (diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound)
        return self.outputs

    def sdpa_backward(self, q, k, v, o, dO, stats, attn_scale=None, bias=None, dBias=None,
                      use_alibi_mask=False, use_padding_mask=False, seq_len_q=None, seq_len_kv=None,
                      max_total_seq_len_q=None, max_total_seq_len_kv=None, use_causal_mask=False,
                      use_causal_mask_bottom_right=False, sliding_window_length=None,
                      diagonal_alignment="TOP_LEFT", diagonal_band_left_bound=None,
                      diagonal_band_right_bound=None, dropout=None, rng_dump=None,
                      use_deterministic_algorithm=False, compute_data_type=None, name=""):  # fmt: skip
        self.inputs, self.outputs = [q, k, v, o, dO, stats], [_Port(name) for name in ("dQ", "dK", "dV")]
        self.scale, self.deterministic = attn_scale, use_deterministic_algorithm
        self.bounds = (diagonal_alignment, diagonal_band_left_bound, diagonal_band_right_bound)
        return self.outputs

    def build(self, heuristics=None):
        assert heuristics == ["A", "FALLBACK"]
        if self.inputs[0].dim[3] > 256:
            raise NotSupported("No valid engine configs\nfor MATMUL_")
        self.built = True

    def get_workspace_size(self):
        assert self.built
        return 48

    def execute(self, tensor_dict, workspace=None, handle=None):
        assert (workspace.dtype, workspace.numel(), handle) == (torch.uint8, 48, "handle")
        ports = [*self.inputs, *(port for port in self.outputs if port is not None)]
        assert set(tensor_dict) == set(ports)
        for port, x in tensor_dict.items():
            assert port.output == (port not in self.inputs)
            assert (port.dim, port.stride) == (list(x.shape), list(x.stride()))
            kinds = {torch.float32: "FLOAT", torch.bfloat16: "BFLOAT16", torch.float16: "HALF"}
            assert port.data_type == kinds[x.dtype]
        found = self._computed(*(tensor_dict[port].detach() for port in self.inputs))
        for port, x in zip(self.outputs, found, strict=True):
            if port is not None:
                tensor_dict[port].copy_(x)

    def _computed(self, q, k, v, o=None, dout=None, stats=None):
        alignment, left, right = self.bounds
        assert left is None or left >= 1
        rows, keys, group = q.shape[2], k.shape[2], q.shape[1] // k.shape[1]
        seen = band(rows, keys, False, None if left is None else left - 1, right,
                    top_left=alignment == "TOP_LEFT")  # fmt: skip
        scores = q @ k.repeat_interleave(group, 1).mT * self.scale
        lse = scores.masked_fill(~seen, float("-inf")).logsumexp(-1, keepdim=True)

        def forward(*tensors):
            q, k, v = (x.transpose(1, 2) for x in tensors)
            return attention(q, k, v, scale=self.scale, seen=seen).transpose(1, 2)

        if stats is None:
            return forward(q, k, v), lse
        assert torch.equal(stats, lse)
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        with torch.enable_grad():
            again = forward(*leaves)
            assert torch.equal(again, o)
            return torch.autograd.grad(again, leaves, dout)


def cudnn(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    def create_handle():
        return "handle"

    def set_stream(handle, stream):
        raise AssertionError("a CPU has no stream")

    names = ("HALF", "BFLOAT16", "FLOAT")
    return install(
        monkeypatch, "cudnn", __version__="1.32.0", pygraph=_Graph, create_handle=create_handle,
        set_stream=set_stream, backend_version=lambda: 92700, cudnnGraphNotSupportedError=NotSupported,
        data_type=SimpleNamespace(**{name: name for name in names}),
        heur_mode=SimpleNamespace(A="A", B="B", FALLBACK="FALLBACK"),
        diagonal_alignment=SimpleNamespace(TOP_LEFT="TOP_LEFT", BOTTOM_RIGHT="BOTTOM_RIGHT"),
    )  # fmt: skip


def sageattention(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As release 1.0.6: a scale for 128 rows of Q and 64 of K, k changed in place, V in fp16."""

    def rounded(x: Tensor, rows: int) -> Tensor:
        parts = []
        for part in x.float().split(rows, dim=2):
            unit = part.abs().amax((2, 3), keepdim=True) / 127
            parts.append((part / unit).round() * unit)
        return torch.cat(parts, 2)

    def sageattn(q, k, v, tensor_layout="HND", is_causal=False, sm_scale=None, smooth_k=True, **kwargs):
        assert not kwargs
        assert q.dtype in (torch.float16, torch.bfloat16, torch.float32)
        assert q.size(-1) in (64, 96, 128), "headdim should be in [64, 96, 128]."
        assert tensor_layout == "HND"
        k -= k.mean(dim=2, keepdim=True)
        q, k, v, dtype = rounded(q, 128), rounded(k, 64), v.to(torch.float16).float(), q.dtype
        seen = band(q.shape[2], k.shape[2], is_causal, None, None)
        o = attention(*(x.transpose(1, 2) for x in (q, k, v)), scale=sm_scale, seen=seen)
        return o.transpose(1, 2).to(dtype)

    return install(monkeypatch, "sageattention", __version__="1.0.6", sageattn=sageattn)


def fla(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """As release 0.6: o and the running sum of keys are rounded to the dtype before they are divided."""

    def chunk_linear_attn(q, k, v, scale=None, initial_state=None, output_final_state=False, normalize=True,
                          cu_seqlens=None):  # fmt: skip
        assert normalize
        assert all(x.is_contiguous() for x in (q, k, v))
        heads = [x.transpose(1, 2).float() for x in (q, k, v)]
        weights = (heads[0] @ heads[1].mT).tril() * scale
        o = (weights.to(v.dtype).float() @ heads[2]).transpose(1, 2).to(v.dtype)
        sums = k.float().cumsum(1).to(k.dtype)
        return o / ((q * scale * sums).sum(-1, keepdim=True) + 1e-10), (None, sums[:, -1:])

    module = install(monkeypatch, "fla.ops.linear_attn", chunk_linear_attn=chunk_linear_attn)
    sys.modules["fla"].__version__ = "0.6.0"  # type: ignore[attr-defined]
    return module


FAKES = {
    "fa2": fa2, "fa3": fa3, "fa4": fa4, "xformers": xformers_ops, "flashinfer": flashinfer,
    "transformer-engine": transformer_engine, "cudnn-frontend": cudnn,
}  # fmt: skip
"""Implementation of exact attention → what puts its package in place."""

APPROXIMATE = {"sageattention": sageattention, "fla-linear": fla}
"""The same of those that are not exact."""
