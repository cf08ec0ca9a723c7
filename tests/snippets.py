"""Snippets of the pages: found by their fences, commands run by a shell, Python by a process of its own.

``python tests/snippets.py PAGE.md`` runs the Python of a page, and holds comments that state a result to it.
A block that begins with an import is what a reader puts at the head of a file: it starts in a fresh process,
and the blocks after it that begin with none go on there, in one namespace.
"""

from __future__ import annotations

import ast
import io
import re
import subprocess
import sys
import textwrap
import tokenize
from collections.abc import Iterator
from contextlib import redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
PAGES = (*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").glob("*.md")))
SHELL = ("console", "sh", "bash")


@dataclass(frozen=True)
class Block:
    """What stands between two fences. line: of its first line in the page, from 1."""

    page: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        return f"{self.page.name}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """One a line, of a console those with a prompt; a script, which begins with #!, is one."""
        if self.text.startswith("#!"):
            return [self.text]
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.startswith("#")]


def blocks(path: Path) -> Iterator[Block]:
    """The fenced blocks of a page, also of one in a list."""
    text = path.read_text(encoding="utf-8")
    for found in re.finditer(r"^( *)(`{3,}|~{3,})([^\n`]*)\n(.*?)^\1\2 *$", text, re.MULTILINE | re.DOTALL):
        line = text.count("\n", 0, found.start(4)) + 1
        language = found[3].strip().split(" ")[0]
        yield Block(path, line, language, textwrap.dedent(found[4]))


def stated(source: str) -> dict[int, str]:
    """What the comment of a line says, by line."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return {token.start[0]: token.string[1:].strip() for token in tokens if token.type == tokenize.COMMENT}


def holds(comment: str, value: Any, printed: str) -> bool:
    """Whether the value is what the comment states: a literal, a number to the digits that it has, or, after
    "prints", what was printed. A comment that states none of that is a remark, and holds.
    """
    if comment.startswith("prints "):
        return printed.strip() == comment.removeprefix("prints ")
    try:
        tree = ast.parse(comment, mode="eval").body
        ast.literal_eval(tree)
    except (ValueError, SyntaxError):
        return True
    several = isinstance(tree, ast.Tuple) and isinstance(value, tuple) and len(tree.elts) == len(value)
    pairs = zip(tree.elts, value, strict=True) if several else [(tree, value)]
    return all(_equal(ast.unparse(said), ast.get_source_segment(comment, said), got) for said, got in pairs)


def _equal(said: str, written: str | None, got: Any) -> bool:
    wanted = ast.literal_eval(said)
    if not isinstance(wanted, float) or not isinstance(got, float):
        return bool(wanted == got)
    digits = len((written or said).partition("e")[0].replace(".", "").lstrip("0"))
    return f"{got:.{digits}g}" == f"{wanted:.{digits}g}"


def run(block: Block, namespace: dict[str, Any]) -> None:
    """Run the block. Raises AssertionError where a comment states another result than comes out."""
    comments = stated(block.text)
    for node in ast.parse(block.text).body:
        comment = comments.get(node.end_lineno or 0, "")
        printed = io.StringIO()
        value = None
        where = f"{block.page.name}:{block.line + node.lineno - 1}"
        ast.increment_lineno(
            node, block.line - 1
        )  # a traceback, and who reads a function's source, see the page
        with redirect_stdout(printed):
            if isinstance(node, ast.Expr):
                value = eval(compile(ast.Expression(node.value), str(block.page), "eval"), namespace)
            else:
                exec(compile(ast.Module([node], []), str(block.page), "exec"), namespace)
        if isinstance(node, ast.Expr) and comment:
            assert holds(comment, value, printed.getvalue()), (
                f"{where}: the comment says {comment}, what came out is {value!r} {printed.getvalue()!r}"
            )


def files(path: Path) -> list[list[Block]]:
    """The Python blocks of a page, those together that run in one process."""
    found: list[list[Block]] = []
    for block in blocks(path):
        if block.language == "python":
            if not found or block.text.startswith(("import ", "from ")):
                found.append([])
            found[-1].append(block)
    return found


def main(path: Path, *only: str) -> int:
    """Run the Python of the page, or of its processes that of one number alone. Returns the exit code."""
    parts = files(path)
    if not only and len(parts) > 1:
        line = [sys.executable, __file__, str(path)]
        return max(
            subprocess.run([*line, str(number)], check=False).returncode for number in range(len(parts))
        )
    namespace: dict[str, Any] = {"__name__": "__main__"}
    for block in parts[int(only[0]) if only else 0]:
        run(block, namespace)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]).resolve(), *sys.argv[2:]))
