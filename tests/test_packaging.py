"""What is shipped: one version, a wheel with every file of the package, that runs where nothing else is."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path, PurePosixPath

import pytest
import yaml

import flashbench

ROOT = Path(__file__).resolve().parent.parent


def test_the_version_stands_in_one_place() -> None:
    """Others take it from there, or are held to it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    assert "version" in project["project"]["dynamic"]
    assert project["tool"]["hatch"]["version"]["path"] == "flashbench/__init__.py"
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["version"] == flashbench.__version__
    assert cited["license"] == project["project"]["license"]


def test_the_citation_has_what_its_format_asks() -> None:
    """Citation File Format 1.2.0: these are required, and a person or entity has a name."""
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert cited["cff-version"] == "1.2.0"
    assert {"message", "title", "authors"} <= cited.keys()
    assert all(author.keys() & {"name", "family-names"} for author in cited["authors"])


def test_the_image_has_the_torch_that_is_tested() -> None:
    pinned = [re.search(pattern, (ROOT / name).read_text(encoding="utf-8"), flags=re.MULTILINE)
              for name, pattern in (("Dockerfile", r"^ARG TORCH=(.+)$"),
                                    ("Makefile", r"^TORCH \?= (.+)$"))]  # fmt: skip
    assert all(pinned)
    assert len({one[1] for one in pinned if one}) == 1


BASES = {"ubuntu22.04": (3, 10), "ubuntu24.04": (3, 12)}
"""The Python of a base image's system, which its venv has."""


def test_the_image_can_be_made_of_what_it_is_given() -> None:
    """Nobody builds it here: its system's Python is new enough, what it copies is where the wheel is made and
    is not kept from the builder, and nothing else is sent there.
    """
    lines = (ROOT / "Dockerfile").read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    steps = [line.split() for line in lines if line and not line.startswith("#")]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    [base] = [step[1] for step in steps if step[0] == "FROM"]
    oldest = tuple(map(int, project["requires-python"].removeprefix(">=").split(".")))
    assert BASES[base.rpartition("-")[2]] >= oldest
    [copied] = [step[1:] for step in steps if step[0] == "COPY"]
    wheel = f"dist/{project['name']}-{flashbench.__version__}-py3-none-any.whl"
    assert PurePosixPath(wheel).match(copied[0])
    assert copied[1].endswith("/")  # else one wheel would be a file of that name
    assert sent(wheel)
    assert not any(map(sent, ("pyproject.toml", ".venv/bin/python", "dist/x.tar.gz", "out/results.jsonl")))
    made = next(line for line in lines if "docker build" in line)
    assert "python -m build --wheel" in made  # which writes to dist/
    [entry] = [json.loads(" ".join(step[1:])) for step in steps if step[0] == "ENTRYPOINT"]
    assert set(entry) <= set(project["scripts"])


def sent(path: str) -> bool:
    """Whether .dockerignore leaves a file to the builder: the last pattern decides that fits it or a folder
    that it is in.
    """
    left = True
    for pattern in (ROOT / ".dockerignore").read_text(encoding="utf-8").split():
        here = [PurePosixPath(path), *PurePosixPath(path).parents][:-1]
        full = pattern.removeprefix("!")
        if any(len(one.parts) == len(PurePosixPath(full).parts) and one.match(full) for one in here):
            left = pattern.startswith("!")
    return left


@pytest.mark.slow
def test_a_wheel_has_every_file_and_runs_alone(tmp_path: Path) -> None:
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path, ROOT], check=True)
    [wheel] = tmp_path.glob("*.whl")
    assert wheel.name.startswith(f"flashbench-{flashbench.__version__}-py3")
    listed = subprocess.run(["git", "ls-files", "flashbench"], cwd=ROOT, capture_output=True, text=True)
    held = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    if not listed.returncode:
        page = f"flashbench-{flashbench.__version__}.data/data/share/man/man1/flashbench.1"
        assert held == {*listed.stdout.splitlines(), "flashbench/claims.toml", page}
    there = tmp_path / "there"
    subprocess.run([*pip, "install", "--quiet", "--no-deps", "--target", there, wheel], check=True)
    for arguments in (["--help"], ["io-model", "--sram", "192KB"], ["new-impl", "mine.py"], ["claims"]):
        code = f"import sys; sys.path.insert(0, {str(there)!r}); from flashbench import cli; " + (
            f"assert cli.__file__.startswith({str(there)!r}); cli.main({arguments!r})"
        )
        done = subprocess.run(
            [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, env={}
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout or "mine.py" in done.stderr
    assert (tmp_path / "mine.py").is_file()
