"""Several calls timed in rounds, A B C, B C A, …, so that whatever drifts meanwhile hits all alike.

Each round takes the calls in a random order (its seed is told) and some samples of each. Clock and caps are
read around every round. A call leaves when its median is known as well as its policy asks. What one call
raises ends that call alone.

The load decides what a sample follows:

- ``burst``: a chip that is not held back. Where a cap is active the next round waits, and a round under a cap
  is put aside and taken again; both a few times only. What NVML says of caps comes late, so where one was
  named at any time, rounds that are clearly slower than the fastest are put aside, too; after RETRIES of them
  the call is done. Where none was named so far, slower rounds have it asked again after a wait. Rounds that
  are all alike are kept under a cap as well, and flagged ``throttled``.
- ``sustained``: the same call, repeated for so long that power and clock have settled. A power cap is what is
  asked for, so it is told and not flagged.
- None: whatever came before; nothing waits and nothing is taken again.
"""

from __future__ import annotations

import math
import random
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from flashbench._profilers.clocks import Clocks
from flashbench._profilers.load import Load
from flashbench._profilers.patience import Patience, Waits
from flashbench._profilers.steadiness import drifted, multimodal
from flashbench._profilers.stopping import Policy, half_width, median_error
from flashbench._profilers.telemetry import Reading, sampling, summary, throttled_by
from flashbench._profilers.timers import Timer
from flashbench.errors import RAISED
from flashbench.record import FLUSH, LOADS, Samples

if TYPE_CHECKING:
    from collections.abc import Iterator

BURST, SUSTAINED = LOADS

RETRIES = 3
"""Rounds of a call that are taken again because of a cap, at most."""
CAPPED, CLEARLY = 0.015, 4
"""Slower than the fastest round is one whose median is longer by this share, less than a capped clock's step
down, and by so many standard errors of the two medians."""
RETRY_S = 0.2
"""A round that took longer is not taken again: its own load is what the chip is held back for."""
RENEWED_S = 0.1
"""How old NVML's readings may be."""
LEAD_S = 0.3
"""Sustained: seconds of the call before each round; an H100's clock settles within 0.2 s."""
SUSTAINED_ROUND_S = 0.1

STABLE = 0.05
"""Warm once two medians in a row differ by less."""
PILOTS, IN_A_PILOT = 6, 3
"""Samples before the first round: so many medians, of so many samples, at most."""

LATE, HOST_SHARE = 1 / 3, 0.5
"""Launch-bound where a larger share of the samples is late and the host's time is a larger share of the
call's: else the device has more to do than the host, which is ahead again after one sample, and what is late
is a busy host's (calls of 157 ms in a committed sweep)."""


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Samples of a call, what to flag, the GPU's clocks (empty on a CPU) and how it was timed.

    how: as ``record.Record.timing`` has it.
    """

    samples: Samples
    flags: tuple[str, ...] = ()
    clocks: Mapping[str, Any] = field(default_factory=dict)
    how: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Entrant:
    """A call in the rounds. context: switches that it runs under, entered outside of what is timed."""

    timer: Timer
    context: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all calls of the rounds share. load: as above. seed: of the orders. pause: waits, seconds.

    patience: with which they wait for caps; of all rounds of a process, so that the next learn from it.
    """

    policy: Policy
    cache: str
    load: str | None = None
    clocks: Clocks | None = None
    seed: str = "0"
    pause: Callable[[float], None] = time.sleep
    patience: Patience = field(default_factory=Patience)


class DeviceLost(Exception):
    """Of a call that was not done when another one left a device on which nothing runs any more."""


def take(entrants: Sequence[Entrant], setting: Setting) -> list[Timing | BaseException]:
    """Time the calls, which have run before, in rounds: a timing each, or what the call raised.

    Where that cost the device, the others have DeviceLost, unless they were done.
    """
    calls = [_Call(entrant, setting) for entrant in entrants]
    for call in calls:
        call.guarded(call.warm_up)
        _end_lost(call, calls)
    number = 0
    while running := [call for call in calls if call.runs]:
        for place, call in enumerate(order(running, setting.seed, number)):
            call.guarded(lambda call=call, place=place: call.round(place))  # type: ignore[misc]
            _end_lost(call, calls)
        number += 1
    return [call.error or call.timing() for call in calls]


def _end_lost(call: _Call, calls: Sequence[_Call]) -> None:
    """End the others where the call has just failed and its device does not answer any more."""
    if call.error is None or isinstance(call.error, DeviceLost):
        return
    try:
        call.timer.wait()
    except Exception:
        for other in calls:
            if other.runs:
                other.error = DeviceLost()


