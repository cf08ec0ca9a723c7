"""The demo notebook runs from top to bottom, and what its cells show has a form for notebooks."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from flashbench import kernels
from flashbench.kernels import Target, _triton

NOTEBOOK = Path(__file__).resolve().parent.parent / "docs" / "demo.ipynb"

RUN = """
import ast, json, sys
names = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1], encoding="utf-8"))["cells"]):
    if cell["cell_type"] == "code":
        body = ast.parse("".join(cell["source"])).body
        last = ast.Expression(body.pop().value) if isinstance(body[-1], ast.Expr) else None
        exec(compile(ast.Module(body, []), f"cell {number}", "exec"), names)
        if last:
            shown = eval(compile(last, f"cell {number}", "eval"), names)
            form = shown._repr_html_() if hasattr(shown, "_repr_html_") else repr(shown)
            assert form, number
            print(form)
"""


def test_it_is_a_notebook_without_anybodys_results() -> None:
    held = json.loads(NOTEBOOK.read_text(encoding="utf-8"))
    assert (held["nbformat"], held["nbformat_minor"]) == (4, 5)
    assert len({cell["id"] for cell in held["cells"]}) == len(held["cells"])
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in held["cells"])


@pytest.mark.slow
def test_every_cell_runs(tmp_path: Path) -> None:
    if reason := kernels.get("flash").why_unavailable(Target()):
        pytest.skip(reason)
    done = subprocess.run(
        [sys.executable, "-c", RUN, NOTEBOOK], capture_output=True, text=True, cwd=tmp_path, timeout=300,
        env={name: value for name, value in os.environ.items() if name != _triton.VARIABLE},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "o is off by" in done.stdout
    assert "flash-v2" in done.stdout
