"""What the pages that lead a new user by the hand show runs as it stands."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from flashbench import kernels
from flashbench.kernels import Target, _triton

DOCS = Path(__file__).resolve().parent.parent / "docs"
PAGES = ("index.md", "own.md", "python.md", "ring.md", "flash-attn.md", "tiling.md")


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(encoding="utf-8"), flags=re.DOTALL)


def test_there_is_something_to_run() -> None:
    assert len(blocks("index.md", "console")) == 1
    assert len(blocks("own.md", "console")) == 1
    assert len(blocks("own.md", "python")) == 1
    assert len(blocks("python.md", "python")) == 2
    assert len(blocks("flash-attn.md", "python")) == 1
    assert len(blocks("ring.md", "console")) == 1
    assert len(blocks("tiling.md", "python")) == 1


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_commands_run_in_order(page: str, tmp_path: Path) -> None:
    for block in blocks(page, "console"):
        for line in (line[2:] for line in block.splitlines() if line.startswith("$ ")):
            command = [sys.executable, "-m", *shlex.split(line)]
            done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=300)
            assert done.returncode == 0, f"{line}: {done.stderr}"


@pytest.mark.slow
@pytest.mark.parametrize("page", PAGES)
def test_snippets_run(page: str, tmp_path: Path) -> None:
    if reason := kernels.get("flash").why_unavailable(Target()):
        pytest.skip(reason)
    for block in blocks(page, "python"):
        done = subprocess.run(
            [sys.executable, "-c", block],
            capture_output=True,
            text=True,
            cwd=tmp_path,
            timeout=300,
            env={name: value for name, value in os.environ.items() if name != _triton.VARIABLE},
        )
        assert done.returncode == 0, done.stderr
