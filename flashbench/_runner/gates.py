"""Times that cannot be, or that contradict each other: the row keeps them and is flagged ``suspect``.

A time is held to what the hardware allows (dense peak, bytes that have to come from memory), and to the other
times of the same implementation: forward and backward make up forward with backward, and a causal mask
costs what its visible pairs cost. The row that is measured last gets the doubt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from flashbench import devices, iomodel, units
from flashbench.devices import Device
from flashbench.errors import FlashbenchError
from flashbench.kernels import Target
from flashbench.problem import ALIGNMENTS, Cell, Problem
from flashbench.record import Samples

SUM_OFF = 0.10
"""Forward plus backward may differ from both in one call by this share."""
TOO_CHEAP, TOO_DEAR = 0.8, 1.25
"""A causal call takes at least this share of what its visible pairs would of the full time, and, where masked
tiles are skipped, at most this share of the full time."""
SKIPS = 0.8
"""An implementation skips masked tiles if by its model it does less than this share of the full FLOPs."""
UNSTEADY = 0.05
"""Interquartile range over the median above which a time is held to no other."""
LEAST_S = 200e-6
"""Shorter calls are not held to each other: launches and tails count for too much."""

Earlier = Mapping[Cell, Samples]
"""Times of the run so far, of cells that ended ``ok``."""


def doubts(cell: Cell, samples: Samples, target: Target, model: str | None, earlier: Earlier) -> list[str]:
    """Why the time is not to be believed, one clause each; empty where nothing speaks against it.

    model: of the implementation's traffic.
    """
    seconds = samples.median_s
    if seconds <= 0:
        return ["it took no time"]
    card = devices.match(target.name) if target.type == "cuda" else None
    found = [] if card is None else [_roof(cell, seconds, card), _bytes(cell, samples, card, target)]
    found += [_sum(cell, samples, earlier), *_mask(cell, samples, model, earlier)]
    return [doubt for doubt in found if doubt]


def _roof(cell: Cell, seconds: float, card: Device) -> str:
    peak = card.peak_flops_per_s.get(cell.problem.dtype)
    rate = iomodel.flops(cell.problem, cell.pass_) / seconds
    if peak is None or rate <= peak:
        return ""
    return (
        f"{units.format_rate(rate, 'FLOP/s')} is above the dense peak of {units.format_rate(peak, 'FLOP/s')}"
    )


def _bytes(cell: Cell, samples: Samples, card: Device, target: Target) -> str:
    """Inputs come from memory: all of them after a flush, else what the L2 cannot have kept.

    What is written may stay in the L2, so it does not count; nor do rows that no other can see.
    """
    if not _all_seen(cell.problem):
        return ""
    inputs = iomodel.compulsory(cell.problem, cell.pass_).read_bytes
    kept = 0 if samples.cache == "cold" else (target.l2_bytes or card.l2_bytes)
    least = max(0, inputs - kept) / card.hbm_bytes_per_s
    if samples.median_s >= least:
        return ""
    said = f"{units.format_bytes(inputs)} cannot be read in {units.format_seconds(samples.median_s)}"
    return f"{said} at {units.format_rate(card.hbm_bytes_per_s, 'B/s')}"


def _all_seen(problem: Problem) -> bool:
    """Whether every query and key counts, so that each has to be read."""
    return not problem.features and (not problem.causal or problem.seqlen_q == problem.seqlen_k)


def _sum(cell: Cell, samples: Samples, earlier: Earlier) -> str:
    """The three passes, once the last of them is there."""
    times = {cell.pass_: samples}
    for pass_ in ("fwd", "bwd", "fwd+bwd"):
        if (other := earlier.get(replace(cell, pass_=pass_))) and pass_ != cell.pass_:
            times[pass_] = other
    if len(times) < 3 or not _alike(*times.values()) or times["fwd+bwd"].median_s < LEAST_S:
        return ""
    parts, whole = times["fwd"].median_s + times["bwd"].median_s, times["fwd+bwd"].median_s
    if abs(parts - whole) <= SUM_OFF * whole:
        return ""
    return (
        f"forward and backward take {units.format_seconds(parts)} apart and {units.format_seconds(whole)}"
        " in one call"
    )


def _mask(cell: Cell, samples: Samples, model: str | None, earlier: Earlier) -> list[str]:
    """A causal call beside the same call without a mask, whichever was first."""
    if cell.problem.alignment != ALIGNMENTS[0]:
        return []
    partner = replace(cell, problem=replace(cell.problem, causal=not cell.problem.causal))
    other = earlier.get(partner)
    if other is None or not _alike(samples, other):
        return []
    pair = {cell.problem.causal: (cell, samples), partner.problem.causal: (partner, other)}
    (causal, masked), (full, whole) = pair[True], pair[False]
    if min(masked.median_s, whole.median_s) < LEAST_S:
        return []
    share = causal.problem.visible_pairs / full.problem.visible_pairs
    ratio = masked.median_s / whole.median_s
    said = f"causal takes {ratio:.2f} of the time without a mask"
    if ratio < TOO_CHEAP * share:
        return [f"{said}, and {share:.2f} of the pairs are visible"]
    if ratio > TOO_DEAR and _done_share(causal, full, model) < SKIPS:
        return [f"{said}, though it skips masked tiles"]
    return []


def _done_share(causal: Cell, full: Cell, model: str | None) -> float:
    """FLOPs done with the mask over those without, by the model; 1 where it does not say."""
    if model is None:
        return 1.0
    try:
        done, whole = (iomodel.estimate(model, one.problem, one.pass_).done_flops for one in (causal, full))
    except FlashbenchError:
        return 1.0
    return done / whole


def _alike(*samples: Samples) -> bool:
    """Whether times can be held to each other: taken in the same way, and none all over the place."""
    if any(one.spread > UNSTEADY for one in samples):
        return False
    return len({(one.cache, one.method, one.load, one.flush) for one in samples}) == 1
