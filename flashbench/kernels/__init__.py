"""Implementations of attention: one file each; the file list is the registry.

A file in this folder whose name does not start with an underscore ends in a tuple
``IMPLEMENTATIONS``. Nothing is imported from torch or triton until ``prepare`` is called, so
names, summaries and refusals are to be had on any machine in milliseconds.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

from flashbench.errors import UnknownName
from flashbench.problem import Cell, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs
    from flashbench.record import Accuracy

Call = Callable[[], "Tensor"]
"""What is timed: no argument, returns o (batch, num_heads, seqlen_q, head_dim_v) in q's dtype."""

SPENT = "spent"
"""Attribute that ``prepare`` may give its call: seconds that it took, by what they went to
(``compile_s``)."""

WATCH = "changed"
"""Attribute that ``prepare`` may give its call where the tensors it is handed are copies of the inputs: a
function without arguments that gives the names of those that are not what they were."""

RENEW = "renew"
"""Attribute beside it: a function without arguments that copies what the inputs hold by now, to where the
call reads them."""

WRITES = "it changes its input {}; an attention leaves its inputs as they are"
"""What a Misbehaviour says of an input that is written to."""


class Refusal(Exception):
    """Raised by ``prepare`` or its call: the implementation does not take the problem, as the message
    says."""


class Misbehaviour(Exception):
    """Raised by ``prepare``: what it calls did something that makes its result, or anybody's, wrong."""


@dataclass(frozen=True, kw_only=True)
class Origin:
    """Where an implementation of somebody else's comes from.

    spec: as it was given, ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``. load(target): imports it, for the rest
    of the process; raises UsageError in one line. facts(): ``source`` and, once it is loaded,
    ``source_sha256``. hint(): what a wrong o may come from, or empty. here: it is a value of this process,
    which no other finds by its spec.
    """

    spec: str
    load: Callable[[Target], object]
    facts: Callable[[], Mapping[str, str]]
    hint: Callable[[], str]
    here: bool = False


@dataclass(frozen=True, kw_only=True)
class Target:
    """Where cells run. capability and memory are None on a CPU."""

    device: str = "cpu"
    name: str = "CPU"
    capability: tuple[int, int] | None = None
    total_bytes: int | None = None
    smem_per_block_bytes: int | None = None
    l2_bytes: int | None = None
    num_sms: int | None = None

    @property
    def type(self) -> str:
        """``cuda`` or ``cpu``."""
        return self.device.split(":")[0]


def _never(*_: object) -> None:
    return None


def _nothing(*_: object) -> Mapping[str, Any]:
    return {}


def _no_bytes(*_: object) -> int:
    return 0


def _none(*_: object) -> Sequence[Candidate]:
    return ()


