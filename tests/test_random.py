"""Random problems are right within the bound of every check, and a wrong kernel's failing one is made small.

On a GPU over 2,000 of them in 79 families, each of which is compiled once; without one a sample through
Triton's interpreter. FLASHBENCH_RANDOM: problems of each family; FLASHBENCH_RANDOM_SEED: others.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable
from dataclasses import replace

import pytest
from drawn import Example, Family, chosen, examples, held
from hypothesis import HealthCheck, Phase, given, note, seed, settings

from flashbench import environment, kernels
from flashbench.kernels import Implementation

if importlib.util.find_spec("triton") is None:
    pytest.skip("triton is not installed", allow_module_level=True)

TARGET = environment.target(None)
ON_CARD = {"flash-v2": 34, "flash": 4, "flash-v3": 16, "flash-v1": 4, "flash-v2-atomic": 5, "flash-decode": 6,
           "flash-v2-fp8": 5, "flash-v3-fp8": 5}  # fmt: skip
EACH = 26
INTERPRETED = {"flash-v2": 8, "flash-v1": 1, "flash-v2-atomic": 1, "flash-decode": 2, "flash-v2-fp8": 1}
FAMILIES = chosen(TARGET, INTERPRETED if TARGET.type == "cpu" else ON_CARD)
COUNT = int(os.environ.get("FLASHBENCH_RANDOM", "2" if TARGET.type == "cpu" else str(EACH)))
SEED = int(os.environ.get("FLASHBENCH_RANDOM_SEED", "1"))
LONGEST = 33 if TARGET.type == "cpu" else 300


def searched(family: Family, count: int, longest: int, found: Callable[[Example], None]) -> None:
    """Hold so many problems of the family to fp64; the smallest one that fails is what pytest prints."""

    @seed(SEED)
    @settings(max_examples=count, database=None, deadline=None, phases=[Phase.generate, Phase.shrink],
              report_multiple_bugs=False, suppress_health_check=list(HealthCheck))  # fmt: skip
    @given(examples(family, longest))
    def holds(example: Example) -> None:
        note(f"{family} {example.problem.key} scale {example.problem.softmax_scale:g} {example}")
        found(example)
        held(family, example, TARGET)

    holds()


@pytest.mark.parametrize("family", FAMILIES, ids=str)
def test_random_problems_are_within_the_bound(family: Family) -> None:
    done = []
    searched(family, COUNT, LONGEST, done.append)
    print(f"{len(done)} random problems of {family}, seed {SEED}")
    assert len(done) >= COUNT


def test_there_are_two_thousand_of_them_on_a_card() -> None:
    assert sum(ON_CARD.values()) * EACH >= 2000


def _wrong() -> Implementation:
    """naive, but it leaves out the last key where there are more than 9."""

    def prepare(p, inputs):
        if p.seqlen_k > 9:
            p = replace(p, seqlen_k=p.seqlen_k - 1)
            inputs = replace(inputs, k=inputs.k[:, :, :-1], v=inputs.v[:, :, :-1])
        return kernels.get("naive").prepare(p, inputs)

    def prepare_lse(p, inputs, config):
        scores = inputs.q.float() @ inputs.k.float().mT * p.softmax_scale
        return lambda: (prepare(p, inputs)(), scores.logsumexp(-1))

    return replace(kernels.get("naive"), name="wrong", prepare=prepare, prepare_lse=prepare_lse)


def test_a_failing_problem_is_made_small_and_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(kernels.registry(), "wrong", _wrong())
    with pytest.raises(AssertionError) as failed:
        searched(Family(implementation="wrong", dtype="fp16", dims=(16, 16)), 60, 33, lambda _: None)
    said = "\n".join([str(failed.value), *getattr(failed.value, "__notes__", [])])
    assert "b1 h1 n10 d16 fp16 full" in said
