"""Whole layers of a model with random weights: checked against fp64, timed, with attention's share.

    measure(Task(preset=…, implementation="flash", mode="train", …), target) -> {"time_s": …, "mfu": …, …}

A step is a forward of the stack (``infer``), or a forward and a backward to all weights and the input
(``train``), without an optimizer. FLOPs are those of the matrix products, 2 a weight and token, and
attention's nominal ones (visible pairs); a training step is three forwards, so recomputation does not count
(PaLM, arXiv:2204.02311, appendix B). attention_share: one layer's attention alone, times the layers, over the
step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from flashbench import devices, iomodel, kernels, plan, profilers, runner
from flashbench._runner.again import LATE
from flashbench._runner.outcomes import failure, with_source
from flashbench.errors import RAISED
from flashbench.kernels import Target, _interpreter
from flashbench.presets import Preset
from flashbench.problem import Cell, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._layer import Stack

MODES = {"train": "forward and backward, no optimizer", "infer": "forward without gradients"}
CHECK_SEQLEN = 128
"""Tokens of the one sequence, through one layer, that is compared with fp64."""

INTERPRETED = "Triton's interpreter: correct, not timed"


@dataclass(frozen=True, kw_only=True)
class Task:
    """One row: a stack of ``layers`` of a model with an implementation's attention."""

    preset: Preset
    implementation: str
    mode: str
    batch: int
    seqlen: int
    layers: int
    dtype: str

    @property
    def problem(self) -> Problem:
        """The attention of one layer."""
        p = self.preset
        return Problem(
            batch=self.batch, num_heads=p.num_heads, num_kv_heads=p.num_kv_heads, seqlen_q=self.seqlen,
            seqlen_k=self.seqlen, head_dim=p.head_dim, head_dim_v=p.head_dim, dtype=self.dtype,
            causal=p.causal,
        )  # fmt: skip

    @property
    def pass_(self) -> str:
        """The pass of attention that a step holds."""
        return "fwd+bwd" if self.mode == "train" else "fwd"

    @property
    def flops(self) -> int:
        """Of a step, in all layers."""
        tokens = self.batch * self.seqlen
        linear = 2 * tokens * sum(rows * columns for rows, columns in self.preset.matrices)
        forward = linear + iomodel.flops(self.problem, "fwd")
        return self.layers * forward * (3 if self.mode == "train" else 1)


def measure(task: Task, target: Target, *, seed: int = 0, time: bool = True) -> dict[str, Any]:
    """The row of a task: its fields, status and, where it is not ok, reason. Raises nothing of a step's.

    time_s, tokens_per_s, flops_per_s, mfu (of the dtype's dense peak), peak_bytes (all that is allocated at
    the most: weights, gradients, activations), attention_s, attention_share, flags of the step and
    attention_flags of its attention alone; what is not known is left out.
    """
    implementation, cell = kernels.get(task.implementation), _cell(task)
    row: dict[str, Any] = with_source({}, implementation) | {
        "model": task.preset.name, "implementation": task.implementation, "exact": implementation.exact,
        "mode": task.mode, "batch": task.batch, "seqlen": task.seqlen, "layers": task.layers,
        "dtype": task.dtype, "flops": task.flops,
    }  # fmt: skip
    try:
        if not implementation.exact:
            return row | {
                "status": "unsupported",
                "reason": "not exact attention: the layer would be another",
            }
        if refusal := plan.refuses(implementation, cell, target):
            return row | {"status": refusal[0], "reason": refusal[1]}
        with implementation.context(task.problem):
            with _interpreter.noticing() as ran:
                found = _check(task, target, seed)
            if found["status"] != "ok":
                return row | found
            if _interpreter.computed(implementation, target, ran=ran()):
                return row | found | {"status": "checked", "reason": INTERPRETED}
            if not time:
                return row | found | {"status": "checked"}
            timed = _timed(task, target, seed)
            late = _check(task, target, seed + 1) if implementation.origin else found
            if late["status"] != "ok":
                return row | late | {"reason": LATE.format(late["reason"])}
            return row | found | timed
    except RAISED as error:  # a compiler, a driver, an allocator: other rows go on
        outcome = failure(error)
    _free(target)
    return row | outcome


def rows(tasks: Sequence[Task], target: Target, *, seed: int = 0) -> Iterator[dict[str, Any]]:
    """The row of each task in turn."""
    small = [replace(task, batch=1, seqlen=min(task.seqlen, CHECK_SEQLEN)) for task in tasks]
    runner.precompile([_cell(task) for task in (*small, *tasks)], target)
    for task in tasks:
        yield measure(task, target, seed=seed)
        _free(target)


def _cell(task: Task) -> Cell:
    return Cell(implementation=task.implementation, problem=task.problem, pass_=task.pass_)


def _free(target: Target) -> None:
    if target.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def _tried(task: Task, target: Target, seed: int) -> None:
    """Call a function of somebody's own once, on copies: what it does wrong, and that it has no gradient, is
    raised as Misbehaviour and Refusal.
    """
    from flashbench.kernels._inputs import make_inputs

    inputs = make_inputs(task.problem, target.device, seed)
    kernels.get(task.implementation).prepare(task.problem, inputs.detached(grad=task.mode == "train"))


