"""Write the reference from the code: docs/reference.md (command line and Python) and docs/flashbench.1.

    python tools/reference.py --write

Without --write it says which are not up to date, and exits 1 if one is not.
"""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import typer

import flashbench
from flashbench import cli, flash_attn

DOCS = Path(__file__).resolve().parent.parent / "docs"
HEAD = """# Reference

Written from the code by `python tools/reference.py --write`; a test holds it to that. What the options mean \
together, with defaults and exit codes: [cli.md](cli.md); the Python functions with examples: \
[python.md](python.md), [flash-attn.md](flash-attn.md).
"""


def commands() -> Iterator[tuple[str, Any]]:
    """(name, command) of each in the order of ``flashbench --help``; those of ``baseline`` by both names."""
    for name, command in typer.main.get_command(cli.app).commands.items():  # type: ignore[attr-defined]
        nested = getattr(command, "commands", None)
        yield from ((f"{name} {one}", each) for one, each in nested.items()) if nested else [(name, command)]


def usage(name: str, command: Any) -> str:
    """``flashbench NAME [OPTIONS] ARGUMENTS``."""
    said = [_argument(one) for one in command.params if one.param_type_name == "argument"]
    return " ".join(["flashbench", name, "[OPTIONS]", *said])


def _argument(one: Any) -> str:
    shown = one.name.upper() + ("…" if one.nargs == -1 else "")
    return shown if one.required else f"[{shown}]"


def options(command: Any) -> Iterator[tuple[str, str]]:
    """(how it is written, what it does) of each option, and of each argument that says what it is."""
    for one in command.params:
        if one.name == "help" or not one.help:
            continue
        if one.param_type_name == "argument":
            yield _argument(one), " ".join(one.help.split())
            continue
        value = "" if getattr(one, "is_flag", False) else f" {one.metavar or one.name.upper()}"
        yield ", ".join([*one.opts, *one.secondary_opts]) + value, " ".join(one.help.split())


def paragraphs(text: str | None) -> list[str]:
    """Of a docstring, each in one line; items of a list are paragraphs that begin with a dash."""
    parts = re.split(r"\n\n|\n(?=- )", inspect.cleandoc(text or ""))
    return [" ".join(part.split()) for part in parts if part.strip()]


def plain(text: str) -> str:
    """Text as Markdown that shows it as it is; ``code`` stays code."""
    parts = text.split("``")
    return "".join(
        f"`{part}`" if n % 2 else re.sub(r"([*_<>\[\]|`])", r"\\\1", part) for n, part in enumerate(parts)
    )


def of_commands() -> Iterator[str]:
    yield "## Command line"
    for name, command in commands():
        yield f"### flashbench {name}"
        yield f"```text\n{usage(name, command)}\n```"
        yield from map(plain, paragraphs(command.help))
        rows = [
            f"| `{shown.replace('|', chr(92) + '|')}` | {plain(help_)} |" for shown, help_ in options(command)
        ]
        if rows:
            yield "\n".join(["| option | what it does |", "|---|---|", *rows])


def of_python() -> Iterator[str]:
    yield "## Python"
    names = [f"flashbench.{name}" for name in flashbench.__all__ if not name.startswith("_")]
    yield from (part for name in names for part in _thing(name, getattr(flashbench, name.partition(".")[2])))
    yield "## flash-attention's functions"
    for name in sorted(flash_attn.__all__):
        yield from _thing(f"flashbench.flash_attn.{name}", getattr(flash_attn, name))


def _thing(name: str, thing: Any) -> Iterator[str]:
    yield f"### {name}"
    if inspect.isclass(thing) and issubclass(thing, Exception):
        yield from map(plain, paragraphs(thing.__doc__))
        return
    yield f"```text\n{_signature(name.rpartition('.')[2], thing)}\n```"
    yield from map(plain, paragraphs(thing.__doc__))
    if inspect.isclass(thing):
        rows = [f"| `{one}` | {plain(' '.join(paragraphs(doc)))} |" for one, doc in _members(thing)]
        if rows:
            yield "\n".join(["| has | which is |", "|---|---|", *rows])


