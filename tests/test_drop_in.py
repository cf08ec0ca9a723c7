"""flash-attention's functions on the bundled kernels: its arguments, its results, what is refused by name."""

from __future__ import annotations

import inspect
import itertools
import math
import re
from typing import Any

import numpy as np
import pytest
import torch
from drop_in import DEVICE, SLACK, assert_as_good, normal, of_plain, plain, qkv, runs
from peer_packages import fa2
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from flashbench import flash_attn

SLOPES = torch.tensor([0.5, 0.1], device=DEVICE)
OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"causal": True, "softmax_scale": 0.3},
    "window": {"window_size": (3, 1)},
    "causal window": {"causal": True, "window_size": (4, 2), "deterministic": True},
    "softcap": {"softcap": 1.5, "causal": True},
    "slopes": {"alibi_slopes": SLOPES},
    "slopes of each": {"alibi_slopes": torch.stack((SLOPES, SLOPES.flip(0))), "causal": True},
}

SLOW = "causal", "window", "slopes"
"""What the others of OPTIONS have, too."""


@pytest.mark.parametrize("name", ["flash_attn_func", "flash_attn_varlen_func"])
def test_arguments_are_those_of_the_package(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Names, order and defaults; the stand-in has those of the package."""
    theirs = inspect.signature(getattr(fa2(monkeypatch), name)).parameters.values()
    mine = inspect.signature(getattr(flash_attn, name)).parameters.values()
    assert [(x.name, x.default) for x in mine] == [(x.name, x.default) for x in theirs]


@runs
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(x, marks=[pytest.mark.slow] if name in SLOW else [], id=name)
        for name, x in OPTIONS.items()
    ],
)
def test_dense_attention_and_its_gradients(options: dict[str, Any]) -> None:
    q, k, v = qkv(7, 11)
    o, lse, nothing = flash_attn.flash_attn_func(q, k, v, return_attn_probs=True, **options)
    wanted, wanted_lse, _ = plain(q, k, v, **of_plain(options))
    do = normal(*o.shape, seed=3)
    found = o, *torch.autograd.grad(o, (q, k, v), do)
    exact = wanted, *torch.autograd.grad(wanted, (q, k, v), do.double())
    assert nothing is None
    assert torch.allclose(lse.double(), wanted_lse, atol=SLACK)
    for mine, theirs in zip(found, exact, strict=True):
        assert mine.shape == theirs.shape
        assert torch.allclose(mine.double(), theirs.double(), atol=SLACK)
    assert isinstance(flash_attn.flash_attn_func(q, k, v, **options), Tensor)


@runs
def test_packed_tensors_are_their_parts() -> None:
    packed = normal(2, 5, 3, 2, 16).requires_grad_()
    q, k, v = packed.unbind(2)
    o = flash_attn.flash_attn_func(q, k, v, causal=True)
    assert torch.equal(flash_attn.flash_attn_qkvpacked_func(packed, causal=True), o)
    assert torch.equal(flash_attn.flash_attn_kvpacked_func(q, packed[:, :, 1:], causal=True), o)
    [grad] = torch.autograd.grad(o.sum(), packed)
    assert grad.shape == packed.shape
    with pytest.raises(ValueError, match="kv has 2 in its third place"):
        flash_attn.flash_attn_kvpacked_func(q, packed)


@runs
@pytest.mark.parametrize(
    "slopes",
    [pytest.param(SLOPES, marks=pytest.mark.slow), torch.stack((SLOPES, SLOPES))],
    ids=["one", "of each"],
)
def test_dropout_is_drawn_by_torchs_seed_and_told(slopes: Tensor) -> None:
    q, k, v = qkv(24, 33)
    options: dict[str, Any] = {"causal": True, "window_size": (20, 0), "alibi_slopes": slopes, "softcap": 2.0}
    torch.manual_seed(5)
    o, _, told = flash_attn.flash_attn_func(q, k, v, 0.3, return_attn_probs=True, **options)
    seen = plain(q, k, v, **options)[2] > 0
    kept = torch.signbit(told).logical_not()
    wanted, _, p = plain(q, k, v, kept=kept, dropout_p=0.3, **options)
    assert torch.allclose(o.double(), wanted, atol=SLACK)
    assert torch.allclose(told.abs().double(), p, atol=SLACK)
    share, pairs = float((~kept & seen).sum() / seen.sum()), int(seen.sum())
    assert abs(share - 0.3) < 4 * math.sqrt(0.3 * 0.7 / pairs)
    again = flash_attn.flash_attn_func(q, k, v, 0.3, **options)
    torch.manual_seed(5)
    assert torch.equal(flash_attn.flash_attn_func(q, k, v, 0.3, **options), o)
    assert not torch.equal(again, o)


@runs
@pytest.mark.parametrize("options", [{}, {"causal": True, "window_size": (2, 0)}], ids=str)
def test_sequences_of_many_lengths(options: dict[str, Any]) -> None:
    lengths = (3, 5), (0, 2), (6, 6)
    q, k, v = (x[0].detach() for x in qkv(9, 13, batch=1))
    starts = [torch.tensor([0, *side], dtype=torch.int32, device=DEVICE).cumsum(0).int()
              for side in zip(*lengths, strict=True)]  # fmt: skip
    o, lse, _ = flash_attn.flash_attn_varlen_func(q, k, v, *starts, 6, 6, return_attn_probs=True, **options)
    row = key = 0
    for queries, keys in lengths:
        one = q[None, row : row + queries], k[None, key : key + keys], v[None, key : key + keys]
        wanted, wanted_lse, _ = plain(*one, **options)
        assert torch.allclose(o[row : row + queries].double(), wanted[0], atol=SLACK)
        assert torch.allclose(lse[:, row : row + queries].double(), wanted_lse[0], atol=SLACK)
        row, key = row + queries, key + keys


@runs
@pytest.mark.parametrize(
    "options", [{}, {"causal": True}, {"causal": True, "window_size": (3, 0), "alibi_slopes": SLOPES}],
    ids=["full", "causal", "window and slopes"],
)  # fmt: skip
@pytest.mark.parametrize("kind", ["contiguous", "entries", "pages"])
def test_a_cache_grows_and_is_attended_to(kind: str, options: dict[str, Any]) -> None:
    used, new, capacity = [4, 7], 2, 16
    k_all, v_all = (normal(2, capacity, 1, 16, seed=seed) for seed in (1, 2))
    q = normal(2, new, 2, 16)
    lengths = torch.tensor(used, dtype=torch.int32, device=DEVICE)
    at = [slice(n, n + new) for n in used]
    fresh = [torch.stack([x[b, at[b]] for b in range(2)]) for x in (k_all, v_all)]
    held = [x.clone() for x in (k_all, v_all)]
    for x in held:
        for b in range(2):
            x[b, used[b] :] = float("nan")
    more: dict[str, Any] = {}
    if kind == "entries":
        held = [torch.cat((torch.full_like(x[:1], float("nan")), x.flip(0))) for x in held]
        more = {"cache_batch_idx": torch.tensor([2, 1], device=DEVICE)}
    if kind == "pages":
        held = [x.view(8, 4, 1, 16).flip(0).contiguous() for x in held]
        more = {"block_table": torch.arange(7, -1, -1, dtype=torch.int32, device=DEVICE).view(2, 4)}
    call = lambda: flash_attn.flash_attn_with_kvcache(  # noqa: E731
        q, *held, *fresh, cache_seqlens=lengths, return_softmax_lse=True, **options, **more
    )
    o, lse = call()
    for b, n in enumerate(used):
        one = q[b, None], k_all[b, None, : n + new], v_all[b, None, : n + new]
        wanted, wanted_lse, _ = plain(*one, **options)
        assert torch.allclose(o[b].double(), wanted[0], atol=SLACK)
        assert torch.allclose(lse[b].double(), wanted_lse[0], atol=SLACK)
    again = flash_attn.flash_attn_with_kvcache(q, *held, cache_seqlens=lengths + new, **options, **more)
    assert torch.equal(again, o)


CACHE = (torch.zeros(2, 2, 4, 16), torch.zeros(2, 8, 2, 16), torch.zeros(2, 8, 2, 16))
PACKED = (*(torch.zeros(3, 2, 16),) * 3, *(torch.tensor([0, 3], dtype=torch.int32),) * 2, 3, 3)
DENSE = (torch.zeros(2, 3, 4, 16),) * 3
QKV = torch.zeros(3, 3, 2, 16)
PAGES_OF = torch.zeros(3, 2, 16), *(torch.zeros(3, 4, 2, 16),) * 2
NEW = {**dict.fromkeys("kv", torch.zeros(2, 1, 2, 16)), "cache_seqlens": 1}
ANGLES = "rotary_cos", "rotary_sin"


@runs
@pytest.mark.parametrize(
    ("name", "given", "options", "said"),
    [
        ("with_kvcache", CACHE, {"rotary_cos": torch.ones(8, 8)}, "rotary_sin None is not taken"),
        ("with_kvcache", CACHE, {"rotary_sin": torch.ones(8, 8)}, "rotary_cos None is not taken"),
        ("with_kvcache", CACHE, dict.fromkeys(ANGLES, torch.ones(8, 8)), "without new k and v"),
        ("with_kvcache", CACHE, {**NEW, **dict.fromkeys(ANGLES, torch.ones(7, 8))},
         r"rotary_cos \(7, 8\) is not taken; accepted: a row for each of the cache's 8 keys"),
        ("with_kvcache", CACHE, {**NEW, **dict.fromkeys(ANGLES, torch.ones(8, 9))}, "half of head_dim 16"),
        ("with_kvcache", CACHE, {**NEW, **dict.fromkeys(ANGLES, torch.ones(8, 8).half())},
         r"rotary_cos torch.float16 \(8, 8\) is not taken; accepted: torch.float32 \(8, 8\)"),
        ("with_kvcache", CACHE, {**NEW, "rotary_cos": torch.ones(8, 8), "rotary_sin": torch.ones(8, 7)},
         r"rotary_sin torch.float32 \(8, 7\)"),
        ("with_kvcache", CACHE, {**NEW, "rotary_cos": 1, "rotary_sin": 1}, "rotary_cos 1 is not taken"),
        ("with_kvcache", CACHE, {"cache_leftpad": torch.zeros(2)},
         r"cache_leftpad torch.float32 \(2,\) is not taken; accepted: int32 \(2,\)"),
        ("with_kvcache", (torch.zeros(3, 2, 4, 16), *CACHE[1:]), {}, "k_cache and v_cache are of 2"),
        ("with_kvcache", (CACHE[0], *PAGES_OF[1:]), {"block_table": torch.zeros(1, 2).int()},
         r"block_table torch.int32 \(1, 2\) is not taken; accepted: int32 \(2, max_pages\)"),
        ("with_kvcache", CACHE, {"cache_batch_idx": torch.zeros(3).int()}, r"cache_batch_idx torch.int32"),
        ("with_kvcache", CACHE, {**NEW, "v": torch.zeros(2, 1, 2, 8)}, r"v must be \(2, 1, 2, 16\)"),
        ("with_kvcache", (*CACHE[:2], torch.zeros(2, 7, 2, 16)), {}, "k_cache and v_cache differ"),
        ("with_kvcache", (*CACHE[:2], CACHE[2].half()), {}, "k_cache and v_cache must be of one dtype"),
        ("with_kvcache", CACHE, {"causal": "yes"}, "causal 'yes' is not taken; accepted: True or False"),
        ("with_kvcache", CACHE, {"rotary_interleaved": 2}, "rotary_interleaved 2"),
        ("with_kvcache", CACHE, {"k": torch.zeros(2, 1, 2, 16)}, "k and v of flash_attn_with_kvcache"),
        ("with_kvcache", CACHE, dict.fromkeys("kv", torch.zeros(2, 1, 2, 16)), "cache_seqlens"),
        ("with_kvcache", CACHE, {"cache_seqlens": torch.ones(2, dtype=torch.int64)},
         r"cache_seqlens torch.int64 \(2,\) is not taken; accepted: one number, or int32 \(2,\)"),
        ("with_kvcache", CACHE, {"cache_seqlens": torch.ones(3).int()}, r"cache_seqlens torch.int32 \(3,\)"),
        ("with_kvcache", CACHE, {"cache_seqlens": 1.5}, "cache_seqlens 1.5"),
        ("with_kvcache", CACHE, {"cache_seqlens": [1, 2]}, r"cache_seqlens \[1, 2\]"),
        ("with_kvcache", CACHE, {"cache_batch_idx": [1, 2]}, r"cache_batch_idx \[1, 2\]"),
        ("with_kvcache", CACHE, {"block_table": [[1, 2]]}, r"block_table \[\[1, 2\]\]"),
        ("with_kvcache", CACHE, {"window_size": 3}, "window_size 3 .* two counts of keys, or -1"),
        ("with_kvcache", CACHE, {"num_splits": None}, "num_splits None is not taken; accepted: a count"),
        ("with_kvcache", CACHE, {"k": 1, "v": 2, "cache_seqlens": 1}, "k 1 is not taken; accepted: a tensor"),
        ("with_kvcache", (CACHE[0], CACHE[1].mT.contiguous().mT, CACHE[2]), {}, "k_cache of stride"),
        ("with_kvcache", (CACHE[0], None, CACHE[2]), {}, "k_cache None is not taken; accepted: a tensor"),
        ("with_kvcache", CACHE, {"softcap": 1.0, "num_splits": 4}, "num_splits 4"),
        ("with_kvcache", CACHE, {"window_size": (1, 0), "cache_seqlens": torch.ones(2)}, "cache_seqlens"),
        ("with_kvcache", CACHE, {"alibi_slopes": torch.ones(3, 4)}, r"must be \(4,\) or \(2, 4\)"),
        ("varlen_func", PACKED, {"block_table": torch.zeros(1, 1)}, "k has 4 dimensions"),
        ("varlen_func", (PACKED[0], *PAGES_OF[1:], *PACKED[3:]), {"block_table": torch.zeros(1, 1)},
         r"block_table torch.float32 \(1, 1\) is not taken; accepted: int32 \(1, max_pages\)"),
        ("varlen_func", PACKED, {"alibi_slopes": torch.ones(2, 2)}, r"must be \(2,\) or \(1, 2\)"),
        ("varlen_func", (*PACKED[:5], 6.0, 6), {"dropout_p": 0.1},
         "max_seqlen_q 6.0 is not taken; accepted: a whole number, 0 or more"),
        ("varlen_func", (*PACKED[:6], torch.tensor(6.0)), {}, "max_seqlen_k torch.float32"),
        ("varlen_func", (*PACKED[:5], -1, 6), {"deterministic": True}, "max_seqlen_q -1 is out of range"),
        ("varlen_func", (*PACKED[:3], *(torch.zeros(2),) * 2, 3, 3), {}, "cu_seqlens_q torch.float32"),
        ("varlen_qkvpacked_func", (QKV, PACKED[3], None), {}, "max_seqlen None is not taken"),
        ("varlen_qkvpacked_func", (QKV, PACKED[3].long(), 3), {}, "cu_seqlens torch.int64"),
        ("varlen_qkvpacked_func", (QKV[:, 1:], PACKED[3], 3), {}, "qkv has 3 in its second place"),
        ("varlen_kvpacked_func", (PACKED[0], QKV, *PACKED[3:]), {}, "kv has 2 in its second place"),
        ("func", DENSE, {"alibi_slopes": torch.ones(3, 4)}, "alibi_slopes must be"),
        ("func", DENSE, {"dropout_p": 1.0}, "dropout_p 1.0"),
        ("func", DENSE, {"window_size": (1,)}, r"window_size \(1,\)"),
        ("func", DENSE, {"window_size": 3}, "window_size 3 is out of range; it must be two counts"),
        ("func", DENSE, {"window_size": None, "deterministic": True}, "window_size None"),
        ("func", DENSE, {"causal": 2, "deterministic": True}, "causal 2 is not taken; accepted: True or F"),
        ("func", DENSE, {"window_size": torch.ones(3).long()}, "window_size torch.int64"),
        ("func", DENSE, {"window_size": (1.5, 0)}, r"window_size \(1.5, 0\) is out of range"),
        ("func", DENSE, {"softcap": None}, "softcap None is not taken; accepted: a number"),
        ("func", DENSE, {"dropout_p": "much"}, "dropout_p 'much' is not taken; accepted: a number from 0"),
        ("func", DENSE, {"softmax_scale": "x", "deterministic": True}, "softmax_scale 'x'"),
        ("func", DENSE, {"alibi_slopes": [0.1]}, r"alibi_slopes \[0.1\] is not taken; accepted: an fp32"),
        ("func", (DENSE[0], None, DENSE[2]), {},
         r"k None is not taken; accepted: a tensor \(batch, seqlen, heads, head_dim\)"),
        ("func", (DENSE[0], DENSE[1].tolist(), DENSE[2]), {}, "k of type list is not taken"),
        ("varlen_func", (*PACKED[:3], None, None, *PACKED[5:]), {}, "cu_seqlens_q None is not taken"),
        ("varlen_func", PACKED, {"window_size": 3}, "window_size 3"),
        ("func", (torch.zeros(3, 4, 16),) * 3, {}, "q has 4 dimensions"),
    ],
)  # fmt: skip
def test_what_is_not_taken_is_refused_by_its_name(
    name: str, given: tuple[Any, ...], options: dict[str, Any], said: str
) -> None:
    moved = [x.to(DEVICE) if isinstance(x, Tensor) else x for x in given]
    options = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in options.items()}
    with pytest.raises(ValueError, match=said):
        getattr(flash_attn, f"flash_attn_{name}")(*moved, **options)


PAGES = (torch.zeros(2, 2, 4, 16), *(torch.zeros(3, 4, 2, 16),) * 2)  # three of four keys
of_values = pytest.mark.skipif(DEVICE != "cpu", reason="a GPU is not waited for to look at them")
"""Of a test of what the values of a tensor of indices decide, not its dtype or shape."""


@runs
@of_values
@pytest.mark.parametrize(
    ("starts", "longest", "said"),
    [
        (PACKED[3], 2, "max_seqlen 2 is too small; the longest sequence has 3 rows"),
        (PACKED[3] + 1, 3, "cu_seqlens must ascend from 0 to the 3 rows"),
    ],
)
def test_starts_of_other_sequences_are_refused_on_a_cpu(starts: Tensor, longest: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        flash_attn.flash_attn_varlen_qkvpacked_func(QKV, starts, longest)


@runs
@of_values
@pytest.mark.parametrize(
    ("given", "options", "said"),
    [
        (CACHE, {"cache_seqlens": 9}, "cache_seqlens [9, 9] are out of range; the cache has room for 0 to 8"),
        (CACHE, {"cache_seqlens": -1}, "cache_seqlens [-1, -1] are"),
        (CACHE, {"cache_seqlens": 8, **dict.fromkeys("kv", torch.zeros(2, 1, 2, 16))}, "and 1 new keys are"),
        (CACHE, {"cache_batch_idx": torch.tensor([0, 2])}, "cache_batch_idx [[0], [2]] is out of range"),
        (CACHE, {"cache_batch_idx": torch.tensor([-1, 0]), "cache_seqlens": 1}, "[[-1], [0]] is out of"),
        (PAGES, {"block_table": torch.tensor([[0, 9], [1, 3]]).int(), "cache_seqlens": 5}, "has 3"),
        (CACHE, {"cache_leftpad": torch.tensor([-1, 0]).int()}, "cache_leftpad [-1, 0] is out of range"),
        (CACHE, {"cache_leftpad": torch.tensor([0, 4]).int(), "cache_seqlens": 3}, "keys end at [3, 3]"),
        (CACHE, {**dict.fromkeys("kv", torch.zeros(2, 1, 2, 16)), "cache_seqlens": 7, "causal": True,
                 **dict.fromkeys(ANGLES, torch.ones(8, 8))}, "rotary_cos has 8 rows; cache_seqlens [7, 7]"),
    ],
)  # fmt: skip
def test_keys_outside_of_a_cache_are_refused_on_a_cpu(
    given: tuple[Tensor, ...], options: dict[str, Any], said: str
) -> None:
    """There the interpreter would read whatever lies there."""
    with pytest.raises(ValueError, match=re.escape(said)):
        flash_attn.flash_attn_with_kvcache(*given, **options)


@runs
@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"num_splits": -1}, "num_splits -1"),
        ({"softmax_scale": -1.0}, "softmax_scale -1.0"),
        ({"softcap": 1.0, "softmax_scale": -1.0}, "softmax_scale -1.0"),
        ({"softcap": 1.0, "num_splits": 4}, "num_splits 4"),
        ({"softcap": -1.0}, "softcap -1.0"),
        ({"cache_batch_idx": torch.tensor([1, 0]).int(), "num_splits": 4, "softcap": 1.0}, "num_splits 4"),
        ({"return_softmax_lse": "yes"}, "return_softmax_lse"),
        ({**dict.fromkeys(ANGLES, torch.ones(7, 8))}, "rotary_cos"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes"),
        ({"q": torch.zeros(2, 2, 4, 8)}, "head_dim"),
        ({"q": torch.zeros(2, 2, 3, 16), "softcap": 1.0}, "num_heads 3"),
        ({"q": torch.zeros(2, 2, 4, 16).half(), "softcap": 1.0}, "one dtype"),
    ],
)  # fmt: skip
def test_a_call_that_is_refused_leaves_the_cache_as_it_was(options: dict[str, Any], said: str) -> None:
    options = {key: x.to(DEVICE) if isinstance(x, Tensor) else x for key, x in options.items()}
    q, k, v = (x.clone().to(DEVICE) for x in CACHE)
    new = torch.ones(2, 1, 2, 16, device=DEVICE)
    with pytest.raises(ValueError, match=said):
        flash_attn.flash_attn_with_kvcache(
            **{"q": q, "k_cache": k, "v_cache": v, "k": new, "v": new, "cache_seqlens": 3, **options}
        )
    assert not k.any()
    assert not v.any()


@runs
@pytest.mark.parametrize(
    "options", [{"causal": True}, {"softcap": 1.0, "deterministic": True}, {"dropout_p": 0.25}], ids=str
)
def test_columns_that_do_not_lie_together_are_copied(options: dict[str, Any]) -> None:
    """As the package copies them; gradients are those of what was given."""
    strided = [x.detach().mT.contiguous().mT.requires_grad_() for x in qkv(5, 7)]
    cu_q, cu_k = (torch.tensor([0, n], dtype=torch.int32, device=DEVICE) for n in (5, 7))
    calls = {
        4: lambda q, k, v: flash_attn.flash_attn_func(q, k, v, **options),
        3: lambda q, k, v: flash_attn.flash_attn_varlen_func(
            q[0], k[0], v[0], cu_q, cu_k, 5, 7, **options
        ),
    }  # fmt: skip
    assert strided[0].stride(-1) != 1
    for ranks, call in calls.items():
        found = []
        for inputs in (strided, [x.detach().contiguous().requires_grad_() for x in strided]):
            torch.manual_seed(0)
            o = call(*inputs)
            do = normal(*o.shape, seed=3)
            found.append((o, *torch.autograd.grad(o, inputs, do)))
        for mine, theirs in zip(*found, strict=True):
            assert torch.equal(mine, theirs), ranks


@runs
@pytest.mark.parametrize("more", [{}, {"softcap": 1.0}], ids=str)
def test_columns_beside_a_cache_are_copied_and_lengths_may_be_strided(more: dict[str, Any]) -> None:
    tensors = [normal(2, 3, heads, 16, seed=seed) for seed, heads in enumerate((4, 2, 2))]
    used = torch.tensor([[3, 0], [5, 0]], dtype=torch.int32, device=DEVICE)
    found = []
    for turn in (lambda x: x, lambda x: x.mT.contiguous().mT):
        q, k, v = map(turn, tensors)
        held = [normal(2, 8, 2, 16, seed=seed) for seed in (3, 4)]
        lengths = used[:, 0] if not found else used[:, 0].contiguous()
        o = flash_attn.flash_attn_with_kvcache(q, *held, k, v, cache_seqlens=lengths, **more)
        found.append((o, *held))
    for mine, theirs in zip(*found, strict=True):
        assert torch.equal(mine, theirs)


@runs
@pytest.mark.parametrize("kind", ["contiguous", "entries", "pages"])
def test_a_window_that_is_causal_and_rotation_without_rotary_mean_no_more(kind: str) -> None:
    q, k, v = normal(2, 2, 4, 16), *(normal(4, 4, 2, 16, seed=seed) for seed in (1, 2))
    more: dict[str, Any] = {"cache_seqlens": 3}
    if kind == "contiguous":
        k, v = k[:2], v[:2]
    elif kind == "entries":
        more["cache_batch_idx"] = torch.tensor([3, 1], device=DEVICE)
    else:
        table = torch.arange(4, dtype=torch.int32, device=DEVICE).view(2, 2)
        more |= {"block_table": torch.cat((table, table), 1)[:, :2], "cache_seqlens": 6}
    call = flash_attn.flash_attn_with_kvcache
    wanted = call(q, k, v, causal=True, **more)
    assert not torch.equal(call(q, k, v, **more), wanted)
    for options in (
        {"window_size": (-1, 0)}, {"window_size": [-1, 0], "causal": True},
        {"window_size": (-1, 3), "causal": True}, {"causal": True, "rotary_interleaved": False},
    ):  # fmt: skip
        assert torch.equal(call(q, k, v, **more, **options), wanted)


@runs
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}, {"cache_leftpad": [1, 4]}], ids=str)
def test_pages_past_the_end_of_a_sequence_may_be_anything(options: dict[str, Any]) -> None:
    q, k, v = (x.to(DEVICE) for x in PAGES)
    table = torch.tensor([[0, 99], [1, -1]], dtype=torch.int32, device=DEVICE)
    if "cache_leftpad" in options:
        options = {"cache_leftpad": torch.tensor(options["cache_leftpad"], dtype=torch.int32, device=DEVICE)}
    call = flash_attn.flash_attn_with_kvcache
    assert call(q, k, v, cache_seqlens=4, block_table=table, **options).isfinite().all()


@runs
@pytest.mark.parametrize("options", [{}, {"softcap": 1.0}], ids=str)
def test_a_cache_without_pages_has_no_keys(options: dict[str, Any]) -> None:
    q, pages = normal(2, 3, 4, 16), torch.zeros(0, 4, 2, 16, device=DEVICE)
    table = torch.zeros(2, 2, dtype=torch.int32, device=DEVICE)
    o, lse = flash_attn.flash_attn_with_kvcache(
        q, pages, pages, cache_seqlens=0, block_table=table, return_softmax_lse=True, **options
    )
    assert not o.any()
    assert lse.isneginf().all()
    none = torch.zeros(3, dtype=torch.int32, device=DEVICE)
    starts = torch.tensor([0, 2, 6], dtype=torch.int32, device=DEVICE)
    o = flash_attn.flash_attn_varlen_func(
        q.flatten(0, 1), pages, pages, starts, none, 4, 7, block_table=table, **options
    )
    assert not o.any()


@runs
@pytest.mark.parametrize("more", [{}, {"window_size": (2, 0)}, {"causal": True}], ids=str)
def test_padding_before_keys_that_do_not_lie_together(more: dict[str, Any]) -> None:
    """Part of a longer cache cannot be taken for pages of a row each; a longer batch is its first ones."""
    k, v = (normal(3, 9, 2, 16, seed=seed) for seed in (1, 2))
    q, pad = normal(2, 2, 4, 16), torch.tensor([2, 0], dtype=torch.int32, device=DEVICE)
    call = flash_attn.flash_attn_with_kvcache
    o = call(q, k[:, :8], v[:, :8], cache_seqlens=7, cache_leftpad=pad, **more)
    assert torch.equal(
        o, call(q, k[:, :8].clone(), v[:, :8].clone(), cache_seqlens=7, cache_leftpad=pad, **more)
    )
    for b, first in enumerate((2, 0)):
        wanted = plain(q[b, None], k[b, None, first:7], v[b, None, first:7], **more)[0]
        assert torch.allclose(o[b].double(), wanted[0], atol=SLACK)


@runs
def test_a_window_of_one_query_reads_the_keys_that_it_shows() -> None:
    """By flash-decode, with splits; what the window hides may be on pages that do not exist any more."""
    k, v = (normal(8, 4, 2, 16, seed=seed) for seed in (1, 2))
    table = torch.tensor([[7, 6, 5], [0, 1, 2]], dtype=torch.int32, device=DEVICE)
    q, call = normal(2, 1, 4, 16), flash_attn.flash_attn_with_kvcache
    hidden = [x.clone().index_fill(0, torch.tensor([7, 0], device=DEVICE), math.nan) for x in (k, v)]
    o = call(q, *hidden, cache_seqlens=11, block_table=table, window_size=(4, 0), num_splits=3)
    for b in range(2):
        one = (x[table[b].long()].flatten(0, 1)[None, :11] for x in (k, v))
        wanted = plain(q[b, None], *one, window_size=(4, 0))[0]
        assert torch.allclose(o[b].double(), wanted[0], atol=SLACK)


@runs
def test_packed_sequences_of_packed_tensors_are_their_parts() -> None:
    packed = normal(9, 3, 2, 16).requires_grad_()
    q, k, v = packed.unbind(1)
    cu = torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    o = flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, 5, 5, causal=True)
    assert torch.equal(flash_attn.flash_attn_varlen_qkvpacked_func(packed, cu, 5, causal=True), o)
    assert torch.equal(
        flash_attn.flash_attn_varlen_kvpacked_func(q, packed[:, 1:], cu, cu, 5, 5, causal=True), o
    )
    [grad] = torch.autograd.grad(o.sum(), packed)
    assert grad.shape == packed.shape


@runs
@pytest.mark.parametrize(
    "options",
    [{}, {"dropout_p": 0.1}, {"deterministic": True, "causal": np.bool_(1)}, {"causal": 1}],
    ids=str,
)
def test_numbers_of_other_kinds_are_taken(options: dict[str, Any]) -> None:
    """As Python's own: tensors of one number, numpy's, a window in a tensor."""
    q, k, v = (x[0].detach() for x in qkv(6, 6, batch=1))
    cu = torch.tensor([0, 6], dtype=torch.int32, device=DEVICE)
    plainly = {name: bool(x) if name == "causal" else x for name, x in options.items()}
    for lengths in ((torch.tensor(6), np.int32(6)), (torch.tensor(6, dtype=torch.int32), True + 5)):
        for window in (torch.tensor([2, 0]), np.array([2, 0]), [np.int64(2), torch.tensor(0)]):
            found = []
            for sizes, more in ((lengths, {**options, "window_size": window}),
                                ((6, 6), {**plainly, "window_size": (2, 0)})):  # fmt: skip
                torch.manual_seed(3)
                found.append(flash_attn.flash_attn_varlen_func(q, k, v, cu, cu, *sizes, **more))
            assert torch.equal(*found)


@runs
def test_a_cache_takes_numbers_of_other_kinds() -> None:
    q, k, v = (normal(2, n, heads, 16, seed=n) for n, heads in ((2, 4), (8, 2), (8, 2)))
    call = flash_attn.flash_attn_with_kvcache
    for options in ({"causal": 1}, {"causal": np.bool_(True)}, {"window_size": torch.tensor([-1, 0])}):
        o, _ = call(q, k, v, cache_seqlens=np.int64(5), return_softmax_lse=np.bool_(True), **options)
        assert torch.equal(o, call(q, k, v, cache_seqlens=5, causal=True))
    used = torch.tensor([5], dtype=torch.int32, device=DEVICE)
    o = call(q[:1], k, v, cache_seqlens=used)  # a longer cache's first ones
    assert torch.equal(o, call(q[:1], k[:1], v[:1], cache_seqlens=used))


@runs
@pytest.mark.filterwarnings("ignore")
def test_turned_padded_and_paged_calls_stay_whole_under_torch_compile() -> None:
    """A cache with all of it, and packed sequences of pages with slopes of their own and dropout told."""
    slopes, cu = torch.stack((SLOPES, SLOPES * 2)), torch.tensor([0, 4, 6], dtype=torch.int32, device=DEVICE)
    table = torch.tensor([[3, 1], [0, 2]], dtype=torch.int32, device=DEVICE)
    used, pad = (torch.tensor(x, dtype=torch.int32, device=DEVICE) for x in ([3, 5], [1, 0]))
    cos, sin = normal(12, 4, seed=8).cos(), normal(12, 4, seed=8).sin()

    def step(q: Tensor, k: Tensor, v: Tensor, pages: list[Tensor]) -> tuple[Tensor, ...]:
        o = flash_attn.flash_attn_with_kvcache(
            q * 2, *pages, k, v, cos, sin, used, None, pad, table, window_size=(4, 1), alibi_slopes=slopes
        )
        packed = flash_attn.flash_attn_varlen_func(
            q.flatten(0, 1), *pages, cu, cu, 4, 5, 0.3, alibi_slopes=slopes, block_table=table,
            return_attn_probs=True,
        )  # fmt: skip
        return o, *packed, pages[0].sum()

    tensors = [normal(2, n, heads, 16, seed=n) for n, heads in ((3, 2), (1, 1), (1, 1))]
    found = []
    for function in (step, torch.compile(step, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(7)
        found.append(function(*tensors, [normal(4, 4, 1, 16, seed=seed) for seed in (5, 6)]))
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=SLACK)


@runs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("options", [{"causal": True}, {"causal": True, "window_size": (3, 0)}], ids=str)
def test_a_cache_stays_whole_under_torch_compile(options: dict[str, Any]) -> None:
    """Written in place, attended to, without a break of the graph."""

    def step(q: Tensor, k: Tensor, v: Tensor, held: list[Tensor], used: Tensor) -> Tensor:
        o = flash_attn.flash_attn_with_kvcache(q * 2, *held, k, v, cache_seqlens=used, **options)
        return o + held[1].sum()

    q, k, v = normal(2, 1, 4, 16), normal(2, 1, 2, 16, seed=1), normal(2, 1, 2, 16, seed=2)
    used = torch.tensor([3, 5], dtype=torch.int32, device=DEVICE)
    ours, theirs = ([normal(2, 8, 2, 16, seed=seed) for seed in (3, 4)] for _ in range(2))
    wanted = step(q, k, v, ours, used)
    found = torch.compile(step, fullgraph=True, backend="aot_eager")(q, k, v, theirs, used)
    assert torch.allclose(found, wanted, atol=SLACK)
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine, other)


@runs
@pytest.mark.parametrize("new", [0, 2])
def test_the_operator_of_a_cache_is_what_torch_takes_it_for(new: int) -> None:
    fresh = [normal(2, new, 2, 16, seed=seed) if new else None for seed in (1, 2)]
    held = [normal(2, 8, 2, 16, seed=seed) for seed in (3, 4)]
    used = torch.tensor([3, 5], dtype=torch.int32, device=DEVICE)
    torch.library.opcheck(
        torch.ops.flashbench.attention_with_kvcache.default,
        (
            normal(2, 3, 4, 16),
            *held,
            *fresh,
            *(None if new == 0 else normal(9, 4) for _ in ANGLES),
            used,
            None,
            used // 2,
            None,
            None,
            None,
            True,
            -1,
            -1,
            0.0,
            True,
            0,
        ),
    )


@runs
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "backend"),
    [
        ({"dropout_p": 0.2}, "aot_eager"),
        ({"deterministic": True, "causal": True, "window_size": (4, 0)}, "aot_eager"),
        pytest.param({"dropout_p": 0.2}, "inductor", marks=pytest.mark.slow),
        pytest.param({"deterministic": True, "alibi_slopes": SLOPES}, "inductor", marks=pytest.mark.slow),
    ],
    ids=str,
)  # fmt: skip
def test_dropout_and_deterministic_stay_whole_under_torch_compile(
    options: dict[str, Any], backend: str
) -> None:
    """A compiled call draws from torch's generator what the eager one draws, anew in each call and place."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, other = (flash_attn.flash_attn_func(q * 2, k, v, **options) for _ in range(2))
        return o, other

    compiled, inputs, found = torch.compile(layer, fullgraph=True, backend=backend), qkv(9, 13), []
    do = normal(2, 9, 2, 16, seed=3)
    for function in (layer, compiled):
        torch.manual_seed(7)
        calls = [function(*inputs), function(*inputs)]
        outputs = [o for pair in calls for o in pair]
        gradients = [x for o, _ in calls for x in torch.autograd.grad(o, inputs, do, retain_graph=True)]
        found.append((*outputs, *gradients))
        alike = [torch.equal(outputs[0], o) for o in outputs[1:]]
        assert alike == ([False] * 3 if "dropout_p" in options else [True] * 3)
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=SLACK)


