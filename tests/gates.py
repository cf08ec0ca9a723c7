"""The exact gate on a broken copy of the package: what the tests of it share."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
BASELINE = ROOT / "configs" / "baselines" / "ci-static"
OLDEST_OF_BASELINES = (3, 9)


def _why_no_baseline() -> str:
    """Why none is kept for this Triton, or empty."""
    try:
        version = metadata.version("triton")
    except metadata.PackageNotFoundError:
        return "needs Triton"
    older = tuple(map(int, version.split(".")[:2])) < OLDEST_OF_BASELINES
    return f"no baseline is kept for Triton {version}" if older else ""


with_baseline = pytest.mark.skipif(bool(_why_no_baseline()), reason=_why_no_baseline() or "there is one")


def copy_of_the_package(folder: Path, file: str, changes: dict[str, str]) -> Path:
    """A copy with texts replaced in one of its files, each of which stands there once."""
    ignored = shutil.ignore_patterns("__pycache__", "vendor")
    shutil.copytree(ROOT / "flashbench", folder / "flashbench", ignore=ignored)
    path = folder / "flashbench" / file
    text = path.read_text(encoding="utf-8")
    for old, new in changes.items():
        assert text.count(old) == 1, f"{file} holds {text.count(old)} times {old!r}"
        text = text.replace(old, new)
    path.write_text(text, encoding="utf-8")
    return folder


def gate(package: Path, config: str, out: Path) -> tuple[int, str]:
    """Exit code and stderr of the gate as the package in that folder measures it."""
    file = out.with_suffix(".toml")
    file.write_text(config, encoding="utf-8")
    before = os.environ.get("PYTHONPATH")
    command = [sys.executable, "-W", "ignore", "-m", "flashbench", "gate"]
    done = subprocess.run(
        [*command, "--config", str(file), "--out", str(out)],
        capture_output=True, text=True, check=False, cwd=package,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(package), *([before] if before else [])])},
    )  # fmt: skip
    return done.returncode, done.stderr
