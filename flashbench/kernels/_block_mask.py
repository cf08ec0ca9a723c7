"""Block masks: which tiles of keys a tile of queries sees in full, in part or not at all."""

from __future__ import annotations

from flashbench.problem import Problem


class BlockMask:
    """Not built yet."""


def build(problem: Problem, device: str, seed: int) -> BlockMask:
    """The block mask that the problem names. Raises NotImplementedError."""
    raise NotImplementedError(problem.block_mask)
