"""Functions of other people's as implementations: by spec on the line, or offered by an installed package.

A spec is ``FILE.py:FUNCTION`` or ``MODULE:FUNCTION``; it is also the name of the implementation, so that any
process started in the same folder finds it. An installed package offers functions in the entry-point group
``flashbench.implementations``, by the names of its entries. Nothing is imported until the implementation
looks at its target, as Triton has to know before its import whether it compiles or interprets.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flashbench import units
from flashbench.declared import ATTRIBUTE, Declared, Stated, declares, of
from flashbench.errors import FlashbenchError, UsageError
from flashbench.kernels import (
    Call,
    Implementation,
    Origin,
    Target,
    _triton,
    registry,
    unsupported_features,
)
from flashbench.kernels._own_import import imported
from flashbench.kernels._own_signature import layers, signature
from flashbench.problem import LAYOUTS, UNLIMITED, Problem

if TYPE_CHECKING:
    from flashbench.kernels._inputs import Inputs

GROUP = "flashbench.implementations"
"""The entry-point group in which packages offer functions."""

ACCEPTED = "FILE.py:FUNCTION or MODULE:FUNCTION, a function of (q, k, v, causal, scale, …)"

ARGUMENTS: Mapping[str, tuple[str, ...]] = {
    "causal": ("causal", "is_causal"),
    "scale": ("scale", "softmax_scale", "sm_scale"),
    "window": ("window", "window_size"),
    "top-left": ("top_left",),
    "softcap": ("softcap",),
    "alibi": ("alibi_slopes",),
    "bias": ("bias", "attn_bias"),
    "sinks": ("sinks",),
    "cu_seqlens_q": ("cu_seqlens_q",),
    "cu_seqlens_k": ("cu_seqlens_k",),
    "max_seqlen_q": ("max_seqlen_q",),
    "max_seqlen_k": ("max_seqlen_k",),
    "gqa": ("enable_gqa",),
    "deterministic": ("deterministic",),
}
"""What a function may be told beside q, k and v, and the names under which its signature may ask for it."""

PACKED = ("cu_seqlens_q", "cu_seqlens_k")


@dataclass(frozen=True)
class Loaded:
    """A function that was imported. takes: what of ARGUMENTS it asks for → the name of its parameter."""

    function: Callable[..., Any]
    declared: Declared
    takes: Mapping[str, str]
    triton: bool
    facts: Mapping[str, str]

    def why_unsupported(self, problem: Problem, pass_: str) -> str | None:
        """Why it does not take the problem by its signature and its own word, or None."""
        if problem.causal and "causal" not in self.takes:
            return f"its signature has no {' or '.join(ARGUMENTS['causal'])}"
        shown = {
            name for name in ("window", "top-left", "softcap", "alibi", "bias", "sinks") if name in self.takes
        }
        if all(name in self.takes for name in PACKED):
            shown.add("varlen")
        if self.declared.layout == LAYOUTS[1]:
            shown.add("bshd")
        if pass_ == "fwd" or "deterministic" in self.takes:
            shown.add("deterministic")
        return unsupported_features(problem, shown | self.declared.features) or self.declared.why_not(
            problem, pass_
        )

    def arguments(self, problem: Problem, inputs: Inputs) -> dict[str, Any]:
        """What it is called with beside q, k and v."""
        p = problem
        values: dict[str, Any] = {
            "causal": p.causal,
            "scale": p.softmax_scale,
            "window": p.window if p.window != (UNLIMITED, UNLIMITED) else None,
            "top-left": p.alignment == "top-left",
            "softcap": p.softcap or None,
            "alibi": inputs.alibi_slopes,
            "bias": inputs.bias,
            "sinks": inputs.sinks,
            "cu_seqlens_q": inputs.cu_seqlens_q,
            "cu_seqlens_k": inputs.cu_seqlens_k,
            "max_seqlen_q": p.seqlen_q if p.lengths else None,
            "max_seqlen_k": p.seqlen_k if p.lengths else None,
            "gqa": p.group > 1,
            "deterministic": p.deterministic,
        }
        return {
            self.takes[name]: value
            for name, value in values.items()
            if name in self.takes and value is not None
        }


@dataclass
class _Source:
    """A spec and, once somebody looked, what it is."""

    spec: str
    find: Callable[[], Any]
    name: str
    where: str  # what named it, as complaints begin: an option, a package's entry point
    here: bool = False
    _found: Loaded | UsageError | None = field(default=None, repr=False)

    def load(self, target: Target) -> Loaded:
        """Import and inspect it, once. Raises UsageError in one line."""
        if self._found is None:
            _settle_triton(target)
            try:
                self._found = inspected(self.find(), self.spec, self.where)
            except UsageError as error:
                self._found = error
            except FlashbenchError as error:  # of the decorator
                self._found = UsageError(f"{self.where}: {error}")
        if isinstance(self._found, UsageError):
            raise self._found
        return self._found

    @property
    def loaded(self) -> Loaded | None:
        """The function, None before it is loaded and where it cannot be."""
        return self._found if isinstance(self._found, Loaded) else None

    def facts(self) -> Mapping[str, str]:
        """As of Origin."""
        return self.loaded.facts if self.loaded else {"source": self.spec}

    def hint(self) -> str:
        """What a function that declares nothing may have taken for something else."""
        if self.loaded is None or any(hasattr(one, ATTRIBUTE) for one in layers(self.loaded.function)):
            return ""
        return f"its q, k, v and o are (batch, heads, rows, columns); rows first: {declares(LAYOUTS[1])}"

    def triton(self, target: Target) -> bool:
        """Whether it can be loaded, and its kernels are Triton's."""
        with suppress(UsageError):
            return self.load(target).triton
        return False

    def why_unavailable(self, target: Target) -> str | None:
        try:
            loaded = self.load(target)
        except UsageError as error:
            return str(error)
        return _triton.why_unavailable(target) if loaded.triton else None


