"""Random problems of attention, their tensors, and what an implementation has to make of them.

A family fixes what kernels are compiled for: implementation, dtype, head dims, group, features, whether
strides are multiples of 16. Of it are drawn shapes, strides, the scale, the sizes of masks, and values.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from flashbench import kernels
from flashbench.covering import FEW_ROWS
from flashbench.errors import SpecError
from flashbench.kernels import Target
from flashbench.kernels._inputs import Inputs, make_inputs
from flashbench.kernels._reference import Reference
from flashbench.kernels._terms import Terms
from flashbench.problem import Problem, packed

EXTREME = 6e4
"""Near the largest number of fp16."""
PAD = 5.0
"""What lies between rows that are not dense; nobody's value."""


@dataclass(frozen=True, kw_only=True)
class Scaled(Problem):
    """A problem with a scale of its own."""

    scale: float = 0.0

    @property
    def softmax_scale(self) -> float:
        return self.scale or 1 / math.sqrt(self.head_dim)


@dataclass(frozen=True, kw_only=True)
class Family:
    """What kernels are compiled for. aligned: strides and addresses are multiples of 16 elements."""

    implementation: str
    dtype: str
    dims: tuple[int, int]
    group: int = 1
    causal: bool = False
    features: frozenset[str] = frozenset()
    aligned: bool = True

    def __str__(self) -> str:
        words = [self.implementation, self.dtype, "x".join(map(str, self.dims)), f"group{self.group}"]
        words += ["causal"] * self.causal + sorted(self.features) + ["unaligned"] * (not self.aligned)
        return "-".join(words)

    @property
    def odd(self) -> bool:
        """Whether lengths and heads are odd, so that strides that need not be multiples of 16 never are."""
        return "bias" in self.features or any(dim % 16 for dim in self.dims) or not self.aligned


@dataclass(frozen=True, kw_only=True)
class Example:
    """One problem. values: how tensors are filled; rows: how each of q, k, v and dout lies in memory.

    poison: None, or which tensor has one number of which kind, and where, as shares of its shape.
    """

    problem: Scaled
    seed: int
    values: str
    rows: tuple[str, ...]
    poison: tuple[str, float, tuple[float, ...]] | None = None


VALUES = ("normal", "normal", "normal", "large q", "extreme v", "extreme q", "extreme k", "equal", "tiny")
FORWARD_ONLY = ("equal", "extreme")
"""``extreme``: some numbers are ±6e4, and gradients leave the dtype's range. ``equal``: all scores are, the
textbook's dq is 0 without an error, and so is the bound."""
LAYOUTS = ("dense", "bshd", "padded", "between")
OF = {
    "flash-v2": ("window", "left", "right", "top-left", "softcap", "alibi", "bias", "sinks", "dropout",
                 "varlen", "block-mask", "deterministic"),
    "flash": ("window", "softcap", "sinks", "varlen"),
    "flash-v3": ("deterministic",), "flash-v1": ("deterministic",),
    "flash-v2-fp8": ("hadamard", "block"), "flash-v3-fp8": ("hadamard", "block"),
}  # fmt: skip
"""Features that a family of each may have."""
DIMS = (
    (64, 64), (128, 128), (32, 32), (16, 16), (64, 128), (96, 96), (256, 256), (40, 40), (80, 48), (24, 100),
)  # fmt: skip
HOPPER_DIMS = ((64, 64), (128, 128), (96, 96), (64, 128), (80, 80), (192, 128), (256, 256), (40, 64))


def families(implementation: str, count: int, target: Target, seed: int = 0) -> list[Family]:
    """So many that the implementation takes on the target, always the same."""
    random, found = Random(f"{implementation} {seed}"), dict[Family, None]()
    dims = HOPPER_DIMS if "v3" in implementation else DIMS
    dtypes = ("fp8", "fp8-e5m2") if "fp8" in implementation else ("fp16", "bf16", "fp16", "fp32", "tf32")
    names = OF.get(implementation, ())
    for _ in range(10_000):
        if len(found) == count:
            break
        one = Family(
            implementation=implementation, dtype=random.choice(dtypes), dims=random.choice(dims),
            group=random.choice((1, 1, 2, 3)), causal=random.random() < 0.5,
            features=frozenset(random.sample(names, min(len(names), random.choice((0, 0, 1, 1, 2, 3))))),
            aligned=random.random() < 0.75 or "fp8" in implementation,
        )  # fmt: skip
        row = kernels.get(implementation)
        try:
            p = _problem(one, {"seqlen_q": 65, "seqlen_k": 65}, 1, 0.0)
        except SpecError:
            continue
        pass_ = passes(one)
        if row.why_unavailable(target) is None and row.why_unsupported(p, pass_, target) is None:
            found[one] = None
    return list(found)


def passes(family: Family) -> str:
    """The pass that is held to fp64: the backward, with o and lse, of what has one."""
    return "fwd" if "fp8" in family.implementation or family.implementation == "flash-decode" else "bwd"


