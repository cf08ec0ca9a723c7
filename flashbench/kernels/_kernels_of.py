"""What bundled Triton kernels say of themselves from the table of configurations: tiles, refusals."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from flashbench.flash_configs import MAX_HEAD_DIM, Config, choose, math_of, shared_bytes
from flashbench.kernels import Target, _triton, unsupported_features
from flashbench.problem import Cell, Problem

_TILE = ("block_q", "block_k", "num_warps", "num_stages")


@dataclass(frozen=True)
class Kernels:
    """The tiled kernels of each pass: the name in a configuration (``fwd_block_q``) → that in the table.

    taken: features (``unsupported_features``) that they take.
    """

    name: str
    fwd: Mapping[str, str]
    bwd: Mapping[str, str]
    taken: Collection[str]

    def of(self, pass_: str) -> dict[str, str]:
        """Those of the pass."""
        return {**({} if pass_ == "bwd" else self.fwd), **({} if pass_ == "fwd" else self.bwd)}

    def describe(self, problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
        """Tile rows, warps and stages of each kernel of the pass, as ``Implementation.describe``."""
        interpreted = _triton.interpreted(target)
        return self.on_card(problem, pass_, Target() if interpreted else target)

    def on_card(self, problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
        """The same for a card that need not be here."""
        configs = self._configs(problem, pass_, target)
        return {f"{kernel}_{one}": getattr(configs[kernel], one) for kernel in configs for one in _TILE}

    def given(self, config: Mapping[str, Any]) -> tuple[tuple[str, Config], ...]:
        """(kernel of the table, configuration) of what ``describe`` gave."""
        return tuple(
            (table, Config(*(config[f"{kernel}_{one}"] for one in _TILE)))
            for kernel, table in self.of("fwd+bwd").items()
            if f"{kernel}_block_q" in config
        )

    def why_unsupported(self, problem: Problem, pass_: str, target: Target) -> str | None:
        """Why the kernels refuse the problem, one sentence, or None."""
        p = problem
        if reason := unsupported_features(p, self.taken):
            return reason
        if max(p.head_dim, p.head_dim_v) > MAX_HEAD_DIM:
            return f"head_dim {max(p.head_dim, p.head_dim_v)} is larger than {MAX_HEAD_DIM}"
        if _triton.interpreted(target):
            return "TF32 products exist on NVIDIA GPUs only; fp32 runs here" if p.dtype == "tf32" else None
        if target.capability is not None and target.capability < (8, 0) and p.dtype in ("bf16", "tf32"):
            return f"{p.dtype} needs sm80, this is sm{target.capability[0]}{target.capability[1]}"
        shape, limit = (math_of(p.dtype), p.head_dim, p.head_dim_v), target.smem_per_block_bytes
        for kernel, config in self._configs(p, pass_, target).items():
            need = shared_bytes(self.of(pass_)[kernel], config, *shape, target.capability)
            if limit is not None and need > limit:
                return f"{kernel} kernel needs {need} B of shared memory per block, limit {limit} B"
        return None

    def _configs(self, problem: Problem, pass_: str, target: Target) -> dict[str, Config]:
        shape = math_of(problem.dtype), problem.head_dim, problem.head_dim_v
        limits = target.capability, target.smem_per_block_bytes
        return {kernel: choose(table, *shape, *limits) for kernel, table in self.of(pass_).items()}


def precompile(cells: Sequence[Cell], target: Target) -> None:
    """Compile in parallel what the cells need, into Triton's cache; nothing in the interpreter."""
    if _triton.interpreted(target) or _triton.why_unavailable(target) is not None:
        return
    from flashbench.kernels import _compile

    _compile.precompile(cells, target)