def _no_context(*_: object) -> AbstractContextManager[object]:
    return nullcontext()


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One configuration that one kernel may be tried with, in place of the table's.

    kernel: as ``describe`` names it (its fields begin with it); compiled: as ``_compile.Task`` names it.
    config: the table's own type, as it is compiled; tiles: all of it, in the words of ``describe`` and
    ``prepare_tiles``. shared_bytes: what a thread block asks for at most.
    """

    kernel: str
    compiled: str
    config: Any
    tiles: Mapping[str, Any]
    shared_bytes: int


@dataclass(frozen=True, kw_only=True)
class Implementation:
    """One way to compute attention.

    prepare(problem, inputs) returns the call that is timed; whatever a caller does once
    (layouts, masks, descriptors) happens in prepare. Its output must be differentiable with
    torch.autograd when ``inputs.leaves`` require grad; the runner times the backward through that.

    why_unavailable(target): why it cannot run on this machine, one sentence, or None.
    why_unsupported(problem, pass_, target): why it refuses this problem, or None.
    describe(problem, pass_, target): the configuration that it runs (block_q, block_k, …).
    backend(call): what really ran, where the name leaves it open; called once, untimed.
    io_model: the row of iomodel.MODELS that describes its traffic, or None.
    runs(problem, target): the implementation whose kernels it runs in place of its own there, or None; for a
    card that need not be here, as on_card.
    interpreted(target): True where it runs in Triton's interpreter: checked, never timed.
    precompile(cells, target): compiles what the cells need, in parallel, before the sweep.
    context(problem): global switches of torch that the call needs (a forced backend, TF32 products);
    whoever prepares and calls does so inside it, so that entering it is never timed.
    prepared_bytes(problem, pass_, target): device memory that prepare keeps beside the inputs (a mask).
    prepare_tiles(problem, inputs, config): of a Triton kernel, as prepare, with the tiles of config (as
    describe gives them) in place of those that it would choose; what can be traced has it.
    on_card(problem, pass_, target): as describe, for a card that need not be here.
    candidates(problem, pass_, target): what ``flashbench tune`` may try; of each kernel the table's first;
    who gives some has prepare_tiles and a row of ``_compile.BUNDLED``.
    follows(problem, config, target): fields of a configuration that follow from its others on that problem.
    prepare_lse(problem, inputs, config): as prepare_tiles, of a call that returns (o, lse); lse: fp32, o's
    rows. An empty config leaves the choice to the table.
    deterministic: False where two runs of the same call may differ in the last bits.
    own_check(problem, inputs, o, gradients): of one that computes something else than exact attention, how
    far o, and of a pass with a backward its gradients, are from its own fp64 form; None of all that exact
    attention's reference judges (``exact``).
    exponentials_within(problem, target): how far the exponentials of its row sums may be off, relative, where
    they are not those of fp32: by so much lse may be, too.
    stated(problem, pass_): what a model of its author's own says of it (``declared.Stated``), or {}.
    origin: where it comes from, of one that is not flashbench's; None of all others.
    """

    name: str
    summary: str
    prepare: Callable[[Problem, Inputs], Call]
    io_model: str | None
    why_unavailable: Callable[[Target], str | None] = _never
    why_unsupported: Callable[[Problem, str, Target], str | None] = _never
    describe: Callable[[Problem, str, Target], Mapping[str, Any]] = _nothing
    backend: Callable[[Callable[[], object]], str | None] = _never
    interpreted: Callable[[Target], bool] = lambda _: False
    precompile: Callable[[Sequence[Cell], Target], None] = _never
    context: Callable[[Problem], AbstractContextManager[object]] = _no_context
    prepared_bytes: Callable[[Problem, str, Target], int] = _no_bytes
    prepare_tiles: Callable[[Problem, Inputs, Mapping[str, Any]], Call] | None = None
    on_card: Callable[[Problem, str, Target], Mapping[str, Any]] = _nothing
    candidates: Callable[[Problem, str, Target], Sequence[Candidate]] = _none
    follows: Callable[[Problem, Mapping[str, Any], Target], Mapping[str, Any]] = _nothing
    prepare_lse: (
        Callable[[Problem, Inputs, Mapping[str, Any]], Callable[[], tuple[Tensor, Tensor]]] | None
    ) = None
    deterministic: bool = True
    runs: Callable[[Problem, Target], str | None] = _never
    exponentials_within: Callable[[Problem, Target], float] = lambda *_: 0.0
    stated: Callable[[Problem, str], Mapping[str, Any]] = _nothing
    own_check: Callable[[Problem, Inputs, Tensor, Sequence[Tensor] | None], Accuracy] | None = None
    origin: Origin | None = None

    @property
    def exact(self) -> bool:
        """Whether it computes attention, up to rounding."""
        return self.own_check is None

    def model(self, problem: Problem, target: Target) -> str | None:
        """The row of iomodel.MODELS that describes what runs there."""
        other = None if self.interpreted(target) else self.runs(problem, target)
        return get(other).io_model if other else self.io_model


def unsupported_features(problem: Problem, taken: Collection[str]) -> str | None:
    """One sentence naming what the problem asks beyond ``taken`` (problem.FEATURES and fp8), or None."""
    missing = sorted(problem.features - set(taken))
    return f"it does not take {', '.join(missing)}" if missing else None


def stems() -> list[str]:
    """Names of the implementation files, sorted."""
    return sorted(m.name for m in pkgutil.iter_modules(__path__) if not m.name.startswith("_"))


@cache
def registry() -> dict[str, Implementation]:
    """Every implementation by name, in a fixed order: naive first, then by file and row, then those that
    installed packages offer. One of flashbench's own has precedence over a package's of the same name.
    """
    from flashbench.kernels import _own

    rows = [
        row
        for stem in sorted(stems(), key=lambda stem: (stem != "naive", stem))
        for row in importlib.import_module(f"{__name__}.{stem}").IMPLEMENTATIONS
    ]
    found = {row.name: row for row in rows}
    return found | {row.name: row for row in _own.offered() if row.name not in found}


def get(name: str) -> Implementation:
    """The implementation of that name, or of a spec such as ``FILE.py:FUNCTION``, which is then known by it.

    Raises UnknownName, offering the nearest; nothing of a spec is looked at yet.
    """
    if name not in registry():
        if ":" not in name:
            raise UnknownName("implementation", name, registry())
        from flashbench.kernels import _own

        registry()[name] = _own.row(name)
    return registry()[name]


def merge(outputs: Sequence[Tensor], lses: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """(o, lse) of attention over all keys from that over each part of them; exact, in any number of parts.

    outputs: o of each part, (…, seqlen_q, head_dim_v), normalised over its own keys; lses: natural log of
    the sum of exponentials of its scores, (…, seqlen_q). A part with lse = -inf saw no key: its o is not
    looked at. Differentiable in both; a row that no part saw a key of has no gradient. o is in
    the dtype of outputs, lse in that of lses, and sums are in the wider one, fp32 or wider. Raises ValueError
    for no parts and for shapes that differ.

    Source: Milakov, Gimelshein 2018, arXiv:1805.02867 (online softmax).
    """
    import torch

    shapes = {tuple(o.shape[:-1]) for o in outputs} | {tuple(lse.shape) for lse in lses}
    widths = {o.shape[-1] for o in outputs}
    if len(outputs) != len(lses) or len(shapes) != 1 or len(widths) != 1:
        raise ValueError(
            "every part has o (…, seqlen_q, head_dim_v) and lse (…, seqlen_q), of one shape in all parts;"
            f" got {[tuple(o.shape) for o in outputs]} and {[tuple(lse.shape) for lse in lses]}"
        )
    dtype = torch.promote_types(torch.promote_types(outputs[0].dtype, lses[0].dtype), torch.float32)
    scores = torch.stack([lse.to(dtype) for lse in lses])
    top = scores.amax(0)
    weights = (scores - top.where(top > float("-inf"), 0.0)).exp()
    total = weights.sum(0)
    o = torch.zeros_like(outputs[0], dtype=dtype)
    for part, weight in zip(outputs, weights.unsqueeze(-1), strict=True):
        o += weight * torch.where(weight != 0, part.to(dtype), 0.0)
    o /= total.where(total != 0, 1.0).unsqueeze(-1)
    # a row without keys in any part: log(0) is -inf and its gradient, 0 / 0, none; of log(1) it is 0
    lse = (top + total.where(total != 0, 1.0).log()).where(total != 0, float("-inf"))
    return o.to(outputs[0].dtype), lse.to(lses[0].dtype)
