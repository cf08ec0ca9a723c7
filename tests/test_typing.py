"""The public functions as a type checker sees them: what is returned follows from the flag for more."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import flashbench
from flashbench import flash_attn

PACKAGE = Path(flashbench.__file__).parent
CALLS = Path(__file__).with_name("typed_calls.py")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_mypy_takes_what_a_user_writes(tmp_path: Path) -> None:
    """With torch's own types, which takes mypy some 20 s."""
    assert (PACKAGE / "py.typed").is_file()
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file=", "--cache-dir", tmp_path / "cache", CALLS],
        capture_output=True, text=True, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(PACKAGE.parent)},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("name", flash_attn.__all__)
def test_the_stub_has_the_arguments_of_the_function(name: str) -> None:
    tree = ast.parse((PACKAGE / "flash_attn.pyi").read_text(encoding="utf-8"))
    variants = [one for one in tree.body if isinstance(one, ast.FunctionDef) and one.name == name]
    theirs = inspect.signature(getattr(flash_attn, name)).parameters
    assert len(variants) == 3
    for one in variants:
        assert {x.arg for x in (*one.args.args, *one.args.kwonlyargs)} == set(theirs)
    given, first = variants[-1].args, len(theirs) - len(variants[-1].args.defaults)
    assert [x.arg for x in given.args] == list(theirs)
    defaults = [x.default for x in theirs.values()]
    assert defaults[:first] == [inspect.Parameter.empty] * first
    assert [ast.literal_eval(x) for x in given.defaults] == defaults[first:]
    annotations = [ast.unparse(x.annotation) for x in given.args if x.annotation]
    assert annotations == [str(x.annotation) for x in theirs.values()]
