"""A sweep learns from its rounds whether waiting for a cap helps, and waits less where it does not."""

from __future__ import annotations

from typing import Any

import pytest
from attention import problem
from test_rounds import Card, Fake, no_thread, noisy, setting  # noqa: F401

from flashbench import profilers, runner
from flashbench._profilers.patience import PAUSE_S, WAITED_MOST_S, Patience, Waits
from flashbench._profilers.rounds import RENEWED_S, Entrant, Timing, take
from flashbench.kernels import Target
from flashbench.problem import Cell
from flashbench.runner import RunOptions

BURST_S = 0.03
"""How long the made-up chip holds its clock after a rest."""


def sweep(calls: int, patience: Patience, helps: bool, **policy: Any) -> list[tuple[Timing, float]]:
    """Calls one after the other under a cap that NVML names for ever: each timing, and what it waited."""
    found = []
    for _ in range(calls):
        card = Resting(lambda now: ["power cap"])
        timer = Fake(card, "A", factor=card.factor if helps else noisy(3, 0.001))
        (one,) = take([Entrant(timer=timer)], shared(card, patience, **policy))
        assert isinstance(one, Timing)
        found.append((one, sum(card.waited)))
    return found


class Resting(Card):
    """A chip that holds its clock for BURST_S after a rest, and else takes a tenth longer."""

    rested = -1.0

    def pause(self, seconds: float) -> None:
        super().pause(seconds)
        self.rested = self.now

    def factor(self, now: float) -> float:
        return 1.0 if 0 <= now - self.rested < BURST_S else 1.1


def shared(card: Card, patience: Patience, **policy: Any) -> Any:
    from dataclasses import replace

    return replace(setting(card, **policy), patience=patience)


def test_whoever_waited_in_vain_halves_what_the_next_one_waits_down_to_a_pause() -> None:
    found = sweep(6, Patience(), helps=False)
    assert [waited for _, waited in found] == pytest.approx([0.12, 0.06, 0.03, 0.02, 0.02, 0.02])
    for one, waited in found:
        assert one.flags == ("throttled",)
        assert one.how["rounds"][0]["waited_s"] == pytest.approx(waited)
        assert all(row["waited_s"] == 0 for row in one.how["rounds"][1:])


def test_a_wait_after_which_rounds_are_faster_is_kept_though_nvml_names_the_cap_all_the_time() -> None:
    for one, waited in sweep(4, Patience(), helps=True):
        assert waited == pytest.approx(WAITED_MOST_S)
        assert one.how["rounds"][0]["waited_s"] > 0
        assert one.how["set_aside"]
        assert min(sum(row["samples_s"]) / len(row["samples_s"]) for row in one.how["set_aside"]) > 0.0021
        assert "throttled" in one.flags


def test_one_short_pause_is_enough_to_see_that_waiting_helps_again() -> None:
    patience = Patience()
    sweep(5, patience, helps=False)
    assert patience.may_wait_s == PAUSE_S
    sweep(1, patience, helps=True)
    assert patience.may_wait_s == WAITED_MOST_S


def test_a_wait_that_ended_a_cap_restores_the_patience() -> None:
    patience = Patience()
    patience.may_wait_s = PAUSE_S
    card = Card(lambda now: [] if card.waited else ["thermal cap"])
    take([Entrant(timer=Fake(card, "A"))], shared(card, patience))
    assert card.waited == [PAUSE_S]
    assert patience.may_wait_s == WAITED_MOST_S


def test_the_calls_of_a_session_share_their_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    met: list[Patience] = []

    def timed(candidates: Any, device: str, method: str, setting: Any) -> list[Exception]:
        met.append(setting.patience)
        return [ValueError("not timed") for _ in candidates]

    monkeypatch.setattr(profilers, "time_together", timed)
    cells = [Cell(implementation="naive", problem=problem(), pass_=pass_) for pass_ in ("fwd", "bwd")]
    options = RunOptions(environment={"device_name": "CPU"})
    for _ in range(2):
        runner.run_cells(cells, Target(), options, lambda record: None)
    first, second, *others = met
    assert first is second
    assert len(others) == 2
    assert others[0] is not first


def test_who_waited_for_no_cap_or_had_one_round_only_says_nothing() -> None:
    patience = Patience()
    patience.may_wait_s = 0.06
    card = Card()
    take([Entrant(timer=Fake(card, "A"))], shared(card, patience))
    assert (card.waited, patience.may_wait_s) == ([], 0.06)
    card = Card(lambda now: ["power cap"])
    take([Entrant(timer=Fake(card, "A"))], shared(card, patience, precision=0.0))
    assert sum(card.waited) == pytest.approx(0.06)
    assert patience.may_wait_s == 0.06


def test_nvml_is_asked_again_after_its_full_time_whatever_the_patience() -> None:
    """That wait is for its word, not for a cap to end, and decides whether slower rounds are put aside."""
    patience = Patience()
    patience.may_wait_s = PAUSE_S
    card = Card(lambda now: ["power cap"] if card.waited else [])
    wild = noisy(3, 0.004)

    def factor(now: float) -> float:
        return (1.05 if now > 0.08 and not card.waited else 1.0) * wild(now)

    timer = Fake(card, "A", call_s=0.0015, factor=factor)
    policy = {"limit_s": 0.3, "max_samples": 150, "precision": 1e-4}
    (found,) = take([Entrant(timer=timer)], shared(card, patience, **policy))
    assert isinstance(found, Timing)
    assert card.waited[0] == RENEWED_S
    assert found.how["set_aside"]
    assert abs(found.samples.median_s / 0.0015 - 1) < 0.004


def test_a_call_waits_as_long_as_it_might_at_first_whatever_others_learn_meanwhile() -> None:
    patience, waited = Patience(), list[float]()
    waits = Waits(patience, waited.append)
    waits.for_cap(1)
    patience.learn(helped=False)
    while waits.left_s:
        waits.for_cap(len(waited) + 1)
    assert sum(waited) == pytest.approx(WAITED_MOST_S)
    assert min(waited) > 0.001
