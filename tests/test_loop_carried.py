"""No loop of a kernel loses a variable: Triton carries what a trial run of its body has changed, by identity.

A variable that was another name of a second one before the loop, and becomes that again inside before the
second is changed, looks unchanged: the loop then reads, in every turn, what it was before the first.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

KERNELS = Path(__file__).resolve().parent.parent / "flashbench" / "kernels"
COMPILED = [path for path in sorted(KERNELS.glob("*.py")) if "jit" in path.read_text(encoding="utf-8")]


def names(statements: list[ast.stmt]) -> Iterator[tuple[str, str]]:
    """(variable, what it becomes another name of) of each assignment of a name to a name."""
    for statement in statements:
        for node in ast.walk(statement):
            if isinstance(node, ast.Assign) and isinstance(node.value, ast.Name):
                yield from ((to.id, node.value.id) for to in node.targets if isinstance(to, ast.Name))


def lost(function: ast.FunctionDef) -> list[str]:
    """Variables of its loops that may look unchanged; of statements in its own body alone."""
    same: dict[str, str] = {}
    found = []
    for statement in function.body:
        if isinstance(statement, ast.For | ast.While):
            for name, other in names(statement.body):
                if name in same and same[name] == same.get(other, other):
                    found.append(f"{function.name}:{statement.lineno} {name}")
        targets = {
            node.id
            for node in ast.walk(statement)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
        }
        aliases = dict(names([statement])) if isinstance(statement, ast.Assign) else {}
        for name in targets:
            same.pop(name, None)
            same = {one: root for one, root in same.items() if root != name}
        for name, other in aliases.items():
            same[name] = same.get(other, other)
    return found


@pytest.mark.parametrize("path", COMPILED, ids=lambda path: path.stem)
def test_no_variable_of_a_loop_starts_as_another_name_of_what_it_becomes(path: Path) -> None:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    assert not [said for node in ast.walk(tree) if isinstance(node, ast.FunctionDef) for said in lost(node)]


def test_such_a_variable_is_found() -> None:
    code = """
    def kernel(n):
        entry = load(0)
        before = entry
        fine = entry * 1
        for i in range(n):
            if i > 2:
                before = entry
                fine = entry
                entry = load(i)
    """
    function = ast.parse(textwrap.dedent(code)).body[0]
    assert isinstance(function, ast.FunctionDef)
    assert lost(function) == ["kernel:6 before"]
