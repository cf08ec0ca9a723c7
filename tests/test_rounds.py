"""Calls that are timed together share what drifts, are never held for ever, and fail alone."""

from __future__ import annotations

import gc
import json
import random
import weakref
from collections.abc import Callable
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from flashbench._profilers import patience, rounds
from flashbench._profilers.methods import Candidate, time_together
from flashbench._profilers.rounds import RETRIES, Entrant, Setting, Timing, launch_bound, order, take
from flashbench._profilers.steadiness import multimodal
from flashbench._profilers.stopping import Policy
from flashbench._profilers.timers import GraphTimer, busy_times
from flashbench.errors import UnavailableError

POLICY = Policy(limit_s=0.5, min_samples=6, max_samples=50, warmup=2, min_s=0.05, precision=0.01)


class Card:
    """A chip whose every call moves its clock on; caps says which are active at a time. latest: the one that
    was made last, whose clock is the host's, too."""

    latest: Card

    def __init__(self, caps: Callable[[float], list[str]] = lambda now: []) -> None:
        Card.latest = self
        self.now = 0.0
        self.caps = caps
        self.log: list[str] = []
        self.asked = 0
        self.waited: list[float] = []

    def read(self) -> dict[str, Any]:
        self.asked += 1
        caps = self.caps(self.now)
        return {"sm_clock_mhz": 1500 if caps else 1980, "power_w": 300.0, "throttle": caps}

    def others(self) -> dict[str, Any]:
        return {"other_processes": 0, "other_bytes": 0}

    def pause(self, seconds: float) -> None:
        self.waited.append(seconds)
        self.now += seconds


class Fake:
    """A timer of a call that takes call_s, times what ``factor`` says at that moment."""

    method, flush_s, step_s = "events", 0.0, 0.0

    def __init__(
        self, card: Card, name: str, call_s: float = 0.002, factor: Callable[[float], float] = lambda now: 1.0
    ) -> None:
        self.card, self.name, self.call_s, self.factor = card, name, call_s, factor
        self.host = 0.0
        self.late, self.taken = 0, 0
        self.late_of: Callable[[int], bool] = lambda taken: False
        """Whether the sample of that number is late."""

    def call(self) -> None:
        self.card.now += self.call_s

    def samples(self, count: int, meanwhile: Callable[[], None] = lambda: None) -> list[float]:
        self.card.log.append(self.name)
        found = []
        for _ in range(count):
            found.append(self.call_s * self.factor(self.card.now))
            self.card.now += found[-1]
            self.taken += 1
            self.late += self.late_of(self.taken)
        meanwhile()
        return found

    def host_s(self) -> float:
        self.call()
        return self.host

    def wait(self) -> None:
        return