def order(items: Sequence[Any], seed: str, number: int) -> list[Any]:
    """The items in the random order of the round of that number."""
    return random.Random(f"{seed} {number}").sample(items, len(items))


class _Call:
    """One call: its rounds so far and whether it takes part in the next."""

    def __init__(self, entrant: Entrant, setting: Setting) -> None:
        self.timer, self.context = entrant.timer, entrant.context
        self.setting = setting
        self.error: BaseException | None = None
        self.rounds: list[list[float]] = []
        self.notes: list[dict[str, Any]] = []
        self.readings: list[Reading] = []
        self.set_aside: list[dict[str, Any]] = []
        self.again = 0
        self.waits = Waits(setting.patience, setting.pause)
        self.before: Reading = {}
        self.stopped: str | None = None
        self.spent = dict.fromkeys(("warmup_s", "rounds_s", "load_s"), 0.0)

    @property
    def runs(self) -> bool:
        """Whether it takes part in the next round."""
        return self.error is None and self.stopped is None

    @property
    def slow(self) -> int:
        """How many rounds were put aside for being slower than the fastest, and not taken again."""
        return len(self.set_aside) - self.again

    def guarded(self, step: Callable[[], None]) -> None:
        """Do the step under the call's switches; what it raises ends the call."""
        if not self.runs:
            return
        try:
            with self.context():
                step()
        except RAISED as error:
            self.error = error

    @contextmanager
    def _spending(self, name: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.spent[name] += time.perf_counter() - start

    def warm_up(self) -> None:
        """The policy's calls, then samples until two medians agree, within bounds; nothing of it is kept."""
        policy = self.setting.policy
        with self._spending("warmup_s"):
            self.host_s = min((self.timer.host_s() for _ in range(policy.warmup)), default=0.0)
            self.stable, medians = False, list[float]()
            count = min(IN_A_PILOT, policy.min_samples)
            while len(medians) < PILOTS and not self.stable:
                medians.append(statistics.median(self.timer.samples(count)))
                self.stable = len(medians) > 1 and abs(medians[-1] - medians[-2]) <= STABLE * medians[-2]
                if count * medians[-1] > policy.limit_s:
                    break  # a call that slow has nothing left to warm
        self.warmup_calls = policy.warmup + count * len(medians)
        self.late_before = self.timer.late
        self.estimate_s = medians[-1]
        clocks = self.setting.clocks
        self.before = clocks.read() | clocks.others() if clocks else {}

    def round(self, place: int) -> None:
        """Samples of one round, the call being the place-th of it; decides whether it was the last."""
        policy, taken = self._policy(), sum(map(len, self.rounds))
        count = policy.in_a_round(self.estimate_s, taken)
        while True:
            self._lead_in()
            start = time.perf_counter()
            samples, readings = self._sample(count)
            took = time.perf_counter() - start
            waited_s = self.waits.took(samples)
            caps = _caps(readings)
            if not (caps and self._again(took)):
                break
            self.set_aside.append({"samples_s": samples, "caps": caps})
            self.again += 1
            self.waits.for_cap(self.again)
        self.rounds.append(samples)
        self.readings += readings
        note = {"samples": count, "place": place, "waited_s": waited_s, "caps": caps}
        self.notes.append(note | _middle(readings))
        if self.setting.load == BURST:
            self._leave_capped()
        self.stopped = policy.why_stop(self.rounds)
        kept = sum(map(len, self.rounds))
        if self.stopped is None and self.slow >= RETRIES and kept >= policy.min_samples:
            self.stopped = "cap"
        if self.stopped is not None:
            self.waits.teach()

    def _leave_capped(self) -> None:
        """Put the rounds aside that are slower than the fastest, where a cap was named at any time."""
        if self.slow >= RETRIES:
            return
        best = min(self.rounds, key=statistics.median)
        slow = [index for index, one in enumerate(self.rounds) if _slower(one, best)]
        if not slow or not self._was_capped():
            return
        for index in reversed(slow):
            samples, note = self.rounds.pop(index), self.notes.pop(index)
            self.set_aside.append({"samples_s": samples, "caps": note["caps"]})

    def _was_capped(self) -> bool:
        """Whether a cap was named at any time, or is when NVML is asked again as its reading must be new."""
        clocks = self.setting.clocks
        if any(one.get("throttle") for one in (self.before, *self.readings)):
            return True
        if clocks is None or not self.waits.for_word(RENEWED_S):
            return False
        self.readings.append(clocks.read())
        return bool(self.readings[-1].get("throttle"))

    def _policy(self) -> Policy:
        policy = self.setting.policy
        if self.setting.load != SUSTAINED:
            return policy
        from dataclasses import replace

        return replace(policy, round_s=SUSTAINED_ROUND_S)

    def _sample(self, count: int) -> tuple[list[float], list[Reading]]:
        clocks = self.setting.clocks
        with self._spending("rounds_s"), sampling(clocks) as readings:
            samples = self.timer.samples(count, lambda: readings.append(clocks.read()) if clocks else None)
        return samples, readings

    def _lead_in(self) -> None:
        """What the load asks for before a round."""
        if self.setting.load == SUSTAINED:
            with self._spending("load_s"):
                Load(self.timer.call, self.timer.wait).run_for(LEAD_S)
        clocks = self.setting.clocks
        if self.setting.load != BURST or clocks is None or not self.waits.left_s:
            return
        waits = 0
        while (capped := clocks.read().get("throttle")) and self.waits.left_s:
            waits += 1
            self.waits.for_cap(waits)
        if waits and not capped:
            self.waits.ended_cap()

    def _again(self, took: float) -> bool:
        """Whether a round under a cap, which took so long, is worth another after a wait."""
        may = self.again < RETRIES and self.waits.left_s > 0
        return self.setting.load == BURST and may and took <= RETRY_S

    def timing(self) -> Timing:
        """The outcome."""
        timer, setting = self.timer, self.setting
        samples = [sample for one in self.rounds for sample in one]
        clocks: dict[str, Any] = {"host_s": self.host_s}
        flags = []
        if setting.clocks:
            after = {**self.readings[-1], **setting.clocks.others()} if self.readings else {}
            clocks |= {"before": self.before, "during": summary(self.readings), "after": after}
            expected = ("power cap",) if setting.load == SUSTAINED else ()
            if reasons := throttled_by(self.before, clocks["during"], after, expected):
                clocks["throttled_by"] = reasons
                flags.append("throttled")
        if launch_bound(self._late(), self.host_s, statistics.median(samples)):
            flags.append("launch-bound")
        if drifted(samples):
            flags.append("drift")
        if multimodal(samples, timer.step_s):
            flags.append("multimodal")
        cache = setting.cache if timer.method != "wall" else "hot"  # a CPU's caches are never flushed
        return Timing(
            samples=Samples(
                samples_s=tuple(samples), cache=cache, method=timer.method, load=setting.load,
                flush=FLUSH if cache == "cold" else None,
            ),
            flags=tuple(flags), clocks=clocks, how=self._how(),
        )  # fmt: skip

    def _late(self) -> float:
        """Share of the samples that were late, of those that were set aside as well."""
        taken = sum(map(len, self.rounds)) + sum(len(one["samples_s"]) for one in self.set_aside)
        return (self.timer.late - self.late_before) / taken

    def _how(self) -> dict[str, Any]:
        return {
            "rounds": self.notes,
            "late": self._late(),
            "order_seed": self.setting.seed,
            "stopped": self.stopped,
            "half_width": half_width(self.rounds),
            "warmup": {"calls": self.warmup_calls, "stable": self.stable},
            "pauses": self.waits.number,
            "set_aside": self.set_aside,
            "spent": {
                **self.spent,
                "paused_s": self.waits.took_s,
                "samples_s": sum(map(sum, self.rounds)),
                "flushes_s": self.timer.flush_s * sum(map(len, self.rounds)),
            },
        }


def launch_bound(late: float, host_s: float, time_s: float) -> bool:
    """Whether the times are of the host's launches.

    late: share of the samples whose call the device may have waited for, as it was through with the flush
    before the host had enqueued all. host_s: what one call takes the host; time_s: the median sample.
    """
    return late > LATE and host_s > HOST_SHARE * time_s


def _slower(one: Sequence[float], best: Sequence[float]) -> bool:
    """Whether a round is slower than the fastest by more than its samples scatter."""
    apart = statistics.median(one) - statistics.median(best)
    error = math.hypot(median_error(one), median_error(best))
    return apart > CAPPED * statistics.median(best) and apart > CLEARLY * error


def _caps(readings: Sequence[Reading]) -> list[str]:
    return sorted({name for reading in readings for name in reading.get("throttle") or ()})


def _middle(readings: Sequence[Reading]) -> dict[str, Any]:
    """The round's SM clock and power, the medians of its readings; None where none has it."""
    found: dict[str, Any] = {}
    for name in ("sm_clock_mhz", "power_w"):
        values = [value for reading in readings if (value := reading.get(name)) is not None]
        found[name] = statistics.median(values) if values else None
    return found
