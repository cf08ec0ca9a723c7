"""Two implementations as one: the kernel for Hopper where it takes the problem, else the portable one."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashbench.hopper_configs import CAPABILITY
from flashbench.kernels import Call, Candidate, Implementation, Target, _hopper_row, _triton
from flashbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

_RAN = "ran"
"""Attribute of a call: the implementation whose kernels it runs."""


@dataclass(frozen=True)
class Best:
    """portable: what runs everywhere, tiles in hand. hopper: the module of the other one's row (NAME,
    why_unsupported, prepare_tiles, prepare_lse, on_card, exponentials_within).

    A row names which ran, and on sm_90 why not the other.
    """

    portable: Implementation
    hopper: ModuleType

    def implementation(self, **changes: Any) -> Implementation:
        """The portable one's, by a name and summary of its own, with the choice made by card and problem."""
        return replace(
            self.portable,
            prepare=lambda problem, inputs: self.prepare_tiles(problem, inputs, {}),
            prepare_tiles=self.prepare_tiles,
            prepare_lse=self.prepare_lse,
            backend=lambda call: getattr(call, _RAN, self.portable.name),
            describe=self.describe,
            on_card=self.on_card,
            candidates=self.candidates,
            runs=self.runs,
            exponentials_within=self.exponentials_within,
            **changes,
        )

    def why_not(self, problem: Problem, target: Target) -> str | None:
        """Why the portable one runs there: one sentence, or None where the other does, whatever the pass."""
        reason: str | None = self.hopper.why_unsupported(problem, "fwd", target)
        return reason

    def runs(self, problem: Problem, target: Target) -> str | None:
        """As ``Implementation.runs``."""
        return None if self.why_not(problem, target) else self.hopper.NAME

    def exponentials_within(self, problem: Problem, target: Target) -> float:
        """As ``Implementation.exponentials_within``."""
        if self.why_not(problem, target):
            return self.portable.exponentials_within(problem, target)
        within: float = self.hopper.exponentials_within(problem, target)
        return within

    def prepare_tiles(self, problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
        """As ``Implementation.prepare_tiles``."""
        one = self._one(problem, inputs, config)
        call: Call = one.prepare_tiles(problem, inputs, config)
        setattr(call, _RAN, self.hopper.NAME if one is self.hopper else self.portable.name)
        return call

    def prepare_lse(
        self, problem: Problem, inputs: Inputs, config: Mapping[str, Any]
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """As ``Implementation.prepare_lse``."""
        one = self._one(problem, inputs, config)
        call: Callable[[], tuple[Tensor, Tensor]] = one.prepare_lse(problem, inputs, config)
        return call

    def _one(self, problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Any:
        """Which runs on the inputs' card, or that of a rehearsal; Hopper's not with tiles of the other."""
        device = inputs.q.device
        capability, _ = _triton.load(device.type, "_call").card(device)
        here = Target(device="cpu" if capability is None else "cuda", capability=capability)
        taken = self.why_not(problem, here) is None and _hopper_row.has(config)
        return self.hopper if taken else self.portable

    def describe(self, problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
        """As describe of the kernels that run, with ``kernels``: which, and on sm_90 why not the others."""
        return self.on_card(problem, pass_, Target() if _triton.interpreted(target) else target)

    def on_card(self, problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
        """The same for a card that need not be here."""
        reason = self.why_not(problem, target)
        if reason is None:
            return {**self.hopper.on_card(problem, pass_, target), "kernels": self.hopper.NAME}
        there = target.capability == CAPABILITY
        told = {"kernels": f"{self.portable.name}: {reason}"} if there else {}
        return {**self.portable.on_card(problem, pass_, target), **told}

    def candidates(self, problem: Problem, pass_: str, target: Target) -> Sequence[Candidate]:
        """As ``Implementation.candidates``; Hopper's has none: its table was measured as a whole."""
        if self.why_not(problem, target) is None or self.portable.candidates is None:
            return []
        return self.portable.candidates(problem, pass_, target)