@runs
@pytest.mark.filterwarnings("ignore")
def test_what_dropout_did_is_told_under_torch_compile() -> None:
    """And packed sequences have dropout there."""

    def layer(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> tuple[Any, ...]:
        dense = flash_attn.flash_attn_func(q, k, v, 0.2, return_attn_probs=True)
        packed = flash_attn.flash_attn_varlen_func(q[0], k[0], v[0], cu, cu, 5, 5, 0.2, causal=True)
        return *dense, packed

    inputs, cu = qkv(9, 9), torch.tensor([0, 4, 9], dtype=torch.int32, device=DEVICE)
    found = []
    for function in (layer, torch.compile(layer, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(7)
        found.append(function(*inputs, cu))
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=SLACK)


@runs
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_compiled_checkpoint_drops_the_same_again() -> None:
    """What is computed a second time for the backward has the seed of the first."""

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q * 2, k, v, 0.3).sin()  # type: ignore[union-attr]

    def saving(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return checkpoint(layer, q, k, v, use_reentrant=False)

    inputs, found = qkv(9, 13), []
    for function in (layer, torch.compile(saving, fullgraph=True, backend="aot_eager")):
        torch.manual_seed(7)
        o = function(*inputs)
        found.append((o, *torch.autograd.grad(o.sum(), inputs)))
    for mine, theirs in zip(*found, strict=True):
        assert torch.allclose(mine, theirs, atol=SLACK)


@runs
@pytest.mark.filterwarnings("ignore")
def test_the_operator_with_dropout_is_what_torch_takes_it_for() -> None:
    q, k, v = (x.detach().transpose(1, 2).requires_grad_() for x in qkv(5, 7))
    torch.library.opcheck(
        torch.ops.flashbench.attention_portable, (q, k, v, None, None, None, torch.tensor(5), 0.25)
    )


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("options", "mode"),
    [
        ({"dropout_p": 0.2}, "default"),
        ({"deterministic": True}, "default"),
        ({"deterministic": True}, "reduce-overhead"),
    ],
    ids=str,
)
def test_compiled_calls_on_a_gpu_are_the_eager_ones(options: dict[str, Any], mode: str) -> None:
    """To the bit, gradients too, in each of five calls."""
    inputs = qkv(300, 300, dim=64, dtype=torch.bfloat16)
    do = normal(2, 300, 2, 64, seed=3, dtype=torch.bfloat16)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return flash_attn.flash_attn_func(q * 2, k, v, causal=True, **options) * 2  # type: ignore[operator]

    found = []
    for function in (layer, torch.compile(layer, fullgraph=True, mode=mode)):
        torch.manual_seed(7)
        found.append([])
        for _ in range(5):
            torch.compiler.cudagraph_mark_step_begin()
            o = function(*inputs)
            found[-1].append([x.clone() for x in (o, *torch.autograd.grad(o, inputs, do))])
    for mine, theirs in zip(*found, strict=True):
        assert all(torch.equal(x, y) for x, y in zip(mine, theirs, strict=True))
    assert torch.equal(found[0][0][0], found[0][1][0]) == ("dropout_p" not in options)


@runs
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_compiled_calls_beside_cuda_graphs_drop_anew() -> None:
    """A captured call would drop the same in all; gradients are of what the call says that it dropped."""
    rows, dim = (300, 64) if DEVICE == "cuda" else (40, 16)
    inputs = qkv(rows, rows, dim=dim, dtype=torch.bfloat16)
    do = normal(2, rows, 2, dim, seed=3, dtype=torch.bfloat16)

    def layer(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        o, _, told = flash_attn.flash_attn_func(
            q * 2, k, v, causal=True, dropout_p=0.2, return_attn_probs=True
        )
        return o * 2, told

    compiled = torch.compile(layer, fullgraph=True, mode="reduce-overhead")
    masks = list[Tensor]()
    for _ in range(5):
        torch.compiler.cudagraph_mark_step_begin()
        o, told = compiled(*inputs)
        masks.append(torch.signbit(told).logical_not())
        found = o.clone(), *(x.clone() for x in torch.autograd.grad(o, inputs, do))
        sides = []
        for exactly in (torch.float64, torch.bfloat16):
            q, k, v = inputs
            side = plain(q * 2, k, v, causal=True, kept=masks[-1], dropout_p=0.2, dtype=exactly)[0] * 2
            sides.append((side, *torch.autograd.grad(side, inputs, do.to(exactly))))
        assert_as_good(found, *sides, str(len(masks)))
    assert not any(torch.equal(x, y) for x, y in itertools.combinations(masks, 2))


LENGTHS = [(113, 203), (128, 217), (113, 211), (108, 256), (256, 512), (512, 256), (1024, 1024), (1023, 1024)]
MASKS = {"full": {}, "causal": {"causal": True}, "local": {"window_size": (37, 19)}}
KINDS = {"mha": (6, 6), "gqa": (6, 2), "mqa": (6, 1)}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", MASKS.values(), ids=MASKS)
@pytest.mark.parametrize("heads", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("dim", [59, 64, 128, 256])
def test_a_grid_as_the_packages_own(
    dim: int, heads: tuple[int, int], mask: dict[str, Any], dtype: torch.dtype
) -> None:
    """Of outputs and gradients: at most twice the error of the same in the dtype by torch, and its rounding.

    Every option in turn over the lengths: none, slopes per sequence, softcap, dropout, deterministic.
    """
    turns = [{}, {"alibi_slopes": None}, {"softcap": 15.0}, {"dropout_p": 0.17}, {"deterministic": True}]
    for number, (rows, keys) in enumerate(LENGTHS):
        options = {**mask, **turns[number % len(turns)]}
        if "alibi_slopes" in options:
            options["alibi_slopes"] = normal(4, heads[0], seed=9).abs() * 0.3
        inputs = qkv(rows, keys, heads=heads, batch=4, dim=dim, dtype=dtype)
        o, _, told = flash_attn.flash_attn_func(*inputs, return_attn_probs=True, **options)
        drops = {"kept": torch.signbit(told).logical_not()} if told is not None else {}
        do = normal(*o.shape, seed=3, dtype=dtype)
        found = o, *torch.autograd.grad(o, inputs, do)
        sides = []
        for exactly in (torch.float64, dtype):
            side = plain(*inputs, **of_plain(options), **drops, dtype=exactly)[0]
            sides.append((side, *torch.autograd.grad(side, inputs, do.to(exactly))))
        assert_as_good(found, *sides, str((rows, keys, options)))