def _given(spec: str) -> str:
    return f"--impl {units.quoted(spec, 400)}"


def look(spec: str, where: str = "") -> None:
    """Look at the form of a spec, and for its file. Raises UsageError, which says what is accepted."""
    place, _, function = spec.rpartition(":")
    where = where or _given(spec)
    if not place or not function.isidentifier() or "," in spec:
        raise UsageError(f"{where}: not a function; accepted: {ACCEPTED}")
    if place.endswith(".py"):
        if not Path(place).is_file():
            raise UsageError(f"{where}: there is no file {place}; accepted: {ACCEPTED}")
    elif not all(part.isidentifier() for part in place.split(".")):
        raise UsageError(f"{where}: {place!r} is no module and ends not in .py; accepted: {ACCEPTED}")


def row(spec: str) -> Implementation:
    """The implementation of a spec; it is ``unavailable`` where ``look`` or its import has a complaint."""
    where = _given(spec)
    return _implementation(_Source(spec, partial(_function, spec, where), spec, where), f"yours: {spec}")


def known(function: Callable[..., Any], beside: Sequence[str] = ()) -> str:
    """The name, ``MODULE:FUNCTION``, by which the function itself is an implementation in this process; with
    a number behind it where one of those beside it has the name.
    """
    own = getattr(function, "__name__", "")
    plain = f"{getattr(function, '__module__', '')}:{own if own.isidentifier() else 'function'}"
    name, number = plain, 1
    while name in beside:
        number += 1
        name = f"{plain}_{number}"
    registry()[name] = _implementation(
        _Source(name, lambda: function, name, _given(name), here=True), f"yours: {name}"
    )
    return name


def offered() -> list[Implementation]:
    """What installed packages offer in GROUP; none of them is imported."""
    return [_offer(entry) for entry in importlib.metadata.entry_points(group=GROUP)]


def _offer(entry: importlib.metadata.EntryPoint) -> Implementation:
    where = f"--impls {entry.name} (entry point {units.quoted(entry.value, 400)})"
    source = _Source(entry.value, partial(_function, entry.value, where), entry.name, where)
    return _implementation(source, f"of a package: {entry.value}")


