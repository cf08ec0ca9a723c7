"""What implementations of other packages share: are they installed, which version, and what do they refuse.

A peer is imported where it is used, on a GPU, and asked: its signature says which options it takes, and what
it does not take it refuses itself, in a first call that nobody times. Layouts are made before that call.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any

from flashbench.errors import in_words, message
from flashbench.kernels import SPENT, Call, Implementation, Refusal, Target, unsupported_features
from flashbench.problem import LAYOUTS, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from flashbench.kernels._inputs import Inputs

_OPTIONS = {"window_size": "window", "softcap": "softcap", "alibi_slopes": "alibi"}
"""A parameter of a peer's function, and the feature that it takes by it."""


@dataclass(frozen=True, kw_only=True)
class Peer:
    """One package and one of its functions.

    name: of the implementation. package: as it is installed; module: as it is imported. make(module, problem,
    inputs): the call, its layouts made. function: name of the one whose signature says what it takes; takes:
    features beside that. packed: name of its function of packed sequences. forward_only: it has no gradients.
    why_unsupported(problem): what can be told without asking. prepared_bytes: as of Implementation.
    """

    name: str
    package: str
    module: str
    summary: str
    make: Callable[[ModuleType, Problem, Inputs], Call]
    function: str = ""
    packed: str = ""
    takes: frozenset[str] = frozenset({"bshd"})
    forward_only: bool = False
    why_unsupported: Callable[[Problem], str | None] = lambda _: None
    prepared_bytes: Callable[[Problem, str, Target], int] = lambda *_: 0
    install: str = field(default="")

    def why_unavailable(self, target: Target) -> str | None:
        """Why it cannot run there, one sentence, or None; imported on a GPU only."""
        how = self.install or f"pip install {self.package}"
        if target.type != "cuda":
            missing = "" if _installed(self.module) else f", and is not installed: {how}"
            return f"{self.package} needs a GPU{missing}"
        if not _installed(self.module):
            return f"{self.package} is not installed: {how}"
        return _broken(self.package, self.module) or self._lacks_its_function(how)

    def _lacks_its_function(self, how: str) -> str | None:
        """A module of that name may be another's: flash-attn-4 alone leaves an empty flash_attn."""
        module = importlib.import_module(self.module)
        if not self.function or hasattr(module, self.function):
            return None
        if getattr(module, "__file__", None) is None:
            return f"{self.package} is not installed: {how}"
        return f"{self.package} {self.version()} has no {self.function}: {how}"

    def refuses(self, problem: Problem, pass_: str, target: Target) -> str | None:
        """What is known before it is asked itself, one sentence, or None."""
        if self.forward_only and pass_ != "fwd":
            return f"{self.package} has no backward"
        return unsupported_features(problem, self.taken(pass_)) or self.why_unsupported(problem)

    def taken(self, pass_: str) -> set[str]:
        """Features that it takes, by the signatures of the version that is installed."""
        found = set(self.takes) | ({"deterministic"} if pass_ == "fwd" else set())
        if not self.function or not _installed(self.module) or _imported(self.module) is not None:
            return found
        module = importlib.import_module(self.module)
        if not hasattr(module, self.function):
            return found
        parameters = inspect.signature(getattr(module, self.function)).parameters
        found |= {feature for name, feature in _OPTIONS.items() if name in parameters}
        found |= {"deterministic"} & set(parameters)
        return found | ({"varlen"} if self.packed and hasattr(module, self.packed) else set())

    def prepare(self, problem: Problem, inputs: Inputs) -> Call:
        """The call that is timed, after a first one. Raises Refusal where the package refuses the problem."""
        module = importlib.import_module(self.module)
        start = time.perf_counter()
        try:
            call = self.make(module, problem, inputs)
            o = call()
            if inputs.q.requires_grad:
                import torch

                torch.autograd.grad(o, inputs.leaves, inputs.dout)
        except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
            raise Refusal(self._said(error)) from None
        except RuntimeError as error:
            if "out of memory" in message(error) or "CUDA error" in message(error):
                raise
            raise Refusal(self._said(error)) from None
        setattr(call, SPENT, {"compile_s": time.perf_counter() - start})
        return call

    def _said(self, error: Exception) -> str:
        lines = [line.strip() for line in message(error).splitlines() if line.strip()]
        return f"{self.package} {self.version()} refuses it: {' '.join(lines)[:240] or type(error).__name__}"

    def version(self) -> str:
        """Of the package, as it is installed."""
        try:
            return importlib.metadata.version(self.package)
        except importlib.metadata.PackageNotFoundError:  # built from source under another name
            modules = (importlib.import_module(name) for name in (self.module, self.module.split(".")[0]))
            found = (getattr(module, "__version__", None) for module in modules)
            return str(next((version for version in found if version), "of unknown version"))

    def describe(self, problem: Problem, pass_: str, target: Target) -> Mapping[str, Any]:
        """The package and its version."""
        return {"package": f"{self.package} {self.version()}"}

    def row(self) -> Implementation:
        """The implementation. Tiles of a peer are its own affair, so no model claims to be exact for it."""
        return Implementation(
            name=self.name,
            summary=self.summary,
            prepare=self.prepare,
            io_model=None,
            why_unavailable=self.why_unavailable,
            why_unsupported=self.refuses,
            describe=self.describe,
            prepared_bytes=self.prepared_bytes,
        )


def _installed(module: str) -> bool:
    """Whether the module is there; of a submodule only its package is looked for."""
    top = module.split(".")[0]
    return top in sys.modules or importlib.util.find_spec(top) is not None


@cache
def _imported(module: str) -> str | None:
    try:
        importlib.import_module(module)
    except Exception as error:  # a binary of another torch or CUDA raises whatever it likes
        return in_words(error, 200)
    return None


def _broken(package: str, module: str) -> str | None:
    said = _imported(module)
    if said is None:
        return None
    if said.startswith("ModuleNotFoundError") and module in said:
        return f"{package} is not installed: there is no module {module}"
    return f"{package} cannot be imported: {said}"


def rows_first(problem: Problem, *tensors: Tensor) -> list[Tensor]:
    """Views (batch, rows, heads, columns), of a packed batch (rows, heads, columns): nothing is copied."""
    return [x.transpose(1, 2)[0] if problem.lengths else x.transpose(1, 2) for x in tensors]


def copied_rows(problem: Problem, *tensors: Tensor) -> list[Tensor]:
    """The same, contiguous: copies of inputs of the other layout (``copied_bytes``)."""
    return [x.contiguous() for x in rows_first(problem, *tensors)]


def copied_bytes(problem: Problem) -> int:
    """Of q, k and v as ``copied_rows`` has them."""
    p = problem
    if p.layout == LAYOUTS[1]:
        return 0
    queries, keys = p.rows
    elements: int = p.num_heads * queries * p.head_dim + p.num_kv_heads * keys * (p.head_dim + p.head_dim_v)
    return elements * p.dtype_bytes


def heads_first(problem: Problem, o: Any) -> Tensor:
    """The view (batch, heads, rows, columns) of what a peer returned, alone or with its lse."""
    o = o[0] if isinstance(o, tuple | list) else o
    view: Tensor = (o[None] if problem.lengths else o).transpose(1, 2)
    return view
