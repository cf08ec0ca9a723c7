"""Launches that are kept: what Triton would hand its launcher, by addresses and stream; hooks are told."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("triton")
from triton import knobs
from triton.backends.nvidia.driver import wrap_handle_tensordesc

from flashbench.kernels import _hopper_again as again


class Run:
    """As Triton's: a call goes on to a closure that makes descriptors and calls the launcher."""

    global_scratch_size = profile_scratch_size = 0

    def __init__(self) -> None:
        self.launched: list[tuple[object, ...]] = []
        self.made = 0
        launcher = lambda *args: self.launched.append(args)  # noqa: E731

        def inner(*args: object) -> None:
            self.made += 1
            launcher(*args)

        self.launch = inner

    def __call__(self, *args: object) -> None:
        self.launch(*args)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr(again, "_stream", lambda: 7)
    return Run()


def kept(run: Run) -> again.Again:
    return again.Again(SimpleNamespace(run=run, function=5, packed_metadata="p"), 132)


def test_a_launch_over_the_same_addresses_is_the_same_without_tritons_part(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = kept(run)
    assert not own.start((1, 2))
    assert own.keep((1, 2), ("a", "b"))
    assert own.start((1, 2))
    assert run.launched == [(132, 1, 1, 7, 5, "p", None, None, None, "a", "b")] * 2
    assert run.made == 1
    assert not own.start((1, 3))
    monkeypatch.setattr(again, "_stream", lambda: 8)
    assert not own.start((1, 2))


def test_only_the_latest_are_kept(run: Run) -> None:
    own = kept(run)
    for n in range(again.KEPT + 1):
        own.keep((n,), (n,))
    assert [own.start((n,)) for n in range(again.KEPT + 1)] == [False] + [True] * again.KEPT


def test_who_follows_launches_is_told_of_them_by_triton(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    own = kept(run)
    own.keep((1,), ())
    monkeypatch.setattr(knobs.runtime, "launch_exit_hook", lambda metadata: None)
    assert not own.start((1,))
    assert not own.keep((2,), ())
    assert len(run.launched) == 1


def test_this_triton_has_its_launcher_where_it_is_looked_for() -> None:
    launch = wrap_handle_tensordesc(print, {0: "tensordesc<fp16[64, 64]>", 1: "i32"}, None)
    sizes = {"global_scratch_size": 0, "profile_scratch_size": 0}
    assert again.possible(SimpleNamespace(run=SimpleNamespace(launch=launch, **sizes)))
    assert not again.possible(SimpleNamespace(run=SimpleNamespace(launch=print, **sizes)))
    sizes["global_scratch_size"] = 8
    assert not again.possible(SimpleNamespace(run=SimpleNamespace(launch=launch, **sizes)))
