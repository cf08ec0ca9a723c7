"""Cells of several grids in one TOML file: tables ``[[cells]]``, each with options as ``run`` takes them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from flashbench._cli import options
from flashbench.errors import SpecError, UsageError

if TYPE_CHECKING:
    from flashbench.problem import Cell

TABLE = "cells"


def read(path: str, defaults: Mapping[str, str], line: Mapping[str, Any]) -> tuple[Cell, ...]:
    """The cells of every table, in order. line: parsed options that win over each table.

    Raises UsageError for a file that is no such one, and as ``cells_of``; a cell stands once.
    """
    from flashbench import configfile

    where = f"--config {path!r}"
    document = configfile.read_toml(path)
    tables = document.get(TABLE)
    if set(document) != {TABLE} or not isinstance(tables, list):
        raise UsageError(f"{where}: holds {', '.join(document) or 'nothing'}; accepted: tables [[{TABLE}]]")
    found: dict[Cell, None] = {}
    for number, table in enumerate(tables, 1):
        at = f"{where}: [[{TABLE}]] {number}"
        if not isinstance(table, dict):
            raise UsageError(f"{at}: is no table; accepted: options of a grid")
        for cell in cells_of(table, at, defaults, line):
            if cell in found:
                raise SpecError(f"{at}: the cell '{cell.key}' occurs twice; accepted: every cell once")
            found[cell] = None
    return tuple(found)


def cells_of(
    table: Mapping[str, Any], where: str, defaults: Mapping[str, str], line: Mapping[str, Any] | None = None,
    more: Sequence[str] = (),
) -> tuple[Cell, ...]:  # fmt: skip
    """The cells of one table over the defaults. Raises UsageError, SpecError or UnknownName, naming where.

    more: as of ``sweep.options_of``.
    """
    from flashbench import kernels, sweep

    known = kernels.registry()
    typed = sweep.parse(
        sweep.options_of(table, where, sweep.ASKED, more), lambda name: f"{where}: {name}", known
    )  # fmt: skip
    if "impl" not in (line or {}):
        options.refuse_own(typed.get("impl", ()), where)
    return sweep.sweep_of(sweep.combine(line or {}, typed, usual(defaults, {*typed, *(line or {})}))).cells()


def usual(defaults: Mapping[str, str], given: set[str]) -> dict[str, Any]:
    """The parsed defaults; heads that are given are not shared as the defaults' are, and a function of one's
    own stands alone.
    """
    from flashbench import kernels, sweep

    instead = {"kv_heads": "heads", "impls": "impl"}
    rest = {name: text for name, text in defaults.items() if instead.get(name) not in given}
    return sweep.parse(rest, options.on_line, kernels.registry())