def _problem(family: Family, sizes: dict[str, Any], batch: int, scale: float, **more: Any) -> Scaled:
    f, kv_heads = family, sizes.pop("kv_heads", 1)
    has = f.features.__contains__
    fields: dict[str, Any] = {
        "batch": batch, "num_heads": kv_heads * f.group, "num_kv_heads": kv_heads, "dtype": f.dtype,
        "head_dim": f.dims[0], "head_dim_v": f.dims[1], "causal": f.causal, "scale": scale, **sizes,
        "window": (9 if has("window") or has("left") else -1, 5 if has("window") or has("right") else -1),
        "alignment": "top-left" if has("top-left") else "bottom-right",
        "softcap": 3.0 * has("softcap"), "alibi": has("alibi"), "bias": "bhqk" * has("bias"),
        "sinks": has("sinks"), "dropout_p": 0.3 * has("dropout"), "deterministic": has("deterministic"),
        "block_mask": "random:0.5" * has("block-mask"), "hadamard": has("hadamard"),
        "fp8_scale": "block" * has("block"),
    }  # fmt: skip
    lengths = more.pop("lengths", ((65, 65),) if has("varlen") else ())
    found = Scaled(**fields | more)
    made = packed(found, lengths) if lengths else found
    assert isinstance(made, Scaled)
    return made