def setting(card: Card, load: str | None = "burst", clocks: bool = True, **policy: Any) -> Setting:
    from dataclasses import replace

    return Setting(
        policy=replace(POLICY, **policy), cache="hot", load=load, seed="7", pause=card.pause,
        clocks=card if clocks else None,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.fixture(autouse=True)
def no_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readings come from around the rounds alone, and times are the card's, so that neither what is read nor
    what a round takes depends on the machine."""

    @contextmanager
    def sampling(clocks: object) -> Any:
        yield []

    monkeypatch.setattr(rounds, "sampling", sampling)
    clock = SimpleNamespace(perf_counter=lambda: Card.latest.now)
    for module in (rounds, patience):
        monkeypatch.setattr(module, "time", clock)


def timings(card: Card, timers: list[Fake], **options: Any) -> list[Timing]:
    found = take([Entrant(timer=timer) for timer in timers], setting(card, **options))
    assert all(isinstance(one, Timing) for one in found), found
    return found  # type: ignore[return-value]


def noisy(seed: int, spread: float) -> Callable[[float], float]:
    source = random.Random(seed)
    return lambda now: 1 + source.gauss(0, spread)


def test_rounds_hold_each_call_once_in_an_order_that_its_seed_gives() -> None:
    card = Card()
    timers = [Fake(card, name, factor=noisy(1, 0.3)) for name in "ABC"]
    found = timings(card, timers)
    pilots = sum((one.how["warmup"]["calls"] - POLICY.warmup) // rounds.IN_A_PILOT for one in found)
    log = card.log[pilots:]
    taken = [log[at : at + 3] for at in range(0, 3 * 5, 3)]
    assert all(sorted(one) == ["A", "B", "C"] for one in taken)
    assert taken == [order(["A", "B", "C"], "7", number) for number in range(5)]
    assert len({"".join(one) for one in taken}) > 1
    assert {one.how["order_seed"] for one in found} == {"7"}
    places = [one.how["rounds"][0]["place"] for one in found]
    assert [taken[0][place] for place in places] == ["A", "B", "C"]


def test_a_slow_drift_hits_calls_in_rounds_alike_and_not_one_after_the_other() -> None:
    def drift(now: float) -> float:
        return 1 + now  # a doubling within a second

    policy = {"precision": 1e-9, "max_samples": 60}
    card = Card()
    one, other = timings(card, [Fake(card, name, factor=drift) for name in "AB"], **policy)
    together = other.samples.median_s / one.samples.median_s
    card = Card()
    [first] = timings(card, [Fake(card, "A", factor=drift)], **policy)
    [second] = timings(card, [Fake(card, "B", factor=drift)], **policy)
    assert abs(together - 1) < 0.05
    assert second.samples.median_s / first.samples.median_s > 1.1


def test_a_steady_call_leaves_the_rounds_and_a_noisy_one_goes_on() -> None:
    card = Card()
    steady, wild = timings(card, [Fake(card, "A"), Fake(card, "B", factor=noisy(3, 0.3))])
    assert (steady.how["stopped"], wild.how["stopped"]) == ("precision", "samples")
    assert len(steady.samples.samples_s) < len(wild.samples.samples_s) == 50
    assert steady.how["half_width"] == 0.0


def test_every_sample_belongs_to_a_round_with_its_clock_and_caps() -> None:
    card = Card()
    [found] = timings(card, [Fake(card, "A")])
    assert sum(one["samples"] for one in found.how["rounds"]) == len(found.samples.samples_s)
    assert all((one["sm_clock_mhz"], one["caps"]) == (1980, []) for one in found.how["rounds"])
    assert found.samples.load == "burst"
    assert found.flags == ()
    json.dumps([found.how, found.clocks], allow_nan=False)


def test_warm_up_goes_on_until_two_medians_agree() -> None:
    card = Card()
    cold = {"A": 12.0, "B": 1.0}

    def heating(now: float) -> float:
        cold["A"] = max(1.0, cold["A"] - 1.0)
        return cold["A"]

    slow, quick = timings(card, [Fake(card, "A", factor=heating), Fake(card, "B")])
    assert slow.how["warmup"]["stable"]
    assert quick.how["warmup"] == {"calls": 2 + 2 * 3, "stable": True}
    assert slow.how["warmup"]["calls"] > quick.how["warmup"]["calls"]
    assert set(slow.samples.samples_s) == {0.002}


def test_a_call_that_never_warms_is_timed_all_the_same() -> None:
    card = Card()
    [found] = timings(card, [Fake(card, "A", factor=noisy(5, 0.6))])
    assert found.how["warmup"]["calls"] <= 2 + rounds.PILOTS * rounds.IN_A_PILOT
    assert len(found.samples.samples_s) >= POLICY.min_samples


def test_a_chip_that_is_always_held_back_gives_samples_that_are_flagged_in_bounded_time() -> None:
    """The guard of another tool threw every sample away and left an empty result."""
    card = Card(lambda now: ["power cap"])
    timers = [Fake(card, "A"), Fake(card, "B")]
    for found in timings(card, timers):
        assert len(found.samples.samples_s) >= POLICY.min_samples
        assert "throttled" in found.flags
        assert len(found.how["set_aside"]) <= RETRIES
        assert all(one["caps"] == ["power cap"] for one in found.how["rounds"] + found.how["set_aside"])
        assert found.how["pauses"] == len(card.waited) / 2
    assert sum(card.waited) == pytest.approx(2 * patience.WAITED_MOST_S)
    assert min(card.waited) > 0


def test_a_cap_that_ends_at_once_costs_another_round_each_time_and_no_more_than_so_many() -> None:
    card = Card()
    timer = Fake(card, "A", factor=noisy(1, 0.3))
    taken = timer.samples

    def capped(count: int, meanwhile: Callable[[], None] = lambda: None) -> list[float]:
        card.caps = lambda now: ["power cap"]  # type: ignore[method-assign]
        found = taken(count, meanwhile)
        card.caps = lambda now: []  # type: ignore[method-assign]
        return found

    timer.samples = capped  # type: ignore[method-assign, assignment]
    [found] = timings(card, [timer])
    assert len(found.how["set_aside"]) == RETRIES
    assert sum(card.waited) < patience.WAITED_MOST_S


def test_a_burst_waits_for_a_cap_to_end_and_its_samples_are_those_of_a_free_chip() -> None:
    started: list[float] = []

    def caps(now: float) -> list[str]:
        return ["thermal cap"] if started and now < started[0] + 0.05 else []

    card = Card(caps)
    timer = Fake(card, "A", factor=lambda now: 1.3 if caps(now) else 1.0)
    warm = timer.host_s
    timer.host_s = lambda: (started.append(card.now), warm())[1]  # type: ignore[method-assign]
    [found] = timings(card, [timer])
    assert set(found.samples.samples_s) == {0.002}
    assert card.waited
    assert found.how["pauses"] == len(card.waited)


def test_a_round_under_a_cap_is_put_aside_and_taken_again() -> None:
    card = Card(lambda now: ["power cap"] if 0.03 < now < 0.09 else [])
    [found] = timings(card, [Fake(card, "A", factor=lambda now: 1.3 if 0.03 < now < 0.09 else 1.0)])
    assert found.how["set_aside"]
    assert all(one["caps"] == [] for one in found.how["rounds"])
    assert "throttled" not in found.flags


def stepping(card: Card, at: float, to: float, told_s: float = 0.2) -> Fake:
    """A call that is slower from a moment on, of which NVML speaks later."""
    card.caps = lambda now: ["power cap"] if now > at + told_s else []  # type: ignore[method-assign]
    wild = noisy(3, 0.004)
    return Fake(card, "A", call_s=0.0015, factor=lambda now: (to if now > at else 1.0) * wild(now))


def test_rounds_after_a_step_down_are_put_aside_although_the_cap_is_named_late() -> None:
    card = Card()
    [found] = timings(card, [stepping(card, at=0.08, to=1.05)], limit_s=0.5, max_samples=300, precision=1e-4)
    assert abs(found.samples.median_s / 0.0015 - 1) < 0.004
    assert found.how["stopped"] == "cap"
    assert len(found.how["set_aside"]) >= RETRIES
    assert sum(one["samples"] for one in found.how["rounds"]) == len(found.samples.samples_s)
    assert "throttled" in found.flags


def test_where_rounds_step_down_and_no_cap_is_named_yet_nvml_is_asked_again_after_a_wait() -> None:
    card = Card(lambda now: ["power cap"] if card.waited else [])
    wild = noisy(3, 0.004)

    def factor(now: float) -> float:
        """Held back from 0.08 s on, until the chip rests."""
        return (1.05 if now > 0.08 and not card.waited else 1.0) * wild(now)

    [found] = timings(
        card, [Fake(card, "A", call_s=0.0015, factor=factor)], limit_s=0.3, max_samples=150, precision=1e-4
    )
    assert card.waited[0] == rounds.RENEWED_S
    assert abs(found.samples.median_s / 0.0015 - 1) < 0.004
    assert found.how["set_aside"]
    assert "throttled" in found.flags


def test_slower_rounds_are_kept_where_no_cap_was_named_or_samples_scatter_as_much() -> None:
    card = Card()
    timer = stepping(card, at=0.08, to=1.05, told_s=1e9)
    [found] = timings(card, [timer], limit_s=0.3, max_samples=200, precision=1e-4)
    assert found.how["set_aside"] == []
    assert found.samples.median_s > 0.0015 * 1.04
    card = Card()
    timer = Fake(card, "A", call_s=0.0015, factor=noisy(2, 0.05))
    card.caps = lambda now: ["power cap"] if now > 0.1 else []  # type: ignore[method-assign]
    [found] = timings(card, [timer], limit_s=0.3, max_samples=200, precision=1e-4)
    assert len(found.how["set_aside"]) <= RETRIES
    assert abs(found.samples.median_s / 0.0015 - 1) < 0.02


def test_slow_calls_of_a_round_each_end_though_no_two_agree() -> None:
    card = Card(lambda now: ["power cap"])
    timer = Fake(card, "A", call_s=0.4, factor=noisy(4, 0.1))
    [found] = timings(card, [timer])
    assert len(found.samples.samples_s) >= POLICY.min_samples


def test_a_call_whose_own_load_is_too_long_is_not_taken_again() -> None:
    card = Card(lambda now: ["power cap"])
    timer = Fake(card, "A", call_s=0.3)
    [found] = timings(card, [timer])
    assert found.how["set_aside"] == []
    assert "throttled" in found.flags


def test_sustained_runs_the_call_before_each_round_and_does_not_flag_the_power_cap() -> None:
    card = Card(lambda now: ["power cap"])
    timer = Fake(card, "A")
    leads: list[float] = []

    class Load:
        def __init__(self, call: Callable[[], object], wait: Callable[[], object]) -> None:
            assert (call, wait) == (timer.call, timer.wait)

        def run_for(self, seconds: float) -> None:
            leads.append(seconds)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "Load", Load)
        [found] = timings(card, [timer], load="sustained")
    assert leads == [rounds.LEAD_S] * len(found.how["rounds"])
    assert found.samples.load == "sustained"
    assert "throttled" not in found.flags
    assert found.how["rounds"][0]["caps"] == ["power cap"]
    assert card.waited == []


def test_heat_is_flagged_under_a_sustained_load_too() -> None:
    card = Card(lambda now: ["thermal cap"])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rounds, "LEAD_S", 0.0)
        [found] = timings(card, [Fake(card, "A")], load="sustained")
    assert "throttled" in found.flags


def test_what_one_call_raises_ends_that_one_alone() -> None:
    card = Card()
    bad = Fake(card, "B")
    good = bad.samples
    bad.samples = lambda count, *rest: good(count, *rest) if len(card.log) < 8 else 1 / 0  # type: ignore
    found = take([Entrant(timer=Fake(card, "A", factor=noisy(1, 0.3))), Entrant(timer=bad)], setting(card))
    assert isinstance(found[0], Timing)
    assert isinstance(found[1], ZeroDivisionError)


def test_each_call_runs_under_its_own_switches() -> None:
    card = Card()
    on: list[str] = []
    seen: set[tuple[str, ...]] = set()

    class Seeing(Fake):
        def samples(self, *rest: Any) -> list[float]:
            assert on == [self.name]
            seen.add(tuple(on))
            return super().samples(*rest)

    def switches(name: str) -> Callable[[], Any]:
        @contextmanager
        def context() -> Any:
            on.append(name)
            yield
            on.remove(name)

        return context

    take([Entrant(timer=Seeing(card, name), context=switches(name)) for name in "AB"], setting(card))
    assert seen == {("A",), ("B",)}
    assert on == []


def test_an_interrupt_is_no_failure_of_a_call() -> None:
    card = Card()
    timer = Fake(card, "A")

    def interrupted(*_: Any) -> list[float]:
        raise KeyboardInterrupt

    timer.samples = interrupted  # type: ignore[method-assign]
    with pytest.raises(KeyboardInterrupt):
        take([Entrant(timer=timer)], setting(card))


def test_where_the_time_went_adds_up() -> None:
    card = Card()
    timer = Fake(card, "A")
    timer.flush_s = 1e-5
    [found] = timings(card, [timer])
    spent = found.how["spent"]
    assert spent["samples_s"] == pytest.approx(sum(found.samples.samples_s))
    assert spent["flushes_s"] == pytest.approx(1e-5 * len(found.samples.samples_s))
    assert set(spent) == {"warmup_s", "rounds_s", "load_s", "paused_s", "samples_s", "flushes_s"}


@pytest.mark.parametrize(
    ("late", "host_s", "time_s", "bound"),
    [
        (1.0, 300e-6, 270e-6, True),  # what events read of many launches is the host's own time
        (0.1, 30e-6, 10e-6, False),  # hidden behind the flush
        (0.5, 30e-6, 30e-6, True),
        (0.5, 30e-6, 55e-6, True),  # one kernel of 25 us that each time comes 30 us late
        (1.0, 30e-6, 61e-6, False),  # the device has more to do than the host
        (1.0, 30e-6, 1e-3, False),  # a busy host
        (1.0, 700e-6, 0.1, False),  # one sample a round, whose launch is next to nothing
        (1 / 3, 700e-6, 700e-6, False),  # three samples a round, the first of them
    ],
)
def test_calls_that_the_device_waits_for_are_launch_bound(
    late: float, host_s: float, time_s: float, bound: bool
) -> None:
    assert launch_bound(late, host_s, time_s) is bound


def test_late_samples_count_from_the_first_round_on() -> None:
    card = Card()
    timer = Fake(card, "A", call_s=1e-4)
    timer.host = 1e-4
    timer.late_of = lambda taken: taken > 4  # the pilots' first four are in time
    [found] = timings(card, [timer])
    assert found.how["late"] == 1.0
    assert "launch-bound" in found.flags
    timer = Fake(card, "B", call_s=1e-4)
    timer.host = 1e-4
    timer.late_of = lambda taken: taken <= 4
    [found] = timings(card, [timer])
    assert found.how["late"] == 0.0
    assert "launch-bound" not in found.flags


@pytest.mark.parametrize("seed", range(5))
def test_two_levels_are_told_from_one_whatever_its_shape(seed: int) -> None:
    source = random.Random(seed)
    one = [1e-3 * (1 + source.gauss(0, 0.01)) for _ in range(100)]
    skewed = [1e-3 * (1 + source.expovariate(50)) for _ in range(100)]
    two = [x * source.choice([1.0, 1.1]) for x in one]
    assert [multimodal(samples) for samples in (one, skewed, two)] == [False, False, True]
    assert not multimodal(two, step_s=1e-4)  # two steps of a coarse timer
    assert not multimodal(two[:19])
    assert not multimodal([0.0] * 30)


# --- one method for all calls of a cell ---------------------------------------------------------------------


class Methods:
    """Timers by name: graphs of a call that refuses raise; what was made is kept."""

    def __init__(self, card: Card, host: float = 0.0, refuses: str = "") -> None:
        self.card, self.host, self.refuses = card, host, refuses
        self.made: list[tuple[str, str]] = []

    def __call__(self, method: str, call: Any, again: Any, device: str, flush: Any) -> Any:
        name = call()
        self.made.append((method, name))
        if method != "events" and name == self.refuses:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")
        timer = Fake(self.card, name)
        timer.method = method
        if method == "events" and name == "A" and self.host:
            timer.host, timer.late_of = self.host, lambda taken: True
        return timer


def together(methods: Methods, method: str) -> list[Timing]:
    candidates = [Candidate(name=name, call=lambda name=name: name) for name in "AB"]
    found = time_together(candidates, "cpu", method, setting(methods.card), methods)
    assert all(isinstance(one, Timing) for one in found)
    return found  # type: ignore[return-value]


@pytest.mark.parametrize(
    ("method", "host", "refuses", "used"),
    [
        ("events", 1.0, "", "events"),
        ("auto", 0.0, "", "events"),
        ("auto", 1.0, "", "graph"),  # A alone is launch-bound; B is timed as A is
        ("auto", 1.0, "B", "events"),
        ("graph", 0.0, "", "graph"),
        ("graph", 0.0, "B", "events"),
        ("cupti", 0.0, "", "cupti"),
        ("cupti", 0.0, "A", "events"),
    ],
)
def test_all_calls_of_a_cell_share_one_method(method: str, host: float, refuses: str, used: str) -> None:
    found = together(Methods(Card(), host, refuses), method)
    assert [one.samples.method for one in found] == [used, used]
    for one in found:
        reason = one.how.get("method_refused", "")
        assert bool(reason) is bool(refuses)
        assert (f"{refuses} refuses it (RuntimeError: operation not permitted" in reason) is bool(refuses)
        assert "\n" not in reason


def test_what_a_timing_that_was_given_up_cost_stands_apart_from_the_warm_up() -> None:
    card = Card()
    kept = together(Methods(card), "events")
    twice = together(Methods(card, 1.0), "auto")
    for one, other in zip(kept, twice, strict=True):
        assert (one.samples.method, other.samples.method) == ("events", "graph")
        assert "given_up_s" not in one.how["spent"]
        lost = sum(one.how["spent"][name] for name in ("warmup_s", "rounds_s", "load_s", "paused_s"))
        assert other.how["spent"]["given_up_s"] == pytest.approx(lost)
        assert other.how["spent"]["warmup_s"] == pytest.approx(one.how["spent"]["warmup_s"])


def test_calls_that_were_not_done_when_another_cost_the_device_are_told_from_it() -> None:
    card, gone = Card(), list[int]()
    done, culprit, other = (Fake(card, name) for name in "ABC")
    plain = culprit.samples

    def breaks(count: int, meanwhile: Callable[[], None] = lambda: None) -> list[float]:
        if card.now > 0.2:
            gone.append(1)
            raise RuntimeError("an illegal memory access was encountered")
        return plain(count, meanwhile)

    def silent() -> None:
        if gone:
            raise RuntimeError("an illegal memory access was encountered")

    culprit.samples = breaks  # type: ignore[method-assign, assignment]
    for one in (done, culprit, other):
        one.wait = silent  # type: ignore[method-assign]
    culprit.factor, other.factor = noisy(2, 0.2), noisy(3, 0.2)  # they never know enough
    found = take([Entrant(timer=one) for one in (done, culprit, other)], setting(card))
    assert isinstance(found[0], Timing)
    assert str(found[1]).startswith("an illegal memory access")
    assert isinstance(found[2], rounds.DeviceLost)


def test_a_call_that_fails_alone_ends_alone() -> None:
    card = Card()
    one, other = Fake(card, "A"), Fake(card, "B")

    def fails(count: int, meanwhile: Callable[[], None] = lambda: None) -> list[float]:
        raise ValueError("of its own")

    one.samples = fails  # type: ignore[method-assign, assignment]
    found = take([Entrant(timer=one), Entrant(timer=other)], setting(card))
    assert isinstance(found[0], ValueError)
    assert isinstance(found[1], Timing)


def test_a_graph_keeps_the_call_it_was_captured_from(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a forward saved for its backward is not the graph's own memory, and is read at each replay."""
    import torch

    class Graph:
        def replay(self) -> None:
            return

    class Stream:
        def wait_stream(self, other: object) -> None:
            return

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "Stream", Stream)
    for name in ("device", "stream", "graph", "current_stream", "synchronize"):
        monkeypatch.setattr(torch.cuda, name, lambda *_, **__: nullcontext())

    class Saved:
        pass

    alive: list[weakref.ref[Saved]] = []

    def make() -> Callable[[], object]:
        saved = Saved()
        alive.append(weakref.ref(saved))
        return lambda: saved

    timer = GraphTimer(make, "cuda:0", None)
    gc.collect()
    assert alive[0]() is not None
    del timer
    gc.collect()
    assert alive[0]() is None


