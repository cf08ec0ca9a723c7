"""Which timer the calls of one cell get: one for all of them, or their times are not comparable.

``auto`` takes events, and CUDA graphs where the host cannot launch one of the calls fast enough. Where a
graph or CUPTI is wanted and one call does not allow it, all are timed by events, and each says why.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from flashbench._profilers.flush import Before, Flush, Pause
from flashbench._profilers.rounds import DeviceLost, Entrant, Setting, Timing, take
from flashbench._profilers.timers import Call, Timer, timer_of
from flashbench.errors import RAISED, message

Outcomes = list[Timing | BaseException]

Make = Callable[[str, Call, Callable[[], Call], str, "Before | None"], Timer]
"""As ``timer_of``."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A call to be timed, which has run before. name: how it is told from the others.

    again: makes the call anew, on the stream that is current then. context: switches it is called under.
    """

    name: str
    call: Call
    again: Callable[[], Call] | None = None
    context: Callable[[], AbstractContextManager[object]] = nullcontext


class _Refused(Exception):
    """A method that one of the calls does not allow, in words."""


def time_together(
    candidates: Sequence[Candidate], device: str, method: str, setting: Setting, make: Make = timer_of
) -> Outcomes:
    """A timing of each call, or what it raised. make stands in for ``timer_of``."""
    before: Before | None = None
    if device.startswith("cuda"):
        before = Flush(device) if setting.cache == "cold" else Pause()

    def timed(name: str) -> Outcomes:
        entrants = [
            Entrant(timer=_timer(one, name, device, before, make), context=one.context) for one in candidates
        ]
        return take(entrants, setting)

    def timed_alike(name: str) -> Outcomes:
        found = timed(name)
        if _lost(found):
            return found
        for one, outcome in zip(candidates, found, strict=True):
            if isinstance(outcome, BaseException):
                raise _Refused(_why(one, name, outcome)) from None
        return found

    by_events = timed("events") if method in ("auto", "events") else []
    stands = _lost(by_events) or not any(map(_bound, by_events))
    if method == "events" or (method == "auto" and stands):
        return by_events
    try:
        found = timed_alike("graph" if method == "auto" else method)
        return [_after(one, earlier) for one, earlier in zip(found, by_events or found, strict=True)]
    except _Refused as refused:
        reason = str(refused)
    return [_because(one, reason) for one in by_events or timed("events")]


def _timer(candidate: Candidate, method: str, device: str, flush: Before | None, make: Make) -> Timer:
    again = candidate.again or (lambda: candidate.call)
    try:
        with candidate.context():
            return make(method, candidate.call, again, device, flush)
    except RAISED as error:
        if method == "events":
            raise
        reason = _why(candidate, method, error)
    raise _Refused(reason)  # out here, where the error keeps no tensors alive


def _why(candidate: Candidate, method: str, error: BaseException) -> str:
    first, *_ = [*message(error).strip().splitlines(), ""]
    return f"{method}: {candidate.name} refuses it ({type(error).__name__}: {first[:200]})"


def _lost(found: Outcomes) -> bool:
    return any(isinstance(one, DeviceLost) for one in found)


def _bound(one: Timing | BaseException) -> bool:
    return isinstance(one, Timing) and "launch-bound" in one.flags


def _after(one: Timing | BaseException, earlier: Timing | BaseException) -> Timing | BaseException:
    """What the timing that was given up cost stands apart: nobody needed it."""
    if not (isinstance(one, Timing) and isinstance(earlier, Timing)) or one is earlier:
        return one
    lost = sum(earlier.how["spent"][name] for name in ("warmup_s", "rounds_s", "load_s", "paused_s"))
    return replace(one, how={**one.how, "spent": {**one.how["spent"], "given_up_s": lost}})


def _because(one: Timing | BaseException, reason: str) -> Timing | BaseException:
    return replace(one, how={**one.how, "method_refused": reason}) if isinstance(one, Timing) else one
