"""The notes under the table of ``flashbench io-model``: units, tiles, cards, crossovers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import islice
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flashbench._cli.io_request import Request
    from flashbench.iomodel import PaperView
    from flashbench.problem import Problem


def notes(request: Request, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What a reader of the table must know, one text a line. rows: as shown, or the first of a CSV."""
    from flashbench._cli import io_alternatives, io_effects

    first = rows[0]
    notes = [
        f"M is the on-chip memory of one SM: {first['sram_bytes']:,} bytes; typed sizes take KB = 1024 bytes,"
        " lengths k = 1024; printed sizes are GB = 10^9 bytes",
        "read, write: requested bytes, which kernels load and store between SM and L2; compulsory: each"
        " tensor once; extra: predicted peak memory beyond the inputs, outputs included; FLOP/B: FLOPs over"
        " requested bytes; standard/this: how many times fewer requested bytes than standard",
        "FLOPs: 2 pairs (d + dv) forward, 2 pairs (3d + 2dv) backward, over the pairs that the mask leaves"
        " visible (causal: N(N+1)/2, not N^2/2)",
    ]
    if not request.choices[0].tiles and any(row["tile_source"] == "sram" for row in rows):
        notes.append(
            "tiles from M in elements: flash-v1 block_k = ceil(M/4d), block_q = min(block_k, d); flash-v2"
            " block_q = floor(M/2d) with K/V streamed (block_k 1); 'shipped': those of the published code,"
            " 'kernel': those of the bundled kernel"
        )
    if any(row["tiles_fit"] is False for row in rows):
        notes.append("'does not fit': the tile needs more than M elements, so no such kernel can run")
    notes += io_effects.notes(request)
    if request.choices[0].device:
        notes.append(
            "DRAM and time are a model, not a count: docs/time-model.md; --json has their band. For flash-v2"
            " and later M is shared memory only; accumulators are in registers, which are not in M"
        )
        notes += _card_notes(request, rows)
    notes += [text for text in (request.left_out, request.printed, request.remark) if text]
    return [*notes, *_crossings(request), *io_alternatives.notes(request)]


def _card_notes(request: Request, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to know of DRAM and times, each once: doubts, constants of others, blanks and their reasons.

    From cards, models and dtypes, not from rows, of which ``--csv`` keeps only the first.
    """
    from flashbench._iomodel.explain import BELOW, why_blank
    from flashbench._iomodel.setting import setting
    from flashbench._iomodel.time import uncounted

    cards = {choice.device.name: choice.device for choice in request.choices if choice.device}
    dtypes = dict.fromkeys(problem.dtype for problem in request.problems)
    doubts = [f"{name}: uncertain: {card.uncertain}" for name, card in cards.items() if card.uncertain]
    borrowed: dict[str, str] = {}
    blanks: dict[str, None] = {}
    left_out: dict[str, None] = {}
    explained = set()
    for name, card in cards.items():
        for row in request.names:
            model = request.kernels.get(row, row)
            for dtype in dtypes:
                if why := why_blank(model, card, dtype):
                    blanks[why] = None
                    explained.add((name, row, dtype))
                    continue
                on = setting(card, model, None, dtype)
                if not on.calibrated:
                    borrowed.setdefault(f"{row} on {name}", f"time not calibrated: {on.note}")
                left_out |= dict.fromkeys(
                    f"{row}: {text}" for problem in request.problems if (text := uncounted(problem, on))
                )
    if any(
        row["time_s"] is None and (row["gpu"], row["model"], row["dtype"]) not in explained for row in rows
    ):
        blanks["no DRAM and time where the time model does not cover the case"] = None
    timed = [row for row in rows if row["time_s"] is not None]
    notes = [BELOW] if timed else []
    if any(row["model"] == "flash-v2" and row["tile_source"] == "sram" for row in timed):
        notes.append(_HYPOTHETICAL)
    return [*notes, *doubts, *(f"{pair}: {text}" for pair, text in borrowed.items()), *left_out, *blanks]


_HYPOTHETICAL = (
    "times of rows marked (sram) are of a kernel with that tile, which nobody ships;"
    " --models flash, sdpa-flash, flash-v3 have shipped tiles"
)


def _crossings(request: Request) -> list[str]:
    """Where flash starts to move less than standard, for the longest problem of each head dim."""
    from flashbench.iomodel import paper_view

    longest: dict[tuple[int, str, bool], Problem] = {}
    for problem in request.problems:
        if problem.seqlen_q > 1 and not problem.lengths and not problem.block_mask:
            key = problem.head_dim, problem.dtype, problem.causal
            if key not in longest or problem.seqlen_k > longest[key].seqlen_k:
                longest[key] = problem
    notes = []
    for problem in islice(longest.values(), 4):
        view = paper_view(problem, request.choices[0].sram_bytes or 1)
        parts = [
            f"{name} from M = {_elements(found, problem)} on{_limit(view, name)}"
            for name, found in view.crossovers.items()
        ]
        if not view.limits:
            parts[-1] += f" ({NO_LIMITS})"
        notes.append(
            f"forward, d = {problem.head_dim}, N = {problem.seqlen_q} {problem.dtype}"
            f"{' causal' if problem.causal else ''}: fewer requested bytes than standard: {', '.join(parts)};"
            f" lower bound {view.bound:.3g} elements per head ({view.regime})"
        )
    return notes


NO_LIMITS = (
    "the papers' limits 3d^2 and d^2 are for the unmasked forward with Nq = Nk and d = dv,"
    " without window and dropout"
)


def _limit(view: PaperView, name: str) -> str:
    if name not in view.limits:
        return ""
    form = "3d^2" if name == "flash-v1" else "d^2"
    return f" (limit for long sequences {form} = {view.limits[name]:,})"


def _elements(count: int | None, problem: Problem) -> str:
    if count is None:
        return "never"
    return f"{count:,} elements ({count * problem.dtype_bytes:,} bytes)"
