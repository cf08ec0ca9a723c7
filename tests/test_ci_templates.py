"""The workflow files under docs/ci are YAML of the right shape, and every command in them is accepted."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
from command_lines import accept, commands
from gates import ROOT

yaml = pytest.importorskip("yaml")

FOLDER = ROOT / "docs" / "ci"
GITHUB = sorted(FOLDER.glob("github-*.yml"))
GITLAB = FOLDER / "gitlab-ci.yml"
TEXTS = [
    *GITHUB,
    GITLAB,
    ROOT / "docs" / "ci.md",
    ROOT / "configs" / "ci.toml",
    ROOT / "configs" / "ci-static.toml",
]


def document(path: Path) -> dict[str, Any]:
    found = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert isinstance(found, dict)
    return found


def scripts(path: Path) -> list[str]:
    """Every line that a runner's shell runs."""
    found = document(path)
    if path == GITLAB:
        jobs = [job for name, job in found.items() if isinstance(job, dict)]
        return [line for job in jobs for part in ("before_script", "script") for line in job.get(part, [])]
    steps = [step for job in found["jobs"].values() for step in job["steps"]]
    return [line for step in steps for line in step.get("run", "").splitlines()]


def shell_of(path: Path) -> list[str]:
    """The lines of shell in a file: of a workflow, of a text's blocks, of a config's comments."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".yml":
        return scripts(path)
    if path.suffix == ".toml":
        return re.findall(r"^#   (.*)$", text, re.MULTILINE)
    blocks = re.findall(r"```sh\n(.*?)```", text, flags=re.DOTALL)
    return "\n".join(blocks).splitlines() + re.findall(r"`(flashbench [^`]+ [^`]+)`", text)


@pytest.mark.parametrize("path", TEXTS, ids=lambda path: path.name)
def test_every_command_is_accepted_and_its_files_are_there(path: Path) -> None:
    found = list(commands(shell_of(path)))
    assert len(found) >= 2
    for arguments in found:
        accept(arguments)
        for name in re.findall(r"configs/[\w./-]+", " ".join(arguments)):
            assert (ROOT / name).exists(), name


def read_by(path: Path) -> set[str]:
    """The files and folders of the repository that a workflow's lines of shell name."""
    return set(re.findall(r"configs/[\w./-]+", "\n".join(scripts(path))))


def not_named(files: set[str], text: str) -> set[str]:
    """Those of the files that a text names neither themselves nor by a folder around them."""
    named = re.findall(r"configs/[\w./-]*[\w/]", text)
    folders = tuple(name for name in named if name.endswith("/"))
    return {file for file in files if file not in named and not file.startswith(folders)}


@pytest.mark.parametrize("path", [*GITHUB, GITLAB], ids=lambda path: path.name)
def test_what_a_workflow_reads_is_named_in_its_head_and_in_the_docs(path: Path) -> None:
    """Who copies what these name has a job that runs."""
    text = path.read_text(encoding="utf-8")
    head = text[: re.search(r"^[^#]", text, re.MULTILINE).start()]  # type: ignore[union-attr]
    page = (ROOT / "docs" / "ci.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^ *\| `{path.name}` \|(.*)$", page, re.MULTILINE)
    files = read_by(path)
    assert files
    assert not_named(files, head) == set()
    assert not_named(files, row) == set()
    for name in re.findall(r"configs/[\w./-]+\.toml", head + row):
        assert name in files, f"{path.name} does not read {name}"


@pytest.mark.parametrize("name", ["ci.toml", "noise.toml"])
def test_a_timed_gate_names_its_method(name: str) -> None:
    """As docs/method.md advises: ``auto`` may differ between runs, which ``compare`` then refuses."""
    config = tomllib.loads((ROOT / "configs" / name).read_text(encoding="utf-8"))
    assert config["timing"] == "events"


def test_a_file_that_is_not_named_is_seen() -> None:
    files = {"configs/smoke.toml", "configs/baselines/ci-static"}
    assert not_named(files, "# Needs configs/baselines/ and configs/ci.toml.") == {"configs/smoke.toml"}
    assert not_named(files, "# Needs configs/smoke.toml.") == {"configs/baselines/ci-static"}


def test_a_line_that_is_wrong_is_seen() -> None:
    for line in ("compare a b --bse x", "baseline sve x", "gate --out x", "run --config"):
        with pytest.raises(Exception, match=r"No such (option|command)|Missing|requires an argument|sve"):
            accept(shlex.split(line))
    assert list(commands(["git bisect run flashbench bisect --base x -- flashbench run --out {out}"])) == [
        ["bisect", "--base", "x", "--", "flashbench", "run", "--out", "{out}"], ["run", "--out", "{out}"]
    ]  # fmt: skip


@pytest.mark.parametrize("path", GITHUB, ids=lambda path: path.name)
def test_github_workflows_have_what_a_workflow_needs(path: Path) -> None:
    found = document(path)
    assert {"name", True, "permissions", "jobs"} <= set(found)  # YAML 1.1 reads 'on' as true
    for job in found["jobs"].values():
        assert {"runs-on", "timeout-minutes", "steps"} <= set(job)
        for step in job["steps"]:
            assert ("run" in step) != ("uses" in step), step
            assert re.fullmatch(r"actions/[\w/-]+@v\d+", step.get("uses", "actions/x@v1"))
        uploads = [step for step in job["steps"] if "upload-artifact" in step.get("uses", "")]
        assert [step["if"] for step in uploads] == ["always()"]


def test_piped_comparisons_keep_their_exit_code() -> None:
    for path in GITHUB:
        for step in (step for job in document(path)["jobs"].values() for step in job["steps"]):
            if "| tee" in step.get("run", ""):
                assert "set -o pipefail" in step["run"]


def test_gitlab_jobs_extend_what_is_there() -> None:
    found = document(GITLAB)
    for name, job in found.items():
        if isinstance(job, dict):
            assert job.get("extends", name) in found
            assert name.startswith(".") or job["script"]


def test_versions_are_those_of_this_repository() -> None:
    """The baseline belongs to one Triton, and torch decides which."""
    (wanted,) = re.findall(
        r"^TORCH \?= (\S+)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE
    )
    for path in (*GITHUB, GITLAB):
        assert set(re.findall(r"torch==([\d.]+)", path.read_text(encoding="utf-8"))) == {wanted}
