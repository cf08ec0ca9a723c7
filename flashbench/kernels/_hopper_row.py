"""What flash-v3 is as an implementation: refusals, configuration, the timed call; flash runs it, too."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from flashbench import hopper_configs
from flashbench.hopper_configs import Tiles
from flashbench.kernels import Call, Target, _triton, unsupported_features
from flashbench.kernels._kernels_of import Kernels, why_unfit
from flashbench.problem import Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

TAKEN = {"bshd", "deterministic"}
"""Features (``unsupported_features``) that the kernel takes."""

NAME = "flash-v3"
IO_MODEL = "flash-v3-gluon"
"""Of iomodel.MODELS."""

_PORTABLE = {"delta": "delta", "dkdv": "dkdv", "dq": "dq"}
"""flash-v2's kernels of the backward."""


def backward(problem: Problem) -> Kernels:
    """Those of flash-v2's kernels that the problem's backward runs: all, dq's or none."""
    dims = problem.head_dim, problem.head_dim_v
    names: Iterable[str] = ("delta", "dq") if problem.deterministic and not hopper_configs.wide(*dims) else ()
    if hopper_configs.why_portable(*dims):
        names = _PORTABLE
    bwd = {name: _PORTABLE[name] for name in names}
    return Kernels(name=NAME, module="_flash_v3", fwd={}, bwd=bwd, taken=TAKEN)


def prepare(problem: Problem, inputs: Inputs) -> Call:
    """Return the call that computes o; inputs as from ``make_inputs``, any strides.

    Raises UnavailableError where Triton is missing or was imported as an interpreter.
    """
    return prepare_tiles(problem, inputs, {})


def prepare_tiles(problem: Problem, inputs: Inputs, config: Mapping[str, Any]) -> Call:
    """As prepare, with the tiles of config (as ``on_card`` gives them) for the kernels that it names."""
    call: Call = _call(problem, inputs, config)
    return call


def prepare_lse(
    problem: Problem, inputs: Inputs, config: Mapping[str, Any]
) -> Callable[[], tuple[Tensor, Tensor]]:
    """As prepare_tiles, of a call that returns (o, lse)."""
    call: Callable[[], tuple[Tensor, Tensor]] = _call(problem, inputs, config, return_lse=True)
    return call


def _call(
    problem: Problem, inputs: Inputs, config: Mapping[str, Any], return_lse: bool = False
) -> Callable[[], Any]:
    flash = _triton.load(inputs.q.device.type, "_flash_v3")
    return partial(
        flash.flash_attention, inputs.q, inputs.k, inputs.v,
        causal=problem.causal, softmax_scale=problem.softmax_scale, return_lse=return_lse,
        tiles=hopper_configs.given(config, choose(problem)), configs=backward(problem).given(config),
        deterministic=problem.deterministic,
    )  # fmt: skip


def choose(problem: Problem) -> Tiles:
    """The forward's configuration for the problem."""
    p = problem
    return hopper_configs.choose(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k, fp16=p.dtype == "fp16")


def exponentials_within(problem: Problem, target: Target) -> float:
    """As ``Implementation.exponentials_within``."""
    return hopper_configs.EMULATED_WITHIN[2] if choose(problem).emulated else 0.0


def has(config: Mapping[str, Any]) -> bool:
    """Whether a configuration leaves the forward's tiles to the table, or is one of this forward."""
    return "fwd_block_q" not in config or "fwd_q_stages" in config


def why_unavailable(target: Target) -> str | None:
    """Why the kernel cannot run on the target, one sentence, or None."""
    if reason := why_other(target) or _triton.why_unavailable(target):
        return reason
    return "it has no form that Triton interprets" if _triton.interpreted(target) else None


def why_unsupported(problem: Problem, pass_: str, target: Target) -> str | None:
    """Why the kernels refuse the problem, one sentence, or None."""
    p = problem
    if reason := unsupported_features(p, TAKEN) or why_other(target):
        return reason
    if p.dtype not in ("fp16", "bf16"):
        return f"it takes fp16 and bf16, not {p.dtype}"
    if reason := why_unfit(p, target):
        return reason
    if dims := [dim for dim in (p.head_dim, p.head_dim_v) if dim % 8]:
        return f"head_dim {dims[0]} is not a multiple of 8, as TMA wants"
    return None if pass_ == "fwd" else backward(p).why_unsupported(p, "bwd", target)


def why_other(target: Target) -> str | None:
    """Why kernels for Hopper do not run on the target, one sentence, or None."""
    if target.capability == hopper_configs.CAPABILITY:
        return None
    capability = target.capability
    found = "a CPU" if capability is None else f"sm{capability[0]}{capability[1]}"
    return f"it needs an sm90 GPU (H100, H200), this is {found}"


def on_card(problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
    """Tiles, warps and stages of each kernel of the pass: ``fwd_block_q``, … and which kernels they are."""
    config: dict[str, Any] = {}
    if pass_ != "bwd":
        config |= hopper_configs.described(choose(problem))
    if pass_ != "fwd":
        config |= {**_describe_backward(problem), **backward(problem).on_card(problem, "bwd", target)}
    return config


def _describe_backward(problem: Problem) -> Mapping[str, Any]:
    """Its own kernel's tiles, and ``bwd_kernels``: whose kernels run, and why not all are its own."""
    p = problem
    if reason := hopper_configs.why_portable(p.head_dim, p.head_dim_v):
        return {"bwd_kernels": f"flash-v2: {reason}"}
    if hopper_configs.wide(p.head_dim, p.head_dim_v):
        return {**hopper_configs.described_wide(), "bwd_kernels": NAME}
    own = hopper_configs.choose_backward(p.head_dim, p.head_dim_v, p.causal, p.seqlen_k)
    dq = ", dq by flash-v2: deterministic" if p.deterministic else ""
    return {**hopper_configs.described_backward(own), "bwd_kernels": f"{NAME}{dq}"}
