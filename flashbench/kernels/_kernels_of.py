"""What bundled Triton kernels share as implementations: tiles from the table, refusals, the timed call."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from flashbench.flash_configs import MAX_HEAD_DIM, Config, candidates, chosen, math_of, shared_bytes
from flashbench.kernels import Call, Candidate, Target, _triton, unsupported_features
from flashbench.problem import Cell, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

TILE = ("block_q", "block_k", "num_warps", "num_stages")
"""Fields of a configuration, as ``describe`` names them after a kernel: ``fwd_block_q``."""


@dataclass(frozen=True, kw_only=True)
class Kernels:
    """The tiled kernels of each pass: the name in a configuration (``fwd_block_q``) → that in the table.

    module: under flashbench/kernels, with the function ``flash_attention``. taken: features
    (``unsupported_features``) that they take.
    """

    name: str
    module: str
    fwd: Mapping[str, str]
    bwd: Mapping[str, str]
    taken: Collection[str]

    def of(self, pass_: str) -> dict[str, str]:
        """Those of the pass."""
        return {**({} if pass_ == "bwd" else self.fwd), **({} if pass_ == "fwd" else self.bwd)}

    def prepare(self, problem: Problem, inputs: Inputs) -> Call:
        """Return the call that computes o; inputs as from ``make_inputs``, any strides.

        Raises UnavailableError where Triton is missing or was imported in the other mode.
        """
        return self.prepare_tiles(problem, inputs, {})

    def prepare_tiles(self, problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
        """As prepare, with the tiles of config (as ``describe`` gives them) for the kernels that it names."""
        call: Call = self.call(problem, inputs, config, {})
        return call

    def prepare_lse(
        self, problem: Problem, inputs: Inputs, config: Mapping[str, Any]
    ) -> Callable[[], tuple[Tensor, Tensor]]:
        """As prepare_tiles, of a call that returns (o, lse)."""
        call: Callable[[], tuple[Tensor, Tensor]] = self.call(problem, inputs, config, {"return_lse": True})
        return call

    def call(
        self, problem: Problem, inputs: Inputs, config: Mapping[str, Any], options: Mapping[str, Any]
    ) -> Callable[[], Any]:
        """The same, with more arguments of ``flash_attention``; what it returns."""
        q, k, v = inputs.q, inputs.k, inputs.v
        module = _triton.load(q.device.type, self.module)
        options = {
            "causal": problem.causal,
            "softmax_scale": problem.softmax_scale,
            "tf32": problem.dtype == "tf32",
            "configs": self.given(config),
            **options,
        }
        return partial(module.flash_attention, q, k, v, **options)

    def describe(self, problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
        """Tile rows, warps and stages of each kernel of the pass, as ``Implementation.describe``."""
        interpreted = _triton.interpreted(target)
        return self.on_card(problem, pass_, Target() if interpreted else target)

    def on_card(self, problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
        """The same for a card that need not be here."""
        configs = self._configs(problem, pass_, target)
        return {f"{kernel}_{one}": getattr(configs[kernel], one) for kernel in configs for one in TILE}

    def candidates(self, problem: Problem, pass_: str, target: Target) -> list[Candidate]:
        """As ``Implementation.candidates``: the space of each kernel of the pass."""
        of_pass, configs = self.of(pass_), self._configs(problem, pass_, target)
        return [one for kernel in configs for one in tried(kernel, of_pass[kernel], configs[kernel],
                                                           problem, target)]  # fmt: skip

    def given(self, config: Mapping[str, Any]) -> tuple[tuple[str, Config], ...]:
        """(kernel of the table, configuration) of what ``describe`` gave."""
        return tuple(
            (table, Config(*(config[f"{kernel}_{one}"] for one in TILE)))
            for kernel, table in self.of("fwd+bwd").items()
            if f"{kernel}_block_q" in config
        )

    def why_unsupported(self, problem: Problem, pass_: str, target: Target) -> str | None:
        """Why the kernels refuse the problem, one sentence, or None."""
        p = problem
        if reason := unsupported_features(p, self.taken) or why_unfit(p, target):
            return reason
        if _triton.interpreted(target):
            return None
        shape, limit = (math_of(p.dtype), p.head_dim, p.head_dim_v), target.smem_per_block_bytes
        for kernel, config in self._configs(p, pass_, target).items():
            need = shared_bytes(self.of(pass_)[kernel], config, *shape, target.capability)
            if limit is not None and need > limit:
                return f"{kernel} kernel needs {need} B of shared memory per block, limit {limit} B"
        return None

    def _configs(self, problem: Problem, pass_: str, target: Target) -> dict[str, Config]:
        limits = target.capability, target.smem_per_block_bytes
        return {kernel: chosen(problem, table, *limits) for kernel, table in self.of(pass_).items()}


def tried(kernel: str, table: str, own: Config, problem: Problem, target: Target) -> list[Candidate]:
    """The candidates of a kernel, by its name in a configuration and in the table; own: what that has."""
    shape = math_of(problem.dtype), problem.head_dim, problem.head_dim_v
    return [
        Candidate(
            kernel=kernel,
            compiled=table,
            config=config,
            tiles={f"{kernel}_{one}": getattr(config, one) for one in TILE},
            shared_bytes=shared_bytes(table, config, *shape, target.capability),
        )
        for config in candidates(table, own, shape[0])
    ]


def why_unfit(problem: Problem, target: Target) -> str | None:
    """Why no bundled kernel takes the head dims or the dtype there, one sentence, or None."""
    p = problem
    if max(p.head_dim, p.head_dim_v) > MAX_HEAD_DIM:
        return f"head_dim {max(p.head_dim, p.head_dim_v)} is larger than {MAX_HEAD_DIM}"
    if _triton.interpreted(target):
        return "TF32 products exist on NVIDIA GPUs only; fp32 runs here" if p.dtype == "tf32" else None
    if target.capability is not None and target.capability < (8, 0) and p.dtype in ("bf16", "tf32"):
        return f"{p.dtype} needs sm80, this is sm{target.capability[0]}{target.capability[1]}"
    return None


def precompile(cells: Sequence[Cell], target: Target) -> None:
    """Compile in parallel what the cells need, into Triton's cache; nothing in the interpreter."""
    if _triton.interpreted(target) or _triton.why_unavailable(target) is not None:
        return
    from flashbench.kernels import _compile

    _compile.precompile(cells, target)
