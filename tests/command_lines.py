"""Command lines of flashbench in lines of shell, and whether the command line takes them; nothing runs."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from typing import Any

import typer

from flashbench import cli


def commands(lines: list[str]) -> Iterator[list[str]]:
    """The arguments of every ``flashbench …`` in lines of shell, without pipes and redirections."""
    for line in lines:
        words = shlex.split(line.strip(), comments=True)
        for index, word in enumerate(words):
            if word == "flashbench" and (index == 0 or words[index - 1] in ("--", "&&", "run")):
                rest = words[index + 1 :]
                ends = [at for at, item in enumerate(rest) if re.fullmatch(r"\||\|\||&&?|>>?|;", item)]
                yield rest[: min(ends, default=len(rest))]


def accept(arguments: list[str]) -> None:
    """Parse as the command line does, and run nothing. Raises what Typer raises for a bad line."""
    command: Any = typer.main.get_command(cli.app)
    context = command.make_context("flashbench", list(arguments))
    while hasattr(command, "resolve_command"):
        name, command, arguments = command.resolve_command(context, arguments)
        assert command is not None
        context = command.make_context(name, list(arguments), parent=context)