def examples(family: Family, longest: int) -> st.SearchStrategy[Example]:
    """Problems of the family with up to so many queries and keys."""

    @st.composite
    def drawn(draw: st.DrawFn) -> Example:
        # of a few rows in fp32 the textbook's own error, which the bound is made of, is chance (covering.py)
        few = family.dtype in ("fp32", "tf32") or "sinks" in family.features
        length = st.integers(FEW_ROWS if few else 0, longest)
        if family.odd:
            length = st.integers(FEW_ROWS // 2 if few else 0, (longest - 1) // 2).map(lambda n: 2 * n + 1)
        sizes = {"seqlen_q": draw(length), "seqlen_k": draw(length)}
        if not draw(st.integers(0, 2)):
            sizes["seqlen_k"] = sizes["seqlen_q"]
        odd_heads = family.odd and family.group != 2
        sizes["kv_heads"] = draw(st.sampled_from((1, 3) if odd_heads else (1, 2, 3)))
        more = _more(draw, family, length)
        scale = draw(st.sampled_from((0.0, 0.0, 1.0, 0.5, 0.01, 1e-5, 2.0)))
        batch = draw(st.sampled_from((1, 3) if family.odd else (1, 2, 3)))
        p = _problem(family, sizes, batch, scale, **more)
        kinds = ("normal", "large q") if "fp8" in family.implementation else VALUES
        layouts = ("odd",) if not family.aligned else LAYOUTS if not family.odd else ("dense", "bshd")
        return Example(
            problem=p, seed=draw(st.integers(0, 2**31 - 1)), values=draw(st.sampled_from(kinds)),
            rows=tuple(draw(st.sampled_from(layouts)) for _ in range(4)), poison=_poison(draw, family, p),
        )  # fmt: skip

    return drawn()


def _more(draw: st.DrawFn, family: Family, length: st.SearchStrategy[int]) -> dict[str, Any]:
    """Sizes of what the family has."""
    has, more = family.features.__contains__, dict[str, Any]()
    if has("window") or has("left") or has("right"):
        left, right = draw(st.integers(0, 90)), draw(st.integers(0, 90))
        more["window"] = (
            left if has("window") or has("left") else -1,
            right if has("window") or has("right") else -1,
        )
    if has("softcap"):
        more["softcap"] = draw(st.sampled_from((0.1, 1.0, 5.0, 50.0)))
    if has("dropout"):
        more["dropout_p"] = draw(st.sampled_from((0.01, 0.3, 0.9)))
    if has("block-mask"):
        more["block_mask"] = draw(st.sampled_from(("random:0.5", "random:0.1", "document")))
    if has("varlen"):
        more["lengths"] = tuple(draw(st.lists(st.tuples(length, length), min_size=1, max_size=4)))
    return more


def _poison(draw: st.DrawFn, family: Family, p: Problem) -> tuple[str, float, tuple[float, ...]] | None:
    plain = not p.lengths and "fp8" not in family.implementation and p.seqlen_q and p.seqlen_k
    if not plain or draw(st.integers(0, 4)) < 4:
        return None
    name, value = draw(st.sampled_from("qkv")), draw(st.sampled_from((math.nan, math.inf, -math.inf)))
    return name, value, tuple(draw(st.floats(0, 1, exclude_max=True)) for _ in range(4))


def tensors(example: Example, device: str) -> Inputs:
    """The inputs, without the poison."""
    p = example.problem
    made = make_inputs(p, device, example.seed)
    random = torch.Generator().manual_seed(example.seed)
    kind, _, which = example.values.partition(" ")
    changed = {name: getattr(made, name) for name in ("q", "k", "v", "dout")}
    if kind == "large":
        changed[which] = changed[which] * 30
    elif kind == "equal":
        changed["q"] = torch.ones_like(changed["q"])
        changed["k"] = torch.ones_like(changed["k"])
    elif kind == "tiny":
        changed = {name: x * 1e-6 for name, x in changed.items()}
    elif kind == "extreme":
        x = changed[which]
        some = (torch.rand(x.shape, generator=random) < 0.002).to(x.device)
        signs = (torch.randint(0, 2, x.shape, generator=random) * 2 - 1).to(x)
        changed[which] = torch.where(some, signs * EXTREME, x)
    for (name, x), rows in zip(changed.items(), example.rows, strict=True):
        changed[name] = laid_out(x, rows)
    return replace(made, **changed)


def laid_out(x: Tensor, rows: str) -> Tensor:
    """The same numbers with other strides; what lies between them is ``PAD``."""
    if rows == "dense" or not x.numel():
        return x.contiguous()
    if rows == "bshd":
        return x.transpose(1, 2).contiguous().transpose(1, 2)
    batch, heads, length, dim = x.shape
    more = {"padded": (0, 0, 16), "between": (2, 16, 0), "odd": (0, 1 - length % 2, 1 - dim % 2 or 2)}[rows]
    begin = 1 if rows == "odd" else 0
    wide = x.new_full((batch, heads + more[0], length + more[1], dim + more[2]), PAD)
    found = wide[:, :heads, :length, begin : begin + dim]
    return found.copy_(x)


def held(family: Family, example: Example, target: Target) -> None:
    """Hold the implementation to fp64 on the example, and to what NaN and infinity may reach.

    Raises AssertionError, which names the problem.
    """
    p, row = example.problem, kernels.get(family.implementation)
    told = f"{family.implementation}: {p.key} scale {p.softmax_scale:g} {example}"
    if reason := row.why_unsupported(p, passes(family), target):
        assert not reason, told
    inputs = tensors(example, target.device)
    reference = Reference(p, inputs, seed=0)
    assert row.prepare_lse is not None
    with row.context(p), torch.no_grad():
        o, lse = row.prepare_lse(p, inputs, {})()
    within = row.exponentials_within(p, target)
    found = reference.compare(o, None, lse, exponentials_within=within)
    assert found.ok, f"{told}\n{found}"
    if passes(family) == "bwd" and not example.values.startswith(FORWARD_ONLY):
        leaves = inputs.detached(grad=True)
        with row.context(p):
            out = row.prepare(p, leaves)()
            gradients = torch.autograd.grad(out, leaves.leaves, leaves.dout)
        found = reference.compare(out.detach(), gradients)
        assert found.ok, f"{told}\n{found}"
    if example.poison is not None:
        _poisoned(row, example, inputs, (o, reference), told)


def _poisoned(row: Any, example: Example, inputs: Inputs, clean: tuple[Tensor, Reference], told: str) -> None:
    """One number of q, k or v that is none, or infinite, reaches rows that see it and no others."""
    p, (o, reference) = example.problem, clean
    assert example.poison is not None
    name, value, shares = example.poison
    x = getattr(inputs, name)
    place = tuple(int(share * size) for share, size in zip(shares, x.shape, strict=True))
    spoilt = laid_out(x, example.rows["qkv".index(name)]).clone()
    spoilt[place] = value
    with row.context(p), torch.no_grad():
        got, lse = row.prepare_lse(p, replace(inputs, **{name: spoilt}), {})()
    touched = torch.zeros(o.shape, dtype=torch.bool, device=o.device)
    seen = _seen(p, inputs)
    heads = [place[1]] if name == "q" else range(place[1] * p.group, (place[1] + 1) * p.group)
    for head in heads:
        if name == "q":
            touched[place[0], head, place[2]] = bool(seen[place[2]].any())
        elif name == "k":
            touched[place[0], head] = seen[:, place[2]][:, None]
        else:  # of a row that does not see it, too: a probability of 0 times NaN is NaN
            touched[place[0], head, :, place[3]] = True
    accuracy = reference.compare(torch.where(touched, o, got))
    assert accuracy.ok, f"{told}\nbeside what the poison reaches: {accuracy}"
    if math.isnan(value) and name != "v":
        assert bool(got.isnan()[touched].all()), f"{told}\na row that sees NaN is a number"
        assert bool(lse.isnan()[touched.any(-1)].all()), f"{told}\nlse of a row that sees NaN is a number"
    elif math.isnan(value):
        column = got[place[0], list(heads)][..., place[3]]
        assert bool(column.isnan()[:, seen[:, place[2]]].all()), f"{told}\na row that sees NaN is a number"


def _seen(p: Problem, inputs: Inputs) -> Tensor:
    """Which query sees which key, (seqlen_q, seqlen_k)."""
    device = inputs.q.device
    rows, columns = (torch.arange(n, device=device) for n in (p.seqlen_q, p.seqlen_k))
    visible = Terms(p, inputs, 0).visible(rows, columns)
    return torch.ones(p.seqlen_q, p.seqlen_k, dtype=torch.bool, device=device) if visible is None else visible


def chosen(target: Target, counts: dict[str, int]) -> Sequence[Family]:
    """The families of each implementation that is to be had there."""
    return [one for name, count in counts.items() for one in families(name, count, target)]