def _step(stack: Stack, x: Tensor, task: Task) -> Callable[[], Tensor]:
    """The call that is timed: what it returns is the output, or the gradient of x."""
    import torch

    if task.mode == "infer":

        def infer() -> Tensor:
            with torch.no_grad():
                return stack(x)

        return infer
    wanted = [x, *(matrix for layer in stack.layers for matrix in layer)]
    dout = torch.randn_like(x)

    def train() -> Tensor:
        return torch.autograd.grad(stack(x), wanted, dout)[0]

    return train


def _check(task: Task, target: Target, seed: int) -> dict[str, Any]:
    """One layer on one short sequence against fp64: twice naive's error in the dtype, twice the rounding."""
    import torch

    from flashbench.kernels._layer import EAGER, Stack, weights
    from flashbench.kernels._precision import torch_dtype
    from flashbench.kernels._reference import rounding

    small, dtype = (
        replace(task, batch=1, layers=1, seqlen=min(task.seqlen, CHECK_SEQLEN)),
        torch_dtype(task.dtype),
    )
    own = kernels.get(task.implementation).origin
    if own:
        _tried(small, target, seed)
    matrices = weights(task.preset, dtype=dtype, device=target.device, seed=seed)
    x = _input(small, target, seed)

    def found(name: str, wide: torch.dtype) -> Tensor:
        layer = [matrix.detach().to(wide).requires_grad_() for matrix in matrices]
        stack = Stack(task.preset, small.problem, [layer], name)
        torch.manual_seed(seed)  # of dout, which is drawn in the dtype of x
        leaf = x.detach().to(wide).requires_grad_(task.mode == "train")
        if task.mode == "infer":
            return _step(stack, leaf, small)().double()
        out = stack(leaf)
        return torch.autograd.grad(out, leaf, x.detach().to(wide))[0].double()

    ref = found(EAGER, torch.float64)
    yardstick, mine = found(EAGER, dtype), found(task.implementation, dtype)
    error = float((mine - ref).abs().max())
    budget = 2 * float((yardstick - ref).abs().max()) + 2 * rounding(ref, dtype)
    status = {"status": "ok"}
    if not error <= budget:
        said = f"a layer is off by {error:.3g}, allowed {budget:.3g}"
        hint = own.hint() if own else ""
        status = {"status": "wrong", "reason": "; ".join([said, *([hint] if hint else [])])}
    return {"max_abs_error": error, "budget": budget, **status}


def _input(task: Task, target: Target, seed: int) -> Tensor:
    import torch

    from flashbench.kernels._precision import torch_dtype

    generator = torch.Generator(device=target.device).manual_seed(seed)
    shape = (task.batch, task.seqlen, task.preset.hidden)
    x = torch.randn(shape, generator=generator, device=target.device).to(torch_dtype(task.dtype))
    return x.requires_grad_(task.mode == "train")


def _timed(task: Task, target: Target, seed: int) -> dict[str, Any]:
    from flashbench.kernels._layer import Stack, weights
    from flashbench.kernels._precision import torch_dtype

    layers = [
        weights(task.preset, dtype=torch_dtype(task.dtype), device=target.device, seed=seed + number)
        for number in range(task.layers)
    ]
    stack = Stack(task.preset, task.problem, layers, task.implementation)
    step = _step(stack, _input(task, target, seed), task)
    step()
    peak = _peak_bytes(step, target)
    timing = profilers.measure_time(step, device=target.device, cache="hot")
    time_s = timing.samples.median_s
    alone = _attention(task, stack, target, seed)
    alone()
    attention = profilers.measure_time(alone, device=target.device, cache="hot")
    attention_s = task.layers * attention.samples.median_s
    rate = task.flops / time_s
    row: dict[str, Any] = {
        "time_s": time_s, "samples_s": list(timing.samples.samples_s), "flags": list(timing.flags),
        "tokens_per_s": task.batch * task.seqlen / time_s, "flops_per_s": rate, "attention_s": attention_s,
        "attention_share": attention_s / time_s, "attention_flags": list(attention.flags),
    }  # fmt: skip
    if peak is not None:
        row["peak_bytes"] = peak
    card = devices.match(target.name) if target.type == "cuda" else None
    if card is not None and (full := card.peak_flops_per_s.get(task.dtype)):
        row["mfu"] = rate / full
    return row


def _peak_bytes(step: Callable[[], object], target: Target) -> int | None:
    """Most bytes allocated during a step, weights included; None on a CPU, which torch does not track."""
    if target.type != "cuda":
        return None
    import torch

    torch.cuda.reset_peak_memory_stats(target.device)
    step()
    torch.cuda.synchronize(target.device)
    return int(torch.cuda.max_memory_allocated(target.device))


def _attention(task: Task, stack: Stack, target: Target, seed: int) -> Callable[[], object]:
    """The attention of one layer alone, in the memory order and with the passes that it has in the step."""
    import torch

    from flashbench.kernels._inputs import make_inputs

    inputs = make_inputs(replace(task.problem, layout="bshd"), target.device, seed)
    leaves = inputs.detached(grad=task.mode == "train")

    def call() -> object:
        if task.mode == "infer":
            with torch.no_grad():
                return stack.attention(leaves.q, leaves.k, leaves.v)
        return torch.autograd.grad(stack.attention(leaves.q, leaves.k, leaves.v), leaves.leaves, leaves.dout)

    return call
