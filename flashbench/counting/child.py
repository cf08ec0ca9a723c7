"""The process that the profiler watches: runs each job once to warm up and once inside its NVTX range.

    python -m flashbench.counting.child JOBS.json

Says of every job, as it ends, why it could not run (empty: it ran), a JSON line each.
"""

from __future__ import annotations

import gc
import json
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flashbench import decoding, environment, plan, tuned
from flashbench._profilers.ncu import RANGE
from flashbench.counting import known
from flashbench.errors import RAISED, in_words
from flashbench.kernels import Target
from flashbench.problem import Cell


def main(path: str) -> None:
    """Run the jobs of the file."""
    spec = json.loads(Path(path).read_text(encoding="utf-8"))
    target = environment.target(spec["device"])
    found = tuned.read(spec["tuned"], target) if spec.get("tuned") else None
    with Path(spec["said"]).open("a", encoding="utf-8") as said:
        for index, job in enumerate(spec["jobs"]):
            try:
                reason = _run(index, job, target, spec["seed"], found)
            except RAISED as error:
                reason = in_words(error, 300)
            said.write(json.dumps({"index": index, "reason": reason}) + "\n")
            said.flush()
            _tidy(target)


def _run(index: int, job: Mapping[str, Any], target: Target, seed: int, found: tuned.Tuned | None) -> str:
    what = job["what"]
    if job["kind"] == "known":
        row = known.find(what["name"])
        _count(index, row.make(target, what["bytes"]), target)
        return ""
    if job["kind"] == "step":
        _count(index, decoding.call_of(decoding.from_json(what), target, seed), target)
        return ""
    cell = Cell.from_json(what)
    implementation = tuned.get(found, cell.implementation)
    if refusal := plan.refuses(implementation, cell, target):
        return f"{refusal[0]}: {refusal[1]}"
    with call_of(cell, target, seed, found) as call:
        _count(index, call, target)
    return ""


@contextmanager
def call_of(
    cell: Cell, target: Target, seed: int, found: tuned.Tuned | None = None
) -> Iterator[Callable[[], object]]:
    """What a sweep would time, made ready; a forward that a backward needs has run before. found: --tuned.

    A context, as the implementation may need switches of torch while it is called.
    """
    import torch

    from flashbench.kernels._backward import backward_call, forward_backward_call, kept_graphs
    from flashbench.kernels._inputs import make_inputs

    inputs = make_inputs(cell.problem, target.device, seed).detached(grad=cell.pass_ != "fwd")
    implementation = tuned.get(found, cell.implementation)
    with (
        implementation.context(cell.problem),
        torch.set_grad_enabled(cell.pass_ != "fwd"),
        kept_graphs(),
    ):
        call = implementation.prepare(cell.problem, inputs)
        if cell.pass_ == "bwd":
            yield backward_call(call, inputs)[0]
        elif cell.pass_ == "fwd+bwd":
            yield forward_backward_call(call, inputs)
        else:
            yield call


def _count(index: int, call: Callable[[], object], target: Target) -> None:
    """One call to warm up (compile, pick an algorithm), then the one that is counted."""
    import torch
    from torch.cuda import nvtx

    call()
    torch.cuda.synchronize(target.device)
    torch.cuda.empty_cache()
    ranges = [nvtx.range_start(RANGE), nvtx.range_start(f"{RANGE}#{index}")]
    try:
        call()
        torch.cuda.synchronize(target.device)
    finally:
        for handle in reversed(ranges):
            nvtx.range_end(handle)


def _tidy(target: Target) -> None:
    import torch

    gc.collect()
    torch.cuda.empty_cache()


if __name__ == "__main__":
    main(sys.argv[1])
