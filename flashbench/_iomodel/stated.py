"""What the author of an implementation says of its traffic and FLOPs, as an estimate like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashbench._iomodel.tensors import compulsory, flops
from flashbench._iomodel.types import Estimate, Traffic
from flashbench.declared import shown
from flashbench.errors import SpecError
from flashbench.problem import Problem
from flashbench.record_shape import MAX_COUNT

NUMBERS = ("flops", "exps", "extra_bytes", "saved_bytes")
PARTS = ("read", "write", "atomic")


def stated_numbers(name: str, values: object) -> dict[str, Any]:
    """What a model of its author's own returned, as numbers and mappings of tensor to number.

    name: of the implementation. Raises SpecError, which names the model, for what is no mapping, for a name
    that is not known and for a value that is no whole number of 0 or more.
    """
    where = f"the io_model of {name}"
    known = (*NUMBERS, *PARTS)
    if not isinstance(values, Mapping):
        raise SpecError(f"{where} returned {shown(values)}; accepted: a dict of {', '.join(known)}")
    for key in values:
        if key not in known:
            raise SpecError(f"{where} gives {shown(key)}; accepted: {', '.join(known)}")
    return {
        key: (_part if key in PARTS else _count)(value, f"{where}: {key}") for key, value in values.items()
    }


def stated(name: str, problem: Problem, pass_: str, values: Mapping[str, Any]) -> Estimate:
    """The estimate of values as of ``declared.Stated``. name: of the implementation.

    read, write, atomic: bytes, one number or tensor by tensor. flops: matrix FLOPs done, the nominal ones
    where they are left out; exps, extra_bytes, saved_bytes: 0 where left out. Raises SpecError as
    ``stated_numbers``.
    """
    numbers = stated_numbers(name, values)
    parts: dict[str, dict[str, int]] = {part: numbers.get(part, {"all": 0}) for part in PARTS}
    nominal = flops(problem, pass_)
    return Estimate(
        model=name,
        problem=problem,
        pass_=pass_,
        flops=nominal,
        done_flops=numbers.get("flops", nominal),
        exps=numbers.get("exps", 0),
        requested=Traffic(level="requested", **parts),
        compulsory=compulsory(problem, pass_),
        saved_bytes=numbers.get("saved_bytes", 0),
        extra_bytes=numbers.get("extra_bytes", 0),
        tiles={},
        assumptions="as its author states it",
    )


def _part(value: Any, where: str) -> dict[str, int]:
    """Bytes per tensor; a bare number is of all of them together."""
    tensors = value if isinstance(value, Mapping) else {"all": value}
    return {str(tensor): _count(count, f"{where} of {tensor}") for tensor, count in tensors.items()}


def _count(value: Any, where: str) -> int:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 <= value <= MAX_COUNT or value != int(value):
        raise SpecError(f"{where} is {shown(value)}; accepted: a whole number from 0 to 2**63 - 1")
    return int(value)