def _implementation(source: _Source, summary: str) -> Implementation:
    def loaded(target: Target | None = None) -> Loaded:
        return source.load(target or Target())

    def prepare(problem: Problem, inputs: Inputs) -> Call:
        from flashbench.kernels._own_call import prepare

        return prepare(loaded(Target(device=inputs.q.device.type)), problem, inputs)

    def stated(problem: Problem, pass_: str) -> Stated:
        from flashbench.kernels._own_call import stated

        return stated(loaded().declared.io_model, source.name, problem, pass_)

    return _Own(
        name=source.name,
        summary=summary,
        prepare=prepare,
        io_model=None,
        why_unavailable=source.why_unavailable,
        why_unsupported=lambda problem, pass_, target: loaded(target).why_unsupported(problem, pass_),
        describe=lambda problem, pass_, target: loaded(target).declared.config,
        interpreted=lambda target: source.triton(target) and _triton.interpreted(target),
        prepared_bytes=lambda problem, pass_, target: _copied(problem),
        stated=stated,
        origin=Origin(
            spec=source.spec, load=source.load, facts=source.facts, hint=source.hint, here=source.here
        ),
        source=source,
    )


@dataclass(frozen=True, kw_only=True)
class _Own(Implementation):
    """An implementation whose model is known once its function is loaded, for a target."""

    source: _Source

    def model(self, problem: Problem, target: Target) -> str | None:
        """The row of iomodel.MODELS that its function declares, if it does."""
        model = self.source.loaded.declared.io_model if self.source.loaded else None
        return model if isinstance(model, str) else None


def _copied(problem: Problem) -> int:
    """Bytes of q, k and v once more: the copy that its first call is given, and the layout that it wants."""
    p = problem
    queries, keys = p.rows
    elements = p.num_heads * queries * p.head_dim + p.num_kv_heads * keys * (p.head_dim + p.head_dim_v)
    return 2 * elements * p.dtype_bytes


def _settle_triton(target: Target) -> None:
    """As any Triton kernel does it: on a CPU, and where nobody imported it yet, it interprets."""
    if _triton.why_missing() is None and "triton" not in sys.modules and target.type == "cpu":
        os.environ[_triton.VARIABLE] = "1"


def _function(spec: str, where: str) -> Any:
    look(spec, where)
    return imported(spec, where)


def inspected(function: Any, spec: str, where: str) -> Loaded:
    """What a function is by its signature and its own word. Raises UsageError where it is none."""
    if not callable(function):
        raise UsageError(f"{where}: it is {type(function).__name__}; accepted: {ACCEPTED}")
    try:
        parameters = list(signature(function).parameters.values())
    except (TypeError, ValueError):
        raise UsageError(
            f"{where}: its signature cannot be read; wrap it in a function of (q, k, v, …)"
        ) from None
    kinds = inspect.Parameter
    leading = [p for p in parameters if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    if len(leading) < 3 and not any(p.kind is kinds.VAR_POSITIONAL for p in parameters):
        raise UsageError(f"{where}: it takes {len(leading)} arguments; accepted: {ACCEPTED}")
    known = {alias: name for name, aliases in ARGUMENTS.items() for alias in aliases}
    rest = [p for p in parameters if p not in leading[:3]]
    for p in rest:
        needed = p.default is kinds.empty and p.kind in (kinds.POSITIONAL_OR_KEYWORD, kinds.KEYWORD_ONLY)
        if p.kind is kinds.POSITIONAL_ONLY or (needed and p.name not in known):
            raise UsageError(
                f"{where}: its parameter {p.name!r} is not known and has no default; known beside q, k, v:"
                f" {', '.join(known)}"
            )
    declared = of(next((one for one in layers(function) if hasattr(one, ATTRIBUTE)), function))
    takes = {known[p.name]: p.name for p in rest if p.name in known}
    triton = _has_triton(function) if declared.triton is None else declared.triton
    return Loaded(function, declared, takes, triton, _facts(function, spec))


def _has_triton(function: Any) -> bool:
    """Whether its module holds Triton kernels; what runs says for sure (``_interpreter.noticing``)."""
    modules = [module for one in layers(function) if (module := inspect.getmodule(one))]
    own = [module for module in modules if module.__name__.partition(".")[0] != "torch"]
    values: list[object] = [value for module in own for value in vars(module).values()]
    return any(type(value).__module__.startswith("triton.runtime") for value in values)


def _facts(function: Any, spec: str) -> dict[str, str]:
    """The spec, and a hash of the file that the function stands in."""
    file = None
    for one in layers(function):  # the innermost has the last word
        with suppress(TypeError):  # a builtin, or an object that can be called
            file = inspect.getsourcefile(one) or file
    data = Path(file).read_bytes() if file and Path(file).is_file() else b""
    return {"source": spec, "source_sha256": hashlib.sha256(data).hexdigest()[:16] if data else "unknown"}
