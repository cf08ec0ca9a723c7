"""o is held to what FlashAttention's forward can do with large scores: right ones pass, a mistake does not.

Right is the model of ``backward_model``: P is stored in the inputs' dtype before it is normalised, and TF32's
products read operands that nobody rounded.
"""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from backward_model import Kernel
from drawn import Example, Scaled, tensors

from flashbench.kernels import _reference
from flashbench.kernels._reference import Reference
from flashbench.kernels._yardstick import Yardstick

DTYPES = ("fp16", "bf16", "fp32", "tf32")
VALUES = ("extreme q", "extreme k", "extreme q", "extreme k", "extreme v", "large q", "normal")


def drawn(dtype: str, number: int) -> Example:
    """A random small problem, of which many have scores of thousands, or one key."""
    r = random.Random(f"{dtype} {number}")
    few = 16 if dtype in ("fp32", "tf32") else 1
    kv_heads, group, dim = r.choice((1, 2)), r.choice((1, 1, 2)), r.choice((16, 40, 64))
    p = Scaled(
        batch=r.choice((1, 2)), num_heads=kv_heads * group, num_kv_heads=kv_heads,
        seqlen_q=r.randint(few, 60), seqlen_k=r.choice((few, r.randint(few, 60), r.randint(few, 200))),
        head_dim=dim, head_dim_v=r.choice((dim, 16, 64)), dtype=dtype, causal=r.random() < 0.4,
        dropout_p=r.choice((0, 0, 0, 0.3)), sinks=r.random() < 0.2,
        scale=r.choice((0, 0, 1.0, 0.5, 0.01, 2.0)),
    )  # fmt: skip
    values = r.choice(VALUES if not p.dropout_p else VALUES[:-3])  # 6e4 times 1 / 0.7 is none of fp16
    return Example(problem=p, seed=number, values=values, rows=("dense",) * 4)


def over(example: Example, *, keys: int | None = None) -> float:
    """o's largest error over its budget. keys: all that the model knows of."""
    p, x = example.problem, tensors(example, "cpu")
    seen, known = x, p
    if keys is not None:
        seen, known = replace(x, k=x.k[:, :, :keys], v=x.v[:, :, :keys]), replace(p, seqlen_k=keys)
    tf32 = p.dtype == "tf32"
    o, _ = Kernel(exact=tf32, cut=tf32)(known, seen, example.seed)
    found = Reference(p, x).compare(o)
    return found.max_abs_error["o"] / found.budget["o"] if found.max_abs_error["o"] else 0.0


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_forward_is_within_the_bound(dtype: str) -> None:
    for number in range(30):
        assert over(drawn(dtype, number)) <= 1, (number, drawn(dtype, number))


@pytest.mark.slow
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_right_forward_is_within_the_bound_a_thousand_times(dtype: str) -> None:
    for number in range(30, 1030):
        assert over(drawn(dtype, number)) <= 1, (number, drawn(dtype, number))


LUCKY = {"fp16": (122, 144, 157), "fp32": (36, 184, 225), "tf32": (25, 98, 277)}
"""Numbers of examples whose right o was over naive's own error alone."""


@pytest.mark.parametrize("dtype", LUCKY)
def test_without_that_room_right_ones_fail(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_reference, "_largest_deviation", lambda variances: 0.0)
    if dtype == "tf32":
        monkeypatch.setattr(_reference, "Yardstick", lambda part, dtype, cut: Yardstick(part, dtype))
    for number in LUCKY[dtype]:
        assert over(drawn(dtype, number)) > 1, number


@pytest.mark.parametrize(("dtype", "times"), [("fp16", 30.0), ("bf16", 4.0), ("fp32", 1e4), ("tf32", 5.0)])
def test_a_key_left_out_is_wrong(dtype: str, times: float) -> None:
    for seed in range(4):
        p = replace(drawn(dtype, 0).problem, seqlen_q=64, seqlen_k=64, causal=False, dropout_p=0.0, scale=0.0)
        assert over(Example(problem=p, seed=seed, values="normal", rows=("dense",) * 4), keys=63) > times