def test_a_launch_bound_cell_whose_capture_fails_stays_flagged() -> None:
    one, other = together(Methods(Card(), 1.0, "B"), "auto")
    assert "launch-bound" in one.flags
    assert "launch-bound" not in other.flags


def test_a_method_that_fails_while_it_times_is_refused_for_all() -> None:
    class Failing(Methods):
        def __call__(self, method: str, *rest: Any) -> Any:
            timer = super().__call__(method, *rest)
            if method == "cupti" and timer.name == "B":
                timer.samples = lambda *_: (_ for _ in ()).throw(UnavailableError("no records"))
            return timer

    found = together(Failing(Card()), "cupti")
    assert [one.samples.method for one in found] == ["events", "events"]
    assert found[0].how["method_refused"] == "cupti: B refuses it (UnavailableError: no records)"


def test_kernel_time_is_that_of_each_calls_own_kernels() -> None:
    flush, first, second = ("sum", 0.0, 50.0), ("a", 51.0, 61.0), ("b", 60.0, 71.0)

    def call(at: float, longer: float) -> list[tuple[str, float, float]]:
        return [(name, at + start, at + end + longer * (name == "b")) for name, start, end in
                (flush, first, second)]  # fmt: skip

    records = call(100.0, 4.0) + call(0.0, 0.0)  # CUPTI's buffers come in any order
    assert busy_times(records, 2, skip=1) == pytest.approx([20e-6, 24e-6])
    assert busy_times(records, 2, skip=0) == pytest.approx([70e-6, 74e-6])


@pytest.mark.parametrize("lost", [0, 1, 3])
def test_records_that_do_not_repeat_are_refused(lost: int) -> None:
    records = [(name, at, at + 1.0) for at, name in enumerate(["sum", "a", "sum", "b", "sum", "a"])]
    with pytest.raises(UnavailableError, match="do not repeat"):
        busy_times(records[lost:], 3, skip=1)