def _signature(name: str, thing: Any) -> str:
    """On one line where it fits, else a line for each parameter."""
    found = inspect.signature(thing)
    shown = [_parameter(one) for one in found.parameters.values()]
    kinds = [one.kind for one in found.parameters.values()]
    if inspect.Parameter.KEYWORD_ONLY in kinds and inspect.Parameter.VAR_POSITIONAL not in kinds:
        shown.insert(kinds.index(inspect.Parameter.KEYWORD_ONLY), "*")
    if inspect.Parameter.POSITIONAL_ONLY in kinds and not inspect.isclass(thing):
        shown.insert(kinds.count(inspect.Parameter.POSITIONAL_ONLY), "/")
    back = (
        ""
        if inspect.isclass(thing) or found.return_annotation is found.empty
        else f" -> {_annotation(found.return_annotation)}"
    )
    line = f"{name}({', '.join(shown)}){back}"
    return line if len(line) <= 100 else f"{name}(\n" + "".join(f"    {one},\n" for one in shown) + f"){back}"


def _parameter(one: inspect.Parameter) -> str:
    """As ``str`` has it, but annotations, which are text, without their quotes."""
    bare = str(one.replace(annotation=one.empty)).partition("=")[0]
    typed = bare if one.annotation is one.empty else f"{bare}: {_annotation(one.annotation)}"
    return typed if one.default is one.empty else f"{typed} = {one.default!r}"


def _annotation(one: Any) -> str:
    return one if isinstance(one, str) else inspect.formatannotation(one).removeprefix("flashbench.api.")


def _members(thing: type) -> Iterator[tuple[str, str]]:
    """Public methods and properties of its own that say what they are."""
    own = {one.name for one in fields(thing)} if is_dataclass(thing) else set()
    for name, member in vars(thing).items():
        doc = inspect.getdoc(member) if name not in own else None
        if (
            name.startswith("_")
            or not doc
            or not (callable(member) or isinstance(member, property | classmethod))
        ):
            continue
        yield (name if isinstance(member, property) else f"{name}()"), doc


def man() -> str:
    """The manual page in roff."""
    codes = paragraphs(cli.__doc__)[1].removeprefix("Exit codes: ")
    summary = paragraphs(cli.app.info.help)[0].rstrip(".")
    lines = [".TH FLASHBENCH 1", ".SH NAME", rf"flashbench \- {_roff(summary[0].lower() + summary[1:])}"]
    lines += [".SH SYNOPSIS", ".B flashbench", ".I COMMAND", r"[\fIOPTIONS\fR]", ".SH COMMANDS"]
    for name, command in commands():
        lines += [f".SS {_roff(usage(name, command))}"]
        for number, text in enumerate(paragraphs(command.help)):
            lines += [*([".PP"] if number else []), *_filled(text)]
        for shown, help_ in options(command):
            lines += [".TP", rf"\fB{_roff(shown)}\fR", *_filled(help_)]
    return "\n".join([*lines, ".SH EXIT STATUS", *_filled(codes)]) + "\n"


def _filled(text: str) -> list[str]:
    return [_roff(line) for line in textwrap.wrap(text.replace("``", ""), 100, break_on_hyphens=False)]


def _roff(text: str) -> str:
    said = text.replace("\\", r"\e").replace("-", r"\-")
    return rf"\&{said}" if said.startswith((".", "'")) else said


def written() -> dict[Path, str]:
    """Each file's text as it should be."""
    page = "\n\n".join([HEAD.rstrip(), *of_commands(), *of_python()]) + "\n"
    return {DOCS / "reference.md": page, DOCS / "flashbench.1": man()}


def main(arguments: list[str]) -> int:
    stale = [
        path for path, text in written().items() if not path.is_file() or path.read_text("utf-8") != text
    ]
    if "--write" in arguments:
        for path in stale:
            path.write_text(written()[path], encoding="utf-8", newline="\n")
    elif stale:
        print("not up to date:", *(path.name for path in stale))
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
