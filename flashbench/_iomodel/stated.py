"""What the author of an implementation says of its traffic and FLOPs, as an estimate like any other."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from flashbench._iomodel.tensors import compulsory, flops
from flashbench._iomodel.types import Estimate, Traffic
from flashbench.errors import SpecError
from flashbench.problem import Problem

NUMBERS = ("flops", "exps", "extra_bytes", "saved_bytes")
PARTS = ("read", "write", "atomic")


def stated(name: str, problem: Problem, pass_: str, values: Mapping[str, Any]) -> Estimate:
    """The estimate of values as of ``declared.Stated``. name: of the implementation.

    read, write, atomic: bytes, one number or tensor by tensor. flops: matrix FLOPs done, the nominal ones
    where they are left out; exps, extra_bytes, saved_bytes: 0 where left out. Raises SpecError for a name
    that is not known and a value that is no whole number of 0 or more.
    """
    where = f"the io_model of {name}"
    for key in values:
        if key not in (*NUMBERS, *PARTS):
            raise SpecError(f"{where} gives {key!r}; accepted: {', '.join((*NUMBERS, *PARTS))}")
    parts = {part: _part(values.get(part, 0), f"{where}: {part}") for part in PARTS}
    numbers = {key: _count(values[key], f"{where}: {key}") for key in NUMBERS if key in values}
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
    if isinstance(value, bool) or not isinstance(value, int | float) or value != int(value) or value < 0:
        raise SpecError(f"{where} is {value!r}; accepted: a whole number of 0 or more")
    return int(value)
