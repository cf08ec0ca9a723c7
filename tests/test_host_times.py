"""What a call takes the host: what is timed is what is said, and what a card's file holds meets the bars."""

from __future__ import annotations

import itertools
import json
import math
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))
import host_times  # noqa: E402

MEASURED = sorted(ROOT.glob("reports/*/host.json"))


def sets(count: int) -> list[list[torch.Tensor]]:
    return [[torch.randn(1, 2, 8, 8, requires_grad=True) for _ in "qkv"] for _ in range(count)]


@pytest.mark.parametrize("pass_", host_times.PASSES)
@pytest.mark.parametrize("count", [1, 3])
def test_a_call_is_of_its_pass_and_its_tensors(pass_: str, count: int) -> None:
    of, given, grads = sets(count), list[Any](), list[bool]()

    def attend(q: Any, k: Any, v: Any) -> Any:
        given.append(q)
        grads.append(torch.is_grad_enabled())
        return scaled_dot_product_attention(q, k, v)

    call = host_times.calls(attend, pass_, of, torch.ones_like(of[0][0]))
    forwards = len(given)
    assert forwards == (count if pass_ == "bwd" else 0)
    found = [call(n) for n in range(4)]
    if pass_ == "bwd":
        assert len(given) == forwards
    else:
        assert all(one is of[n % count][0] for n, one in enumerate(given))
    assert {*grads} == {pass_ != "fwd"}
    for n, one in enumerate(found):
        want = scaled_dot_product_attention(*of[n % count])
        if pass_ == "fwd":
            torch.testing.assert_close(one, want)
            assert not one.requires_grad
        else:
            torch.testing.assert_close(one, torch.autograd.grad(want.sum(), of[n % count]))


def test_all_take_turns_and_each_repeat_goes_on_where_the_last_one_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Neither the first repeat counts nor the call before one."""
    order, turns, now = list[str](), dict[str, int](), [0.0]
    monkeypatch.setattr(host_times, "time", SimpleNamespace(perf_counter=lambda: now[0]))

    def call(name: str, s: float) -> host_times.Call:
        def one(n: int) -> None:
            order.append(f"{name}{n}")
            turns[name] = turns.get(name, 0) + 1
            now[0] += 1.0 if turns[name] <= 3 or turns[name] % 3 == 1 else s

        return one

    a, b = ("a", "fwd", "seen"), ("b", "fwd", "new")
    found = host_times.timed({a: call("a", 0.25), b: call("b", 0.5)}, lambda: order.append("w"), 2, 2)
    assert order == [
        *("a-1", "w", "a0", "a1", "b-1", "w", "b0", "b1"),
        *("a1", "w", "a2", "a3", "b1", "w", "b2", "b3"),
        *("a3", "w", "a4", "a5", "b3", "w", "b4", "b5", "w"),
    ]
    assert found == {a: [0.25, 0.25], b: [0.5, 0.5]}


def test_what_does_not_run_is_a_row_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, count in (("CALLS", 2), ("SETS", 3)):
        monkeypatch.setattr(host_times, name, count)
    given: dict[tuple[str, bool], set[int]] = {}

    def followed(q: Any, k: Any, v: Any, name: str) -> Any:
        given.setdefault((name, torch.is_grad_enabled()), set()).add(q.data_ptr())
        return scaled_dot_product_attention(q, k, v)

    def refused(*_: Any) -> None:
        raise ValueError("not here")

    by = {
        "sdpa": partial(followed, name="a"), "none": refused, "attention": partial(followed, name="b"),
    }  # fmt: skip
    found = list(host_times.rows(8, 16, by, "cpu"))
    assert [(row["pass"], row["tensors"], row["implementation"]) for row in found] == [
        (pass_, tensors, name)
        for tensors in host_times.KINDS for pass_ in host_times.PASSES for name in by
    ]  # fmt: skip
    left = [row for row in found if row["implementation"] == "none"]
    assert all(len(row["samples_s"]) == host_times.REPEATS for row in found if row not in left)
    counts = {key: len(x) for key, x in given.items()}
    assert counts == {(name, grad): (1 + 3) * (1 + grad) for name in "ab" for grad in (False, True)}
    assert len(set().union(*given.values())) == sum(counts.values()), "each has tensors of its own"
    assert {row["reason"] for row in left} == {"ValueError: not here"}
    assert math.isnan(host_times.host_s(found[1]))


def test_a_call_takes_what_a_tenth_of_its_repeats_stay_below() -> None:
    assert host_times.host_s({"samples_s": [*range(40, 10, -1)]}) == 14
    assert host_times.host_s({"samples_s": [3.0, 1.0, 2.0]}) == 1.0


def test_a_row_above_its_bar_is_named() -> None:
    def row(name: str, pass_: str, *samples_s: float) -> dict[str, Any]:
        of = {"implementation": name, "pass": pass_, "tensors": "seen", "head_dim": 64}
        return {**of, "samples_s": samples_s}

    rows = [
        row("flash-v3", "fwd", *[59e-6] * 3, *[61e-6] * 27),
        row("attention", "fwd", *[59e-6] * 4, *[1.0] * 26),
        row("sdpa", "fwd", 1.0), row("flash-v3", "bwd", 1.0), row("attention", "fwd", 66e-6),
    ]  # fmt: skip
    assert host_times.above({"rows": rows}) == [
        "flash-v3, head_dim 64, fwd, seen tensors: 61 us of 60",
        "attention, head_dim 64, fwd, seen tensors: 66 us of 60",
    ]


@pytest.mark.skipif(not MEASURED, reason="nothing is committed yet")
@pytest.mark.parametrize("path", MEASURED, ids=lambda path: path.parent.name)
def test_a_call_takes_the_host_no_longer_than_it_is_to(path: Path) -> None:
    document = json.loads(path.read_text(encoding="utf-8"))
    assert document["launched_by"] == "flashbench"
    of = {(row["implementation"], row["pass"], row["tensors"]) for row in document["rows"]}
    wanted = itertools.product((*host_times.HELD, "sdpa"), host_times.PASSES, host_times.KINDS)
    assert of >= {*wanted}
    assert all(
        len(row["samples_s"]) == document["repeats"] for row in document["rows"] if "reason" not in row
    )
    assert host_times.above(document) == []
