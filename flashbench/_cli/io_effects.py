"""Options of ``flashbench io-model`` that would change nothing: refused; for some rows only: noted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from flashbench._cli import options
from flashbench.errors import UsageError

if TYPE_CHECKING:
    from flashbench._cli.io_request import Request

_FORWARD = ("num_splits", "page_size", "pack_gqa")
"""Options of a variant that concern the forward only."""

_TYPED = {"num_splits": "splits", "page_size": "page_size", "pack_gqa": "pack_gqa", "density": "density"}
"""Option of a variant → its name on the line."""

_TILES = ("block_q", "block_k", "sweep_block", "sweep_sram")
_NOT_IN_PAPER = ("models", "passes", "block_q", "block_k", "sweep_block", *_TYPED.values())


def refuse(line: Mapping[str, str | None], request: Request, *, paper: bool) -> None:
    """Raise UsageError for an option on the line that changes no row. paper: only that view is shown."""
    for name in _NOT_IN_PAPER if paper else ():
        if line.get(name) is not None:
            raise _refusal(line, name, "is not in the papers' view, which is of one forward")
    given = request.choices[0].variant.given
    for name in given:
        typed = _TYPED.get(name, name)
        if line.get(typed) is None:
            continue
        if not any(_takes(request, model, name) for model in request.names):
            raise _refusal(line, typed, f"is in none of {', '.join(request.names)}", _takers(name))
        if name in _FORWARD and set(request.passes) == {"bwd"}:
            raise _refusal(line, typed, "concerns the forward only", "with --passes fwd or fwd+bwd")
    tiled = paper or any(_tiled(request, row) for row in request.names)
    for name in () if tiled else _TILES:
        if line.get(name) is not None:
            raise _refusal(line, name, f"sets no tile of {', '.join(request.names)}", "algorithms with tiles")
    if line.get("alignment") is not None and not any(
        problem.masked or problem.block_mask for problem in request.problems
    ):
        raise _refusal(line, "alignment", "places no mask", "with --causal yes or --window")


def notes(request: Request) -> list[str]:
    """What is left out of some of the rows."""
    choice, found = request.choices[0], []
    given = choice.variant.given
    partial = [name for name in given if not all(_takes(request, row, name) for row in request.names)]
    if partial:
        found.append(f"{', '.join(partial)}: of the rows, only for algorithms that have it")
    forward = [name for name in given if name in _FORWARD]
    if forward and set(request.passes) != {"fwd"}:
        found.append(f"{', '.join(forward)}: of the forward only; a backward is as without")
    if choice.tiles and request.kernels:
        found.append(f"{', '.join(request.kernels)}: with the tiles of its code, not with those given")
    return found


def _refusal(line: Mapping[str, str | None], name: str, why: str, accepted: str = "without it") -> UsageError:
    from flashbench import units

    return UsageError(f"{options.on_line(name)} {units.quoted(line[name])} {why}; accepted: {accepted}")


def _takes(request: Request, name: str, option: str) -> bool:
    from flashbench.iomodel import find, known

    model = request.kernels.get(name, name)
    return known(model) and option in find(model).takes


def _takers(option: str) -> str:
    from flashbench.iomodel import MODELS

    return ", ".join(row.name for row in MODELS if option in row.takes)


def _tiled(request: Request, name: str) -> bool:
    """Whether the row has tiles that the line may set."""
    from flashbench.iomodel import find, known

    return name not in request.kernels and known(name) and bool(find(name).fwd_kernels)
