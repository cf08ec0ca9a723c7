"""The alternatives to exact attention, by name, with their parameters.

    find("longformer:window=1024:globals=64") -> Alternative
    estimate("mamba", problem, "fwd") -> Estimate

An alternative computes something else than attention, so its ``flops`` and ``compulsory`` are its
own. Only forwards are modelled. To add one: a class with steps, compulsory, extra_bytes and refuses,
and its name in METHODS.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, fields, replace
from functools import cache
from typing import ClassVar, Protocol

from flashbench._iomodel.approximate import BlockSparse, Linformer, Longformer, Reformer
from flashbench._iomodel.recurrent import LinearAttention, Mamba, Mamba2
from flashbench._iomodel.types import Estimate, Step, Traffic, merge
from flashbench.errors import SpecError, UnknownName
from flashbench.problem import UNLIMITED, Problem
from flashbench.units import cut, parse_int, quoted


class Method(Protocol):
    """What a method tells of a problem; its fields are its parameters, all whole numbers."""

    NAME: ClassVar[str]
    SUMMARY: ClassVar[str]
    SOURCE: ClassVar[str]
    ASSUMPTIONS: ClassVar[str]

    def refuses(self, problem: Problem) -> str | None:
        """Why it does not cover the problem, or None."""

    def steps(self, problem: Problem) -> tuple[Step, ...]:
        """What its kernels do."""

    def compulsory(self, problem: Problem) -> Traffic:
        """Each of its tensors once."""

    def extra_bytes(self, problem: Problem) -> int:
        """Peak memory beyond the inputs, outputs included."""


METHODS: tuple[Method, ...] = (
    Linformer(), Reformer(), Longformer(), BlockSparse(), LinearAttention(), Mamba(), Mamba2(),
)  # fmt: skip
"""Every method with its default parameters."""

_MINIMUM = {"globals": 0}
_MAXIMUM = 2**24
_BY_NAME = {method.NAME: method for method in METHODS}


@dataclass(frozen=True)
class Alternative:
    """A method with its parameters, as it is shown beside the rows of iomodel.MODELS."""

    method: Method

    @property
    def name(self) -> str:
        """As it is typed: parameters that differ from their defaults follow after colons."""
        default = _BY_NAME[self.method.NAME]
        words = [
            f":{name}={value}" for name, value in self.parameters.items() if value != getattr(default, name)
        ]
        return self.method.NAME + "".join(words)

    @property
    def parameters(self) -> dict[str, int]:
        """Every parameter by name."""
        return {row.name: getattr(self.method, row.name) for row in fields(self.method)}  # type: ignore[arg-type]

    @property
    def summary(self) -> str:
        """What it is, and its parameters."""
        words = ", ".join(f"{name} {value}" for name, value in self.parameters.items())
        return f"{self.method.SUMMARY} ({words})"

    @property
    def source(self) -> str:
        """Where the formulas come from."""
        return self.method.SOURCE

    @property
    def assumptions(self) -> str:
        """What the counts take for granted."""
        return self.method.ASSUMPTIONS


def names() -> tuple[str, ...]:
    """The names of all methods."""
    return tuple(_BY_NAME)


def is_one(name: str) -> bool:
    """True for the name of a method, with or without parameters."""
    return name.partition(":")[0].strip() in _BY_NAME


@cache
def find(name: str) -> Alternative:
    """The method of that name, with parameters: ``longformer:window=1024:globals=64``.

    Raises UnknownName for an unknown method or parameter and SpecError for a value out of range.
    """
    return _parse(name, f"model {quoted(name)}")


def _parse(name: str, label: str) -> Alternative:
    # label: what the errors start with
    head, *typed = (part.strip() for part in name.split(":"))
    if head not in _BY_NAME:
        raise UnknownName("model", head, _BY_NAME)
    method = _BY_NAME[head]
    known = tuple(row.name for row in fields(method))  # type: ignore[arg-type]
    values: dict[str, int] = {}
    for part in typed:
        key, equals, text = (word.strip() for word in part.partition("="))
        if not part:
            form = "".join(f"[:{word}=N]" for word in known)
            raise SpecError(f"{label}: a parameter is missing after ':'; accepted: {head}{form}")
        if key not in known:
            raise UnknownName(f"{label}, parameters separated by ':': parameter of {head}", cut(key), known)
        if not equals or key in values:
            raise SpecError(f"{label}: {quoted(part)}; accepted: {key}=N, once")
        values[key] = parse_int(text, f"{label}: {key}", minimum=_MINIMUM.get(key, 1), maximum=_MAXIMUM)
    return Alternative(replace(method, **values))  # type: ignore[type-var]


def parse_names(text: str, option: str, exact: Collection[str]) -> tuple[str, ...]:
    """A comma list of exact models and alternatives, these as ``name`` writes them.

    Raises UnknownName for an unknown name or parameter and SpecError for an empty or repeated one.
    """
    chosen: list[str] = []
    for part in (part.strip() for part in text.split(",")):
        if part not in exact and not is_one(part):
            if not part:
                raise SpecError(
                    f"{option} {quoted(text)}: a name is missing; accepted: a comma list of models"
                )
            raise UnknownName(option, cut(part), (*exact, *_BY_NAME))
        name = part if part in exact else _parse(part, f"{option} {quoted(part)}").name
        if name in chosen:
            raise SpecError(f"{option} {quoted(text)}: {name} is given twice; accepted: every model once")
        chosen.append(name)
    return tuple(chosen)


def estimate(name: str, problem: Problem, pass_: str) -> Estimate:
    """What the method would move, compute and need in place of that attention; forward only.

    Raises SpecError for a pass with a backward, and for a problem that it does not cover.
    """
    row, method = find(name), covering(name, problem, pass_)
    steps = method.steps(problem)
    flops = sum(step.flops for step in steps)
    return Estimate(
        model=row.name,
        problem=problem,
        pass_=pass_,
        flops=flops,
        done_flops=flops,
        exps=sum(step.exps for step in steps),
        requested=Traffic(
            level="requested",
            read=merge(*(step.read for step in steps)),
            write=merge(*(step.write for step in steps)),
        ),
        compulsory=method.compulsory(problem),
        saved_bytes=0,
        extra_bytes=method.extra_bytes(problem),
        tiles={},
        assumptions=row.assumptions,
        steps=steps,
    )


def covering(name: str, problem: Problem, pass_: str) -> Method:
    """The method of that name. Raises SpecError unless it covers that pass over that problem."""
    row = find(name)
    if pass_ != "fwd":
        raise SpecError(f"model {row.name!r} has no pass {pass_!r}: only its forward is modelled")
    if (reason := _refuses(row.method, problem)) is not None:
        raise SpecError(f"model {row.name!r} does not cover {problem.key}: {reason}")
    return row.method


def _refuses(method: Method, problem: Problem) -> str | None:
    if problem.window != (UNLIMITED, UNLIMITED) or problem.lengths or problem.dropout_p:
        return "it is modelled without a window, a packed batch and dropout"
    return method.refuses(problem)
