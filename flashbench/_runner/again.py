"""What was timed, called once more: whether it still computes, or gives back what it had computed before.

A function that is right twice may be wrong from its third call on, and one that keeps its result by the
address of its inputs is right, and fast, for as long as nobody looks. So once nothing is timed any more the
tensors get other values, where they lie: signs of every other column, of q's odd ones and of k's even ones,
so that each score is the negative of what it was and nothing that is kept of q, k, v or their softmax is of
use. That takes no memory and is taken back to the last bit, as others read the same tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING

from flashbench.problem import Problem
from flashbench.record import Accuracy

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs
    from flashbench.kernels._reference import Reference

SLACK = 2
"""How often the error that the first check allowed: another result is looked for, no rounding."""
ALIKE = frozenset({"window", "top-left", "softcap", "bshd", "deterministic", "fp8"})
"""Features with which one head does as every other, so that one is compared."""
SIGNS = {"q": 1, "k": 0, "v": 0, "dout": 0}
"""The first of every other column whose sign changes."""

STALE = (
    "after it was timed it was called with other values in the same tensors and did not compute them: {};"
    " does it keep results from call to call?"
)
LATE = "it was right at first, and wrong once it was timed: {}"


class Others:
    """The inputs of a problem with other values in them, and what is right then."""

    def __init__(self, problem: Problem, inputs: Inputs, seed: int) -> None:
        self._problem, self._inputs, self._seed = problem, inputs, seed
        self._reference: Reference | None = None

    @contextmanager
    def values(self, renew: Callable[[], None]) -> Iterator[None]:
        """Inside, the tensors hold the other values. renew: copies them to where a call reads them."""
        self._flip()
        try:
            renew()
            yield
        finally:
            self._flip()
            renew()

    def compare(self, o: Tensor, gradients: Sequence[Tensor] | None) -> Accuracy:
        """As ``Reference.compare``, of one K/V head where all do the same; inside of ``values`` alone."""
        from flashbench.kernels._reference import Reference

        problem, names = self._problem, ("o", *(f"d{name}" for name in self._inputs.differentiable()))
        tensors = dict(zip(names, (o, *(gradients or ())), strict=False))
        inputs = self._inputs
        if not problem.features - ALIKE:
            problem = replace(problem, batch=1, num_heads=problem.group, num_kv_heads=1)
            heads = {"q": problem.group, "k": 1, "v": 1, "dout": problem.group}
            inputs = replace(
                inputs, **{name: getattr(inputs, name)[-1:, -count:] for name, count in heads.items()}
            )
            tensors = {name: x[-1:, -heads.get(name[1:], problem.group) :] for name, x in tensors.items()}
        if self._reference is None:
            self._reference = Reference(problem, inputs, seed=self._seed)
        first, *rest = tensors.values()
        return self._reference.compare(first, rest or None)

    def _flip(self) -> None:
        import torch

        with torch.no_grad():
            for name, start in SIGNS.items():
                getattr(self._inputs, name)[..., start::2].neg_()


def allowed(found: Accuracy, first: Accuracy) -> Accuracy:
    """What was found, held to SLACK times what the first check allowed."""
    return replace(found, budget={name: SLACK * first.budget[name] for name in found.max_abs_error})
