"""What is asked, independent of who computes it: Problem, Cell, dtypes and passes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, replace
from functools import cached_property
from typing import Any, Self

from flashbench import named_masks
from flashbench.errors import SpecError, UnknownName

PASSES = ("fwd", "bwd", "fwd+bwd")
"""Passes that can be timed. ``bwd`` is the backward alone, from saved activations."""

MAX_SEQLEN = 2**31 - 1

ALIGNMENTS = ("bottom-right", "top-left")
"""Where the diagonal of a causal mask or window ends: at the last query and key, or at the first."""

UNLIMITED = -1
"""A side of a window that hides nothing."""

LAYOUTS = ("bhsd", "bshd")
"""Order of the dimensions of q, k, v and o in memory; their shape is always written (b, h, s, d)."""

FP8_SCALES = ("tensor", "head", "block")
"""What shares one scale of an fp8 input."""


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
        DType(name="fp8", bytes=1, torch_name="float8_e4m3fn", help="8-bit float, e4m3: 4 exponent bits"),
        DType(name="fp8-e5m2", bytes=1, torch_name="float8_e5m2", help="8-bit float, e5m2: wider range"),
    )
}


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One attention problem.

    Tensors: q (batch, num_heads, seqlen_q, head_dim), k (batch, num_kv_heads, seqlen_k, head_dim),
    v (batch, num_kv_heads, seqlen_k, head_dim_v), o (batch, num_heads, seqlen_q, head_dim_v).

    Query i sees keys j with lo <= j - i <= hi (``band``): all of them, or with causal those up to
    the diagonal, or with window = (left, right) those from ``left`` before the diagonal to ``right``
    after it, both included (flash-attention's meaning: left 4 shows 5 keys; -1 is unlimited). The
    diagonal is j = i + seqlen_k - seqlen_q, so that the last query sees the last key
    (bottom-right), or j = i (top-left). A row without visible keys has o = 0, lse = -inf and zero
    gradients. dropout_p: share of the probabilities that are dropped.

    lengths: (seqlen_q, seqlen_k) of each sequence of a packed batch of sequences of different
    lengths (``packed`` makes one); seqlen_q and seqlen_k are then the longest ones. Empty: every
    sequence is as long as they say.

    The score of query i and key j, s = softmax_scale * q_i.k_j, is changed in this order:

    - softcap > 0: s = softcap * tanh(s / softcap) (Gemma 2, arXiv:2408.00118, section 2);
    - alibi: s -= slope_h * |i + shift - j|, shift the diagonal's as above (``kernels/_inputs.py``);
    - bias: s += a tensor in q's dtype of which each place of (batch, num_heads, seqlen_q, seqlen_k)
      is full or 1: "bhqk", "1hqk", "b11k", …;
    - what the causal mask, the window or the block mask hides is -inf. block_mask, in blocks of
      128 x 128: a name of named_masks.NAMES, ``random:DENSITY`` or an .npz file;
    - sinks: the softmax has one more score per head, an fp32 logit without a value (gpt-oss); lse
      holds it, and is the logit for a row without visible keys;
    - dropout_p, with kept probabilities divided by 1 - dropout_p.

    layout: bhsd, or bshd, which changes strides only. fp8_scale: what shares a scale; hadamard:
    whether q and k are rotated before they are rounded; both of fp8 alone. deterministic: every
    repeat must give the same bits, so nothing may be added with atomics.

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
    window: tuple[int, int] = (UNLIMITED, UNLIMITED)
    alignment: str = ALIGNMENTS[0]
    dropout_p: float = 0.0
    lengths: tuple[tuple[int, int], ...] = ()
    softcap: float = 0.0
    alibi: bool = False
    bias: str = ""
    sinks: bool = False
    block_mask: str = ""
    layout: str = LAYOUTS[0]
    fp8_scale: str = ""
    hadamard: bool = False
    deterministic: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise UnknownName("dtype", self.dtype, DTYPES)
        for name in ("batch", "num_heads", "num_kv_heads", "head_dim", "head_dim_v"):
            if getattr(self, name) < 1:
                raise SpecError(f"{name} {getattr(self, name)} is out of range; it must be 1 or more")
        for name in ("seqlen_q", "seqlen_k"):
            if not 0 <= getattr(self, name) <= MAX_SEQLEN:
                raise SpecError(f"{name} {getattr(self, name)} is out of range; it must be 0 to {MAX_SEQLEN}")
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f"num_heads {self.num_heads} is not divisible by num_kv_heads {self.num_kv_heads};"
                " every K/V head serves the same number of query heads"
            )
        # as read back from JSON, which knows lists only
        object.__setattr__(self, "window", tuple(self.window))
        if self.lengths != ():
            object.__setattr__(self, "lengths", tuple((q, k) for q, k in self.lengths))
        if self.options:
            self._check_options()
        if self.lengths:
            self._check_lengths()

    def _check_options(self) -> None:
        if len(self.window) != 2 or min(self.window) < UNLIMITED:
            raise SpecError(f"window {self.window} is out of range; it must be two counts of keys, or -1")
        if self.alignment not in ALIGNMENTS:
            raise UnknownName("alignment", self.alignment, ALIGNMENTS)
        if not 0 <= self.dropout_p < 1:
            raise SpecError(f"dropout_p {self.dropout_p} is out of range; it must be at least 0 and below 1")
        if not 0 <= self.softcap < math.inf:
            raise SpecError(f"softcap {self.softcap} is out of range; it must be 0 (off) or more")
        if self.bias and not _is_bias(self.bias):
            raise SpecError(f"bias {self.bias!r} is no shape; it must be bhqk with 1 for any of the letters")
        if self.block_mask:
            named_masks.check(self.block_mask)
        if self.layout not in LAYOUTS:
            raise UnknownName("layout", self.layout, LAYOUTS)
        if self.fp8_scale and self.fp8_scale not in FP8_SCALES:
            raise UnknownName("fp8_scale", self.fp8_scale, FP8_SCALES)
        if (self.fp8_scale or self.hadamard) and self.dtype_bytes > 1:
            option = "fp8_scale" if self.fp8_scale else "hadamard"
            raise SpecError(f"{option} is of fp8 alone; the dtype is {self.dtype}")
        for option, given in (("bias", self.bias), ("block_mask", self.block_mask)):
            if given and self.lengths:
                raise SpecError(f"{option} {given!r} has no meaning in a packed batch; one of them may stand")

    def _check_lengths(self) -> None:
        if min(map(min, self.lengths)) < 0:
            raise SpecError("lengths are out of range; every sequence must have 0 queries and 0 keys or more")
        longest = tuple(max(side) for side in zip(*self.lengths, strict=True))
        if len(self.lengths) != self.batch or longest != (self.seqlen_q, self.seqlen_k):
            raise SpecError(
                f"batch {self.batch} of {self.seqlen_q}x{self.seqlen_k} does not agree with its lengths:"
                f" {len(self.lengths)} sequences, the longest {longest[0]}x{longest[1]}"
            )

    @cached_property
    def group(self) -> int:
        """Query heads per K/V head: 1 is MHA, num_heads is MQA."""
        return self.num_heads // self.num_kv_heads

    @cached_property
    def dtype_bytes(self) -> int:
        """Bytes of one element of q, k, v, o."""
        return DTYPES[self.dtype].bytes

    @property
    def softmax_scale(self) -> float:
        """1/sqrt(head_dim)."""
        return 1 / math.sqrt(self.head_dim)

    @cached_property
    def masked(self) -> bool:
        """Whether a causal mask or a window may hide keys."""
        return self.causal or self.window != (UNLIMITED, UNLIMITED)

    @property
    def _aligned(self) -> bool:
        """Whether anything depends on where the diagonal is."""
        return self.masked or self.alibi or bool(self.block_mask)

    @property
    def diagonal(self) -> int:
        """Query i stands at key i + diagonal: seqlen_k - seqlen_q bottom-right, 0 top-left."""
        return self.seqlen_k - self.seqlen_q if self.alignment == ALIGNMENTS[0] else 0

    @cached_property
    def band(self) -> tuple[int, int]:
        """(lo, hi): query i sees key j if lo <= j - i <= hi; -seqlen_q and seqlen_k hide nothing."""
        nq, nk = self.seqlen_q, self.seqlen_k
        if not self.masked:
            return -nq, nk
        diagonal = self.diagonal
        left, right = self.window
        low = -nq if left == UNLIMITED else max(-nq, diagonal - left)
        if self.causal:
            right = 0
        return low, nk if right == UNLIMITED else min(nk, diagonal + right)

    @cached_property
    def visible_pairs(self) -> int:
        """(query, key) pairs that the mask leaves visible, over batch and query heads."""
        if self.lengths:
            return sum(part.visible_pairs for part in self.parts())
        nq, nk = self.seqlen_q, self.seqlen_k
        per_head = nq * nk
        if self.block_mask:
            per_head = named_masks.seen(self).visible_pairs
        elif self.masked:
            low, high = self.band
            # keys up to the upper edge of the band, less those before its lower edge
            per_head = clamped_sum(nq, high + 1, nk) - clamped_sum(nq, low, nk)
        return self.batch * self.num_heads * per_head

    @cached_property
    def rows_without_keys(self) -> int:
        """Query rows per head that see no key (causal, bottom-right: the first ones, seqlen_q > seqlen_k)."""
        if self.block_mask:
            return self.seqlen_q - named_masks.seen(self).queries_with_keys
        if not self.masked:
            return 0 if self.seqlen_k else self.seqlen_q
        low, high = self.band
        return self.seqlen_q - max(0, min(self.seqlen_q - 1, self.seqlen_k - 1 - low) - max(0, -high) + 1)

    @cached_property
    def keys_without_queries(self) -> int:
        """Key rows per head that no query sees."""
        if self.block_mask:
            return self.seqlen_k - named_masks.seen(self).keys_with_queries
        if not self.masked:
            return 0 if self.seqlen_q else self.seqlen_k
        low, high = self.band
        return self.seqlen_k - max(0, min(self.seqlen_k - 1, self.seqlen_q - 1 + high) - max(0, low) + 1)

    def parts(self) -> list[Problem]:
        """The problem itself, or of a packed batch one problem per distinct length, with its batch."""
        if not self.lengths:
            return [self]
        return [
            replace(self, batch=count, seqlen_q=q, seqlen_k=k, lengths=())
            for (q, k), count in Counter(self.lengths).items()
        ]

    @property
    def rows(self) -> tuple[int, int]:
        """(query rows, key rows) of all sequences, of one head."""
        if self.lengths:
            return sum(queries for queries, _ in self.lengths), sum(keys for _, keys in self.lengths)
        return self.batch * self.seqlen_q, self.batch * self.seqlen_k

    @property
    def bias_shape(self) -> tuple[int, ...]:
        """The shape of the bias: of each place its full size, or 1; empty without a bias."""
        full = (self.batch, self.num_heads, self.seqlen_q, self.seqlen_k)
        return tuple(1 if letter == "1" else size for letter, size in zip(self.bias, full, strict=False))

    @cached_property
    def options(self) -> Mapping[str, Any]:
        """The fields that differ from their defaults, of those that have one."""
        values = self.__dict__
        return {name: values[name] for name, default in _OPTIONAL if values[name] != default}

    @cached_property
    def features(self) -> frozenset[str]:
        """What an implementation must know beyond plain and causal attention: names of FEATURES."""
        asked = {FEATURES[name] for name in self.options if name in FEATURES}
        if not self._aligned:
            asked.discard(FEATURES["alignment"])
        if self.dtype_bytes == 1:
            asked.add("fp8")
        return frozenset(asked)

    @property
    def key(self) -> str:
        """Stable text that identifies the problem, as used for resume and in messages."""
        heads = f"h{self.num_heads}" if self.group == 1 else f"h{self.num_heads}/{self.num_kv_heads}"
        rows = f"n{self.seqlen_q}" if self.seqlen_q == self.seqlen_k else f"n{self.seqlen_q}x{self.seqlen_k}"
        dims = (
            f"d{self.head_dim}" if self.head_dim == self.head_dim_v else f"d{self.head_dim}/{self.head_dim_v}"
        )
        mask = "causal" if self.causal else "full"
        return f"b{self.batch} {heads} {rows} {dims} {self.dtype} {mask}{self.options_text}"

    @property
    def options_text(self) -> str:
        """What the key says of options that differ from their defaults, each after a space."""
        words = []
        if self.window != (UNLIMITED, UNLIMITED):
            words.append(f"w{self.window[0]},{self.window[1]}")
        if self._aligned and self.alignment != ALIGNMENTS[0]:
            words.append(self.alignment)
        if self.dropout_p:
            words.append(f"dropout{self.dropout_p:g}")
        if self.lengths:
            words.append("lengths" + "+".join(f"{q}x{k}" for q, k in self.lengths))
        if self.softcap:
            words.append(f"softcap{self.softcap:g}")
        words += [name for name in ("alibi", "sinks", "hadamard", "deterministic") if getattr(self, name)]
        texts = {name: getattr(self, name) for name in ("bias", "block_mask", "fp8_scale")}
        words += [f"{name}={text}" for name, text in texts.items() if text]
        if self.layout != LAYOUTS[0]:
            words.append(self.layout)
        return "".join(f" {word}" for word in words)


_OPTIONAL = tuple((field.name, field.default) for field in fields(Problem) if field.default is not MISSING)
"""Fields with a default, looked up once: 100,000 problems ask."""

FEATURES = {
    "window": "window", "alignment": "top-left", "softcap": "softcap", "alibi": "alibi", "bias": "bias",
    "sinks": "sinks", "dropout_p": "dropout", "block_mask": "block-mask", "lengths": "varlen",
    "layout": "bshd", "deterministic": "deterministic",
}  # fmt: skip
"""Field of a Problem → the feature that it asks for; beside them fp8, of the dtype."""


def _is_bias(text: str) -> bool:
    return len(text) == 4 and all(place in (letter, "1") for place, letter in zip(text, "bhqk", strict=True))


def packed(problem: Problem, lengths: Sequence[tuple[int, int]]) -> Problem:
    """The problem with a packed batch of sequences, (seqlen_q, seqlen_k) each, in its place.

    Raises SpecError for no sequence.
    """
    if not lengths:
        raise SpecError("lengths are empty; a packed batch has 1 sequence or more")
    longest_q, longest_k = (max(side) for side in zip(*lengths, strict=True))
    return replace(
        problem, batch=len(lengths), seqlen_q=longest_q, seqlen_k=longest_k, lengths=tuple(lengths)
    )


def clamped_sum(count: int, first: int, limit: int) -> int:
    """Sum over i < count of i + first, clamped to 0..limit: an arithmetic series and a flat end."""
    start = min(count, max(0, -first))  # the first i whose term is 0 or more
    stop = min(count, max(start, limit - first))  # the first that is capped
    rising = (stop - start) * (2 * first + start + stop - 1) // 2
    return rising + (count - stop) * limit


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

    def to_json(self) -> dict[str, Any]:
        """A JSON object; options of the problem at their defaults are left out."""
        required = (field.name for field in fields(self.problem) if field.default is MISSING)
        problem = {**{name: getattr(self.problem, name) for name in required}, **self.problem.options}
        return {"implementation": self.implementation, "pass": self.pass_, "problem": problem}

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Self:
        """The cell of ``to_json``. A number given as text is refused by name, not by a comparison that fails.

        Raises KeyError for a missing field, ValueError, TypeError, SpecError or UnknownName for a wrong one.
        """
        for name, item in value["problem"].items():
            if name.startswith(("batch", "num_", "seqlen", "head_dim")) and type(item) is not int:
                raise ValueError(f"cell.problem.{name} is {item!r}; a whole number is wanted")
        problem = Problem(**value["problem"])
        return cls(implementation=value["implementation"], problem=problem, pass_=value["pass"])
