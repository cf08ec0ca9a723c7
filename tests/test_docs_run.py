"""What README and docs show runs as it stands: each fenced command and snippet of every page.

Pages and blocks are found, not listed: a new one is run, in the slow tier, without anybody remembering it.
What cannot be run as it stands is in APART, with its reason.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import snippets
from command_lines import accept, commands
from snippets import PAGES, ROOT, SHELL, Block

from flashbench import environment, kernels
from flashbench.errors import EXIT_UNAVAILABLE
from flashbench.kernels import Target, _triton

SAMPLE = "tests/data/cpu.jsonl"

FILES: dict[str, dict[str, str]] = {
    "README.md": {"results.jsonl": SAMPLE},
    "block.md": {"blocks.jsonl": "reports/h200-sxm/block/gpt2-medium.jsonl"},
    "ci.md": {"new/1/results.jsonl": SAMPLE, "configs": "configs"},
    "compare.md": {  # with memory, which a CPU's has not
        "base/results.jsonl": "reports/h200-sxm/versions/results.jsonl",
        "new/results.jsonl": "reports/h200-sxm/versions/results.jsonl",
    },
    "fleet.md": {
        "cards/one/results.jsonl": "reports/h200-sxm-x2/fleet/one/results.jsonl",
        "cards/two/results.jsonl": "reports/h200-sxm-x2/fleet/two/results.jsonl",
    },
    "numerics.md": {"numerics.jsonl": "reports/h200-sxm/numerics.jsonl"},
    "profile.md": {"configs": "configs"},
    "report.md": {
        "out/results.jsonl": SAMPLE,
        "reports/h100-sxm/results.jsonl": "reports/h100-sxm/results.jsonl",
    },
}
"""What a reader has beside him when he gets to a page: there → copied from here."""

LANGUAGES = {*SHELL, "python", "toml", "text", ""}

GPU, PLANNED, READ = "refused without a GPU", "planned", "read"


@dataclass(frozen=True)
class Apart:
    """Commands of a page, by how they begin, that are not run as they stand.

    how: GPU: refused on a machine without one (exit 3), and not run with one, where it takes long; PLANNED:
    run with --dry-run added; READ: the command line is read, as far as it is flashbench's.
    """

    page: str
    begins: tuple[str, ...]
    how: str
    why: str


APART = (
    Apart("README.md", ("make run", "make test"), READ, "installs packages"),
    Apart("README.md", ("flashbench run --seqlens 1k-64k",), PLANNED, "long, and of a GPU"),
    Apart("block.md", ("flashbench block",), READ, "models of full size, on a CPU hours"),
    Apart("ci.md", ("git ",), READ, "of a repository with a history; tests/test_bisect.py makes one"),
    Apart("decode.md", ("flashbench decode --model",), GPU, "times a GPU"),
    Apart("fleet.md", ("flashbench run --executor local --out",), GPU, "all GPUs of a host"),
    Apart("fleet.md", ("flashbench run --executor local --devices 0,1",), GPU, "two GPUs"),
    Apart("fleet.md", ("flashbench run --resume --executor local",), GPU, "all GPUs of a host"),
    Apart("fleet.md", ("flashbench run --executor local --devices cpu,cpu",), READ,
          "the default grid, minutes; tests/test_fleet.py runs a small one"),
    Apart("fleet.md", ("pip install", "ray start"), READ, "installs packages, starts a cluster"),
    Apart("fleet.md", ("flashbench run --executor ray", "flashbench run --resume --executor ray"), READ,
          "needs a cluster; tests/test_fleet_ray.py starts one"),
    Apart("fleet.md", ("flashbench run --executor slurm", "flashbench run --resume --executor slurm"), READ,
          "needs a cluster; tests/test_fleet_slurm.py plays one"),
    Apart("fleet.md", ("for i in",), GPU, "four GPUs"),
    Apart("fleet.md", ("#!/bin/bash",), READ, "a job of Slurm"),
    Apart("io-model.md", ("flashbench report",), READ, "drawn by a Chromium; tests/test_docs_figures.py"),
    Apart("numerics.md", ("flashbench check --numerics --seqlens",), READ, "a million keys"),
    Apart("profile.md", ("flashbench profile --counters",), GPU, "counters of a GPU"),
    Apart("profile.md", ("flashbench run --counters",), PLANNED, "the default grid, and of a GPU"),
    Apart("ring.md", ("flashbench ring --world-size",), READ, "of several GPUs; tests/test_ring.py"),
    Apart("tune.md", ("flashbench tune --impls", "flashbench tune --model"), GPU, "times a GPU"),
    Apart("tune.md", ("flashbench run --tuned",), READ, "a file that 'tune' wrote on a GPU"),
)  # fmt: skip

FAST = {"README.md", "kv-cache.md", "what-if.md"}
"""Pages whose commands are quick, or that everybody reads: in the fast tier."""

FAST_PYTHON = {"io-model.md", "kv-cache.md", "what-if.md", "time-model.md", "decode.md"}

SHOWN = [block for page in PAGES for block in snippets.blocks(page)]


def tiered(items: Iterable[Any], fast: set[str]) -> list[Any]:
    """One parameter each; slow but for those of the pages named."""
    found = []
    for item in items:
        page = item.page if isinstance(item, Block) else item
        marks = [] if page.name in fast else [pytest.mark.slow]
        found.append(pytest.param(item, id=str(item) if isinstance(item, Block) else item.name, marks=marks))
    return found


def apart(block: Block, command: str) -> Apart | None:
    """How the command is treated in place of being run, or None."""
    rows = [row for row in APART if row.page == block.page.name and command.startswith(row.begins)]
    assert len(rows) < 2, (str(block), command)
    return rows[0] if rows else None


@pytest.fixture
def shell(tmp_path: Path) -> Any:
    """Runs a command by bash in a folder of its own, ``flashbench`` being this one; returns its exit code
    and what it said.
    """
    bin_ = tmp_path / "bin"
    bin_.mkdir()
    (bin_ / "flashbench").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m flashbench "$@"\n')
    (bin_ / "flashbench").chmod(0o755)
    kept = {name: value for name, value in os.environ.items() if name != _triton.VARIABLE}
    env = kept | {
        "PATH": f"{bin_}{os.pathsep}{os.environ['PATH']}",
        "GITHUB_STEP_SUMMARY": str(tmp_path / "summary.md"),
    }
    folder = tmp_path / "here"

    def run(command: list[str], page: Path) -> tuple[int, str]:
        if not folder.exists():
            folder.mkdir()
            furnish(page, folder)
        process = subprocess.Popen(
            command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            said, _ = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.returncode, said[-3000:]

    return run


def furnish(page: Path, folder: Path) -> None:
    """What the page takes for granted."""
    for name, source in FILES.get(page.name, {}).items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copyfile
        copy(ROOT / source, folder / name)


def test_languages_are_known() -> None:
    """Else a block of one would be run by nobody."""
    assert {block.language for block in SHOWN} <= LANGUAGES
    fences = sum(
        line.lstrip().startswith(("```", "~~~"))
        for page in PAGES
        for line in page.read_text(encoding="utf-8").splitlines()
    )
    assert fences == 2 * len(SHOWN)


def test_every_exception_is_of_a_command() -> None:
    commands_ = [(b.page.name, c) for b in SHOWN if b.language in SHELL for c in b.commands]
    for row in APART:
        for begins in row.begins:
            assert any(page == row.page and c.startswith(begins) for page, c in commands_), begins
    assert set(FILES) | FAST | FAST_PYTHON <= {page.name for page in PAGES}


@pytest.mark.parametrize("block", tiered((b for b in SHOWN if b.language in SHELL), FAST))
def test_commands_run(block: Block, shell: Any) -> None:
    """One after the other, in one folder."""
    assert block.commands, f"{block}: holds no command; of a console those after '$ ' are run"
    for command in block.commands:
        row = apart(block, command)
        if row is None or row.how == PLANNED:
            code, said = shell(["bash", "-c", command + (" --dry-run" if row else "")], block.page)
            assert code == 0, f"{block}: {command}: {said}"
        elif row.how == GPU and environment.gpu_status().kind != "ok":
            code, said = shell(["bash", "-c", command], block.page)
            assert code == EXIT_UNAVAILABLE, f"{block}: {command}: {said}"
        else:
            for arguments in commands(command.splitlines()):
                accept(arguments)


@pytest.mark.parametrize(
    "page", tiered(dict.fromkeys(b.page for b in SHOWN if b.language == "python"), FAST_PYTHON)
)
def test_snippets_run(page: Path, shell: Any) -> None:
    """A block with imports in a fresh process; a comment that states a result states what comes out."""
    if reason := kernels.get("flash").why_unavailable(Target()):
        pytest.skip(reason)
    code, said = shell([sys.executable, str(ROOT / "tests" / "snippets.py"), str(page)], page)
    assert code == 0, said


@pytest.mark.parametrize("block", tiered((b for b in SHOWN if b.language == "toml"), {p.name for p in PAGES}))
def test_toml_is_toml(block: Block) -> None:
    assert tomllib.loads(block.text)


@pytest.mark.parametrize(
    ("line", "right"),
    [
        ("1 + 1  # 2", True), ("1 + 1  # 3", False), ("1 + 1  # a sum", True), ("0.00138  # 0.00079", False),
        ("0.000791  # 0.00079", True), ("0.000791  # 7.9e-4", True), ("0.000798  # 0.00079", False),
        ("(0.123, 'a')  # 0.12, 'a'", True), ("(0.123, 'a')  # 0.12, 'b'", False), ("(1, 2)  # 1", False),
        ("print(7)  # prints 7", True), ("print(8)  # prints 7", False), ("x = 3\nx  # 3", True),
        ("x = 3\nx  # 4", False), ("'#'  # '#'", True),
    ],
)  # fmt: skip
def test_a_comment_that_states_another_result_is_found(line: str, right: bool) -> None:
    block = Block(Path("page.md"), 1, "python", line)
    if right:
        snippets.run(block, {})
    else:
        with pytest.raises(AssertionError, match=r"page.md:\d: the comment says"):
            snippets.run(block, {})


def test_a_block_with_imports_starts_in_a_fresh_process(tmp_path: Path, shell: Any) -> None:
    """What an earlier one imported or named is not there; a block without imports goes on."""
    page = tmp_path / "page.md"

    def said(*parts: str) -> tuple[int, str]:
        page.write_text("".join(f"```python\n{part}\n```\n\n" for part in parts))
        return shell([sys.executable, str(ROOT / "tests" / "snippets.py"), str(page)], page)

    assert said("import json\nx = 1", "x  # 1\njson.dumps(x)  # '1'")[0] == 0
    assert said("import sys\nx = 1", "from os import sep\nassert sep")[0] == 0
    code, error = said("import decimal", "import sys\nassert 'decimal' in sys.modules", "x = 1")
    assert (code, "AssertionError" in error) == (1, True)
    code, error = said("x = 1", "import sys\nx", "import os")
    assert (code, "NameError" in error) == (1, True)


def test_blocks_are_found_as_they_are_written(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "```console\n$ a # why\nout\n$ b\n```\n\n1. in a list\n\n   ```sh\n   c \\\n     d\n   # e\n   ```\n"
    )
    first, second = snippets.blocks(page)
    assert (first.line, first.language, first.commands) == (2, "console", ["a # why", "b"])
    assert (second.line, second.language) == (10, "sh")
    assert [command.split() for command in second.commands] == [["c", "d"]]
