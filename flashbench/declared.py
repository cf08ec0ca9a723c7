"""What a function of one's own may say of itself, beside its signature: a decorator that costs nothing.

    @flashbench.implementation(layout="bshd", passes=("fwd",), io_model="flash-v2")
    def attention(q, k, v, causal=False, scale=None): …

Everything is optional. What is not declared is read from the signature (``kernels/_own.py``) or found by
running: a function without a declaration is checked like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar, overload

from flashbench import record_shape, units
from flashbench.aside import stdout_to_stderr
from flashbench.errors import RAISED, SpecError, UnknownName, in_words
from flashbench.problem import DTYPES, FEATURES, LAYOUTS, PASSES, Problem

Function = TypeVar("Function", bound=Callable[..., Any])
Stated = Mapping[str, Any]
"""What a model of one's own returns: bytes ``read``, ``write`` and ``atomic``, each a number or a mapping of
tensor to number, ``flops`` that are done, and ``extra_bytes`` of memory beside the inputs; all may be left
out.
"""

ATTRIBUTE = "__flashbench__"
"""Where the decorator leaves its Declared on the function."""


@dataclass(frozen=True, kw_only=True)
class Declared:
    """What a function says of itself.

    layout: order of the dimensions of q, k, v and o: bhsd (batch, heads, rows, columns) or bshd. passes,
    dtypes: those that it has, None for all that turn out to work. features: names of problem.FEATURES that
    it takes beyond those that its signature shows. supports(problem, pass_): True where it takes the problem,
    else why not (False gives no reason). io_model: a row of iomodel.MODELS, or a function
    (problem, pass_) -> Stated. config: what to show of its configuration; names such as fwd_block_q are the
    tiles of its model. triton: whether its kernels are Triton's, None to look into its module.
    """

    layout: str = LAYOUTS[0]
    passes: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    features: frozenset[str] = frozenset()
    supports: Callable[[Problem, str], str | bool] | None = None
    io_model: str | Callable[[Problem, str], Stated] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    triton: bool | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.layout, str):
            raise refused("layout", self.layout, " or ".join(LAYOUTS))
        if self.layout not in LAYOUTS:
            raise UnknownName("layout", self.layout, LAYOUTS)
        for field_, kind, known in (
            ("passes", "pass", PASSES), ("dtypes", "dtype", DTYPES),
            ("features", "feature", FEATURES.values()),
        ):  # fmt: skip
            names = _names(getattr(self, field_), field_, kind, known)
            object.__setattr__(self, field_, frozenset(names or ()) if field_ == "features" else names)
        if self.supports is not None and not callable(self.supports):
            raise refused("supports", self.supports, "a function (problem, pass_)")
        if self.triton is not None and not isinstance(self.triton, bool):
            raise refused("triton", self.triton, "True, False or None")
        if isinstance(self.io_model, str):
            object.__setattr__(self, "io_model", _model(self.io_model))
        elif self.io_model is not None and not callable(self.io_model):
            raise refused(
                "io_model", self.io_model, "a row of 'flashbench list models' or a function (problem, pass_)"
            )
        object.__setattr__(self, "config", _configuration(self.config))

    def why_not(self, problem: Problem, pass_: str) -> str | None:
        """Why it does not take the problem, by its own word, or None."""
        for kind, asked, taken in (("pass", pass_, self.passes), ("dtype", problem.dtype, self.dtypes)):
            if taken is not None and asked not in taken:
                return f"it declares the {kind} {', '.join(taken)} alone, not {asked}"
        if self.supports is None:
            return None
        try:
            with stdout_to_stderr():
                said: object = self.supports(problem, pass_)
        except RAISED as error:  # whoever asks is about to plan or to refuse, not to run it
            return f"its supports(problem, pass_) raised {in_words(error)}"
        if isinstance(said, str):
            return " ".join(said.split()) or NO
        if isinstance(said, bool):
            return None if said else NO
        return f"its supports(problem, pass_) returned {shown(said)}; accepted: True, or why not as text"


NO = "its supports(problem, pass_) says no"


def shown(value: object) -> str:
    """A value of somebody else's as messages show it: as it is written in Python, on one line, cut."""
    try:
        return units.cut(" ".join(repr(value).split()))
    except Exception:  # of a class of somebody's own, whose __repr__ may do anything
        return f"a value of {type(value).__name__}"


def refused(name: str, value: object, accepted: str) -> SpecError:
    """What is wrong with a field of a declaration."""
    return SpecError(f"implementation(): {name} is {shown(value)}; accepted: {accepted}")


def _names(given: Any, field_: str, kind: str, known: Iterable[str]) -> tuple[str, ...] | None:
    """The names of a field that may also hold one alone."""
    if given is None and field_ != "features":
        return None
    names = (given,) if isinstance(given, str) else given
    if not isinstance(names, Collection) or not all(isinstance(name, str) for name in names):
        raise refused(field_, given, f"names among {', '.join(known)}")
    for name in names:
        if name not in known:
            raise UnknownName(kind, name, known)
    if not names and field_ != "features":
        raise refused(field_, given, f"names among {', '.join(known)}, one or more; None for all that work")
    return tuple(names)


def _model(name: str) -> str:
    """The model of that name, or an alternative with its parameters, as the rows of a file name it."""
    from flashbench import iomodel
    from flashbench._iomodel import alternatives

    if iomodel.known(name):
        return name
    if not alternatives.is_one(name):
        raise UnknownName("model", name, (*(row.name for row in iomodel.MODELS), *alternatives.names()))
    return alternatives.find(name).name


def _configuration(given: Any) -> dict[str, Any]:
    """A copy, of what a results file takes back: any other value would cost its readers the whole file."""
    if not isinstance(given, Mapping):
        raise refused("config", given, f"a dict of names, each {record_shape.SCALAR}")
    for name, value in given.items():
        if not isinstance(name, str):
            raise refused("a name in config", name, "text")
        try:
            record_shape.check({"type": "record", "config": {name: value}})
        except ValueError:
            raise refused(f"config[{shown(name)}]", value, record_shape.of_config(name)) from None
    return dict(given)


@overload
def implementation(function: Function, /, **declared: Any) -> Function: ...
@overload
def implementation(function: None = None, /, **declared: Any) -> Callable[[Function], Function]: ...
def implementation(
    function: Function | None = None, /, **declared: Any
) -> Function | Callable[[Function], Function]:
    """Declare what a function of one's own supports; arguments are the fields of Declared.

    With brackets or without. Returns a decorator that leaves the function as it is, or that function. Raises
    SpecError for a field that is not known or holds what it cannot, and UnknownName for a name that is not.
    """
    known = Declared.__dataclass_fields__
    for name in declared:
        if name not in known:
            raise SpecError(f"implementation(): {name!r} is not known; accepted: {', '.join(known)}")
    said = Declared(**declared)

    def mark(function: Function) -> Function:
        try:
            if not callable(function):
                raise TypeError
            setattr(function, ATTRIBUTE, said)
        except (AttributeError, TypeError):  # a builtin takes no attribute
            raise SpecError(
                f"implementation(): {shown(function)} takes no declaration; accepted: a function of (q, k, v)"
            ) from None
        return function

    return mark if function is None else mark(function)


def of(function: Callable[..., Any]) -> Declared:
    """What the function declares; the defaults where it declares nothing."""
    found = getattr(function, ATTRIBUTE, None)
    return found if isinstance(found, Declared) else Declared()


def declares(layout: str) -> str:
    """How a function says its layout, for messages."""
    return f"@flashbench.implementation(layout={layout!r})"
