"""What a function of one's own may say of itself, beside its signature: a decorator that costs nothing.

    @flashbench.implementation(layout="bshd", passes=("fwd",), io_model="flash-v2")
    def attention(q, k, v, causal=False, scale=None): …

Everything is optional. What is not declared is read from the signature (``kernels/_own.py``) or found by
running: a function without a declaration is checked like any other.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from flashbench.errors import SpecError, UnknownName, in_words
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
    it takes beyond those that its signature shows. supports(problem, pass_): None or True where it takes the
    problem, else why not (False gives no reason). io_model: a row of iomodel.MODELS, or a function
    (problem, pass_) -> Stated. config: what to show of its configuration; names such as fwd_block_q are the
    tiles of its model. triton: whether its kernels are Triton's, None to look into its module.
    """

    layout: str = LAYOUTS[0]
    passes: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    features: frozenset[str] = frozenset()
    supports: Callable[[Problem, str], str | bool | None] | None = None
    io_model: str | Callable[[Problem, str], Stated] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    triton: bool | None = None

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise UnknownName("layout", self.layout, LAYOUTS)
        for kind, names, known in (
            ("pass", self.passes, PASSES),
            ("dtype", self.dtypes, DTYPES),
            ("feature", self.features, FEATURES.values()),
        ):
            for name in names or ():
                if name not in known:
                    raise UnknownName(kind, name, known)
        if isinstance(self.io_model, str):
            from flashbench import iomodel

            iomodel.find(self.io_model)

    def why_not(self, problem: Problem, pass_: str) -> str | None:
        """Why it does not take the problem, by its own word, or None."""
        for kind, asked, taken in (("pass", pass_, self.passes), ("dtype", problem.dtype, self.dtypes)):
            if taken is not None and asked not in taken:
                return f"it declares the {kind} {', '.join(taken)} alone, not {asked}"
        try:
            said = True if self.supports is None else self.supports(problem, pass_)
        except Exception as error:  # whoever asks is about to plan or to refuse, not to run it
            return f"its supports(problem, pass_) raised {in_words(error)}"
        if said is None or said is True:
            return None
        return said or "its supports(problem, pass_) says no"


def implementation(**declared: Any) -> Callable[[Function], Function]:
    """Declare what a function of one's own supports; arguments are the fields of Declared.

    Returns a decorator that leaves the function as it is. Raises SpecError for a field that is not known, and
    UnknownName for a value that is not.
    """
    known = Declared.__dataclass_fields__
    for name in declared:
        if name not in known:
            raise SpecError(f"implementation(): {name!r} is not known; accepted: {', '.join(known)}")
    for name in ("passes", "dtypes"):
        if isinstance(declared.get(name), str):
            declared[name] = (declared[name],)
    if "features" in declared:
        features = declared["features"]
        declared["features"] = frozenset([features] if isinstance(features, str) else features)
    said = Declared(**declared)

    def mark(function: Function) -> Function:
        setattr(function, ATTRIBUTE, said)
        return function

    return mark


def of(function: Callable[..., Any]) -> Declared:
    """What the function declares; the defaults where it declares nothing."""
    found = getattr(function, ATTRIBUTE, None)
    return found if isinstance(found, Declared) else Declared()


def declares(layout: str) -> str:
    """How a function says its layout, for messages."""
    return f"@flashbench.implementation(layout={layout!r})"
