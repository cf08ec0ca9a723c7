"""``flashbench profile --timeline``: which kernels run in a cell, each one's time, and the gaps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from flashbench.errors import RAISED, FlashbenchError, UnavailableError, in_words

if TYPE_CHECKING:
    from flashbench.console import Column
    from flashbench.kernels import Target
    from flashbench.problem import Cell
    from flashbench.tuned import Tuned


def show(
    cells: Sequence[Cell],
    target: Target,
    *,
    seed: int,
    tuned: Tuned | None = None,
    json: bool,
    csv: bool,
    quiet: bool,
) -> None:
    """Record one call of each cell and print its kernels. Raises UnavailableError without a GPU."""
    from flashbench import console, counting
    from flashbench._cli.interrupt import interrupted, interruptible

    if target.type != "cuda":
        raise UnavailableError(
            "--timeline: kernels run on a GPU; there is none here", "see flashbench doctor"
        )
    found: list[dict[str, Any]] = []
    with interruptible() as stop, console.progress(len(cells), quiet=quiet) as tick:
        for index, cell in enumerate(cells):
            tick(index, cell.key)
            source = {"tuned": tuned.source(cell)} if tuned else {}
            found.append({"cell": cell.key, **source, **_timed(counting, cell, target, seed, tuned)})
    if json:
        console.show_json(found)
    else:
        rows = [row for one in found for row in _rows(one)]
        console.show_table(_columns(), rows, csv=csv, title="Kernels of one call, L2 warm")
    if stop():
        raise interrupted(f"{len(found)} of {len(cells)} cells were recorded")
    if all("reason" in one for one in found):
        raise UnavailableError(f"--timeline: no cell was recorded: {found[0]['reason']}")


def _timed(counting: Any, cell: Cell, target: Target, seed: int, tuned: Tuned | None) -> dict[str, Any]:
    """The timeline of a cell beside the time that events give it, or the reason for none."""
    import torch

    from flashbench import kernels, plan, profilers
    from flashbench._profilers import gpm, timeline
    from flashbench.aside import stdout_to_stderr
    from flashbench.counting.child import call_of

    if refusal := plan.refuses(kernels.get(cell.implementation), cell, target):
        return {"reason": refusal[1]}
    try:
        with stdout_to_stderr(), call_of(cell, target, seed, tuned) as call:
            call()
            line = timeline.timeline(call, target.device)
            clocks = profilers.open_clocks(target.device)
            timing = profilers.measure_time(call, device=target.device, cache="hot", clocks=clocks)
            busy = gpm.measure(call, torch.cuda.synchronize, clocks)
    except FlashbenchError as error:  # such as a cell without queries, which launches no kernel
        said = str(error).removeprefix("--timeline: ")
        return {"reason": "; ".join(text for text in (said, error.hint) if text)}
    except RAISED as error:  # out of memory in one cell leaves the others
        return {"reason": in_words(error, 200)}
    event_s = timing.samples.median_s
    return {
        **line.to_json(), "event_s": event_s, "launch_bound": line.launch_bound(event_s),
        "disagreement": line.disagreement(event_s),
        "backend": timeline.backend_of([k.name for k in line.kernels])
        if cell.implementation.startswith("sdpa") else None,
        "gpm": busy, "clocks": timing.clocks,
    }  # fmt: skip


def _rows(one: dict[str, Any]) -> list[dict[str, Any]]:
    """A row for the call, then one per kernel."""
    if "reason" in one:
        return [{"cell": one["cell"], "kernel": f"not recorded: {one['reason']}"}]
    whole = {
        "cell": one["cell"], "kernel": one["backend"] or "all kernels", "duration_s": one["kernel_s"],
        "gap_s": one["gap_s"], "event_s": one["event_s"], "share": 1.0,
        "flag": one["disagreement"], **one["gpm"],
    }  # fmt: skip
    return [whole] + [
        {
            "cell": one["cell"], "kernel": kernel["kernel"], "start_s": kernel["start_s"],
            "duration_s": kernel["duration_s"],
            "share": kernel["duration_s"] / one["kernel_s"] if one["kernel_s"] else None,
        }
        for kernel in one["kernels"]
    ]  # fmt: skip


def _columns() -> list[Column]:
    from flashbench import units
    from flashbench.console import Column

    def seconds(name: str, header: str) -> Column:
        return Column(name=name, header=header, format=units.format_seconds, justify="right")

    def share(name: str, header: str) -> Column:
        return Column(name=name, header=header, format=lambda x: f"{x:.1%}", justify="right")

    return [
        Column(name="cell", header="cell"),
        Column(name="kernel", header="kernel", format=lambda name: str(name)[:60]),
        seconds("start_s", "start"), seconds("duration_s", "time"),
        share("share", "share"),
        seconds("gap_s", "gaps"), seconds("event_s", "by events"), Column(name="flag", header="flag"),
        share("tensor_utilisation", "tensor cores"), share("dram_utilisation", "DRAM"),
    ]  # fmt: skip
