"""The options of features.ROWS as parameters of a command: one list for every command that takes them."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import wraps
from typing import Annotated, Any, get_type_hints

import typer

from flashbench import features

PANEL = "Attention"


def with_features(command: Callable[..., None]) -> Callable[..., None]:
    """The command with an option per row in place of its parameter ``features``.

    The command gets them there as one mapping of option name to text, bool or None (not on the line).
    """
    mine = {row.name: _annotation(row) for row in features.ROWS}

    @wraps(command)
    def wrapped(**values: Any) -> None:
        given = {name: values.pop(name) for name in mine}
        command(**values, features=given)

    parameters = []
    for parameter in inspect.signature(command).parameters.values():
        if parameter.name != "features":
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        parameters += [
            inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=None, annotation=annotation)
            for name, annotation in mine.items()
        ]
    hints = get_type_hints(command, include_extras=True)
    hints.pop("features")
    wrapped.__annotations__ = {**hints, **mine}
    wrapped.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [p.replace(annotation=wrapped.__annotations__[p.name]) for p in parameters]
    )
    return wrapped


def _annotation(row: features.Feature) -> Any:
    dashed = row.name.replace("_", "-")
    if row.parse is None:
        names = f"--{dashed}/--no-{dashed}"
        return Annotated[bool | None, typer.Option(names, help=row.help, rich_help_panel=PANEL)]
    return Annotated[
        str | None, typer.Option(f"--{dashed}", help=row.help, metavar=row.metavar, rich_help_panel=PANEL)
    ]
